"""A recorded update equals the optimizer's own: for every optimizer, over steps, on any run."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from fxcomm.backends.lowering import compile_update
from fxcomm.options import Options
from fxcomm.runtime.probe import twin
from fxcomm.runtime.recording import CannotRecordError, RecordedStep, record_step
from fxcomm.runtime.update import UpdateKind
from tests.test_optimizers import STOCK, Lion

Make = Callable[[Any], torch.optim.Optimizer]

# Steps of other kinds: RAdam begins to divide by its variance late, ASGD to average.
STEPS = 8


class Twice:
    """One parameter updated by an optimizer, and another by what is recorded of it."""

    def __init__(self, make: Make, numel: int, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.randn(numel, dtype=dtype))
        self.recorded = nn.Parameter(self.own.detach().clone())
        self.optimizer, self.other = make([self.own]), make([self.recorded])
        self.unrecorded = 0

    def step(self, run: Callable[[UpdateKind, list[Tensor]], None], factor: float = 1.0) -> None:
        """One step of both on equal gradients."""
        gradient = torch.randn_like(self.own)
        self.own.grad, self.recorded.grad = gradient * factor, gradient.clone()
        self.optimizer.step()
        state = self.other.state[self.recorded]
        try:
            step = record(self.other, self.recorded)
        except CannotRecordError:
            self.unrecorded += 1
            self.recorded.grad.mul_(factor)
            self.other.step()
            return
        kind, tensors = arguments(step, self.recorded, state, factor)
        with torch.no_grad():
            run(kind, tensors)
        state.update(step.state)

    def assert_equal(self, rtol: float = 1e-12) -> None:
        """Parameters and states agree."""
        close = partial(torch.testing.assert_close, rtol=rtol, atol=rtol)
        close(self.recorded.detach(), self.own.detach())
        mine, theirs = self.other.state[self.recorded], self.optimizer.state[self.own]
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            close(mine[key], value, msg=lambda m, key=key: f"{key}: {m}")


def record(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> RecordedStep:
    """What the optimizer's next step does to its one parameter."""
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    return record_step(twin(optimizer), group, state, parameter.detach())


def arguments(
    step: RecordedStep, parameter: nn.Parameter, state: dict[str, Any], factor: float
) -> tuple[UpdateKind, list[Tensor]]:
    """The update with a factor, and the tensors that it takes."""
    run = parameter.detach()
    kind = UpdateKind(step.update, run.dtype, run.device, run.dtype, True, None)
    numbers = step.number_tensor(run.dtype, run.device)
    scale = torch.tensor(factor, dtype=run.dtype)
    states = [state[key] for key in step.update.inputs[2:]]
    assert parameter.grad is not None
    return kind, [run, parameter.grad, numbers, scale, *states]


def interpret(kind: UpdateKind, tensors: list[Tensor]) -> None:
    kind(*tensors)


@pytest.mark.parametrize("name", [*STOCK, "Lion"])
def test_recorded_steps_equal_the_optimizers(name: str) -> None:
    both = Twice({**STOCK, "Lion": Lion}[name], 41)
    for _ in range(STEPS):
        both.step(interpret, factor=0.5)
    both.assert_equal()
    # The first step makes the state; everything after it is recorded.
    assert both.unrecorded <= 1


@pytest.mark.parametrize("name", ["AdamW", "SGD nesterov", "RAdam", "AdamW amsgrad"])
def test_compiled_steps_equal_the_optimizers(name: str) -> None:
    compiled: dict[UpdateKind, Any] = {}

    def run(kind: UpdateKind, tensors: list[Tensor]) -> None:
        if kind not in compiled:
            compiled[kind] = compile_update(kind, kind.example, Options())
        compiled[kind](list(tensors))

    for numel in (1, 2, 1003):
        both = Twice(STOCK[name], numel)
        for _ in range(STEPS):
            both.step(run, factor=0.5)
        both.assert_equal()
    # One graph serves runs of every length.
    assert len(compiled) <= 2


def test_an_update_with_a_master_is_one_loop() -> None:
    """Scaling, taking over changed elements, the optimizer and rounding pass over memory once."""
    both = Twice(STOCK["AdamW"], 500, torch.float32)
    both.step(interpret)
    assert both.recorded.grad is not None
    step = record(both.other, both.recorded)
    kind = UpdateKind(
        step.update, torch.float32, torch.device("cpu"), torch.bfloat16, True, torch.bfloat16
    )
    run, codes = run_and_get_code(compile_update, kind, kind.example, Options())
    (code,) = codes
    assert len(set(re.findall(r"cpp_fused\w*", code))) == 1
    assert code.count("#pragma GCC ivdep") <= 1 or "for(" in code

    state = both.other.state[both.recorded]
    elements = both.recorded.detach().bfloat16()
    elements[7] = 3.0  # somebody loaded a checkpoint
    states = [state[key] for key in step.update.inputs[2:]]
    tensors = [
        both.recorded.detach().clone(),
        both.recorded.grad,
        step.number_tensor(torch.float32, elements.device),
        torch.tensor(0.25),
        elements,
        *states,
    ]
    copies = [t.clone() for t in tensors]
    run(list(tensors))
    kind(*copies)
    for mine, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert abs(float(tensors[0][7]) - 3.0) < 0.1
    torch.testing.assert_close(tensors[4], tensors[0].bfloat16(), rtol=0, atol=0)


class ByValue(torch.optim.Optimizer):
    """Looks at an element: no list of operators says what it does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad.max().item() > 0:
                p.sub_(p.grad)


class WithTensor(ByValue):
    """Uses a tensor of its own with an element for each of the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * torch.arange(p.numel()))


class Replacing(ByValue):
    """Puts a new tensor into its state in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = self.state[p].get("mean", 0) * 0.9 + p.grad
            p.sub_(self.state[p]["mean"])


@pytest.mark.parametrize("make", [ByValue, WithTensor, Replacing])
def test_what_is_no_list_of_operators_is_not_recorded(make: Make) -> None:
    parameter = nn.Parameter(torch.randn(5))
    optimizer = make([parameter])
    parameter.grad = torch.randn(5)
    optimizer.step()
    with pytest.raises(CannotRecordError):
        record(optimizer, parameter)


def test_recording_changes_nothing() -> None:
    both = Twice(STOCK["NAdam"], 9)
    both.step(interpret)
    before = {k: v.clone() for k, v in both.other.state[both.recorded].items()}
    value, group = both.recorded.detach().clone(), dict(both.other.param_groups[0])
    for _ in range(2):
        record(both.other, both.recorded)
    assert torch.equal(both.recorded.detach(), value)
    assert dict(both.other.param_groups[0]) == group
    after = both.other.state[both.recorded]
    assert all(torch.equal(after[key], entry) for key, entry in before.items())
