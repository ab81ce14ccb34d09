"""Problems of captured steps, and how near the search comes to their bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from fxcomm.analysis.costs import LinkCosts, LinkCurve, StepProblem
from fxcomm.analysis.problems import problem_of_graph
from fxcomm.analysis.roofline import DEVICES, node_cost
from fxcomm.analysis.search import Limits, search
from fxcomm.analysis.step_graph import (
    COMPUTE_STREAM,
    Dependency,
    Edge,
    Operation,
    Phase,
    PhaseKind,
    Role,
    StepGraph,
    Why,
)
from fxcomm.layout import ParameterSpec
from tests.captured_gpt import capture, capture_gpt
from tests.test_fake_ranks import AsFakeRank, as_fake_rank  # noqa: F401 - a fixture
from tests.zoo import ROWS, ZOO

LINK = LinkCosts(LinkCurve.of_link(0.5, 1.0), LinkCurve.of_link(0.25, 1.0), 1.5)
F, B = Phase(PhaseKind.FORWARD), Phase(PhaseKind.BACKWARD)


def spec(name: str, numel: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, numel, dtype, {"float32": 4, "bfloat16": 2}[dtype], "cpu")


def chain(*operations: Operation) -> StepGraph:
    order = Dependency(Why.ORDER)
    names = [operation.name for operation in operations]
    edges = [Edge(a, b, order) for a, b in itertools.pairwise(names)]
    return StepGraph(operations, edges)


def compute(
    name: str, phase: Phase, seconds: float, reads: str = "", gradients: str = ""
) -> Operation:
    return Operation(
        name,
        phase,
        Role.COMPUTE,
        COMPUTE_STREAM,
        seconds,
        reads=frozenset(reads.split()),
        gradients=frozenset(gradients.split()),
    )


STEP = chain(
    compute("embed", F, 1, reads="tied"),
    compute("layer", F, 2, reads="w"),
    compute("head", F, 1, reads="tied"),
    compute("head'", B, 1.5, reads="tied"),
    compute("layer'", B, 4, reads="w late", gradients="w"),
    compute("embed'", B, 0.5, gradients="tied"),
)


def test_times_are_those_of_the_graph() -> None:
    specs = [spec("tied", 10), spec("w", 20), spec("late", 5, "bfloat16"), spec("idle", 1)]
    problem = problem_of_graph(STEP, specs, LINK)
    assert (problem.forward, problem.backward) == (4, 6)
    assert [t.name for t in problem.tensors] == ["w", "tied", "idle", "late"]
    found = {t.name: (t.ready, t.last_read, t.needed) for t in problem.tensors}
    assert found["w"] == (5.5, 5.5, 1)
    assert found["tied"] == (6, 1.5, 0)
    assert found["late"] == (6, 5.5, 4 + 1.5), "first used in the backward"
    assert found["idle"] == (6, 0, math.inf)
    assert problem.borders == (3,)
    assert (problem.reduce, problem.gather, problem.contention) == (LINK.reduce, LINK.gather, 1.5)


def test_steps_of_several_micro_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="0 phases of backward"):
        problem_of_graph(chain(compute("a", F, 1)), [], LINK)
    twice = chain(
        compute("a", F, 1), compute("b", B, 1), compute("c", Phase(PhaseKind.BACKWARD, 1), 1)
    )
    with pytest.raises(ValueError, match="2 phases of backward"):
        problem_of_graph(twice, [], LINK)


def gpt_job(rank: int, world_size: int, layers: int) -> StepProblem:
    del rank, world_size
    captured = capture_gpt(layers)
    specs = sorted(captured.arena.plan.layout.parameters, key=lambda p: p.name)
    graph = captured.compute_graph(node_cost(DEVICES["cpu-core"]))
    return problem_of_graph(graph, specs, LINK)


def test_a_real_step_is_in_order(as_fake_rank: AsFakeRank) -> None:  # noqa: F811
    problem = as_fake_rank(0, 4, gpt_job, 3)
    names = [t.name for t in problem.tensors]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
    assert layers == sorted(layers, reverse=True)
    assert len(set(layers)) == 3
    by_use = [t.name for t in sorted(problem.tensors, key=lambda t: t.needed)]
    used = [int(name.split(".")[1]) for name in by_use if name.startswith("blocks.")]
    assert used == sorted(used)
    first = by_use[0]
    assert names.index(first) >= len(names) - 3, "the tied embedding is ready last, needed first"
    assert all(t.last_read <= problem.backward for t in problem.tensors)
    assert 1.5 < problem.backward / problem.forward < 4


CASES = ["mlp", "gpt", "conv", "reused"]


def zoo_job(rank: int, world_size: int, case_name: str) -> StepProblem:
    del rank, world_size
    case = ZOO[case_name]
    captured = capture(case.model(), case.batch(0, ROWS), case.loss)
    specs = captured.arena.plan.layout.parameters
    cost = node_cost(replace(DEVICES["cpu-core"], kernel=1e-7))
    return problem_of_graph(captured.compute_graph(cost), specs, LINK)


@pytest.mark.parametrize("case", CASES)
def test_the_search_comes_near_the_bound_on_the_zoo(
    as_fake_rank: AsFakeRank,  # noqa: F811
    case: str,
) -> None:
    """At links that take half as long as compute, as long, and twice as long."""
    captured = as_fake_rank(0, 2, zoo_job, case)
    for ratio in (0.5, 1.0, 2.0):
        seconds = ratio * captured.compute / 2
        curve = LinkCurve.of_link(0.002 * seconds, captured.nbytes / seconds)
        problem = replace(captured, reduce=curve, gather=curve, contention=1.0)
        found = search(problem, Limits(grain=1), budget_s=60, evaluations=1200)
        assert found.optimal or found.gap < 0.02, (case, ratio, found.gap, found.bound.reason)
