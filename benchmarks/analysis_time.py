"""Seconds that the analysis and the verification of a training step take, for a GPT of 24 layers
and for one of 240.

    python benchmarks/analysis_time.py
    python benchmarks/analysis_time.py --layers 6 24 --runs 3

A step is captured and lowered as on a rank (of a fake process group, without Inductor). Analysis is
the step graph, every query on every bucket and parameter, slack and bounds; verification reads the
lowered graphs and checks their program. Prints medians of the runs, in seconds of processor time
(all of it is one thread of Python), and ratios to the first model. The garbage collector pauses, as
it does where fxcomm verifies a step: with ``--collect`` it runs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxcomm.analysis.dependencies import (
    critical_path,
    earliest_launch,
    first_use_in_next_forward,
    gather_order,
    last_read_of_old_value,
    latest_wait,
    slack,
    steady_state_bound,
)
from fxcomm.analysis.step_graph import StepGraph
from fxcomm.analysis.verify import require_valid
from fxcomm.runtime.collector import paused_collector

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.captured_gpt import CapturedStep, capture_gpt

RANK, WORLD = 1, 4


@dataclass(frozen=True)
class Row:
    """Median seconds for one model."""

    layers: int
    nodes: int
    buckets: int
    graph_s: float
    queries_s: float
    verification_s: float

    @property
    def total_s(self) -> float:
        """Analysis and verification."""
        return self.graph_s + self.queries_s + self.verification_s


def query(step: StepGraph) -> None:
    """Asks everything that there is to ask about the step."""
    for bucket, role in step.by_bucket:
        earliest_launch(step, bucket, role)
        latest_wait(step, bucket, role)
    for parameter in step.readers:
        last_read_of_old_value(step, parameter)
        first_use_in_next_forward(step, parameter)
    gather_order(step)
    slack(step)
    critical_path(step)
    steady_state_bound(step)


def run(captured: CapturedStep) -> tuple[float, float, float]:
    """Seconds for the step graph, for queries, and for verification."""
    times = [time.process_time()]
    step = captured.step_graph()
    times.append(time.process_time())
    query(step)
    times.append(time.process_time())
    require_valid(captured.programs(), in_flight_bytes=captured.arena.plan.in_flight_bytes)
    times.append(time.process_time())
    graph_s, queries_s, verification_s = (b - a for a, b in pairwise(times))
    return graph_s, queries_s, verification_s


def measure(layers: int, runs: int, *, collect: bool) -> Row:
    """The times for a GPT of so many layers."""
    torch._dynamo.reset()
    captured = capture_gpt(layers)
    times = []
    for _ in range(runs):
        gc.collect()
        with nullcontext() if collect else paused_collector():
            times.append(run(captured))
    parts = zip(*times, strict=True)
    buckets = len(captured.arena.plan.layout.buckets)
    return Row(layers, captured.node_count, buckets, *map(statistics.median, parts))


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    head = f"{'layers':>6} {'nodes':>7} {'buckets':>7} {'graph':>9} {'queries':>9} {'verify':>9}"
    lines = [f"{head} {'total':>9} {'ratio':>6}"]
    for row in rows:
        times = (row.graph_s, row.queries_s, row.verification_s, row.total_s)
        lines.append(
            f"{row.layers:>6} {row.nodes:>7} {row.buckets:>7} "
            + " ".join(f"{seconds:>8.3f}s" for seconds in times)
            + f" {row.total_s / rows[0].total_s:>6.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 240])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--collect", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Dynamo traces deep models by recursion.
    sys.setrecursionlimit(100_000)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    rows = [
        measure(layers, arguments.runs, collect=arguments.collect) for layers in arguments.layers
    ]
    dist.destroy_process_group()
    print(table(rows))


if __name__ == "__main__":
    main()
