"""The sharded optimizer: the user's optimizer, stepping on this rank's elements only.

The user's object stays what it was: its groups, hyperparameters, schedulers and class. When its
``step`` runs, a twin of the same class runs in its place on flat tensors, one for each run of
elements that this rank owns, which view the parameters themselves (or fp32 masters of 16-bit
ones). The twin holds the state, 1/N of it on each rank.

Buckets are updated one by one where that is known to be the same, and then by one compiled loop for
each run instead of the twin's many operators.
"""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxcomm.analysis.measured import EventKind
from fxcomm.errors import FxcommError
from fxcomm.runtime.arena import Arena, OwnedSegment, ShardedArena, accumulation_dtype
from fxcomm.runtime.gradient import ShardedGradient
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.probe import twin
from fxcomm.runtime.recording import is_element_wise
from fxcomm.runtime.run_updater import RunUpdater
from fxcomm.runtime.update import History, Member, UpdateRun, form_runs, split_by_presence

Managed = Mapping[int, tuple[ManagedModel, ManagedParameter]]
"""Parameters by ``id``, with the model that manages them."""

Signature = tuple[tuple[tuple[int, bool], ...], ...]


def signature(optimizer: torch.optim.Optimizer) -> Signature:
    """The parameters that the optimizer holds, by ``id``, and whether each is trained."""
    return tuple(
        tuple((id(p), p.requires_grad) for p in group["params"]) for group in optimizer.param_groups
    )


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
    """The sharded side of one user optimizer, which it does not keep alive."""

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
        self._updater = RunUpdater(twin(optimizer))
        self._managed = dict(managed)
        self._signature = signature(optimizer)
        self._incoming: dict[str, Any] | None = None
        self._cohorts = itertools.count()
        self._runs: list[UpdateRun] = []
        self._updated: set[UpdateRun] = set()  # in this step
        self._runs_in: dict[tuple[ShardedArena, int], list[UpdateRun]] = {}
        state = dict(optimizer.state)
        for group in optimizer.param_groups:
            self.twin.param_groups.append({**group, "params": []})
        if previous is not None:
            state.update(previous._state_of_others())
        known = {} if previous is None else previous._histories()
        self._form_runs(optimizer, state, known)
        optimizer.state = MovedState()
        self._optimizer = weakref.ref(optimizer)
        self._open = False
        for arena in self._arenas:
            arena.updaters.add(self)
            if previous is not None:
                arena.updaters.discard(previous)

    # --- runs ---

    def _members(self, optimizer: torch.optim.Optimizer) -> list[Member]:
        return [
            Member(*self._managed[id(parameter)], segment, number)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._managed
            for segment in _owned(self._managed[id(parameter)][1])
        ]

    def _form_runs(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[torch.Tensor, Mapping[str, Any]],
        known: Mapping[tuple[int, int, int], History],
    ) -> None:
        """Makes the runs anew. ``state`` is by whole parameter and goes before what is ``known`` of
        members."""

        # Of a parameter with one element, a count looks like a value for each element.
        counts = {
            key
            for parameter, entry in state.items()
            for key, value in entry.items()
            if parameter.dim() and isinstance(value, torch.Tensor) and not value.dim()
        }

        def history(member: Member) -> History:
            earlier = known.get(member.key, History({}))
            entry = state.get(member.parameter.parameter)
            if entry is None:
                return earlier
            cut = {key: _cut(key, value, member, key in counts) for key, value in entry.items()}
            return History(cut, earlier.master)

        self.twin.state.clear()
        for parameter, entry in state.items():
            if id(parameter) not in self._managed:
                self.twin.state[parameter] = dict(entry)
        formed = form_runs(self._members(optimizer), history)
        self._runs = [run for run, _ in formed]
        self._cohorts = itertools.count(1 + max((run.cohort for run in self._runs), default=0))
        for run, entry in formed:
            if entry:
                self.twin.state[run.tensor] = entry
        self._list_runs(optimizer)

    def _list_runs(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the twin's groups the runs, in place: the twin may be in its step."""
        self._runs_in = defaultdict(list)
        for run in self._runs:
            self._runs_in[run.bucket].append(run)
        for number, (theirs, ours) in enumerate(
            zip(optimizer.param_groups, self.twin.param_groups, strict=True)
        ):
            others = [p for p in theirs["params"] if id(p) not in self._managed]
            ours["params"][:] = others + [run.tensor for run in self._runs if run.group == number]

    def _split_runs(self, optimizer: torch.optim.Optimizer) -> None:
        """Cuts runs whose members do not all have a gradient, or all have none, and separates
        cohorts of which some runs have gradients and others have none."""
        presence = [[member.present for member in run.members] for run in self._runs]
        if not all(all(present) for present in presence):
            self._split_by(presence, optimizer)

    def _split_by(
        self, presence: Sequence[Sequence[bool]], optimizer: torch.optim.Optimizer
    ) -> None:
        absent: dict[int, int] = defaultdict(lambda: next(self._cohorts))
        runs: list[UpdateRun] = []
        for run, present in zip(self._runs, presence, strict=True):
            if all(present):
                runs.append(run)
            elif not any(present):
                # Its state stands still while that of its cohort goes on.
                run.cohort = absent[run.cohort]
                runs.append(run)
            else:
                state = self.twin.state.pop(run.tensor, {})
                for part, entry in split_by_presence(run, state, absent[run.cohort]):
                    runs.append(part)
                    if entry:
                        self.twin.state[part.tensor] = entry
        self._runs = runs
        self._list_runs(optimizer)

    def _histories(self) -> dict[tuple[int, int, int], History]:
        """What every member would bring into another run."""
        return {
            member.key: History(
                {
                    key: run.part(member, value) if run.holds(key, value) else value
                    for key, value in self.twin.state.get(run.tensor, {}).items()
                },
                run.part(member, run.tensor) if run.rounded else None,
            )
            for run in self._runs
            for member in run.members
        }

    def move_state(self, old: ShardedArena) -> None:
        """Takes the state of parameters that lay in ``old`` to where they lie now, element for
        element. Collective: every rank that holds the optimizer calls it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        moved = set(old.parameters)
        managed = [p for _, p in self._managed.values() if p in moved]
        parameters = [p.parameter for p in managed]
        schemas = dict(zip(map(id, parameters), self._schemas(parameters), strict=True))
        histories = self._histories()
        members = [m for m in self._members(optimizer) if id(m.parameter.parameter) in schemas]
        for p in managed:
            histories.update(self._moved(p, old, schemas[id(p.parameter)], members))
        self._form_runs(optimizer, self._state_of_others(), histories)
        for arena in self._arenas:
            arena.updaters.add(self)

    def _moved(
        self,
        p: ManagedParameter,
        old: ShardedArena,
        schema: Mapping[str, Any],
        members: Sequence[Member],
    ) -> dict[tuple[int, int, int], History]:
        """What the present ``members`` of a parameter bring from its place in ``old``."""
        mine = [member for member in members if member.parameter is p]
        states: dict[tuple[int, int, int], dict[str, Any]] = {m.key: {} for m in mine}
        for key, kind in schema.items():
            whole = self._whole(p.parameter, key, kind, old)
            for member in mine:
                part = _part_of(p, member, whole) if isinstance(kind, torch.dtype) else whole
                states[member.key][key] = copy.deepcopy(part)
        masters = self._whole_master(p, old)
        return {
            m.key: History(
                states[m.key], None if masters is None else _part_of(p, m, masters).clone()
            )
            for m in mine
        }

    def _whole_master(self, p: ManagedParameter, old: ShardedArena) -> torch.Tensor | None:
        """The more precise copy of a parameter, if there is one."""
        dtype = accumulation_dtype(p.parameter.dtype)
        if dtype == p.parameter.dtype == old.gather_dtype(p.parameter.dtype):
            return None
        pieces = [run.part(member, run.tensor) for run, member in self._pieces(p.parameter)]
        return old.gather_whole(p, pieces, dtype)

    def _state_of_others(self) -> dict[Any, dict[str, Any]]:
        """State of the parameters that fxcomm does not manage."""
        runs = {id(run.tensor) for run in self._runs}
        return {p: entry for p, entry in self.twin.state.items() if id(p) not in runs}

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
    def _arenas(self) -> list[ShardedArena]:
        arenas = dict.fromkeys(p.arena for _, p in self._managed.values())
        return [arena for arena in arenas if isinstance(arena, ShardedArena)]

    def _buckets(self) -> Iterator[tuple[ManagedModel, ShardedArena, int]]:
        """The buckets of every arena, in the plan's order."""
        models = {p.arena: model for model, p in self._managed.values()}
        for arena, model in models.items():
            assert isinstance(arena, ShardedArena)
            for bucket in arena.plan.gather_order:
                yield model, arena, bucket

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
        applied = any(arena.applied for arena in self._arenas)
        if not applied:
            self._open = False  # a step that failed may have left it so
        self._open_step(optimizer)
        bucketwise = (alone or applied) and _updates_parameters_one_by_one(optimizer)
        if bucketwise and self._settle_presence():
            self._update_buckets(optimizer)
            self._stand_in = self._rest(optimizer)
            return
        if applied:
            raise FxcommError(
                "the backward has updated some parameters already, and this step cannot go on with "
                "the others alone (a closure, or a gradient that was assigned or never reduced). "
                'Use options={"update": "at_step"}.'
            )
        self._stand_in = self.twin
        for run in self._runs:
            run.refresh_master()
        self.take_gradients(optimizer)

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins a step, in its backward or when it is called: from here on the user's settings
        are those of now."""
        if self._open:
            return
        self._open = True
        self._updated.clear()
        for model in self.models:
            model.finish_gathers()
        self._copy_settings(optimizer)
        for _, p in self._managed.values():
            p.keep_bound()
        self._updater.begin(self.twin)

    def update_in_backward(self, arena: ShardedArena, bucket: int) -> bool:
        """Updates a bucket, whose gradient is final, before the step is called, and starts its
        gather; False if it must stay for the step."""
        optimizer = self._optimizer()
        # A step that runs (with a closure that calls backward) updates everything itself.
        stepping = self._open and not any(a.applied for a in self._arenas)
        if optimizer is None or stepping or not self.covers(optimizer):
            return False
        if not _updates_parameters_one_by_one(optimizer):
            return False
        self._open_step(optimizer)
        start = time.perf_counter()
        self._update_runs(arena, bucket)
        arena.meter.note(EventKind.UPDATE, bucket, start, time.perf_counter())
        arena.start_gather(bucket)
        return True

    def _settle_presence(self) -> bool:
        for model in self.models:
            model.take_assigned()
        settled = [model.settle_presence() for model in self.models]
        return all(settled)

    def _rest(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """An optimizer of the parameters that fxcomm does not manage."""
        rest = twin(optimizer)
        rest.state = self.twin.state
        rest.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) not in self._managed]}
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

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Waits for the reductions in flight and points the twin at this rank's gradients."""
        for model in self.models:
            model.settle()
            model.take_assigned()
        self._split_runs(optimizer)
        for run in self._runs:
            run.tensor.grad = None
            if run.members[0].present:
                for member in run.members:
                    member.model.gradient_shards(member.parameter)
                run.tensor.grad = run.gradient()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Rounds masters, gathers the updated parameters on every rank, and hands back what the
        step changed in the user's groups."""
        if self._stand_in is self.twin:
            self._finish_whole_step(optimizer)
        self._open = False
        for arena in self._arenas:
            arena.end_step()
        for _, p in self._managed.values():
            gradient = p.parameter.grad
            if isinstance(gradient, ShardedGradient):
                gradient.applied = False
            # What an in-place update of the parameter would do: a graph that saved the old value
            # must refuse to run backward.
            torch.autograd.graph.increment_version(p.parameter)

    def _finish_whole_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What is left to do when the twin has updated everything at once."""
        for run in self._runs:
            run.tensor.grad = None
            run.round_master()
        _copy_hyperparameters(self.twin, optimizer)
        for name, value in self.twin.__dict__.items():
            if name not in ("param_groups", "state") and not name.startswith("_optimizer_"):
                optimizer.__dict__[name] = value
        for _, arena, bucket in self._buckets():
            arena.start_gather(bucket)

    # --- bucket by bucket ---

    def _update_buckets(self, optimizer: torch.optim.Optimizer) -> None:
        self._split_runs(optimizer)
        for model, arena, bucket in self._buckets():
            applied = bucket in arena.applied
            start = time.perf_counter()
            if not applied:
                model.settle_bucket(arena, bucket)
            self._update_runs(arena, bucket)
            model.meter.note(EventKind.UPDATE, bucket, start, time.perf_counter())
            if not applied:
                arena.start_gather(bucket)
        for model in self.models:
            model.finish()

    def _update_runs(self, arena: ShardedArena, bucket: int) -> None:
        for run in self._runs_in[arena, bucket]:
            # An empty parameter is in no bucket's reduction; its gradient may come later.
            if run.members[0].present and run not in self._updated:
                self._updater.update(run)
                self._updated.add(run)

    # --- state ---

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
        masters = {key: History({}, known.master) for key, known in self._histories().items()}
        self._form_runs(optimizer, dict(optimizer.state), masters)
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
            arena = self._arena_of(parameter)
            entry = {key: self._whole(parameter, key, kind, arena) for key, kind in schema.items()}
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
        if id(parameter) not in self._managed:
            return dict(self.twin.state.get(parameter, {}))
        pieces = self._pieces(parameter)
        if not pieces:
            return {}
        run, _ = pieces[0]
        return {
            key: value.dtype if run.holds(key, value) else value
            for key, value in self.twin.state.get(run.tensor, {}).items()
        }

    def _pieces(self, parameter: nn.Parameter) -> list[tuple[UpdateRun, Member]]:
        """This rank's elements of a parameter: the runs that they lie in, in order."""
        found = [
            (run, member)
            for run in self._runs
            for member in run.members
            if member.parameter.parameter is parameter
        ]
        return sorted(found, key=lambda piece: piece[1].segment.parameter_offset)

    def _arena_of(self, parameter: nn.Parameter) -> Arena | None:
        entry = self._managed.get(id(parameter))
        return None if entry is None else entry[1].arena

    def _whole(self, parameter: nn.Parameter, key: str, kind: Any, arena: Arena | None) -> Any:
        """An entry of a parameter's state, whose pieces lie where ``arena`` says."""
        if not isinstance(kind, torch.dtype):
            return copy.deepcopy(kind)
        _, p = self._managed[id(parameter)]
        assert isinstance(arena, ShardedArena)
        pieces = [
            run.part(member, self.twin.state[run.tensor][key])
            for run, member in self._pieces(parameter)
        ]
        return arena.gather_whole(p, pieces, kind)


def _copy_hyperparameters(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours.update({key: value for key, value in theirs.items() if key != "params"})


def _owned(p: ManagedParameter) -> list[OwnedSegment]:
    assert isinstance(p.arena, ShardedArena)
    return p.arena.owned(p)


def _part_of(p: ManagedParameter, member: Member, whole: torch.Tensor) -> torch.Tensor:
    """A member's elements of a tensor of its parameter's shape."""
    return member.segment.of_parameter(p.flatten(whole))


def _cut(key: str, value: Any, member: Member, is_count: bool) -> Any:
    """A member's part of a state entry of its whole parameter."""
    p, segment = member.parameter, member.segment
    if is_count or not is_element_wise(key, value, p.parameter):
        return copy.deepcopy(value)
    part = segment.of_parameter(p.flatten(value))
    floating = value.is_floating_point()
    dtype = accumulation_dtype(segment.elements.dtype) if floating else value.dtype
    return part.to(device=segment.elements.device, dtype=dtype, copy=True)
