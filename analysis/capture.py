"""From captured fx graphs to a step graph, and from a layout to its buckets' operations in it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.dependencies import use_order
from fxcomm.analysis.gradients import output_values
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
from fxcomm.layout import ShardLayout
from fxcomm.plan import order_of_use

NodeCost = Callable[[torch.fx.Node], float]
"""Seconds that a node takes."""

BucketCost = Callable[[Role, int], float]
"""Seconds that a role takes for a number of bytes."""

_NORM = "norm/all"
# One float32, the sum of squares.
_NORM_BYTES = 4

_UPDATE = Phase(PhaseKind.UPDATE)

DATA = Dependency(Why.DATA)
ANTI = Dependency(Why.ANTI)
ORDER = Dependency(Why.ORDER)
NEXT_DATA = Dependency(Why.DATA, carried=1)
NEXT_ORDER = Dependency(Why.ORDER, carried=1)

_aten = torch.ops.aten

# Their result shares memory with their operand though the schema does not say so.
_UNDECLARED_VIEWS = {operator.getitem, _aten._unsafe_view.default}

# They look at their operand's shape, dtype or place, never at its elements.
_METADATA_ONLY = {
    *(_aten.sym_size, _aten.sym_stride, _aten.sym_numel, _aten.sym_storage_offset),
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.rand_like, _aten.randn_like),
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full),
}


@dataclass(frozen=True)
class PhaseGraph:
    """A captured graph (post-AOT) that runs in a phase, and what its inputs and outputs are.

    ``parameter_inputs`` names the parameter of a placeholder, given by name or index; several
    placeholders may have one parameter. ``gradient_outputs`` names the parameter whose gradient an
    output position holds. ``saved`` says of a placeholder (index) that it is an output of another
    PhaseGraph: that one's index in the sequence, and the output's position.
    """

    phase: Phase
    graph: torch.fx.Graph
    parameter_inputs: Mapping[str | int, str] = field(default_factory=dict)
    gradient_outputs: Mapping[int, str] = field(default_factory=dict)
    saved: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def no_cost(_: object, __: object = None) -> float:
    """The cost of everything as long as it is unknown."""
    return 0.0


class _Value(NamedTuple):
    """What an fx node's value is: the operation that made it (None: there at the step's start) and
    the parameters whose memory it shares."""

    producer: str | None
    shares: frozenset[str] = frozenset()


_NOTHING = _Value(None)


def capture_step(phases: Sequence[PhaseGraph], cost: NodeCost = no_cost) -> StepGraph:
    """The step that runs ``phases`` one after another on the compute stream.

    Each fx node but placeholders, attributes and outputs is a COMPUTE operation, named after its
    phase and node ("forward0/mm_3"; "forward0.1/mm_3" in the second graph of one phase). Views cost
    nothing and read nothing; who uses a view of a parameter reads the parameter. ORDER edges chain
    all operations as fx has them, and the last to the first of the next step.

    Raises ValueError where a record of ``phases`` does not fit its graph, or ``saved`` does not
    name an earlier graph's output.
    """
    captured = _Captured(cost)
    graphs_of: Counter[Phase] = Counter()
    for phase in phases:
        number = graphs_of[phase.phase]
        graphs_of[phase.phase] += 1
        captured.add(phase, f"{phase.phase}.{number}" if number else str(phase.phase))
    operations = captured.operations
    for name, parameters in captured.gradients.items():
        operations[name] = replace(operations[name], gradients=frozenset(parameters))
    return StepGraph(operations.values(), [*captured.edges, *_chained(list(operations))])


@dataclass
class _Captured:
    """The operations and DATA edges of the graphs walked so far, and what each graph returned."""

    cost: NodeCost
    operations: dict[str, Operation] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    gradients: dict[str, set[str]] = field(default_factory=dict)
    outputs: list[list[_Value]] = field(default_factory=list)

    def add(self, phase: PhaseGraph, prefix: str) -> None:
        """Walk one graph; its operations' names start with ``prefix``."""
        values = self._placeholder_values(phase)
        first: str | None = None
        for node in phase.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                values[node] = _NOTHING
                continue
            name = f"{prefix}/{node.name}"
            first = first or name
            values[node] = self._add_node(node, name, phase.phase, values)
        returned = output_values(phase.graph)
        self.outputs.append(
            [
                values[v] if isinstance(v, torch.fx.Node) else _NOTHING  # None, or a constant
                for v in returned
            ]
        )
        for position, parameter in phase.gradient_outputs.items():
            if not 0 <= position < len(returned):
                raise ValueError(f"{phase.phase}: there is no output {position} for a gradient")
            if returned[position] is not None:
                self._contribute(parameter, self.outputs[-1][position].producer or first)

    def _contribute(self, parameter: str, producer: str | None) -> None:
        # An output that no operation makes is an input handed on: it is there once the phase runs,
        # or once whatever ran before it has.
        producer = producer or next(reversed(self.operations), None)
        if producer is not None:
            self.gradients.setdefault(producer, set()).add(parameter)

    def _placeholder_values(self, phase: PhaseGraph) -> dict[torch.fx.Node, _Value]:
        placeholders = [node for node in phase.graph.nodes if node.op == "placeholder"]
        parameter_of = _by_index(phase, placeholders)
        for index in phase.saved:
            if not 0 <= index < len(placeholders):
                raise ValueError(
                    f"{phase.phase}: there is no placeholder {index} for a saved value"
                )
        values = {}
        for index, node in enumerate(placeholders):
            value = self._saved_value(phase, index)
            if index in parameter_of:
                value = value._replace(shares=value.shares | {parameter_of[index]})
            values[node] = value
        return values

    def _saved_value(self, phase: PhaseGraph, index: int) -> _Value:
        if index not in phase.saved:
            return _NOTHING
        graph, position = phase.saved[index]
        if not 0 <= graph < len(self.outputs) or not 0 <= position < len(self.outputs[graph]):
            raise ValueError(
                f"{phase.phase}: placeholder {index} is saved from output {position} of graph "
                f"{graph}, which is not an output of an earlier graph"
            )
        return self.outputs[graph][position]

    def _add_node(
        self,
        node: torch.fx.Node,
        name: str,
        phase: Phase,
        values: Mapping[torch.fx.Node, _Value],
    ) -> _Value:
        access = _access(node)
        view = not access.read and bool(access.shared)
        self.operations[name] = Operation(
            name,
            phase,
            seconds=0.0 if view else self.cost(node),
            nbytes=0 if view else sum(map(_nbytes, [*access.read, node])),
            reads=_shared(values, access.read),
            writes=_shared(values, access.written),
        )
        sources = dict.fromkeys(values[n].producer for n in node.all_input_nodes)
        self.edges += [Edge(source, name, DATA) for source in sources if source is not None]
        return _Value(name, _shared(values, access.shared))


