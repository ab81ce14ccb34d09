"""The step graph value: validation, derived orders and times, text forms."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis.step_graph import (
    Dependency,
    Edge,
    Operation,
    Phase,
    PhaseKind,
    Role,
    StepGraph,
    Why,
)

FORWARD = Phase(PhaseKind.FORWARD)
PARAMETERS = ("p", "q", "r")


def edge(source: str, target: str, why: Why = Why.DATA, carried: int = 0) -> Edge:
    return Edge(source, target, Dependency(why, carried))


def plain(names: str) -> list[Operation]:
    return [Operation(name, FORWARD) for name in names]


@st.composite
def step_graphs(draw: st.DrawFn, max_size: int = 9) -> StepGraph:
    """Graphs without structure: several streams, any roles, whole seconds, random edges; operation
    ``i`` serves bucket ``i``."""
    size = draw(st.integers(1, max_size))
    parameters = st.frozensets(st.sampled_from(PARAMETERS))
    operations = [
        Operation(
            f"o{index}",
            Phase(draw(st.sampled_from(PhaseKind)), draw(st.integers(0, 2))),
            draw(st.sampled_from(Role)),
            draw(st.sampled_from(["compute", "group"])),
            seconds=float(draw(st.integers(0, 5))),
            nbytes=draw(st.integers(0, 2**40)),
            reads=draw(parameters),
            writes=draw(parameters),
            gradients=draw(parameters),
            bucket=index,
        )
        for index in range(size)
    ]
    # Names in no order of dependence, so that nothing can lean on the order of insertion.
    rank = draw(st.permutations(range(size)))
    place = st.integers(0, size - 1)
    ends = draw(st.lists(st.tuples(place, place, st.sampled_from(Why)), max_size=3 * size))
    edges = [
        edge(f"o{rank[min(a, b)]}", f"o{rank[max(a, b)]}", why) for a, b, why in ends if a != b
    ]
    carried = st.tuples(place, place, st.sampled_from(Why), st.integers(1, 3))
    for a, b, why, steps in draw(st.lists(carried, max_size=size)):
        edges.append(edge(f"o{a}", f"o{b}", why, steps))
    return StepGraph(operations, edges)


def closure(step: StepGraph) -> dict[str, set[str]]:
    """By name, all names on which it depends within the step; one search for each."""
    graph = nx.DiGraph((e.source, e.target) for e in step.edges if not e.dependency.carried)
    graph.add_nodes_from(step.operations)
    return {name: nx.ancestors(graph, name) for name in step.operations}


on_many_graphs = settings(deadline=None, max_examples=60)


def test_bad_graphs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="two operations are named 'a'"):
        StepGraph(plain("aa"))
    with pytest.raises(ValueError, match="'a' -> 'x': there is no operation 'x'"):
        StepGraph(plain("a"), [edge("a", "x")])
    with pytest.raises(
        ValueError, match=r"within one step: b -> c -> b|within one step: c -> b -> c"
    ):
        StepGraph(plain("abc"), [edge("a", "b"), edge("b", "c"), edge("c", "b", Why.ORDER)])
    with pytest.raises(ValueError, match="within one step: a -> a"):
        StepGraph(plain("a"), [edge("a", "a")])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_bad_costs_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="operation 'a' costs"):
        Operation("a", FORWARD, seconds=seconds)


def test_other_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        Operation("a", FORWARD, nbytes=-1)
    with pytest.raises(ValueError, match="micro-step -1"):
        Phase(PhaseKind.FORWARD, -1)
    with pytest.raises(ValueError, match="-1 steps"):
        Dependency(Why.DATA, -1)


def test_carried_edges_may_close_cycles_and_join_what_is_joined() -> None:
    edges = [edge("a", "b"), edge("a", "b", Why.ANTI), edge("a", "b", carried=1), edge("a", "b")]
    step = StepGraph(plain("ab"), [*edges, edge("b", "a", Why.ORDER, 1), edge("a", "a", carried=2)])
    assert len(step.edges) == 5
    assert set(step.carried_edges) == {
        edge("a", "b", carried=1),
        edge("b", "a", Why.ORDER, 1),
        edge("a", "a", carried=2),
    }
    assert [step.predecessors(name) for name in "ab"] == [(), ("a",)]
    assert step.order == ("a", "b")


def test_a_step_graph_cannot_be_changed() -> None:
    step = StepGraph(plain("ab"), [edge("a", "b")])
    with pytest.raises(nx.NetworkXError):
        step.graph.add_edge("b", "a")
    with pytest.raises(TypeError):
        step.operations["c"] = step.operations["a"]  # type: ignore[index]
    longer = step.extended(plain("c"), [edge("b", "c")])
    assert (list(step.operations), list(longer.operations)) == (["a", "b"], ["a", "b", "c"])
    assert set(longer.edges) == {edge("a", "b"), edge("b", "c")}


def test_an_empty_graph_is_a_step() -> None:
    step = StepGraph([])
    assert (step.order, step.seconds) == ((), 0.0)
    assert StepGraph.from_json(step.to_json()) == step


def test_chains_follow_order_edges_only() -> None:
    order = Why.ORDER
    step = StepGraph(
        plain("abcdx"),
        [edge("a", "b", order), edge("b", "c", order), edge("b", "d", order), edge("c", "x")],
    )
    chain = {name: place[0] for name, place in step.chains.items()}
    assert chain["a"] == chain["b"] == chain["c"]
    assert len({chain["a"], chain["d"], chain["x"]}) == 3
    assert step.last_on_chains("cabx") == ("c", "x")
    assert step.first_on_chains("cbxd") == ("b", "x", "d")


def test_two_operations_of_one_bucket_and_role_are_refused() -> None:
    both = [Operation(name, FORWARD, Role.REDUCE, bucket=0) for name in "ab"]
    with pytest.raises(ValueError, match="'a' and 'b' have the same bucket and role"):
        _ = StepGraph(both).by_bucket


@on_many_graphs
@given(step_graphs())
def test_order_and_chains_agree_with_reachability(step: StepGraph) -> None:
    before = closure(step)
    assert sorted(step.order) == sorted(step.operations)
    assert all(step.position[a] < step.position[b] for b in before for a in before[b])
    members: dict[int, list[tuple[int, str]]] = {}
    for name, (chain, place) in step.chains.items():
        members.setdefault(chain, []).append((place, name))
    for chain_members in members.values():
        assert sorted(place for place, _ in chain_members) == list(range(len(chain_members)))
        assert all(a in before[b] for (_, a), (_, b) in pairwise(sorted(chain_members)))


@on_many_graphs
@given(step_graphs())
def test_dependence_is_reachability(step: StepGraph) -> None:
    before = closure(step)
    for later in step.operations:
        found = {earlier for earlier in step.operations if step.depends_on(later, earlier)}
        assert found == before[later]


@on_many_graphs
@given(step_graphs())
def test_times_are_longest_paths(step: StepGraph) -> None:
    seconds = {name: operation.seconds for name, operation in step.operations.items()}
    graph = nx.DiGraph((e.source, e.target) for e in step.edges if not e.dependency.carried)
    graph.add_nodes_from(seconds)
    leading: dict[str, float] = dict.fromkeys(seconds, 0.0)
    trailing = dict(seconds)
    for a in seconds:
        for b in seconds:
            for path in nx.all_simple_paths(graph, a, b) if a != b else ():
                total = sum(seconds[name] for name in path)
                leading[b] = max(leading[b], total - seconds[b])
                trailing[a] = max(trailing[a], total)
    length = max(leading[name] + seconds[name] for name in seconds)
    assert step.seconds == length
    assert step.earliest_starts == leading
    assert step.latest_starts == {name: length - trailing[name] for name in seconds}


@on_many_graphs
@given(step_graphs())
def test_indices_hold_what_operations_say(step: StepGraph) -> None:
    for parameter in PARAMETERS:
        of_reads = [
            name
            for name in step.order
            if step.operations[name].role is Role.COMPUTE
            and parameter in step.operations[name].reads
        ]
        of_gradients = [n for n in step.order if parameter in step.operations[n].gradients]
        assert list(step.readers.get(parameter, ())) == of_reads
        assert list(step.contributors.get(parameter, ())) == of_gradients
    for bucket, (name, operation) in enumerate(step.operations.items()):
        assert step.by_bucket[bucket, operation.role] == name


@on_many_graphs
@given(step_graphs())
def test_json_is_read_back_exactly(step: StepGraph) -> None:
    text = step.to_json()
    again = StepGraph.from_json(text)
    assert again == step
    assert hash(again) == hash(step)
    assert again.to_json() == text
    assert "\n" not in text


def test_json_keeps_every_bit_of_a_cost() -> None:
    step = StepGraph([Operation("a", FORWARD, seconds=0.1 + 0.2)])
    assert StepGraph.from_json(step.to_json()).operations["a"].seconds == 0.1 + 0.2


def test_unequal_graphs_differ() -> None:
    step = StepGraph(plain("ab"), [edge("a", "b")])
    assert step != StepGraph(plain("ab"))
    assert step != StepGraph(plain("ab"), [edge("a", "b", Why.ANTI)])
    assert step != "a"


def test_malformed_json_is_refused() -> None:
    good = json.loads(StepGraph(plain("ab"), [edge("a", "b")]).to_json())
    first = good["operations"][0]
    bad: Any
    for bad in (
        [],
        {},
        {**good, "format": "other"},
        {**good, "edges": [[0, 2, "data", 0]]},
        {**good, "edges": [[0, -1, "data", 0]]},
        {**good, "edges": [[0, 1, "maybe", 0]]},
        {**good, "edges": [[0, 1, "data"]]},
        {**good, "edges": [[0, 1, "data", 0], [1, 0, "data", 0]]},
        {**good, "operations": [first, first]},
        {**good, "operations": [{**first, "role": "cook"}]},
        {**good, "operations": [{**first, "seconds": "1"}]},
        {**good, "operations": [{**first, "extra": 1}]},
        {**good, "operations": [{**first, "name": []}]},
        {**good, "operations": [{k: v for k, v in first.items() if k != "phase"}]},
    ):
        with pytest.raises(ValueError, match="not a step graph"):
            StepGraph.from_json(json.dumps(bad))
    for text in ("", "{", "[" * 100_000):
        with pytest.raises(ValueError, match="not a step graph"):
            StepGraph.from_json(text)


def test_graphml_is_readable_and_whole() -> None:
    operation = Operation("a", FORWARD, Role.GATHER, "g", 0.5, 8, frozenset("qp"), bucket=3)
    edges = [edge("a", "b"), edge("a", "b", carried=1), edge("b", "a", Why.ORDER, 1)]
    drawn = nx.parse_graphml(StepGraph([operation, *plain("b")], edges).to_graphml())
    assert drawn.nodes["a"]["reads"] == "p q"
    assert (drawn.nodes["a"]["seconds"], drawn.nodes["a"]["bucket"]) == (0.5, 3)
    found = [(u, v, d["why"], d["carried"]) for u, v, d in drawn.edges(data=True)]
    assert sorted(found) == [("a", "b", "data", 0), ("a", "b", "data", 1), ("b", "a", "order", 1)]
