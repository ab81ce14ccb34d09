"""Collectives on real gloo ranks: true means in every dtype, and the bytes that they send."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomm
from fxcomm.backends.communicators import (
    AllReduceCommunicator,
    GlooCommunicator,
    communicator_for,
)
from fxcomm.communicator import Collective, Communicator, apply_calls, call_eagerly
from tests.ranks import Ranks

Pools = Callable[[int], Ranks]

WORLD_SIZES = (2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
CPU = torch.device("cpu")


def run_collective(collective: Collective, buffer: Tensor) -> Tensor:
    """The collective, one call after another."""
    calls = (*collective.prepare, collective.launch, *collective.finish)
    return apply_calls(calls, buffer, call_eagerly)


def world() -> Communicator:
    """The communicator that fxcomm uses for CPU tensors of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return communicator_for(group, CPU)


# --- inputs, the same for the job and the test ---


def spread(world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """One row for each rank: magnitudes over several orders, both signs, exact cancellation."""
    generator = torch.Generator().manual_seed(numel)
    rows = torch.randn(world_size, numel, dtype=torch.float64, generator=generator)
    rows *= torch.logspace(-3, 3, numel, dtype=torch.float64)
    rows[1, ::5] = -rows[0, ::5]
    if dtype.is_complex:
        return torch.complex(rows, rows.flip(1)).to(dtype)
    return rows.to(dtype)


def huge(world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Rows whose sum overflows and whose mean does not."""
    largest = torch.finfo(dtype).max
    return (
        (torch.linspace(0.9, 1.0, world_size * numel, dtype=torch.float64) * largest)
        .to(dtype)
        .view(world_size, numel)
    )


INPUTS = {"spread": spread, "huge": huge}


def true_mean(rows: Tensor) -> Tensor:
    """The mean over ranks, rounded once."""
    exact = rows.to(torch.complex128 if rows.is_complex() else torch.float64)
    return exact.mean(0).to(rows.dtype)


def units_apart(actual: Tensor, expected: Tensor) -> int:
    """The largest distance in representable 16-bit numbers."""

    def ordered(tensor: Tensor) -> Tensor:
        bits = tensor.view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(actual) - ordered(expected)).abs().max())


# --- means ---

KINDS: dict[str, Callable[[dist.ProcessGroup], Communicator]] = {
    "gloo": GlooCommunicator,
    "exchange": partial(GlooCommunicator, exchanged_bytes=0),
    "all-reduce": AllReduceCommunicator,
}


def mean_job(
    rank: int, world_size: int, kind: str, method: str, inputs: str, numel: int, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """This rank's result, and whether its input is still what it was."""
    group = dist.group.WORLD
    assert group is not None
    communicator = KINDS[kind](group)
    mine = INPUTS[inputs](world_size, numel, dtype)[rank].clone()
    before = mine.clone()
    result = run_collective(getattr(communicator, method)(numel, dtype), mine)
    return result.clone(), torch.equal(mine, before)


def whole_mean(
    pool: Ranks, kind: str, method: str, inputs: str, numel: int, dtype: torch.dtype
) -> Tensor:
    """The mean put together from the ranks' slices, or any rank's whole one."""
    results = pool.run(mean_job, kind, method, inputs, numel, dtype)
    assert all(intact for _, intact in results), "the collective wrote to its input"
    parts = [part for part, _ in results]
    assert all(part.dtype == dtype for part in parts)
    if method == "reduce_scatter_mean":
        assert [part.shape for part in parts] == [(numel // pool.world_size,)] * pool.world_size
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), "ranks got different means"
    return parts[0]


def numel_for(world_size: int) -> int:
    return 8 * world_size * 13


SCATTERS = [("gloo", "reduce_scatter_mean"), ("exchange", "reduce_scatter_mean")]
WHOLE = [("gloo", "all_reduce_mean"), ("all-reduce", "reduce_scatter_mean")]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *COMPLEX], ids=str)
@pytest.mark.parametrize(("kind", "method"), SCATTERS + WHOLE)
def test_means_are_true(
    ranks: Pools, world_size: int, dtype: torch.dtype, kind: str, method: str
) -> None:
    numel = numel_for(world_size)
    rows = spread(world_size, numel, dtype)
    mean = whole_mean(ranks(world_size), kind, method, "spread", numel, dtype)
    # Of the largest contribution: what cancels leaves the rounding of its parts.
    scale = rows.abs().amax(0)
    error = (mean - true_mean(rows)).abs() / scale
    assert error.max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "method"), SCATTERS)
def test_a_16_bit_mean_is_rounded_once(
    ranks: Pools, world_size: int, dtype: torch.dtype, kind: str, method: str
) -> None:
    numel = numel_for(world_size)
    expected = true_mean(spread(world_size, numel, dtype))
    mean = whole_mean(ranks(world_size), kind, method, "spread", numel, dtype)
    assert units_apart(mean, expected) <= 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "method"), WHOLE)
