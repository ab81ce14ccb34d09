"""An arena: the parameters that one plan covers, their buckets, and the reductions in flight.

Arenas execute; which bucket holds what, and when it may start, is in the plan. A
:class:`ShardedArena` keeps a shard of each bucket's mean gradient (stages zero1 and zero2), a
:class:`ReplicatedArena` gives every rank whole gradients (stage ddp).
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch

from fxcomm import compat
from fxcomm.analysis.measured import EventKind
from fxcomm.analysis.program import ArenaPlan
from fxcomm.communicator import (
    Collective,
    Communicator,
    apply_calls,
    call_eagerly,
    group_of,
    held_bytes,
    reduction_bytes,
)
from fxcomm.layout import Segment
from fxcomm.passes.reduce import BucketTask, Piece
from fxcomm.passes.stamp import BucketKey
from fxcomm.plan import OverlapPlan
from fxcomm.runtime.in_flight import BucketGather, InFlightParameters, NotedUse
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.statistics import StepMeter

# Gives a parameter's flat gradient, or None where this rank has none and contributes zeros.
TakeGradient = Callable[[ManagedParameter], torch.Tensor | None]

_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients and optimizer state of a parameter of ``dtype`` are kept."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


@dataclass(frozen=True)
class WireDtypes:
    """The dtypes in which gradients and parameters travel; None is the parameter's own."""

    reduce: torch.dtype | None = None
    gather: torch.dtype | None = None


