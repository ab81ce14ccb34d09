"""What a rank does in one training step, as a value that the verifier can read.

A :class:`Program` is a sequence of actions in execution order: collectives start, are waited for,
and compute reads and writes. It is cyclic: after its last action comes its first one, of the next
step. What is in flight at the end is waited for somewhere in the next repetition.

Three builders make programs: :func:`forward_actions` and :func:`backward_actions` read lowered
graphs, :func:`step_program` puts them together with what the runtime does around them.

A buffer is a storage, by name. Actions name the buffers that collectives use, and no others; that
a storage is freed or reused shows as a write. The memory of a parameter is named by the parameter
where it is read and by the bucket where it is written, since an update or a gather writes only
those elements of a parameter that lie in its bucket.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.gradients import output_values
from fxcomm.layout import ShardLayout
from fxcomm.passes.stamp import BucketKey, Stamp, stamp_of
from fxcomm.plan import OverlapPlan

REDUCE = "reduce"
GATHER = "gather"

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, order=True)
class CollectiveId:
    """A collective of a step: what it does (``REDUCE``, ``GATHER``, or another name) and on which
    bucket."""

    kind: str
    bucket: BucketKey

    def __str__(self) -> str:
        return f"{self.kind} of bucket {self.bucket.arena}.{self.bucket.bucket}"


@dataclass(frozen=True)
class Launch:
    """A collective starts on the process group ``group``.

    Until its wait it may read the buffers ``reads`` and write the buffers ``writes``, and holds
    ``nbytes`` bytes of memory that only it needs. A reduction carries the contributions of the
    backwards ``micro_steps`` (numbers within the step).
    """

    collective: CollectiveId
    group: str
    reads: frozenset[str]
    writes: frozenset[str]
    nbytes: int
    where: str
    micro_steps: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a collective.

    ``parameter`` is the parameter through which it waits, if it does. Several parameters of one
    bucket bring several waits for one gather; the first is the wait, the others find nothing to
    wait for.
    """

    collective: CollectiveId
    where: str
    parameter: str | None = None


@dataclass(frozen=True)
class Compute:
    """Compute that touches parameters or buffers of collectives.

    It reads the parameters ``reads`` and writes, for the buckets ``updates``, the elements of their
    parameters that this rank owns (all of them if the bucket is not sharded). ``contributes`` are
    the parameters whose gradient of backward ``micro_step`` is complete with it. It reads before it
    writes.
    """

    where: str
    reads: frozenset[str] = _NOTHING
    updates: frozenset[BucketKey] = frozenset()
    reads_buffers: frozenset[str] = _NOTHING
    writes_buffers: frozenset[str] = _NOTHING
    contributes: frozenset[str] = _NOTHING
    micro_step: int = 0


Action: TypeAlias = Launch | Wait | Compute


@dataclass(frozen=True)
class ProgramBucket:
    """The parameters of which a bucket holds elements. Each rank updates only its shard of a
    ``sharded`` bucket, so that a gather must follow."""

    parameters: frozenset[str]
    sharded: bool = True


@dataclass(frozen=True)
class Program:
    """One steady-state step of one rank: forward, backward, update, and again."""

    rank: int
    actions: tuple[Action, ...]
    buckets: Mapping[BucketKey, ProgramBucket]


@dataclass(frozen=True)
class GraphActions:
    """What a backward graph does. It fills the buffers of the buckets ``packed`` itself, so nothing
    else can reduce them, and returns the buckets ``finished`` as reduced, so nothing else waits."""

    actions: tuple[Action, ...]
    packed: frozenset[BucketKey] = frozenset()
    finished: frozenset[BucketKey] = frozenset()


@dataclass(frozen=True)
class MicroStep:
    """A forward and the backward graphs that follow it. Without ``reduces``, gradients stay on the
    rank until a later micro-step of the step reduces them (``no_sync``)."""

    forward: tuple[Action, ...]
    backward: tuple[GraphActions, ...]
    reduces: bool = True


