"""Programs read from real captured graphs: which actions there are, in which order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

from fxcomm import compat
from fxcomm.analysis.gradients import output_node, output_values, production_order
from fxcomm.analysis.program import (
    GATHER,
    REDUCE,
    ArenaPlan,
    CollectiveId,
    Compute,
    ForwardAction,
    GraphActions,
    Launch,
    MicroStep,
    ParameterWait,
    Program,
    Wait,
    backward_actions,
    forward_actions,
    gradient_nodes,
    parameter_outputs,
    peak_bytes,
    saved_parameters,
    step_program,
)
from fxcomm.communicator import Collective, OperatorCall, reduction_bytes
from fxcomm.layout import ParameterSpec, ShardLayout, build_layout
from fxcomm.passes.pipeline import copy_graph_module, run_passes
from fxcomm.passes.reduce import REDUCE_PASSES, BucketTask, Piece, ReduceContext
from fxcomm.passes.stamp import BucketKey, stamp_of
from fxcomm.plan import OverlapPlan
from tests.test_passes import pretended
from tests.zoo import MLP, ReusedModule, TiedGPT

aten = torch.ops.aten
functional = torch.ops._c10d_functional
WORLD = 4


# --- capturing ---


@dataclass(frozen=True)
class Captured:
    """The graphs of a model before the passes. ``inputs`` are those of the forward that are
    parameters, ``gradients`` the outputs of the backward, both by position, in graph order;
    ``sizes`` the parameters' shapes."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    inputs: Mapping[int, str]
    gradients: Mapping[int, str]
    shapes: Mapping[str, torch.Size]

    def layout(self, bucket_bytes: int, *, split: bool) -> ShardLayout:
        """A layout in the order of production."""
        order = [self.gradients[position] for position in self.gradients]
        specs = [ParameterSpec(p, self.shapes[p].numel(), "float32", 4, "cpu") for p in order]
        return build_layout([specs], world_size=WORLD, bucket_bytes=bucket_bytes, split=split)


def capture(model: nn.Module, inputs: torch.Tensor) -> Captured:
    """The graphs that fxcomm's backend would get for ``model``."""
    graphs: dict[bool, torch.fx.GraphModule] = {}
    names: dict[int, str] = {}
    by_identity = {id(p): name for name, p in model.named_parameters()}

    def compile_post_aot(graph: torch.fx.GraphModule, _: Sequence[object], **kwargs: Any) -> Any:
        graphs[bool(kwargs.get("is_backward"))] = copy_graph_module(graph)
        interpreter = torch.fx.Interpreter(graph)
        return compat.boxed(lambda args: interpreter.boxed_run(args))

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        names.update(
            {i: by_identity[id(v)] for i, v in enumerate(example_inputs) if id(v) in by_identity}
        )
        return compat.compile_fx(gm, example_inputs, config={}, inner_compile=compile_post_aot)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(inputs).sum().backward()
    forward, backward = graphs[False], graphs[True]
    places = [n.meta["desc"].idx for n in forward.graph.nodes if n.op == "placeholder"]
    found = compat.gradient_inputs(output_node(backward.graph))
    order = production_order(backward.graph, [p for p in found if found[p] in names])
    return Captured(
        forward,
        backward,
        {i: names[place] for i, place in enumerate(places) if place in names},
        {position: names[found[position]] for position in order},
        {name: p.shape for name, p in model.named_parameters()},
    )


@functools.cache
def captured(name: str) -> Captured:
    """One of three models: plain layers, tied embeddings, a module used several times."""
    torch.manual_seed(0)
    if name == "gpt":
        return capture(TiedGPT(), torch.randint(0, 23, (2, 7)))
    return capture({"mlp": MLP, "reused": ReusedModule}[name](), torch.randn(4, 13))


MODELS = ("mlp", "gpt", "reused")


# --- lowering ---


