"""Costs of links: curves through samples, their text, and measuring real ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxcomm.analysis.costs import LinkCosts, LinkCurve
from fxcomm.backends.calibration import measure_link
from fxcomm.registry import REGISTRY
from tests.ranks import Ranks
from tests.test_reads import EAGER, trainer

Pools = Callable[[int], Ranks]

seconds = st.floats(0, 10, allow_subnormal=False)


@given(
    st.dictionaries(
        st.integers(1, 10**6).map(float), st.lists(seconds, min_size=1, max_size=4), min_size=1
    )
)
def test_curves_go_through_what_was_measured(samples: dict[float, list[float]]) -> None:
    curve = LinkCurve.through(samples)
    assert [nbytes for nbytes, _ in curve.points] == sorted(samples)
    medians = [statistics.median(samples[nbytes]) for nbytes in sorted(samples)]
    found = [s for _, s in curve.points]
    assert found == sorted(found)
    assert math.fsum(found) == pytest.approx(math.fsum(medians)), "means of what falls"
    if medians == sorted(medians):
        assert found == medians
    for a, b in pairwise(sorted(samples)):
        middle = curve.seconds((a + b) / 2)
        assert middle == pytest.approx((curve.seconds(a) + curve.seconds(b)) / 2)


@given(st.floats(0, 1), st.floats(1, 1e9), st.floats(0, 1e9))
def test_alpha_and_beta(latency: float, rate: float, nbytes: float) -> None:
    curve = LinkCurve.of_link(latency, rate)
    assert curve.latency == latency
    expected = latency + nbytes / rate if nbytes else 0.0
    assert curve.seconds(nbytes) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_curves_that_fall_are_refused() -> None:
    for points in ((), ((1, 2), (2, 1)), ((2, 1), (1, 2)), ((1, math.inf),), ((-1, 1),)):
        with pytest.raises(ValueError, match="curve"):
            LinkCurve(points)


def curves() -> st.SearchStrategy[LinkCurve]:
    samples = st.dictionaries(st.floats(1, 1e9), st.lists(seconds, min_size=1), min_size=1)
    return samples.map(LinkCurve.through)


@given(curves(), curves(), st.floats(1, 4))
def test_costs_survive_their_text(reduce: LinkCurve, gather: LinkCurve, contention: float) -> None:
    costs = LinkCosts(reduce, gather, contention)
    assert LinkCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"reduce": 1, "gather": [], "contention": 1}'),
        '{"reduce": [[1, 1]], "gather": [[1, 1]], "contention": 0.5}',
        '{"reduce": [[1, 1]], "gather": [[2, 1], [1, 2]], "contention": 1}',
        '{"reduce": [[1]], "gather": [[1, 1]], "contention": 1}',
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not costs of a link"):
        LinkCosts.from_json(text)


def measuring_job(rank: int, world_size: int, budget_s: float) -> LinkCosts:
    made = trainer(rank, world_size, "mlp", EAGER)
    arena = REGISTRY._by_root[made.model].arenas[0]
    costs = measure_link(arena.communicator, torch.device("cpu"), budget_s)
    made.step()  # the group is as it was
    return costs


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("budget_s", [0.0, 0.2])
def test_all_ranks_measure_the_same(ranks: Pools, world_size: int, budget_s: float) -> None:
    costs = ranks(world_size).run(measuring_job, budget_s)
    assert all(found == costs[0] for found in costs)
    for curve in (costs[0].reduce, costs[0].gather):
        assert all(s > 0 for _, s in curve.points)
        assert all(nbytes % (4 * world_size) == 0 for nbytes, _ in curve.points)
    assert len(costs[0].reduce.points) == len(costs[0].gather.points) >= 2
    if budget_s == 0:
        assert len(costs[0].reduce.points) == 2, "no more than it must"
    assert 1 <= costs[0].contention < 100
