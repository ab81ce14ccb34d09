"""The first step of an optimizer: its parameters are planned and its state is sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fxcomm.errors import FxcommError, UnsupportedModelError
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.optimizer import AdoptedOptimizer, Managed, signature
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.probe import require_element_wise
from fxcomm.runtime.start import extend, unused_name

_log = logging.getLogger("fxcomm")
_NAMES_SHOWN = 8


class KnownParameters(Protocol):
    """What adoption needs of the registry."""

    def managed(self, optimizer: torch.optim.Optimizer) -> Managed: ...
    def refresh(self, model: ManagedModel) -> None: ...


class ReplicatedOptimizer:
    """Stage ddp: the user's optimizer itself, on whole mean gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, managed: Managed) -> None:
        self._signature = signature(optimizer)
        self.models = list(dict.fromkeys(model for model, _ in managed.values()))

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still holds just the parameters with which it was adopted."""
        return self._signature == signature(optimizer)

    def stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that runs a step: the user's own."""
        return optimizer

    def before_step(self, optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
        """Makes the gradients final."""
        del alone
        self.take_gradients(optimizer)

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the gradients final."""
        del optimizer
        for model in self.models:
            model.settle()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: every rank updated everything."""


def adopt(
    optimizer: torch.optim.Optimizer,
    known: KnownParameters,
    previous: AdoptedOptimizer | ReplicatedOptimizer | None,
) -> AdoptedOptimizer | ReplicatedOptimizer:
    """Plans the optimizer's parameters and shards its state. Collective.

    Raises:
        UnsupportedOptimizerError: its update is not element-wise.
        RankMismatchError: the ranks' optimizers differ.
        FxcommError: it holds parameters of models with different stages.
    """
    home = next(model for model, _ in known.managed(optimizer).values())
    _take_outsiders(optimizer, home, known)
    managed = known.managed(optimizer)
    models = list(dict.fromkeys(model for model, _ in managed.values()))
    if any(model.sharded != home.sharded for model in models):
        raise FxcommError(
            f"{type(optimizer).__name__} holds parameters of models compiled with stage 'ddp' and "
            "with a sharded stage; compile them with one stage, or use an optimizer for each"
        )
    if home.sharded:
        require_element_wise(optimizer)
    home.environment.agreement.require_equal(
        home.topic("the optimizer"), _describe(optimizer, managed)
    )
    for model in models:
        mine = {p.index for owner, p in managed.values() if owner is model and p.arena is None}
        chosen = [p for p in model.parameters if p.index in mine and p.parameter.requires_grad]
        if chosen:
            _say_eager(model, chosen)
            model.plan(chosen)
    if not home.sharded:
        return ReplicatedOptimizer(optimizer, managed)
    planned = {key: entry for key, entry in managed.items() if entry[1].arena is not None}
    assert not isinstance(previous, ReplicatedOptimizer)
    return AdoptedOptimizer(optimizer, planned, previous)


def _take_outsiders(
    optimizer: torch.optim.Optimizer, home: ManagedModel, known: KnownParameters
) -> None:
    """Lets ``home`` manage trained parameters of the optimizer that no compiled module contains:
    they are synchronised all the same."""
    managed = known.managed(optimizer)
    outside: list[tuple[str, nn.Parameter]] = [
        (f"{type(optimizer).__name__}.param_groups[{g}][{i}]", p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and id(p) not in managed
    ]
    taken = {p.name for p in home.parameters}
    added = extend(home, [(unused_name(name, taken), p) for name, p in outside])
    if not added:
        return
    known.refresh(home)
    _log.warning(
        "%s outside the compiled module: their gradients are reduced at the end of each backward, "
        "without overlap. Compile the module that contains them to hide it.",
        _listed([p.name for p in added]),
    )
    _refuse_edited(home, added)
    home.synchronise_whole(added)


def _refuse_edited(home: ManagedModel, added: Sequence[ManagedParameter]) -> None:
    """What clipping did before this step saw the unreduced gradients of ``added``, and is wrong."""
    if home.edited and any(p.parameter.grad is not None for p in added):
        raise UnsupportedModelError(
            "gradients were changed (clipped?) between backward and step, before fxcomm knew of "
            f"{_listed([p.name for p in added])} outside the compiled module, whose gradients were "
            "not yet reduced. Put these parameters and the compiled module into one module and "
            "call that."
        )


def _say_eager(model: ManagedModel, chosen: Sequence[ManagedParameter]) -> None:
    names = [p.name for p in chosen if p.index in model.observed.eager]
    if names and model.rank == 0:
        _log.warning(
            "%s got gradients from outside every compiled graph (after a graph break?): these are "
            "reduced at the end of each backward, without overlap.",
            _listed(names),
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    text = "parameter " if len(names) == 1 else "parameters "
    return text + ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe(optimizer: torch.optim.Optimizer, managed: Managed) -> list[str]:
    """Lines by which ranks compare their optimizers."""
    lines = [f"optimizer {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: _comparable(v) for k, v in group.items() if k != "params"}
        lines.append(f"group {number} with {settings}")
        for parameter in group["params"]:
            entry = managed.get(id(parameter))
            lines.append(f"group {number}: {entry[1].name if entry else 'an unmanaged tensor'}")
    return lines


def _comparable(setting: Any) -> object:
    """A hyperparameter as something whose text is equal on ranks where it is equal."""
    if isinstance(setting, torch.Tensor):
        return setting.tolist()
    if isinstance(setting, (list, tuple)):
        return [_comparable(item) for item in setting]
    if setting is None or isinstance(setting, (bool, int, float, complex, str)):
        return setting
    return type(setting).__qualname__  # the text of an object may hold its address
