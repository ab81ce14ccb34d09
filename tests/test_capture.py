"""From real captured graphs to step graphs, checked by running the graphs; buckets in them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.fx
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import nn

from fxcomm.analysis.capture import PhaseGraph, capture_step, with_buckets
from fxcomm.analysis.dependencies import (
    first_use_in_next_forward,
    gather_order,
    last_read_of_old_value,
    use_order,
)
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
from fxcomm.layout import ParameterSpec, ShardLayout, build_layout
from fxcomm.plan import order_of_use
from tests.test_step_graph import closure

FORWARD, BACKWARD = PhaseKind.FORWARD, PhaseKind.BACKWARD
aten = torch.ops.aten


class Mlp(nn.Module):
    """Registers its layers in the reverse of the order in which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.first = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.middle(self.first(x).relu()).relu())
        loss: torch.Tensor = self.last(x).square().mean()
        return loss


class Twice(nn.Module):
    """Uses one layer twice, around another."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.other(self.shared(x).relu()).relu())
        return x.square().mean()


class Tied(nn.Module):
    """Reads words and predicts them with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.hidden(self.words(x.abs().long() % 6)).tanh())
        return logits.square().mean()


MODELS = (Mlp, Twice, Tied)


@dataclass(frozen=True)
class Capture:
    """A model's forward and backward graph, and the values with which it was captured."""

    parameters: dict[str, torch.Tensor]
    x: torch.Tensor
    phases: tuple[PhaseGraph, PhaseGraph]

    def step(self) -> StepGraph:
        return capture_step(self.phases)


def captured(model: nn.Module, **options: Any) -> Capture:
    """AOTAutograd's graphs of one step; ``options`` go to ``aot_function``."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    names, graphs = list(parameters), dict[str, torch.fx.GraphModule]()

    def compiler(kind: str) -> Callable[[torch.fx.GraphModule, Any], Any]:
        def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
            graphs[kind] = gm
            return make_boxed_func(gm.forward)

        return keep

    def loss(*values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(
            model, dict(zip(names, values, strict=False)), values[-1]
        )
        return found

    run = aot_function(loss, compiler("forward"), compiler("backward"), **options)
    x = torch.randn(3, 6)
    run(*(p.clone().requires_grad_() for p in parameters.values()), x).backward()
    forward, backward = graphs["forward"].graph, graphs["backward"].graph
    outputs: Any = forward.output_node().args[0]
    position = {node.name: index for index, node in enumerate(outputs)}
    saved = {
        index: (0, position[node.name])
        for index, node in enumerate(backward.find_nodes(op="placeholder"))
        if node.name in position
    }
    inputs: dict[str | int, str] = {**dict(enumerate(names))}
    return Capture(
        parameters,
        x,
        (
            PhaseGraph(Phase(FORWARD), forward, inputs),
            PhaseGraph(Phase(BACKWARD), backward, {}, dict(enumerate(names)), saved),
        ),
    )


def calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


class Spying(torch.fx.Interpreter):
    """Runs a graph and calls ``before`` and ``after`` with each node's operation name."""

    def __init__(
        self, phase: PhaseGraph, before: Callable[[str], None], after: Callable[[str], None]
    ) -> None:
        super().__init__(torch.fx.GraphModule(nn.Module(), phase.graph))
        self.phase, self.before, self.after = phase.phase, before, after

    def run_node(self, n: torch.fx.Node) -> Any:
        self.before(f"{self.phase}/{n.name}")
        value = super().run_node(n)
        self.after(f"{self.phase}/{n.name}")
        return value


def run_step(
    capture: Capture,
    parameters: Mapping[str, torch.Tensor],
    before: Callable[[str], None] = lambda _: None,
    after: Callable[[str], None] = lambda _: None,
) -> tuple[torch.Tensor, ...]:
    """The loss and the gradients that the captured graphs compute."""
    forward, backward = capture.phases
    outputs = Spying(forward, before, after).run(*parameters.values(), capture.x)
    count = len(list(backward.graph.find_nodes(op="placeholder")))
    inputs = [
        outputs[backward.saved[index][1]] if index in backward.saved else torch.ones(())
        for index in range(count)
    ]
    gradients = Spying(backward, before, after).run(*inputs)
    return outputs[0].clone(), *(g.clone() for g in gradients if g is not None)


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


PARTITIONS: list[dict[str, Any]] = [{}, {"partition_fn": min_cut_rematerialization_partition}]


