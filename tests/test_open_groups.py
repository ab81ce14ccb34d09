"""The groups of dropped models are closed: alike on all ranks, and nothing of them is left."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fxcomm.errors import ShardedGradientError
from fxcomm.registry import REGISTRY
from fxcomm.runtime.gradient import ShardedGradient
from fxcomm.runtime.open_groups import OpenGroups, dropped_everywhere
from tests.oracle import adamw, assert_close
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO

Pools = Callable[[int], Ranks]

EAGER = {"lowering": "eager"}


# --- which are closed ---


class Owner:
    """What the groups of a model live as long as."""


@dataclass
class Rank:
    """One rank of several in this process; ``closed`` are the groups that it closed, in order."""

    groups: OpenGroups = field(default_factory=OpenGroups)
    alive: dict[int, Owner] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)

    def open(self, ranks: tuple[int, ...], number: int, names: list[str]) -> Owner:
        owner = Owner()
        note = self.groups.opened_by(owner, ranks, number)
        for name in names:
            note(name)
        return owner


TOGETHER, SOME = (0, 1, 2), (0, 1)


def names(number: int) -> list[str]:
    return [f"{number}/{kind}" for kind in ("control", "dense", "arena")]


@given(st.data())
def test_ranks_close_the_same_groups_in_the_same_order(data: st.DataObject) -> None:
    """Whatever each rank's collector finds until the next model begins."""
    ranks = [Rank() for _ in TOGETHER]
    expected: list[str] = []
    for number in range(data.draw(st.integers(1, 6))):
        still_open = [n for n in range(number) if names(n)[0] not in expected]
        for rank in ranks:
            for n in data.draw(st.sets(st.sampled_from(range(number)))) if number else ():
                rank.alive.pop(n, None)
        for n in still_open:
            if not any(n in rank.alive for rank in ranks):
                expected += names(n)
        agreed = dropped_everywhere([rank.groups.dropped(TOGETHER) for rank in ranks])
        for rank in ranks:
            rank.groups.close(TOGETHER, agreed, rank.closed.append)
            assert rank.closed == expected
            rank.alive[number] = rank.open(TOGETHER, number, names(number))


def test_models_on_other_ranks_are_for_these_to_close() -> None:
    rank = Rank()
    kept = rank.open(TOGETHER, 1, ["kept"])
    rank.open(TOGETHER, 2, ["dropped"])
    rank.open(SOME, 2, ["elsewhere"])
    assert (rank.groups.dropped(TOGETHER), rank.groups.dropped(SOME)) == ({2}, {2})
    rank.groups.close(TOGETHER, [2], rank.closed.append)
    assert rank.closed == ["dropped"]
    assert (rank.groups.dropped(TOGETHER), rank.groups.dropped(SOME)) == (set(), {2})
    del kept
    assert rank.groups.dropped(TOGETHER) == {1}


# --- on real ranks ---

MODELS = 20


def take_steps(
    compiled: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: slice = slice(None)
) -> None:
    """Trains on ``part`` of the rows of each step's batch; leaves the last gradients."""
    case = ZOO["mlp"]
    for step in steps:
        optimizer.zero_grad()
        batch = case.batch(step, ROWS * 2)[part]
        case.loss(compiled(batch), batch).backward()
        optimizer.step()


def part_of(rank: int) -> slice:
    return slice(rank * ROWS, (rank + 1) * ROWS)


@dataclass
class Dropped:
    """What must be gone of a model, and a gradient that was kept."""

    model: weakref.ref[object]
    parameter: weakref.ref[object]
    gradient: Tensor


def train_and_drop(rank: int, steps: int = 2) -> Dropped:
    """Ends with gathers in flight and gradients that nobody set to None."""
    model = ZOO["mlp"].model()
    compiled = torch.compile(model, backend="fxcomm", options=EAGER)
    optimizer = adamw(compiled.parameters())
    take_steps(compiled, optimizer, range(steps), part_of(rank))
    first = model.up.weight
    (managed,) = REGISTRY.models_of([first])
    assert isinstance(first.grad, ShardedGradient)
    return Dropped(weakref.ref(managed), weakref.ref(first), first.grad)


def threads_and_connections() -> tuple[int, int]:
    files = os.listdir("/proc/self/fd")
    links = [f"/proc/self/fd/{name}" for name in files]
    sockets = [link for link in links if os.path.islink(link) and "socket" in os.readlink(link)]
    return len(os.listdir("/proc/self/task")), len(sockets)


def many_models_job(rank: int, world_size: int) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """Threads and connections after each model, and what a model that lives on learned."""
    living = ZOO["mlp"].model(seed=1)
    compiled = torch.compile(living, backend="fxcomm", options=EAGER)
    optimizer = adamw(compiled.parameters())
    take_steps(compiled, optimizer, range(2), part_of(rank))
    used = []
    for number in range(MODELS):
        dropped = train_and_drop(rank, steps=1)
        if (number + rank) % 3:  # the ranks' collectors do not run at the same time
            gc.collect()
            assert dropped.model() is None
        used.append(threads_and_connections())
        # Dynamo counts what it compiled for models that are gone against its limit.
        torch._dynamo.reset()
        if number % 5 == 0:
            take_steps(compiled, optimizer, range(2 + number // 5, 3 + number // 5), part_of(rank))
    return used, [p.detach().clone() for p in living.parameters()]


def test_processes_do_not_grow_with_dropped_models(ranks: Pools) -> None:
    alone = ZOO["mlp"].model(seed=1)
    take_steps(alone, adamw(alone.parameters()), range(2 + MODELS // 5))
    for used, trained in ranks(2).run(many_models_job):
        # Which models are open at a time depends on the collectors; how many does not grow.
        half = MODELS // 2
        for resource in zip(*used, strict=True):
            assert max(resource[half:]) <= max(resource[:half])
        for number, pair in enumerate(zip(trained, alone.parameters(), strict=True)):
            assert_close(f"parameter {number}", *pair)


def left_behind_job(rank: int, world_size: int) -> tuple[list[bool], str]:
    """Whether a dropped model is gone; whether its parameters are, when the next has begun; and
    what its gradient says then."""
    dropped = train_and_drop(rank)
    gc.collect()
    model_gone = dropped.model() is None
    train_and_drop(rank, steps=1)
    gc.collect()
    with pytest.raises(ShardedGradientError) as refused:
        dropped.gradient.mul_(2.0)
    return [model_gone, dropped.parameter() is None], str(refused.value)


def test_nothing_is_left_of_a_model_that_was_dropped_in_the_middle(ranks: Pools) -> None:
    for gone, message in ranks(2).run(left_behind_job):
        assert gone == [True, True]
        assert "'up.weight' went with its model" in message
