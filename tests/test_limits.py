"""Memory of collectives in flight: what an arena starts keeps the plan's limit, counted here by the
collectives themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxcomm.communicator import Collective, OperatorCall
from fxcomm.layout import build_layout
from fxcomm.plan import OverlapPlan
from fxcomm.runtime.arena import ReplicatedArena, ShardedArena, WireDtypes
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.statistics import StepMeter

WORLD = 2
PARAMETERS = 7
NUMEL = 192  # a bucket for each parameter
BUCKET_BYTES = 4 * NUMEL
KINDS = (ShardedArena, ReplicatedArena)


@dataclass
class Traffic:
    """A communicator of pretended ranks that all hold what this one holds. ``held`` are the bytes
    of each collective in flight, ``peaks`` their sum at each launch."""

    shard_results: bool
    rank: int = 0
    world_size: int = WORLD
    held: dict[int, int] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    _alive: list[Any] = field(default_factory=list)

    def _start(self, buffer: Tensor, result: Tensor, nbytes: int) -> None:
        self._alive.append(result)  # so that its id stays its own
        self.held[id(result)] = nbytes
        self.peaks.append(sum(self.held.values()))

    def _collective(self, numel: int) -> Collective:
        def launch(buffer: Tensor) -> Tensor:
            # NCCL's reduce-scatter gives a shard, gloo's all-to-all as much as it takes.
            result = buffer[: numel // WORLD].clone() if self.shard_results else buffer.clone()
            if buffer.device.type != "meta":
                nbytes = (buffer.numel() + result.numel()) * buffer.itemsize
                self._start(buffer, result, nbytes)
            return result

        def wait(result: Tensor) -> Tensor:
            del self.held[id(result)]
            return result.clone()

        return Collective((), OperatorCall(launch), (OperatorCall(wait),), float(numel))

    def reduce_scatter_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        return self._collective(numel)

    def all_reduce_mean(self, numel: int, dtype: torch.dtype) -> Collective:
        return self._collective(numel)

    def all_gather(self, buffer: Tensor, tag: int) -> Gathering:
        if buffer.dtype is torch.float64:
            self._start(buffer, buffer, buffer.numel() * buffer.itemsize)
        return Gathering(self, buffer)

    def all_gather_bytes(self, nbytes: int) -> float:
        return 0.0

    def all_reduce(self, tensor: Tensor, operation: str) -> None:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> None:
        raise NotImplementedError


@dataclass
class Gathering:
    traffic: Traffic
    buffer: Tensor

    def wait(self) -> None:
        self.traffic.held.pop(id(self.buffer), None)


def arena_of(
    kind: type[ShardedArena] | type[ReplicatedArena],
    limit: int | None,
    *,
    shard_results: bool,
    gather: torch.dtype | None = None,
) -> tuple[ShardedArena | ReplicatedArena, Traffic]:
    parameters = [
        ManagedParameter(i, f"p{i}", nn.Parameter(torch.full((NUMEL,), float(i))))
        for i in range(PARAMETERS)
    ]
    layout = build_layout(
        [[p.spec for p in parameters]], world_size=WORLD, bucket_bytes=BUCKET_BYTES, split=False
    )
    assert [bucket.nbytes for bucket in layout.buckets] == [BUCKET_BYTES] * PARAMETERS
    plan = OverlapPlan(
        "a test's", layout, (False,) * PARAMETERS, limit, (*range(PARAMETERS),), True
    )
    traffic = Traffic(shard_results)
    wire = WireDtypes(gather=gather)
    return kind(0, plan, parameters, traffic, wire, StepMeter()), traffic


def gradient_of(p: ManagedParameter) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 1000 * p.index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_results", [False, True])
@pytest.mark.parametrize("buckets", [1, 2, None])
def test_late_launches_keep_the_limit(
    kind: type[ShardedArena] | type[ReplicatedArena], shard_results: bool, buckets: int | None
) -> None:
    """At each launch, what is in flight is as much as the limit allows, and no more; what was
    waited for to make room is the mean all the same."""
    one = BUCKET_BYTES + BUCKET_BYTES // (WORLD if shard_results else 1)
    limit = None if buckets is None else one * buckets
    arena, traffic = arena_of(kind, limit, shard_results=shard_results)
    arena.launch_remaining(gradient_of)
    most = PARAMETERS if buckets is None else buckets
    assert traffic.peaks == [one * min(i + 1, most) for i in range(PARAMETERS)]
    assert len(traffic.held) == most
    finished = arena.finish_reductions()
    assert not traffic.held
    assert [r.bucket for r in finished] == list(range(PARAMETERS))
    for reduction, p in zip(finished, arena.parameters, strict=True):
        assert reduction.packed is None, "the operand is freed"
        expected = gradient_of(p)[: NUMEL // WORLD] if shard_results else gradient_of(p)
        assert reduction.result is not None
        assert torch.equal(reduction.result, expected)


def test_one_bucket_over_the_limit_is_alone() -> None:
    arena, traffic = arena_of(ShardedArena, 1, shard_results=False)
    arena.launch_remaining(gradient_of)
    assert traffic.peaks == [2 * BUCKET_BYTES] * PARAMETERS


@pytest.mark.parametrize("buckets", [1, 2, 3, None])
def test_gathers_in_another_dtype_count_with_the_reductions(buckets: int | None) -> None:
    """In a step some reductions are still in flight when the first gathers start, and the last
    step's gathers may be when the backward launches again."""
    one = 2 * BUCKET_BYTES  # a reduction, and a gather of twice the width
    limit = None if buckets is None else one * buckets
    arena, traffic = arena_of(ShardedArena, limit, shard_results=False, gather=torch.float64)
    assert isinstance(arena, ShardedArena)
    for _ in range(2):
        arena.launch_remaining(gradient_of)
        for bucket in range(PARAMETERS):
            arena.finish_reductions(through=bucket)
            arena.start_gather(bucket)
        arena.finish_reductions()
    if limit is None:
        assert max(traffic.peaks) > one * PARAMETERS
    else:
        assert max(traffic.peaks) == limit
        assert traffic.peaks[-PARAMETERS:] == [limit] * PARAMETERS
    arena.end_step()
    assert not traffic.held


def test_gathers_in_place_hold_nothing() -> None:
    arena, traffic = arena_of(ShardedArena, 2 * BUCKET_BYTES, shard_results=False)
    assert isinstance(arena, ShardedArena)
    for bucket in range(PARAMETERS):
        arena.start_gather(bucket)
    assert traffic.peaks == []
    assert arena.described().gather_bytes == (0,) * PARAMETERS


@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_says_what_it_holds(kind: type[ShardedArena] | type[ReplicatedArena]) -> None:
    arena, traffic = arena_of(kind, None, shard_results=True, gather=torch.float64)
    described = arena.described()
    assert described.sharded == (kind is ShardedArena)
    arena.launch_remaining(gradient_of)
    assert list(described.reduce_bytes) == list(traffic.held.values())
    if isinstance(arena, ShardedArena):
        assert described.gather_bytes == (2 * BUCKET_BYTES,) * PARAMETERS
    assert described.deferred == (False,) * PARAMETERS, "no module is known to read them"