class _Access(NamedTuple):
    """The operands whose elements a node reads, those that it overwrites, and those whose memory
    its result shares."""

    read: Sequence[torch.fx.Node] = ()
    written: Sequence[torch.fx.Node] = ()
    shared: Sequence[torch.fx.Node] = ()


def _access(node: torch.fx.Node) -> _Access:
    target: Any = node.target
    operands = node.all_input_nodes
    packet = getattr(target, "overloadpacket", None)
    if packet in _METADATA_ONLY:
        return _Access()
    if compat.may_copy(node):
        return _Access(read=operands, shared=operands)
    if target in _UNDECLARED_VIEWS or compat.is_view(node):
        return _Access(shared=operands)
    written = compat.written_operands(node)
    # A copy overwrites its destination unseen; anything else in place may look at it first.
    unread = written if packet is _aten.copy_ else ()
    return _Access([n for n in operands if n not in unread], written, written)


def _shared(
    values: Mapping[torch.fx.Node, _Value], nodes: Iterable[torch.fx.Node]
) -> frozenset[str]:
    return frozenset[str]().union(*(values[node].shares for node in nodes))


def _nbytes(node: torch.fx.Node) -> int:
    """Bytes of the node's tensors; symbolic sizes count as in the example inputs."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    return sum(
        _hint(tensor.numel()) * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _by_index(phase: PhaseGraph, placeholders: Sequence[torch.fx.Node]) -> dict[int, str]:
    """``parameter_inputs`` by placeholder index; ValueError for a placeholder that is not there."""
    index_of = {node.name: index for index, node in enumerate(placeholders)}
    found = {}
    for key, parameter in phase.parameter_inputs.items():
        index = index_of.get(key, -1) if isinstance(key, str) else key
        if not 0 <= index < len(placeholders):
            raise ValueError(f"{phase.phase}: no placeholder {key!r} for parameter {parameter!r}")
        found[index] = parameter
    return found


def _chained(names: Sequence[str]) -> Iterator[Edge]:
    """Edges that run ``names`` one after another on their stream, step after step."""
    for earlier, later in pairwise(names):
        yield Edge(earlier, later, ORDER)
    if names:
        yield Edge(names[-1], names[0], NEXT_ORDER)


def with_buckets(
    step: StepGraph,
    layout: ShardLayout,
    *,
    clip: bool = False,
    gather_order: Sequence[int] | None = None,
    reduce_stream: str = "reduce",
    gather_stream: str = "gather",
    communication_cost: BucketCost = no_cost,
    compute_cost: BucketCost = no_cost,
) -> StepGraph:
    """``step`` with each bucket's chain: REDUCE, UPDATE of this rank's shard, GATHER ("reduce/3").

    The parameters of ``layout`` and of ``step`` are matched by name. A REDUCE comes after every
    contribution to its parameters. With ``clip``, every UPDATE also waits for the all-reduce
    ("norm/all") of all buckets' parts of the norm ("norm/3"). UPDATE and GATHER come after the last
    read of the old values, and the first reads of the next step after GATHER.

    REDUCEs (then the norm) run on ``reduce_stream`` in bucket order, GATHERs on ``gather_stream``
    in ``gather_order``, by default that of first use in the forward. On one stream for both, their
    order among each other stays open. UPDATE and "norm/3" are on the compute stream, at no fixed
    place. Costs are in seconds: ``communication_cost`` of REDUCE and GATHER for a bucket's
    bytes and of "norm/all", ``compute_cost`` of UPDATE and "norm/3" for a shard's bytes.

    Raises ValueError if ``step`` already has buckets or ``gather_order`` does not name each bucket
    once.
    """
    count = len(layout.buckets)
    if gather_order is None:
        number = {spec.name: index for index, spec in enumerate(layout.parameters)}
        gather_order = order_of_use(layout, [number[p] for p in use_order(step) if p in number])
    if sorted(gather_order) != list(range(count)):
        raise ValueError(f"the gather order {list(gather_order)} does not name each bucket once")
    chains = _BucketChains(
        step, layout, reduce_stream, gather_stream, communication_cost, compute_cost
    )
    operations = [operation for bucket in range(count) for operation in chains.operations(bucket)]
    edges = [edge for bucket in range(count) for edge in chains.edges(bucket)]
    reduces = [f"reduce/{bucket}" for bucket in range(count)]
    if clip:
        operations += chains.norm_operations()
        edges += _norm_edges(count)
        reduces.append(_NORM)
    edges += _chained(reduces)
    edges += _chained([f"gather/{bucket}" for bucket in gather_order])
    return step.extended(operations, edges)


@dataclass(frozen=True)
class _BucketChains:
    """Makes what ``with_buckets`` adds to ``step``; the fields are its arguments."""

    step: StepGraph
    layout: ShardLayout
    reduce_stream: str
    gather_stream: str
    communication_cost: BucketCost
    compute_cost: BucketCost

    def operations(self, bucket: int) -> Iterator[Operation]:
        """REDUCE, UPDATE and GATHER of a bucket."""
        whole = self.layout.buckets[bucket].nbytes
        members = frozenset(self._members(bucket))
        links = (
            (Role.REDUCE, self._backward, self.reduce_stream, whole, frozenset[str]()),
            (Role.UPDATE, _UPDATE, COMPUTE_STREAM, self._shard_bytes(bucket), members),
            (Role.GATHER, _UPDATE, self.gather_stream, whole, members),
        )
        for role, phase, stream, nbytes, parameters in links:
            cost = self.compute_cost if role is Role.UPDATE else self.communication_cost
            yield Operation(
                f"{role.value}/{bucket}",
                phase,
                role,
                stream,
                seconds=cost(role, nbytes),
                nbytes=nbytes,
                reads=parameters,
                writes=parameters,
                bucket=bucket,
            )

    def edges(self, bucket: int) -> Iterator[Edge]:
        """What holds a bucket's operations back, and what they hold back in the next step."""
        reduce, update, gather = (f"{link}/{bucket}" for link in ("reduce", "update", "gather"))
        yield Edge(reduce, update, DATA)
        yield Edge(update, gather, DATA)
        for parameter in self._members(bucket):
            for contributor in self.step.contributors.get(parameter, ()):
                yield Edge(contributor, reduce, DATA)
            # A read before the last one of its chain needs no edge of its own. So a parameter that
            # is read often and cut into many buckets has not one edge for each of both.
            for reader in self._last_reads.get(parameter, ()):
                yield Edge(reader, update, ANTI)
                yield Edge(reader, gather, ANTI)
            for reader in self._first_reads.get(parameter, ()):
                yield Edge(gather, reader, NEXT_DATA)

    def norm_operations(self) -> Iterator[Operation]:
        """Each bucket's part of the norm of all gradients, and their all-reduce."""
        for bucket in range(len(self.layout.buckets)):
            nbytes = self._shard_bytes(bucket)
            seconds = self.compute_cost(Role.NORM, nbytes)
            yield Operation(
                f"norm/{bucket}", _UPDATE, Role.NORM, seconds=seconds, nbytes=nbytes, bucket=bucket
            )
        seconds = self.communication_cost(Role.NORM, _NORM_BYTES)
        yield Operation(_NORM, _UPDATE, Role.NORM, self.reduce_stream, seconds, _NORM_BYTES)

    def _members(self, bucket: int) -> list[str]:
        segments = self.layout.buckets[bucket].segments
        return [self.layout.parameters[segment.parameter].name for segment in segments]

    def _shard_bytes(self, bucket: int) -> int:
        return self.layout.shard_numel(bucket) * self.layout.buckets[bucket].itemsize

    @cached_property
    def _backward(self) -> Phase:
        phases = {operation.phase for operation in self.step.operations.values()}
        micro_steps = [p.micro_step for p in phases if p.kind is PhaseKind.BACKWARD]
        return Phase(PhaseKind.BACKWARD, max(micro_steps, default=0))

    @cached_property
    def _last_reads(self) -> dict[str, tuple[str, ...]]:
        return {p: self.step.last_on_chains(r) for p, r in self.step.readers.items()}

    @cached_property
    def _first_reads(self) -> dict[str, tuple[str, ...]]:
        return {p: self.step.first_on_chains(r) for p, r in self.step.readers.items()}


def _norm_edges(buckets: int) -> Iterator[Edge]:
    for bucket in range(buckets):
        yield Edge(f"reduce/{bucket}", f"norm/{bucket}", DATA)
        yield Edge(f"norm/{bucket}", _NORM, DATA)
        yield Edge(_NORM, f"update/{bucket}", DATA)