@pytest.fixture(
    scope="module",
    params=[(m, p) for m in MODELS for p in (0, 1)],
    ids=lambda p: f"{p[0].__name__}{p[1]}",
)
def capture(request: pytest.FixtureRequest) -> Capture:
    torch.manual_seed(0)
    model, partition = request.param
    return captured(model(), **PARTITIONS[partition])


def test_nothing_reads_the_old_value_after_its_last_read(capture: Capture) -> None:
    """Overwriting a parameter changes nothing right after its last read, and much right before."""
    expected = run_step(capture, capture.parameters)
    step = capture.step()
    for name in capture.parameters:
        (last,) = last_read_of_old_value(step, name)
        for spoil_before in (False, True):
            values = {n: p.clone() for n, p in capture.parameters.items()}

            def spoil(operation: str, value: torch.Tensor = values[name], last: str = last) -> None:
                if operation == last:
                    value.fill_(float("nan"))

            # Autograd hands the bias to the norm's backward, which does not look at it.
            if spoil_before and name == "norm.bias":
                continue
            hook = {"before" if spoil_before else "after": spoil}
            assert same(run_step(capture, values, **hook), expected) != spoil_before


def test_nothing_reads_the_new_value_before_its_first_use(capture: Capture) -> None:
    """A parameter that arrives right before its first use is in time; right after it, it is not."""
    expected = run_step(capture, capture.parameters)
    step = capture.step()
    for name, right in capture.parameters.items():
        (first,) = first_use_in_next_forward(step, name)
        for arrives_late in (False, True):
            values = {n: p.clone() for n, p in capture.parameters.items()}
            values[name].fill_(float("nan"))

            def arrive(
                operation: str,
                value: torch.Tensor = values[name],
                right: torch.Tensor = right,
                first: str = first,
            ) -> None:
                if operation == first:
                    value.copy_(right)

            hook = {"after" if arrives_late else "before": arrive}
            assert same(run_step(capture, values, **hook), expected) != arrives_late


def test_each_gradient_is_the_contribution_that_is_named(capture: Capture) -> None:
    step = capture.step()
    backward = capture.phases[1]
    nodes: Any = backward.graph.output_node().args[0]
    for position, name in backward.gradient_outputs.items():
        assert step.contributors[name] == (f"backward0/{nodes[position].name}",)


def test_operations_are_all_nodes_that_run_in_one_chain(capture: Capture) -> None:
    step = capture.step()
    names = [
        f"{phase.phase}/{node.name}" for phase in capture.phases for node in calls(phase.graph)
    ]
    assert list(step.operations) == list(step.order) == names
    assert {step.chains[name] for name in names} == {(0, place) for place in range(len(names))}
    assert [(e.source, e.target, e.dependency.why) for e in step.carried_edges] == [
        (names[-1], names[0], Why.ORDER)
    ]
    assert StepGraph.from_json(step.to_json()) == step


def test_data_edges_are_the_uses_of_values_in_both_graphs(capture: Capture) -> None:
    makers: dict[Any, str | None] = {}
    edges = set()
    outputs: Any = capture.phases[0].graph.output_node().args[0]
    for phase in capture.phases:
        for place, node in enumerate(phase.graph.find_nodes(op="placeholder")):
            made_by = outputs[phase.saved[place][1]] if place in phase.saved else None
            makers[node] = makers[made_by] if made_by else None
        for node in calls(phase.graph):
            makers[node] = f"{phase.phase}/{node.name}"
            edges |= {(makers[n], makers[node]) for n in node.all_input_nodes if makers[n]}
    found = {(e.source, e.target) for e in capture.step().edges if e.dependency.why is Why.DATA}
    assert found == edges
    assert any(
        source.startswith("forward") and target.startswith("back") for source, target in found
    )


def phase_counts(step: StepGraph, parameter: str) -> tuple[int, int]:
    kinds = [step.operations[name].phase.kind for name in step.readers[parameter]]
    return kinds.count(FORWARD), kinds.count(BACKWARD)


def test_every_use_of_a_shared_parameter_counts() -> None:
    twice, tied = captured(Twice()).step(), captured(Tied()).step()
    # The first use needs no gradient of its input, so backward reads the weight once.
    assert phase_counts(twice, "shared.weight") == (2, 1)
    assert phase_counts(twice, "shared.bias") == (2, 0)
    assert phase_counts(twice, "other.weight") == (1, 1)
    # The embedding and the head; the embedding's backward does not read its weight.
    assert phase_counts(tied, "words.weight") == (2, 1)


