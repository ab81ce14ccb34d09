"""Named baselines: what each one fuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxcomm.analysis.baselines import NAMES, baseline, cut_at, mg_wfbp
from fxcomm.analysis.costs import LinkCurve, Schedule, StepProblem, TensorTimes
from fxcomm.analysis.search import buckets_between
from tests.test_simulate import problem_of, small_problems


def named(*names: str, sizes: int = 1) -> StepProblem:
    curve = LinkCurve.of_link(0.0, 1.0)
    tensors = tuple(
        TensorTimes(name, sizes, 1, i, i, len(names) - i) for i, name in enumerate(names)
    )
    return StepProblem(tensors, float(len(names)), float(len(names)), curve, curve)


def fused(name: str, problem: StepProblem) -> list[list[int]]:
    """The tensors in each bucket."""
    return [sorted({p.tensor for p in b}) for b in baseline(name, problem).buckets]


def assert_legal(problem: StepProblem, schedule: Schedule) -> None:
    """Every element of every tensor once, in order, and what a schedule says of its buckets."""
    at: dict[int, int] = {}
    order = [piece for bucket in schedule.buckets for piece in bucket]
    for piece in order:
        assert piece.start == at.get(piece.tensor, 0) < piece.stop
        at[piece.tensor] = piece.stop
    assert at == {i: t.numel for i, t in enumerate(problem.tensors) if t.numel}
    assert [p.tensor for p in order] == sorted(p.tensor for p in order)
    for border in problem.borders:
        for bucket in schedule.buckets:
            assert not any(p.tensor < border for p in bucket) or not any(
                p.tensor >= border for p in bucket
            )
    count = len(schedule.buckets)
    assert sorted(schedule.gather_order) == list(range(count))
    early = len(schedule.update_after)
    assert schedule.gather_order[:early] == tuple(range(early))
    assert all(b <= after < count for b, after in enumerate(schedule.update_after))


@given(small_problems(), st.sampled_from(NAMES))
def test_baselines_are_legal(problem: StepProblem, name: str) -> None:
    sized = [t for t in problem.tensors if t.numel]
    schedule = baseline(name, problem, in_flight_bytes=7, commshift=False)
    if len(sized) == len(problem.tensors):
        assert_legal(problem, schedule)
    assert (schedule.in_flight_bytes, schedule.commshift) == (7, False)


def test_layers_are_what_names_say() -> None:
    problem = named("head.weight", "h.1.b", "h.1.a.0.w", "h.0.b", "h.0.a", "norm", "embed")
    assert fused("per-layer", problem) == [[0], [1, 2], [3, 4], [5, 6]]
    assert fused("no-fusion", problem) == [[i] for i in range(7)]
    assert fused("one-bucket", problem) == [list(range(7))]


def test_fixed_buckets_are_of_25_mb() -> None:
    problem = named(*"abcd", sizes=25 * 2**20)
    assert fused("bucket-25mb", problem) == fused("dear", problem) == [[0], [1], [2], [3]]
    halves = named("a", sizes=50 * 2**20)
    assert [len(b) for b in baseline("dear", halves).buckets] == [1, 1]


def test_order_of_gathers() -> None:
    problem = named(*"abcd", sizes=25 * 2**20)
    assert baseline("bucket-25mb", problem).gather_order == (0, 1, 2, 3)
    assert baseline("dear", problem).gather_order == (3, 2, 1, 0)


def test_merged_gradients() -> None:
    """Startup of 2, a byte a second. The second is ready while the startup of the first would go
    on, so they go together; the third comes later than that saves; the fourth waits for the link
    anyway, and merging with the fifth, which is ready by then, saves a startup."""
    curve = LinkCurve.of_link(2.0, 1.0)
    ready = [1.0, 2.0, 4.0, 4.5, 5.0, 7.5]
    problem = problem_of(ready, [1.0] * 6, reduce=curve, gather=curve)
    assert [[p.tensor for p in bucket] for bucket in mg_wfbp(problem)] == [[0, 1], [2, 3, 4, 5]]
    late = problem_of([1.0, 3.0, 6.0], [1.0] * 3, reduce=curve, gather=curve)
    assert [[p.tensor for p in bucket] for bucket in mg_wfbp(late)] == [[0], [1], [2]]
    # Without a startup only what finds the link busy is merged.
    free = problem_of(ready, [1.0] * 6)
    assert [[p.tensor for p in b] for b in mg_wfbp(free)] == [[0], [1], [2, 3, 4], [5]]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'per-tensor'; there are bucket-25mb, per-layer"):
        baseline("per-tensor", named("a"))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6), st.lists(st.floats(0, 300), max_size=8)
)
def test_cuts_fall_where_told(sizes: list[int], places: list[float]) -> None:
    problem = problem_of([1.0] * len(sizes), [1.0] * len(sizes), sizes=sizes)
    buckets = cut_at(problem, places)
    assert_legal(problem, Schedule(buckets, tuple(range(len(buckets)))))
    ends, end = [], 0
    for bucket in buckets:
        end += sum(p.stop - p.start for p in bucket)
        ends.append(end)
    wanted = {place for place in places if 0 < place < sum(sizes)}
    assert all(any(abs(end - place) <= 0.5 for place in wanted) for end in ends[:-1])
    edges = {(b[0].tensor, b[0].start) for b in buckets}
    assert buckets_between(problem, edges) == buckets