class InFlight(Protocol):
    """A collective that was started. It holds ``extra_bytes`` of memory until it is ``done``."""

    @property
    def extra_bytes(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def wait(self) -> object: ...


@dataclass
class Reduction:
    """A bucket's reduction: in flight (``packed`` and ``launched``) or finished (``result``).
    ``meter`` is told of waits."""

    bucket: int
    collective: Collective
    meter: StepMeter
    packed: torch.Tensor | None = None
    launched: torch.Tensor | None = None
    result: torch.Tensor | None = None

    @property
    def extra_bytes(self) -> int:
        """Bytes of the operand and the raw result, which are freed when it is done."""
        if self.packed is None or self.launched is None:
            return 0
        return held_bytes(self.packed, self.launched)

    @property
    def done(self) -> bool:
        """Whether ``result`` is the mean."""
        return self.launched is None

    def wait(self) -> None:
        """Waits for the mean and frees what it is made of."""
        if self.launched is not None:
            wait, *rest = self.collective.finish
            start = time.perf_counter()
            with compat.below_autograd():
                landed = call_eagerly(wait, self.launched)
                self.meter.note(EventKind.WAIT_REDUCE, self.bucket, start, time.perf_counter())
                self.result = apply_calls(rest, landed, call_eagerly)
            self.packed = self.launched = None


class Arena(ABC):
    """Buckets of one plan; see the module's docstring.

    ``next_bucket`` is the first bucket that the running backward has not launched. Buckets are
    launched in the order of their numbers on every rank, once in each backward that touches the
    arena. ``sharded`` says whether each rank keeps a shard of what was reduced, or all of it.

    Gathers that start in a backward are not in one order with its reductions on all ranks; they
    need a ``gatherer`` of their own.
    """

    sharded: ClassVar[bool]

    def __init__(
        self,
        number: int,
        plan: OverlapPlan,
        parameters: Sequence[ManagedParameter],
        communicator: Communicator,
        wire: WireDtypes,
        meter: StepMeter,
        gatherer: Communicator | None = None,
    ) -> None:
        by_name = {p.name: p for p in parameters}
        self.number = number
        self.plan = plan
        self.parameters = [by_name[spec.name] for spec in plan.layout.parameters]
        self.communicator = communicator
        self.gatherer = gatherer or communicator
        self._wire = wire
        self.meter = meter
        self.next_bucket = 0
        self._reductions: list[Reduction] = []
        self._holding: list[InFlight] = []  # in order of launch
        self.take_parameters()

    def take_parameters(self) -> None:
        """Becomes the arena of its parameters, as on creation."""
        for slot, parameter in enumerate(self.parameters):
            parameter.arena, parameter.slot = self, slot
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """What a kind of arena does when it takes its parameters."""

    @property
    def bucket_count(self) -> int:
        """Number of buckets."""
        return len(self.plan.layout.buckets)

    @abstractmethod
    def _collective(self, numel: int, dtype: torch.dtype) -> Collective:
        """How a bucket is reduced."""

    def wire_dtype(self, bucket: int) -> torch.dtype:
        """The dtype in which a bucket's gradients travel."""
        return self._wire.reduce or getattr(torch, self.plan.layout.buckets[bucket].dtype)

    def collective(self, bucket: int) -> Collective:
        """The reduction of a bucket."""
        return self._collectives[bucket]

    @cached_property
    def _collectives(self) -> list[Collective]:
        return [
            self._collective(bucket.numel, self.wire_dtype(number))
            for number, bucket in enumerate(self.plan.layout.buckets)
        ]

    def members(self, bucket: int) -> list[ManagedParameter]:
        """The parameters of which the bucket holds elements."""
        return self._members[bucket]

    @cached_property
    def _members(self) -> list[list[ManagedParameter]]:
        return [
            [self.parameters[segment.parameter] for segment in bucket.segments]
            for bucket in self.plan.layout.buckets
        ]

    def task(self, bucket: int, positions: Mapping[int, int]) -> BucketTask:
        """The bucket's reduction for a graph that returns parameters' gradients at ``positions``
        (output position by parameter index)."""
        spec = self.plan.layout.buckets[bucket]
        members = self.members(bucket)
        return BucketTask(
            key=BucketKey(self.number, bucket),
            numel=spec.numel,
            dtype=self.wire_dtype(bucket),
            device=members[0].parameter.device,
            pieces=tuple(
                Piece(positions[p.index], p.order, s.parameter_offset, s.numel, s.offset)
                for p, s in zip(members, spec.segments, strict=True)
            ),
            parameters=tuple(p.name for p in members),
            collective=self.collective(bucket),
        )

    @cached_property
    def reduce_bytes(self) -> tuple[int, ...]:
        """Bytes that the reduction of each bucket holds in flight."""
        return tuple(
            reduction_bytes(self.collective(number), bucket.numel, self.wire_dtype(number))
            for number, bucket in enumerate(self.plan.layout.buckets)
        )

    def gather_bytes(self, bucket: int) -> int:
        """Bytes that the gather of a bucket holds in flight, beside the parameters."""
        del bucket
        return 0

    def deferrable(self, bucket: int) -> bool:
        """Whether the gather of a bucket may run on into the next forward."""
        del bucket
        return False

    def described(self) -> ArenaPlan:
        """The plan as this arena executes it."""
        buckets = range(self.bucket_count)
        groups = (group_of(self.collective(bucket).launch.arguments) for bucket in buckets)
        return ArenaPlan(
            self.plan,
            self.reduce_bytes,
            tuple(map(self.gather_bytes, buckets)),
            tuple(map(self.deferrable, buckets)),
            self.number,
            next(groups, None) or "",
            self.sharded,
            group_of(self.gatherer.all_reduce_mean(1, torch.float32).launch.arguments),
        )

    # --- launching ---

    def launched_in_graph(
        self,
        bucket: int,
        packed: torch.Tensor | None,
        launched: torch.Tensor | None,
        result: torch.Tensor | None,
    ) -> None:
        """Takes over the reduction of the next bucket in order from a backward graph that launched
        it: in flight, or finished with its ``result``."""
        assert bucket == self.next_bucket, "a graph launched a bucket out of order"
        self.next_bucket += 1
        self._started(bucket, packed, launched, result)

    def _started(
        self,
        bucket: int,
        packed: torch.Tensor | None,
        launched: torch.Tensor | None,
        result: torch.Tensor | None = None,
    ) -> None:
        collective = self.collective(bucket)
        reduction = Reduction(bucket, collective, self.meter, packed, launched, result)
        self.meter.sent(collective.sent_bytes)
        self._reductions.append(reduction)
        self._hold(reduction)

    def launch_remaining(self, take: TakeGradient) -> None:
        """Launches every bucket that is left in this backward."""
        self.launch(range(self.next_bucket, self.bucket_count), take)
        self.next_bucket = self.bucket_count

    def launch(self, buckets: Iterable[int], take: TakeGradient) -> None:
        """Fills ``buckets`` and starts their reductions, in order, each when there is room."""
        flats: dict[int, torch.Tensor | None] = {}
        for bucket in buckets:
            self.make_room(self.reduce_bytes[bucket])
            collective = self.collective(bucket)
            packed = self._pack(bucket, take, flats)
            packed = apply_calls(collective.prepare, packed, call_eagerly)
            self._started(bucket, packed, call_eagerly(collective.launch, packed))
            now = time.perf_counter()
            self.meter.note(EventKind.LAUNCH_REDUCE, bucket, now, now)

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest collectives in flight while ``nbytes`` more would exceed the plan's
        limit. What was reduced stays, as the mean."""
        self._forget_done()
        limit = self.plan.in_flight_bytes
        held = sum(collective.extra_bytes for collective in self._holding)
        while limit is not None and nbytes and self._holding and held + nbytes > limit:
            oldest = self._holding.pop(0)
            held -= oldest.extra_bytes
            oldest.wait()

    def _hold(self, collective: InFlight) -> None:
        if self.plan.in_flight_bytes is not None and collective.extra_bytes:
            self._holding.append(collective)

    def _forget_done(self) -> None:
        self._holding = [collective for collective in self._holding if not collective.done]

    def _pack(
        self,
        bucket: int,
        take: TakeGradient,
        flats: dict[int, torch.Tensor | None],
    ) -> torch.Tensor:
        """A filled bucket. ``flats`` remembers gradients that continue in the next bucket."""
        spec = self.plan.layout.buckets[bucket]
        members = self.members(bucket)
        packed = torch.zeros(
            spec.numel, dtype=self.wire_dtype(bucket), device=members[0].parameter.device
        )
        for parameter, segment in zip(members, spec.segments, strict=True):
            if parameter.index not in flats:
                flats[parameter.index] = take(parameter)
            flat = flats[parameter.index]
            if flat is not None:
                source = flat[segment.parameter_offset : segment.parameter_offset + segment.numel]
                packed[segment.offset : segment.offset + segment.numel].copy_(source)
        return packed

    # --- finishing ---

    def finish_reductions(self, through: int | None = None) -> list[Reduction]:
        """Waits for reductions in flight, in launch order, and returns them finished: those of
        buckets up to ``through``, or all, which ends the backward for this arena."""
        finished = [r for r in self._reductions if through is None or r.bucket <= through]
        self._reductions = self._reductions[len(finished) :]
        for reduction in finished:
            reduction.wait()
        self._forget_done()
        if through is None:
            self.next_bucket = 0
        return finished


class ReplicatedArena(Arena):
    """Buckets whose mean every rank gets whole."""

    sharded = False

    def _set_up(self) -> None:
        """Nothing: parameters stay where they are."""

    def _collective(self, numel: int, dtype: torch.dtype) -> Collective:
        return self.communicator.all_reduce_mean(numel, dtype)

    def gradients(self, reductions: Iterable[Reduction]) -> dict[int, torch.Tensor]:
        """Mean gradients of the parameters in finished ``reductions``, by parameter index, as views
        of the buckets. Plans for this stage do not cut parameters."""
        found = {
            p.index: torch.zeros_like(p.parameter)
            for p in self.parameters
            if not p.parameter.numel()  # in no bucket, and yet a gradient
        }
        for reduction in reductions:
            assert reduction.result is not None
            segments = self.plan.layout.buckets[reduction.bucket].segments
            for parameter, segment in zip(self.members(reduction.bucket), segments, strict=True):
                flat = reduction.result[segment.offset : segment.offset + segment.numel]
                flat = flat.to(parameter.parameter.dtype)
                found[parameter.index] = parameter.unflatten(flat)
        return found


@dataclass(frozen=True)
class OwnedSegment:
    """A run of a parameter's elements that this rank owns: where it lies in the parameter (flat,
    memory order) and in the shard of a bucket, and a view of those parameter elements. ``place``
    numbers the segments of a shard in their order; it is None for an empty parameter."""

    bucket: int
    shard_offset: int
    parameter_offset: int
    elements: torch.Tensor
    place: int | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.elements.numel()

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The segment's part of a tensor that holds a value for every element of the shard."""
        return shard[self.shard_offset : self.shard_offset + self.numel]

    def of_parameter(self, flat: torch.Tensor) -> torch.Tensor:
        """The segment's part of a tensor with a value for every element of the parameter."""
        return flat[self.parameter_offset : self.parameter_offset + self.numel]


