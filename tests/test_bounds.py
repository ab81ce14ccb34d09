"""Bounds: below every schedule, reached where a schedule can reach them, and told in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis.bounds import Bound, gap, least_seconds, lower_bound
from fxcomm.analysis.costs import LinkCurve, Schedule, StepProblem
from fxcomm.analysis.simulate import step_seconds
from tests.test_simulate import every, problem_of, small_cases


@settings(max_examples=600, deadline=None)
@given(small_cases())
def test_no_schedule_is_faster(case: tuple[StepProblem, Schedule]) -> None:
    problem, schedule = case
    bound = lower_bound(problem, in_backward=bool(schedule.update_after))
    seconds = step_seconds(problem, schedule)
    assert bound.seconds <= seconds + 1e-9, bound.reason
    assert lower_bound(problem).seconds <= bound.seconds + 1e-9
    assert gap(seconds, bound) >= -1e-9


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 50)),
        min_size=1,
        max_size=5,
        unique_by=lambda p: p[0],
    ),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
)
def test_no_partition_of_bytes_is_cheaper(points: list[tuple[int, int]], parts: list[int]) -> None:
    """Also where a curve is no straight line, so that small pieces may be cheaper."""
    seconds = sorted(s for _, s in points)
    sizes = sorted(b for b, _ in points)
    curve = LinkCurve(tuple((float(b), float(s)) for b, s in zip(sizes, seconds, strict=True)))
    least = float(least_seconds(curve, sum(parts), sum(parts)))
    assert least <= sum(curve.seconds(part) for part in parts) + 1e-9


def test_compute_is_a_bound() -> None:
    problem = problem_of([2.0], [3.0], between=0.5, update_latency=0.25, launch=0.125)
    bound = lower_bound(problem)
    assert bound.seconds == 12 + 0.5 + 0.25 + 2 * 0.125
    assert bound.seconds == step_seconds(problem, every(problem))
    assert bound.reason.startswith("compute: 12750.0 ms")


def test_a_step_without_tensors_is_its_compute() -> None:
    problem = problem_of([], [], launch=1.0, update_latency=1.0, between=0.5)
    assert lower_bound(problem).seconds == step_seconds(problem, every(problem)) == 12.5


def test_compute_beside_the_link_is_slower() -> None:
    problem = problem_of([0.0], [float("inf")], sizes=[4], contention=2.0)
    assert lower_bound(problem).seconds == 16 == step_seconds(problem, every(problem))


def test_the_link_is_a_bound() -> None:
    problem = problem_of([0.0, 0.0], [4.0, 4.0], sizes=[6, 14])
    bound = lower_bound(problem)
    assert bound.seconds == 40
    assert "the link: 40000.0 ms to reduce and gather 20 bytes" in bound.reason
    # Reductions from the backward's beginning to 4 + 20, gathers to 44, compute until 4 + 40.
    assert step_seconds(problem, every(problem)) == 40


def test_a_chain_around_the_loop_is_a_bound() -> None:
    """A tied embedding: ready last, needed first."""
    problem = problem_of([4.0, 8.0], [3.0, 0.0], sizes=[1, 2])
    bound = lower_bound(problem)
    assert bound.seconds == 12 + 2 + 2 == step_seconds(problem, every(problem))
    assert "the gradients from 'p1' on are ready 0.0 ms before the backward ends" in bound.reason
    assert "what 'p1' and those before it need is needed 0.0 ms into the forward" in bound.reason


def test_clipping_parts_the_chain() -> None:
    problem = problem_of([8.0, 8.0], [0.0, 0.0], norm=0.5)
    free = replace(problem, norm=None)
    assert lower_bound(free).seconds == 12 + 4
    assert lower_bound(problem).seconds == 12 + 4 + 0.5 == step_seconds(problem, every(problem))


def test_updates_in_the_backward_may_gather_earlier() -> None:
    """What is ready early need not wait for the backward's end with its gather."""
    never = float("inf")
    problem = problem_of([0.0, 4.0, 8.0], [0.0, never, never], sizes=[3, 1, 1])
    assert lower_bound(problem, in_backward=False).seconds == 12 + 3 + 1
    assert lower_bound(problem).seconds == 12 + 1
    early = replace(every(problem), gather_order=(0, 1, 2), update_after=(1,))
    assert step_seconds(problem, early) < 16


def test_gaps() -> None:
    assert gap(3.0, Bound(2.0, "")) == pytest.approx(0.5)
    assert gap(0.0, Bound(0.0, "")) == 0.0
    nothing = StepProblem((), 0.0, 0.0, LinkCurve.of_link(0, 1), LinkCurve.of_link(0, 1))
    assert lower_bound(nothing).seconds == 0
