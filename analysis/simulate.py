"""A discrete-event simulation of a training step, in its steady state.

One stream computes and is also the host that launches and waits. Reductions run one after the other
on the link, and so do gathers; where one of each is active they share it, each at half its speed.
While anything is on the link, compute is slower by the problem's contention. What the optimizer's
step leaves in flight runs on into the next step: a step is simulated again and again until it ends
as it began.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxcomm.analysis.costs import Schedule, StepProblem
from fxcomm.analysis.timeline import COMPUTE_ROW, GATHER_ROW, REDUCE_ROW, Span

_REPEATS = 1e-9  # relative: two steps that are equal
_MOST_STEPS = 16


@dataclass(frozen=True)
class SimulatedStep:
    """A step in its steady state, in seconds. ``exposed`` is the time in which compute stands in
    waits: for the reduction and the gather of each bucket (``exposed_reduce``, ``exposed_gather``)
    and for the norm of all gradients. ``link_idle`` is the time in which nothing is on the link,
    ``peak_bytes`` the most memory that reductions hold in flight.

    ``timeline`` begins with the forward and holds one step's length of every row: a gather that is
    started in this step and ends in the next one is at the end of its row, and its like from the
    step before at the beginning.
    """

    seconds: float
    exposed_reduce: tuple[float, ...]
    exposed_gather: tuple[float, ...]
    exposed_norm: float
    link_idle: float
    peak_bytes: float
    timeline: tuple[Span, ...] = ()

    @property
    def exposed(self) -> float:
        """Seconds in which compute stands in waits."""
        return math.fsum((*self.exposed_reduce, *self.exposed_gather, self.exposed_norm))


def simulate(problem: StepProblem, schedule: Schedule) -> SimulatedStep:
    """The step that ``schedule`` makes of ``problem``, with its timeline.

    It is found by simulating step after step from an idle link; all that a step hands to the next
    are gathers on the link. If steps do not repeat to within 1e-9 of each other (they may alternate
    between two states, as queues do), the last of 16 is returned.
    """
    return _steady(problem, schedule, keeps_timeline=True)


def step_seconds(problem: StepProblem, schedule: Schedule) -> float:
    """The length of :func:`simulate`'s step."""
    return _steady(problem, schedule, keeps_timeline=False).seconds


def _steady(problem: StepProblem, schedule: Schedule, keeps_timeline: bool) -> SimulatedStep:
    machine = _Machine(_Prepared.of(problem, schedule), keeps_timeline)
    state, length = machine.carried(), -1.0
    for _ in range(_MOST_STEPS):
        seconds = machine.run_step()
        known, state = state, machine.carried()
        if _equal(length, seconds) and _all_equal(known, state):
            break
        length = seconds
    return machine.result()


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= _REPEATS * max(abs(a), abs(b))


