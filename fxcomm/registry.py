"""Which model manages a parameter, and which sharded optimizer stands behind a user's.

A Dynamo backend is a function that torch calls with a graph, and an optimizer's step is a method
that the user calls; neither hands over any state of ours. This registry is where they find it: the
one place in fxcomm that outlives a call. It holds nothing alive that the user has dropped.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from fxcomm import compat
from fxcomm.errors import UnsupportedModelError
from fxcomm.passes.update import implement_update_bucket
from fxcomm.runtime.adoption import ReplicatedOptimizer, adopt
from fxcomm.runtime.in_flight import InFlightParameters
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.open_groups import OpenGroups
from fxcomm.runtime.optimizer import AdoptedOptimizer, Managed
from fxcomm.runtime.parameters import ManagedParameter


class Registry:
    """See the module's docstring."""

    def __init__(self) -> None:
        # Values are weak as well: a managed model holds its parameters.
        self._owner = WeakTensorKeyDictionary()
        self._by_root: weakref.WeakKeyDictionary[nn.Module, ManagedModel] = (
            weakref.WeakKeyDictionary()
        )
        self._adopted = WeakIdKeyDictionary()
        self._serials = itertools.count()
        self._by_serial: weakref.WeakValueDictionary[int, ManagedModel] = (
            weakref.WeakValueDictionary()
        )
        self._silent: list[nn.Module] = []
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._strangers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.in_flight = InFlightParameters()
        self.groups = OpenGroups()
        self._frame_has_waits = False

    def begin(self, backend: Callable[..., Any]) -> None:
        """Hooks into every optimizer's step, and makes reads of parameters wait for their new
        values, wherever they come from. ``backend`` is the function that torch calls."""
        self._backend = backend
        register_optimizer_step_pre_hook(self._before_step)
        compat.watch_parameter_reads(self.in_flight.before_read)
        compat.watch_compiled_frames(self._frame_compiled)
        implement_update_bucket(self._update_bucket)
        atexit.register(self.in_flight.finish_all)

    def graph_with_waits(self) -> None:
        """The frame that Dynamo compiles now has a graph that waits for its parameters."""
        self._frame_has_waits = True

    def _frame_compiled(self, name: str, passes_on: bool, has_parameters: bool) -> None:
        waits, self._frame_has_waits = self._frame_has_waits, False
        if passes_on or (has_parameters and not waits):
            # What the frame can reach is what the model being called holds.
            callers = compat.modules_on_stack()
            self.in_flight.cannot_see(name, callers[-1].parameters() if callers else None)

    def next_number(self, ranks: Iterable[int]) -> int:
        """A number for a new model on ``ranks``, the same on each of them if they make the same
        models on these ranks, whatever they make on others."""
        key = tuple(ranks)
        self._counts[key] += 1
        return self._counts[key]

    def add(self, model: ManagedModel, root: nn.Module | None) -> None:
        """Registers a model and its parameters; ``root`` keeps the model alive."""
        if root is not None:
            self._by_root[root] = model
        model.serial = next(self._serials)
        self._by_serial[model.serial] = model
        self.refresh(model)
        for module in self._silent:
            if model in self.models_in(module):
                model.silence(1)

    def _update_bucket(
        self,
        reduced: torch.Tensor,
        packed: torch.Tensor | None,
        model: int,
        arena: int,
        bucket: int,
    ) -> None:
        """What ``fxcomm::update_bucket`` does in a backward graph, which knows numbers only."""
        owner = self._by_serial[model]
        if packed is None:
            owner.update_in_backward(arena, bucket, None, None, reduced)
        else:
            owner.update_in_backward(arena, bucket, packed, reduced, None)

    def refresh(self, model: ManagedModel) -> None:
        """Registers parameters that were added to a model."""
        for managed in model.parameters:
            self._owner[managed.parameter] = (weakref.ref(model), weakref.ref(managed))

    def find(self, parameter: torch.Tensor) -> tuple[ManagedModel, ManagedParameter] | None:
        """The model that manages a parameter, and the parameter as it knows it."""
        entry = self._owner.get(parameter)
        if entry is None:
            return None
        model, managed = entry[0](), entry[1]()
        return None if model is None or managed is None else (model, managed)

    def models_of(self, parameters: Iterable[torch.Tensor]) -> list[ManagedModel]:
        """The models that manage any of the parameters, in order of appearance."""
        found = (self.find(p) for p in parameters)
        return list(dict.fromkeys(entry[0] for entry in found if entry is not None))

    def models_in(self, module: nn.Module) -> list[ManagedModel]:
        """The models that manage any parameter inside ``module``. Waits for none of their gathers,
        as asking the module for its parameters would."""
        held = (p for part in module.modules() for p in part._parameters.values())
        return self.models_of(p for p in held if p is not None)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Silences the models inside ``module``, also those whose first forward comes later."""
        self._silent.append(module)
        for model in self.models_in(module):
            model.silence(1)
        try:
            yield
        finally:
            self._silent.remove(module)
            for model in self.models_in(module):
                model.silence(-1)

    def managed(self, optimizer: torch.optim.Optimizer) -> Managed:
        """The optimizer's managed parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = {id(p): self.find(p) for p in parameters}
        return {key: entry for key, entry in found.items() if entry is not None}

    def adopted(
        self, optimizer: torch.optim.Optimizer
    ) -> AdoptedOptimizer | ReplicatedOptimizer | None:
        """What stands behind a user's optimizer, None before its first step."""
        found: AdoptedOptimizer | ReplicatedOptimizer | None = self._adopted.get(optimizer)
        return found

    # --- hooks on every optimizer ---

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Puts the sharded twin in the optimizer's place for the step that is about to run."""
        adopted = self.adopted(optimizer)
        if adopted is None or not adopted.covers(optimizer):
            if not self.managed(optimizer):
                self._refuse_skipped(optimizer)
                return None
            if adopted is None:
                compat.first_step_post_hook(optimizer, self._after_step)
                self._hook_state(optimizer)
            adopted = self._adopted[optimizer] = adopt(optimizer, self, adopted)
        # One hook is this one.
        alone = _closure(args, kwargs) is None and compat.step_pre_hooks(optimizer) == 1
        adopted.before_step(optimizer, alone=alone)
        args, kwargs = _with_closure(args, kwargs, lambda: adopted.take_gradients(optimizer))
        return (adopted.stand_in(optimizer), *args[1:]), kwargs

    def _refuse_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Dynamo may give up on a whole forward and run it eagerly; then fxcomm never hears of the
        model, and ranks would drift apart."""
        if optimizer in self._strangers:
            return
        self._strangers.add(optimizer)
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        trained = {
            id(p)
            for group in optimizer.param_groups
            for p in group["params"]
            if isinstance(p, nn.Parameter) and p.grad is not None
        }
        if not trained:
            return  # an optimizer of plain tensors; looking for modules takes long
        for module in compat.modules_compiled_with(self._backend):
            if any(id(p) in trained for p in module.parameters()):
                raise UnsupportedModelError(
                    f"Dynamo compiled no part of {type(module).__name__} and ran it eagerly, so "
                    "its gradients are this rank's alone. TORCH_LOGS=graph_breaks shows why (an "
                    "nn.LSTM in the forward, for example): move what cannot be compiled into a "
                    "method under torch.compiler.disable, or compile the parts that can be."
                )

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        adopted = self.adopted(optimizer)
        if adopted is not None:
            adopted.after_step(optimizer)
            for model in adopted.models:
                model.end_step()

    def _hook_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's state dict the whole one, in both directions."""
        optimizer.register_state_dict_post_hook(self._fill_state)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def _fill_state(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        adopted = self.adopted(optimizer)
        if isinstance(adopted, AdoptedOptimizer):
            state_dict["state"] = adopted.full_state(optimizer)
        return state_dict

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        adopted = self.adopted(optimizer)
        if isinstance(adopted, AdoptedOptimizer):
            adopted.expect_state(state_dict)

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        adopted = self.adopted(optimizer)
        if isinstance(adopted, AdoptedOptimizer):
            adopted.load_state(optimizer)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The step's arguments with ``after`` run behind each call of the closure, if there is one."""
    closure = _closure(args, kwargs)
    if closure is None:
        return args, kwargs

    def wrapped() -> Any:
        loss = closure()
        after()
        return loss

    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


REGISTRY = Registry()
