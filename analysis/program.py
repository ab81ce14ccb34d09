"""What a rank does in one training step, as a value that the verifier can read.

A :class:`Program` is a sequence of actions in execution order: collectives start, are waited for,
and compute reads and writes. It is cyclic: after its last action comes its first one, of the next
step. What is in flight at the end is waited for somewhere in the next repetition.

:func:`forward_actions` and :func:`backward_actions` read lowered graphs, :func:`step_program` puts
what they found together with what the runtime does around it.

A buffer is a storage, by name. Actions name the buffers that collectives use, and no others; that
a storage is freed or reused shows as a write. The memory of a parameter is named by the parameter
where it is read and by the bucket where it is written, since an update or a gather writes only
those elements of a parameter that lie in its bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.gradients import output_values
from fxcomm.communicator import group_of, held_bytes
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
class ParameterWait:
    """A forward graph waits for whatever is in flight into a parameter: the gathers of its buckets,
    which are the plan's to say."""

    parameter: str
    where: str


ForwardAction: TypeAlias = ParameterWait | Compute


@dataclass(frozen=True)
class UpdatePlace:
    """A backward graph hands a bucket's reduction to the runtime, which waits for it, updates the
    bucket and starts its gather."""

    bucket: BucketKey
    where: str


BackwardAction: TypeAlias = Action | UpdatePlace


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
    else can reduce them, and returns the buckets ``finished`` as reduced, so nothing else waits.
    With ``adds_local`` it adds what earlier backwards left on the rank to what it reduces."""

    actions: tuple[BackwardAction, ...]
    packed: frozenset[BucketKey] = frozenset()
    finished: frozenset[BucketKey] = frozenset()
    adds_local: bool = False


@dataclass(frozen=True)
class MicroStep:
    """A forward and the backward graphs that follow it.

    Without ``reduces``, gradients stay on the rank until a later micro-step of the step reduces
    them (``no_sync``). Other graphs, which are not listed, launched the first ``before`` buckets.
    """

    forward: tuple[ForwardAction, ...]
    backward: tuple[GraphActions, ...]
    reduces: bool = True
    before: int = 0


@dataclass(frozen=True)
class ArenaPlan:
    """A plan as the runtime's arena ``number`` executes it, with reductions on ``group`` and
    gathers on ``gather_group`` (None: the same).

    ``reduce_bytes`` and ``gather_bytes`` are what the reduction and the gather of each bucket hold
    in flight, beside the parameters; ``deferred`` says of each whether its gather may run on into
    the next forward. Buckets that are not ``sharded`` are reduced whole and never gathered.
    """

    plan: OverlapPlan
    reduce_bytes: tuple[int, ...]
    gather_bytes: tuple[int, ...]
    deferred: tuple[bool, ...]
    number: int = 0
    group: str = ""
    sharded: bool = True
    gather_group: str | None = None


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


class _Kind(NamedTuple):
    """What an operator's result is: new, or memory that was there (``aliases``), or one of both
    (``copies``, too); and whether it writes its first operand in place."""

    aliases: bool
    copies: bool
    writes: bool


class _Aliases:
    """The memory behind each node of a graph."""

    def __init__(self, name: str, parameters: Mapping[torch.fx.Node, frozenset[str]]) -> None:
        self._name = name
        self._known = {node: _Memory(names) for node, names in parameters.items()}
        self._kinds: dict[Any, _Kind] = {}  # by operator

    def kind(self, node: torch.fx.Node) -> _Kind:
        """What the node does with memory."""
        if node.op != "call_function":
            return _NEW
        if node.target not in self._kinds:
            self._kinds[node.target] = _kind_of(node)
        return self._kinds[node.target]

    def reads(self, node: torch.fx.Node) -> bool:
        """Whether the node reads the elements of what it takes, and is more than a view of it."""
        kind = self.kind(node)
        view = kind.aliases and not kind.copies and not kind.writes
        return not view and node.op not in ("placeholder", "output")

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
        kind = self.kind(node)
        stamp = stamp_of(node)
        if stamp is not None and stamp.role == "mark":
            return _Memory()  # a long chain that nothing lies behind
        if not kind.aliases:
            return _Memory(storages=self._own(node))
        behind = self.of_inputs(node)
        copies = self._own(node) if kind.copies else _NOTHING
        return _Memory(behind.parameters, behind.storages | copies)

    def written(self, node: torch.fx.Node) -> frozenset[str]:
        """The storages that ``node`` writes: its own result, or an argument in place."""
        if node.op != "call_function":
            return _NOTHING
        kind = self.kind(node)
        targets = [node.kwargs.get("out"), node.args[0] if kind.writes else None]
        storages = [self.of(t).storages for t in targets if isinstance(t, torch.fx.Node)]
        fresh = kind.copies or not kind.aliases
        return (self._own(node) if fresh else _NOTHING).union(*storages)

    def _own(self, node: torch.fx.Node) -> frozenset[str]:
        return frozenset({f"{self._name}: {node.name}"})


def _name_of(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _is_functional(node: torch.fx.Node) -> bool:
    return _name_of(node).startswith(("_c10d_functional.", "fxcomm.exchange."))


def _is_wait(node: torch.fx.Node) -> bool:
    # By name, since only torch.distributed registers the operator.
    return _name_of(node) == "_c10d_functional.wait_tensor.default"


_NEW = _Kind(False, False, False)


def _kind_of(node: torch.fx.Node) -> _Kind:
    copies = compat.may_copy(node) or node.target is torch.ops.aten._unsafe_view.default
    writes = bool(compat.written_operands(node))
    getitem = getattr(node.target, "__name__", "") == "getitem"
    aliases = copies or writes or getitem or _is_wait(node) or compat.is_view(node)
    return _Kind(aliases, copies, writes)


def _parameters_at(
    graph: torch.fx.Graph, inputs: Mapping[int, str] | Mapping[int, frozenset[str]]
) -> tuple[dict[torch.fx.Node, frozenset[str]], list[torch.fx.Node]]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = {i: frozenset({n}) if isinstance(n, str) else n for i, n in inputs.items()}
    return {placeholders[index]: found for index, found in names.items()}, placeholders


def parameter_outputs(
    graph: torch.fx.Graph, parameter_inputs: Mapping[int, str]
) -> dict[str, frozenset[str]]:
    """The outputs (by node name) of a forward graph that are parameters, or views of some, with
    these. ``parameter_inputs`` names those of its inputs that are parameters, by position."""
    parameters, _ = _parameters_at(graph, parameter_inputs)
    aliases = _Aliases("forward", parameters)
    behind = {
        value.name: aliases.of(value).parameters
        for value in output_values(graph)
        if value is not None
    }
    return {name: parameters for name, parameters in behind.items() if parameters}


def saved_parameters(
    backward: torch.fx.Graph, outputs: Mapping[str, frozenset[str]]
) -> dict[int, frozenset[str]]:
    """Which inputs of a backward graph (by position) are parameters, or views of some, that its
    forward saved: ``outputs`` are that one's (:func:`parameter_outputs`).

    The partitioner gives a saved value the same name in both graphs.
    """
    _, placeholders = _parameters_at(backward, {})
    return {
        index: outputs[node.name] for index, node in enumerate(placeholders) if node.name in outputs
    }


def gradient_nodes(
    graph: torch.fx.Graph, gradients: Mapping[int, str]
) -> dict[str, frozenset[str]]:
    """The nodes (by name) that complete gradients, each with its parameters, of a backward graph
    before the passes. ``gradients`` maps output positions to parameters.

    A gradient that is a view is complete with what it is a view of, and passes may drop the view.
    """
    values = output_values(graph)
    found: dict[str, frozenset[str]] = {}
    for position, parameter in gradients.items():
        value = values[position]
        if value is not None:
            name = _behind_views(value).name
            found[name] = found.get(name, _NOTHING) | {parameter}
    return found


def _behind_views(node: torch.fx.Node) -> torch.fx.Node:
    while compat.is_view(node) or node.target is torch.ops.aten._unsafe_view.default:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        node = source
    return node


def forward_actions(
    graph: torch.fx.Graph, parameter_inputs: Mapping[int, str], *, name: str = "forward"
) -> tuple[ForwardAction, ...]:
    """What a forward graph does with parameters, whatever the plan.

    ``parameter_inputs`` names those of the graph's inputs that are parameters, by position. A view
    reads nothing, but what consumes it does; outputs, such as what is saved for backward, read
    nothing either.
    """
    parameters, _ = _parameters_at(graph, parameter_inputs)
    aliases = _Aliases(name, parameters)
    actions: list[ForwardAction] = []
    for node in graph.nodes:
        where = f"{name}: {node.name}"
        if _is_wait(node):
            waited = sorted(aliases.of_inputs(node).parameters)
            actions += [ParameterWait(parameter, where) for parameter in waited]
        elif aliases.reads(node) and (reads := aliases.of_inputs(node).parameters):
            actions.append(Compute(where, reads=reads))
    return tuple(actions)


def backward_actions(
    graph: torch.fx.Graph,
    gradients: Mapping[str, frozenset[str]],
    parameter_inputs: Mapping[int, frozenset[str]] | None = None,
    *,
    group: str = "",
    name: str = "backward",
) -> GraphActions:
    """What a lowered backward graph does.

    ``gradients`` are the nodes that complete gradients (:func:`gradient_nodes` of the graph before
    the passes), ``parameter_inputs`` the inputs by position that are parameters or views of them
    (:func:`saved_parameters`). ``group`` is the process group of launches that name none. ``name``
    begins the names of places and buffers.
    """
    reader = _BackwardReader(graph, gradients, parameter_inputs or {}, group, name)
    return GraphActions(tuple(reader.actions()), reader.packed, reader.finished)


class _BackwardReader:
    """Reads one lowered backward graph."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        gradients: Mapping[str, frozenset[str]],
        parameter_inputs: Mapping[int, frozenset[str]],
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

    def actions(self) -> Iterator[BackwardAction]:
        """The graph's actions in execution order."""
        freed = self._freed()
        for node in self._graph.nodes:
            stamp = stamp_of(node)
            if stamp is not None and stamp.role == "update":
                yield UpdatePlace(stamp.bucket, self._where(node))
            elif node in self._launches:
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
        return Launch(
            CollectiveId(REDUCE, self._launches[node].bucket),
            group_of(node.args) or self._group,
            self._aliases.of_inputs(node).storages,
            self._aliases.of(node).storages,
            held_bytes(node.all_input_nodes[0].meta["val"], node.meta["val"]),
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
        if stamp is not None and stamp.role == "update":
            return CollectiveId(REDUCE, stamp.bucket)
        begins = stamp is not None and stamp.role == "finish" and not self._continues(node)
        for source in node.all_input_nodes:
            if source in self._launches:
                # Those that torch waits for need its wait; others wait as they begin to finish.
                waits = _is_wait(node) or (begins and not _is_functional(source))
                bucket = self._launches[source].bucket
                return CollectiveId(REDUCE, bucket) if waits else None
        return CollectiveId(REDUCE, stamp.bucket) if stamp is not None and begins else None

    def _continues(self, node: torch.fx.Node) -> bool:
        stamps = (stamp_of(source) for source in node.all_input_nodes)
        return any(stamp is not None and stamp.role == "finish" for stamp in stamps)

    def _compute(self, node: torch.fx.Node) -> Iterator[Compute]:
        behind = self._aliases.of_inputs(node) if self._aliases.reads(node) else _Memory()
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


# --- putting a step together ---


def step_program(rank: int, micro_steps: Sequence[MicroStep], arena: ArenaPlan) -> Program:
    """The program of a rank that runs ``micro_steps`` and then the optimizer, as far as ``arena``
    has a part in them.

    A backward that reduces launches, when it ends, the buckets that its graphs did not launch, in
    order. Buckets that a graph updates are updated and gathered there, the others when the
    optimizer steps, in the plan's ``gather_order``, each when its reduction and those of the
    buckets before it were waited for. The step ends with a wait for the gathers
    that are not deferred; deferred ones that no forward waits for are waited for before the next
    update. The runtime keeps under the plan's ``in_flight_bytes``: before a launch, and before a
    graph that launches, it waits for the oldest collectives if need be.

    A gradient for a bucket that another graph of the same backward packs is left out. Such buckets
    go another round when that happens, on which ranks agree then and there.
    """
    runtime = _Runtime(arena)
    runtime.step()
    runtime.begin()
    for number, micro_step in enumerate(micro_steps):
        runtime.run(number, micro_step)
    runtime.step()
    return Program(rank, tuple(runtime.actions), runtime.buckets)


def peak_bytes(actions: Iterable[BackwardAction], arena: int) -> int:
    """The most bytes that collectives of an arena, started by these actions, have in flight, if no
    update ends one earlier."""
    held: dict[CollectiveId, int] = {}
    total = peak = 0
    for action in actions:
        if isinstance(action, Compute | UpdatePlace) or action.collective.bucket.arena != arena:
            continue
        total -= held.pop(action.collective, 0)
        if isinstance(action, Launch):
            held[action.collective] = action.nbytes
            total += action.nbytes
            peak = max(peak, total)
    return peak


class _Runtime:
    """Collects the actions of one step.

    ``_holding`` are the collectives in flight that hold memory, with its bytes, the oldest first;
    ``_unfolded`` the buckets, in order, whose reduction nobody has used; ``_users`` counts the
    collectives in flight that read a buffer.
    """

    def __init__(self, arena: ArenaPlan) -> None:
        self.arena = arena
        self.actions: list[Action] = []
        self.buckets = program_buckets(arena.plan.layout, arena=arena.number, sharded=arena.sharded)
        self._places = buckets_of_parameters(self.buckets)
        self._holding: dict[CollectiveId, int] = {}
        self._nbytes = 0
        self._launched: dict[CollectiveId, Launch] = {}
        self._waited: set[CollectiveId] = set()
        self._users: Counter[str] = Counter()
        self._unfolded: dict[int, None] = {}
        self._updated: set[int] = set()
        self._uncarried: list[int] = []

    def _id(self, kind: str, bucket: int) -> CollectiveId:
        return CollectiveId(kind, BucketKey(self.arena.number, bucket))

    def begin(self) -> None:
        """Begins the step: what the step before it did is forgotten, what it left in flight not."""
        self.actions.clear()

    def add(self, action: Action) -> None:
        """Appends an action and keeps account of what is in flight."""
        self.actions.append(action)
        if isinstance(action, Compute):
            return
        collective = action.collective
        if collective in self._launched and collective not in self._waited:
            self._users.subtract(self._launched[collective].reads)
        self._nbytes -= self._holding.pop(collective, 0)
        self._waited.add(collective)
        if isinstance(action, Launch):
            self._waited.discard(collective)
            self._launched[collective] = action
            self._users.update(action.reads)
            if action.nbytes:
                self._holding[collective] = action.nbytes
                self._nbytes += action.nbytes

    def make_room(self, nbytes: int, where: str) -> None:
        """Waits for the oldest collectives while ``nbytes`` more would exceed the limit."""
        limit = self.arena.plan.in_flight_bytes
        while limit is not None and nbytes and self._holding and self._nbytes + nbytes > limit:
            self.add(Wait(next(iter(self._holding)), f"{where} (room for it)"))

    # --- forward and backward ---

    def run(self, number: int, micro_step: MicroStep) -> None:
        """Forward, backward, and the reductions that the backward's graphs left to the runtime."""
        for action in micro_step.forward:
            self._forward(action)
        self._fold(len(self.buckets), f"start of backward {number}")
        self._uncarried.append(number)
        for bucket in range(micro_step.before):
            self._launch(bucket, f"another graph of backward {number}", frozenset({number}))
        packed = {key for key in self.buckets if key.bucket < micro_step.before}
        packed.update(*(graph.packed for graph in micro_step.backward))
        for place, graph in enumerate(micro_step.backward):
            self._run_graph(number, place, graph, packed)
        if not micro_step.reduces:
            return
        for key in self.buckets:
            if key not in packed:
                carried = frozenset(self._uncarried)
                self._launch(key.bucket, f"end of backward {number}", carried)
        self._uncarried.clear()
        if not self.arena.sharded:
            self._fold(len(self.buckets), f"end of backward {number}")

    def _forward(self, action: ForwardAction) -> None:
        if isinstance(action, Compute):
            self.add(action)
            return
        for key in self._places.get(action.parameter, ()):
            if self.arena.deferred[key.bucket]:
                self.add(Wait(CollectiveId(GATHER, key), action.where, action.parameter))

    def _run_graph(
        self, number: int, place: int, graph: GraphActions, packed: Collection[BucketKey]
    ) -> None:
        """``packed`` are the buckets that any graph of the backward fills."""
        prefix = f"backward {number}, run {place}, "
        own = sorted(key.bucket for key in graph.packed if key in self.buckets)
        self._unfolded.update(dict.fromkeys(own))
        self.make_room(peak_bytes(graph.actions, self.arena.number), f"{prefix}start")
        for action in graph.actions:
            if isinstance(action, Compute):
                elsewhere = (
                    p for p in action.contributes if self._is_elsewhere(p, graph.packed, packed)
                )
                self.add(_compute_in_run(action, prefix, number, frozenset(elsewhere)))
            elif isinstance(action, UpdatePlace):
                if action.bucket in self.buckets:
                    self._update(action.bucket.bucket, prefix + action.where)
            elif action.collective.bucket in self.buckets:
                carried = self._uncarried if graph.adds_local else [number]
                self.add(_in_run(action, prefix, frozenset(carried)))
        # The runtime takes the graph's word for these.
        self._waited |= {CollectiveId(REDUCE, key) for key in graph.finished}

    def _is_elsewhere(
        self, parameter: str, own: Collection[BucketKey], packed: Collection[BucketKey]
    ) -> bool:
        """Whether the parameter's buckets are packed, but not by the graph that packs ``own``."""
        places = self._places.get(parameter, ())
        return any(key in packed for key in places) and not any(key in own for key in places)

    def _launch(self, bucket: int, where: str, carried: frozenset[int]) -> None:
        where = f"{where}: bucket {bucket}"
        packed, reduced = frozenset({f"{where} packed"}), frozenset({f"{where} reduced"})
        nbytes = self.arena.reduce_bytes[bucket]
        self.make_room(nbytes, where)
        self.add(Compute(f"{where} packed", writes_buffers=packed))
        collective = self._id(REDUCE, bucket)
        self.add(Launch(collective, self.arena.group, packed, reduced, nbytes, where, carried))
        self._unfolded[bucket] = None

    def _fold(self, through: int, where: str) -> None:
        """Waits for the reductions of buckets up to ``through`` for which no graph waited, and adds
        their results to the gradients that are kept. That frees the operands that no other needs:
        the pieces of a large gradient share a storage."""
        while self._unfolded and next(iter(self._unfolded)) <= through:
            bucket = next(iter(self._unfolded))
            del self._unfolded[bucket]
            collective, place = self._id(REDUCE, bucket), f"{where}: result of bucket {bucket}"
            if collective not in self._waited:
                self.add(Wait(collective, place))
            launch = self._launched.get(collective)
            if launch is not None:
                freed = frozenset(buffer for buffer in launch.reads if not self._users[buffer])
                self.add(Compute(place, reads_buffers=launch.writes, writes_buffers=freed))

    # --- update ---

    def drain(self) -> None:
        """Waits for the last step's gathers of parameters that no forward used."""
        for bucket in self.arena.plan.gather_order:
            collective = self._id(GATHER, bucket)
            if collective in self._launched and collective not in self._waited:
                self.add(Wait(collective, f"step: bucket {bucket} still in flight"))

    def step(self) -> None:
        """Updates buckets and gathers them."""
        order = self.arena.plan.gather_order
        for bucket in order:
            if bucket not in self._updated:
                self._update(bucket, "step")
        self._updated.clear()
        for bucket in order if self.arena.sharded else ():
            collective = self._id(GATHER, bucket)
            if not self.arena.deferred[bucket] and collective not in self._waited:
                self.add(Wait(collective, f"step: end of gather of bucket {bucket}"))

    def _update(self, bucket: int, place: str) -> None:
        if not self._updated:
            self.drain()
        self._updated.add(bucket)
        self._fold(bucket, f"{place}: before bucket {bucket}")
        self.add(
            Compute(
                f"{place}: update of bucket {bucket}",
                updates=frozenset({BucketKey(self.arena.number, bucket)}),
                writes_buffers=frozenset({self._memory(bucket)}),
            )
        )
        if self.arena.sharded:
            self._gather(bucket, place)

    def _memory(self, bucket: int) -> str:
        return f"parameters of bucket {self.arena.number}.{bucket}"

    def _gather(self, bucket: int, place: str) -> None:
        memory = frozenset({self._memory(bucket)})
        nbytes = self.arena.gather_bytes[bucket]
        where = f"{place}: gather of bucket {bucket}"
        group = self.arena.group if self.arena.gather_group is None else self.arena.gather_group
        self.make_room(nbytes, where)
        self.add(Launch(self._id(GATHER, bucket), group, memory, memory, nbytes, where))


def _compute_in_run(
    action: Compute, prefix: str, number: int, elsewhere: frozenset[str]
) -> Compute:
    """The action in one run of its graph, in backward ``number``; a step may run a graph often."""
    return replace(
        action,
        where=prefix + action.where,
        reads_buffers=_prefixed(prefix, action.reads_buffers),
        writes_buffers=_prefixed(prefix, action.writes_buffers),
        contributes=action.contributes - elsewhere,
        micro_step=number,
    )


def _in_run(action: Launch | Wait, prefix: str, carried: frozenset[int]) -> Launch | Wait:
    where = prefix + action.where
    if isinstance(action, Wait):
        return replace(action, where=where)
    return replace(
        action,
        where=where,
        reads=_prefixed(prefix, action.reads),
        writes=_prefixed(prefix, action.writes),
        micro_steps=carried,
    )


def _prefixed(prefix: str, names: frozenset[str]) -> frozenset[str]:
    return frozenset(prefix + name for name in names)
