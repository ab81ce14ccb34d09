"""What an optimizer does to a run of elements, as a list of operators.

An optimizer is Python that runs in every step. Run on a few stand-in elements under a recorder, it
tells which operators it applies to a parameter, its gradient and its state, and with which numbers
(learning rate, bias corrections). The operators are the same in nearly every step and are compiled
once, for runs of any length; the numbers become an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxcomm import compat

_aten = torch.ops.aten

PARAMETER, GRADIENT = "parameter", "gradient"

# Stand-in elements: so many that a state tensor for each element cannot be taken for anything else.
_STAND_INS = 3


class CannotRecordError(Exception):
    """The update is not a fixed list of element-wise operators; the message says why."""


@dataclass(frozen=True)
class TensorRef:
    """The tensor number ``index`` of an update: an input, or the result of an earlier call."""

    index: int


@dataclass(frozen=True)
class NumberRef:
    """The number ``index`` of those that change from step to step."""

    index: int


@dataclass(frozen=True)
class RecordedCall:
    """One operator. Tensors and changing numbers among its arguments are references; ``results``
    are the numbers of the tensors that it returns, which may be known ones."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class RecordedUpdate:
    """An update as operators on ``inputs``: the parameter, its gradient, and its state by key. All
    are flat tensors of one length, and are changed in place. ``numbers`` is the length of the
    tensor of changing numbers."""

    inputs: tuple[str, ...]
    calls: tuple[RecordedCall, ...]
    numbers: int


