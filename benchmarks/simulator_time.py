"""Milliseconds that a simulation takes, by number of buckets, steady state included.

python benchmarks/simulator_time.py
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

from fxcomm.analysis.costs import (
    LinkCurve,
    Schedule,
    StepProblem,
    TensorTimes,
    by_first_use,
    whole_tensors,
)
from fxcomm.analysis.simulate import step_seconds


def problem_of(count: int) -> StepProblem:
    """A step of ``count`` tensors of random sizes, with as much communication as compute."""
    rng = random.Random(count)
    sizes = [rng.randint(1_000, 200_000) for _ in range(count)]
    total, forward, backward = sum(sizes), 0.1, 0.2
    curve = LinkCurve.of_link(5e-5, 4 * total / 0.15)
    tensors = (
        TensorTimes(f"p{i}", size, 4, *(backward * done / total,) * 2, forward * (1 - done / total))
        for i, (size, done) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True))
    )
    return StepProblem(
        *(tuple(tensors), forward, backward, curve, curve), launch=2e-5, contention=1.2
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    for count in args.buckets:
        problem = problem_of(count)
        buckets = whole_tensors(problem, range(count))
        schedule = Schedule(buckets, by_first_use(problem, buckets))
        took = []
        for _ in range(args.runs):
            start = time.perf_counter()
            step_seconds(problem, schedule)
            took.append((time.perf_counter() - start) * 1e3)
        spread = f"{min(took):.2f} to {max(took):.2f}"
        print(f"{count:>6} buckets: {statistics.median(took):.2f} ms ({spread})")


if __name__ == "__main__":
    main()
