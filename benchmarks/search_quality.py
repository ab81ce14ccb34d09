"""How good the search is on large models that fit on no machine here: their parameters on the meta
device, and costs from a stated profile.

    python benchmarks/search_quality.py

prints, for each model and link, the best named baseline, what is found in a second, the bound, and
what limits the step. Compute is taken as matrix products at the profile's rate: an accelerator of
400 TFLOP/s in bf16 (an H100 at 40% of its dense peak), 8 ranks a host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fxcomm.analysis.costs import LinkCurve, StepProblem, TensorTimes
from fxcomm.analysis.search import Limits, search

FLOPS = 400e12
TOKENS = 8192  # of a rank, in a step
ITEMSIZE = 2
LATENCY = 20e-6  # of a collective
LAUNCH = 10e-6
MEMORY_RATE = 2.5e12  # bytes a second, for the update
UPDATE_TRAFFIC = 14  # bytes of memory moved for each byte of parameters: state, master, gradient
IN_FLIGHT = 2 * 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder: rows of its embedding, width, layers, width of keys and values, of the MLP, how
    many matrices the MLP has, whether head and embedding are one."""

    vocabulary: int
    width: int
    layers: int
    key_width: int
    inner: int
    mlp: int = 2
    tied: bool = False
    bias: bool = False


SHAPES = {
    "GPT-2 124M": Shape(50257, 768, 12, 768, 3072, tied=True, bias=True),
    "GPT-J 6B": Shape(50400, 4096, 28, 4096, 16384, bias=True),
    "Qwen2.5-7B": Shape(152064, 3584, 28, 512, 18944, mlp=3, bias=True),
}


def build(shape: Shape) -> nn.ModuleDict:
    """The parameters, in order of use, on the meta device."""

    def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
        return nn.Linear(columns, rows, bias=bias)

    def block() -> nn.ModuleDict:
        width, kv = shape.width, shape.key_width
        parts: dict[str, nn.Module] = {
            "norm1": nn.RMSNorm(width),
            "q": linear(width, width, shape.bias),
            "k": linear(kv, width, shape.bias),
            "v": linear(kv, width, shape.bias),
            "o": linear(width, width),
            "norm2": nn.RMSNorm(width),
        }
        parts |= {f"up{i}": linear(shape.inner, width) for i in range(shape.mlp - 1)}
        return nn.ModuleDict(parts | {"down": linear(width, shape.inner)})

    with torch.device("meta"):
        parts: dict[str, nn.Module] = {"embedding": nn.Embedding(shape.vocabulary, shape.width)}
        parts["blocks"] = nn.ModuleList(block() for _ in range(shape.layers))
        parts["norm"] = nn.RMSNorm(shape.width)
        if not shape.tied:
            parts["head"] = linear(shape.vocabulary, shape.width)
        return nn.ModuleDict(parts)


def problem_for(shape: Shape, bytes_per_second: float) -> StepProblem:
    """The step on a link of so many bytes a second each way; N - 1 of N parts of a bucket travel,
    with N large. A weight's gradient is a matrix product as large as its forward's."""
    named = [(name, p.numel()) for name, p in build(shape).named_parameters()]
    work = {n: 0.0 if n.startswith("embedding") else 2.0 * size * TOKENS for n, size in named}
    if shape.tied:
        work["head"] = 2.0 * shape.vocabulary * shape.width * TOKENS
    forward = sum(work.values()) / FLOPS
    curve = LinkCurve.of_link(LATENCY, bytes_per_second)
    return StepProblem(
        tensors=tuple(_tensors(named, work, forward)),
        forward=forward,
        backward=2 * forward,
        reduce=curve,
        gather=curve,
        launch=LAUNCH,
        update_latency=LAUNCH,
        update_per_byte=UPDATE_TRAFFIC / MEMORY_RATE / 64,  # a rank updates its shard of 64
    )


def _tensors(
    named: list[tuple[str, int]], work: dict[str, float], forward: float
) -> Iterator[TensorTimes]:
    needed, done = {}, 0.0
    for name, _ in named:
        needed[name] = done
        done += work[name] / FLOPS
    for name, size in reversed(named):
        # Its gradient comes when the backward has undone what follows it, and the layer itself.
        ready = min(2 * forward, 2 * (forward - needed[name]))
        yield TensorTimes(name, size, ITEMSIZE, ready, ready, needed[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds of a search")
    parser.add_argument("--gbit", type=float, nargs="*", default=[100, 200, 400, 800])
    args = parser.parse_args()
    print("| model | Gbit/s | ratio | best baseline ms | found ms | bound ms | gap | buckets | s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, shape in SHAPES.items():
        for gbit in args.gbit:
            begin = time.perf_counter()
            problem = problem_for(shape, gbit * 1e9 / 8)
            found = search(problem, Limits(in_flight_bytes=IN_FLIGHT), budget_s=args.budget)
            took = time.perf_counter() - begin
            link = 2 * problem.reduce.seconds(problem.nbytes)
            best, seconds = min(found.baselines.items(), key=lambda item: item[1])
            print(
                f"| {name} | {gbit:g} | {link / problem.compute:.2f} | {seconds * 1e3:.1f} ({best})"
                f" | {found.seconds * 1e3:.1f} | {found.bound.seconds * 1e3:.1f} | {found.gap:.1%}"
                f" | {len(found.schedule.buckets)} | {took:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
