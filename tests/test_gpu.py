"""What only a CUDA device can show; ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor.utils import run_and_get_code

import fxcomm
from fxcomm.backends import dynamo
from tests.oracle import Trained, assert_equal_training, train_alone, train_ranks
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO

pytestmark = pytest.mark.gpu

Pools = Callable[[int], Ranks]


@pytest.mark.parametrize("case", ["mlp", "gpt", "reused", "partly_used"])
@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_two_gloo_ranks_on_one_device(ranks: Pools, stage: str, case: str) -> None:
    options = {"stage": stage, "lowering": "eager", "bucket_mb": 0.001}
    expected = train_alone(2, case)
    for trained in ranks(2).run(train_ranks, case, options, device="cuda"):
        assert_equal_training(trained, expected, rtol=1e-9)


def _on_one_nccl_rank(process: int, job: Callable[..., Any], queue: Any) -> None:
    del process
    # One rank is plain Inductor for users; here it stands for any number of NCCL ranks.
    dynamo.training_group = lambda options: dist.group.WORLD  # type: ignore[assignment]
    rendezvous = os.path.join(tempfile.mkdtemp(), "rendezvous")
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    queue.put(job())
    dist.destroy_process_group()


def on_one_nccl_rank(job: Callable[..., Any]) -> Any:
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_on_one_nccl_rank, (job, queue), nprocs=1)
    return queue.get()


def _train_with_inductor() -> Trained:
    return train_ranks(0, 1, "gpt", {"bucket_mb": 0.002}, device="cuda")


def test_nccl_matches_one_process() -> None:
    trained = on_one_nccl_rank(_train_with_inductor)
    assert_equal_training(trained, train_alone(1, "gpt"), rtol=1e-9)


def _emitted_code() -> list[str]:
    case = ZOO["gpt"]
    model = case.model().cuda()
    compiled = torch.compile(model, backend="fxcomm", options={"bucket_mb": 0.002})
    optimizer = torch.optim.AdamW(compiled.parameters())
    batch = case.batch(0, ROWS).cuda()

    def two_steps() -> None:
        for _ in range(2):
            case.loss(compiled(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    _, codes = run_and_get_code(two_steps)
    return list(codes)


def test_nccl_launches_come_early_in_emitted_code() -> None:
    (code,) = [c for c in on_one_nccl_rank(_emitted_code) if "reduce_scatter_tensor" in c]
    lines = code[code.index("def call") :].splitlines()
    launches = [i for i, line in enumerate(lines) if "reduce_scatter_tensor.default(" in line]
    kernels = [i for i, line in enumerate(lines) if ".run(" in line or "extern_kernels" in line]
    assert len(launches) > 2
    assert sum(kernel > launches[0] for kernel in kernels) > len(kernels) // 4


def _train_in_bf16() -> tuple[list[float], torch.dtype, int]:
    case = ZOO["gpt"]
    model = case.model().to("cuda", torch.bfloat16)
    compiled = torch.compile(model, backend="fxcomm", options={"bucket_mb": 0.002})
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        batch = case.batch(0, ROWS).cuda()
        loss = case.loss(compiled(batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = optimizer.state_dict()["state"][0]["exp_avg"]
    return losses, state.dtype, fxcomm.optimizer_state_bytes(optimizer)


def test_bf16_trains_with_fp32_masters() -> None:
    losses, state_dtype, _ = on_one_nccl_rank(_train_in_bf16)
    assert losses[-1] < losses[0] - 0.5
    assert state_dtype == torch.float32


def _peak_memory() -> tuple[int, int]:
    """Parameter bytes, and the peak of a step above what lives between steps."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))).cuda()
    compiled = torch.compile(model, backend="fxcomm", options={"bucket_mb": 8, "in_flight_mb": 16})
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    x = torch.randn(8, 1024, device="cuda")
    peak = 0
    for _ in range(4):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return sum(p.nbytes for p in model.parameters()), peak


def test_memory_of_a_step_is_bounded_by_the_limit() -> None:
    parameters, peak = on_one_nccl_rank(_peak_memory)
    # One rank's shards are whole gradients; buckets beyond the limit must be gone.
    assert peak < parameters + 64 * 2**20