def test_use_order_is_that_of_the_forward_not_of_registration() -> None:
    model = Mlp()
    order = use_order(captured(model).step())
    layers = list(dict.fromkeys(name.split(".")[0] for name in order))
    assert layers == ["first", "middle", "norm", "last"]
    assert list(order) != [name for name, _ in model.named_parameters()]
    assert set(order) == {name for name, _ in model.named_parameters()}


def test_views_cost_nothing_and_are_not_asked_for_their_cost() -> None:
    asked = []

    def cost(node: torch.fx.Node) -> float:
        asked.append(node.target)
        return 2.0

    step = capture_step(captured(Mlp()).phases, cost)
    views = [o for name, o in step.operations.items() if name.startswith("forward0/t")]
    assert views
    assert all((o.seconds, o.nbytes, o.reads) == (0, 0, frozenset()) for o in views)
    assert not any(target is aten.t.default for target in asked)
    assert step.operations["forward0/addmm"].seconds == 2
    # bias 8, input 3 x 6, weight 6 x 8, result 3 x 8, of 4 bytes.
    assert step.operations["forward0/addmm"].nbytes == 4 * (8 + 18 + 48 + 24)


def call(target: Any, *arguments: Any) -> torch.fx.Node:
    """A node of the operator, named after it, in the graph of its first operand."""
    name = getattr(target, "__name__", "").split(".")[0]
    node: torch.fx.Node = arguments[0].graph.call_function(target, arguments, name=name)
    return node


def graph_of(build: Callable[[torch.fx.Node], Any]) -> torch.fx.Graph:
    """A graph of one placeholder p that returns what ``build`` makes of it."""
    graph = torch.fx.Graph()
    graph.output(build(graph.placeholder("p")))
    return graph


@pytest.mark.parametrize(
    ("target", "arguments", "reads", "then"),
    [
        (aten.view.default, ([4],), False, True),
        (aten.detach.default, (), False, True),
        (aten._unsafe_view.default, ([4],), False, True),
        (aten.contiguous.default, (), True, True),
        (aten.clone.default, (), True, False),
        (aten.zeros_like.default, (), False, False),
        (aten.sym_size.int, (0,), False, False),
    ],
)
def test_who_reads_a_parameter(
    target: Any, arguments: tuple[Any, ...], reads: bool, then: bool
) -> None:
    """Whether an operator, and one that uses its result, reads the memory of the operand."""

    def build(p: torch.fx.Node) -> tuple[torch.fx.Node]:
        first = call(target, p, *arguments)
        return (call(aten.neg.default, first),)

    step = capture_step([PhaseGraph(Phase(FORWARD), graph_of(build), {"p": "w"})])
    first_operation, second = step.operations.values()
    assert (bool(first_operation.reads), bool(second.reads)) == (reads, then)


def test_members_of_a_split_share_the_parameter() -> None:
    def build(p: torch.fx.Node) -> tuple[torch.fx.Node]:
        pieces = call(aten.split.Tensor, p, 2)
        piece = call(operator.getitem, pieces, 1)
        return (call(aten.neg.default, piece),)

    step = capture_step([PhaseGraph(Phase(FORWARD), graph_of(build), {"p": "w"})])
    assert step.readers["w"] == ("forward0/neg",)


def test_a_saved_view_keeps_its_parameter_whatever_else_its_placeholder_is_called() -> None:
    forward = PhaseGraph(
        Phase(FORWARD), graph_of(lambda p: (call(aten.detach.default, p),)), {"p": "w"}
    )
    negate = graph_of(lambda p: (call(aten.neg.default, p),))
    backward = PhaseGraph(Phase(BACKWARD), negate, {0: "alias"}, saved={0: (0, 0)})
    step = capture_step([forward, backward])
    assert step.operations["backward0/neg"].reads == {"w", "alias"}


def test_writes_are_seen_and_a_copy_does_not_read_its_destination() -> None:
    def build(p: torch.fx.Node) -> tuple[torch.fx.Node]:
        view = call(aten.t.default, p)
        call(aten.add_.Tensor, view, 1)
        new = call(aten.zeros_like.default, p)
        return (call(aten.copy_.default, p, new),)

    phase = PhaseGraph(Phase(PhaseKind.UPDATE), graph_of(build), {0: "w"})
    operations = capture_step([phase]).operations
    written = frozenset("w")
    assert (operations["update0/add_"].reads, operations["update0/add_"].writes) == (written,) * 2
    assert operations["update0/copy_"].writes == written
    assert not operations["update0/copy_"].reads


