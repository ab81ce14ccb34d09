"""The step graph: every operation of one training step, and what must come before what.

Phases, micro-steps, streams and process groups are data of the operations. Edges to the next step
(*carried* edges) lie in the same graph, so the graph without them is acyclic.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import networkx as nx

COMPUTE_STREAM = "compute"

_FORMAT = "fxcomm.step_graph/1"

_CLOCKED_CHAINS = 8


class PhaseKind(Enum):
    """What a part of a step is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(Enum):
    """What an operation does: compute, or one link of a bucket's chain.

    NORM is either one bucket's part of the gradients' norm or the all-reduce of all parts.
    """

    COMPUTE = "compute"
    REDUCE = "reduce"
    UPDATE = "update"
    GATHER = "gather"
    NORM = "norm"


class Why(Enum):
    """Why one operation must come after another.

    DATA: it uses the other's result. ANTI: it overwrites what the other reads. ORDER: one stream
    runs both, in this order.
    """

    DATA = "data"
    ANTI = "anti"
    ORDER = "order"


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of one micro-step. Raises ValueError for a negative micro-step."""

    kind: PhaseKind
    micro_step: int = 0

    def __post_init__(self) -> None:
        if self.micro_step < 0:
            raise ValueError(f"micro-step {self.micro_step} is negative")

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_step}"


@dataclass(frozen=True, slots=True)
class Operation:
    """A node of the step graph.

    ``stream`` is ``COMPUTE_STREAM`` or the name of a process group. ``seconds`` is its cost (0 if
    unknown), ``nbytes`` the bytes that it moves or touches. ``reads`` and ``writes`` name the
    parameters whose memory it reads or writes; ``gradients`` those to whose gradient it makes the
    last contribution of its phase. ``bucket`` is the bucket that it serves, if it serves one.

    Raises ValueError for a cost or size that is negative or not finite.
    """

    name: str
    phase: Phase
    role: Role = Role.COMPUTE
    stream: str = COMPUTE_STREAM
    seconds: float = 0.0
    nbytes: int = 0
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    bucket: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"operation {self.name!r} costs {self.seconds} seconds")
        if self.nbytes < 0:
            raise ValueError(f"operation {self.name!r} moves {self.nbytes} bytes")


@dataclass(frozen=True, slots=True)
class Dependency:
    """Why an edge is there, and how many steps later its target is (0: the same step).

    Raises ValueError if ``carried`` is negative.
    """

    why: Why
    carried: int = 0

    def __post_init__(self) -> None:
        if self.carried < 0:
            raise ValueError(f"a dependency is carried over {self.carried} steps")


class Edge(NamedTuple):
    """``target`` comes after ``source``, for the reason and in the step that ``dependency`` says.

    Both ends are names of operations.
    """

    source: str
    target: str
    dependency: Dependency


class StepGraph:
    """An immutable graph of operations.

    Two operations may be joined by several edges, one for each distinct ``Dependency``; equal
    edges are one. Everything derived is computed once, at its first use, in linear time.
    """

    def __init__(self, operations: Iterable[Operation], edges: Iterable[Edge] = ()) -> None:
        """Raises ValueError for two operations of one name, an edge of an unknown operation, or a
        cycle of edges within one step."""
        known: dict[str, Operation] = {}
        for operation in operations:
            if operation.name in known:
                raise ValueError(f"two operations are named {operation.name!r}")
            known[operation.name] = operation
        outgoing: dict[str, dict[Edge, None]] = {name: {} for name in known}
        for edge in edges:
            for end in (edge.source, edge.target):
                if end not in known:
                    raise ValueError(
                        f"edge {edge.source!r} -> {edge.target!r}: there is no operation {end!r}"
                    )
            outgoing[edge.source][edge] = None
        self._operations = MappingProxyType(known)
        self._outgoing = MappingProxyType({name: tuple(out) for name, out in outgoing.items()})
        _ = self.order  # raises for a cycle

    @property
    def operations(self) -> Mapping[str, Operation]:
        """All operations by name, in the order in which they were given."""
        return self._operations

    @property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges from each operation, by its name."""
        return self._outgoing

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, grouped by source."""
        return tuple(edge for edges in self._outgoing.values() for edge in edges)

    @cached_property
    def graph(self) -> nx.MultiDiGraph:
        """The graph for networkx, frozen: nodes are names with the attribute ``operation``, the key
        of each edge is its ``Dependency``."""
        graph = nx.MultiDiGraph()
        graph.add_nodes_from((name, {"operation": o}) for name, o in self.operations.items())
        for source, target, dependency in self.edges:
            graph.add_edge(source, target, key=dependency)
        return nx.freeze(graph)

    @cached_property
    def carried_edges(self) -> tuple[Edge, ...]:
        """The edges whose target is in a later step."""
        return tuple(edge for edge in self.edges if edge.dependency.carried)

    @cached_property
    def same_step(self) -> nx.DiGraph:
        """The graph of names without carried edges; frozen, and acyclic."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.operations)
        graph.add_edges_from((e.source, e.target) for e in self.edges if not e.dependency.carried)
        return nx.freeze(graph)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All names, each after those on which it depends within the step."""
        try:
            return tuple(nx.topological_sort(self.same_step))
        except nx.NetworkXUnfeasible:
            cycle = [source for source, _ in nx.find_cycle(self.same_step)]
            raise ValueError(
                f"operations wait for each other within one step: {' -> '.join(cycle + cycle[:1])}"
            ) from None

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where ``order`` has each name."""
        return MappingProxyType({name: place for place, name in enumerate(self.order)})

    @cached_property
    def chains(self) -> Mapping[str, tuple[int, int]]:
        """By name, a chain of ORDER edges and the place on it; each name is on exactly one chain.

        Of two names on one chain, the later place depends on the earlier. This answers most
        questions of reachability without a search.
        """
        order_edge = Dependency(Why.ORDER)
        before: dict[str, list[str]] = {}
        for source, target, dependency in self.edges:
            if dependency == order_edge:
                before.setdefault(target, []).append(source)
        places: dict[str, tuple[int, int]] = {}
        ends: list[str] = []
        for name in self.order:
            for source in before.get(name, ()):
                if ends[places[source][0]] == source:
                    chain, place = places[source]
                    places[name], ends[chain] = (chain, place + 1), name
                    break
            else:
                places[name] = len(ends), 0
                ends.append(name)
        return MappingProxyType(places)

    def depends_on(self, later: str, earlier: str) -> bool:
        """Whether ``later`` comes after ``earlier`` within the step, over any number of edges.

        At once if ``earlier`` is on one of the longest ORDER chains; else after a walk over what
        comes after it, up to those chains.
        """
        seen: set[str] = set()
        pending = [earlier]
        while pending:
            name = pending.pop()
            if name in seen or self.position[name] > self.position[later]:
                continue
            seen.add(name)
            if name == later:
                return later != earlier
            chain, place = self.chains[name]
            slot = self._slots.get(chain)
            if slot is None:
                pending.extend(self.same_step.succ[name])
            elif self._clocks[later][slot] >= place:
                return True
        return False

    @cached_property
    def _slots(self) -> Mapping[int, int]:
        """The longest chains, numbered; a fixed count of them, to bound the work."""
        lengths = Counter(chain for chain, _ in self.chains.values())
        longest = [chain for chain, length in lengths.most_common(_CLOCKED_CHAINS) if length > 1]
        return {chain: slot for slot, chain in enumerate(longest)}

    @cached_property
    def _clocks(self) -> Mapping[str, list[int]]:
        """How far along each of the longest chains a name and what it depends on have come."""
        clocks: dict[str, list[int]] = {}
        for name in self.order:
            before = [clocks[source] for source in self.same_step.pred[name]]
            clock = list(map(max, zip(*before, strict=True))) if before else [-1] * len(self._slots)
            chain, place = self.chains[name]
            if chain in self._slots:
                clock[self._slots[chain]] = place
            clocks[name] = clock
        return clocks

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """By parameter, the COMPUTE operations that read it, in ``order``."""
        operations = (self.operations[name] for name in self.order)
        return _grouped(
            (parameter, o.name)
            for o in operations
            if o.role is Role.COMPUTE
            for parameter in o.reads
        )

    @cached_property
    def contributors(self) -> Mapping[str, tuple[str, ...]]:
        """By parameter, the operations that contribute to its gradient, in ``order``."""
        operations = (self.operations[name] for name in self.order)
        return _grouped((parameter, o.name) for o in operations for parameter in o.gradients)

    @cached_property
    def by_bucket(self) -> Mapping[tuple[int, Role], str]:
        """The operation of each bucket and role. Raises ValueError where there are two."""
        found: dict[tuple[int, Role], str] = {}
        for name, operation in self.operations.items():
            if operation.bucket is None:
                continue
            other = found.setdefault((operation.bucket, operation.role), name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} have the same bucket and role")
        return MappingProxyType(found)

    @cached_property
    def earliest_starts(self) -> Mapping[str, float]:
        """Seconds after the step's start at which each operation can start (as soon as possible),
        if nothing but same-step edges holds it back."""
        starts: dict[str, float] = {}
        for name in self.order:
            starts[name] = max(
                (starts[p] + self.operations[p].seconds for p in self.same_step.pred[name]),
                default=0.0,
            )
        return MappingProxyType(starts)

    @cached_property
    def seconds(self) -> float:
        """Length of one step by itself: its critical path, without what streams cannot share."""
        starts = self.earliest_starts
        return max((starts[name] + o.seconds for name, o in self.operations.items()), default=0.0)

    @cached_property
    def latest_starts(self) -> Mapping[str, float]:
        """Seconds after the step's start at which each operation must start (as late as possible)
        for the step not to become longer than ``seconds``."""
        starts: dict[str, float] = {}
        for name in reversed(self.order):
            end = min((starts[s] for s in self.same_step.succ[name]), default=self.seconds)
            starts[name] = end - self.operations[name].seconds
        return MappingProxyType(starts)

    def last_on_chains(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names`` less those that an ORDER chain already puts before another of them."""
        last: dict[int, str] = {}
        for name in names:
            chain, place = self.chains[name]
            if chain not in last or place > self.chains[last[chain]][1]:
                last[chain] = name
        return tuple(last.values())

    def first_on_chains(self, names: Iterable[str]) -> tuple[str, ...]:
        """``names`` less those that an ORDER chain already puts after another of them."""
        first: dict[int, str] = {}
        for name in names:
            chain, place = self.chains[name]
            if chain not in first or place < self.chains[first[chain]][1]:
                first[chain] = name
        return tuple(first.values())

    def extended(self, operations: Iterable[Operation], edges: Iterable[Edge]) -> StepGraph:
        """This graph with more operations and edges; ValueError as for a new graph."""
        return StepGraph([*self.operations.values(), *operations], [*self.edges, *edges])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepGraph):
            return NotImplemented
        return self.operations == other.operations and set(self.edges) == set(other.edges)

    def __hash__(self) -> int:
        return hash(tuple(self.operations))

    def __repr__(self) -> str:
        return f"StepGraph({len(self.operations)} operations, {len(self.edges)} edges)"

    def to_json(self) -> str:
        """The graph as one line of JSON, which ``from_json`` reads back exactly."""
        number = {name: index for index, name in enumerate(self.operations)}
        return json.dumps(
            {
                "format": _FORMAT,
                "operations": [_operation_fields(o) for o in self.operations.values()],
                "edges": [
                    [number[source], number[target], dependency.why.value, dependency.carried]
                    for source, target, dependency in self.edges
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> StepGraph:
        """The graph that ``to_json`` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format is {fields['format']!r}, expected {_FORMAT!r}")
            operations = [_operation_from(raw) for raw in fields["operations"]]
            names = dict(enumerate(o.name for o in operations))
            edges = [
                Edge(names[source], names[target], Dependency(Why(why), carried))
                for source, target, why, carried in fields["edges"]
            ]
            return cls(operations, edges)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a step graph: {error!r}") from error

    def to_graphml(self) -> str:
        """The graph as GraphML, for drawing tools; sets of parameters are joined by spaces."""
        drawn = nx.MultiDiGraph()
        for name, operation in self.operations.items():
            attributes = {
                key: " ".join(map(str, value)) if isinstance(value, list) else value
                for key, value in _operation_fields(operation).items()
                if value is not None and key != "name"
            }
            drawn.add_node(name, **attributes)
        for source, target, dependency in self.edges:
            drawn.add_edge(source, target, why=dependency.why.value, carried=dependency.carried)
        return "\n".join(nx.generate_graphml(drawn))


def _grouped(pairs: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return MappingProxyType({key: tuple(values) for key, values in groups.items()})


def _operation_fields(operation: Operation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "phase": operation.phase.kind.value,
        "micro_step": operation.phase.micro_step,
        "role": operation.role.value,
        "stream": operation.stream,
        "seconds": operation.seconds,
        "nbytes": operation.nbytes,
        "reads": sorted(operation.reads),
        "writes": sorted(operation.writes),
        "gradients": sorted(operation.gradients),
        "bucket": operation.bucket,
    }


def _operation_from(raw: Mapping[str, Any]) -> Operation:
    fields = dict(raw)
    phase = Phase(PhaseKind(fields.pop("phase")), fields.pop("micro_step"))
    role = Role(fields.pop("role"))
    for key in ("reads", "writes", "gradients"):
        fields[key] = frozenset(fields[key])
    return Operation(phase=phase, role=role, **fields)
