"""Several modules of one class: each has its own graphs, models and optimizer state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxcomm.registry import REGISTRY
from tests.oracle import adamw, assert_close
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO, Block

Pools = Callable[[int], Ranks]
EAGER = {"lowering": "eager"}
BLOCKS = 10  # more than Dynamo's limit of recompilations


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 2) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().double()


def tower_batch(step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 5, 8, dtype=torch.float64, generator=generator)


def train_tower(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = adamw(model.parameters())
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def regional_job(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    model = tower()
    for block in model.blocks:
        block.compile(backend="fxcomm", options=EAGER)
    batches = [tower_batch(s, ROWS * world_size).chunk(world_size)[rank] for s in range(3)]
    trained = train_tower(model, batches)
    (managed,) = REGISTRY.models_of(model.parameters())
    return trained, sum(managed.arenas[0].plan.in_graph)


def test_blocks_compiled_one_by_one(ranks: Pools) -> None:
    """Regional compilation: every block reduces its own gradients inside its own graph."""
    names = [name for name, _ in tower().named_parameters()]
    expected = train_tower(tower(), [tower_batch(s, ROWS * 2) for s in range(3)])
    for trained, in_graph in ranks(2).run(regional_job):
        for name, ours, theirs in zip(names, trained, expected, strict=True):
            assert_close(name, ours, theirs)
        assert in_graph == BLOCKS


def twins_job(rank: int, world_size: int) -> list[list[Tensor]]:
    case = ZOO["gpt"]
    models = [case.model(seed) for seed in (0, 1)]
    compiled = [torch.compile(model, backend="fxcomm", options=EAGER) for model in models]
    optimizers = [adamw(model.parameters()) for model in models]
    for step in range(3):
        batch = case.batch(step, ROWS * world_size).chunk(world_size)[rank]
        for model, optimizer in zip(compiled, optimizers, strict=True):
            case.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [[p.detach().clone() for p in model.parameters()] for model in models]


def test_two_models_of_one_class(ranks: Pools) -> None:
    case = ZOO["gpt"]
    expected = []
    for seed in (0, 1):
        model = case.model(seed)
        optimizer = adamw(model.parameters())
        for step in range(3):
            batch = case.batch(step, ROWS * 2)
            case.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append([p.detach().clone() for p in model.parameters()])
    for trained in ranks(2).run(twins_job):
        for ours, theirs in zip(trained, expected, strict=True):
            for number, pair in enumerate(zip(ours, theirs, strict=True)):
                assert_close(f"parameter {number}", *pair)


def dropped_job(rank: int, world_size: int) -> list[bool]:
    def train() -> list[weakref.ref[object]]:
        case = ZOO["mlp"]
        model = case.model()
        compiled = torch.compile(model, backend="fxcomm", options=EAGER)
        optimizer = adamw(compiled.parameters())
        for step in range(3):
            batch = case.batch(step, ROWS)
            case.loss(compiled(batch), batch).backward()
            nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        (managed,) = REGISTRY.models_of(model.parameters())
        return [weakref.ref(managed), weakref.ref(model), weakref.ref(optimizer)]

    kept = train()
    torch._dynamo.reset()
    gc.collect()
    return [ref() is None for ref in kept]


def test_nothing_outlives_the_model(ranks: Pools) -> None:
    for gone in ranks(2).run(dropped_job):
        assert gone == [True, True, True]
