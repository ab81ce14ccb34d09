"""The sharded optimizer: the user's optimizer, stepping on this rank's elements only.

The user's object stays what it was: its groups, hyperparameters, schedulers and class. When its
``step`` runs, a twin of the same class runs in its place on flat tensors, one for each run of
elements that this rank owns, which view the parameters themselves (or fp32 masters of 16-bit
ones). The twin holds the state, 1/N of it on each rank.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fxcomm import compat
from fxcomm.errors import FxcommError
from fxcomm.runtime.arena import OwnedSegment, ShardedArena, accumulation_dtype
from fxcomm.runtime.gradient import ShardedGradient
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.probe import twin

Managed = Mapping[int, tuple[ManagedModel, ManagedParameter]]
"""Parameters by ``id``, with the model that manages them."""


@dataclass(frozen=True)
class ShardParameter:
    """A run of a parameter's elements as the twin sees it: ``tensor`` is what it updates, either
    the elements themselves or, if there is a ``rounded_to``, a more precise master copy, which is
    rounded to that dtype after a step."""

    segment: OwnedSegment
    tensor: torch.Tensor
    rounded_to: torch.dtype | None = None

    def refresh_master(self) -> None:
        """Takes over elements that someone changed since the last step (a loaded checkpoint)."""
        if self.rounded_to is not None:
            elements = self.segment.elements
            changed = elements != self.tensor.to(self.rounded_to)
            self.tensor.copy_(torch.where(changed, elements.to(self.tensor.dtype), self.tensor))

    def round_master(self) -> None:
        """Writes the updated master to the parameter's elements."""
        if self.rounded_to is not None:
            self.segment.elements.copy_(self.tensor.to(self.rounded_to))


Signature = tuple[tuple[tuple[int, bool], ...], ...]


def signature(optimizer: torch.optim.Optimizer) -> Signature:
    """The parameters that the optimizer holds, by ``id``, and whether each is trained."""
    return tuple(
        tuple((id(p), p.requires_grad) for p in group["params"]) for group in optimizer.param_groups
    )


def _shards(model: ManagedModel, p: ManagedParameter) -> list[ShardParameter]:
    arena = p.arena
    assert isinstance(arena, ShardedArena)
    dtype = p.parameter.dtype
    wanted, gathered = accumulation_dtype(dtype), arena.gather_dtype(dtype)
    if wanted == dtype == gathered:
        return [ShardParameter(segment, segment.elements) for segment in arena.owned(p)]
    return [
        ShardParameter(segment, segment.elements.to(wanted, copy=True), gathered)
        for segment in arena.owned(p)
    ]


