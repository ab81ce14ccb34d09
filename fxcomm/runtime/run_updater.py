"""Updates runs of one optimizer, one after the other, by compiled loops where that is possible."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxcomm import compat
from fxcomm.runtime.recording import CannotRecordError, RecordedStep, record_step
from fxcomm.runtime.update import UpdateKind, UpdateRun, common_factor

_log = logging.getLogger("fxcomm")

Compiled = Callable[[list[Any]], object]

# Distinct updates that are compiled for one optimizer: one that is another in every step is not
# worth compiling.
_COMPILED_KINDS = 16


@dataclass(frozen=True)
class _Ready:
    """The update of this step for runs of one cohort and kind: compiled, and its numbers."""

    compiled: Compiled
    step: RecordedStep
    numbers: torch.Tensor


class RunUpdater:
    """See the module's docstring. ``stepper`` is an object of the optimizer's class of its own."""

    def __init__(self, stepper: torch.optim.Optimizer) -> None:
        self._stepper = stepper
        self._kinds: dict[UpdateKind, Compiled | None] = {}
        self._ready: dict[tuple[object, ...], _Ready | None] = {}
        self._told = False

    def begin(self, twin: torch.optim.Optimizer) -> None:
        """Begins a step with the settings, groups and state that ``twin`` has now."""
        self._twin = twin
        settings = {k: v for k, v in twin.__dict__.items() if not k.startswith("_optimizer_")}
        self._stepper.__dict__.update(settings)
        self._ready.clear()

    def update(self, run: UpdateRun) -> None:
        """Updates a run from its final gradient."""
        factors = common_factor(run.members)
        if factors is None:
            _apply_factors(run)
            factors = ()
        ready = self._ready_for(run, bool(factors))
        if ready is None:
            self._update_natively(run)
            return
        arguments = [run.tensor, run.gradient(), ready.numbers]
        if factors:
            arguments.append(functools.reduce(torch.mul, factors).to(run.tensor.device))
        if run.rounded:
            arguments.append(run.elements)
        state = self._state(run)
        ready.compiled(arguments + [state[key] for key in ready.step.update.inputs[2:]])
        for key, value in ready.step.state.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _state(self, run: UpdateRun) -> dict[str, Any]:
        found: dict[str, Any] = self._twin.state.get(run.tensor, {})
        return found

    def _update_natively(self, run: UpdateRun) -> None:
        """Runs the user's own code on a run."""
        _apply_factors(run)
        run.refresh_master()
        run.tensor.grad = run.gradient()
        group = self._twin.param_groups[run.group]
        self._stepper.param_groups = [{**group, "params": [run.tensor]}]
        compat.step_without_hooks(self._stepper)
        run.tensor.grad = None
        run.round_master()

    def _ready_for(self, run: UpdateRun, scaled: bool) -> _Ready | None:
        tensor, elements = run.tensor, run.elements
        key = (run.group, run.cohort, scaled, tensor.dtype, tensor.device, elements.dtype)
        if key not in self._ready:
            self._ready[key] = self._prepare(run, scaled)
        return self._ready[key]

    def _prepare(self, run: UpdateRun, scaled: bool) -> _Ready | None:
        """Records this step of the run's cohort before it is made; None if it is not to be
        compiled."""
        group, state = self._twin.param_groups[run.group], self._state(run)
        tensor = run.tensor
        dtypes = {value.dtype for key, value in state.items() if run.holds(key, value)}
        # An optimizer of fused operators needs none of ours.
        if group.get("fused") or not tensor.is_floating_point() or dtypes - {tensor.dtype}:
            return None
        try:
            step = record_step(self._stepper, group, state, tensor)
        except CannotRecordError as reason:
            if state:  # the first step makes the state, and is never compiled
                self._tell(str(reason))
            return None
        rounded = run.rounded_dtype if run.rounded else None
        kind = UpdateKind(
            step.update, tensor.dtype, tensor.device, run.elements.dtype, scaled, rounded
        )
        if kind not in self._kinds:
            self._kinds[kind] = self._compile(run, kind)
        compiled = self._kinds[kind]
        if compiled is None:
            return None
        return _Ready(compiled, step, step.number_tensor(tensor.dtype, tensor.device))

    def _compile(self, run: UpdateRun, kind: UpdateKind) -> Compiled | None:
        if len(self._kinds) >= _COMPILED_KINDS:
            self._tell(f"it has updated in {_COMPILED_KINDS} different ways")
            return None
        try:
            return run.members[0].model.environment.compile_update(kind, kind.example)
        except Exception as error:
            self._tell(f"Inductor refuses its operators: {error}")
            return None

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "%s is not compiled, it updates with one operator after the other: %s",
                type(self._stepper).__name__,
                reason,
            )


def _apply_factors(run: UpdateRun) -> None:
    for member in run.members:
        member.model.apply_factors(member.parameter)
