"""Any rank of a large world in one process: torch's fake process group, whose collectives leave
their results undefined and never wait. Shapes, plans and places are real."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY
from fxcomm.runtime.gradient import ShardedGradient
from tests.ranks import forkserver, spare_the_collector
from tests.zoo import TiedGPT

TIMEOUT_S = 110.0
WORLD = 1024

AsFakeRank = Callable[..., Any]


def _run_as(rank: int, world_size: int, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return job(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def as_fake_rank() -> Iterator[AsFakeRank]:
    """Runs ``job(rank, world_size, *args)`` in another process, as that rank of a fake group."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=forkserver(), initializer=spare_the_collector
    ) as pool:

        def run(rank: int, world_size: int, job: Callable[..., Any], *args: Any) -> Any:
            return pool.submit(_run_as, rank, world_size, job, args).result(TIMEOUT_S)

        yield run


def training_job(rank: int, world_size: int, stage: str, bucket_mb: float) -> dict[str, Any]:
    """Two steps of a small GPT; its plan, and what this rank holds of it."""
    torch.manual_seed(0)
    model = TiedGPT(vocabulary=211, width=32)
    options = {"lowering": "eager", "stage": stage, "bucket_mb": bucket_mb}
    compiled = torch.compile(model, backend="fxcomm", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients: set[type] = set()
    for _ in range(2):
        tokens = torch.randint(0, 211, (2, 9))
        loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        gradients = {type(p.grad) for p in model.parameters()}
        optimizer.zero_grad()
    (managed,) = REGISTRY.models_of(model.parameters())
    (arena,) = managed.arenas
    found: dict[str, Any] = {
        "plan": arena.plan.to_json(),
        "rank": (managed.rank, arena.communicator.rank, arena.communicator.world_size),
        "gradients": gradients == {ShardedGradient},
        "wire": managed.meter.last.wire_bytes,
        "shapes": [(tuple(p.shape), p.stride()) for p in model.parameters()],
        "numel": sum(p.numel() for p in model.parameters()),
    }
    if stage != "ddp":
        found["owned"] = sum(s.numel for p in arena.parameters for s in arena.owned(p))
        found["kept"] = [g.numel() if g is not None else 0 for g in arena.gradients]
    return found


@pytest.mark.parametrize(
    ("rank", "bucket_mb", "buckets"),
    [(0, 0.05, 5), (1, 0.05, 5), (WORLD - 1, 0.05, 5), (0, 25.0, 1), (WORLD - 1, 25.0, 1)],
)
def test_two_steps_as_one_of_many_ranks(
    as_fake_rank: AsFakeRank, rank: int, bucket_mb: float, buckets: int
) -> None:
    found = as_fake_rank(rank, WORLD, training_job, "zero2", bucket_mb)
    assert found["rank"] == (rank, rank, WORLD)
    assert found["gradients"]
    plan = OverlapPlan.from_json(found["plan"])
    layout = plan.layout
    assert layout.world_size == WORLD
    assert all(plan.in_graph), "one graph computes every gradient"
    assert len(layout.buckets) == buckets
    assert sum(spec.numel for spec in layout.parameters) == found["numel"]
    # Shards are equal, and padded by less than a quantum a bucket.
    assert found["kept"] == [bucket.numel // WORLD for bucket in layout.buckets]
    padding = sum(bucket.numel for bucket in layout.buckets) - found["numel"]
    gaps = 64 * len(layout.parameters)
    assert 0 <= padding < 8 * WORLD * len(layout.buckets) + gaps
    mine = sum(
        segment.numel
        for bucket in range(len(layout.buckets))
        for segment in layout.shard_segments(bucket, rank)
    )
    assert found["owned"] == mine
    ideal = 2 * (WORLD - 1) / WORLD * 4 * sum(bucket.numel for bucket in layout.buckets)
    assert found["wire"] == pytest.approx(ideal)


def test_every_rank_makes_the_same_plan(as_fake_rank: AsFakeRank) -> None:
    results = [as_fake_rank(rank, WORLD, training_job, "zero2", 0.05) for rank in (0, WORLD - 1)]
    assert results[0]["plan"] == results[1]["plan"]
    assert results[0]["shapes"] == results[1]["shapes"]


@pytest.mark.parametrize("stage", ["zero1", "ddp"])
def test_other_stages(as_fake_rank: AsFakeRank, stage: str) -> None:
    found = as_fake_rank(WORLD - 1, WORLD, training_job, stage, 0.05)
    assert found["rank"] == (WORLD - 1, WORLD - 1, WORLD)
    assert found["gradients"] == (stage == "zero1")


def odd_world_job(rank: int, world_size: int) -> tuple[int, int]:
    found = training_job(rank, world_size, "zero2", 0.05)
    return found["owned"], found["numel"]


def test_all_ranks_together_own_every_element(as_fake_rank: AsFakeRank) -> None:
    owned = [as_fake_rank(rank, 3, odd_world_job) for rank in range(3)]
    assert sum(mine for mine, _ in owned) == owned[0][1]