def program_buckets(
    layout: ShardLayout, *, arena: int = 0, sharded: bool = True
) -> dict[BucketKey, ProgramBucket]:
    """The buckets of a layout and their parameters by name."""
    return {
        BucketKey(arena, number): ProgramBucket(
            frozenset(layout.parameters[s.parameter].name for s in bucket.segments), sharded
        )
        for number, bucket in enumerate(layout.buckets)
    }


def buckets_of_parameters(
    buckets: Mapping[BucketKey, ProgramBucket],
) -> dict[str, tuple[BucketKey, ...]]:
    """All buckets that hold elements of a parameter, by its name."""
    found: dict[str, list[BucketKey]] = {}
    for key, bucket in buckets.items():
        for parameter in bucket.parameters:
            found.setdefault(parameter, []).append(key)
    return {parameter: tuple(keys) for parameter, keys in found.items()}


# --- reading graphs ---


@dataclass(frozen=True)
class _Memory:
    """What may lie behind a node's value: parameters, and storages that the graph made."""

    parameters: frozenset[str] = _NOTHING
    storages: frozenset[str] = _NOTHING


class _Aliases:
    """The memory behind each node of a graph."""

    def __init__(self, name: str, parameters: Mapping[torch.fx.Node, str]) -> None:
        self._name = name
        self._known = {node: _Memory(frozenset({p})) for node, p in parameters.items()}

    def of(self, node: torch.fx.Node) -> _Memory:
        """The memory behind ``node``. Works in any order of nodes, as in graphs that are wrong."""
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def of_inputs(self, node: torch.fx.Node) -> _Memory:
        """The memory behind everything that ``node`` takes."""
        behind = [self.of(source) for source in node.all_input_nodes]
        return _Memory(
            frozenset().union(*(m.parameters for m in behind)),
            frozenset().union(*(m.storages for m in behind)),
        )

    def _find(self, node: torch.fx.Node) -> _Memory:
        if not _may_alias(node):
            return _Memory(storages=self._own(node))
        behind = self.of_inputs(node)
        copies = self._own(node) if _may_copy(node) else _NOTHING
        return _Memory(behind.parameters, behind.storages | copies)

    def written(self, node: torch.fx.Node) -> frozenset[str]:
        """The storages that ``node`` writes: its own result, or an argument in place."""
        if node.op != "call_function":
            return _NOTHING
        targets = [node.kwargs.get("out")]
        if _writes_in_place(node):
            targets.append(node.args[0])
        storages = [self.of(t).storages for t in targets if isinstance(t, torch.fx.Node)]
        fresh = not _may_alias(node) or _may_copy(node)
        return (self._own(node) if fresh else _NOTHING).union(*storages)

    def _own(self, node: torch.fx.Node) -> frozenset[str]:
        return frozenset({f"{self._name}: {node.name}"})


