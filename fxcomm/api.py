"""The functions that users call besides ``torch.compile``; plain training needs none of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fxcomm.analysis.measured import MeasuredStep, timeline_of
from fxcomm.analysis.timeline import chrome_trace
from fxcomm.commands.explain import write_report
from fxcomm.errors import FxcommError
from fxcomm.registry import REGISTRY
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.optimizer import AdoptedOptimizer
from fxcomm.runtime.statistics import StepStats
from fxcomm.tuned import Tuned


def _models(module: nn.Module) -> list[ManagedModel]:
    return REGISTRY.models_in(module)


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


def tuned(module: nn.Module) -> Tuned | None:
    """What tuning the plan of ``module`` came to: the plan, and the measured seconds of a step by
    what was tried. None before the first optimizer step, while tuning goes on, and in one process.

    Raises:
        FxcommError: ``module`` contains several models.
    """
    models = _models(module)
    if len(models) > 1:
        raise FxcommError(
            f"tuned: {type(module).__name__} contains {len(models)} models that fxcomm manages; "
            "ask for each"
        )
    return models[0].tuned if models else None


@contextmanager
def record_steps(module: nn.Module) -> Iterator[list[MeasuredStep]]:
    """Notes when what happens in the optimizer steps that are completed inside, on this rank, and
    puts them into the list that it yields. The first step inside is not among them: its beginning
    was not seen. Costs some microseconds a bucket and parameter.

    Raises:
        FxcommError: ``module`` was not trained with fxcomm yet, or contains several models.
    """
    models = _models(module)
    if len(models) != 1:
        found = f"{len(models)} models that fxcomm manages" if models else "no model of fxcomm's"
        raise FxcommError(
            f"record_steps: {type(module).__name__} contains {found}. Record one compiled model, "
            "after its first step on several ranks."
        )
    steps: list[MeasuredStep] = []
    listeners = models[0].meter.listeners
    listeners.append(steps.append)
    try:
        yield steps
    finally:
        listeners.remove(steps.append)


def save_timeline(path: str | os.PathLike[str], steps: Sequence[MeasuredStep]) -> None:
    """Writes recorded steps as a trace that Perfetto and chrome://tracing open.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(chrome_trace({"measured": timeline_of(steps)})))


def save_report(path: str | os.PathLike[str], module: nn.Module) -> None:
    """Writes the report of ``module``'s tuned plan: one HTML file that says what limits a step,
    what would help, and how other plans compare, with the simulated and a measured timeline.

    Raises:
        FxcommError: tuning still goes on, measured nothing, or the file cannot be written.
    """
    outcome = tuned(module)
    if outcome is None:
        raise FxcommError(
            "save_report: there is no tuned plan yet. Train about 45 steps on several ranks first; "
            "fxcomm.tuned(model) tells when it is there."
        )
    write_report(Path(path), outcome)


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
