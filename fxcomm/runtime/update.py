"""Runs of elements that an optimizer updates together, and how one run is updated.

A run is a range of this rank's shard of one bucket whose elements one group of the optimizer holds.
Element-wise optimizers do not care where a parameter ends, so that a run spans parameters, as long
as all of them have a gradient or none has, and as long as they have been updated equally often.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fxcomm.runtime.arena import OwnedSegment, ShardedArena, accumulation_dtype
from fxcomm.runtime.gradient import ShardedGradient
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.recording import RecordedUpdate, is_element_wise, replay


@dataclass(frozen=True)
class Member:
    """Elements of one parameter that this rank owns in one bucket, and the number of the
    optimizer's group that holds the parameter."""

    model: ManagedModel
    parameter: ManagedParameter
    segment: OwnedSegment
    group: int

    @property
    def present(self) -> bool:
        """Whether the parameter has a gradient."""
        return isinstance(self.parameter.parameter.grad, ShardedGradient)

    @property
    def arena(self) -> ShardedArena:
        """The arena that the parameter lies in."""
        return cast(ShardedArena, self.parameter.arena)

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells members apart: they are made anew when an optimizer is adopted again."""
        return id(self.parameter.parameter), self.segment.bucket, self.segment.parameter_offset


@dataclass(eq=False)
class UpdateRun:
    """See the module's docstring. ``tensor`` is what is updated: the elements themselves or, if
    they are of low precision, a more precise master copy, which is rounded to them after an update.
    Runs of one ``cohort`` were updated equally often: their state differs in elements only."""

    members: tuple[Member, ...]
    elements: torch.Tensor
    tensor: torch.Tensor
    cohort: int = 0

    @property
    def group(self) -> int:
        """The number of the optimizer's group that holds the run."""
        return self.members[0].group

    @property
    def bucket(self) -> tuple[ShardedArena, int]:
        """Where the run lies."""
        return self.members[0].arena, self.members[0].segment.bucket

    @property
    def rounded(self) -> bool:
        """Whether the run has a master copy."""
        return self.tensor is not self.elements

    @property
    def rounded_dtype(self) -> torch.dtype:
        """The dtype to which a master is rounded: that in which the elements travel."""
        return self.bucket[0].gather_dtype(self.elements.dtype)

    @property
    def start(self) -> int:
        """The run's first element in the shard."""
        return self.members[0].segment.shard_offset

    def part(self, member: Member, values: torch.Tensor) -> torch.Tensor:
        """The elements of ``member`` in a tensor with a value for each of the run's."""
        start = member.segment.shard_offset - self.start
        return values[start : start + member.segment.numel]

    def holds(self, key: str, value: object) -> bool:
        """Whether an entry of the run's state holds a value for each element."""
        return is_element_wise(key, value, self.tensor)

    def gradient(self) -> torch.Tensor:
        """The run's mean gradient, as it is kept."""
        arena, bucket = self.bucket
        return arena.shard_gradient(bucket)[self.start : self.start + self.elements.numel()]

    def refresh_master(self) -> None:
        """Takes over elements that someone changed since the last step (a loaded checkpoint)."""
        if self.rounded:
            refresh_master(self.tensor, self.elements, self.rounded_dtype)

    def round_master(self) -> None:
        """Writes the updated master to the parameters' elements."""
        if self.rounded:
            self.elements.copy_(self.tensor.to(self.rounded_dtype))


def refresh_master(master: torch.Tensor, elements: torch.Tensor, rounded: torch.dtype) -> None:
    """Overwrites those of ``master`` that do not round to ``elements``."""
    changed = elements != master.to(rounded)
    master.copy_(torch.where(changed, elements.to(master.dtype), master))


# --- making runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """What a member brings into a run: its state, and its master copy if it has one."""

    state: Mapping[str, Any]
    master: torch.Tensor | None = None


def form_runs(
    members: Sequence[Member], history_of: Callable[[Member], History]
) -> list[tuple[UpdateRun, dict[str, Any]]]:
    """The longest possible runs of ``members``, with their state, in order of bucket and place.

    Parameters with other state than their neighbours' (never updated, or not as often) begin a run
    of their own.
    """
    histories = {member.key: history_of(member) for member in members}
    cohorts: dict[object, int] = {}

    def cohort(member: Member) -> int:
        fingerprint = (member.group, *_fingerprint(histories[member.key].state, member))
        return cohorts.setdefault(fingerprint, len(cohorts))

    ordered = sorted(members, key=_place)
    made = []
    for together in _adjacent(ordered, cohort):
        run = _run(together, [histories[m.key].master for m in together], cohort(together[0]))
        made.append((run, _joined(run, [histories[m.key].state for m in together])))
    return made


def _place(member: Member) -> tuple[int, int, int, int]:
    arena, segment = member.arena, member.segment
    return id(arena), segment.bucket, segment.shard_offset, segment.numel


def _adjacent(
    ordered: Sequence[Member], cohort: Callable[[Member], int]
) -> Iterator[tuple[Member, ...]]:
    """Groups members that follow each other in a shard and are of one cohort."""
    together: list[Member] = []
    for member in ordered:
        last = together[-1] if together else None
        if last is not None and not (_follows(last, member) and cohort(last) == cohort(member)):
            yield tuple(together)
            together = []
        together.append(member)
    if together:
        yield tuple(together)


