"""Communicators: the collectives of DESIGN on gloo, NCCL and the fake process group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from fxcomm import compat
from fxcomm.backends.exchange import exchange
from fxcomm.communicator import Collective, Communicator, OperatorCall, Waitable

_functional = torch.ops._c10d_functional
_aten = torch.ops.aten

# gloo knows no complex numbers: they travel as pairs.
_AS_PAIRS = (OperatorCall(_aten.view_as_real.default), OperatorCall(_aten.view.default, ([-1],)))
_FROM_PAIRS = OperatorCall(_aten.view_as_complex.default)

_WAIT = OperatorCall(_functional.wait_tensor.default)
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class _GroupCommunicator:
    """What every process group does alike."""

    group: dist.ProcessGroup

    # Asked for with every collective, and dear to ask torch.distributed for.
    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def _name(self) -> str:
        return compat.group_name(self.group)

    def _fraction_sent(self) -> float:
        return (self.world_size - 1) / self.world_size

    def all_gather(self, buffer: torch.Tensor, tag: int) -> Waitable:
        del tag
        buffer = _real(buffer)
        shard = buffer.chunk(self.world_size)[self.rank]
        work: dist.Work = compat.all_gather_in_place(buffer, shard, self.group)
        return work

    def all_gather_bytes(self, nbytes: int) -> float:
        return nbytes * self._fraction_sent()

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        dist.all_reduce(_real(tensor), op=_REDUCE[operation], group=self.group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(_real(tensor), src=dist.get_global_rank(self.group, 0), group=self.group)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as real numbers."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class _Together:
    """Several messages as one."""

    works: tuple[Waitable, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class GlooCommunicator(_GroupCommunicator):
    """gloo on CPU tensors.

    gloo builds ``reduce_scatter`` on all-reduce and sends every byte twice. An all-to-all of the
    slices (large ones: see :mod:`fxcomm.backends.exchange`) and a local mean sends (N-1)/N of the
    buffer, the least possible, and rounds the mean once (``aten.mean`` accumulates 16-bit floats in
    32 bits). Its all-gather copies everything twice; slices sent from and received into the buffer
    itself take a fifth of the time.

    Buckets of at least ``exchanged_bytes`` are exchanged: small ones would cost the host more.
    """

    exchanged_bytes: int = 2**20

    def all_gather(self, buffer: torch.Tensor, tag: int) -> Waitable:
        slices = _real(buffer).chunk(self.world_size)
        others = range(1, self.world_size)
        # gloo sends when the other side has told where to receive. Receives come first: told after
        # a message has begun, it would wait for that message's end, and each direction of the link
        # for the other. Each rank begins with its next neighbour, so that no rank is everyone's
        # first target.
        sources = [(self.rank - distance) % self.world_size for distance in others]
        targets = [(self.rank + distance) % self.world_size for distance in others]
        works = [compat.receive(self.group, slices[source], source, tag) for source in sources]
        works += [compat.send(self.group, slices[self.rank], to, tag) for to in targets]
        return _Together(tuple(works))

    def reduce_scatter_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        world_size, pair = self.world_size, [2] if dtype.is_complex else []
        size = numel // world_size
        splits = [size * (2 if pair else 1)] * world_size
        launch = OperatorCall(_functional.all_to_all_single.default, (splits, splits, self._name))
        if numel * dtype.itemsize >= self.exchanged_bytes:
            launch = OperatorCall(exchange, (self._name,))
        return Collective(
            prepare=_AS_PAIRS if pair else (),
            launch=launch,
            finish=(
                _WAIT,
                OperatorCall(_aten.view.default, ([world_size, size, *pair],)),
                *self._mean(dtype),
                *([_FROM_PAIRS] if pair else []),
            ),
            sent_bytes=numel * dtype.itemsize * self._fraction_sent(),
        )

    def _mean(self, dtype: torch.dtype) -> tuple[OperatorCall, ...]:
        if dtype.itemsize <= 2:
            return (OperatorCall(_aten.mean.dim, ([0],)),)
        # Half the time of ``aten.mean``, which is slow on few long rows.
        total = OperatorCall(_aten.sum.dim_IntList, ([0],))
        return total, OperatorCall(_aten.div.Scalar, (self.world_size,))

    def all_reduce_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        divide = OperatorCall(_aten.div.Scalar, (self.world_size,))
        prepare: tuple[OperatorCall, ...] = ()
        finish: tuple[OperatorCall, ...] = (_WAIT, divide)
        if dtype.is_complex:
            pairs = OperatorCall(_aten.view.default, ([numel, 2],))
            prepare, finish = _AS_PAIRS, (_WAIT, divide, pairs, _FROM_PAIRS)
        elif dtype.itemsize == 2:
            # A sum of 16-bit floats may overflow where their mean does not.
            prepare, finish = (divide,), (_WAIT,)
        return Collective(
            prepare=prepare,
            launch=OperatorCall(_functional.all_reduce.default, ("sum", self._name)),
            finish=finish,
            sent_bytes=2 * numel * dtype.itemsize * self._fraction_sent(),
        )


@dataclass(frozen=True)
class NcclCommunicator(_GroupCommunicator):
    """NCCL, whose reduce-scatter is bandwidth-optimal and whose AVG is a mean for floats."""

    def reduce_scatter_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        return Collective(
            prepare=(),
            launch=OperatorCall(
                _functional.reduce_scatter_tensor.default, ("avg", self.world_size, self._name)
            ),
            finish=(_WAIT,),
            sent_bytes=numel * dtype.itemsize * self._fraction_sent(),
        )

    def all_reduce_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        return Collective(
            prepare=(),
            launch=OperatorCall(_functional.all_reduce.default, ("avg", self._name)),
            finish=(_WAIT,),
            sent_bytes=2 * numel * dtype.itemsize * self._fraction_sent(),
        )


@dataclass(frozen=True)
class AllReduceCommunicator(GlooCommunicator):
    """gloo on accelerator tensors, for which it has no all-to-all: the mean of the whole buffer,
    of which each rank keeps its slice. Correct, and twice the bytes."""

    all_gather = _GroupCommunicator.all_gather

    def reduce_scatter_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        whole = self.all_reduce_mean(numel, dtype)
        size = numel // self.world_size
        mine = OperatorCall(_aten.slice.Tensor, (0, self.rank * size, (self.rank + 1) * size))
        return Collective(
            whole.prepare, whole.launch, (*whole.finish, mine), sent_bytes=whole.sent_bytes
        )


def communicator_for(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    """The communicator for ``group`` and tensors on ``device``."""
    backend = compat.group_backend(group, device)
    if backend == "gloo":
        return GlooCommunicator(group) if device.type == "cpu" else AllReduceCommunicator(group)
    if backend == "nccl":
        return NcclCommunicator(group)
    # The fake group and out-of-tree backends: the collectives that every backend offers.
    return GlooCommunicator(group) if device.type == "cpu" else NcclCommunicator(group)