def test_a_16_bit_all_reduce_rounds_each_sum(
    ranks: Pools, world_size: int, dtype: torch.dtype, kind: str, method: str
) -> None:
    """gloo adds in the dtype itself: right to a rounding of each contribution."""
    numel = numel_for(world_size)
    rows = spread(world_size, numel, dtype)
    mean = whole_mean(ranks(world_size), kind, method, "spread", numel, dtype)
    error = (mean.double() - true_mean(rows).double()).abs()
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = torch.finfo(dtype).eps * rows.double().abs().amax(0) + world_size * tiny
    assert (error <= bound).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "method"), SCATTERS + WHOLE)
def test_a_float16_mean_is_finite_where_the_sum_is_not(
    ranks: Pools, world_size: int, kind: str, method: str
) -> None:
    numel = numel_for(world_size)
    rows = huge(world_size, numel, torch.float16)
    assert rows.sum(0).isinf().any()
    mean = whole_mean(ranks(world_size), kind, method, "huge", numel, torch.float16)
    assert mean.isfinite().all()
    rounded_once = (kind, method) in SCATTERS
    assert units_apart(mean, true_mean(rows)) <= (1 if rounded_once else 4)


def test_infinities_and_nans_reach_every_rank(ranks: Pools) -> None:
    """GradScaler finds overflows by them."""
    for mean in ranks(2).run(special_job):
        assert mean.isnan().tolist() == [True, False]
        assert mean.isinf().tolist() == [False, True]


def special_job(rank: int, world_size: int) -> Tensor:
    mine = torch.tensor([1.0, torch.inf] * world_size)
    if rank == 1:
        mine[::2] = torch.nan
    return run_collective(world().reduce_scatter_mean(mine.numel(), mine.dtype), mine).clone()


# --- gathering and the small collectives ---


def gather_job(rank: int, world_size: int, numel: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
    buffer = torch.full((numel,), 0.0).to(dtype)
    shard = buffer.chunk(world_size)[rank]
    shard.copy_(spread(world_size, numel, dtype)[0].chunk(world_size)[rank])
    address = buffer.data_ptr()
    world().all_gather(buffer, 0).wait()
    return buffer.clone(), buffer.data_ptr() == address


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=str)
def test_all_gather_fills_the_buffer_in_place(
    ranks: Pools, world_size: int, dtype: torch.dtype
) -> None:
    numel = numel_for(world_size)
    expected = spread(world_size, numel, dtype)[0]
    for buffer, in_place in ranks(world_size).run(gather_job, numel, dtype):
        assert torch.equal(buffer, expected)
        assert in_place


def several_gathers_job(rank: int, world_size: int) -> bool:
    """Gathers of neighbouring parts of one memory, all started before the first wait."""
    memory = torch.zeros(6 * 1024 * world_size)
    parts = [torch.from_dlpack(part) for part in memory.chunk(6)]
    for number, part in enumerate(parts):
        part.chunk(world_size)[rank].fill_(10 * number + rank)
    works = [world().all_gather(part, tag) for tag, part in enumerate(parts)]
    for work in works:
        work.wait()
    expected = [10 * n + r for n in range(6) for r in range(world_size) for _ in range(1024)]
    return torch.equal(memory, torch.tensor(expected, dtype=memory.dtype))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathers_may_run_together(ranks: Pools, world_size: int) -> None:
    assert all(ranks(world_size).run(several_gathers_job))


def several_exchanges_job(rank: int, world_size: int) -> list[bool]:
    """Exchanges and gathers on one group, all started before the first wait, which is the last
    one's. Of sizes that buffers on the way swallow, and that they do not."""
    group = dist.group.WORLD
    assert group is not None
    communicator = GlooCommunicator(group, exchanged_bytes=0)
    memory = torch.zeros(4, 8 * world_size)
    started = []
    for number, numel in enumerate((64, 2**20, 8, 2**18)):
        sent = torch.arange(numel * world_size, dtype=torch.float32) * (rank + 1) + number
        collective = communicator.reduce_scatter_mean(sent.numel(), sent.dtype)
        memory[number].chunk(world_size)[rank].fill_(rank + 1)
        gathered = communicator.all_gather(memory[number], number)
        started.append((collective, call_eagerly(collective.launch, sent), gathered, sent))
    right = []
    for number, (collective, landed, gathered, sent) in reversed([*enumerate(started)]):
        gathered.wait()
        mean = apply_calls(collective.finish, landed, call_eagerly)
        scale = (world_size + 1) / 2
        whole = (sent - number) / (rank + 1) * scale + number
        right.append(torch.allclose(mean, whole.chunk(world_size)[rank]))
        ranks = torch.arange(1.0, world_size + 1).repeat_interleave(8)
        right.append(torch.equal(memory[number], ranks))
    return right


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges_may_run_together(ranks: Pools, world_size: int) -> None:
    assert all(all(right) for right in ranks(world_size).run(several_exchanges_job))