def _follows(first: Member, second: Member) -> bool:
    """Whether nothing but unused elements lies between two members of one shard."""
    if first.arena is not second.arena or first.segment.bucket != second.segment.bucket:
        return False
    place, next_place = first.segment.place, second.segment.place
    return place is not None and next_place == place + 1


def _run(
    members: tuple[Member, ...], masters: Sequence[torch.Tensor | None], cohort: int
) -> UpdateRun:
    arena, last = members[0].arena, members[-1].segment
    shard = arena.shard(last.bucket)
    elements = shard[members[0].segment.shard_offset : last.shard_offset + last.numel]
    wanted = accumulation_dtype(elements.dtype)
    if wanted == elements.dtype == arena.gather_dtype(elements.dtype):
        return UpdateRun(members, elements, elements, cohort)
    run = UpdateRun(members, elements, elements.to(wanted, copy=True), cohort)
    for member, master in zip(members, masters, strict=True):
        if master is not None:
            run.part(member, run.tensor).copy_(master)
    return run


def _joined(run: UpdateRun, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The members' states as the run's: equal entries once, values of elements side by side."""
    joined: dict[str, Any] = {}
    for key, value in states[0].items():
        first = run.members[0]
        if not is_element_wise(key, value, first.segment.elements):
            joined[key] = copy.deepcopy(value)
            continue
        joined[key] = torch.zeros_like(run.tensor, dtype=value.dtype)
        for member, state in zip(run.members, states, strict=True):
            run.part(member, joined[key]).copy_(state[key])
    return joined


def _fingerprint(state: Mapping[str, Any], member: Member) -> tuple[object, ...]:
    """Equal for states that may be joined."""
    return tuple(
        (key, _comparable(value, is_element_wise(key, value, member.segment.elements)))
        for key, value in state.items()
    )


def _comparable(value: object, element_wise: bool) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype if element_wise else (str(value.dtype), str(value.tolist()))
    # Objects that nothing is known of are equal to themselves only.
    known = value is None or isinstance(value, bool | int | float | str)
    return (type(value).__name__, value) if known else id(value)


def split_by_presence(
    run: UpdateRun, state: Mapping[str, Any], absent: int
) -> list[tuple[UpdateRun, dict[str, Any]]]:
    """The run cut where members with a gradient meet members without: the latter are not updated,
    and become the cohort ``absent``. Elements and state stay where they are in memory."""
    parts = []
    for present, group in itertools.groupby(run.members, key=lambda member: member.present):
        members = tuple(group)
        first, last = members[0].segment, members[-1].segment
        start, end = first.shard_offset - run.start, last.shard_offset + last.numel - run.start
        elements = run.elements[start:end]
        tensor = run.tensor[start:end] if run.rounded else elements
        part = UpdateRun(members, elements, tensor, run.cohort if present else absent)
        parts.append((part, _cut(state, run, slice(start, end))))
    return parts


def _cut(state: Mapping[str, Any], run: UpdateRun, part: slice) -> dict[str, Any]:
    return {
        key: value[part] if run.holds(key, value) else copy.deepcopy(value)
        for key, value in state.items()
    }


# --- the update of a run as a function -----------------------------------------------------------


@dataclass(frozen=True)
class UpdateKind:
    """What is done to a run, apart from its length: the optimizer's operators, on a gradient that
    is multiplied by a factor first if ``scaled``, on a master that is then rounded to ``rounded``
    if that is set."""

    update: RecordedUpdate
    dtype: torch.dtype
    device: torch.device
    elements_dtype: torch.dtype
    scaled: bool
    rounded: torch.dtype | None

    def example(self, numel: int) -> list[torch.Tensor]:
        """Tensors like those that the update takes, for a run of ``numel`` elements."""

        def flat(dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(numel, dtype=dtype, device=self.device)

        tensors = [flat(self.dtype), flat(self.dtype)]
        tensors.append(torch.ones(self.update.numbers, dtype=self.dtype, device=self.device))
        if self.scaled:
            tensors.append(torch.ones((), dtype=self.dtype, device=self.device))
        if self.rounded is not None:
            tensors.append(flat(self.elements_dtype))
        return tensors + [flat(self.dtype) for _ in self.update.inputs[2:]]

    def __call__(self, *tensors: torch.Tensor) -> tuple[()]:
        """Updates in place: the run, its gradient, the numbers, the factor (if ``scaled``), the
        parameters' elements (if there is a master), and the run's state by key."""
        rest = list(tensors)
        run, gradient, numbers = rest.pop(0), rest.pop(0), rest.pop(0)
        if self.scaled:
            gradient = gradient * rest.pop(0)
        elements = rest.pop(0) if self.rounded is not None else None
        if elements is not None:
            refresh_master(run, elements, cast(torch.dtype, self.rounded))
        replay(self.update, [run, gradient, *rest], numbers)
        if elements is not None:
            elements.copy_(run.to(self.rounded))
        return ()


def common_factor(members: Iterable[Member]) -> tuple[torch.Tensor, ...] | None:
    """The factors by which all members' gradients are yet to be multiplied; None if they differ."""
    found: tuple[torch.Tensor, ...] | None = None
    for member in members:
        gradient = member.parameter.parameter.grad
        factors = cast(ShardedGradient, gradient).factors
        if found is not None and [id(f) for f in factors] != [id(f) for f in found]:
            return None
        found = factors
    return found
