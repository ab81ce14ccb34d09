"""Passes over backward graphs, on small graphs and without any process: what the rewritten graph
computes, when it launches, how much is in flight, and what it says about itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxcomm import compat
from fxcomm.analysis.gradients import leaves_behind, output_node, output_values, production_order
from fxcomm.communicator import Collective, OperatorCall, apply_calls, call_eagerly
from fxcomm.errors import FxcommError
from fxcomm.passes.pipeline import GraphPass, PassRecord, check_order, run_passes
from fxcomm.passes.reduce import (
    REDUCE_PASSES,
    BucketTask,
    Piece,
    ReduceContext,
    ReducedBucket,
    reduced_buckets,
)
from fxcomm.passes.stamp import KEY, BucketKey, stamp_of

aten = torch.ops.aten
ALIGNMENT = 4  # of pieces in these tests' buckets, so that there are gaps


def pretended(numel: int, *, prepared: bool) -> Collective:
    """A collective without ranks: every step changes the values, and the result is the last half,
    as a rank's shard would be."""
    return Collective(
        prepare=(OperatorCall(aten.mul.Scalar, (2,)),) if prepared else (),
        launch=OperatorCall(aten.add.Scalar, (1,)),
        finish=(
            OperatorCall(aten.neg.default),
            OperatorCall(aten.slice.Tensor, (0, numel // 2, numel)),
        ),
        sent_bytes=0.0,
    )


Kernel = Literal["pointwise", "matmul", "sum"]


@dataclass(frozen=True)
class Gradient:
    """A gradient that the example graph returns. ``layout`` lists its dimensions from the slowest
    to the fastest in its own memory, ``order`` in the parameter's. ``source`` is the gradient that
    is the very same tensor, if there is one; ``given`` says that it is an input of the graph, else
    ``kernel`` computes it. Matmuls and sums do so in another shape, of which it is a view."""

    shape: tuple[int, ...]
    layout: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    source: int | None = None
    given: bool = False
    kernel: Kernel = "pointwise"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plain(*shape: int, **other: Any) -> Gradient:
    """A gradient in the usual memory order."""
    dims = tuple(range(len(shape)))
    return Gradient(shape, dims, dims, **other)


def inverse(layout: Sequence[int]) -> list[int]:
    return sorted(range(len(layout)), key=lambda i: layout[i])


def permuted(tensor: Tensor, layout: Sequence[int]) -> Tensor:
    """The same values in another memory order."""
    return tensor.permute(tuple(layout)).contiguous().permute(inverse(layout))


@dataclass(frozen=True)
class Example:
    """A backward graph: first output an activation's gradient, then ``None``, then the gradients.
    ``inputs`` are real arguments; ``produced`` is the order in which it computes the gradients."""

    gm: torch.fx.GraphModule
    inputs: tuple[Tensor, ...]
    gradients: tuple[Gradient, ...]

    FIRST = 2  # output position of the first gradient

    def values(self) -> list[Tensor]:
        """What the gradients are, by the unchanged graph."""
        outputs = torch.fx.Interpreter(self.gm).run(*self.inputs)
        return list(outputs[self.FIRST : self.FIRST + len(self.gradients)])

    def piece(self, gradient: int, start: int, numel: int, offset: int) -> Piece:
        """A piece of one of the gradients."""
        order = self.gradients[gradient].order
        return Piece(self.FIRST + gradient, order, start, numel, offset)


def operand_shapes(gradient: Gradient) -> list[tuple[int, ...]]:
    """The shapes of what the gradient is computed from."""
    if gradient.kernel == "pointwise" or gradient.given:
        return [gradient.shape]
    dims = [gradient.shape[i] for i in gradient.layout]
    if gradient.kernel == "sum":
        return [(7, *dims)]
    rows = math.prod(dims[:1])
    return [(7, rows), (7, gradient.numel // rows)]


def computed(
    call: Callable[..., torch.fx.Node], gradient: Gradient, operands: Sequence[torch.fx.Node]
) -> torch.fx.Node:
    """The gradient as its kernel and views compute it."""
    if gradient.kernel == "pointwise":
        return call(aten.mul.Scalar, operands[0], gradient.numel + 2)
    if gradient.kernel == "sum":
        result = call(aten.sum.dim_IntList, operands[0], [0], True)
    else:
        result = call(aten.mm.default, call(aten.permute.default, operands[0], [1, 0]), operands[1])
    dims = [gradient.shape[i] for i in gradient.layout]
    result = call(aten.view.default, result, dims)
    if gradient.layout == tuple(range(len(dims))):
        return result
    return call(aten.permute.default, result, inverse(gradient.layout))


def example(
    gradients: Sequence[Gradient],
    produced: Sequence[int] | None = None,
    returned: Sequence[int] = (),
    read: Sequence[int] = (),
) -> Example:
    """A graph that computes ``gradients`` in the order ``produced``, with other work in between.
    Those in ``returned`` it returns a second time, behind all others; those in ``read`` it reads
    again at its end, and returns what it makes of them behind these."""
    generator = torch.Generator().manual_seed(0)
    graph = torch.fx.Graph()
    mode = FakeTensorMode()
    inputs: list[Tensor] = []

    def placeholder(name: str, value: Tensor) -> torch.fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(value)
        inputs.append(value)
        return node

    def call(target: Callable[..., Any], *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(
                *[a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
            )
        node.meta["note"] = "original"
        return node

    def operand(name: str, shape: tuple[int, ...], gradient: Gradient) -> torch.fx.Node:
        value = torch.randn(shape, dtype=gradient.dtype, generator=generator)
        plain_order = gradient.kernel != "pointwise" and not gradient.given
        return placeholder(name, value if plain_order else permuted(value, gradient.layout))

    work = placeholder("tangent", torch.randn(3, generator=generator))
    tangents = [
        [operand(f"tangent_{i}_{j}", shape, g) for j, shape in enumerate(operand_shapes(g))]
        for i, g in enumerate(gradients)
    ]
    nodes: dict[int, torch.fx.Node] = {}
    for i in produced or range(len(gradients)):
        work = call(aten.sin.default, work)
        if gradients[i].given:
            (nodes[i],) = tangents[i]
        elif gradients[i].source is None:
            nodes[i] = computed(call, gradients[i], tangents[i])
    for i, gradient in enumerate(gradients):
        if gradient.source is not None:
            nodes[i] = nodes[gradient.source]
    work = call(aten.cos.default, work)
    also = [nodes[i] for i in returned] + [call(aten.neg.default, nodes[i]) for i in read]
    output = graph.output((work, None, *[nodes[i] for i in range(len(gradients))], *also))
    output.meta["user_visible_output_idxs"] = list(
        range(Example.FIRST + len(gradients) + len(also))
    )
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    gm.meta["of"] = "an example"
    return Example(gm, tuple(inputs), tuple(gradients))


def tasks_of(
    case: Example,
    plan: Sequence[Sequence[tuple[int, int, int]]],
    *,
    lead: int = 0,
    dtype: torch.dtype = torch.float32,
    prepared: bool = False,
) -> tuple[BucketTask, ...]:
    """Buckets that hold (gradient, start, numel) one after another at aligned offsets, padded to a
    multiple of 8. ``lead`` elements at the start of each bucket are unused."""
    tasks = []
    for number, content in enumerate(plan):
        pieces, end = [], lead
        for gradient, start, numel in content:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            pieces.append(case.piece(gradient, start, numel, offset))
            end = offset + numel
        size = max(8, -(-end // 8) * 8)
        tasks.append(
            BucketTask(
                key=BucketKey(0, number),
                numel=size,
                dtype=dtype,
                device=torch.device("cpu"),
                pieces=tuple(pieces),
                parameters=tuple(f"p{gradient}" for gradient, *_ in content),
                collective=pretended(size, prepared=prepared),
            )
        )
    return tuple(tasks)


def reduce_context(
    case: Example, tasks: Sequence[BucketTask], limit: int | None = None
) -> ReduceContext:
    held = {piece.position for task in tasks for piece in task.pieces}
    return ReduceContext(tuple(tasks), frozenset(held), limit)


def expected_bucket(case: Example, task: BucketTask) -> Tensor:
    """The bucket before any collective, filled by hand."""
    values = case.values()
    bucket = torch.zeros(task.numel, dtype=task.dtype)
    for piece in task.pieces:
        flat = values[piece.position - case.FIRST].permute(piece.order).reshape(-1)
        bucket[piece.offset : piece.offset + piece.numel] = flat[
            piece.start : piece.start + piece.numel
        ]
    return bucket


class CheckedInterpreter(torch.fx.Interpreter):
    """Runs a graph and compares each inserted node with what its metadata promise."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if stamp_of(n) is not None:
            promised = n.meta["val"]
            assert isinstance(promised, torch._subclasses.FakeTensor), n
            assert (value.shape, value.dtype) == (promised.shape, promised.dtype), n
            assert _strides(value) == _strides(promised), n
        return value


def _strides(tensor: Tensor) -> list[int]:
    """Strides that matter: dimensions of one element have any."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def run_rewritten(case: Example, gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    result: tuple[Any, ...] = CheckedInterpreter(gm).run(*case.inputs)
    return result


def assert_reduces(case: Example, context: ReduceContext) -> torch.fx.GraphModule:
    """Rewrites, runs and compares with the reduction done by hand; returns the rewritten graph."""
    before = case.gm.print_readable(print_output=False)
    metadata = [dict(node.meta) for node in case.gm.graph.nodes]
    gm = run_passes(REDUCE_PASSES, case.gm, context)
    assert case.gm.print_readable(print_output=False) == before, "the original graph changed"
    assert [dict(node.meta) for node in case.gm.graph.nodes] == metadata
    outputs = run_rewritten(case, gm)
    original = torch.fx.Interpreter(case.gm).run(*case.inputs)
    for position, value in enumerate(original):
        kept = outputs[position]
        if position in context.dropped or value is None:
            assert kept is None
        else:
            assert torch.equal(kept, value)
    buckets = reduced_buckets(gm)
    assert [bucket.key for bucket in buckets] == [task.key for task in context.tasks]
    for bucket, task in zip(buckets, context.tasks, strict=True):
        assert_bucket(case, task, bucket, outputs)
    assert_stamped(case, context, gm)
    return gm


def assert_bucket(
    case: Example, task: BucketTask, bucket: ReducedBucket, outputs: Sequence[Any]
) -> None:
    collective = task.collective
    packed = apply_calls(collective.prepare, expected_bucket(case, task), call_eagerly)
    shard = apply_calls((collective.launch, *collective.finish), packed, call_eagerly)
    if bucket.shard is not None:
        assert bucket.packed is None
        assert bucket.launched is None
        assert torch.equal(outputs[bucket.shard], shard)
        return
    assert bucket.packed is not None
    assert bucket.launched is not None
    assert torch.equal(outputs[bucket.packed], packed)
    finished = apply_calls(collective.finish, outputs[bucket.launched], call_eagerly)
    assert torch.equal(finished, shard)


def assert_stamped(case: Example, context: ReduceContext, gm: torch.fx.GraphModule) -> None:
    """Every inserted node has a stamp that tells the truth, and no other node has one. Of the
    others all are left, but for views that only buckets' gradients were."""
    unstamped = [node for node in gm.graph.nodes if stamp_of(node) is None]
    left = {node.name for node in unstamped}
    kept = [n for n in case.gm.graph.nodes if n.name in left or not compat.is_view(n)]
    assert [n.name for n in unstamped] == [n.name for n in kept]
    for node, original in zip(unstamped, kept, strict=True):
        assert (node.op, node.target) == (original.op, original.target)
        assert node.meta.get("note") == original.meta.get("note")
    final: dict[tuple[BucketKey, str], int] = {}
    for node in gm.graph.nodes:
        stamp = stamp_of(node)
        if stamp is None:
            continue
        assert stamp.phase == "BACKWARD"
        assert stamp.parameters == context.task(stamp.bucket).parameters
        assert node.op == "call_function"
        if stamp.final:
            final[stamp.bucket, stamp.role] = final.get((stamp.bucket, stamp.role), 0) + 1
    waited = {b.key for b in reduced_buckets(gm) if b.shard is not None}
    assert final == {
        (task.key, role): 1
        for task in context.tasks
        for role in ("pack", "launch", *(["finish"] if task.key in waited else []))
    }


# --- what is computed ---


def test_one_gradient_fills_a_bucket() -> None:
    case = example([plain(2, 4)])
    gm = assert_reduces(case, reduce_context(case, tasks_of(case, [[(0, 0, 8)]])))
    assert not any(node.target is aten.cat.default for node in gm.graph.nodes), "a needless copy"


@pytest.mark.parametrize("lead", [0, 4, 5])
def test_gaps_and_padding_are_zero(lead: int) -> None:
    case = example([plain(3), plain(5, 2), plain()])
    tasks = tasks_of(case, [[(0, 0, 3), (1, 0, 10), (2, 0, 1)]], lead=lead)
    assert_reduces(case, reduce_context(case, tasks))


def test_a_bucket_without_gradients_is_zero() -> None:
    case = example([plain(3)])
    assert_reduces(case, reduce_context(case, tasks_of(case, [[], [(0, 0, 3)], []])))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("layout", [(0, 1, 2), (2, 0, 1), (0, 2, 1)])
def test_elements_lie_in_the_order_of_the_parameters_memory(
    order: tuple[int, ...], layout: tuple[int, ...]
) -> None:
    case = example([Gradient((3, 4, 5), layout, order)])
    assert_reduces(case, reduce_context(case, tasks_of(case, [[(0, 0, 60)]])))


def test_a_gradient_is_split_over_buckets() -> None:
    case = example([plain(2), Gradient((5, 7), (0, 1), (1, 0)), plain(3)])
    plan = [[(0, 0, 2), (1, 0, 12)], [(1, 12, 16)], [(1, 28, 7), (2, 0, 3)]]
    assert_reduces(case, reduce_context(case, tasks_of(case, plan)))


@pytest.mark.parametrize("wire", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_cast_to_the_wire_dtype(wire: torch.dtype) -> None:
    case = example([plain(3), plain(4, dtype=torch.float64), plain(5, dtype=torch.bfloat16)])
    plan = [[(0, 0, 3), (1, 0, 4), (2, 0, 5)]]
    assert_reduces(case, reduce_context(case, tasks_of(case, plan, dtype=wire)))


def test_one_gradient_for_two_parameters() -> None:
    """As a graph returns for ``f(a + b)``: in one bucket, in two, and with other memory orders."""
    case = example([plain(3, 4), Gradient((3, 4), (0, 1), (1, 0), source=0)])
    for plan in ([[(0, 0, 12), (1, 0, 12)]], [[(0, 0, 12)], [(1, 0, 12)]]):
        assert_reduces(case, reduce_context(case, tasks_of(case, plan)))


def test_a_gradient_may_be_an_input_of_the_graph() -> None:
    case = example([plain(8, given=True), plain(2)])
    assert_reduces(case, reduce_context(case, tasks_of(case, [[(0, 0, 8)], [(1, 0, 2)]])))


def test_what_a_collective_prepares_is_done_before_its_launch() -> None:
    case = example([plain(3), plain(4)])
    tasks = tasks_of(case, [[(0, 0, 3)], [(1, 0, 4)]], prepared=True)
    assert_reduces(case, reduce_context(case, tasks))


def test_gradients_outside_every_bucket_leave_the_graph_as_before() -> None:
    case = example([plain(3), plain(4), plain(5)])
    gm = assert_reduces(case, reduce_context(case, tasks_of(case, [[(1, 0, 4)]])))
    visible = output_node(gm.graph).meta["user_visible_output_idxs"]
    assert visible == [0, 2, 4], "None and fxcomm's own outputs are not the user's"


# --- random graphs and plans ---


@st.composite
def gradient_lists(draw: st.DrawFn) -> list[Gradient]:
    gradients: list[Gradient] = []
    for i in range(draw(st.integers(1, 6))):
        same = draw(st.integers(0, 5))
        if same < i and gradients[same].source is None:
            first = gradients[same]
            order = tuple(draw(st.permutations(range(len(first.shape)))))
            gradients.append(replace(first, order=order, source=same))
            continue
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
        dims = range(len(shape))
        gradients.append(
            Gradient(
                shape,
                tuple(draw(st.permutations(dims))),
                tuple(draw(st.permutations(dims))),
                draw(st.sampled_from([torch.float32, torch.float64])),
                given=draw(st.booleans()),
                kernel=draw(st.sampled_from(["pointwise", "matmul", "sum"])),
            )
        )
    return gradients


@st.composite
def situations(draw: st.DrawFn) -> tuple[Example, ReduceContext]:
    gradients = draw(gradient_lists())
    some = st.sets(st.integers(0, len(gradients) - 1), max_size=2).map(sorted)
    order = draw(st.permutations(range(len(gradients))))
    case = example(gradients, order, draw(some), draw(some))
    content: list[tuple[int, int, int]] = []
    for gradient in draw(st.permutations(range(len(gradients)))):
        numel = gradients[gradient].numel
        cuts = draw(st.sets(st.integers(1, numel), max_size=3)) | {0, numel}
        edges = sorted(cuts)
        content += [(gradient, a, b - a) for a, b in itertools.pairwise(edges)]
    edges = sorted(draw(st.sets(st.integers(0, len(content)), max_size=4)) | {0, len(content)})
    tasks = tasks_of(
        case,
        [content[a:b] for a, b in itertools.pairwise(edges)],
        lead=draw(st.integers(0, 9)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        prepared=draw(st.booleans()),
    )
    return case, reduce_context(case, tasks, draw(st.one_of(st.none(), st.integers(1, 2000))))


on_many_graphs = settings(deadline=None, max_examples=60)


@on_many_graphs
@given(situations())
def test_any_plan_on_any_graph_computes_the_same(
    situation: tuple[Example, ReduceContext],
) -> None:
    assert_reduces(*situation)


def places(original: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> dict[str, int]:
    """Where among ``nodes`` each node of the original graph lies, one that is gone where the one
    before it does."""
    found = {node.name: i for i, node in enumerate(nodes)}
    place, last = {}, -1
    for node in original.nodes:
        last = found.get(node.name, last)
        place[node.name] = last
    return place


@on_many_graphs
@given(situations())
def test_launches_come_in_order_and_at_once(situation: tuple[Example, ReduceContext]) -> None:
    """A bucket's launch follows its last gradient, or the launch before it, with nothing of the
    original graph in between."""
    case, context = situation
    gm = run_passes(REDUCE_PASSES, case.gm, context)
    nodes = list(gm.graph.nodes)
    place = places(case.gm.graph, nodes)
    gradients = output_values(case.gm.graph)
    earliest = max(i for i, node in enumerate(nodes) if node.op == "placeholder")
    launches = [i for i, n in enumerate(nodes) if (s := stamp_of(n)) and s.role == "launch"]
    assert len(launches) == len(context.tasks)
    for launch, task in zip(launches, context.tasks, strict=True):
        stamp = stamp_of(nodes[launch])
        assert stamp is not None
        assert stamp.bucket == task.key
        needed = [gradients[piece.position] for piece in task.pieces]
        earliest = max([earliest, *[place[n.name] for n in needed if n is not None]])
        assert launch > earliest
        late = [n for n in nodes[earliest + 1 : launch] if stamp_of(n) is None]
        assert not late, f"{late} run before a launch that could have started"
        earliest = launch


# --- what Inductor makes of it ---


def every_kind() -> list[Gradient]:
    """Gradients of every kernel and memory order."""
    kernels: tuple[Kernel, ...] = ("pointwise", "matmul", "sum")
    some = [
        plain(6, 8),
        Gradient((4, 6), (1, 0), (1, 0)),
        Gradient((4, 6), (0, 1), (1, 0)),
        Gradient((3, 4, 5), (2, 0, 1), (2, 0, 1)),
        Gradient((3, 4, 5), (1, 2, 0), (0, 2, 1)),
        plain(5, 3, dtype=torch.float64),
        plain(),
        Gradient((2, 2, 1, 2), (0, 1, 2, 3), (1, 0, 2, 3)),  # where fake tensors are wrong of views
    ]
    return [replace(gradient, kernel=kernel) for gradient in some for kernel in kernels]


def mixed_case() -> tuple[Example, list[tuple[int, int, int]], list[list[tuple[int, int, int]]]]:
    """Whole gradients, of which the graph returns some twice and reads some again when buckets are
    filled; then buckets that hold chunks. Whole ones are (gradient, start, numel) of each."""
    gradients = [*every_kind(), plain(6, 8, given=True), plain(6, 8, source=1)]
    whole = [(i, 0, gradient.numel) for i, gradient in enumerate(gradients)]
    cut, last = len(gradients), len(gradients) + 1
    gradients += [plain(9, 7, kernel="matmul"), plain(5, kernel="sum")]
    chunks = [[(cut, 0, 20)], [(cut, 20, 16)], [(cut, 36, 27), (last, 0, 5)]]
    return example(gradients, returned=[1, 4, 18, 19], read=[0, 1, 2, 10, 20]), whole, chunks


@pytest.mark.parametrize(
    ("per_bucket", "wire"), [(1, torch.float32), (4, torch.float32), (30, torch.bfloat16)]
)
def test_compiled_graphs_fill_buckets_as_told(per_bucket: int, wire: torch.dtype) -> None:
    case, whole, chunks = mixed_case()
    content = [whole[i : i + per_bucket] for i in range(0, len(whole), per_bucket)] + chunks
    tasks = tasks_of(case, content, lead=2 * (per_bucket > 1), dtype=wire)
    context = reduce_context(case, tasks)
    gm = assert_reduces(case, context)
    buckets = reduced_buckets(gm)
    outputs = compiled(gm)([tensor.clone() for tensor in case.inputs])
    packed = [outputs[bucket.packed] for bucket in buckets if bucket.packed is not None]
    for task, bucket in zip(tasks, packed, strict=True):
        expected = expected_bucket(case, task)
        torch.testing.assert_close(bucket, expected)
        assert torch.equal(bucket == 0, expected == 0), "gaps are zero"
    for position, value in enumerate(torch.fx.Interpreter(case.gm).run(*case.inputs)):
        if value is not None and position not in context.dropped:
            torch.testing.assert_close(outputs[position], value)
            assert per_bucket == 1 or not any(map(share_memory(outputs[position]), packed))


def compiled(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """What Inductor makes of a graph now, whatever it made of an equal one before."""
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    config = {**compat.KEEP_LAUNCH_ORDER, "fx_graph_cache": False}
    return compat.compile_inner(gm, inputs, config=config)


def share_memory(one: Tensor) -> Callable[[Tensor], bool]:
    """Whether a tensor lies in the memory of another."""
    return lambda two: one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


# --- in flight ---


def in_flight_history(gm: torch.fx.GraphModule, context: ReduceContext) -> list[list[int]]:
    """The buckets in flight right after each launch, in order of launch."""
    running: list[int] = []
    history = []
    for node in gm.graph.nodes:
        stamp = stamp_of(node)
        if stamp is None or not stamp.final:
            continue
        if stamp.role == "launch":
            running.append(stamp.bucket.bucket)
            history.append(list(running))
        elif stamp.role == "finish":
            assert running[0] == stamp.bucket.bucket, "not the oldest"
            running.pop(0)
    return history


@on_many_graphs
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
    st.one_of(st.none(), st.integers(1, 1400)),
    st.randoms(use_true_random=False),
)
def test_bytes_in_flight_stay_under_the_limit(
    sizes: list[int], limit: int | None, rng: Any
) -> None:
    produced = list(range(len(sizes)))
    rng.shuffle(produced)
    case = example([plain(size) for size in sizes], produced)
    tasks = tasks_of(case, [[(i, 0, size)] for i, size in enumerate(sizes)])
    context = reduce_context(case, tasks, limit)
    gm = assert_reduces(case, context)
    nbytes = [2 * task.numel * 4 for task in tasks]  # what is sent, and what comes of it
    history = in_flight_history(gm, context)
    assert len(history) == len(sizes)
    for launched, running in enumerate(history):
        assert running[-1] == launched
        total = sum(nbytes[b] for b in running)
        assert limit is None or total <= limit or len(running) == 1
        # Nothing is waited for sooner than the limit asks.
        first = running[0]
        assert first == 0 or (limit is not None and total + nbytes[first - 1] > limit)
    finished = {b.key.bucket for b in reduced_buckets(gm) if b.shard is not None}
    assert finished == set(range(history[-1][0])), "what is still running leaves un-waited"


def test_waits_come_right_before_the_launch_that_needs_the_room() -> None:
    case = example([plain(8), plain(8), plain(8)])
    tasks = tasks_of(case, [[(i, 0, 8)] for i in range(3)])
    gm = assert_reduces(case, reduce_context(case, tasks, limit=128))
    roles = [
        (stamp.role, stamp.bucket.bucket) if (stamp := stamp_of(node)) else node.op
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]
    assert roles == [
        "call_function",  # work
        "call_function",  # gradient 0
        ("pack", 0),
        ("launch", 0),
        "call_function",
        "call_function",
        ("pack", 1),
        ("launch", 1),
        "call_function",
        "call_function",
        ("pack", 2),
        ("finish", 0),
        ("finish", 0),
        ("launch", 2),
        "call_function",
    ]


# --- the list of passes ---


def test_a_pass_out_of_order_is_named() -> None:
    case = example([plain(3)])
    context = reduce_context(case, tasks_of(case, [[(0, 0, 3)]]))
    with pytest.raises(FxcommError, match=r"'bound_in_flight' requires.*launched reductions"):
        run_passes(tuple(reversed(REDUCE_PASSES)), case.gm, context)


@pytest.mark.parametrize(
    ("disabled", "complains"),
    [
        ("pack_buckets", "launch_reductions"),
        ("launch_reductions", "bound_in_flight"),
    ],
)
def test_a_pass_cannot_be_switched_off_under_another(disabled: str, complains: str) -> None:
    case = example([plain(3)])
    context = reduce_context(case, tasks_of(case, [[(0, 0, 3)]]))
    with pytest.raises(FxcommError, match=f"'{complains}' requires"):
        run_passes(REDUCE_PASSES, case.gm, context, disabled=[disabled])


def test_the_last_pass_can_be_switched_off() -> None:
    case = example([plain(8), plain(8)])
    context = reduce_context(case, tasks_of(case, [[(0, 0, 8)], [(1, 0, 8)]]), limit=1)
    gm = run_passes(REDUCE_PASSES, case.gm, context, disabled=["bound_in_flight"])
    assert all(bucket.shard is None for bucket in reduced_buckets(gm))


def test_check_order_knows_what_was_provided() -> None:
    def same(gm: torch.fx.GraphModule, context: None) -> torch.fx.GraphModule:
        return gm

    one = GraphPass("one", same, provides=frozenset({"a"}))
    two = GraphPass("two", same, requires=frozenset({"a"}), provides=frozenset({"b"}))
    three = GraphPass("three", same, requires=frozenset({"a", "b"}))
    check_order([one, two, three])
    check_order([])
    with pytest.raises(FxcommError, match=r"'three' requires.*'b'"):
        check_order([one, three, two])


def test_passes_are_observed_in_order() -> None:
    case = example([plain(3)])
    context = reduce_context(case, tasks_of(case, [[(0, 0, 3)]]))
    records: list[PassRecord] = []
    sizes: list[int] = []

    def observe(record: PassRecord, gm: torch.fx.GraphModule) -> None:
        records.append(record)
        sizes.append(len(gm.graph.nodes))

    gm = run_passes(REDUCE_PASSES, case.gm, context, observe=observe)
    assert [record.name for record in records] == [p.name for p in REDUCE_PASSES]
    assert all(record.seconds >= 0 for record in records)
    assert [record.nodes_after for record in records] == sizes
    before = [len(case.gm.graph.nodes), *sizes[:-1]]
    assert [record.nodes_before for record in records] == before
    assert sizes[-1] == len(gm.graph.nodes)


def test_no_passes_still_copy() -> None:
    case = example([plain(3)])
    gm = run_passes((), case.gm, None)
    assert gm is not case.gm
    assert gm.meta == case.gm.meta
    assert str(gm.graph) == str(case.gm.graph)
    for node in gm.graph.nodes:
        node.meta[KEY] = "changed"
    assert all(stamp_of(node) is None for node in case.gm.graph.nodes)
    assert torch.equal(gm(*case.inputs)[2], case.values()[0])


# --- the order of production ---


@on_many_graphs
@given(st.integers(1, 8), st.data())
def test_production_order_is_the_graphs(count: int, data: st.DataObject) -> None:
    produced = data.draw(st.permutations(range(count)))
    case = example([plain(2)] * count, produced)
    positions = data.draw(st.permutations([case.FIRST + i for i in range(count)]))
    assert production_order(case.gm.graph, positions) == [case.FIRST + i for i in produced]


def test_equal_places_keep_their_order() -> None:
    case = example([plain(2), plain(2, source=0), plain(3), plain(2, source=0)], [2, 0, 1, 3])
    first = case.FIRST
    assert production_order(case.gm.graph, [first + 3, first, first + 2, first + 1]) == [
        first + 2,
        first + 3,
        first,
        first + 1,
    ]


def test_what_is_not_produced_comes_first() -> None:
    case = example([plain(2), plain(3, given=True)])
    # Position 1 is None, position 3 an input, position 0 the last thing computed.
    assert production_order(case.gm.graph, [0, 1, 2, 3]) == [1, 3, 2, 0]
    assert production_order(case.gm.graph, []) == []


def test_leaves_behind_are_those_that_autograd_used() -> None:
    used, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    twice = used * 3
    behind = leaves_behind([twice + twice.sin(), other, torch.ones(2), 7])
    assert behind == {id(used)}  # a leaf that is itself an input was not computed with
