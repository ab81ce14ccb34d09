"""The snippet of the README, as it stands there, under torchrun and with Inductor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

README = Path(__file__).parents[1] / "README.md"
STEPS = 4

IMPORTS_AND_DATA = """
import os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.test_snippet import Model, batches

loss_fn = F.mse_loss
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(RANK)
data = [(x.chunk(WORLD_SIZE)[RANK], y.chunk(WORLD_SIZE)[RANK]) for x, y in batches()]
"""

SAVE = """
if RANK == 0:
    torch.save(model._orig_mod.state_dict(), sys.argv[1])
dist.destroy_process_group()
"""


class Model(nn.Module):
    """Starts from seed 0 on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, dtype=torch.float64, generator=generator),
            torch.randn(8, 3, dtype=torch.float64, generator=generator),
        )
        for _ in range(STEPS)
    ]


def snippet() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (block,) = [b for b in blocks if "init_process_group" in b]
    return block


def test_snippet_matches_one_process(tmp_path: Path) -> None:
    script, saved = tmp_path / "script.py", tmp_path / "model.pt"
    script.write_text(IMPORTS_AND_DATA + snippet() + SAVE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(saved)]
    root = str(README.parent)
    done = subprocess.run(
        command,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr[-4000:]

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for x, y in batches():
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in torch.load(saved).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12)
