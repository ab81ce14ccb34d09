"""Search for a schedule: bucket edges, cuts inside tensors, the order of gathers, the place of
updates and the limit of memory in flight.

It starts from the named baselines, from buckets of equal size, small at the ends where nothing
hides them, and from two exact dynamic programs for parts of the problem; then changes the best one
step by step. Small problems are searched exhaustively instead.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fxcomm.analysis.baselines import NAMES, Buckets, baseline, cut_at, tensor_starts
from fxcomm.analysis.bounds import Bound, gap, lower_bound
from fxcomm.analysis.costs import Piece, Schedule, StepProblem, by_first_use, whole_tensors
from fxcomm.analysis.simulate import step_seconds

PROVEN = 1e-3
"""A gap to the bound at which a schedule counts as optimal."""

# Where buckets may end, if all places are tried: with every order of gathers, or in order of use.
_PLACES_WITH_ORDERS, _PLACES = 4, 10
_MOST_EQUAL_BUCKETS = 150  # to start from; more cost more to simulate than they are worth
_COOLING = 0.997  # of simulated annealing, per evaluation
_START_TEMPERATURE = 0.01  # of the step: how much worse a change may be at first


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found and its step in ``seconds``; ``baselines`` are those of the named
    ones. ``optimal`` says that nothing better is possible: all partitions and orders were tried, or
    the bound is reached to within 0.1%."""

    schedule: Schedule
    seconds: float
    bound: Bound
    optimal: bool
    evaluations: int
    baselines: Mapping[str, float]

    @property
    def gap(self) -> float:
        """By which part the schedule is above the bound."""
        return gap(self.seconds, self.bound)


@dataclass(frozen=True)
class Limits:
    """What a schedule may do: memory in flight in bytes (None: any), updates ``in_backward``,
    gathers beyond the step (``commshift``), tensors cut at multiples of ``grain`` elements (0: not
    cut at all)."""

    in_flight_bytes: int | None = None
    in_backward: bool = False
    commshift: bool = True
    grain: int = 1024


_ANYTHING = Limits()


