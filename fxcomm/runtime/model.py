"""The managed model: a root module's parameters, their synchronisation, and one training step.

The rules it keeps (DESIGN): in each backward that touches an arena every rank launches the arena's
buckets once, in order, whatever its own graphs produced; a bucket starts only when every
contribution that is expected is in; what comes later than expected is reduced in another round
that all ranks agree on.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fxcomm import compat
from fxcomm.analysis.costs import LinkCosts
from fxcomm.analysis.measured import EventKind
from fxcomm.analysis.schedules import named_plan
from fxcomm.communicator import Communicator, apply_calls, call_eagerly
from fxcomm.dump import Dump, Observe
from fxcomm.errors import FxcommError, OptionsError, UnsupportedModelError
from fxcomm.options import Options
from fxcomm.plan import (
    BASELINE_IN_FLIGHT_BYTES,
    MEGABYTE,
    GraphExecution,
    ObservedBackward,
    OverlapPlan,
    baseline_plan,
    default_bucket_bytes,
    launch_runs,
)
from fxcomm.runtime.agreement import Agreement
from fxcomm.runtime.arena import (
    Arena,
    ReplicatedArena,
    ShardedArena,
    WireDtypes,
    accumulation_dtype,
)
from fxcomm.runtime.backward_graph import BackwardGraph, CapturedBackward, observed_runs
from fxcomm.runtime.backward_pass import BackwardPass, PresenceExchange
from fxcomm.runtime.buffers import MutableBuffers
from fxcomm.runtime.gradient import ShardedGradient
from fxcomm.runtime.in_flight import InFlightParameters, seen_parameters
from fxcomm.runtime.norms import gradient_norms
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.replay import replayed_plan
from fxcomm.runtime.statistics import GraphMarks, StepMeter
from fxcomm.runtime.tuned_model import Tuning
from fxcomm.runtime.verification import ForwardGraph, GraphRun, require_valid_step
from fxcomm.tuned import Tuned

# Baselines by what they are made of: buckets of 25 MB, or what needs no measured times.
_FIXED = ("bucket-25mb", "dear")
_UNTIMED = ("per-layer", "one-bucket", "no-fusion")

CompileUpdate = Callable[
    [Callable[..., tuple[()]], Callable[[int], list[torch.Tensor]]], Callable[[list[Any]], object]
]


MeasureLink = Callable[[Communicator, torch.device], LinkCosts]


@dataclass(frozen=True)
class Environment:
    """The ranks a model trains on. ``connect`` opens a new process group for collectives on a
    device, ``connect_control`` one for small CPU tensors; both wait for every rank. ``in_flight``
    makes reads of parameters wait, of whatever model. ``compile_update`` makes a function that
    updates flat tensors in place into one that takes them in a list, of any length; it is also
    given what makes example tensors of a length. ``measure_link`` measures what collectives cost;
    None where they cost nothing real."""

    agreement: Agreement
    rank: int
    world_size: int
    connect: Callable[[torch.device], Communicator]
    connect_control: Callable[[], dist.ProcessGroup]
    in_flight: InFlightParameters
    compile_update: CompileUpdate
    measure_link: MeasureLink | None = None


@dataclass
class _Pending:
    """A backward that has ended and whose reductions may still be in flight. ``present`` are the
    parameters (indices) with a gradient, ``accumulating`` those whose earlier gradient is kept;
    ``late`` holds this rank's contributions that came after their bucket was launched."""

    exchange: PresenceExchange
    present: set[int]
    accumulating: set[int]
    late: BackwardPass