def _all_equal(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


# --- what happens when, by compute time -----------------------------------------------------------

# What a machine does at a place: (seconds of compute into the phase, action, bucket).
_LAUNCH, _UPDATE, _FINISH_GATHER = range(3)
_Place = tuple[float, int, int]


@dataclass(frozen=True)
class _Prepared:
    """A problem under a schedule: what each bucket costs, and what is done at which place."""

    problem: StepProblem
    schedule: Schedule
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    update: tuple[float, ...]
    held: tuple[float, ...]
    forward: tuple[_Place, ...]
    backward: tuple[_Place, ...]

    @classmethod
    def of(cls, problem: StepProblem, schedule: Schedule) -> _Prepared:
        sizes = schedule.bucket_bytes(problem)
        uses = _first_uses(problem, schedule)
        per_byte, latency = problem.update_per_byte, problem.update_latency
        return cls(
            problem,
            schedule,
            tuple(map(problem.reduce.seconds, sizes)),
            tuple(map(problem.gather.seconds, sizes)),
            tuple(latency + per_byte * nbytes for nbytes in sizes),
            tuple(problem.held * nbytes for nbytes in sizes),
            tuple(place for place in uses if place[0] <= problem.forward),
            _backward_places(problem, schedule, uses),
        )


def _first_uses(problem: StepProblem, schedule: Schedule) -> list[_Place]:
    """Where compute first needs each bucket, counted from the forward's beginning."""
    tensors = problem.tensors
    needed = (
        min((tensors[piece.tensor].needed for piece in bucket), default=math.inf)
        for bucket in schedule.buckets
    )
    places = [(time, _FINISH_GATHER, b) for b, time in enumerate(needed) if time < math.inf]
    return sorted(places)


def _backward_places(
    problem: StepProblem, schedule: Schedule, uses: Sequence[_Place]
) -> tuple[_Place, ...]:
    """Launches, updates and what is first used here, in order. A bucket is launched when its last
    gradient is ready and the bucket before it was; it is updated here when nothing reads its old
    values any more."""
    tensors = problem.tensors
    launched = reached = 0.0
    launches: list[float] = []
    for bucket in schedule.buckets:
        launched = max([launched, *(tensors[piece.tensor].ready for piece in bucket)])
        launches.append(launched)
    keyed = [((time, b, 0), _LAUNCH, b) for b, time in enumerate(launches)]
    for b, after in enumerate(schedule.update_after):
        reads = (tensors[piece.tensor].last_read for piece in schedule.buckets[b])
        reached = max([reached, launches[after], *reads])
        keyed.append(((reached, after, 1), _UPDATE, b))
    for time, action, b in uses:
        if time > problem.forward:
            keyed.append(((min(time - problem.forward, problem.backward), -1, 0), action, b))
    return tuple((key[0], action, b) for key, action, b in sorted(keyed))


# --- the machine ----------------------------------------------------------------------------------


@dataclass
class _Line:
    """Collectives of one kind: those waiting for the link, the first of them active."""

    row: str
    buckets: deque[int] = field(default_factory=deque)
    left: deque[float] = field(default_factory=deque)  # seconds of the link for each
    pending: set[int] = field(default_factory=set)  # the same buckets
    began: float = 0.0  # when the active one became active


class _Machine:
    """The compute stream and the link, at a moment of ``now`` seconds into the step."""

    def __init__(self, prepared: _Prepared, keeps_timeline: bool) -> None:
        self._at = prepared
        self._keeps_timeline = keeps_timeline
        self._lines = (_Line(REDUCE_ROW), _Line(GATHER_ROW))
        self._begin()

    def _begin(self) -> None:
        count = len(self._at.schedule.buckets)
        self._now = 0.0
        self._spans: list[Span] = []
        self._idle = 0.0
        self._exposed = ([0.0] * count, [0.0] * count)
        self._norm = 0.0
        self._unwaited: dict[int, None] = {}  # in order of launch
        self._holds = self._peak = 0.0
        for line in self._lines:
            line.began = 0.0

    def carried(self) -> tuple[float, ...]:
        """What is on the link: all that a step hands to the next."""
        return tuple(self._lines[1].left)

    def result(self) -> SimulatedStep:
        """The last step that ran."""
        reduce, gather = map(tuple, self._exposed)
        spans = tuple(sorted(self._spans, key=lambda span: span.start))
        return SimulatedStep(self._now, reduce, gather, self._norm, self._idle, self._peak, spans)

    def run_step(self) -> float:
        """Runs one step and returns its seconds."""
        self._begin()
        problem = self._at.problem
        self._phase("forward", problem.forward, self._at.forward)
        self._phase("backward", problem.backward, self._at.backward)
        start = self._now
        self._optimizer_step()
        self._note(COMPUTE_ROW, "step", None, start)
        for line in self._lines:
            if line.buckets:
                self._note(line.row, line.row, line.buckets[0], line.began)
        return self._now

    def _phase(self, name: str, seconds: float, places: Sequence[_Place]) -> None:
        start, done = self._now, 0.0
        actions = (self._launch_reduce, self._update_in_backward, self._finish_gather)
        for place, action, bucket in places:
            self._compute(place - done)
            done = place
            actions[action](bucket)
        self._compute(seconds - done)
        self._note(COMPUTE_ROW, name, None, start)

    def _optimizer_step(self) -> None:
        schedule, problem = self._at.schedule, self._at.problem
        early = len(schedule.update_after)
        if not early:
            self._finish_gathers()
        self._compute(problem.between)
        if problem.norm is not None:
            for bucket in range(early, len(schedule.buckets)):
                self._finish_reduce(bucket)
            start = self._now
            self._pass_time(problem.norm)
            self._norm = self._now - start
            self._note(COMPUTE_ROW, "wait for norm", None, start)
        for bucket in schedule.gather_order[early:]:
            self._update(bucket)
        if not schedule.commshift:
            self._finish_gathers()

    # --- actions ---

    def _launch_reduce(self, bucket: int) -> None:
        limit, nbytes = self._at.schedule.in_flight_bytes, self._at.held[bucket]
        while limit is not None and self._unwaited and self._holds + nbytes > limit:
            self._finish_reduce(next(iter(self._unwaited)))
        self._launch(0, bucket, self._at.reduce[bucket])
        self._unwaited[bucket] = None
        self._holds += nbytes
        self._peak = max(self._peak, self._holds)

    def _finish_reduce(self, bucket: int) -> None:
        if bucket in self._unwaited:
            self._wait(0, bucket)
            del self._unwaited[bucket]
            self._holds -= self._at.held[bucket]

    def _update_in_backward(self, bucket: int) -> None:
        if bucket == 0:  # begins the optimizer's step
            self._finish_gathers()
        self._update(bucket)

    def _update(self, bucket: int) -> None:
        self._finish_reduce(bucket)
        start = self._now
        self._compute(self._at.update[bucket])
        self._note(COMPUTE_ROW, "update", bucket, start)
        self._launch(1, bucket, self._at.gather[bucket])

    def _finish_gather(self, bucket: int) -> None:
        self._wait(1, bucket)

    def _finish_gathers(self) -> None:
        for bucket in list(self._lines[1].buckets):
            self._wait(1, bucket)

    def _launch(self, kind: int, bucket: int, seconds: float) -> None:
        self._pass_time(self._at.problem.launch)
        line = self._lines[kind]
        if not line.buckets:
            line.began = self._now
        line.buckets.append(bucket)
        line.left.append(seconds)
        line.pending.add(bucket)

    # --- time ---

    def _compute(self, seconds: float) -> None:
        """Computes for ``seconds`` of undisturbed work."""
        slow, reduces, gathers = self._at.problem.contention, *self._lines
        while seconds > 0:
            if not (reduces.left or gathers.left):
                self._idle += seconds
                self._now += seconds
                return
            ends = self._next_end()
            passed = min(ends, seconds * slow)
            seconds = 0.0 if passed < ends else seconds - passed / slow
            self._move_link(passed, passed == ends)

    def _wait(self, kind: int, bucket: int) -> None:
        """Stands still until a collective is done."""
        start, line = self._now, self._lines[kind]
        while bucket in line.pending:
            self._move_link(self._next_end(), True)
        if self._now > start:
            self._exposed[kind][bucket] += self._now - start
            self._note(COMPUTE_ROW, f"wait for {line.row}", bucket, start)

    def _pass_time(self, seconds: float) -> None:
        """Lets time pass in which nothing is computed."""
        while seconds > 0:
            ends = self._next_end()
            passed = min(ends, seconds)
            if ends == math.inf:
                self._idle += passed
            self._move_link(passed, passed == ends)
            seconds -= passed

    def _next_end(self) -> float:
        """Seconds until an active collective ends, at the link's present shares."""
        reduces, gathers = self._lines
        if reduces.left and gathers.left:
            return 2 * min(reduces.left[0], gathers.left[0])
        active = reduces.left or gathers.left
        return active[0] if active else math.inf

    def _move_link(self, seconds: float, ends: bool) -> None:
        """Lets ``seconds`` pass, in which at most the active collectives end, and do if ``ends``
        says that they are the time until the first of them does."""
        reduces, gathers = self._lines
        both = bool(reduces.left and gathers.left)
        work = seconds / 2 if both else seconds
        first = min((line.left[0] for line in self._lines if line.left), default=math.inf)
        self._now += seconds
        for line in self._lines:
            if not line.left:
                continue
            if ends and line.left[0] == first:
                bucket = line.buckets.popleft()
                line.left.popleft()
                line.pending.remove(bucket)
                self._note(line.row, line.row, bucket, line.began)
                line.began = self._now
            else:
                line.left[0] -= work

    def _note(self, row: str, kind: str, bucket: int | None, start: float) -> None:
        if self._keeps_timeline:
            self._spans.append(Span(row, kind, bucket, start, self._now))
