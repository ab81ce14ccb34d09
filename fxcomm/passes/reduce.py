"""Passes that put the reduction of gradient buckets into a backward graph.

``pack_buckets`` gathers the gradients of each bucket in one flat buffer, ``launch_reductions``
starts each bucket's collective as soon as its last gradient exists, ``bound_in_flight`` waits
inside the graph for the oldest ones when too many bytes are in flight. What is still in flight at
the end of the graph is returned un-waited for the runtime to finish.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.gradients import output_values, set_outputs
from fxcomm.communicator import Collective, OperatorCall, apply_calls, held_bytes
from fxcomm.passes.pack import Part, erase_unused_views, part_of
from fxcomm.passes.pipeline import GraphPass
from fxcomm.passes.stamp import KEY, BucketKey, Role, Stamp, insert_call, stamp_of

_aten = torch.ops.aten

InsertCall = Callable[[OperatorCall, torch.fx.Node], torch.fx.Node]


@dataclass(frozen=True)
class Piece:
    """A run of elements of a bucket: ``numel`` elements from ``start`` of the gradient at output
    ``position``, read in the order of its parameter's memory (``order`` lists the dimensions from
    the slowest)."""

    position: int
    order: tuple[int, ...]
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class BucketTask:
    """One bucket to reduce in a graph: where its elements come from and how it is reduced."""

    key: BucketKey
    numel: int
    dtype: torch.dtype
    device: torch.device
    pieces: tuple[Piece, ...]
    parameters: tuple[str, ...]
    collective: Collective


@dataclass(frozen=True)
class ReduceContext:
    """What the reduce passes work on. ``tasks`` come in launch order; ``dropped`` are the output
    positions whose gradients no longer leave the graph. To those at the output positions ``local``
    the graph adds what earlier backwards left on this rank: more inputs, one for each in this
    order, flat, with the parameter's dimensions from the slowest."""

    tasks: tuple[BucketTask, ...]
    dropped: frozenset[int]
    in_flight_bytes: int | None = None
    local: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def task(self, key: BucketKey) -> BucketTask:
        """The task of a bucket."""
        return next(task for task in self.tasks if task.key == key)


@dataclass(frozen=True)
class ReducedBucket:
    """How a lowered graph returns a bucket: the indices of its outputs. ``launched`` is the
    collective's raw result and must be kept with ``packed``, its operand, until the wait; or the
    graph waited itself and ``shard`` is the finished mean."""

    key: BucketKey
    packed: int | None = None
    launched: int | None = None
    shard: int | None = None


def _fake_mode(gm: torch.fx.GraphModule) -> AbstractContextManager[object]:
    values = [v.meta.get("val") for v in output_values(gm.graph) if v is not None]
    return compat.fake_mode_of(values) or nullcontext()