class ManagedModel:
    """See the module's docstring. One for each root module; never shared between threads that run
    backwards at the same time."""

    def __init__(self, number: int, options: Options, environment: Environment) -> None:
        self.number = number
        self.serial = -1  # unique in this process; the registry gives it
        self.options = options
        self.environment = environment
        self.parameters: list[ManagedParameter] = []
        self.arenas: list[Arena] = []
        self._parked: list[ShardedArena] = []
        self.tuning: Tuning | None = None
        self._planned = False  # for a whole step
        self.meter = StepMeter()
        self._marks: GraphMarks | None = None
        self._backward_began = 0.0
        self.buffers = MutableBuffers()
        self.dump = Dump.of(
            options.dump, os.environ, rank=environment.rank, process=dist.get_rank()
        )
        self._refusal: FxcommError | None = None
        self._silenced = 0
        self._backwards = 0  # of this step, without those under no_sync
        self._expected_backwards = 1
        self._forwards: weakref.WeakSet[ForwardGraph] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[BackwardGraph] = weakref.WeakSet()
        self._graph_count = 0
        self._forward_count = 0
        self._dense: Communicator | None = None
        self._control: dist.ProcessGroup | None = None
        self._pass: BackwardPass | None = None
        self._callback: weakref.ref[Callable[[], None]] | None = None
        self._pending: _Pending | None = None
        self._unsynced = False
        self.observed = ObservedBackward()
        self.root: weakref.ref[nn.Module] | None = None
        self._uses: dict[int, None] = {}
        self._norms: dict[float, dict[int, torch.Tensor]] = {}
        self._topics = 0
        self._changed_buffers: set[int] = set()
        self._delivered: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._written = False
        self._factors: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def sharded(self) -> bool:
        """Whether gradients and optimizer state are sharded (stages zero1 and zero2)."""
        return self.options.stage != "ddp"

    @property
    def synchronising(self) -> bool:
        """Whether the running or next backward reduces its gradients: not under ``no_sync``, and
        where reductions are sunk, not before the last backward of a step, judged by the last step.
        What stays local by mistake is reduced when the step asks for it."""
        waits = self._backwards + 1 < self._expected_backwards
        return self._silenced == 0 and not (waits and self._sinks_reductions)

    @property
    def _sinks_reductions(self) -> bool:
        return bool(self.arenas) and all(arena.plan.sink_reductions for arena in self.arenas)

    @property
    def rank(self) -> int:
        """This process's rank in the model's group."""
        return self.environment.rank

    @property
    def dense(self) -> Communicator:
        """Collectives outside the plan, in program order: plain reductions, norms, buffers."""
        if self._dense is None:
            self._dense = self.environment.connect(self.parameters[0].parameter.device)
        return self._dense

    @property
    def marks(self) -> GraphMarks:
        """What backward graphs mark their times on."""
        if self._marks is None:
            self._marks = GraphMarks(self.meter, self.parameters[0].parameter.device)
        return self._marks

    def connect(self) -> None:
        """Opens the groups that every model needs. Collective.

        Raises:
            OptionsError: on every rank, if rank 0 cannot write dumps.
        """
        topic, problem = self.topic("the dump directory"), self.dump.problem()
        problem = self.environment.agreement.from_rank_zero(topic, problem)
        if problem:
            raise OptionsError(problem)
        _ = self.control, self.dense

    @property
    def control(self) -> dist.ProcessGroup:
        """A group for small CPU tensors: what ranks tell each other."""
        if self._control is None:
            self._control = self.environment.connect_control()
        return self._control

    def topic(self, name: str) -> str:
        """A new key under which ranks agree on something."""
        self._topics += 1
        return f"model{self.number}/{self._topics}/{name}"

    def add_parameters(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[ManagedParameter]:
        """Takes charge of parameters, the same on every rank and in the same order."""
        added = []
        for name, parameter in named:
            managed = ManagedParameter(len(self.parameters), name, parameter)
            self.parameters.append(managed)
            added.append(managed)
            self._watch(managed)
        return added

    def _watch(self, managed: ManagedParameter) -> None:
        """Learns of gradients that autograd accumulates from outside every captured graph."""
        if not managed.parameter.is_leaf:
            return
        model = weakref.ref(self)
        known = weakref.ref(managed)

        def accumulated(parameter: torch.Tensor) -> None:
            # The hook also runs when a captured graph returned None for the gradient.
            owner, mine = model(), known()
            if owner is not None and mine is not None and parameter.grad is not None:
                owner.enter_backward(accumulated=mine)

        managed.parameter.register_post_accumulate_grad_hook(accumulated)

    def add_graph(self, captured: CapturedBackward) -> BackwardGraph:
        """Takes charge of a captured backward graph."""
        number = self._graph_count
        self._graph_count += 1
        self.dump.graph(f"model{self.serial}-backward{number}", captured.gm)
        gradients = {position: p.name for position, p in captured.gradients}
        self.dump.backward(captured.forward, captured.gm, gradients)
        graph = BackwardGraph(number, self, captured)
        self._graphs.add(graph)
        return graph

    def observe_passes(self, gm: torch.fx.GraphModule) -> Observe | None:
        """Dumps a forward graph as captured; the result is to be told of the passes on it."""
        name = f"model{self.serial}-forward{self._forward_count}"
        self._forward_count += 1
        self.dump.graph(name, gm)
        return self.dump.passes(name, gm)

    def observing_uses(
        self, forward: ForwardGraph, run: Callable[[list[Any]], Sequence[Any]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """Takes charge of a forward graph: until the first plan, its runs tell in which order a
        step uses all parameters.

        Raises:
            FxcommError: by the model's plans, the graph would break a rule of DESIGN.
        """
        known = weakref.ref(self)
        self._forwards.add(forward)
        plans = [arena.described() for arena in self.arenas]
        require_valid_step(self.rank, [GraphRun(forward)], plans)

        def observed(args: list[Any]) -> Sequence[Any]:
            model = known()
            if model is not None and not model.arenas:
                model._uses.update(dict.fromkeys(forward.uses))
            with compat.below_autograd():
                return run(args)

        return observed

    # --- a backward ---

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs a backward in this thread."""
        return compat.backward_id() != -1

    @property
    def launches_in_graphs(self) -> bool:
        """Whether backward graphs may launch reductions: not while gradients stay local."""
        return self.synchronising

    def enter_backward(self, accumulated: ManagedParameter | None = None) -> BackwardPass:
        """The running backward, begun if this is the first that is heard of it.

        ``accumulated`` is a parameter into whose ``.grad`` autograd has just added.
        """
        if self._pass is not None:
            if self._callback is not None and self._callback() is not None:
                return self._pass  # also a backward within this one (reentrant checkpointing)
            self._abandon()
        self._require_usable()
        self.finish()
        backward = BackwardPass(compat.backward_id())
        if backward.backward_id == -1:
            raise FxcommError(
                "a backward graph ran outside loss.backward(); compiled autograd is not supported"
            )
        self._begin(backward, accumulated)

        def end() -> None:
            self._end_backward()

        # Autograd drops the callback when the backward fails, which is how that is found out.
        self._callback = weakref.ref(end)
        compat.at_end_of_backward(end)
        return backward

    def _begin(self, backward: BackwardPass, accumulated: ManagedParameter | None = None) -> None:
        self._refuse_hooks()
        self._norms.clear()
        self._pass = backward
        self._backward_began = time.perf_counter()
        for p in self.parameters:
            gradient = p.parameter.grad
            if (
                gradient is not None
                and not isinstance(p.arena, ShardedArena)
                and p is not accumulated
            ):
                backward.kept[p.index] = gradient
                p.parameter.grad = None

    def _refuse_hooks(self) -> None:
        for p in self.parameters:
            # One post-accumulate hook is fxcomm's own.
            if (
                compat.has_gradient_hooks(p.parameter)
                or compat.post_accumulate_hooks(p.parameter) > 1
            ):
                raise UnsupportedModelError(
                    f"parameter {p.name!r} has a gradient hook (register_hook or "
                    "register_post_accumulate_grad_hook). fxcomm reduces gradients before autograd "
                    "would run it, so it cannot be honoured: remove the hook, or use torch's "
                    "DistributedDataParallel for this model."
                )

    def contribute_from_outside(self, managed: ManagedParameter, gradient: torch.Tensor) -> None:
        """Adds a gradient that autograd computed outside every captured graph to a parameter whose
        ``.grad`` is sharded."""
        backward = self.enter_backward()
        # Autograd may reuse the memory of what it accumulates.
        backward.add(managed, gradient.clone())
        backward.eager.add(managed.index)

    def _collect_from_outside(self, backward: BackwardPass) -> None:
        """Moves gradients that autograd accumulated in ``p.grad`` during the pass into it."""
        for p in self.parameters:
            gradient = p.parameter.grad
            if gradient is not None and not isinstance(gradient, ShardedGradient):
                backward.add(p, gradient)
                backward.eager.add(p.index)
                p.parameter.grad = None

    def _end_backward(self) -> None:
        backward, self._pass, self._callback = self._pass, None, None
        if backward is None:
            return
        self._written = False
        self._delivered.clear()
        self._collect_from_outside(backward)
        if backward.executions:
            self.observed = backward.observed()
        synchronising = self.synchronising
        self._backwards += self._silenced == 0
        if synchronising:
            self._synchronise(backward)
        else:
            self._keep_local(backward)
        self.meter.note(EventKind.BACKWARD, None, self._backward_began, time.perf_counter())

    def _abandon(self) -> None:
        """Ends a backward that failed: completes the collectives that it began, as every other rank
        on which it failed does, and drops its gradients."""
        backward, self._pass, self._callback = self._pass, None, None
        assert backward is not None
        for p in self.parameters:
            if p.index in backward.kept:
                p.parameter.grad = backward.kept[p.index]
        begun = [arena for arena in self.arenas if arena.next_bucket]
        for arena in begun:
            arena.launch_remaining(lambda _: None)
        for arena in begun:
            arena.finish_reductions()

    def _keep_local(self, backward: BackwardPass) -> None:
        """Ends a backward under ``no_sync``: its gradients stay on this rank, whole."""
        for index, gradient in backward.local.items():
            p = self.parameters[index]
            if isinstance(p.arena, ShardedArena):
                sharded = self._sharded_gradient(p)
                known = sharded.unsynced
                sharded.unsynced = gradient.clone() if known is None else known + gradient
            else:
                kept = backward.kept.pop(index, None)
                p.parameter.grad = gradient.clone() if kept is None else kept + gradient
        self._restore(backward)
        self._unsynced = self._unsynced or bool(backward.local)

    def _restore(self, backward: BackwardPass) -> None:
        for index, gradient in backward.kept.items():
            if self.parameters[index].parameter.grad is None:
                self.parameters[index].parameter.grad = gradient

    def _sharded_gradient(self, p: ManagedParameter) -> ShardedGradient:
        gradient = p.parameter.grad
        if not isinstance(gradient, ShardedGradient):
            gradient = p.parameter.grad = ShardedGradient(self, p)
        return gradient

    # --- synchronisation ---

    def _synchronise(self, backward: BackwardPass) -> None:
        """Launches what the backward's graphs did not, agrees on what is present, and leaves the
        reductions in flight (sharded) or finishes them (replicated and unplanned parameters)."""
        self._add_unsynced(backward)
        for arena in self.arenas:
            if arena.next_bucket or any(p.index in backward.produced for p in arena.parameters):
                arena.launch_remaining(backward.take)
        exchange = PresenceExchange(
            self.control,
            present=[p.index in backward.produced for p in self.parameters],
            changed=self.buffers.changed(),
            late=[self._is_late(arena, b, backward) for arena, b in self._buckets()],
        )
        unplanned = [p for p in self.parameters if p.arena is None]
        complete = len(backward.produced) == len(self.parameters) and not unplanned
        present = backward.produced if complete else exchange.present()
        for arena in self.arenas:
            if not arena.next_bucket and any(p.index in present for p in arena.parameters):
                arena.launch_remaining(backward.take)
        for p in unplanned:
            if p.index in present:
                self._reduce_plainly(p, backward)
        accumulating = self._announce(present, backward)
        self._pending = _Pending(exchange, present, accumulating, backward)
        if any(isinstance(arena, ReplicatedArena) for arena in self.arenas):
            self.finish()
        self._restore(backward)

    def _buckets(self) -> Iterator[tuple[Arena, int]]:
        for arena in self.arenas:
            for bucket in range(arena.bucket_count):
                yield arena, bucket

    @staticmethod
    def _is_late(arena: Arena, bucket: int, backward: BackwardPass) -> bool:
        return arena.next_bucket > bucket and any(
            p.index in backward.local for p in arena.members(bucket)
        )

    def _add_unsynced(self, backward: BackwardPass) -> None:
        """Adds the gradients that earlier backwards under ``no_sync`` left on this rank."""
        if not self._unsynced:
            return
        self._unsynced = False
        for p in self.parameters:
            gradient = p.parameter.grad
            if isinstance(gradient, ShardedGradient):
                if gradient.unsynced is not None:
                    backward.add(p, gradient.unsynced)
                    gradient.unsynced = None
            elif p.index in backward.kept:
                # The mean of a sum whose earlier part is equal on all ranks keeps that part.
                backward.add(p, backward.kept.pop(p.index))

    @property
    def has_local_gradients(self) -> bool:
        """Whether earlier backwards left gradients on this rank that are yet to be reduced."""
        return self._unsynced

    def take_local(self, p: ManagedParameter) -> torch.Tensor:
        """Removes and returns what earlier backwards left of a sharded parameter's gradient on this
        rank, flat in the parameter's memory order; zeros if nothing."""
        gradient = p.parameter.grad
        if not isinstance(gradient, ShardedGradient) or gradient.unsynced is None:
            return torch.zeros_like(p.parameter).view(-1)
        local, gradient.unsynced = gradient.unsynced, None
        return p.flatten(local)

    def _reduce_plainly(self, p: ManagedParameter, backward: BackwardPass) -> None:
        """All-reduces one whole gradient; for parameters that no plan covers yet."""
        flat = backward.take(p)
        if flat is None:
            flat = torch.zeros_like(p.parameter).view(-1)
        collective = self.dense.all_reduce_mean(flat.numel(), flat.dtype)
        self.meter.sent(collective.sent_bytes)
        flat = apply_calls(collective.prepare, flat, call_eagerly)
        flat = call_eagerly(collective.launch, flat)
        mean = p.unflatten(apply_calls(collective.finish, flat, call_eagerly))
        kept = backward.kept.pop(p.index, None)
        p.parameter.grad = mean if kept is None else kept.add_(mean)
        self._delivered[p.index] = (weakref.ref(p.parameter.grad), p.parameter.grad._version)

    @property
    def edited(self) -> bool:
        """Whether someone wrote to a gradient since the last backward reduced it."""
        delivered = [(gradient(), version) for gradient, version in self._delivered.values()]
        return self._written or any(g is not None and g._version != v for g, v in delivered)

    def _announce(self, present: set[int], backward: BackwardPass) -> set[int]:
        """Gives every present sharded parameter its ``p.grad``; returns the parameters whose
        earlier gradient goes on."""
        for p in self.parameters:
            if isinstance(p.arena, ShardedArena):
                self._announce_one(p, p.index in present, backward)
        return backward.accumulating

    def _announce_one(self, p: ManagedParameter, present: bool, backward: BackwardPass) -> None:
        if p.index in backward.announced:
            return
        backward.announced.add(p.index)
        gradient = p.parameter.grad
        if isinstance(gradient, ShardedGradient) and gradient.reduced:
            self.apply_factors(p)
            backward.accumulating.add(p.index)
        elif present:
            self._sharded_gradient(p).reduced = True

    def update_in_backward(
        self,
        number: int,
        bucket: int,
        packed: torch.Tensor | None,
        launched: torch.Tensor | None,
        mean: torch.Tensor | None,
    ) -> None:
        """Updates a bucket that a backward graph has reduced, and starts its gather. Nothing reads
        its parameters any more in this backward.

        Where that cannot be, it stays for the optimizer's step, with the buckets behind it.

        Raises:
            FxcommError: the step has updated the bucket already, in an earlier backward.
        """
        arena, backward = self.arenas[number], self._pass
        assert backward is not None
        assert isinstance(arena, ShardedArena)
        if bucket in arena.applied:
            raise FxcommError(
                f"bucket {bucket} (parameter {arena.members(bucket)[0].name!r}, ...) was updated "
                'in an earlier backward of this step. With options={"update": "in_backward"} '
                "call optimizer.step() after each backward; to accumulate gradients, run all but "
                "the last under fxcomm.no_sync(model)."
            )
        arena.launched_in_graph(bucket, packed, launched, mean)
        updaters = list(arena.updaters)
        if number in backward.at_step or len(updaters) != 1:
            backward.at_step.add(number)
            return
        for p in arena.members(bucket):
            self._announce_one(p, True, backward)
        arena.accumulate(arena.finish_reductions(through=bucket), backward.accumulating)
        if not updaters[0].update_in_backward(arena, bucket):
            backward.at_step.add(number)
            return
        arena.applied.add(bucket)
        for p in arena.members(bucket):
            self._sharded_gradient(p).applied = True
            # A node of autograd that saved the parameter and runs later must refuse to.
            torch.autograd.graph.increment_version(p.parameter)

    def finish(self) -> None:
        """Waits for the reductions in flight and folds them into the kept gradients."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._norms.clear()
        self._fold(pending, pending.accumulating)
        self._changed_buffers |= pending.exchange.changed()
        late = self._late(pending)
        if not late:
            return
        self._refuse_late_for_applied(late)
        for arena in self.arenas:
            again = [b for i, (a, b) in enumerate(self._buckets()) if a is arena and i in late]
            arena.launch(again, pending.late.take)
        self._fold(pending, {p.index for p in self.parameters})

    def _refuse_late_for_applied(self, late: Collection[int]) -> None:
        for i, (arena, bucket) in enumerate(self._buckets()):
            if i in late and bucket < len(arena.plan.update_after):
                raise FxcommError(
                    f"a contribution to the gradient of bucket {bucket} (parameter "
                    f"{arena.members(bucket)[0].name!r}, ...) came after the backward had updated "
                    'it. Use options={"update": "at_step"} for this model.'
                )

    def _fold(self, pending: _Pending, accumulating: set[int]) -> None:
        for arena in self.arenas:
            reductions = arena.finish_reductions()
            if isinstance(arena, ShardedArena):
                arena.accumulate(reductions, accumulating)
            elif isinstance(arena, ReplicatedArena):
                for index, mean in arena.gradients(reductions).items():
                    if index in pending.present:
                        self._deliver(index, mean, pending.late.kept)

    def _deliver(self, index: int, mean: torch.Tensor, kept: dict[int, torch.Tensor]) -> None:
        p = self.parameters[index].parameter
        earlier = p.grad if p.grad is not None else kept.pop(index, None)
        p.grad = mean if earlier is None else earlier.add_(mean)

    def settle(self) -> None:
        """Brings every gradient that users can see to its final value: reduces what ``no_sync``
        left local, and waits for what is in flight. Collective if there was a ``no_sync``."""
        self._require_usable()
        if self._pass is not None and not self.in_backward:
            self._abandon()
        if self._unsynced:
            self.finish()
            backward = BackwardPass(-1)
            self._begin(backward)
            self._pass = None
            self._synchronise(backward)
        self.finish()

    def settle_presence(self) -> bool:
        """Like :meth:`settle`, but leaves reductions in flight where nothing came late, for
        :meth:`settle_bucket` to finish one by one. Returns whether that is so."""
        self._require_usable()
        if self._unsynced or (self._pass is not None and not self.in_backward):
            self.settle()
        if self._pending is not None and self._late(self._pending):
            self.finish()
        gradients = [p.parameter.grad for p in self.parameters]
        return all(g.reduced for g in gradients if isinstance(g, ShardedGradient))

    def _late(self, pending: _Pending) -> set[int]:
        start = time.perf_counter()
        late = pending.exchange.late()
        self.meter.note(EventKind.WAIT_RANKS, None, start, time.perf_counter())
        return late

    def settle_bucket(self, arena: ShardedArena, bucket: int) -> None:
        """Brings the gradients of a bucket, and of those before it, to their final value."""
        if self._pending is not None:
            reductions = arena.finish_reductions(through=bucket)
            arena.accumulate(reductions, self._pending.accumulating)

    def take_assigned(self) -> None:
        """Reduces whole gradients that the user assigned to ``p.grad`` of sharded parameters, as on
        every rank. Autograd's own never stay there."""
        assigned = [
            p
            for p in self.parameters
            if isinstance(p.arena, ShardedArena)
            and p.parameter.grad is not None
            and not isinstance(p.parameter.grad, ShardedGradient)
        ]
        if assigned:
            self.synchronise_whole(assigned)

    def silence(self, by: int) -> None:
        """Enters (1) or leaves (-1) a ``no_sync``; they nest."""
        self._silenced += by

    def end_step(self) -> None:
        """Closes an optimizer step: buffers that changed become rank 0's on every rank."""
        self._factors.clear()
        if self._backwards:  # not after another optimizer's step
            self._expected_backwards, self._backwards = self._backwards, 0
        if self._changed_buffers:
            self.buffers.sync(self._changed_buffers, self.dense.broadcast)
            self._changed_buffers.clear()
        self.meter.close_step()
        self._begin_tuning()

    def _begin_tuning(self) -> None:
        """Begins to tune the first plan at the end of its first step, if the user leaves it to
        fxcomm and it can be done on every rank."""
        if not self.arenas or self._planned:
            return
        self._planned = True
        wanted = self.options.plan == "mg-wfbp" or (
            self.options.plan == "auto" and self.options.bucket_mb is None
        )
        if not (wanted and self.sharded):
            return
        if self.environment.measure_link is not None and all(
            self.gather_objects(Tuning.possible(self))
        ):
            self.tuning = Tuning(self)

    @property
    def uses(self) -> tuple[int, ...]:
        """Parameters (indices) in the order of their first use, as seen before the first plan."""
        return tuple(self._uses)

    @property
    def reads(self) -> dict[str, int]:
        """How many buckets the backward that was seen last launches before it last reads a
        parameter, by name."""
        ran = {execution.graph for execution in self.observed.executions}
        graphs = [graph for graph in self._graphs if graph.number in ran]
        return {name: count for graph in graphs for name, count in graph.reads.items()}

    @property
    def tuned(self) -> Tuned | None:
        """What tuning came to; None before the first plan and while it goes on."""
        if self.tuning is not None:
            return self.tuning.outcome
        if not self._planned:
            return None
        return Tuned(self.arenas[0].plan, "not tuned: the plan is given, or cannot be", {}, {})

    def synchronise_whole(self, chosen: Sequence[ManagedParameter]) -> None:
        """Reduces the whole ``p.grad`` of parameters for which no backward did. Collective."""
        self.finish()
        backward = BackwardPass(-1)
        for p in chosen:
            if p.parameter.grad is not None:
                backward.add(p, p.parameter.grad)
                p.parameter.grad = None
        self._synchronise(backward)
        self.finish()

    # --- gradients as users see them ---

    def gradient_shards(self, p: ManagedParameter) -> list[torch.Tensor]:
        """This rank's parts of a sharded mean gradient, final and writable."""
        shards = self._unscaled_shards(p)
        self.apply_factors(p)
        return shards

    def _unscaled_shards(self, p: ManagedParameter) -> list[torch.Tensor]:
        """As :meth:`gradient_shards`, yet to be multiplied by the gradient's factors."""
        self.settle()
        arena, gradient = p.arena, p.parameter.grad
        assert isinstance(arena, ShardedArena)
        shards = arena.owned_gradients(p)
        if isinstance(gradient, ShardedGradient) and not gradient.reduced:
            gradient.reduced = True
            for shard in shards:
                shard.zero_()
        return shards

    def scale_gradient(self, p: ManagedParameter, factor: torch.Tensor) -> None:
        """Multiplies a sharded gradient by a tensor without dimensions, when it is next used."""
        self.settle_presence()
        gradient = p.parameter.grad
        if isinstance(gradient, ShardedGradient) and gradient.reduced:
            # A copy, the same for all gradients: the user may go on to change the tensor.
            key = id(factor), factor._version
            _, copied = self._factors.setdefault(key, (factor, factor.detach().clone()))
            gradient.factors += (copied,)
        else:
            for shard in self.gradient_shards(p):
                shard.mul_(factor)
        self.note_write()

    def apply_factors(self, p: ManagedParameter) -> None:
        """Multiplies this rank's parts of a gradient by the factors that wait for it."""
        gradient = p.parameter.grad
        if isinstance(gradient, ShardedGradient) and gradient.factors:
            factors, gradient.factors = gradient.factors, ()
            assert isinstance(p.arena, ShardedArena)
            for shard in p.arena.owned_gradients(p):
                for factor in factors:
                    shard.mul_(factor)

    def with_sharded_gradient(self) -> list[ManagedParameter]:
        """Parameters whose ``p.grad`` is sharded, the same on every rank once settled."""
        return [p for p in self.parameters if isinstance(p.parameter.grad, ShardedGradient)]

    def gradient_norm(self, p: ManagedParameter, order: float) -> torch.Tensor:
        """The norm of a parameter's whole mean gradient. One all-reduce serves all parameters.

        Collective on the first call after a change of the gradients.
        """
        self.settle()
        if order not in self._norms:
            chosen = self.with_sharded_gradient()
            if order == 0:  # a factor of zero changes how many elements are zero
                for known in chosen:
                    self.apply_factors(known)
            shards = [self._unscaled_shards(known) for known in chosen]
            start = time.perf_counter()
            norms = gradient_norms(shards, order, self.dense, p.parameter.device)
            self.meter.note(EventKind.WAIT_NORM, None, start, time.perf_counter())
            norms = [_scaled_norm(n, k.parameter.grad) for n, k in zip(norms, chosen, strict=True)]
            self._norms[order] = {
                known.index: norm.to(accumulation_dtype(known.parameter.dtype))
                for known, norm in zip(chosen, norms, strict=True)
            }
        return self._norms[order][p.index]

    def note_write(self) -> None:
        """The user changed gradients; norms must be computed anew."""
        self._written = True
        self._norms.clear()

    def agree_on_maximum(self, tensor: torch.Tensor) -> None:
        """Replaces a small tensor by its maximum over the ranks."""
        self.dense.all_reduce(tensor, "max")

    def full_gradient(self, p: ManagedParameter) -> torch.Tensor | None:
        """The whole mean gradient of a parameter, None if it has none. Collective."""
        self.settle()
        gradient = p.parameter.grad
        if not isinstance(gradient, ShardedGradient):
            return gradient
        assert isinstance(p.arena, ShardedArena)
        dtype = accumulation_dtype(p.parameter.dtype)
        whole = p.arena.gather_whole(p, self.gradient_shards(p), dtype)
        return whole.to(p.parameter.dtype)

    def finish_gathers(self) -> None:
        """Waits until every parameter has its new value."""
        for arena in self.arenas:
            if isinstance(arena, ShardedArena):
                arena.finish_gathers()

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's ``mine``, by rank. Collective; for small picklable values."""
        everyone = [None] * self.environment.world_size
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    # --- planning ---

    def plan(self, chosen: Sequence[ManagedParameter]) -> Arena:
        """Plans ``chosen``, lays them out and lowers every known graph for the plan.

        Every rank calls it with the same parameters; rank 0's plan is everyone's.

        Raises:
            FxcommError: a step by the plan would break a rule of DESIGN on this rank.
        """
        self.settle()
        arena = self._new_arena(self._agreed_plan(chosen), chosen)
        self.arenas.append(arena)
        self.dump.plan(arena.number, arena.plan)
        if isinstance(arena, ShardedArena):
            self.dump.step(arena.plan)
            self._share_reads(arena)
            for p in chosen:
                gradient = p.parameter.grad
                if gradient is not None:
                    arena.absorb(p, gradient)
                    p.parameter.grad = None
                    self._sharded_gradient(p).reduced = True
        self._follow_plans()
        return arena

    def switch_plan(self, number: int, plan: OverlapPlan) -> None:
        """Lets ``plan`` take the place of the plan of a sharded arena, for the same parameters,
        with all that belongs to them: kept gradients and optimizer state. For the time between two
        steps. Collective.

        What is lowered for the earlier plan is kept, so that switching back is cheap, until
        :meth:`forget_plans`.

        Raises:
            FxcommError: a step by the plan would break a rule of DESIGN on this rank.
        """
        old = self.arenas[number]
        assert isinstance(old, ShardedArena)
        if plan == old.plan:
            return
        self.settle()
        old.finish_gathers()
        updaters = list(old.updaters)
        new = self._arena_in_place_of(old, plan)
        self.arenas[number] = new
        self._share_reads(new)
        for p in self.with_sharded_gradient():
            if p.arena is new:
                pieces, dtype = old.owned_gradients(p), accumulation_dtype(p.parameter.dtype)
                new.absorb(p, old.gather_whole(p, pieces, dtype))
        for updater in updaters:
            updater.move_state(old)
        old.release()
        self._parked.append(old)
        self.dump.plan(number, plan)
        self._follow_plans()

    def _arena_in_place_of(self, old: ShardedArena, plan: OverlapPlan) -> ShardedArena:
        for arena in self._parked:
            if arena.number == old.number and arena.plan == plan:
                self._parked.remove(arena)
                arena.take_parameters()
                return arena
        gatherer = old.gatherer
        if plan.update_after and gatherer is old.communicator:
            gatherer = self.environment.connect(old.parameters[0].parameter.device)
        wire = WireDtypes(self.options.reduce_dtype, self.options.gather_dtype)
        return ShardedArena(
            old.number, plan, old.parameters, old.communicator, wire, self.meter, gatherer
        )

    def forget_plans(self) -> None:
        """Frees what was kept to switch back to earlier plans."""
        parked, self._parked = self._parked, []
        for graph in self._graphs:
            graph.forget(parked)

    def _share_reads(self, arena: ShardedArena) -> None:
        root = None if self.root is None else self.root()
        seen = set() if root is None else seen_parameters(root)
        arena.share_reads(self.environment.in_flight, seen)

    def _follow_plans(self) -> None:
        """Lowers every known graph for the present plans and verifies the step."""
        try:
            self._lower_and_verify()
        except FxcommError as refusal:
            self._refusal = refusal
            raise

    def _lower_and_verify(self) -> None:
        graphs = sorted(self._graphs, key=lambda graph: graph.number)
        for graph in graphs:
            graph.follow_plan()
        plans = [arena.described() for arena in self.arenas]
        require_valid_step(self.rank, observed_runs(self.observed, graphs), plans)
        for forward in set(self._forwards).difference(graph.forward for graph in graphs):
            require_valid_step(self.rank, [GraphRun(forward)], plans)

    def _require_usable(self) -> None:
        """A plan that was refused stays refused, whoever caught the error."""
        if self._refusal is not None:
            raise self._refusal

    def _agreed_plan(self, chosen: Sequence[ManagedParameter]) -> OverlapPlan:
        """Rank 0's plan for ``chosen``: read from the file that the user names, which is for the
        model's first plan only, or made now."""
        agreement, topic = self.environment.agreement, self.topic("the plan")
        if self.options.plan_file is not None and not self.arenas:
            plan = replayed_plan(
                self.options.plan_file,
                [p.spec for p in chosen],
                agreement,
                topic,
                world_size=self.environment.world_size,
                split=self.sharded,
            )
            # The forwards wait for nothing if the user's options say so.
            return replace(
                plan,
                in_flight_bytes=_megabytes(self.options.in_flight_mb) or plan.in_flight_bytes,
                commshift=plan.commshift and self._commshift,
            )
        plan = self._baseline_plan(chosen)
        return OverlapPlan.from_json(agreement.from_rank_zero(topic, plan.to_json()))

    @property
    def _commshift(self) -> bool:
        return self.sharded and self.options.commshift

    def _baseline_plan(self, chosen: Sequence[ManagedParameter]) -> OverlapPlan:
        place = {p.index: i for i, p in enumerate(chosen)}
        observed = ObservedBackward(
            tuple(
                GraphExecution(e.graph, tuple(place[i] for i in e.parameters if i in place))
                for e in self.observed.executions
            ),
            frozenset(place[i] for i in self.observed.eager if i in place),
        )
        specs = [p.spec for p in chosen]
        plan = baseline_plan(
            specs,
            observed,
            [place[i] for i in self._uses if i in place],
            world_size=self.environment.world_size,
            bucket_bytes=self._bucket_bytes(chosen),
            in_flight_bytes=self._in_flight_bytes(),
            split=self.sharded,
            commshift=self._commshift,
            in_backward=self.sharded and self.options.update == "in_backward",
            sink_reductions=self._sinks(chosen),
        )
        if self.options.plan in _FIXED and self.options.bucket_mb is None:
            return replace(plan, name=self.options.plan)
        if self.options.plan not in _UNTIMED:
            return plan
        runs, _ = launch_runs(len(specs), observed)
        return named_plan(self.options.plan, plan, itertools.accumulate(map(len, runs)))

    def _bucket_bytes(self, chosen: Sequence[ManagedParameter]) -> int | None:
        if self.options.bucket_mb is not None or self.options.plan in _FIXED:
            return _megabytes(self.options.bucket_mb)
        return default_bucket_bytes(sum(p.spec.numel * p.spec.itemsize for p in chosen))

    def _sinks(self, chosen: Sequence[ManagedParameter]) -> bool:
        """Whether gradients may stay whole on their rank until a step's last backward: where only
        optimizer state is sharded they always may, else if that is within the memory limit."""
        limit = self._in_flight_bytes()
        total = sum(p.spec.numel * p.spec.itemsize for p in chosen)
        return self.sharded and (limit is None or total <= limit)

    def _in_flight_bytes(self) -> int | None:
        if self.options.in_flight_mb is not None:
            return _megabytes(self.options.in_flight_mb)
        # The other stages keep whole gradients anyway.
        return BASELINE_IN_FLIGHT_BYTES if self.options.stage == "zero2" else None

    def _new_arena(self, plan: OverlapPlan, chosen: Sequence[ManagedParameter]) -> Arena:
        kind = ShardedArena if self.sharded else ReplicatedArena
        device = chosen[0].parameter.device
        return kind(
            len(self.arenas),
            plan,
            chosen,
            self.environment.connect(device),
            WireDtypes(self.options.reduce_dtype, self.options.gather_dtype),
            self.meter,
            self.environment.connect(device) if plan.update_after else None,
        )


def _scaled_norm(norm: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(gradient, ShardedGradient)
    for factor in gradient.factors:
        norm = norm * factor.to(device=norm.device, dtype=norm.dtype).abs()
    return norm


def _megabytes(value: float | None) -> int | None:
    return None if value is None else max(1, int(value * MEGABYTE))