def _name_of(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _is_functional(node: torch.fx.Node) -> bool:
    return _name_of(node).startswith("_c10d_functional.")


def _is_wait(node: torch.fx.Node) -> bool:
    # By name, since only torch.distributed registers the operator.
    return _name_of(node) == "_c10d_functional.wait_tensor.default"


def _may_alias(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem" or _is_wait(node):
        return True
    return compat.is_view(node) or _may_copy(node) or _writes_in_place(node)


def _may_copy(node: torch.fx.Node) -> bool:
    return compat.may_copy(node) or node.target is torch.ops.aten._unsafe_view.default


def _is_view(node: torch.fx.Node) -> bool:
    return _may_alias(node) and not _may_copy(node) and not _writes_in_place(node)


def _writes_in_place(node: torch.fx.Node) -> bool:
    return bool(compat.written_operands(node))


def _parameters_at(
    graph: torch.fx.Graph, inputs: Mapping[int, str]
) -> tuple[dict[torch.fx.Node, str], list[torch.fx.Node]]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return {placeholders[index]: name for index, name in inputs.items()}, placeholders


def saved_parameters(
    forward: torch.fx.Graph, backward: torch.fx.Graph, parameter_inputs: Mapping[int, str]
) -> dict[int, str]:
    """Which inputs of a backward graph (by position) are parameters, or views of one, that its
    forward saved. ``parameter_inputs`` names those of the forward's inputs that are parameters.

    The partitioner gives a saved value the same name in both graphs.
    """
    parameters, _ = _parameters_at(forward, parameter_inputs)
    aliases = _Aliases("forward", parameters)
    behind = {node.name: aliases.of(node).parameters for node in forward.nodes}
    _, placeholders = _parameters_at(backward, {})
    return {
        index: parameter
        for index, node in enumerate(placeholders)
        for parameter in behind.get(node.name, _NOTHING)
    }


def gradient_nodes(
    graph: torch.fx.Graph, gradients: Mapping[int, str]
) -> dict[str, frozenset[str]]:
    """The nodes (by name) that complete gradients, each with its parameters, of a backward graph
    before the passes. ``gradients`` maps output positions to parameters."""
    values = output_values(graph)
    found: dict[str, frozenset[str]] = {}
    for position, parameter in gradients.items():
        value = values[position]
        if value is not None:
            found[value.name] = found.get(value.name, _NOTHING) | {parameter}
    return found


def forward_actions(
    graph: torch.fx.Graph,
    parameter_inputs: Mapping[int, str],
    buckets: Mapping[BucketKey, ProgramBucket],
    *,
    name: str = "forward",
) -> tuple[Action, ...]:
    """What a forward graph does with parameters.

    ``parameter_inputs`` names those of the graph's inputs that are parameters, by position. A wait
    on a parameter waits for the gathers of all its ``buckets``. A view reads nothing, but what
    consumes it does; outputs, such as what is saved for backward, read nothing either.
    """
    parameters, _ = _parameters_at(graph, parameter_inputs)
    aliases = _Aliases(name, parameters)
    places = buckets_of_parameters(buckets)
    actions: list[Action] = []
    for node in graph.nodes:
        where = f"{name}: {node.name}"
        if _is_wait(node):
            actions += [
                Wait(CollectiveId(GATHER, bucket), where, parameter)
                for parameter in sorted(aliases.of_inputs(node).parameters)
                for bucket in places.get(parameter, ())
            ]
        elif _reads(node) and (reads := aliases.of_inputs(node).parameters):
            actions.append(Compute(where, reads=reads))
    return tuple(actions)


def _reads(node: torch.fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and not _is_view(node)


def backward_actions(
    graph: torch.fx.Graph,
    gradients: Mapping[str, frozenset[str]],
    parameter_inputs: Mapping[int, str] | None = None,
    *,
    group: str = "",
    name: str = "backward",
) -> GraphActions:
    """What a lowered backward graph does.

    ``gradients`` are the nodes that complete gradients (:func:`gradient_nodes` of the graph before
    the passes), ``parameter_inputs`` the inputs by position that are parameters or views of them
    (:func:`saved_parameters`). ``group`` is the process group of launches that name none. ``name``
    must tell apart all graph runs of a step: it begins the names of places and buffers.
    """
    reader = _BackwardReader(graph, gradients, parameter_inputs or {}, group, name)
    return GraphActions(tuple(reader.actions()), reader.packed, reader.finished)


class _BackwardReader:
    """Reads one lowered backward graph."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        gradients: Mapping[str, frozenset[str]],
        parameter_inputs: Mapping[int, str],
        group: str,
        name: str,
    ) -> None:
        self._graph, self._gradients, self._group, self._name = graph, gradients, group, name
        parameters, _ = _parameters_at(graph, parameter_inputs)
        self._aliases = _Aliases(name, parameters)
        self._launches = {n: s for n, s in _stamped(graph) if s.role == "launch" and s.final}
        self.packed = frozenset(s.bucket for _, s in _stamped(graph) if s.role == "pack")
        self.finished = frozenset(s.bucket for _, s in _stamped(graph) if s.role == "finish")
        self._buffers = _NOTHING.union(
            *(self._aliases.of_inputs(n).storages for n in self._launches),
            *(self._aliases.of(n).storages for n in self._launches),
        )

    def actions(self) -> Iterator[Action]:
        """The graph's actions in execution order."""
        freed = self._freed()
        for node in self._graph.nodes:
            if node in self._launches:
                yield self._launch(node)
                yield from self._contribution(node)
            else:
                waited = self._waits_for(node)
                if waited is not None:
                    yield Wait(waited, self._where(node))
                yield from self._compute(node)
            if node in freed:
                # Its memory is the compiler's to give away from here on.
                yield Compute(f"{self._where(node)} (last use)", writes_buffers=freed[node])

    def _where(self, node: torch.fx.Node) -> str:
        return f"{self._name}: {node.name}"

    def _launch(self, node: torch.fx.Node) -> Launch:
        groups = [argument for argument in node.args if isinstance(argument, str)]
        return Launch(
            CollectiveId(REDUCE, self._launches[node].bucket),
            # Collectives name their group last.
            groups[-1] if groups else self._group,
            self._aliases.of_inputs(node).storages,
            self._aliases.of(node).storages,
            sum(_nbytes(source) for source in node.all_input_nodes),
            self._where(node),
        )

    def _contribution(self, node: torch.fx.Node) -> Iterator[Compute]:
        parameters = self._gradients.get(node.name)
        if parameters:
            yield Compute(self._where(node), contributes=parameters)

    def _waits_for(self, node: torch.fx.Node) -> CollectiveId | None:
        """The collective for which ``node`` waits: that whose result it takes, whatever its stamp
        says."""
        stamp = stamp_of(node)
        begins = stamp is not None and stamp.role == "finish" and not self._continues(node)
        for source in node.all_input_nodes:
            if source in self._launches:
                # torch's own operators need torch's wait; others wait as they begin to finish.
                waits = _is_wait(node) or (begins and not _is_functional(source))
                bucket = self._launches[source].bucket
                return CollectiveId(REDUCE, bucket) if waits else None
        return CollectiveId(REDUCE, stamp.bucket) if stamp is not None and begins else None

    def _continues(self, node: torch.fx.Node) -> bool:
        stamps = (stamp_of(source) for source in node.all_input_nodes)
        return any(stamp is not None and stamp.role == "finish" for stamp in stamps)

    def _compute(self, node: torch.fx.Node) -> Iterator[Compute]:
        behind = self._aliases.of_inputs(node) if _reads(node) else _Memory()
        action = Compute(
            self._where(node),
            reads=behind.parameters,
            reads_buffers=behind.storages & self._buffers,
            writes_buffers=self._aliases.written(node) & self._buffers,
            contributes=self._gradients.get(node.name, _NOTHING),
        )
        if action != Compute(action.where):
            yield action

    def _freed(self) -> dict[torch.fx.Node, frozenset[str]]:
        """Buffers of collectives that the graph leaves in flight but does not return, by their last
        use. The compiler keeps a collective's operand until a wait in the same graph."""
        waited = {self._waits_for(node) for node in self._graph.nodes}
        running = [
            self._aliases.of_inputs(node).storages | self._aliases.of(node).storages
            for node, stamp in self._launches.items()
            if CollectiveId(REDUCE, stamp.bucket) not in waited
        ]
        returned = [v for v in output_values(self._graph) if v is not None]
        kept = _NOTHING.union(*(self._aliases.of(value).storages for value in returned))
        lost = _NOTHING.union(*running) - kept
        last: dict[str, torch.fx.Node] = {}
        for node in self._graph.nodes:
            touched = self._aliases.of_inputs(node).storages | self._aliases.of(node).storages
            last.update(dict.fromkeys(touched & lost, node))
        freed: dict[torch.fx.Node, frozenset[str]] = {}
        for storage, node in last.items():
            freed[node] = freed.get(node, _NOTHING) | {storage}
        return freed


def _stamped(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, Stamp]]:
    stamps = ((node, stamp_of(node)) for node in graph.nodes)
    return [(node, stamp) for node, stamp in stamps if stamp is not None]


def _nbytes(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) * value.itemsize if isinstance(value, torch.Tensor) else 0


# --- putting a step together ---


def step_program(
    rank: int,
    micro_steps: Sequence[MicroStep],
    plan: OverlapPlan,
    *,
    update_order: tuple[int, ...],
    gather_order: tuple[int, ...],
    commshift: bool,
    arena: int = 0,
    group: str = "",
    sharded: bool = True,
    gather_bytes: Sequence[int] | None = None,
) -> Program:
    """The program of a rank that runs ``micro_steps`` and then the optimizer, all by ``plan``.

    A backward that reduces launches, when it ends, the buckets that its graphs did not launch, in
    order. Buckets are updated in ``update_order``, each when its reduction was waited for, and
    gathered in ``gather_order``, each when it and those ahead of it are updated. With ``commshift``
    gathers stay in flight, and those that no forward waits for are waited for before the next
    update; else the step waits for all of them. What the runtime launches keeps under the plan's
    ``in_flight_bytes``, if need be by waiting for the oldest first. ``gather_bytes`` are the bytes
    that each bucket's gather holds beside the parameters (None: none, as it is gathered in place).
    Buckets that are not ``sharded`` are never gathered.
    """
    sizes = tuple(gather_bytes) if gather_bytes is not None else (0,) * len(plan.in_graph)
    runtime = _Runtime(plan, arena, group, sizes)
    for number, micro_step in enumerate(micro_steps):
        runtime.run(number, micro_step, last=number == len(micro_steps) - 1)
    if commshift:
        runtime.drain(gather_order)
    runtime.step(update_order, gather_order if sharded else ())
    if not commshift:
        runtime.finish_gathers(gather_order)
    buckets = program_buckets(plan.layout, arena=arena, sharded=sharded)
    return Program(rank, tuple(runtime.actions), buckets)


@dataclass
class _Runtime:
    """Collects the actions of one step. ``in_flight`` holds what this step left in flight so far,
    with its bytes, in order of launch; ``launched`` the last launch of each collective; ``users``
    counts the collectives in flight that read a buffer."""

    plan: OverlapPlan
    arena: int
    group: str
    gather_bytes: tuple[int, ...]
    actions: list[Action] = field(default_factory=list)
    in_flight: dict[CollectiveId, int] = field(default_factory=dict)
    launched: dict[CollectiveId, Launch] = field(default_factory=dict)
    waited: set[CollectiveId] = field(default_factory=set)
    uncarried: list[int] = field(default_factory=list)
    users: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def _id(self, kind: str, bucket: int) -> CollectiveId:
        return CollectiveId(kind, BucketKey(self.arena, bucket))

    def add(self, action: Action) -> None:
        """Appends an action and keeps account of what is in flight."""
        self.actions.append(action)
        if isinstance(action, Launch):
            self._forget(action.collective)
            self.in_flight[action.collective] = action.nbytes
            self.nbytes += action.nbytes
            self.launched[action.collective] = action
            self.users.update(action.reads)
            self.waited.discard(action.collective)
        elif isinstance(action, Wait):
            self._forget(action.collective)
            self.waited.add(action.collective)

    def _forget(self, collective: CollectiveId) -> None:
        if collective in self.in_flight:
            self.nbytes -= self.in_flight.pop(collective)
            self.users.subtract(self.launched[collective].reads)

    def launch(self, launch: Launch) -> None:
        """Starts a collective when there is room for it."""
        limit = self.plan.in_flight_bytes
        while limit is not None and launch.nbytes and self.nbytes + launch.nbytes > limit:
            oldest = next((c for c, held in self.in_flight.items() if held), None)
            if oldest is None:
                break
            self.add(Wait(oldest, f"{launch.where} (room for it)"))
        self.add(launch)

    def run(self, number: int, micro_step: MicroStep, *, last: bool) -> None:
        """Forward, backward, and the reductions that the backward's graphs left to the runtime."""
        self.uncarried.append(number)
        carried = frozenset(self.uncarried)
        for action in micro_step.forward:
            self.add(action)
        for graph in micro_step.backward:
            for action in _numbered(graph.actions, number, carried):
                self.add(action)
            # The runtime takes the graph's word for these.
            self.waited |= {CollectiveId(REDUCE, bucket) for bucket in graph.finished}
        if not micro_step.reduces:
            return
        packed = frozenset().union(*(graph.packed for graph in micro_step.backward))
        for bucket in range(len(self.plan.layout.buckets)):
            if BucketKey(self.arena, bucket) not in packed:
                self._launch_late(bucket, f"end of backward {number}", carried)
        self.uncarried.clear()
        if not last:
            self._accumulate(number)

    def _launch_late(self, bucket: int, where: str, carried: frozenset[int]) -> None:
        where = f"{where}: bucket {bucket}"
        packed, reduced = frozenset({f"{where} packed"}), frozenset({f"{where} reduced"})
        nbytes = self.plan.layout.buckets[bucket].nbytes
        self.add(Compute(f"{where} packed", writes_buffers=packed))
        self.launch(
            Launch(self._id(REDUCE, bucket), self.group, packed, reduced, nbytes, where, carried)
        )

    def _accumulate(self, number: int) -> None:
        """Adds what a backward reduced to the gradients that are kept until the step."""
        for bucket in range(len(self.plan.layout.buckets)):
            where = f"end of backward {number}: accumulation of bucket {bucket}"
            reads, freed = self._wait_reduced(bucket, where)
            self.add(Compute(where, reads_buffers=reads, writes_buffers=freed))

    def _wait_reduced(self, bucket: int, where: str) -> tuple[frozenset[str], frozenset[str]]:
        """Waits for a reduction that no graph waited for; its results, and those of its operands
        that are freed by that: the pieces of a large gradient share a storage."""
        collective = self._id(REDUCE, bucket)
        if collective not in self.waited:
            self.add(Wait(collective, where))
        launch = self.launched.get(collective)
        if launch is None:
            return _NOTHING, _NOTHING
        return launch.writes, frozenset(b for b in launch.reads if not self.users[b])

    def drain(self, gather_order: Iterable[int]) -> None:
        """Waits for the last step's gathers of parameters that no forward used."""
        for bucket in gather_order:
            collective = self._id(GATHER, bucket)
            if collective not in self.waited:
                self.add(Wait(collective, f"step: bucket {bucket} still in flight"))

    def step(self, update_order: Iterable[int], gather_order: Iterable[int]) -> None:
        """Updates buckets and starts their gathers."""
        updated: set[int] = set()
        gathers = deque(gather_order)
        for bucket in update_order:
            where = f"step: update of bucket {bucket}"
            reads, freed = self._wait_reduced(bucket, where)
            memory = frozenset({self._memory(bucket)})
            self.add(
                Compute(
                    where,
                    updates=frozenset({BucketKey(self.arena, bucket)}),
                    reads_buffers=reads,
                    writes_buffers=memory | freed,
                )
            )
            updated.add(bucket)
            while gathers and gathers[0] in updated:
                self._gather(gathers.popleft())

    def _memory(self, bucket: int) -> str:
        return f"parameters of bucket {self.arena}.{bucket}"

    def _gather(self, bucket: int) -> None:
        memory = frozenset({self._memory(bucket)})
        nbytes = self.gather_bytes[bucket]
        where = f"step: gather of bucket {bucket}"
        self.launch(Launch(self._id(GATHER, bucket), self.group, memory, memory, nbytes, where))

    def finish_gathers(self, gather_order: Iterable[int]) -> None:
        """Waits for the gathers that are still in flight."""
        for bucket in gather_order:
            if self._id(GATHER, bucket) in self.in_flight:
                self.add(Wait(self._id(GATHER, bucket), f"step: end of gather of bucket {bucket}"))


def _numbered(actions: Iterable[Action], number: int, carried: frozenset[int]) -> Iterator[Action]:
    """The actions of a backward, with its number within the step."""
    for action in actions:
        if isinstance(action, Compute):
            yield replace(action, micro_step=number)
        elif isinstance(action, Launch):
            yield replace(action, micro_steps=carried)
        else:
            yield action
