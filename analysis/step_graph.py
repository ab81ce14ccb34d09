"""The step graph: every operation of one training step, and what must come before what.

Phases, micro-steps, streams and process groups are data of the operations. Edges to the next step
(*carried* edges) lie in the same graph, so the graph without them is acyclic.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import add
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
    edges are one. Everything derived is computed once, at its first use, in linear time. Walks over
    the whole graph go by position in ``order`` and not by name: lists of numbers in the order of
    the walk stay in the processor's caches where tables of names do not.
    """

    def __init__(self, operations: Iterable[Operation], edges: Iterable[Edge] = ()) -> None:
        """Raises ValueError for two operations of one name, an edge of an unknown operation, or a
        cycle of edges within one step."""
        known: dict[str, Operation] = {}
        for operation in operations:
            if operation.name in known:
                raise ValueError(f"two operations are named {operation.name!r}")
            known[operation.name] = operation
        self._operations = MappingProxyType(known)
        self._edges = tuple(dict.fromkeys(edges))
        self._ends = self._numbered_ends()
        _ = self.order  # raises for a cycle

    def _numbered_ends(self) -> Sequence[tuple[int, int]]:
        """Source and target of each edge, as numbers of operations in the given order."""
        number = {name: index for index, name in enumerate(self.operations)}
        try:
            return [(number[source], number[target]) for source, target, _ in self.edges]
        except KeyError as error:
            source, target, _ = next(edge for edge in self.edges if error.args[0] in edge)
            raise ValueError(
                f"edge {source!r} -> {target!r}: there is no operation {error}"
            ) from None

    @property
    def operations(self) -> Mapping[str, Operation]:
        """All operations by name, in the order in which they were given."""
        return self._operations

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the order in which they were given."""
        return self._edges

    @cached_property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges from each operation that has some, by its name."""
        outgoing: dict[str, list[Edge]] = {}
        for edge in self.edges:
            outgoing.setdefault(edge.source, []).append(edge)
        return MappingProxyType({name: tuple(edges) for name, edges in outgoing.items()})

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
    def order(self) -> tuple[str, ...]:
        """All names, each after those on which it depends within the step."""
        names = tuple(self.operations)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(names)))
        graph.add_edges_from(
            ends for ends, e in zip(self._ends, self.edges, strict=True) if not e.dependency.carried
        )
        try:
            return tuple(names[number] for number in nx.topological_sort(graph))
        except nx.NetworkXUnfeasible:
            cycle = [names[source] for source, _ in nx.find_cycle(graph)]
            raise ValueError(
                f"operations wait for each other within one step: {' -> '.join(cycle + cycle[:1])}"
            ) from None

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where ``order`` has each name."""
        return MappingProxyType({name: place for place, name in enumerate(self.order)})

    @cached_property
    def before(self) -> Sequence[Sequence[int]]:
        """By position: the positions of the operations from which an edge within the step leads
        here, each once."""
        sources: list[list[int]] = [[] for _ in self.order]
        for source, target in dict.fromkeys(self._same_step_places()):
            sources[target].append(source)
        return tuple(map(tuple, sources))

    def _same_step_places(self, *why: Why) -> Iterator[tuple[int, int]]:
        """Positions of source and target of each edge within the step that is there for a reason
        of ``why``, by default any."""
        places = [self.position[name] for name in self.operations]
        for (source, target), edge in zip(self._ends, self.edges, strict=True):
            if not edge.dependency.carried and (not why or edge.dependency.why in why):
                yield places[source], places[target]

    @cached_property
    def after(self) -> Sequence[Sequence[int]]:
        """By position: the positions of the operations to which an edge within the step leads."""
        targets: list[list[int]] = [[] for _ in self.order]
        for target, sources in enumerate(self.before):
            for source in sources:
                targets[source].append(target)
        return tuple(map(tuple, targets))

    def predecessors(self, name: str) -> tuple[str, ...]:
        """The operations that ``name`` directly depends on within the step."""
        return tuple(self.order[place] for place in self.before[self.position[name]])

    @cached_property
    def chains(self) -> Mapping[str, tuple[int, int]]:
        """By name, a chain of ORDER edges and the place on it; each name is on exactly one chain.

        Of two names on one chain, the later place depends on the earlier. This answers most
        questions of reachability without a search.
        """
        return MappingProxyType(dict(zip(self.order, self._chains, strict=True)))

    @cached_property
    def _chains(self) -> Sequence[tuple[int, int]]:
        """``chains`` by position."""
        earlier: list[list[int]] = [[] for _ in self.order]
        for source, target in self._same_step_places(Why.ORDER):
            earlier[target].append(source)
        places: list[tuple[int, int]] = []
        ends: list[int] = []
        for here, sources in enumerate(earlier):
            for source in sources:
                chain, place = places[source]
                if ends[chain] == source:
                    places.append((chain, place + 1))
                    ends[chain] = here
                    break
            else:
                places.append((len(ends), 0))
                ends.append(here)
        return places

    def depends_on(self, later: str, earlier: str) -> bool:
        """Whether ``later`` comes after ``earlier`` within the step, over any number of edges.

        At once if ``earlier`` is on one of the longest ORDER chains; else after a walk over what
        comes after it, up to those chains.
        """
        goal, start = self.position[later], self.position[earlier]
        seen: set[int] = set()
        pending = [start]
        while pending:
            here = pending.pop()
            if here in seen or here > goal:
                continue
            seen.add(here)
            if here == goal:
                return goal != start
            chain, place = self._chains[here]
            slot = self._slots.get(chain)
            if slot is None:
                pending.extend(self.after[here])
            elif self._clocks[slot][goal] >= place:
                return True
        return False

    @cached_property
    def _slots(self) -> Mapping[int, int]:
        """The longest chains, numbered; a fixed count of them, to bound the work."""
        lengths = Counter(chain for chain, _ in self._chains)
        longest = [chain for chain, length in lengths.most_common(_CLOCKED_CHAINS) if length > 1]
        return {chain: slot for slot, chain in enumerate(longest)}

    @cached_property
    def _clocks(self) -> Sequence[Sequence[int]]:
        """By slot and position: how far along that chain it and what it depends on have come."""
        clocks: list[list[int]] = []
        for clocked in self._slots:
            clock: list[int] = []
            clocks.append(clock)
            for sources, (chain, place) in zip(self.before, self._chains, strict=True):
                here = max([clock[source] for source in sources], default=-1)
                clock.append(place if chain == clocked else here)
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
    def costs(self) -> Sequence[float]:
        """By position: the seconds that the operation takes."""
        return tuple(self.operations[name].seconds for name in self.order)

    @cached_property
    def earliest(self) -> Sequence[float]:
        """``earliest_starts`` by position."""
        starts: list[float] = []
        ends: list[float] = []
        for sources, cost in zip(self.before, self.costs, strict=True):
            starts.append(max([ends[source] for source in sources], default=0.0))
            ends.append(starts[-1] + cost)
        return starts

    @cached_property
    def earliest_starts(self) -> Mapping[str, float]:
        """Seconds after the step's start at which each operation can start (as soon as possible),
        if nothing but same-step edges holds it back."""
        return MappingProxyType(dict(zip(self.order, self.earliest, strict=True)))

    @cached_property
    def seconds(self) -> float:
        """Length of one step by itself: its critical path, without what streams cannot share."""
        return max(map(add, self.earliest, self.costs), default=0.0)

    def latest(self, ends: Sequence[float]) -> Sequence[float]:
        """By position, the latest start of each operation that ends by its one of ``ends`` (seconds
        after the step's start), as does all that depends on it within the step."""
        starts = list(ends)
        for here in reversed(range(len(starts))):
            end = min([starts[target] for target in self.after[here]], default=ends[here])
            starts[here] = min(ends[here], end) - self.costs[here]
        return starts

    @cached_property
    def latest_starts(self) -> Mapping[str, float]:
        """Seconds after the step's start at which each operation must start (as late as possible)
        for the step not to become longer than ``seconds``."""
        starts = self.latest([self.seconds] * len(self.order))
        return MappingProxyType(dict(zip(self.order, starts, strict=True)))

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
