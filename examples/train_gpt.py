"""Train a small GPT on the standard library's documentation, data-parallel.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

``train`` is the part to copy: an ordinary training loop. The rest of this file is data, flags and
reporting. ``--backend`` picks the system, ``--compare`` trains a second copy with DDP side by side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, parameter_count
from text import corpus, windows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import fxcomm

BACKENDS = ("fxcomm", "ddp", "eager")
BLOCK = 10  # steps that one system runs before the other has its turn (--compare)
TIMELINE_STEPS = 3

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """One training run: what the flags say."""

    gpt: GPTConfig = field(default_factory=GPTConfig)
    backend: str = "fxcomm"
    batch: int = 8  # windows per rank and step
    steps: int = 200
    lr: float = 1e-3
    seed: int = 0
    compare: bool = False
    expect_fall: float | None = None
    timeline: str | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.steps) < 1:
            raise ValueError("batch and steps must be at least 1")
        if self.gpt.vocab < 256:
            raise ValueError("the text is bytes: vocab must be at least 256")


@dataclass(frozen=True)
class Place:
    """Where this process runs."""

    rank: int
    world: int
    device: torch.device


# ---------------------------------------------------------------------------- the part to copy


def train(model: nn.Module, opt: torch.optim.Optimizer, data: Iterable[Batch], log: Log) -> None:
    for x, y in data:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        log.step(model, loss)


def make_model(config: GPTConfig, backend: str, place: Place) -> nn.Module:
    model: nn.Module = GPT(config).to(place.device)
    if backend == "fxcomm":
        return cast(nn.Module, torch.compile(model, backend="fxcomm"))
    if place.world > 1:  # the same with DDP, to compare
        model = DistributedDataParallel(model)
    return model if backend == "eager" else cast(nn.Module, torch.compile(model))


def start() -> Place:
    """Join the process group when torchrun launched us; otherwise run as one process."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Place(0, 1, torch.device(device))
    dist.init_process_group("nccl" if cuda else "gloo")
    return Place(dist.get_rank(), dist.get_world_size(), torch.device(device))


# ------------------------------------------------------------------------------------ reporting


