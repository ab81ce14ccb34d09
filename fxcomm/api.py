"""The functions that users call besides ``torch.compile``; plain training needs none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxcomm.registry import REGISTRY
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.optimizer import AdoptedOptimizer
from fxcomm.runtime.statistics import StepStats


def _models(module: nn.Module) -> list[ManagedModel]:
    return REGISTRY.models_of(module.parameters())


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backwards inside keep gradients on their rank; the next backward outside reduces the sum.

    For gradient accumulation, as ``DistributedDataParallel.no_sync``. Local gradients are whole:
    they take the memory of the parameters until they are reduced. No effect in one process.
    """
    with REGISTRY.no_sync(module):
        yield


def synchronize(module: nn.Module) -> None:
    """Waits until no communication of ``module`` is in flight, its gradients are final and its
    parameters have their new values.

    Needed only before reading parameters through references that were taken from the module before
    the last ``optimizer.step()``, and before timing by hand.
    """
    for model in _models(module):
        model.settle()
        model.finish_gathers()


def full_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole mean gradient of ``parameter``, of its shape and dtype; None if it has none.

    Collective: every rank calls it for the same parameters in the same order. Writing to the
    result does not change the gradient.
    """
    found = REGISTRY.find(parameter)
    if found is None:
        return parameter.grad
    model, managed = found
    return model.full_gradient(managed)


def stats(module: nn.Module) -> StepStats:
    """Exposed communication time and bytes sent by this rank in the last optimizer step, summed
    over the models inside ``module``; zeros in one process."""
    last = [model.meter.last for model in _models(module)]
    return StepStats(sum(s.exposed_s for s in last), sum(s.wire_bytes for s in last))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state that this rank holds."""
    adopted = REGISTRY.adopted(optimizer)
    if isinstance(adopted, AdoptedOptimizer):
        return adopted.state_bytes
    return sum(
        value.numel() * value.itemsize
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