class BucketUpdater(Protocol):
    """What updates the shard of a bucket: an optimizer. When other buckets take the parameters, it
    takes its state from the ``old`` ones to them."""

    def update_in_backward(self, arena: ShardedArena, bucket: int) -> bool: ...
    def move_state(self, old: ShardedArena) -> None: ...


class ShardedArena(Arena):
    """Buckets of which each rank keeps one shard of the mean gradient.

    When it takes the parameters, they move into one flat memory for each dtype and device, in the
    plan's order, so that a bucket is a range of it and is gathered in place. ``applied`` are the
    buckets that the running step has updated in its backward, ``updaters`` the optimizers that hold
    the parameters.
    """

    sharded = True

    def _set_up(self) -> None:
        self.buckets = self._move_parameters()
        self.gradients: list[torch.Tensor | None] = [None] * self.bucket_count
        self._owned: dict[int, list[OwnedSegment]] = {p.index: [] for p in self.parameters}
        for bucket in range(self.bucket_count):
            segments = self.plan.layout.shard_segments(bucket, self.communicator.rank)
            for place, segment in enumerate(segments):
                self._own(bucket, segment, place)
        self._own_empty()
        self._ending: list[BucketGather] = []  # of this step, which must end in it
        self.applied: set[int] = set()
        self.updaters: weakref.WeakSet[BucketUpdater] = weakref.WeakSet()
        self.share_reads(InFlightParameters(), ())

    def release(self) -> None:
        """Gives up its memory, when another arena has taken its parameters, until it takes them
        again."""
        self.buckets, self.gradients = [], []
        self._owned.clear()

    def _own_empty(self) -> None:
        """An empty parameter belongs to every rank: an optimizer keeps state for it, too."""
        for slot, spec in enumerate(self.plan.layout.parameters):
            alike = [i for i, b in enumerate(self.plan.layout.buckets) if b.memory == spec.memory]
            if spec.numel == 0 and alike:
                self._own(alike[0], Segment(slot, 0, 0, 0), None)

    def _own(self, bucket: int, segment: Segment, place: int | None) -> None:
        elements = self.shard(bucket)[segment.offset : segment.offset + segment.numel]
        owned = OwnedSegment(bucket, segment.offset, segment.parameter_offset, elements, place)
        self._owned[self.parameters[segment.parameter].index].append(owned)

    def _move_parameters(self) -> list[torch.Tensor]:
        layout = self.plan.layout
        devices = {p.parameter.device.type: p.parameter.device for p in self.parameters}
        memory = {
            (dtype, device): torch.zeros(numel, dtype=getattr(torch, dtype), device=devices[device])
            for (dtype, device), numel in layout.memory_numel().items()
        }
        for slot, parameter in enumerate(self.parameters):
            segments = layout.parameter_segments(slot)
            if segments:
                bucket, segment = segments[0]
                spec = layout.buckets[bucket]
                start = spec.start + segment.offset
                flat = memory[spec.dtype, spec.device]
                parameter.rebind(flat[start : start + parameter.parameter.numel()])
        return [
            compat.alias(memory[b.dtype, b.device][b.start : b.start + b.numel])
            for b in layout.buckets
        ]

    def _collective(self, numel: int, dtype: torch.dtype) -> Collective:
        return self.communicator.reduce_scatter_mean(numel, dtype)

    def gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which updated parameters of ``dtype`` travel."""
        return self._wire.gather or dtype

    def shard(self, bucket: int) -> torch.Tensor:
        """This rank's elements of a bucket, unused ones between parameters included."""
        return self.buckets[bucket].chunk(self.communicator.world_size)[self.communicator.rank]

    def owned(self, parameter: ManagedParameter) -> list[OwnedSegment]:
        """The parameter's elements that this rank owns."""
        return self._owned[parameter.index]

    def owned_gradients(self, parameter: ManagedParameter) -> list[torch.Tensor]:
        """This rank's part of the parameter's mean gradient, one tensor for each owned segment."""
        return [s.of_shard(self.shard_gradient(s.bucket)) for s in self.owned(parameter)]

    def shard_gradient(self, bucket: int) -> torch.Tensor:
        """The mean gradient of this rank's elements of a bucket, as it is kept."""
        kept = self.gradients[bucket]
        if kept is None:
            kept = self.gradients[bucket] = self.new_shard(bucket)
        return kept

    def new_shard(self, bucket: int) -> torch.Tensor:
        """A zero tensor with one element for each of this rank's elements of the bucket."""
        numel = self.plan.layout.shard_numel(bucket)
        elements = self.buckets[bucket]
        return torch.zeros(numel, dtype=accumulation_dtype(elements.dtype), device=elements.device)

    def accumulate(self, reductions: Iterable[Reduction], accumulating: Collection[int]) -> None:
        """Folds finished ``reductions`` into the kept gradient shards: added for the parameters in
        ``accumulating`` (indices), replacing for all others."""
        for reduction in reductions:
            assert reduction.result is not None
            self._accumulate(reduction.bucket, reduction.result, accumulating)

    def _accumulate(self, bucket: int, mean: torch.Tensor, accumulating: Collection[int]) -> None:
        mean = mean.to(accumulation_dtype(self.buckets[bucket].dtype))
        kept = self.gradients[bucket]
        if kept is None or not any(p.index in accumulating for p in self.members(bucket)):
            self.gradients[bucket] = mean
            return
        rank = self.communicator.rank
        for segment in self.plan.layout.shard_segments(bucket, rank):
            part = slice(segment.offset, segment.offset + segment.numel)
            if self.parameters[segment.parameter].index in accumulating:
                kept[part].add_(mean[part])
            else:
                kept[part].copy_(mean[part])

    def absorb(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Keeps this rank's part of a whole mean gradient."""
        flat = parameter.flatten(gradient)
        for segment in self.owned(parameter):
            segment.of_shard(self.shard_gradient(segment.bucket)).copy_(segment.of_parameter(flat))

    # --- gathering ---

    def share_reads(self, in_flight: InFlightParameters, seen: Collection[int]) -> None:
        """Lets gathers run on beyond their step where reads can wait for them: ``seen`` are the
        parameters (``id``) whose every read ``in_flight`` hears of."""
        self._in_flight = in_flight
        self._deferrable = [
            self.plan.commshift and all(id(p.parameter) in seen for p in self.members(bucket))
            for bucket in range(self.bucket_count)
        ]

    def deferrable(self, bucket: int) -> bool:
        """Whether the gather of a bucket may run on into the next forward."""
        members = (p.parameter for p in self.members(bucket))
        return self._deferrable[bucket] and self._in_flight.may_run_on(members)

    def gather_bytes(self, bucket: int) -> int:
        """Bytes that the gather of a bucket holds in flight, beside the parameters: those of its
        buffer, if parameters travel in another dtype."""
        elements = self.buckets[bucket]
        dtype = self.gather_dtype(elements.dtype)
        return 0 if dtype == elements.dtype else elements.numel() * dtype.itemsize

    def start_gather(self, bucket: int) -> None:
        """Brings the updated elements of every rank's shard to all, which need not end before a
        first use of them. All ranks start gathers in the plan's order."""
        self.make_room(self.gather_bytes(bucket))
        elements = self.buckets[bucket]
        buffer = elements.to(self.gather_dtype(elements.dtype))
        self.meter.sent(self.communicator.all_gather_bytes(buffer.numel() * buffer.itemsize))
        work = self.gatherer.all_gather(buffer, bucket)
        now = time.perf_counter()
        self.meter.note(EventKind.LAUNCH_GATHER, bucket, now, now)
        gather = BucketGather(bucket, work, elements, buffer, self.meter)
        self._hold(gather)
        if self.deferrable(bucket):
            for p in self.members(bucket):
                use = NotedUse(gather, p.index, self.meter) if self.meter.listening else gather
                self._in_flight.started(p.parameter, gather, use)
        else:
            self._ending.append(gather)

    def end_step(self) -> None:
        """Closes a step: waits for the gathers that may not run on."""
        self.applied.clear()
        self._finish_ending()

    def _finish_ending(self) -> None:
        while self._ending:
            self._ending.pop(0).wait()

    def finish_gathers(self) -> None:
        """Waits for all gathers in flight."""
        self._finish_ending()
        self._in_flight.finish(p.parameter for p in self.parameters)

    def gather_whole(
        self, parameter: ManagedParameter, pieces: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of the parameter's shape and of ``dtype`` from every rank's ``pieces`` for its
        owned segments.

        Collective: every rank calls it for the same parameter.
        """
        device = parameter.parameter.device
        flat = torch.zeros(parameter.parameter.numel(), dtype=dtype, device=device)
        for segment, piece in zip(self.owned(parameter), pieces, strict=True):
            segment.of_parameter(flat).copy_(piece)
        self.communicator.all_reduce(flat, "sum")
        return parameter.unflatten(flat)