def search(
    problem: StepProblem,
    limits: Limits = _ANYTHING,
    *,
    seed: int = 0,
    budget_s: float = 1.0,
    evaluations: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The best schedule that is found in ``budget_s`` seconds or ``evaluations`` simulations.

    With a number of evaluations that the budget allows, equal arguments give equal results. It is
    never worse than the best named baseline.
    """
    updates = limits.in_backward and problem.norm is None
    limits = replace(limits, in_backward=updates)
    bound = lower_bound(problem, in_backward=updates)
    run = _Run(problem, bound, clock() + budget_s, evaluations, clock)
    named = {name: run.evaluate(_baseline(name, problem, limits)) for name in NAMES}
    places = len(problem.tensors) - 1 - len(problem.borders)
    small = not limits.grain and not limits.in_backward
    tried_all = False
    if small and places <= _PLACES:
        done = run.try_all(_all_merges(problem, limits, orders=places <= _PLACES_WITH_ORDERS))
        tried_all = done and places <= _PLACES_WITH_ORDERS
    if not tried_all:
        run.try_all(_seeds(problem, limits))
        _anneal(run, limits, random.Random(seed))
    assert run.best is not None
    proven = tried_all or gap(run.seconds, bound) <= PROVEN
    return SearchResult(run.best, run.seconds, bound, proven, run.evaluations, named)


@dataclass
class _Run:
    """A search under way: the best so far, and when to stop."""

    problem: StepProblem
    bound: Bound
    deadline: float
    most_evaluations: int | None
    clock: Callable[[], float]
    best: Schedule | None = None
    seconds: float = math.inf
    evaluations: int = 0
    known: dict[Schedule, float] = field(default_factory=dict)

    def evaluate(self, schedule: Schedule) -> float:
        """The schedule's step; remembered if it is the best."""
        seconds = self.known.get(schedule)
        if seconds is None:
            seconds = self.known[schedule] = step_seconds(self.problem, schedule)
            self.evaluations += 1
        if seconds < self.seconds:
            self.best, self.seconds = schedule, seconds
        return seconds

    @property
    def over(self) -> bool:
        """Whether the search has to stop, or can."""
        spent = self.most_evaluations is not None and self.evaluations >= self.most_evaluations
        return spent or self.seconds <= self.bound.seconds * 1.0001 or self.clock() > self.deadline

    def try_all(self, schedules: Iterable[Schedule]) -> bool:
        """Evaluates all, or until it has to stop; whether it came to the end."""
        for schedule in schedules:
            if self.over:
                return False
            self.evaluate(schedule)
        return True


# --- schedules to start from ----------------------------------------------------------------------


def _baseline(name: str, problem: StepProblem, limits: Limits) -> Schedule:
    return baseline(
        name, problem, in_flight_bytes=limits.in_flight_bytes, commshift=limits.commshift
    )


def _schedule(problem: StepProblem, buckets: Buckets, limits: Limits, updated: int = 0) -> Schedule:
    """Buckets gathered in order of use, the first ``updated`` of them updated in the backward."""
    order = by_first_use(problem, buckets)
    made = Schedule(buckets, order, limits.in_flight_bytes, commshift=limits.commshift)
    return _updating(made, updated, lag=2) if updated else made


def _updating(schedule: Schedule, count: int, lag: int) -> Schedule:
    """The first ``count`` buckets updated in the backward, each ``lag`` launches after its own."""
    last = len(schedule.buckets) - 1
    places = tuple(min(b + lag, last) for b in range(min(count, last + 1)))
    others = tuple(b for b in schedule.gather_order if b >= len(places))
    return replace(schedule, update_after=places, gather_order=(*range(len(places)), *others))


def _all_merges(problem: StepProblem, limits: Limits, orders: bool) -> Iterator[Schedule]:
    """Every way to merge neighbours, gathered in order of use, or in all ``orders``."""
    inner = [i for i in range(1, len(problem.tensors)) if i not in problem.borders]
    for count in range(len(inner) + 1):
        for edges in itertools.combinations(inner, count):
            buckets = whole_tensors(problem, [*edges, *problem.borders])
            made = _schedule(problem, buckets, limits)
            yield made
            if orders:
                for order in itertools.permutations(range(len(buckets))):
                    yield replace(made, gather_order=order)


def _seeds(problem: StepProblem, limits: Limits) -> Iterator[Schedule]:
    yield _schedule(problem, whole_tensors(problem, fewest_late_reductions(problem)), limits)
    yield _schedule(problem, whole_tensors(problem, latest_gathers(problem)), limits)
    for places in _graded(problem.nbytes):
        buckets = cut_at(problem, places) if limits.grain else _at_edges(problem, places)
        yield _schedule(problem, buckets, limits)
        if limits.in_backward:
            for part in (0.5, 0.8, 1.0):
                yield _schedule(problem, buckets, limits, round(part * len(buckets)))


def _graded(total: int) -> Iterator[list[float]]:
    """Places (bytes) that cut ``total`` into equal buckets, and into such with smaller ones at the
    end, at the beginning, or both."""
    counts = {round(2 ** (exponent / 2)) for exponent in range(40)}
    for count in sorted(count for count in counts if count <= _MOST_EQUAL_BUCKETS):
        size = total / count
        equal = [size * i for i in range(1, count)]
        for ends in ((), (total,), (0,), (0, total)):
            finer = [abs(end - size / 2**k) for end in ends for k in range(1, 4)]
            yield sorted({*equal, *finer})


def _at_edges(problem: StepProblem, places: Iterable[float]) -> Buckets:
    """Buckets of whole tensors that end near ``places``."""
    starts = tensor_starts(problem)
    edges = {min(range(len(starts)), key=lambda i: abs(starts[i] - place)) for place in places}
    return whole_tensors(problem, [*edges, *problem.borders])


def fewest_late_reductions(problem: StepProblem) -> tuple[int, ...]:
    """Edges (tensor numbers) of the merges with which the last reduction ends first, if nothing but
    reductions is on the link and compute is not held up: exact, by dynamic programming. With
    ``f(k)`` the earliest end of the reductions of the first ``k`` tensors,
    ``f(k) = min over j of max(f(j), ready(k)) + seconds(bytes from j to k)``: an earlier end of a
    part is never worse.
    """
    ready = [tensor.ready for tensor in problem.tensors]
    return _merge(problem, ready, lambda nbytes: problem.reduce.seconds(nbytes) + problem.launch)


def latest_gathers(problem: StepProblem) -> tuple[int, ...]:
    """Edges of the merges with which gathers in the reverse of production order may start latest
    and still hold up nothing: the same program with time reversed, where a bucket must be there
    when its first tensor is needed."""
    latest = [-min(t.needed, problem.compute) for t in problem.tensors]
    late = list(itertools.accumulate(latest, max))
    return _merge(problem, late, problem.gather.seconds)


def _merge(
    problem: StepProblem, ready: Sequence[float], cost: Callable[[float], float]
) -> tuple[int, ...]:
    starts = tensor_starts(problem)
    ends, cut = [-math.inf], [0]
    for k in range(1, len(starts)):
        first = max((border for border in problem.borders if border < k), default=0)
        options = (
            (max(ends[j], ready[k - 1]) + cost(starts[k] - starts[j]), -j) for j in range(first, k)
        )
        end, j = min(options)
        ends.append(end)
        cut.append(-j)
    edges, k = [], len(starts) - 1
    while k > 0:
        k = cut[k]
        edges.append(k)
    return tuple(sorted(edge for edge in edges if edge))


# --- changing a schedule --------------------------------------------------------------------------


def _anneal(run: _Run, limits: Limits, rng: random.Random) -> None:
    """Simulated annealing (Kirkpatrick et al. 1983) from the best schedule so far, begun again from
    the best whenever it has cooled down."""
    moves = _Moves(run.problem, limits, rng)
    while not run.over:
        assert run.best is not None
        current, seconds = run.best, run.seconds
        temperature, idle = _START_TEMPERATURE * seconds, 0
        while not run.over and temperature > 1e-5 * seconds and idle < 200:
            changed = moves.change(current)
            if changed is None:
                idle += 1
                continue
            known = run.evaluations
            found = run.evaluate(changed)
            idle = idle + 1 if run.evaluations == known else 0
            temperature *= _COOLING
            worse = found - seconds
            if worse <= 0 or rng.random() < math.exp(-worse / temperature):
                current, seconds = changed, found
        if idle >= 200:
            return  # a space so small that it has been seen


class _Moves:
    """Random changes of a schedule within limits."""

    def __init__(self, problem: StepProblem, limits: Limits, rng: random.Random) -> None:
        self._problem = problem
        self._limits = limits
        self._rng = rng
        self._starts = tensor_starts(problem)
        self._borders = {(border, 0) for border in problem.borders}

    def change(self, schedule: Schedule) -> Schedule | None:
        """``schedule`` with one thing changed; None if what was to be changed is not there."""
        kinds = [self._move_edge] * 4 + [self._add_edge] * 2 + [self._remove_edge] * 2
        kinds += [self._reorder, self._limit]
        if self._limits.in_backward:
            kinds += [self._place_updates] * 2
        return self._rng.choice(kinds)(schedule)

    def _edges(self, schedule: Schedule) -> list[tuple[int, int]]:
        return [(bucket[0].tensor, bucket[0].start) for bucket in schedule.buckets[1:]]

    def _with_edges(self, schedule: Schedule, edges: set[tuple[int, int]]) -> Schedule:
        buckets = buckets_between(self._problem, edges | self._borders)
        if len(buckets) == len(schedule.buckets):
            order, places = schedule.gather_order, schedule.update_after
        else:
            order, places = by_first_use(self._problem, buckets), ()
        changed = replace(schedule, buckets=buckets, gather_order=order, update_after=places)
        if schedule.update_after and not places:
            lag = schedule.update_after[0]
            count = round(len(schedule.update_after) / len(schedule.buckets) * len(buckets))
            changed = _updating(changed, max(1, count), lag)
        return changed

    def _some_edge(self) -> tuple[int, int]:
        """The edge of a tensor or, in proportion to its bytes, a place inside one."""
        tensors, grain = self._problem.tensors, self._limits.grain
        if not grain or self._rng.random() < 0.6:
            return self._rng.randrange(len(tensors)), 0
        return self._place(self._rng.random() * self._starts[-1])

    def _place(self, nbytes: float) -> tuple[int, int]:
        """The place so many bytes from the beginning."""
        nbytes = min(max(0.0, nbytes), self._starts[-1] - 1)
        tensor = bisect.bisect_right(self._starts, nbytes) - 1
        grain = self._limits.grain
        if not grain:
            return tensor, 0
        element = int((nbytes - self._starts[tensor]) / self._problem.tensors[tensor].itemsize)
        return tensor, element // grain * grain

    def _add_edge(self, schedule: Schedule) -> Schedule | None:
        edges = self._edges(schedule)
        return self._with_edges(schedule, {*edges, self._some_edge()})

    def _remove_edge(self, schedule: Schedule) -> Schedule | None:
        edges = self._edges(schedule)
        if not edges:
            return None
        edges.remove(self._rng.choice(edges))
        return self._with_edges(schedule, set(edges))

    def _move_edge(self, schedule: Schedule) -> Schedule | None:
        edges = self._edges(schedule)
        if not edges:
            return None
        edge = edges.pop(self._rng.randrange(len(edges)))
        tensor, element = edge
        if self._rng.random() < 0.5:
            moved = (max(0, min(tensor + self._rng.choice((-1, 1)), len(self._starts) - 2)), 0)
        else:
            here = self._starts[tensor] + element * self._problem.tensors[tensor].itemsize
            size = self._starts[-1] / (len(edges) + 2)
            moved = self._place(here + self._rng.gauss(0, 0.3) * size)
        return self._with_edges(schedule, {*edges, moved})

    def _reorder(self, schedule: Schedule) -> Schedule | None:
        order, early = list(schedule.gather_order), len(schedule.update_after)
        if len(order) - early < 2:
            return None
        if self._rng.random() < 0.3:
            by_use = by_first_use(self._problem, schedule.buckets)
            order[early:] = [b for b in by_use if b >= early]
        else:
            bucket = order.pop(self._rng.randrange(early, len(order)))
            order.insert(self._rng.randrange(early, len(order) + 1), bucket)
        return replace(schedule, gather_order=tuple(order))

    def _limit(self, schedule: Schedule) -> Schedule | None:
        """Half or double the memory in flight, within the limit."""
        most = self._limits.in_flight_bytes
        limit = schedule.in_flight_bytes or int(self._problem.held * self._starts[-1])
        limit = limit // 2 if self._rng.random() < 0.5 else limit * 2
        limit = limit if most is None else min(limit, most)
        if most is None and limit > self._problem.held * self._starts[-1]:
            return replace(schedule, in_flight_bytes=None)
        return replace(schedule, in_flight_bytes=max(1, limit))

    def _place_updates(self, schedule: Schedule) -> Schedule | None:
        count = len(schedule.update_after) + self._rng.choice((-4, -2, -1, 0, 1, 2, 4))
        count = min(max(0, count), len(schedule.buckets))
        lag = (schedule.update_after or (2,))[0] + self._rng.choice((-1, 0, 1))
        by_use = replace(schedule, gather_order=by_first_use(self._problem, schedule.buckets))
        return _updating(by_use, count, max(0, lag))


def buckets_between(problem: StepProblem, edges: Iterable[tuple[int, int]]) -> Buckets:
    """Buckets that end at ``edges``: before an element of a tensor (its number, the element)."""
    cuts: dict[int, set[int]] = {}
    for tensor, element in edges:
        cuts.setdefault(tensor, set()).add(element)
    buckets: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    for i, tensor_times in enumerate(problem.tensors):
        placed = 0
        for element in sorted(cuts.get(i, ())):
            if placed < element < tensor_times.numel:
                pieces.append(Piece(i, placed, element))
                placed = element
            if pieces and element <= tensor_times.numel:
                buckets.append(tuple(pieces))
                pieces = []
        if placed < tensor_times.numel:
            pieces.append(Piece(i, placed, tensor_times.numel))
    return (*buckets, *([tuple(pieces)] if pieces else []))
