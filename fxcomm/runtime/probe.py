"""Finds out whether an optimizer updates each element by itself, by trying it."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from typing import Any

import torch

from fxcomm.errors import UnsupportedOptimizerError

_SHAPE = (4, 6)
_CUTS = (0, 5, 14, 24)  # uneven, and across the rows of _SHAPE
_STEPS = 3
_LEARNING_RATE = 0.05


# Attributes that belong to one instance: an LR scheduler binds ``step`` to the original, a
# GradScaler leaves its scale for one step.
_OF_ONE_INSTANCE = ("step", "grad_scale", "found_inf")


def twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same attributes, but no groups, state or hooks.

    Made without the class's constructor, whose arguments are not known; ``copy.copy`` would lose
    the attributes of subclasses.
    """
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    for name in _OF_ONE_INSTANCE:
        made.__dict__.pop(name, None)
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_"):
            made.__dict__[name] = type(value)()
    made.param_groups = []
    made.state = defaultdict(dict)
    return made


def require_element_wise(optimizer: torch.optim.Optimizer) -> None:
    """Steps every kind of group of ``optimizer`` on a small matrix and on the same elements cut
    into flat pieces, with equal gradients; the results must agree.

    Factored, layer-wise, matrix-wise, globally normalised, noisy and closure-driven optimizers fail
    this.

    Raises:
        UnsupportedOptimizerError: names the class and what to do instead.
    """
    for group in optimizer.param_groups:
        try:
            whole = _run(optimizer, group, 0, _CUTS[-1], flat=False)
            # Each piece in an optimizer of its own, as each rank has some.
            cut = [_run(optimizer, group, a, b, flat=True) for a, b in itertools.pairwise(_CUTS)]
        except Exception as error:
            raise _refusal(optimizer, f"it failed on a flat piece of a matrix: {error}") from error
        if not torch.allclose(whole, torch.cat(cut), rtol=1e-9, atol=1e-12):
            raise _refusal(optimizer, "its update of an element depends on other elements")


def _refusal(optimizer: torch.optim.Optimizer, reason: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"{type(optimizer).__name__} cannot be sharded by element: {reason}. Use "
        'options={"stage": "ddp"}, which keeps whole gradients and state on every rank, or an '
        "element-wise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, ...)."
    )


def _run(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    start: int,
    end: int,
    *,
    flat: bool,
) -> torch.Tensor:
    """Elements ``start`` to ``end`` after a few steps from a fixed start with fixed gradients."""
    generator = torch.Generator().manual_seed(0)
    elements = torch.randn(_CUTS[-1], dtype=torch.float64, generator=generator)
    # Rows of different sizes: an update that averages over rows or the matrix shows.
    scale = torch.logspace(-2, 2, _CUTS[-1], dtype=torch.float64)
    device = next((p.device for p in group["params"]), torch.device("cpu"))
    shape = (-1,) if flat else _SHAPE
    tensor = elements[start:end].to(device, copy=True).view(shape)
    copied = twin(optimizer)
    for name, value in copied.__dict__.items():
        if name not in ("param_groups", "state") and not name.startswith("_optimizer_"):
            copied.__dict__[name] = copy.deepcopy(value)
    hyperparameters = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    copied.param_groups = [{**hyperparameters, "params": [tensor], **_visible_rate(group)}]
    for _ in range(_STEPS):
        gradient = torch.randn(_CUTS[-1], dtype=torch.float64, generator=generator) * scale
        tensor.grad = gradient[start:end].to(device, copy=True).view(shape)
        copied.step()
    return tensor.reshape(-1).cpu()


def _visible_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A learning rate that lets the update be seen: a warm-up may start at zero."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        return {"lr": torch.full_like(rate, _LEARNING_RATE)}
    return {} if rate is None else {"lr": _LEARNING_RATE}
