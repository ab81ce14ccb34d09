"""The search: legal, repeatable, never worse than a baseline, and as good as trying everything."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis.baselines import NAMES, baseline, tensor_starts
from fxcomm.analysis.costs import (
    LinkCurve,
    Schedule,
    StepProblem,
    TensorTimes,
    by_first_use,
    whole_tensors,
)
from fxcomm.analysis.search import Limits, fewest_late_reductions, latest_gathers, search
from fxcomm.analysis.simulate import step_seconds
from tests.test_baselines import assert_legal

WHOLE = Limits(grain=0)


def random_problem(seed: int, count: int) -> StepProblem:
    """Like a network: later tensors are produced first, link and compute about as fast."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 3, 10, 30]) * rng.randint(50, 150) for _ in range(count)]
    work = [size * rng.uniform(0.2, 2) for size in sizes]
    forward, backward = 1.0, rng.uniform(1, 2.5)
    produced = list(itertools.accumulate(work))
    ratio = rng.choice([0.3, 0.7, 1.0, 1.5, 3.0])
    seconds = ratio * (forward + backward) / 2
    curve = LinkCurve.of_link(rng.choice([0.0, 0.02, 0.1]) * seconds, 4 * sum(sizes) / seconds)
    tied = rng.random() < 0.3
    tensors = tuple(
        TensorTimes(
            f"layer.{i // 2}.{i}",
            size,
            4,
            min(backward, backward * done / produced[-1]),
            min(backward, backward * done / produced[-1]),
            0.0 if tied and i == count - 1 else forward * (1 - done / produced[-1]),
        )
        for i, (size, done) in enumerate(zip(sizes, produced, strict=True))
    )
    return StepProblem(
        tensors,
        *(forward, backward, curve, curve),
        launch=rng.choice([0.0, 0.01]),
        norm=rng.choice([None, None, 0.02]),
        update_latency=rng.choice([0.0, 0.01]),
        update_per_byte=0.05 / (4 * sum(sizes)),
        contention=rng.choice([1.0, 1.2]),
    )


def partitions(count: int) -> list[tuple[int, ...]]:
    inner = range(1, count)
    return [e for k in range(count) for e in itertools.combinations(inner, k)]


def schedules(problem: StepProblem, orders: bool) -> list[Schedule]:
    found = []
    for edges in partitions(len(problem.tensors)):
        buckets = whole_tensors(problem, edges)
        by_use = by_first_use(problem, buckets)
        tried = itertools.permutations(range(len(buckets))) if orders else [by_use]
        found += [Schedule(buckets, tuple(order)) for order in tried]
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_nothing_is_better_than_what_is_found(count: int) -> None:
    """Every partition into whole tensors, in every order of gathers."""
    for seed in range(60):
        problem = random_problem(seed * 11 + count, count)
        result = search(problem, WHOLE, budget_s=60)
        best = min(step_seconds(problem, s) for s in schedules(problem, orders=True))
        assert result.seconds == pytest.approx(best, rel=1e-9), seed
        assert result.optimal or result.gap < 1e-3


@pytest.mark.parametrize(("count", "instances"), [(6, 30), (7, 20), (8, 10), (10, 5)])
def test_no_merge_is_better_than_what_is_found(count: int, instances: int) -> None:
    """Every partition into whole tensors, gathered in order of use."""
    for seed in range(instances):
        problem = random_problem(seed * 13 + count, count)
        result = search(problem, WHOLE, budget_s=60, evaluations=2 ** (count - 1) + 200)
        best = min(step_seconds(problem, s) for s in schedules(problem, orders=False))
        assert result.seconds <= best + 1e-9, seed


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 14),
    st.sampled_from([0, 1, 64]),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 20_000),
    st.sets(st.integers(1, 13), max_size=3),
)
def test_found_schedules_keep_to_the_limits(
    seed: int,
    count: int,
    grain: int,
    in_backward: bool,
    commshift: bool,
    in_flight: int | None,
    borders: set[int],
) -> None:
    problem = random_problem(seed, count)
    problem = replace(problem, borders=tuple(sorted(b for b in borders if b < count)))
    limits = Limits(in_flight, in_backward, commshift, grain)
    result = search(problem, limits, seed=seed, budget_s=60, evaluations=60)
    assert_legal(problem, result.schedule)
    schedule = result.schedule
    assert schedule.commshift == commshift
    if in_flight is not None:
        assert schedule.in_flight_bytes is not None
        assert schedule.in_flight_bytes <= in_flight
    if not in_backward or problem.norm is not None:
        assert not schedule.update_after
    assert result.seconds == step_seconds(problem, schedule)
    assert result.seconds >= result.bound.seconds - 1e-9
    for name in NAMES:
        named = baseline(name, problem, in_flight_bytes=in_flight, commshift=commshift)
        assert result.baselines[name] == step_seconds(problem, named)
        assert result.seconds <= result.baselines[name]
    again = search(problem, limits, seed=seed, budget_s=60, evaluations=60)
    assert again == result