def small_job(rank: int, world_size: int) -> dict[str, list[float]] | None:
    """The waited collectives in a group of ranks 1 and 2."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    assert isinstance(group, dist.ProcessGroup)
    communicator = communicator_for(group, CPU)
    found = {"sum": torch.tensor([1.0 * rank]), "max": torch.tensor([1.0 * rank])}
    for operation, tensor in found.items():
        communicator.all_reduce(tensor, operation)
    found["broadcast"] = torch.tensor([1.0 * rank])
    communicator.broadcast(found["broadcast"])
    found["rank"] = torch.tensor([communicator.rank, communicator.world_size])
    numel = 2
    found["mean"] = run_collective(
        communicator.reduce_scatter_mean(numel, torch.float32), torch.tensor([rank, 10.0 * rank])
    )
    dist.destroy_process_group(group)
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_ranks_of_a_smaller_group_count_from_zero(ranks: Pools) -> None:
    _, first, second = ranks(3).run(small_job)
    assert first == {
        "sum": [3.0],
        "max": [2.0],
        "broadcast": [1.0],
        "rank": [0, 2],
        "mean": [1.5],
    }
    assert second == {**first, "rank": [1, 2], "mean": [15.0]}


# --- bytes on the wire ---


def bytes_sent() -> int:
    """Payload bytes that this process handed to TCP on all of its connections, once each.

    The kernel counts them for each connection (``tcp_info``), so other processes do not disturb.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                total += _sent_on(connection)
    return total


def _sent_on(connection: socket.socket) -> int:
    """``tcpi_bytes_sent`` less ``tcpi_bytes_retrans`` of struct tcp_info."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
    sent, again = struct.unpack_from("QQ", info, 200)
    return int(sent) - int(again)


def measured(act: Callable[[], object]) -> int:
    """Bytes that this rank sends in ``act``."""
    dist.barrier()
    before = bytes_sent()
    act()
    # When every rank has what it waited for, everything has been sent.
    dist.barrier()
    return bytes_sent() - before


def wire_job(rank: int, world_size: int, method: str, numel: int) -> tuple[int, float]:
    """Bytes that were sent and that the communicator says it sends."""
    del rank
    communicator, buffer = world(), torch.ones(numel)
    if method == "all_gather":
        nbytes = communicator.all_gather_bytes(numel * buffer.itemsize)
        return measured(lambda: communicator.all_gather(buffer, 0).wait()), nbytes
    collective = getattr(communicator, method)(numel, buffer.dtype)
    return measured(partial(run_collective, collective, buffer)), collective.sent_bytes


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("method", "volume"), [("reduce_scatter_mean", 1), ("all_gather", 1), ("all_reduce_mean", 2)]
)
def test_collectives_send_no_byte_too_many(
    ranks: Pools, world_size: int, method: str, volume: int
) -> None:
    numel = 3 * 2**19  # 6 MB
    ideal = volume * (world_size - 1) / world_size * numel * 4
    for sent, promised in ranks(world_size).run(wire_job, method, numel):
        assert sent == pytest.approx(ideal, rel=0.02)
        assert promised == ideal


class Wide(nn.Module):
    """About 4 MB of parameters, none of which the buckets of these tests cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(300, 1000), nn.Linear(1000, 601)
        self.last = nn.Linear(601, 150)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def step_job(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, float, int]:
    """Bytes that a warm training step sent, that its statistics say, and of all parameters."""
    del world_size
    torch.manual_seed(rank)
    model = Wide()
    compiled = torch.compile(model, backend="fxcomm", options=options)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)

    def step() -> None:
        compiled(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fxcomm.synchronize(model)  # gathers run on, and would be counted in the next step

    for _ in range(2):
        step()
    sent = measured(step)
    nbytes = sum(p.numel() * p.itemsize for p in model.parameters())
    return sent, fxcomm.stats(model).wire_bytes, nbytes


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stage", ["zero2", "zero1", "ddp"])
def test_a_step_moves_what_plain_data_parallelism_does(
    ranks: Pools, world_size: int, stage: str
) -> None:
    options = {"stage": stage, "lowering": "eager", "bucket_mb": 1}
    for sent, counted, nbytes in ranks(world_size).run(step_job, options):
        ideal = 2 * (world_size - 1) / world_size * nbytes
        assert sent == pytest.approx(ideal, rel=0.02)
        assert counted == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    ("dtypes", "part"),
    [
        ({"reduce_dtype": "bfloat16"}, 0.75),
        ({"gather_dtype": "bfloat16"}, 0.75),
        ({"reduce_dtype": "bfloat16", "gather_dtype": "bfloat16"}, 0.5),
    ],
    ids=["reduce", "gather", "both"],
)
def test_16_bits_on_the_wire_halve_the_bytes(
    ranks: Pools, dtypes: dict[str, str], part: float
) -> None:
    options = {"lowering": "eager", "bucket_mb": 1, **dtypes}
    for sent, counted, nbytes in ranks(2).run(step_job, options):
        assert sent == pytest.approx(part * nbytes, rel=0.02)
        assert counted == pytest.approx(sent, rel=0.01)
