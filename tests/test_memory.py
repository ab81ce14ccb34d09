"""Memory: what a step holds, beside DistributedDataParallel in the same processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Ranks

WIDTH, LAYERS = 1024, 24
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4


class Wide(nn.Module):
    """Parameters that dwarf everything else: 96 MB of them, a few rows of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _peak_over(action: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory peaked above its start, in ``action``."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak
    before = _resident()
    action()
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before


def first_backward_job(rank: int, world_size: int, system: str) -> int:
    model: nn.Module = Wide()
    if system == "ddp":
        model = DistributedDataParallel(model)
    else:
        model = torch.compile(model, backend="fxcomm", options={"lowering": "eager"})
    loss = model(torch.randn(2, WIDTH)).square().mean()
    return _peak_over(loss.backward)


def _in_fresh_processes(system: str) -> list[int]:
    """What earlier tests left in a process's heap would be measured as well."""
    ranks = Ranks(2)
    try:
        return ranks.run(first_backward_job, system)
    finally:
        ranks.stop()


def test_first_step_needs_no_more_than_ddp() -> None:
    """The graphs run as captured and gradients are reduced one by one, without buckets."""
    # DDP's buckets exist before backward; only its gradients come on top.
    for ours, ddp in zip(_in_fresh_processes("fxcomm"), _in_fresh_processes("ddp"), strict=True):
        assert ours < ddp + PARAMETER_BYTES / 2
