"""Questions about step graphs, against answers by hand and by brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis.capture import with_buckets
from fxcomm.analysis.dependencies import (
    CriticalPath,
    Launch,
    Wait,
    critical_path,
    earliest_launch,
    earliest_of,
    first_use_in_next_forward,
    gather_order,
    last_read_of_old_value,
    latest_of,
    latest_wait,
    slack,
    steady_state_bound,
    use_order,
)
from fxcomm.analysis.step_graph import (
    Edge,
    Operation,
    Phase,
    PhaseKind,
    Role,
    StepGraph,
    Why,
)
from fxcomm.layout import ParameterSpec, ShardLayout, build_layout
from tests.line_count import lines_run
from tests.test_step_graph import PARAMETERS, closure, edge, on_many_graphs, step_graphs

FORWARD, BACKWARD = Phase(PhaseKind.FORWARD), Phase(PhaseKind.BACKWARD)
UPDATE = Phase(PhaseKind.UPDATE)


def small_step() -> StepGraph:
    """Two parameters, a then b in the forward; bucket 0 holds b, bucket 1 holds a.

    As soon as possible::

        compute  fa 0-1 | fb 1-3 | bb 3-5 | ba 5-6
        reduce                              r0 5-8 | r1 8-11
        compute                                      u0 8-9 |  u1 11-12
        gather                                                          g1 12-14 | g0 14-16
    """
    a, b = frozenset("a"), frozenset("b")
    operations = [
        Operation("fa", FORWARD, seconds=1, reads=a),
        Operation("fb", FORWARD, seconds=2, reads=b),
        Operation("bb", BACKWARD, seconds=2, reads=b, gradients=b),
        Operation("ba", BACKWARD, seconds=1, gradients=a),
    ]
    for bucket, members in enumerate((b, a)):
        operations += [
            Operation(f"r{bucket}", BACKWARD, Role.REDUCE, "reduce", 3, bucket=bucket),
            Operation(f"u{bucket}", UPDATE, Role.UPDATE, seconds=1, writes=members, bucket=bucket),
            Operation(
                f"g{bucket}", UPDATE, Role.GATHER, "gather", 2, writes=members, bucket=bucket
            ),
        ]
    data = "fa fb, fb bb, bb ba, bb r0, ba r1, r0 u0, r1 u1"
    edges = [edge(source, target) for source, target in map(str.split, data.split(", "))]
    edges += [edge("u0", "g0"), edge("u1", "g1"), edge("g0", "fb", carried=1)]
    edges += [edge("g1", "fa", carried=1)]
    edges += [
        edge(r, w, Why.ANTI) for r, w in [("bb", "u0"), ("bb", "g0"), ("fa", "u1"), ("fa", "g1")]
    ]
    for chain in (["fa", "fb", "bb", "ba"], ["r0", "r1"], ["g1", "g0"]):
        edges += [edge(x, y, Why.ORDER) for x, y in pairwise(chain)]
        edges.append(edge(chain[-1], chain[0], Why.ORDER, 1))
    return StepGraph(operations, edges)


@pytest.mark.parametrize(
    ("bucket", "role", "launch"),
    [
        (0, Role.REDUCE, Launch(("bb",), 5)),
        (1, Role.REDUCE, Launch(("ba", "r0"), 8)),
        (0, Role.UPDATE, Launch(("r0",), 8)),
        (1, Role.UPDATE, Launch(("r1",), 11)),
        (0, Role.GATHER, Launch(("u0", "g1"), 14)),
        (1, Role.GATHER, Launch(("u1",), 12)),
    ],
)
def test_earliest_launch_by_hand(bucket: int, role: Role, launch: Launch) -> None:
    found = earliest_launch(small_step(), bucket, role)
    assert (set(found.after), found.seconds) == (set(launch.after), launch.seconds)


@pytest.mark.parametrize(
    ("bucket", "role", "wait"),
    [
        (0, Role.REDUCE, Wait(("u0",), 0, 13)),
        (1, Role.REDUCE, Wait(("u1",), 0, 11)),
        (0, Role.UPDATE, Wait(("g0",), 0, 14)),
        (1, Role.UPDATE, Wait(("g1",), 0, 12)),
        (0, Role.GATHER, Wait(("fb",), 1, 1)),
        (1, Role.GATHER, Wait(("fa",), 1, 0)),
    ],
)
def test_latest_wait_by_hand(bucket: int, role: Role, wait: Wait) -> None:
    assert latest_wait(small_step(), bucket, role) == wait


def test_uses_by_hand() -> None:
    step = small_step()
    assert last_read_of_old_value(step, "a") == ("fa",)
    assert last_read_of_old_value(step, "b") == ("bb",)
    assert first_use_in_next_forward(step, "b") == ("fb",)
    assert last_read_of_old_value(step, "z") == first_use_in_next_forward(step, "z") == ()
    assert use_order(step) == ("a", "b")
    assert gather_order(step) == (1, 0)


def test_bounds_by_hand() -> None:
    step = small_step()
    path = ("fa", "fb", "bb", "r0", "r1", "u1", "g1", "g0")
    assert critical_path(step) == CriticalPath(path, 16)
    # g0 must end when fb of the next step starts at 16 + 1; everything ahead of it follows.
    assert slack(step) == {"r0": 1, "r1": 1, "g0": 1, "g1": 1}
    bound = steady_state_bound(step)
    assert dict(bound.busy) == {"compute": 8, "reduce": 6, "gather": 4}
    assert (bound.seconds, bound.cycle_seconds) == (15, 15)
    assert set(bound.cycle) == {"fb", "bb", "r0", "r1", "u1", "g1", "g0"}


def test_a_busy_stream_can_be_the_bound() -> None:
    step = StepGraph([Operation(name, FORWARD, seconds=2) for name in "abc"])
    bound = steady_state_bound(step)
    assert (bound.seconds, bound.cycle_seconds, bound.cycle) == (6, 0, ())


def test_a_cycle_over_several_steps_counts_per_step() -> None:
    operations = [Operation(name, FORWARD, stream=name, seconds=3) for name in "ab"]
    edges = [edge("a", "b"), edge("b", "a", carried=2), edge("b", "b", carried=4)]
    bound = steady_state_bound(StepGraph(operations, edges))
    assert (bound.cycle_seconds, set(bound.cycle)) == (3, {"a", "b"})


def test_a_cycle_names_the_operations_between_its_ends() -> None:
    operations = [Operation(name, FORWARD, seconds=1) for name in "abcd"]
    edges = [edge(a, b, Why.ORDER) for a, b in pairwise("abcd")]
    bound = steady_state_bound(StepGraph(operations, [*edges, edge("d", "a", Why.ORDER, 1)]))
    assert (bound.cycle_seconds, len(bound.cycle)) == (4, 4)
    assert "abcd" in "".join(bound.cycle * 2)  # a cycle begins anywhere


def test_a_cycle_is_found_far_below_the_length_of_the_step() -> None:
    long = Operation("long", FORWARD, seconds=1e12)
    short = [Operation(f"o{i}", FORWARD, seconds=1 + i) for i in range(3)]
    edges = [edge(o.name, o.name, carried=3) for o in short]
    bound = steady_state_bound(StepGraph([long, *short], edges))
    assert (bound.cycle_seconds, bound.cycle) == (1, ("o2",))


def test_nothing_bounds_an_empty_step() -> None:
    step = StepGraph([])
    assert steady_state_bound(step).seconds == 0
    assert critical_path(step) == CriticalPath((), 0)
    assert (slack(step), use_order(step), gather_order(step)) == ({}, (), ())


def test_a_missing_operation_is_named() -> None:
    with pytest.raises(ValueError, match="no norm of bucket 0"):
        earliest_launch(small_step(), 0, Role.NORM)
    with pytest.raises(ValueError, match="no reduce of bucket 2"):
        latest_wait(small_step(), 2, Role.REDUCE)


@on_many_graphs
@given(step_graphs())
def test_launches_follow_the_transitive_closure(step: StepGraph) -> None:
    before = closure(step)
    for bucket, (name, operation) in enumerate(step.operations.items()):
        launch = earliest_launch(step, bucket, operation.role)
        # Every other operation that must come first does so for one of these, and none for two.
        maximal = {x for x in before[name] if not any(x in before[y] for y in before[name])}
        assert set(launch.after) == maximal
        assert launch.seconds == step.earliest_starts[name]


@on_many_graphs
@given(step_graphs())
def test_waits_are_the_first_data_consumers(step: StepGraph) -> None:
    before = closure(step)
    for bucket, (name, operation) in enumerate(step.operations.items()):
        consumers = [
            (d.carried, target) for s, target, d in step.edges if s == name and d.why is Why.DATA
        ]
        wait = latest_wait(step, bucket, operation.role)
        if not consumers:
            assert wait == Wait((), 0, step.seconds)
            continue
        soonest = min(consumers)[0]
        targets = {t for carried, t in consumers if carried == soonest}
        assert wait.carried == soonest
        assert set(wait.consumers) == {t for t in targets if not before[t] & targets}
        assert wait.seconds == min(step.latest_starts[t] for t in targets)


@on_many_graphs
@given(step_graphs(), st.data())
def test_extremes_of_any_set_follow_the_transitive_closure(
    step: StepGraph, data: st.DataObject
) -> None:
    before = closure(step)
    names = data.draw(st.sets(st.sampled_from(step.order)))
    last, first = latest_of(step, names), earliest_of(step, names)
    assert set(last) == {x for x in names if not any(x in before[y] for y in names)}
    assert set(first) == {x for x in names if not before[x] & names}
    assert [*last] == sorted(last, key=step.position.__getitem__)


@on_many_graphs
@given(step_graphs())
def test_uses_follow_the_transitive_closure(step: StepGraph) -> None:
    before = closure(step)
    for parameter in PARAMETERS:
        readers = {
            name
            for name, o in step.operations.items()
            if o.role is Role.COMPUTE and parameter in o.reads
        }
        forward = {n for n in readers if step.operations[n].phase.kind is PhaseKind.FORWARD}
        last = last_read_of_old_value(step, parameter)
        first = first_use_in_next_forward(step, parameter)
        assert set(last) == {x for x in readers if not any(x in before[y] for y in readers)}
        assert set(first) == {x for x in forward if not before[x] & forward}
        assert (parameter in use_order(step)) == bool(forward)


@on_many_graphs
@given(step_graphs())
def test_the_critical_path_is_a_path_as_long_as_the_step(step: StepGraph) -> None:
    path = critical_path(step)
    assert all(a in step.predecessors(b) for a, b in pairwise(path.operations))
    assert sum(step.operations[name].seconds for name in path.operations) == path.seconds
    assert path.seconds == step.seconds


def misses_deadline(step: StepGraph, late: str, by: float) -> bool:
    """Whether something misses its latest start in this step or a later one, if ``late`` starts
    ``by`` after its earliest start and all else as early as it then can."""
    starts: dict[str, float] = {}
    for name in step.order:
        ends = [starts[p] + step.operations[p].seconds for p in step.predecessors(name)]
        starts[name] = max([*ends, step.earliest_starts[name] + by * (name == late)])
    ends_of = {name: starts[name] + step.operations[name].seconds for name in starts}
    return any(
        ends_of[e.source] > e.dependency.carried * step.seconds + step.latest_starts[e.target]
        for e in step.carried_edges
    ) or any(
        # Nothing waits for it, so the step's end is its deadline.
        ends_of[name] > step.seconds
        for name in ends_of
        if not any(e.source == name for e in step.edges)
    )


@on_many_graphs
@given(step_graphs())
def test_slack_is_the_most_that_nothing_notices(step: StepGraph) -> None:
    for name, seconds in slack(step).items():
        assert seconds >= 0
        assert not misses_deadline(step, name, seconds)
        assert misses_deadline(step, name, seconds + 1)


def cycle_ratios(step: StepGraph) -> list[Fraction]:
    """Seconds per carried step of every simple cycle."""
    fewest: dict[tuple[str, str], int] = {}
    for source, target, dependency in step.edges:
        ends = source, target
        fewest[ends] = min(dependency.carried, fewest.get(ends, dependency.carried))
    ratios: list[Fraction] = []
    for cycle in nx.simple_cycles(nx.DiGraph(list(fewest))):
        seconds = sum((Fraction(step.operations[name].seconds) for name in cycle), Fraction(0))
        steps = sum(fewest[ends] for ends in pairwise([*cycle, cycle[0]]))
        ratios.append(seconds / steps)
    return ratios


@settings(deadline=None, max_examples=150)
@given(step_graphs())
def test_the_cycle_bound_is_the_largest_of_all_cycles(step: StepGraph) -> None:
    bound = steady_state_bound(step)
    assert bound.cycle_seconds == float(max(cycle_ratios(step), default=0))
    assert bound.seconds == max([bound.cycle_seconds, *bound.busy.values()])
    assert bool(bound.cycle) == (bound.cycle_seconds > 0)
    if bound.cycle:
        pairs = list(pairwise([*bound.cycle, bound.cycle[0]]))
        steps = [
            min(d.carried for s, t, d in step.edges if (s, t) == ends)  # fails without an edge
            for ends in pairs
        ]
        total = sum(Fraction(step.operations[name].seconds) for name in bound.cycle)
        assert float(total / sum(steps)) == bound.cycle_seconds


def simulated_end(step: StepGraph, steps: int) -> float:
    """When the last operation ends, if ``steps`` steps run as early as the edges allow."""
    ends: list[dict[str, float]] = []
    for number in range(steps):
        now: dict[str, float] = {}
        ends.append(now)
        for name in step.order:
            start = max(
                (
                    ends[number - dependency.carried][source]
                    for source, _, dependency in step.graph.in_edges(name, keys=True)
                    if dependency.carried <= number
                ),
                default=0.0,
            )
            now[name] = start + step.operations[name].seconds
    return max(max(now.values()) for now in ends)


@settings(deadline=None, max_examples=40)
@given(step_graphs(max_size=6))
def test_many_simulated_steps_take_the_cycle_bound_each(step: StepGraph) -> None:
    steps = 60
    seconds = steady_state_bound(step).cycle_seconds
    # What does not repeat (the first and the last cycle, the paths to and from it) costs at most
    # a few rounds of everything.
    once = 8 * sum(operation.seconds for operation in step.operations.values())
    assert abs(simulated_end(step, steps) - steps * seconds) <= once


def test_the_steady_state_of_the_small_step_is_simulated_exactly() -> None:
    step = small_step()
    ends = [simulated_end(step, steps) for steps in (10, 11, 30)]
    assert ends[1] - ends[0] == 15
    assert ends[2] - ends[1] == 19 * 15


def layered_step(layers: int) -> tuple[StepGraph, ShardLayout]:
    """A deep model, 20 operations and 4 parameters a layer; as many buckets as layers."""
    operations = []
    for kind, order in (
        (PhaseKind.FORWARD, range(layers)),
        (PhaseKind.BACKWARD, reversed(range(layers))),
    ):
        for layer in order:
            for index in range(10):
                own = frozenset([f"{layer}.{index}"] if index < 4 else ())
                gradient = frozenset([f"{layer}.{index - 1}"] if 1 <= index < 5 else ())
                operations.append(
                    Operation(
                        f"{kind.value}/{layer}.{index}",
                        Phase(kind),
                        seconds=1e-3 * (index + 1),
                        reads=own,
                        gradients=gradient if kind is PhaseKind.BACKWARD else frozenset(),
                    )
                )
    names = [operation.name for operation in operations]
    edges = [e for a, b in pairwise(names) for e in (edge(a, b), edge(a, b, Why.ORDER))]
    edges.append(edge(names[-1], names[0], Why.ORDER, 1))
    specs = [
        ParameterSpec(f"{layer}.{index}", 1024, "float32", 4, "cpu")
        for layer in reversed(range(layers))
        for index in range(4)
    ]
    layout = build_layout([specs], world_size=4, bucket_bytes=4 * 4096)
    return StepGraph(operations, edges), layout


def ask_everything(step: StepGraph, layout: ShardLayout, clip: bool, rate: float) -> None:
    full = with_buckets(
        StepGraph(step.operations.values(), step.edges),
        layout,
        clip=clip,
        communication_cost=lambda _, nbytes: 1e-4 + nbytes * rate,
    )
    for bucket, role in full.by_bucket:
        earliest_launch(full, bucket, role)
        latest_wait(full, bucket, role)
    for parameter in full.readers:
        last_read_of_old_value(full, parameter)
        first_use_in_next_forward(full, parameter)
    for question in (use_order, gather_order, slack, critical_path, steady_state_bound):
        question(full)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("rate", [1e-7, 3e-6, 1e-4])
def test_work_grows_with_the_graph_and_not_faster(clip: bool, rate: float) -> None:
    small, large = layered_step(12), layered_step(120)
    assert len(large[0].operations) == 10 * len(small[0].operations)
    assert len(large[1].buckets) == 10 * len(small[1].buckets) == 120
    few = lines_run(lambda: ask_everything(*small, clip, rate))
    many = lines_run(lambda: ask_everything(*large, clip, rate))
    assert many <= 12 * few


def test_an_often_read_parameter_in_many_buckets_adds_few_edges() -> None:
    reads = 200
    operations = [Operation(f"o{i}", FORWARD, reads=frozenset("p")) for i in range(reads)]
    edges: list[Edge] = [edge(f"o{i}", f"o{i + 1}", Why.ORDER) for i in range(reads - 1)]
    layout = build_layout(
        [[ParameterSpec("p", 64 * 100, "float32", 4, "cpu")]], world_size=1, bucket_bytes=256
    )
    assert len(layout.buckets) == 100
    step = with_buckets(StepGraph(operations, edges), layout)
    assert len(step.edges) < reads + 8 * 100
