"""What a communicator must offer: the collectives of a bucket as values.

A collective is described, not called: as the operator that starts it and the operators that turn
its raw result into what the caller asked for. The same description runs eagerly in the runtime and
is written into an fx graph by a pass, so that there is one definition of what a reduction is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Value = TypeVar("Value")


@dataclass(frozen=True)
class OperatorCall:
    """An operator and all of its arguments but the first."""

    target: Callable[..., object]
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Collective:
    """A collective over a flat buffer.

    ``prepare`` runs on the buffer before the launch; ``launch`` starts the collective and returns
    its result un-waited; ``finish`` begins with the wait. ``sent_bytes`` is what one rank puts on
    the wire.
    """

    prepare: tuple[OperatorCall, ...]
    launch: OperatorCall
    finish: tuple[OperatorCall, ...]
    sent_bytes: float


def apply_calls(
    calls: Iterable[OperatorCall],
    value: Value,
    call: Callable[[OperatorCall, Value], Value],
) -> Value:
    """Chains ``calls``, each on the result of the one before, starting with ``value``."""
    for step in calls:
        value = call(step, value)
    return value


def call_eagerly(step: OperatorCall, value: torch.Tensor) -> torch.Tensor:
    """Runs one operator now."""
    result = step.target(value, *step.arguments)
    assert isinstance(result, torch.Tensor)
    return result


def group_of(arguments: Iterable[object]) -> str | None:
    """The process group that the operator of a collective gets with its ``arguments``, or None:
    torch's operators take its name last."""
    return next((a for a in reversed([*arguments]) if isinstance(a, str)), None)


def held_bytes(operand: torch.Tensor, result: torch.Tensor) -> int:
    """Bytes that a collective holds in flight: what it reads and what it makes of it."""
    return sum(int(tensor.numel()) * tensor.itemsize for tensor in (operand, result))


def reduction_bytes(collective: Collective, numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``collective`` will hold in flight (:func:`held_bytes`) for a flat buffer of
    ``numel`` elements."""
    buffer = torch.empty(numel, dtype=dtype, device="meta")
    operand = apply_calls(collective.prepare, buffer, call_eagerly)
    return held_bytes(operand, call_eagerly(collective.launch, operand))


class Waitable(Protocol):
    """Communication that was started."""

    def wait(self) -> object:
        """Waits for it."""


class Communicator(Protocol):
    """Collectives among the ranks of one process group on one kind of device."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    def reduce_scatter_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        """The mean over ranks of a buffer of ``numel`` elements, of which each rank gets the slice
        ``[rank * numel / world_size, (rank + 1) * numel / world_size)``. The mean is rounded to
        ``dtype`` once."""

    def all_reduce_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        """The mean over ranks of a buffer of ``numel`` elements, whole on every rank."""

    def all_gather(self, buffer: torch.Tensor, tag: int) -> Waitable:
        """Starts to fill the flat ``buffer`` with every rank's slice of it, in place. Gathers that
        are in flight together have tags of their own."""

    def all_gather_bytes(self, nbytes: int) -> float:
        """Bytes that one rank sends when a buffer of ``nbytes`` is gathered."""

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        """Reduces ``tensor`` in place by "sum" or "max" and waits."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor`` with rank 0's and waits."""