class Log:
    """Losses and step times of one system, shown on a progress bar."""

    def __init__(self, name: str, config: TrainConfig, place: Place, position: int = 0) -> None:
        self.name = name
        self.losses: list[float] = []
        self.seconds: list[float] = []  # of steps that follow a step of the same system
        self._tokens = config.batch * config.gpt.context * place.world
        self.sharded = name == "fxcomm" and place.world > 1
        self._last: float | None = None
        self._bar = tqdm(
            total=config.steps,
            desc=name,
            position=position,
            disable=place.rank > 0,
            mininterval=0.5,
            dynamic_ncols=True,
        )

    def step(self, model: nn.Module, loss: Tensor) -> None:
        self.losses.append(loss.item())
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
        self._bar.set_postfix(self._figures(model), refresh=False)
        self._bar.update()

    def pause(self) -> None:
        """Another system runs now: the next step has no time that could be told."""
        self._last = None
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()

    def median_seconds(self) -> float:
        """The median step; the first tenth warms up and compiles."""
        settled = self.seconds[len(self.seconds) // 10 :]
        return statistics.median(settled) if settled else float("nan")

    def smoothed(self) -> tuple[float, float]:
        """Mean loss over the first and over the last steps."""
        window = min(20, max(1, len(self.losses) // 10))
        return statistics.fmean(self.losses[:window]), statistics.fmean(self.losses[-window:])

    def _figures(self, model: nn.Module) -> dict[str, str]:
        figures = {"loss": f"{statistics.fmean(self.losses[-20:]):.3f}"}
        if self.seconds:
            figures["tok/s"] = f"{self._tokens / statistics.median(self.seconds[-20:]):,.0f}"
        if self.sharded:
            figures["exposed"] = f"{fxcomm.stats(model).exposed_s * 1e3:.1f} ms"
        return figures


def mean_over_ranks(values: Iterable[float], place: Place) -> list[float]:
    mean = torch.tensor(list(values), dtype=torch.float32, device=place.device) / place.world
    if place.world > 1:
        dist.all_reduce(mean)
    return mean.tolist()


def say(place: Place, text: str) -> None:
    if place.rank == 0:
        print(text, flush=True)


# -------------------------------------------------------------------------------------- running


@dataclass
class Run:
    """One system in training: model, optimizer, its copy of the data, and its log."""

    model: nn.Module
    opt: torch.optim.Optimizer
    data: Iterator[Batch]
    log: Log

    def train(self, steps: int) -> None:
        train(self.model, self.opt, islice(self.data, steps), self.log)


def make_run(config: TrainConfig, backend: str, place: Place, position: int = 0) -> Run:
    torch.manual_seed(config.seed)
    model = make_model(config.gpt, backend, place)
    opt = torch.optim.AdamW(model.parameters(), lr=config.lr)
    data = windows(
        corpus(),
        batch=config.batch,
        context=config.gpt.context,
        seed=config.seed,
        rank=place.rank,
        device=place.device,
    )
    return Run(model, opt, data, Log(backend, config, place, position))


def train_blocks(runs: list[Run], steps: int) -> None:
    """Interleave the systems in blocks (A B, B A, ...), so that both meet the same machine."""
    for number, begin in enumerate(range(0, steps, BLOCK)):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.train(min(BLOCK, steps - begin))
            if run.log.sharded:  # leave nothing in flight in the other's turn
                fxcomm.synchronize(run.model)
            run.log.pause()


def report(runs: list[Run], place: Place) -> float:
    """Print what came out; return by how much the first system's loss fell."""
    falls = []
    for run in runs:
        first, last = mean_over_ranks(run.log.smoothed(), place)
        falls.append(first - last)
        step = f"{run.log.median_seconds() * 1e3:.1f} ms per step (median)"
        say(place, f"{run.log.name:>6}: loss {first:.3f} -> {last:.3f}, {step}")
    if len(runs) == 2:
        one, two = runs
        ratio = one.log.median_seconds() / two.log.median_seconds()
        say(place, f"step time {one.log.name}/{two.log.name}: {ratio:.3f}")
    return falls[0]


def write_timeline(run: Run, path: str, place: Place) -> None:
    """Trains some steps more and writes when what happened in them, for Perfetto."""
    with fxcomm.record_steps(run.model) as steps:
        run.train(TIMELINE_STEPS + 1)
    if place.rank == 0:
        fxcomm.save_timeline(path, steps)
    say(place, f"timeline of {len(steps)} steps of rank 0: {path}")


def main(arguments: list[str] | None = None) -> int:
    config = parse(arguments)
    place = start()
    backends = [config.backend, "ddp"] if config.compare else [config.backend]
    runs = [make_run(config, backend, place, i) for i, backend in enumerate(backends)]
    size = parameter_count(runs[0].model) / 1e6
    say(place, f"{size:.2f} M parameters, {place.world} rank(s) on {place.device.type}")
    if config.compare:
        train_blocks(runs, config.steps)
    else:
        runs[0].train(config.steps)
    for run in runs:
        run.log.close()
    fall = report(runs, place)
    if config.timeline is not None:
        write_timeline(runs[0], config.timeline, place)
    if place.world > 1:
        dist.destroy_process_group()
    if config.expect_fall is not None and not fall >= config.expect_fall:
        say(place, f"the loss fell by {fall:.3f}, expected at least {config.expect_fall}")
        return 1
    return 0


def parse(arguments: list[str] | None = None) -> TrainConfig:
    run, gpt = TrainConfig(), GPTConfig()
    parser = argparse.ArgumentParser(description="Train a small GPT, data-parallel.")
    add = parser.add_argument
    add("--backend", choices=BACKENDS, default=run.backend)
    add("--compare", action="store_true", help="train a second copy with compiled DDP")
    add("--layers", type=int, default=gpt.layers)
    add("--width", type=int, default=gpt.width)
    add("--heads", type=int, default=gpt.heads)
    add("--context", type=int, default=gpt.context)
    add("--vocab", type=int, default=gpt.vocab, help="rows of the embedding (text uses 256)")
    add("--untied", action="store_true", help="give the output head a weight of its own")
    add("--batch", type=int, default=run.batch, help="windows per rank")
    add("--steps", type=int, default=run.steps)
    add("--lr", type=float, default=run.lr)
    add("--seed", type=int, default=run.seed)
    add("--timeline", metavar="FILE", help="write a trace of some more steps, for Perfetto")
    add("--expect-fall", type=float, metavar="NATS", help="fail if the loss falls by less")
    flags = parser.parse_args(arguments)
    if flags.timeline is not None and flags.backend != "fxcomm":
        parser.error("--timeline needs --backend fxcomm")
    if flags.compare and flags.backend == "ddp":
        parser.error("--compare sets DDP beside another --backend")
    try:
        return TrainConfig(
            gpt=GPTConfig(
                vocab=flags.vocab,
                context=flags.context,
                layers=flags.layers,
                width=flags.width,
                heads=flags.heads,
                tied=not flags.untied,
            ),
            backend=flags.backend,
            batch=flags.batch,
            steps=flags.steps,
            lr=flags.lr,
            seed=flags.seed,
            compare=flags.compare,
            expect_fall=flags.expect_fall,
            timeline=flags.timeline,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