def test_without_cuts_tensors_stay_whole() -> None:
    for seed in range(10):
        problem = random_problem(seed, 14)
        result = search(problem, WHOLE, budget_s=60, evaluations=150)
        sizes = {i: t.numel for i, t in enumerate(problem.tensors)}
        bad = {"bucket-25mb", "dear"}  # which fit into one bucket here
        assert bad <= set(result.baselines)
        assert all(
            p.start == 0 and p.stop == sizes[p.tensor] for b in result.schedule.buckets for p in b
        )


def test_cutting_a_large_tensor_pays() -> None:
    """One tensor: whole, its reduction and its gather cannot overlap with each other."""
    curve = LinkCurve.of_link(0.001, 4000.0)
    tensor = TensorTimes("p", 1000, 4, 0.0, 0.0, 1.0)
    problem = StepProblem((tensor,), 1.0, 1.0, curve, curve, update_per_byte=5e-5)
    whole = search(problem, WHOLE, budget_s=60, evaluations=100)
    cut = search(problem, Limits(grain=1), budget_s=60, evaluations=300)
    assert len(cut.schedule.buckets) > 1
    assert cut.seconds < whole.seconds


def test_the_clock_ends_the_search() -> None:
    problem = random_problem(5, 14)
    ticks = itertools.count()
    result = search(problem, budget_s=40.0, clock=lambda: float(next(ticks)))
    assert result.evaluations < 60
    assert_legal(problem, result.schedule)


def test_updates_in_the_backward_are_used_where_they_help() -> None:
    """What is needed when the forward begins was produced long before the backward ends."""
    curve = LinkCurve.of_link(0.0, 4000.0)
    tensors = tuple(TensorTimes(f"p{i}", 100, 4, 0.3 * i, 0.3 * i, 0.0) for i in range(10))
    problem = StepProblem(tensors, 1.0, 3.0, curve, curve)
    late = search(problem, Limits(grain=1), budget_s=60, evaluations=200)
    early = search(problem, Limits(in_backward=True, grain=1), budget_s=60, evaluations=400)
    assert early.schedule.update_after
    assert early.seconds < late.seconds - 0.5


# --- the dynamic programs ---


def end_of_reductions(problem: StepProblem, edges: Sequence[int]) -> float:
    starts, end = tensor_starts(problem), -math.inf
    bounds = [0, *edges, len(problem.tensors)]
    for first, last in itertools.pairwise(bounds):
        nbytes = starts[last] - starts[first]
        end = max(end, problem.tensors[last - 1].ready)
        end += problem.reduce.seconds(nbytes) + problem.launch
    return end


def latest_start(problem: StepProblem, edges: Sequence[int]) -> float:
    """When gathers in the reverse of production order must begin to hold up nothing."""
    starts, start = tensor_starts(problem), math.inf
    bounds = [0, *edges, len(problem.tensors)]
    for first, last in itertools.pairwise(bounds):
        needed = min(min(t.needed, problem.compute) for t in problem.tensors[first:last])
        start = min(start, needed) - problem.gather.seconds(starts[last] - starts[first])
    return start


def test_the_dynamic_programs_are_exact() -> None:
    for seed in range(150):
        count = 2 + seed % 8
        problem = random_problem(seed, count)
        tried = partitions(count)
        found = end_of_reductions(problem, fewest_late_reductions(problem))
        assert found == pytest.approx(min(end_of_reductions(problem, e) for e in tried))
        found = latest_start(problem, latest_gathers(problem))
        assert found == pytest.approx(max(latest_start(problem, e) for e in tried))