@dataclass(frozen=True)
class RecordedStep:
    """The update in one step: its operators, its numbers, and what it left of the state that is not
    a value for each element (a count of steps)."""

    update: RecordedUpdate
    numbers: tuple[float | torch.Tensor, ...]
    state: Mapping[str, Any]

    def number_tensor(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The numbers as a flat tensor."""
        dtype = dtype.to_real()
        if any(isinstance(number, torch.Tensor) for number in self.numbers):
            parts = [torch.as_tensor(n, dtype=dtype, device=device) for n in self.numbers]
            return torch.stack(parts)
        return torch.tensor(self.numbers, dtype=dtype).to(device, non_blocking=True)


# --- numbers as tensors -------------------------------------------------------------------------

# Operators whose number arguments may be tensors without dimensions, and how they are called then.
# Any other operator's numbers are part of the recorded operators themselves.


def _scaled(y: Any, alpha: Any) -> Any:
    return y if alpha is None else y * alpha


_WITH_TENSORS: Mapping[Any, Callable[..., Any]] = {
    _aten.add.Tensor: lambda x, y, alpha=None: x.add(_scaled(y, alpha)),
    _aten.add_.Tensor: lambda x, y, alpha=None: x.add_(_scaled(y, alpha)),
    _aten.sub.Tensor: lambda x, y, alpha=None: x.sub(_scaled(y, alpha)),
    _aten.sub_.Tensor: lambda x, y, alpha=None: x.sub_(_scaled(y, alpha)),
    _aten.mul.Tensor: lambda x, y: x.mul(y),
    _aten.mul_.Tensor: lambda x, y: x.mul_(y),
    _aten.div.Tensor: lambda x, y: x.div(y),
    _aten.div_.Tensor: lambda x, y: x.div_(y),
    _aten.lerp.Scalar: lambda x, y, weight: x.lerp(y, weight),
    _aten.lerp_.Scalar: lambda x, y, weight: x.lerp_(y, weight),
    _aten.addcmul.default: lambda x, a, b, value=1: x.add(a * value * b),
    _aten.addcmul_.default: lambda x, a, b, value=1: x.add_(a * value * b),
    _aten.addcdiv.default: lambda x, a, b, value=1: x.add(a * value / b),
    _aten.addcdiv_.default: lambda x, a, b, value=1: x.add_(a * value / b),
}


def replay(
    update: RecordedUpdate,
    tensors: Sequence[torch.Tensor],
    numbers: torch.Tensor,
) -> None:
    """Applies a recorded update in place to ``tensors``, one for each of its inputs, with the flat
    tensor ``numbers``."""
    known: dict[int, Any] = dict(enumerate(tensors))

    def value(argument: Any) -> Any:
        if isinstance(argument, TensorRef):
            return known[argument.index]
        if isinstance(argument, NumberRef):
            return numbers[argument.index]
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    for call in update.calls:
        function = _WITH_TENSORS.get(call.target, call.target)
        result = function(*map(value, call.args), **{k: value(v) for k, v in call.kwargs})
        known.update(zip(call.results, _tensors_in(result), strict=True))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for item in value for t in _tensors_in(item)] if isinstance(value, list | tuple) else []
    )


# --- recording ----------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Notes every operator that touches a known tensor; all others run unseen."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.numbers: list[float | torch.Tensor] = []
        self._tensors = list(inputs)  # also keeps each alive, so that its id stays its own
        self._known = {id(t): i for i, t in enumerate(self._tensors)}

    def knows(self, value: object) -> bool:
        """Whether a value depends on the elements of the run."""
        return id(value) in self._known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(self.knows(t) for t in _tensors_in([*args, *kwargs.values()])):
            return func(*args, **kwargs)
        # Before the call, which may change a number in place.
        lift = func in _WITH_TENSORS
        recorded = tuple(self._reference(func, a, lift) for a in args)
        named = tuple((k, self._reference(func, v, lift)) for k, v in sorted(kwargs.items()))
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor | list | tuple):
            raise CannotRecordError(f"{func} makes a Python value of an element")
        self.calls.append(
            RecordedCall(func, recorded, named, tuple(map(self._number, _tensors_in(result))))
        )
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        if not self.knows(tensor):
            self._known[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._known[id(tensor)]

    def _reference(self, func: Any, value: Any, lift: bool) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self._reference(func, item, lift) for item in value)
        if isinstance(value, torch.Tensor):
            if self.knows(value):
                return TensorRef(self._known[id(value)])
            if value.dim():
                raise CannotRecordError(f"{func} takes a tensor that is no part of the state")
            return self._new_number(value.clone() if value.is_cuda else value.item())
        # bool is an int in Python; integers (powers, dimensions) stay as they are.
        return self._new_number(value) if lift and isinstance(value, float) else value

    def _new_number(self, value: Any) -> NumberRef:
        self.numbers.append(value)
        return NumberRef(len(self.numbers) - 1)


def record_step(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    run: torch.Tensor,
) -> RecordedStep:
    """Records the step that ``optimizer``, an object without groups or state of its own, makes on a
    run of elements like ``run`` (flat) with ``state``, under the settings of ``group``.

    Raises:
        CannotRecordError: the step creates state, or is no list of element-wise operators.
    """
    elements = {k: _stand_in(v) for k, v in state.items() if is_element_wise(k, v, run)}
    parameter, gradient = _stand_in(run), _stand_in(run)
    # One operator at a time for one tensor at a time: these are what compiles into one loop.
    plain = {k: False for k in ("foreach", "fused") if k in group}
    optimizer.param_groups = [{**group, **plain, "params": [parameter]}]
    optimizer.state[parameter] = {**_copied(state), **elements}
    parameter.grad = gradient
    recorder = _Recorder([parameter, gradient, *elements.values()])
    try:
        with recorder:
            compat.step_without_hooks(optimizer)
        left = optimizer.state.pop(parameter)
    except CannotRecordError:
        raise
    except Exception as error:
        raise CannotRecordError(f"it failed on stand-in elements: {error}") from error
    finally:
        optimizer.state.pop(parameter, None)
        optimizer.param_groups = []
    for key, value in left.items():
        if value is not elements.get(key) and (key in elements or recorder.knows(value)):
            raise CannotRecordError(f"the step makes a new state {key!r}")
    inputs = (PARAMETER, GRADIENT, *elements)
    update = RecordedUpdate(inputs, tuple(recorder.calls), len(recorder.numbers))
    scalars = {key: value for key, value in left.items() if key not in elements}
    return RecordedStep(update, tuple(recorder.numbers), scalars)


def _stand_in(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(_STAND_INS, dtype=like.dtype, device=like.device)


def is_element_wise(key: str, value: object, parameter: torch.Tensor) -> bool:
    """Whether a state entry holds a value for each element of ``parameter``."""
    # As torch does, "step" is known by its name: a scalar parameter's state has its shape too.
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == parameter.shape


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v.clone() if isinstance(v, torch.Tensor) and not v.dim() else v for k, v in state.items()
    }
