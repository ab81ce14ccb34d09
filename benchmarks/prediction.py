"""How well the simulator predicts: every named baseline, the first and the tuned plan, predicted
from a few measured steps and then measured, on whatever link the ranks have.

Run it as ranks, one core each: under torchrun, or in emulated hosts. It trains one model and
switches its plan in turns, so that all plans meet the same machine:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/prediction.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxcomm
from fxcomm.analysis.baselines import NAMES, baseline
from fxcomm.analysis.bounds import lower_bound
from fxcomm.analysis.costs import StepProblem
from fxcomm.analysis.schedules import planned, schedule_of
from fxcomm.analysis.simulate import simulate
from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, GPTConfig
from text import corpus, windows

MOST_TUNING_STEPS = 200


@dataclass(frozen=True)
class Row:
    """One plan: seconds of a step, predicted and measured (median, least and most over rounds)."""

    plan: str
    buckets: int
    predicted: float
    exposed_predicted: float
    measured: float
    least: float
    most: float

    @property
    def error(self) -> float:
        """By which part the prediction is off."""
        return self.predicted / self.measured - 1


class Trainer:
    """The model in training on this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        gpt = GPTConfig(
            vocab=args.vocab, context=args.context, layers=args.layers, width=args.width
        )
        self.module = GPT(gpt)
        self.model = cast(nn.Module, torch.compile(self.module, backend="fxcomm"))
        self._clip = args.clip
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._data: Iterator[tuple[Tensor, Tensor]] = windows(
            corpus(),
            batch=args.batch,
            context=args.context,
            seed=0,
            rank=dist.get_rank(),
            device=torch.device("cpu"),
        )

    def step(self) -> None:
        x, y = next(self._data)
        F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).backward()
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tune(self) -> fxcomm.Tuned:
        """Trains until fxcomm has settled on a plan."""
        for _ in range(MOST_TUNING_STEPS):
            self.step()
            outcome = fxcomm.tuned(self.model)
            if outcome is not None:
                return outcome
        raise SystemExit(f"still tuning after {MOST_TUNING_STEPS} steps")

    def seconds(self, plan: OverlapPlan, warm_up: int, steps: int) -> float:
        """Seconds of a step by ``plan``; the slowest rank counts."""
        fxcomm.synchronize(self.module)
        REGISTRY.models_in(self.module)[0].switch_plan(0, plan)
        for _ in range(warm_up):
            self.step()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = torch.tensor((time.perf_counter() - start) / steps)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()


def plans_of(outcome: fxcomm.Tuned, problem: StepProblem, first: OverlapPlan) -> list[OverlapPlan]:
    """The first plan, every baseline, and what was tuned."""
    named = [planned(baseline(n, problem), problem, first, n)[0] for n in NAMES]
    others = [] if outcome.plan == first else [outcome.plan]
    return [first, *named, *others]


def measure(trainer: Trainer, args: argparse.Namespace) -> tuple[list[Row], StepProblem]:
    trainer.step()
    first = REGISTRY.models_in(trainer.module)[0].arenas[0].plan
    outcome = trainer.tune()
    if outcome.problem is None:
        raise SystemExit(f"no problem to predict from ({outcome.why}); is FXCOMM_CACHE set?")
    if dist.get_rank() == 0:
        print(outcome.why, file=sys.stderr, flush=True)
    plans = plans_of(outcome, outcome.problem, first)
    seconds: dict[str, list[float]] = {plan.name: [] for plan in plans}
    for turn in range(args.rounds):
        for plan in plans if turn % 2 == 0 else reversed(plans):
            seconds[plan.name].append(trainer.seconds(plan, args.warm_up, args.steps))
            if dist.get_rank() == 0:
                took = seconds[plan.name][-1] * 1e3
                print(f"round {turn + 1}: {plan.name} {took:.1f} ms", file=sys.stderr, flush=True)
    return [_row(plan, outcome.problem, seconds[plan.name]) for plan in plans], outcome.problem


def _row(plan: OverlapPlan, problem: StepProblem, seconds: list[float]) -> Row:
    step = simulate(problem, schedule_of(plan))
    return Row(
        plan.name,
        len(plan.layout.buckets),
        step.seconds,
        step.exposed,
        statistics.median(seconds),
        min(seconds),
        max(seconds),
    )


def report(rows: list[Row], problem: StepProblem) -> str:
    """A Markdown table, and how far the ranking agrees."""
    link = sum(c.seconds(problem.nbytes) for c in (problem.reduce, problem.gather))
    bound = lower_bound(problem, in_backward=False)
    lines = [
        f"compute {problem.compute * 1e3:.0f} ms, communication {link * 1e3:.0f} ms (ratio "
        f"{link / problem.compute:.2f}), contention {problem.contention:.2f}; bound "
        f"{bound.seconds * 1e3:.0f} ms: {bound.reason}",
        "",
        "| plan | buckets | predicted ms | measured ms | min | max | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: row.measured):
        lines.append(
            f"| {row.plan} | {row.buckets} | {row.predicted * 1e3:.1f} | {row.measured * 1e3:.1f} "
            f"| {row.least * 1e3:.1f} | {row.most * 1e3:.1f} | {row.error:+.1%} |"
        )
    wrong = sum(
        (a.predicted - b.predicted) * (a.measured - b.measured) < 0
        and (a.least > b.most or b.least > a.most)
        for i, a in enumerate(rows)
        for b in rows[:i]
    )
    pairs = len(rows) * (len(rows) - 1) // 2
    worst = max(abs(row.error) for row in rows)
    lines += ["", f"largest error {worst:.1%}; {wrong} of {pairs} pairs ranked wrongly, ties aside"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--width", type=int, default=384)
    add("--context", type=int, default=256)
    add("--vocab", type=int, default=8192)
    add("--batch", type=int, default=4)
    add("--clip", type=float, default=0.0)
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=4)
    add("--warm-up", type=int, default=2)
    add("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, problem = measure(Trainer(args), args)
    if dist.get_rank() == 0:
        print(report(rows, problem))
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
