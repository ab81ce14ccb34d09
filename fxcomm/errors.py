"""Errors that fxcomm raises. Each says what happened, where, and what to do."""

from __future__ import annotations


class FxcommError(RuntimeError):
    """Base of every error that fxcomm raises on purpose."""


class OptionsError(FxcommError, ValueError):
    """An entry of ``torch.compile(options={...})`` is unknown or has a wrong value."""


class PlanError(FxcommError, ValueError):
    """A plan cannot be read, or is not a plan for the model."""


class ShardedGradientError(FxcommError):
    """Something touched a ``p.grad`` of which this rank holds only a shard."""


class RankMismatchError(FxcommError):
    """Ranks disagree on the model, the options or the optimizer."""


class UnsupportedOptimizerError(FxcommError):
    """An optimizer does not update element by element, so its state cannot be sharded."""


class UnsupportedModelError(FxcommError):
    """The model has something that fxcomm cannot train correctly."""