def functional_reduction(numel: int) -> Collective:
    """A reduction as communicators describe it on gloo."""
    splits = [numel // WORLD] * WORLD
    return Collective(
        prepare=(),
        launch=OperatorCall(functional.all_to_all_single.default, (splits, splits, "ranks")),
        finish=(
            OperatorCall(functional.wait_tensor.default),
            OperatorCall(aten.view.default, ([WORLD, numel // WORLD],)),
            OperatorCall(aten.sum.dim_IntList, ([0],)),
            OperatorCall(aten.div.Scalar, (WORLD,)),
        ),
        sent_bytes=float(numel),
    )


def collective_of(numel: int, *, functional_operators: bool) -> Collective:
    return functional_reduction(numel) if functional_operators else pretended(numel, prepared=False)


def lowered_backward(
    case: Captured, plan: OverlapPlan, *, functional_operators: bool = True
) -> torch.fx.GraphModule:
    """The backward graph after the real passes, which launches the plan's ``in_graph`` buckets."""
    positions = {name: position for position, name in case.gradients.items()}
    tasks = []
    for number, bucket in enumerate(plan.layout.buckets):
        if not plan.in_graph[number]:
            continue
        parameters = tuple(plan.layout.parameters[s.parameter].name for s in bucket.segments)
        pieces = tuple(
            Piece(
                positions[p],
                tuple(range(len(case.shapes[p]))),
                s.parameter_offset,
                s.numel,
                s.offset,
            )
            for p, s in zip(parameters, bucket.segments, strict=True)
        )
        collective = collective_of(bucket.numel, functional_operators=functional_operators)
        tasks.append(
            BucketTask(
                BucketKey(0, number),
                bucket.numel,
                torch.float32,
                torch.device("cpu"),
                pieces,
                parameters,
                collective,
            )
        )
    dropped = frozenset(piece.position for task in tasks for piece in task.pieces)
    context = ReduceContext(tuple(tasks), dropped, plan.in_flight_bytes)
    return run_passes(REDUCE_PASSES, case.backward, context)


def waiting_forward(case: Captured) -> torch.fx.GraphModule:
    """The forward graph with a wait before the first use of each parameter or of a view of it."""
    gm = copy_graph_module(case.forward)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for index in case.inputs:
        parameter = placeholders[index]
        users = [user for user in parameter.users if user.op != "output"]
        if users:
            with gm.graph.inserting_before(min(users, key=place.__getitem__)):
                wait = gm.graph.call_function(functional.wait_tensor.default, (parameter,))
            for user in users:
                user.replace_input_with(parameter, wait)
    gm.graph.lint()
    return gm


def plan_of(
    layout: ShardLayout,
    in_graph: Sequence[bool] | None = None,
    limit: int | None = None,
    gather_order: Sequence[int] | None = None,
) -> OverlapPlan:
    """A plan, whose gathers are in the reverse order of its reductions if nothing else is said."""
    count = len(layout.buckets)
    places = (True,) * count if in_graph is None else tuple(in_graph)
    order = tuple(reversed(range(count))) if gather_order is None else tuple(gather_order)
    return OverlapPlan("a test's", layout, places, limit, order, True)


def arena_of(
    plan: OverlapPlan, *, deferred: bool = True, functional_operators: bool = True
) -> ArenaPlan:
    """The plan as an arena executes it whose gathers are in place."""
    buckets = plan.layout.buckets
    reductions = [
        collective_of(b.numel, functional_operators=functional_operators) for b in buckets
    ]
    return ArenaPlan(
        plan,
        tuple(
            reduction_bytes(r, b.numel, torch.float32)
            for r, b in zip(reductions, buckets, strict=True)
        ),
        (0,) * len(buckets),
        (deferred,) * len(buckets),
        group="ranks",
    )


def read_backward(case: Captured, lowered: torch.fx.GraphModule) -> GraphActions:
    """The actions of a backward graph after the passes."""
    return backward_actions(
        lowered.graph,
        gradient_nodes(case.backward.graph, case.gradients),
        saved_parameters(lowered.graph, parameter_outputs(case.forward.graph, case.inputs)),
        group="ranks",
    )


@functools.cache
def read_forward(name: str) -> tuple[ForwardAction, ...]:
    """The actions of a model's forward graph with waits."""
    case = captured(name)
    return forward_actions(waiting_forward(case).graph, case.inputs)


@dataclass(frozen=True)
class Situation:
    """How a captured model is trained."""

    model: str
    bucket_bytes: int
    limit: int | None = None
    split: bool = True
    commshift: bool = True
    in_graph: bool = True
    micro_steps: int = 1
    every: bool = True
    functional_operators: bool = True

    def plan(self) -> OverlapPlan:
        layout = captured(self.model).layout(self.bucket_bytes, split=self.split)
        return plan_of(layout, [self.in_graph] * len(layout.buckets), self.limit)

    def compose(
        self,
        rank: int = 0,
        backward: torch.fx.GraphModule | None = None,
        forward: tuple[ForwardAction, ...] | None = None,
    ) -> Program:
        """The rank's program; other graphs than the lowered ones may be given."""
        case = captured(self.model)
        # What stays local for a while is not launched in graphs.
        in_graphs = self.every or self.micro_steps == 1
        backward = backward or (self._lowered() if in_graphs else case.backward)
        step = MicroStep(
            read_forward(self.model) if forward is None else forward,
            (read_backward(case, backward),),
        )
        last = self.micro_steps - 1
        steps = [replace(step, reduces=self.every or i == last) for i in range(last + 1)]
        return step_program(rank, steps, self.arena())

    def arena(self) -> ArenaPlan:
        """The plan as it is executed."""
        return arena_of(
            self.plan(), deferred=self.commshift, functional_operators=self.functional_operators
        )

    def lowered(self) -> torch.fx.GraphModule:
        """A new copy of the backward graph after the passes."""
        return copy_graph_module(self._lowered())

    def _lowered(self) -> torch.fx.GraphModule:
        # The other fields change nothing in the graph.
        return _lowered(replace(self, commshift=True, micro_steps=1, every=True))


@functools.cache
def _lowered(situation: Situation) -> torch.fx.GraphModule:
    return lowered_backward(
        captured(situation.model),
        situation.plan(),
        functional_operators=situation.functional_operators,
    )


def collectives(program: Program, kind: type[Launch] | type[Wait], of: str) -> list[int]:
    """Bucket numbers of the launches (or waits) of a kind of collective, in order."""
    return [
        a.collective.bucket.bucket
        for a in program.actions
        if isinstance(a, kind) and a.collective.kind == of
    ]


# --- graphs ---


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("functional_operators", [True, False])
def test_a_backward_contributes_packs_and_launches(model: str, functional_operators: bool) -> None:
    situation = Situation(model, 1000, functional_operators=functional_operators)
    plan = situation.plan()
    assert len(plan.layout.buckets) > 2
    found = read_backward(captured(model), situation.lowered())
    launches = [a for a in found.actions if isinstance(a, Launch)]
    assert [a.collective.bucket.bucket for a in launches] == list(range(len(plan.layout.buckets)))
    assert [a.nbytes for a in launches] == [2 * bucket.nbytes for bucket in plan.layout.buckets]
    assert {a.group for a in launches} == {"ranks"}
    assert found.packed == {a.collective.bucket for a in launches}
    contributed = [p for a in found.actions if isinstance(a, Compute) for p in a.contributes]
    assert sorted(contributed) == sorted(captured(model).gradients.values())
    results = [a.writes for a in launches]
    assert sum(map(len, results)) == len(frozenset().union(*results)), "each has its own"
    # Every operand is written before its launch.
    for place, action in enumerate(found.actions):
        if isinstance(action, Launch):
            written = [a.writes_buffers for a in found.actions[:place] if isinstance(a, Compute)]
            assert action.reads & frozenset().union(*written)
    assert not any(isinstance(a, Wait) for a in found.actions)


def test_waits_in_the_graph_come_before_the_launches_that_need_room() -> None:
    found = read_backward(captured("gpt"), Situation("gpt", 2000, limit=10000).lowered())
    waits = [a.collective.bucket.bucket for a in found.actions if isinstance(a, Wait)]
    launches = [a.collective.bucket.bucket for a in found.actions if isinstance(a, Launch)]
    assert waits
    assert waits == list(range(len(waits)))
    assert len(waits) < len(launches)
    assert {b.bucket for b in found.finished} == set(waits)


def test_saved_parameters_are_read_in_the_backward() -> None:
    case = captured("reused")
    outputs = parameter_outputs(case.forward.graph, case.inputs)
    saved = saved_parameters(case.backward.graph, outputs)
    assert {frozenset({name}) for name in ("shared.weight", "last.weight")} <= set(saved.values())
    reads = [
        a.reads
        for a in read_backward(case, case.backward).actions
        if isinstance(a, Compute) and a.reads
    ]
    # Three uses, of which each needs the weight for its input's gradient.
    assert sum("shared.weight" in read for read in reads) == 3


def test_every_use_of_a_reused_module_and_of_tied_weights_is_a_read() -> None:
    for model, parameter, uses in (
        ("reused", "shared.weight", 3),
        ("reused", "first.weight", 1),
        ("gpt", "token.weight", 2),
    ):
        actions = read_forward(model)
        places = [i for i, a in enumerate(actions) if isinstance(a, Compute)]
        reads = [i for i in places if parameter in actions[i].reads]  # type: ignore[union-attr]
        assert len(reads) == uses
        (wait,) = [
            i
            for i, a in enumerate(actions)
            if isinstance(a, ParameterWait) and a.parameter == parameter
        ]
        assert wait < min(reads)


def hand_graph() -> torch.fx.Graph:
    """Views before the wait, a saved input, a copy."""
    graph = torch.fx.Graph()
    weight, other = graph.placeholder("weight"), graph.placeholder("other")
    early = graph.call_function(aten.permute.default, (weight, [1, 0]))
    wait = graph.call_function(functional.wait_tensor.default, (weight,))
    view = graph.call_function(aten.view.default, (wait, [-1]))
    total = graph.call_function(aten.add.Tensor, (view, 1))
    parts = graph.call_function(aten.split.Tensor, (early, 2))
    graph.call_function(operator.getitem, (parts, 0))
    flat = graph.call_function(aten.reshape.default, (other, [-1]))
    graph.output((total, flat, weight, early))
    return graph


def test_views_and_outputs_read_nothing() -> None:
    actions = forward_actions(hand_graph(), {0: "w", 1: "o"}, name="f")
    assert actions == (
        ParameterWait("w", "f: wait_tensor_default"),
        Compute("f: add_tensor", reads=frozenset({"w"})),
        # It may have to copy.
        Compute("f: reshape_default", reads=frozenset({"o"})),
    )


def test_saved_views_are_their_parameters() -> None:
    backward = torch.fx.Graph()
    for name in ("tangents", "permute_default", "weight"):
        backward.placeholder(name)
    outputs = parameter_outputs(hand_graph(), {0: "w", 1: "o"})
    # The copy may be a view of its operand.
    assert outputs == {
        "weight": {"w"},
        "permute_default": {"w"},
        "reshape_default": {"o"},
    }
    assert saved_parameters(backward, outputs) == {1: {"w"}, 2: {"w"}}


def test_a_buffer_that_the_graph_does_not_return_is_freed_after_its_last_use() -> None:
    situation = Situation("mlp", 10**6)
    gm = situation.lowered()
    output = output_node(gm.graph)
    values = output_values(gm.graph)
    packed = next(v for v in values if v is not None and (s := stamp_of(v)) and s.role == "pack")
    output.args = (tuple(None if v is packed else v for v in values),)
    found = read_backward(captured("mlp"), gm)
    launch = next(a for a in found.actions if isinstance(a, Launch))
    freed = found.actions[found.actions.index(launch) + 1]
    assert isinstance(freed, Compute)
    assert "last use" in freed.where
    assert freed.writes_buffers >= launch.reads & freed.writes_buffers != frozenset()


def test_in_place_operators_write_the_storage_behind_their_first_argument() -> None:
    situation = Situation("mlp", 10**6)
    gm = situation.lowered()
    launch = next(n for n in gm.graph.nodes if (s := stamp_of(n)) and s.role == "launch")
    packed = launch.args[0]
    assert isinstance(packed, torch.fx.Node)
    with gm.graph.inserting_after(launch):
        view = gm.graph.call_function(aten.view.default, (packed, [-1]))
    with gm.graph.inserting_after(view):
        gm.graph.call_function(aten.zero_.default, (view,))
    found = read_backward(captured("mlp"), gm)
    action = next(a for a in found.actions if "zero_" in a.where)
    assert isinstance(action, Compute)
    launched = next(a for a in found.actions if isinstance(a, Launch))
    assert action.writes_buffers == launched.reads


# --- steps ---


def updates_in(program: Program) -> list[int]:
    return [b.bucket for a in program.actions if isinstance(a, Compute) for b in a.updates]


def test_a_step_updates_and_gathers_in_order() -> None:
    situation = Situation("gpt", 4000)
    count = len(situation.plan().layout.buckets)
    program = situation.compose()
    assert collectives(program, Launch, REDUCE) == list(range(count))
    assert collectives(program, Wait, REDUCE) == list(range(count))
    assert updates_in(program) == list(reversed(range(count)))
    assert collectives(program, Launch, GATHER) == list(reversed(range(count)))
    last = program.actions[-1]
    assert isinstance(last, Launch), "commshift leaves gathers in flight"
    end = Situation("gpt", 4000, commshift=False).compose().actions[-1]
    assert isinstance(end, Wait)


def test_a_bucket_is_updated_when_those_before_it_are_reduced() -> None:
    """The runtime finishes reductions in order of launch."""
    situation = Situation("mlp", 1000)
    count = len(situation.plan().layout.buckets)
    order = [1, 0, *range(2, count)]
    plan = replace(situation.plan(), gather_order=tuple(order))
    step = MicroStep((), (read_backward(captured("mlp"), situation.lowered()),))
    program = step_program(0, [step], arena_of(plan))
    done = [
        ("wait", a.collective.bucket.bucket)
        if isinstance(a, Wait)
        else ("update", next(iter(a.updates)).bucket)
        for a in program.actions
        if (isinstance(a, Wait) and a.collective.kind == REDUCE)
        or (isinstance(a, Compute) and a.updates)
    ]
    expected = [("wait", 0), ("wait", 1), ("update", 1), ("update", 0)]
    expected += [pair for b in range(2, count) for pair in (("wait", b), ("update", b))]
    assert done == expected


def test_buckets_that_no_graph_launched_start_when_the_backward_ends() -> None:
    situation = Situation("mlp", 1000, in_graph=False)
    program = situation.compose()
    launches = [a for a in program.actions if isinstance(a, Launch) and a.collective.kind == REDUCE]
    assert all(a.where.startswith("end of backward 0") for a in launches)
    assert [a.nbytes for a in launches] == list(situation.arena().reduce_bytes)
    contributions = [
        i for i, a in enumerate(program.actions) if isinstance(a, Compute) and a.contributes
    ]
    assert program.actions.index(launches[0]) > max(contributions)


def test_micro_steps_are_numbered_and_carried() -> None:
    both = Situation("mlp", 1000, micro_steps=2).compose()
    count = len(both.buckets)
    carried = [a.micro_steps for a in both.actions if isinstance(a, Launch)][: 2 * count]
    assert carried == [frozenset({0})] * count + [frozenset({1})] * count
    last = Situation("mlp", 1000, micro_steps=2, every=False).compose()
    reductions = [a for a in last.actions if isinstance(a, Launch) and a.collective.kind == REDUCE]
    assert [a.micro_steps for a in reductions] == [frozenset({0, 1})] * count
    numbers = [a.micro_step for a in last.actions if isinstance(a, Compute) and a.contributes]
    assert sorted(set(numbers)) == [0, 1]


def test_gathers_that_no_forward_waits_for_are_drained() -> None:
    program = Situation("mlp", 10**6).compose(forward=())
    waits = [a for a in program.actions if isinstance(a, Wait) and a.collective.kind == GATHER]
    assert [a.where for a in waits] == ["step: bucket 0 still in flight"]


def test_only_deferred_gathers_run_on() -> None:
    situation = Situation("mlp", 1000)
    count = len(situation.plan().layout.buckets)
    deferred = tuple(bucket % 2 == 0 for bucket in range(count))
    arena = replace(situation.arena(), deferred=deferred)
    step = MicroStep(read_forward("mlp"), (read_backward(captured("mlp"), situation.lowered()),))
    actions = step_program(0, [step], arena).actions
    places = [i for i, a in enumerate(actions) if isinstance(a, Launch)]
    ended = {
        a.collective.bucket.bucket
        for a in actions[max(places) :]
        if isinstance(a, Wait) and a.collective.kind == GATHER
    }
    assert ended == {bucket for bucket in range(count) if not deferred[bucket]}
    waited = {a.collective.bucket.bucket for a in actions if isinstance(a, Wait) and a.parameter}
    assert waited == {bucket for bucket in range(count) if deferred[bucket]}


def test_unsharded_buckets_are_reduced_by_the_end_and_never_gathered() -> None:
    situation = Situation("mlp", 1000)
    step = MicroStep((), (read_backward(captured("mlp"), situation.lowered()),))
    arena = replace(situation.arena(), sharded=False)
    program = step_program(0, [step], arena)
    assert collectives(program, Launch, GATHER) == []
    assert not any(bucket.sharded for bucket in program.buckets.values())
    waits = [a for a in program.actions if isinstance(a, Wait)]
    assert waits
    assert all(a.where.startswith("end of backward 0") for a in waits)


def test_another_arenas_collectives_are_left_out() -> None:
    situation = Situation("mlp", 1000)
    step = MicroStep((), (read_backward(captured("mlp"), situation.lowered()),))
    other = step_program(0, [step], replace(situation.arena(), number=1))
    launches = [a for a in other.actions if isinstance(a, Launch)]
    assert {a.collective.bucket.arena for a in launches} == {1}
    assert all(a.where.startswith(("end of backward 0", "step")) for a in launches)


def test_gradients_for_what_another_graph_packs_are_left_out() -> None:
    case, situation = captured("mlp"), Situation("mlp", 1000)
    packing, plain = (read_backward(case, g) for g in (situation.lowered(), case.backward))
    trained = {p for bucket in situation.compose().buckets.values() for p in bucket.parameters}
    for backward in ((packing, plain), (plain, packing)):
        program = step_program(0, [MicroStep((), backward)], situation.arena())
        contributed = {
            a.where: a.contributes & trained for a in program.actions if isinstance(a, Compute)
        }
        run = f"backward 0, run {backward.index(packing)}, "
        assert all(where.startswith(run) for where, found in contributed.items() if found)
        assert frozenset().union(*contributed.values()) == trained


@pytest.mark.parametrize("buckets_in_flight", [1, 2, 10**6])
def test_the_runtime_makes_room_for_a_graph_that_launches(buckets_in_flight: int) -> None:
    """What other graphs left in flight, and gathers in another dtype, count with a graph's own."""
    layout = captured("gpt").layout(2000, split=True)
    count = len(layout.buckets)
    limit = 2 * max(bucket.nbytes for bucket in layout.buckets) * buckets_in_flight
    half = count // 2
    plan = plan_of(layout, None, limit)
    arena = replace(arena_of(plan), gather_bytes=tuple(b.nbytes // 2 for b in layout.buckets))
    later = plan_of(layout, [b >= half for b in range(count)], limit)
    graph = read_backward(captured("gpt"), lowered_backward(captured("gpt"), later))
    assert 0 < peak_bytes(graph.actions, 0) <= limit
    program = step_program(0, [MicroStep((), (graph,), before=half)], arena)
    running: dict[CollectiveId, int] = {}
    highest = 0
    for action in program.actions * 2:
        if isinstance(action, Wait):
            running.pop(action.collective, None)
        elif isinstance(action, Launch):
            running[action.collective] = action.nbytes
            highest = max(highest, sum(running.values()))
    assert highest <= limit
    assert highest > limit / 2 or buckets_in_flight > count
    assert collectives(program, Launch, REDUCE) == list(range(count))