def add_local_gradients(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """Adds gradients of earlier backwards, which come as inputs, to those of this one."""
    values = output_values(gm.graph)
    with _fake_mode(gm):
        for position, order in context.local:
            values[position] = _with_local(gm.graph, values, position, order)
    set_outputs(gm.graph, values)
    return gm


def _with_local(
    graph: torch.fx.Graph,
    values: Sequence[torch.fx.Node | None],
    position: int,
    order: tuple[int, ...],
) -> torch.fx.Node:
    gradient = values[position]
    assert gradient is not None
    value: torch.Tensor = gradient.meta["val"]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        flat = graph.placeholder(f"local_{position}")
    flat.meta["val"] = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    with graph.inserting_after(max(gradient, flat)):
        viewed = graph.call_function(_aten.view.default, (flat, [value.shape[d] for d in order]))
    viewed.meta["val"] = flat.meta["val"].view([value.shape[d] for d in order])
    with graph.inserting_after(viewed):
        placed = graph.call_function(_aten.permute.default, (viewed, inverse))
    placed.meta["val"] = viewed.meta["val"].permute(inverse)
    with graph.inserting_after(placed):
        total = graph.call_function(_aten.add.Tensor, (gradient, placed))
    total.meta["val"] = value + placed.meta["val"]
    return total


def pack_buckets(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """Adds one flat buffer for each bucket, filled right after the bucket's last gradient exists
    and never before the buffer of the bucket ahead of it."""
    graph = gm.graph
    values = output_values(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    first_computed = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    anchor = first_computed - 1
    packed: list[torch.fx.Node] = []
    with _fake_mode(gm):
        for task in context.tasks:
            needed = [place[_gradient(values, piece)] for piece in task.pieces]
            anchor = max([anchor, *needed])
            with graph.inserting_before(nodes[anchor + 1]):
                packed.append(_pack(graph, task, values))
    kept = [None if i in context.dropped else value for i, value in enumerate(values)]
    set_outputs(gm.graph, [*kept, *packed])
    erase_unused_views(graph)
    return gm


def _gradient(values: Sequence[torch.fx.Node | None], piece: Piece) -> torch.fx.Node:
    value = values[piece.position]
    assert value is not None, f"output {piece.position} holds no gradient"
    return value


def _pack(
    graph: torch.fx.Graph, task: BucketTask, values: Sequence[torch.fx.Node | None]
) -> torch.fx.Node:
    """The flat buffer of one bucket; gaps between parameters and padding are zero."""
    stamp = Stamp(task.key, "pack", "BACKWARD", task.parameters)

    def call(step: OperatorCall, value: torch.fx.Node | list[torch.fx.Node]) -> torch.fx.Node:
        return insert_call(graph, step, value, stamp)

    if not task.pieces:
        flat = _zeros(graph, task, stamp)
    elif task.pieces[0].numel == task.numel:
        # Maybe one of several buckets that one gradient fills: a view of it needs no copy.
        flat = _flat_piece(call, task, task.pieces[0], _gradient(values, task.pieces[0]))
    else:
        parts = [_part(call, task, piece, _gradient(values, piece)) for piece in task.pieces]
        strides = [stride for part in parts for stride in part.strides]
        offsets = [part.offset for part in parts]
        step = OperatorCall(torch.ops.fxcomm.pack.default, (strides, offsets, task.numel))
        flat = call(step, [part.node for part in parts])
    flat = apply_calls(task.collective.prepare, flat, call)
    flat.meta[KEY] = replace(stamp, final=True)
    return flat


def _zeros(graph: torch.fx.Graph, task: BucketTask, stamp: Stamp) -> torch.fx.Node:
    node = graph.call_function(
        _aten.full.default, ([task.numel], 0), {"dtype": task.dtype, "device": task.device}
    )
    node.meta["val"] = torch.empty([task.numel], dtype=task.dtype, device=task.device)
    node.meta[KEY] = stamp
    return node


def _part(call: InsertCall, task: BucketTask, piece: Piece, gradient: torch.fx.Node) -> Part:
    """A piece as a part of its bucket: all of a gradient, which its kernel may write there, or a
    flat copy of some of it."""
    if piece.numel != gradient.meta["val"].numel():
        return part_of(_flat_piece(call, task, piece, gradient), (0,), piece.offset)
    return part_of(_converted(call, task, gradient), piece.order, piece.offset)


def _flat_piece(
    call: InsertCall, task: BucketTask, piece: Piece, gradient: torch.fx.Node
) -> torch.fx.Node:
    """A piece of a gradient as a flat run of the bucket's dtype."""
    value: torch.Tensor = gradient.meta["val"]
    node = gradient
    if piece.order != tuple(range(value.dim())):
        node = call(OperatorCall(_aten.permute.default, (list(piece.order),)), node)
    # reshape copies when the gradient's memory is not in the parameter's order.
    node = call(OperatorCall(_aten.reshape.default, ([value.numel()],)), node)
    if piece.numel != value.numel():
        end = piece.start + piece.numel
        node = call(OperatorCall(_aten.slice.Tensor, (0, piece.start, end)), node)
    return _converted(call, task, node)


def _converted(call: InsertCall, task: BucketTask, node: torch.fx.Node) -> torch.fx.Node:
    if node.meta["val"].dtype == task.dtype:
        return node
    return call(OperatorCall(torch.ops.prims.convert_element_type.default, (task.dtype,)), node)


def launch_reductions(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """Starts the collective of every packed bucket right behind its buffer.

    The buffer stays among the graph's outputs: it must live until the wait, and a graph's output
    is the one thing whose memory Inductor never gives to something else.
    """
    launched: list[torch.fx.Node] = []
    with _fake_mode(gm):
        for buffer, stamp in _stamped(gm, "pack"):
            task = context.task(stamp.bucket)
            launch = replace(stamp, role="launch")
            with gm.graph.inserting_after(buffer):
                launched.append(insert_call(gm.graph, task.collective.launch, buffer, launch))
    set_outputs(gm.graph, [*output_values(gm.graph), *launched])
    return gm


def bound_in_flight(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """Before a launch that would exceed the limit, waits for the oldest reductions.

    A bucket that the graph waited for leaves it as its finished mean; its buffer is freed.
    """
    limit = context.in_flight_bytes
    if limit is None:
        return gm
    values = output_values(gm.graph)
    packed = {stamp.bucket: node for node, stamp in _stamped(gm, "pack")}
    in_flight: deque[tuple[torch.fx.Node, Stamp, int]] = deque()
    with _fake_mode(gm):
        for launch, stamp in _stamped(gm, "launch"):
            nbytes = held_bytes(packed[stamp.bucket].meta["val"], launch.meta["val"])
            while in_flight and nbytes + sum(size for *_, size in in_flight) > limit:
                oldest, old_stamp, _ = in_flight.popleft()
                with gm.graph.inserting_before(launch):
                    shard = _finish(gm.graph, context.task(old_stamp.bucket), oldest, old_stamp)
                values[values.index(oldest)] = shard
                values.remove(packed[old_stamp.bucket])
            in_flight.append((launch, stamp, nbytes))
    set_outputs(gm.graph, values)
    return gm


def _finish(
    graph: torch.fx.Graph, task: BucketTask, launch: torch.fx.Node, launched: Stamp
) -> torch.fx.Node:
    stamp = replace(launched, role="finish", final=False)
    shard = apply_calls(
        task.collective.finish, launch, lambda step, value: insert_call(graph, step, value, stamp)
    )
    shard.meta[KEY] = replace(stamp, final=True)
    return shard


def _stamped(gm: torch.fx.GraphModule, role: Role) -> list[tuple[torch.fx.Node, Stamp]]:
    """The final nodes of a role with their stamps, in graph order."""
    stamps = ((node, stamp_of(node)) for node in gm.graph.nodes)
    return [(n, s) for n, s in stamps if s is not None and s.role == role and s.final]


def reduced_buckets(gm: torch.fx.GraphModule) -> tuple[ReducedBucket, ...]:
    """Where a rewritten graph returns each of its buckets, in launch order."""
    found: dict[BucketKey, dict[str, int]] = {}
    field = {"pack": "packed", "launch": "launched", "finish": "shard"}
    for index, value in enumerate(output_values(gm.graph)):
        stamp = None if value is None else stamp_of(value)
        if stamp is not None and stamp.role in field:
            found.setdefault(stamp.bucket, {})[field[stamp.role]] = index
    return tuple(ReducedBucket(key, **found[key]) for key in _launch_order(gm, found))


def _launch_order(
    gm: torch.fx.GraphModule, keys: dict[BucketKey, dict[str, int]]
) -> Iterator[BucketKey]:
    order = (stamp.bucket for _, stamp in _stamped(gm, "launch"))
    return (key for key, _ in itertools.groupby(order) if key in keys)


REDUCE_PASSES: tuple[GraphPass[ReduceContext], ...] = (
    GraphPass("add_local_gradients", add_local_gradients),
    GraphPass("pack_buckets", pack_buckets, provides=frozenset({"packed buckets"})),
    GraphPass(
        "launch_reductions",
        launch_reductions,
        requires=frozenset({"packed buckets"}),
        provides=frozenset({"launched reductions"}),
    ),
    GraphPass("bound_in_flight", bound_in_flight, requires=frozenset({"launched reductions"})),
)