def test_a_gradient_that_is_handed_on_is_in_place_when_its_phase_runs() -> None:
    def build(p: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
        return p, call(aten.neg.default, p)

    phase = PhaseGraph(Phase(BACKWARD), graph_of(build), gradient_outputs={0: "v", 1: "w"})
    step = capture_step([phase])
    assert step.operations["backward0/neg"].gradients == frozenset("vw")
    empty = PhaseGraph(Phase(BACKWARD), graph_of(lambda p: (p, None)), {}, {0: "v", 1: "u"})
    step = capture_step([phase, empty])
    assert list(step.operations) == ["backward0/neg"]
    assert "u" not in step.contributors
    assert capture_step([empty]).operations == {}


def test_graphs_of_one_phase_have_names_of_their_own() -> None:
    phase = PhaseGraph(Phase(FORWARD), graph_of(lambda p: (call(aten.neg.default, p),)))
    second = replace(phase, saved={0: (0, 0)})
    step = capture_step([phase, second, replace(phase, phase=Phase(FORWARD, 1))])
    assert list(step.operations) == ["forward0/neg", "forward0.1/neg", "forward1/neg"]
    assert "forward0/neg" in step.predecessors("forward0.1/neg")


def test_records_that_do_not_fit_are_refused() -> None:
    phase = PhaseGraph(Phase(FORWARD), graph_of(lambda p: (p,)))
    for bad, message in (
        (replace(phase, parameter_inputs={"q": "w"}), "no placeholder 'q' for parameter 'w'"),
        (replace(phase, parameter_inputs={1: "w"}), "no placeholder 1"),
        (replace(phase, parameter_inputs={-1: "w"}), "no placeholder -1"),
        (replace(phase, gradient_outputs={1: "w"}), "no output 1 for a gradient"),
        (replace(phase, saved={1: (0, 0)}), "no placeholder 1 for a saved value"),
        (replace(phase, saved={0: (1, 0)}), "placeholder 0 is saved from output 0 of graph 1"),
        (replace(phase, saved={0: (0, 1)}), "placeholder 0 is saved from output 1 of graph 0"),
    ):
        with pytest.raises(ValueError, match=message):
            capture_step([phase, bad])


# --- buckets ----------------------------------------------------------------------------------


def micro_steps(capture: Capture, count: int) -> Iterator[PhaseGraph]:
    forward, backward = capture.phases
    for index in range(count):
        yield replace(forward, phase=Phase(FORWARD, index))
        yield replace(
            backward,
            phase=Phase(BACKWARD, index),
            saved={k: (2 * index, position) for k, (_, position) in backward.saved.items()},
        )


def layout_of(capture: Capture, bucket_bytes: int) -> ShardLayout:
    specs = [
        ParameterSpec(name, p.numel(), "float32", 4, "cpu")
        for name, p in reversed(capture.parameters.items())
    ]
    return build_layout([specs], world_size=2, bucket_bytes=bucket_bytes)


def members_of(layout: ShardLayout, bucket: int) -> set[str]:
    return {layout.parameters[s.parameter].name for s in layout.buckets[bucket].segments}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("count", [1, 3])
def test_buckets_wait_for_all_they_need(
    capture: Capture, bucket_bytes: int, count: int, clip: bool
) -> None:
    layout = layout_of(capture, bucket_bytes)
    compute = capture_step(list(micro_steps(capture, count)))
    step = with_buckets(compute, layout, clip=clip)
    before = closure(step)
    buckets = range(len(layout.buckets))
    reduces = {f"reduce/{bucket}" for bucket in buckets}
    for bucket in buckets:
        members = members_of(layout, bucket)
        contributions = {n for n, o in compute.operations.items() if o.gradients & members}
        assert len({compute.operations[n].phase for n in contributions}) == count
        reads = {n for n, o in compute.operations.items() if o.reads & members}
        direct = set(step.predecessors(f"reduce/{bucket}"))
        assert contributions == direct - reduces
        assert reads | {f"reduce/{bucket}"} <= before[f"update/{bucket}"]
        assert (reduces <= before[f"update/{bucket}"]) == (clip or bucket == max(buckets))
        assert reads | {f"update/{bucket}"} <= before[f"gather/{bucket}"]
        carried = {e.target for e in step.carried_edges if e.source == f"gather/{bucket}"}
        assert all(name in carried or before[name] & carried for name in reads)


def test_reads_after_the_gradient_hold_back_the_update() -> None:
    """Bare operations, as a backward may read a weight after it has made its gradient."""
    w = frozenset("w")
    operations = [
        Operation("use", Phase(FORWARD), reads=w),
        Operation("gradient", Phase(BACKWARD), gradients=w),
        Operation("early", Phase(BACKWARD), reads=w),
        Operation("late", Phase(BACKWARD), reads=w),
        Operation("elsewhere", Phase(BACKWARD), stream="other", reads=w),
    ]
    order = Dependency(Why.ORDER)
    edges = [Edge(a.name, b.name, order) for a, b in pairwise(operations[:-1])]
    layout = build_layout(
        [[ParameterSpec("w", 100, "float32", 4, "cpu")]], world_size=1, bucket_bytes=256
    )
    assert len(layout.buckets) == 2
    step = with_buckets(StepGraph(operations, edges), layout)
    anti = {(e.source, e.target) for e in step.edges if e.dependency == Dependency(Why.ANTI)}
    links = [f"{link}/{bucket}" for link in ("update", "gather") for bucket in (0, 1)]
    assert anti == {(reader, link) for reader in ("late", "elsewhere") for link in links}
    carried = {(e.source, e.target) for e in step.carried_edges if e.dependency.why is Why.DATA}
    firsts = ("use", "elsewhere")
    assert carried == {(f"gather/{bucket}", reader) for bucket in (0, 1) for reader in firsts}


def test_bucket_operations_say_what_they_move() -> None:
    capture = captured(Mlp())
    layout = layout_of(capture, 700)
    step = with_buckets(
        capture.step(),
        layout,
        clip=True,
        reduce_stream="r",
        gather_stream="g",
        communication_cost=lambda role, nbytes: nbytes * (3.0 if role is Role.GATHER else 2.0),
        compute_cost=lambda role, nbytes: nbytes + 1.0,
    )
    assert len(layout.buckets) > 1
    for bucket, value in enumerate(layout.buckets):
        reduce, update, gather, norm = (
            step.operations[step.by_bucket[bucket, role]]
            for role in (Role.REDUCE, Role.UPDATE, Role.GATHER, Role.NORM)
        )
        whole, shard = value.nbytes, value.nbytes // 2
        assert [o.nbytes for o in (reduce, update, gather, norm)] == [whole, shard, whole, shard]
        assert [o.stream for o in (reduce, update, gather, norm)] == [
            "r",
            "compute",
            "g",
            "compute",
        ]
        assert [o.seconds for o in (reduce, update, gather, norm)] == [
            *(whole * 2, shard + 1, whole * 3, shard + 1)
        ]
        assert update.writes == gather.writes == members_of(layout, bucket)
    norm = step.operations["norm/all"]
    assert (norm.stream, norm.seconds, norm.bucket) == ("r", 8, None)


def test_collectives_of_a_stream_run_in_their_order() -> None:
    capture = captured(Mlp())
    layout = layout_of(capture, 1)
    count = len(layout.buckets)
    order = [*range(1, count), 0]
    step = with_buckets(capture.step(), layout, gather_order=order)
    for link, buckets in (("reduce", range(count)), ("gather", order)):
        names = [f"{link}/{bucket}" for bucket in buckets]
        assert [step.chains[name][1] for name in names] == list(range(count))
        assert len({step.chains[name][0] for name in names}) == 1
        ends = [(e.source, e.target) for e in step.carried_edges if e.source == names[-1]]
        assert (names[-1], names[0]) in ends


def test_gathers_follow_the_use_of_the_next_forward(capture: Capture) -> None:
    layout = layout_of(capture, 1)
    compute = capture.step()
    step = with_buckets(compute, layout)
    number = {spec.name: index for index, spec in enumerate(layout.parameters)}
    expected = order_of_use(layout, [number[name] for name in use_order(compute)])
    assert gather_order(step) == expected
    places = [step.chains[f"gather/{bucket}"][1] for bucket in expected]
    assert places == sorted(places)


def test_unused_parameters_and_strangers_do_no_harm() -> None:
    capture = captured(Mlp())
    specs = [ParameterSpec("unused", 10, "float32", 4, "cpu")]
    step = with_buckets(capture.step(), build_layout([specs], world_size=1, bucket_bytes=1))
    assert not step.predecessors("reduce/0")
    assert gather_order(step) == (0,)
    empty = build_layout([], world_size=1, bucket_bytes=1)
    assert with_buckets(capture.step(), empty) == capture.step()


def test_bad_buckets_are_refused() -> None:
    capture = captured(Mlp())
    layout = layout_of(capture, 1)
    step = with_buckets(capture.step(), layout)
    with pytest.raises(ValueError, match="two operations are named 'reduce/0'"):
        with_buckets(step, layout)
    with pytest.raises(ValueError, match="does not name each bucket once"):
        with_buckets(capture.step(), layout, gather_order=[0, 0])
