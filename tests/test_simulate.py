"""The simulator against one that is slow, exact and written another way; and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis.costs import (
    LinkCurve,
    Piece,
    Schedule,
    StepProblem,
    TensorTimes,
    by_first_use,
    whole_tensors,
)
from fxcomm.analysis.simulate import simulate, step_seconds
from fxcomm.analysis.timeline import COMPUTE_ROW, GATHER_ROW, REDUCE_ROW

# --- problems ---


def problem_of(
    ready: list[float], needed: list[float], sizes: list[int] | None = None, **more: Any
) -> StepProblem:
    """Forward of 4, backward of 8 seconds, a byte a second each way."""
    sizes = sizes or [1] * len(ready)
    free = LinkCurve(((1.0, 1.0), (2.0, 2.0)))
    given = {"forward": 4.0, "backward": 8.0, "reduce": free, "gather": free, **more}
    tensors = tuple(
        TensorTimes(f"p{i}", n, 1, r, r, u)
        for i, (r, u, n) in enumerate(zip(ready, needed, sizes, strict=True))
    )
    return StepProblem(tensors, **given)


def every(problem: StepProblem, **more: Any) -> Schedule:
    """A bucket for each tensor, gathered in order of use."""
    buckets = whole_tensors(problem, range(len(problem.tensors)))
    return Schedule(buckets, by_first_use(problem, buckets), **more)


@st.composite
def small_problems(draw: st.DrawFn) -> StepProblem:
    """Up to 5 tensors, times in quarters, so that much happens at once."""
    count = draw(st.integers(1, 5))
    quarter = st.integers(0, 16).map(lambda n: n / 4)
    ready = sorted(draw(st.lists(quarter, min_size=count, max_size=count)))
    needed = draw(st.lists(quarter | st.just(float("inf")), min_size=count, max_size=count))
    last = draw(st.lists(quarter, min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    curves = st.tuples(quarter, st.integers(1, 8).map(float)).map(lambda c: LinkCurve.of_link(*c))
    return StepProblem(
        tensors=tuple(
            TensorTimes(f"p{i}", n, 1, r, old, u)
            for i, (n, r, old, u) in enumerate(zip(sizes, ready, last, needed, strict=True))
        ),
        forward=draw(st.integers(1, 4).map(float)),
        backward=4.0,
        reduce=draw(curves),
        gather=draw(curves),
        launch=draw(st.sampled_from([0.0, 0.25])),
        between=draw(st.sampled_from([0.0, 0.5])),
        norm=draw(st.sampled_from([None, 0.0, 0.75])),
        update_latency=draw(st.sampled_from([0.0, 0.25])),
        update_per_byte=draw(st.sampled_from([0.0, 0.25])),
        contention=draw(st.sampled_from([1.0, 1.5])),
    )


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[StepProblem, Schedule]:
    problem = draw(small_problems())
    edges = draw(st.sets(st.integers(1, 4)))
    buckets = [list(bucket) for bucket in whole_tensors(problem, edges)]
    if draw(st.booleans()):  # cut a tensor in two
        which = draw(st.integers(0, len(buckets) - 1))
        last = buckets[which][-1]
        half = (last.start + last.stop) // 2
        if last.start < half:
            buckets[which][-1] = Piece(last.tensor, last.start, half)
            buckets.insert(which + 1, [Piece(last.tensor, half, last.stop)])
    made = tuple(map(tuple, buckets))
    early = draw(st.integers(0, len(made))) if problem.norm is None else 0
    places = tuple(draw(st.integers(b, len(made) - 1)) for b in range(early))
    rest = draw(st.permutations(range(early, len(made))))
    limit = draw(st.none() | st.integers(0, 12))
    return problem, Schedule(made, (*range(early), *rest), limit, places, draw(st.booleans()))


# --- the oracle: a program for the compute stream, run in fractions -------------------------------


@dataclass
class Oracle:
    """Runs instructions by looking, again and again, at what is going on and what ends first."""

    problem: StepProblem
    schedule: Schedule
    gathers: list[list[Any]] = field(default_factory=list)  # [bucket, seconds left]
    reduces: list[list[Any]] = field(default_factory=list)

    def program(self) -> Iterator[tuple[str, Any]]:
        problem, schedule = self.problem, self.schedule
        tensors, forward = problem.tensors, Fraction(problem.forward)
        places: list[tuple[Any, ...]] = []
        launched, reached = Fraction(0), Fraction(0)
        launches: list[Fraction] = []
        for b, bucket in enumerate(schedule.buckets):
            launched = max([launched, *(Fraction(tensors[p.tensor].ready) for p in bucket)])
            launches.append(launched)
            places.append((forward + launched, b, 0, "launch", b))
        for b, after in enumerate(schedule.update_after):
            reads = [Fraction(tensors[p.tensor].last_read) for p in schedule.buckets[b]]
            reached = max([reached, launches[after], *reads])
            places.append((forward + reached, after, 1, "update early", b))
        for b, bucket in enumerate(schedule.buckets):
            used = min(tensors[p.tensor].needed for p in bucket)
            if used != float("inf"):
                end = Fraction(problem.forward) + Fraction(problem.backward)
                places.append((min(Fraction(used), end), -1, 0, "use", b))
        # What is used where the forward ends belongs to the forward.
        places.sort(key=lambda p: (p[0], p[3] != "use", *p[1:3], p[4]))
        done = Fraction(0)
        for place, _, _, what, b in places:
            yield "work", place - done
            done = place
            yield what, b
        yield "work", forward + Fraction(problem.backward) - done
        if not schedule.update_after:
            yield "drain", None
        yield "work", Fraction(problem.between)
        if problem.norm is not None:
            for b in range(len(schedule.buckets)):
                yield "reduced", b
            yield "stand", Fraction(problem.norm)
        for b in schedule.gather_order[len(schedule.update_after) :]:
            yield "update", b
        if not schedule.commshift:
            yield "drain", None

    def step(self) -> Fraction:
        """Seconds of one step."""
        self.now = Fraction(0)
        self.held: list[tuple[int, Fraction]] = []
        for what, argument in self.program():
            if what == "work":
                self.work(argument)
            elif what == "stand":
                self.stand(argument)
            elif what == "launch":
                self.launch(argument)
            elif what == "use":
                self.until_gone(self.gathers, argument)
            elif what == "drain":
                self.until_gone(self.gathers, None)
            elif what == "reduced":
                self.reduced(argument)
            else:
                if what == "update early" and argument == 0:
                    self.until_gone(self.gathers, None)
                self.update(argument)
        return self.now

    def bytes_of(self, bucket: int) -> int:
        return sum(piece.stop - piece.start for piece in self.schedule.buckets[bucket])

    def launch(self, bucket: int) -> None:
        needs = Fraction(self.problem.held) * self.bytes_of(bucket)
        limit = self.schedule.in_flight_bytes
        while limit is not None and self.held and sum(h for _, h in self.held) + needs > limit:
            self.reduced(self.held[0][0])
        self.stand(Fraction(self.problem.launch))
        self.reduces.append([bucket, Fraction(self.problem.reduce.seconds(self.bytes_of(bucket)))])
        self.held.append((bucket, needs))

    def reduced(self, bucket: int) -> None:
        if any(b == bucket for b, _ in self.held):
            self.until_gone(self.reduces, bucket)
            self.held = [(b, h) for b, h in self.held if b != bucket]

    def update(self, bucket: int) -> None:
        self.reduced(bucket)
        nbytes = self.bytes_of(bucket)
        problem = self.problem
        self.work(Fraction(problem.update_latency) + Fraction(problem.update_per_byte) * nbytes)
        self.stand(Fraction(problem.launch))
        self.gathers.append([bucket, Fraction(problem.gather.seconds(nbytes))])

    def work(self, seconds: Fraction) -> None:
        while seconds > 0:
            busy = bool(self.active())
            speed = 1 / Fraction(self.problem.contention) if busy else Fraction(1)
            passed = min([seconds / speed, *self.ends()])
            seconds -= passed * speed
            self.pass_time(passed)

    def stand(self, seconds: Fraction) -> None:
        while seconds > 0:
            passed = min([seconds, *self.ends()])
            seconds -= passed
            self.pass_time(passed)

    def until_gone(self, line: list[list[Any]], bucket: int | None) -> None:
        self.pass_time(Fraction(0))
        while any(bucket is None or b == bucket for b, _ in line):
            self.pass_time(min(self.ends()))

    def active(self) -> list[list[Any]]:
        return [line[0] for line in (self.reduces, self.gathers) if line]

    def ends(self) -> list[Fraction]:
        return [left * len(self.active()) for _, left in self.active()]

    def pass_time(self, seconds: Fraction) -> None:
        active = self.active()
        for one in active:
            one[1] -= seconds / len(active)
        self.now += seconds
        for line in (self.reduces, self.gathers):
            while line and line[0][1] == 0:
                line.pop(0)


@settings(max_examples=400, deadline=None)
@given(small_cases())
def test_agrees_with_the_oracle(case: tuple[StepProblem, Schedule]) -> None:
    problem, schedule = case
    oracle = Oracle(problem, schedule)
    steps = [oracle.step() for _ in range(17)]
    simulated = simulate(problem, schedule)
    near = [float(s) for s in steps if float(s) == pytest.approx(simulated.seconds, abs=1e-9)]
    assert near, (simulated.seconds, list(map(float, steps)))
    if steps[-1] == steps[-2]:  # it has come to rest
        assert simulated.seconds == pytest.approx(float(steps[-1]), abs=1e-9)
    assert step_seconds(problem, schedule) == simulated.seconds


@settings(max_examples=200, deadline=None)
@given(small_cases())
def test_times_add_up(case: tuple[StepProblem, Schedule]) -> None:
    problem, schedule = case
    step = simulate(problem, schedule)
    updates = problem.update_latency * len(schedule.buckets) + problem.update_per_byte * sum(
        schedule.bucket_bytes(problem)
    )
    work = problem.compute + problem.between + updates
    launches = 2 * problem.launch * len(schedule.buckets)
    least = work + launches + step.exposed
    assert (
        least - 1e-9 <= step.seconds <= work * problem.contention + launches + step.exposed + 1e-9
    )
    if problem.contention == 1:
        assert step.seconds == pytest.approx(least)
    assert 0 <= step.link_idle <= step.seconds + 1e-9


@settings(max_examples=200, deadline=None)
@given(small_cases())
def test_rows_of_the_timeline(case: tuple[StepProblem, Schedule]) -> None:
    problem, schedule = case
    step = simulate(problem, schedule)
    for row in (REDUCE_ROW, GATHER_ROW):
        spans = [s for s in step.timeline if s.row == row]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans)), "one at a time"
        assert {s.bucket for s in spans} <= set(range(len(schedule.buckets)))
    reduced = [s.bucket for s in step.timeline if s.row == REDUCE_ROW]
    assert reduced == sorted(reduced)  # type: ignore[type-var]
    phases = [s for s in step.timeline if s.kind in ("forward", "backward", "step")]
    assert [s.kind for s in sorted(phases, key=lambda s: s.end)][-1] == "step"
    assert sum(s.end - s.start for s in phases) == pytest.approx(step.seconds)
    waits = [s for s in step.timeline if s.row == COMPUTE_ROW and s.kind.startswith("wait")]
    assert sum(s.end - s.start for s in waits) == pytest.approx(step.exposed, abs=1e-9)
    assert all(0 <= s.start <= s.end <= step.seconds + 1e-9 for s in step.timeline)


# --- by hand ---


def test_one_bucket_hides_nothing_of_its_own() -> None:
    problem = problem_of([8.0], [0.0])
    step = simulate(problem, every(problem))
    assert step.seconds == 12 + 1 + 1
    assert step.exposed_reduce == step.exposed_gather == (1.0,)
    assert step.link_idle == 12


def test_a_reduction_hides_in_the_backward_and_a_gather_in_the_forward() -> None:
    problem = problem_of([2.0], [3.0])
    step = simulate(problem, every(problem))
    assert step.seconds == 12
    assert step.exposed == 0
    off = simulate(problem, every(problem, commshift=False))
    assert off.seconds == 13
    assert off.exposed_gather == (1.0,)


def test_buckets_follow_each_other_on_the_link() -> None:
    problem = problem_of([7.0, 7.0, 8.0], [2.0, 1.0, 0.0], sizes=[3, 1, 1])
    step = simulate(problem, every(problem))
    # Reductions from 7 to 10, 11 and 12 of a backward that ends at 8; the last is needed first.
    assert step.exposed_reduce == (0.0, 0.0, 4.0)
    # Gathers of the last, the second and the first end 1, 2 and 5 seconds later.
    assert step.exposed_gather == (2.0, 0.0, 1.0)
    assert step.seconds == 12 + 4 + 3


def test_memory_in_flight_is_kept() -> None:
    problem = problem_of([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], held=2.0)
    free = simulate(problem, every(problem))
    assert (free.peak_bytes, free.exposed_reduce) == (6.0, (0.0, 0.0, 0.0))
    two = simulate(problem, every(problem, in_flight_bytes=4))
    assert (two.peak_bytes, two.exposed_reduce) == (4.0, (1.0, 0.0, 0.0))
    one = simulate(problem, every(problem, in_flight_bytes=1))
    assert (one.peak_bytes, one.exposed_reduce) == (2.0, (1.0, 1.0, 0.0))


def test_clipping_waits_for_every_reduction() -> None:
    problem = problem_of([2.0, 8.0], [0.0, 3.0], norm=0.5)
    step = simulate(problem, every(problem))
    assert step.exposed_norm == 0.5
    assert step.exposed_reduce == (0.0, 1.0)
    assert step.exposed_gather == (1.0, 0.0)
    free = simulate(replace(problem, norm=None), every(problem))
    # The first bucket's gather shares the link with the last reduction, and ends with it.
    assert (free.exposed_reduce, free.exposed_gather) == ((0.0, 2.0), (0.0, 0.0))


def test_updates_in_the_backward_free_the_link_behind_it() -> None:
    problem = problem_of([1.0, 2.0, 8.0], [0.0, 3.0, 3.0])
    late = every(problem)
    assert simulate(problem, late).seconds == 12 + 2
    early = simulate(problem, replace(late, gather_order=(0, 2, 1), update_after=(1,)))
    assert early.exposed_reduce == (0.0, 0.0, 1.0), "reduced when the second bucket is launched"
    assert early.exposed_gather == (0.0, 0.0, 0.0)
    at_once = simulate(problem, replace(late, gather_order=(0, 1, 2), update_after=(0,)))
    assert at_once.exposed_reduce[0] == 1.0, "compute stands in the backward for it"


def test_old_values_are_read_before_an_update_in_the_backward() -> None:
    problem = problem_of([1.0, 2.0], [0.0, 3.0])
    read = replace(problem.tensors[0], last_read=5.0)
    problem = replace(problem, tensors=(read, problem.tensors[1]))
    step = simulate(problem, Schedule(every(problem).buckets, (0, 1), update_after=(1,)))
    (update,) = (s for s in step.timeline if s.kind == "update" and s.bucket == 0)
    assert update.start == 4 + 5


def test_contention_slows_compute_beside_the_link() -> None:
    problem = problem_of([0.0], [float("inf")], sizes=[4], contention=2.0)
    step = simulate(problem, every(problem))
    # 4 seconds of reduction in the backward and of gather in the forward, at half the speed.
    assert step.seconds == 12 + 2 + 2


def test_both_kinds_share_the_link() -> None:
    problem = problem_of([0.0, 8.0], [float("inf"), 0.0], sizes=[4, 2])
    step = simulate(problem, Schedule(every(problem).buckets, (0, 1)))
    # The first gather and the second reduction begin at 8 and advance at half speed until the
    # reduction ends at 12; then the gather of 2 follows what is left of the one of 4.
    assert step.exposed_reduce == (0.0, 4.0)
    assert step.exposed_gather[1] == 4.0
