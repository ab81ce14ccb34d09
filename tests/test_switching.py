"""Switching plans between steps: everything moves to its new owners, element for element, and
training goes on as if nothing had been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomm
from fxcomm.layout import ParameterSpec
from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY
from fxcomm.runtime.arena import ShardedArena
from fxcomm.runtime.model import ManagedModel
from tests.oracle import Trained, adamw, assert_equal_training, train_alone, train_compiled
from tests.ranks import Ranks
from tests.test_random_plans import random_plan
from tests.test_reads import withheld_gathers
from tests.zoo import ROWS, ZOO

Pools = Callable[[int], Ranks]


def other_plan(managed: ManagedModel, seed: int) -> OverlapPlan:
    """A random plan for what the model's only arena holds."""
    arena = managed.arenas[0]
    specs: list[ParameterSpec] = [p.spec for p in arena.parameters]
    world_size = managed.environment.world_size
    return random_plan(seed, specs, world_size=world_size)


class Switching(torch.optim.AdamW):
    """Switches the plan after every step, as tuning does, and looks at what has moved."""

    def begin(self, model: nn.Module, seed: int) -> None:
        self.seed, self.model, self.plans = seed, model, 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        managed = REGISTRY._by_root[self.model]
        before = contents(self.model, self)
        managed.switch_plan(0, other_plan(managed, self.seed + self.plans))
        self.plans += 1
        after = contents(self.model, self)
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
        super().zero_grad(set_to_none)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything whole: parameters, gradients, optimizer state."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        gradient = fxcomm.full_grad(p) if p.requires_grad else None
        if gradient is not None:
            found[f"gradient of {name}"] = gradient
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            found[f"state {index} {key}"] = value.clone()
    return found


def switching_job(
    rank: int, world_size: int, case_name: str, seed: int, options: dict[str, Any], clip: float
) -> tuple[Trained, int]:
    case = ZOO[case_name]
    model = case.model(seed=rank)
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    # Its module decides whether torch's own optimizer is known to step one by one.
    Switching.__module__ = "torch.optim.adamw"
    optimizer = Switching(compiled.parameters(), lr=0.01, weight_decay=0.1)
    optimizer.begin(model, seed)
    with withheld_gathers():
        trained = train_compiled(case, model, compiled, optimizer, clip=clip or None)
    return trained, len(REGISTRY._by_root[model]._parked)


@pytest.mark.parametrize("case", ["mlp", "gpt", "reused", "partly_used", "broken", "conv"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_switching_changes_nothing(ranks: Pools, case: str, world_size: int, clip: float) -> None:
    options = {"lowering": "eager", "bucket_mb": 0.001}
    seed = 1000 * world_size
    for trained, parked in ranks(world_size).run(switching_job, case, seed, options, clip):
        assert_equal_training(trained, train_alone(world_size, case, clip=clip or None))
        assert parked == 5


def mixed_job(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """16-bit parameters beside others, masters, lasting gradients; there and back again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40).bfloat16(), nn.Linear(40, 24).bfloat16(), Widen())
    compiled: Any = torch.compile(model, backend="fxcomm", options={"lowering": "eager"})
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.01, amsgrad=True)

    def step() -> None:
        compiled(torch.randn(4, 24, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()

    step()
    managed = REGISTRY._by_root[model]
    first, found = managed.arenas[0].plan, []
    for plan in (other_plan(managed, 7), other_plan(managed, 8), first):
        before = contents(model, optimizer)
        managed.switch_plan(0, plan)
        found += [before, contents(model, optimizer)]
        step()  # on top of the gradients of the step before
    return found


class Widen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.scale


def test_masters_and_lasting_gradients_move(ranks: Pools) -> None:
    for found in ranks(2).run(mixed_job):
        for before, after in zip(found[::2], found[1::2], strict=True):
            assert before.keys() == after.keys()
            assert any("max_exp_avg_sq" in name for name in before)
            for name, value in before.items():
                assert torch.equal(value, after[name]), name


def memory_job(rank: int, world_size: int) -> tuple[int, int, bool]:
    case = ZOO["gpt"]
    model = case.model(seed=rank)
    compiled: Any = torch.compile(model, backend="fxcomm", options={"bucket_mb": 0.01})
    optimizer = adamw(compiled.parameters())
    lowered: list[int] = []

    def step() -> None:
        batch = case.batch(0, ROWS * world_size).chunk(world_size)[rank]
        case.loss(compiled(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    managed = REGISTRY._by_root[model]
    (graph,) = managed._graphs
    plans = [managed.arenas[0].plan, other_plan(managed, 5)]
    arenas = [weakref.ref(managed.arenas[0])]
    for turn in range(1, 5):
        managed.switch_plan(0, plans[turn % 2])
        arena = managed.arenas[0]
        arenas.append(weakref.ref(arena))
        step()
        lowered.append(len(graph._variants))
    (parked,) = managed._parked
    held = sum(t.untyped_storage().nbytes() for t in parked.buckets)
    assert isinstance(arena, ShardedArena)
    managed.forget_plans()
    del parked
    gc.collect()
    step()
    alive = {id(ref()) for ref in arenas if ref() is not None}
    return len(set(lowered[1:])), held, alive == {id(arena)}


def test_switching_back_lowers_nothing_anew(ranks: Pools) -> None:
    for numbers, held, only_one_left in ranks(2).run(memory_job):
        assert numbers == 1, "graphs were lowered again"
        assert held == 0, "a parked plan holds memory"
        assert only_one_left
