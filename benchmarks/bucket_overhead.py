"""What a bucket costs the host in each step, apart from its bytes: ``python bucket_overhead.py``.

One process of a group whose collectives do nothing trains a chain of small layers, with all of them
in one bucket and with a bucket for each, in turns. The difference of the step times over the
difference of the bucket counts is the price of a bucket: launch, wait, update and gather.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

import fxcomm

WIDTH = 8


def make_step(layers: int, bucket_mb: float) -> Callable[[], None]:
    """A training step of a chain of layers without biases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    options: dict[str, Any] = {"bucket_mb": bucket_mb}
    compiled = torch.compile(model, backend="fxcomm", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x: Tensor = torch.randn(4, WIDTH)

    def step() -> None:
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fxcomm.synchronize(model)

    return step


def main() -> None:
    """Prints microseconds per bucket and step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    one_layer = WIDTH * WIDTH * 4 / 2**20
    steps = {1: make_step(args.layers, 1000.0), args.layers: make_step(args.layers, one_layer)}
    times: dict[int, list[float]] = {count: [] for count in steps}
    for number in tqdm(range(args.rounds)):
        for count, step in steps.items():
            start = time.perf_counter()
            step()
            if number > 4:  # the first steps plan and compile
                times[count].append(time.perf_counter() - start)
    few, many = (statistics.median(times[count]) for count in steps)
    each = (many - few) / (args.layers - 1)
    print(f"1 bucket {few * 1e3:.2f} ms, {args.layers} buckets {many * 1e3:.2f} ms per step")
    print(f"{each * 1e6:.1f} us per bucket and step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