@dataclass
class BucketUpdate:
    """The update of this rank's shard of one bucket. ``members`` are runs of its elements, each
    with the number of the optimizer's group that holds it."""

    model: ManagedModel
    arena: ShardedArena
    bucket: int
    optimizer: torch.optim.Optimizer
    members: list[tuple[int, ManagedParameter, ShardParameter]] = field(default_factory=list)

    def run(self, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> None:
        """Updates the shard from its final gradient, with the ``settings`` (attributes, with the
        state) and the hyperparameters that ``optimizer`` has now."""
        self.optimizer.__dict__.update(settings)
        members: dict[int, list[torch.Tensor]] = {}
        for number, p, shard in self.members:
            if isinstance(p.parameter.grad, ShardedGradient):
                shard.refresh_master()
                shard.tensor.grad = self.arena.owned_gradient(shard.segment)
                members.setdefault(number, []).append(shard.tensor)
        self.optimizer.param_groups = [
            {**optimizer.param_groups[number], "params": tensors}
            for number, tensors in members.items()
        ]
        if members:
            compat.step_without_hooks(self.optimizer)
        for _, _, shard in self.members:
            shard.tensor.grad = None
            shard.round_master()


def _updates_parameters_one_by_one(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step on some parameters and then on the others is a step on all: true of torch's
    own optimizers, unknown of the user's, which may count their steps, for example."""
    return type(optimizer).__module__.startswith("torch.optim.")


class MovedState(defaultdict[Any, dict[str, Any]]):
    """The ``state`` of an adopted optimizer: empty, and says so where that could pass unseen."""

    def _refuse(self, *args: object) -> Any:
        raise FxcommError(
            "the optimizer's state is sharded over the ranks. Call optimizer.state_dict() on every "
            "rank for the whole state."
        )

    __missing__ = __deepcopy__ = __reduce_ex__ = __copy__ = _refuse


class AdoptedOptimizer:
    """The sharded side of one user optimizer. Holds no reference to it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        managed: Managed,
        previous: AdoptedOptimizer | None = None,
    ) -> None:
        """Adopts ``optimizer``, whose parameters in ``managed`` all lie in sharded arenas; other
        parameters that it holds stay as they are. State that it already has is cut to shards;
        ``previous`` is its earlier adoption, with fewer parameters."""
        self.twin = self._stand_in = twin(optimizer)
        self._managed = dict(managed)
        self._signature = signature(optimizer)
        self._incoming: dict[str, Any] | None = None
        known: dict[int, list[ShardParameter]] = {} if previous is None else previous._shards
        self._shards: dict[int, list[ShardParameter]] = {
            key: known[key] if key in known else _shards(model, p)
            for key, (model, p) in managed.items()
        }
        for group in optimizer.param_groups:
            tensors = [t for parameter in group["params"] for t in self._tensors(parameter)]
            self.twin.param_groups.append({**group, "params": tensors})
        self._buckets = self._by_bucket(optimizer)
        if previous is not None:
            self.twin.state.update(previous.twin.state)
        self._take_state(optimizer.param_groups, optimizer.state)
        optimizer.state = MovedState()

    def _tensors(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        shards = self._shards.get(id(parameter))
        return [parameter] if shards is None else [shard.tensor for shard in shards]

    def _by_bucket(self, optimizer: torch.optim.Optimizer) -> list[BucketUpdate]:
        """An update for each bucket of each arena, in the plan's order."""
        arenas = dict.fromkeys(cast(ShardedArena, p.arena) for _, p in self._managed.values())
        owner = {p.arena: model for model, p in self._managed.values()}
        updates = {
            (arena, bucket): BucketUpdate(owner[arena], arena, bucket, twin(optimizer))
            for arena in arenas
            for bucket in arena.plan.gather_order
        }
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                for shard in self._shards.get(id(parameter), ()):
                    _, p = self._managed[id(parameter)]
                    key = cast(ShardedArena, p.arena), shard.segment.bucket
                    updates[key].members.append((number, p, shard))
        return list(updates.values())

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer still holds just the parameters with which it was adopted."""
        return self._signature == signature(optimizer)

    def stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that runs a step in the user's place."""
        del optimizer
        return self._stand_in

    @property
    def models(self) -> list[ManagedModel]:
        """The models whose parameters it updates."""
        return list(dict.fromkeys(model for model, _ in self._managed.values()))

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return sum(
            value.numel() * value.itemsize
            for entry in self.twin.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )

    # --- a step ---

    def before_step(self, optimizer: torch.optim.Optimizer, *, alone: bool) -> None:
        """Gives the twin the user's present settings and the final gradients.

        ``alone`` says that nothing else of the user's runs in this step, no closure and no hook.
        Then, for an optimizer of torch's own, every bucket is updated here, as soon as it is
        reduced, and its gather started; only what fxcomm does not manage is left for the step.
        """
        for model in self.models:
            model.finish_gathers()
        self._copy_settings(optimizer)
        for _, p in self._managed.values():
            p.keep_bound()
        self._stand_in = self.twin
        if alone and _updates_parameters_one_by_one(optimizer) and self._settle_presence():
            self._update_buckets(optimizer)
            self._stand_in = self._rest(optimizer)
            return
        for shards in self._shards.values():
            for shard in shards:
                shard.refresh_master()
        self.take_gradients()

    def _settle_presence(self) -> bool:
        for model in self.models:
            model.take_assigned()
        settled = [model.settle_presence() for model in self.models]
        return all(settled)

    def _update_buckets(self, optimizer: torch.optim.Optimizer) -> None:
        settings = {k: v for k, v in self.twin.__dict__.items() if not k.startswith("_optimizer_")}
        for update in self._buckets:
            update.model.settle_bucket(update.arena, update.bucket)
            update.run(optimizer, settings)
            update.arena.start_gather(update.bucket)
        for model in self.models:
            model.finish()

    def _rest(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer of the parameters that fxcomm does not manage."""
        rest = twin(optimizer)
        rest.state = self.twin.state
        rest.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) not in self._shards]}
            for group in optimizer.param_groups
        ]
        return rest

    def _copy_settings(self, optimizer: torch.optim.Optimizer) -> None:
        kept = {name: self.twin.__dict__[name] for name in ("param_groups", "state")}
        hooks = {k: v for k, v in self.twin.__dict__.items() if k.startswith("_optimizer_")}
        self.twin.__dict__.clear()
        self.twin.__dict__.update({**optimizer.__dict__, **hooks, **kept})
        self.twin.__dict__.pop("step", None)
        _copy_hyperparameters(optimizer, self.twin)

    def take_gradients(self) -> None:
        """Waits for the reductions in flight and points the twin at this rank's gradients."""
        for model in self.models:
            model.settle()
            model.take_assigned()
        for key, (model, p) in self._managed.items():
            present = isinstance(p.parameter.grad, ShardedGradient)
            shards = self._shards[key]
            gradients = model.gradient_shards(p) if present else [None] * len(shards)
            for shard, gradient in zip(shards, gradients, strict=True):
                shard.tensor.grad = gradient

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Rounds masters, gathers the updated parameters on every rank, and hands back what the
        step changed in the user's groups."""
        if self._stand_in is self.twin:
            self._finish_whole_step(optimizer)
        for update in self._buckets:
            update.arena.end_step()
        for _, p in self._managed.values():
            # What an in-place update of the parameter would do: a graph that saved the old value
            # must refuse to run backward.
            torch.autograd.graph.increment_version(p.parameter)

    def _finish_whole_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What is left to do when the twin has updated everything at once."""
        for shards in self._shards.values():
            for shard in shards:
                shard.tensor.grad = None
                shard.round_master()
        _copy_hyperparameters(self.twin, optimizer)
        for name, value in self.twin.__dict__.items():
            if name not in ("param_groups", "state") and not name.startswith("_optimizer_"):
                optimizer.__dict__[name] = value
        for update in self._buckets:
            update.arena.start_gather(update.bucket)

    # --- state ---

    def _take_state(
        self, groups: Sequence[dict[str, Any]], state: MutableMapping[Any, dict[str, Any]]
    ) -> None:
        """Moves ``state``, by whole parameter, into the twin, cut to this rank's elements."""
        for parameter in [p for group in groups for p in group["params"]]:
            entry = state.pop(parameter, None)
            if not entry:
                continue
            if id(parameter) not in self._managed:
                self.twin.state[parameter] = entry
                continue
            _, p = self._managed[id(parameter)]
            for shard in self._shards[id(parameter)]:
                self.twin.state[shard.tensor] = {
                    key: _cut(key, value, p, shard) for key, value in entry.items()
                }

    def expect_state(self, state_dict: dict[str, Any]) -> None:
        """Remembers a state dict that the user's optimizer is about to load. Torch would round its
        state to the parameters' dtype; the masters' state must stay as precise as it was saved."""
        self._incoming = state_dict

    def load_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the state that the user's optimizer has just loaded."""
        incoming, self._incoming = self._incoming, None
        assert incoming is not None, "a state dict was loaded unannounced"
        saved = [i for group in incoming["param_groups"] for i in group["params"]]
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        for i, parameter in zip(saved, mine, strict=True):
            if accumulation_dtype(parameter.dtype) != parameter.dtype and i in incoming["state"]:
                optimizer.state[parameter] = dict(incoming["state"][i])
        self.twin.state.clear()
        self._take_state(optimizer.param_groups, optimizer.state)
        optimizer.state = MovedState()

    def full_state(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """The state of every parameter as an unsharded optimizer would hold it, by position.

        Collective: every rank of every model calls it.
        """
        for model in self.models:
            model.settle()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        schemas = self._schemas(parameters)
        whole = {}
        for position, (parameter, schema) in enumerate(zip(parameters, schemas, strict=True)):
            entry = {key: self._whole(parameter, key, kind) for key, kind in schema.items()}
            if entry:
                whole[position] = entry
        return whole

    def _schemas(self, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        """For each parameter and entry of its state: the dtype if it has a value for each element,
        else the value. Ranks without elements of a parameter learn it from those that have some."""
        mine = [self._schema(parameter) for parameter in parameters]
        for model in self.models:
            everyone = model.gather_objects(mine)
            mine = [next(filter(None, entries), {}) for entries in zip(*everyone, strict=True)]
        return mine

    def _schema(self, parameter: nn.Parameter) -> dict[str, Any]:
        tensors = self._tensors(parameter)
        if not tensors or tensors[0] not in self.twin.state:
            return {}
        tensor = tensors[0]
        if tensor is parameter:
            return dict(self.twin.state[parameter])
        return {
            key: value.dtype if _is_element_wise(key, value, tensor) else value
            for key, value in self.twin.state[tensor].items()
        }

    def _whole(self, parameter: nn.Parameter, key: str, kind: Any) -> Any:
        if not isinstance(kind, torch.dtype):
            return copy.deepcopy(kind)
        _, p = self._managed[id(parameter)]
        assert isinstance(p.arena, ShardedArena)
        pieces = [self.twin.state[s.tensor][key] for s in self._shards[id(parameter)]]
        return p.arena.gather_whole(p, pieces, kind)


def _copy_hyperparameters(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours.update({key: value for key, value in theirs.items() if key != "params"})


def _is_element_wise(key: str, value: Any, parameter: torch.Tensor) -> bool:
    # As torch does, "step" is known by its name: a scalar parameter's state has its shape too.
    return isinstance(value, torch.Tensor) and key != "step" and value.shape == parameter.shape


def _cut(key: str, value: Any, p: ManagedParameter, shard: ShardParameter) -> Any:
    if not _is_element_wise(key, value, p.parameter):
        return copy.deepcopy(value)
    part = shard.segment.of_parameter(p.flatten(value))
    dtype = shard.tensor.dtype if value.is_floating_point() else value.dtype
    return part.to(device=shard.tensor.device, dtype=dtype, copy=True)
