"""Step time, memory and wire bytes of fxcomm beside compiled DDP, on the example's GPT.

    python benchmarks/compare_ddp.py                      # starts its own ranks
    python benchmarks/compare_ddp.py --quick
    python benchmarks/compare_ddp.py --systems ddp fxcomm:zero2 fxcomm:ddp,bucket_mb=5

A system is ``ddp`` (compiled with Inductor), ``ddp-eager``, or ``fxcomm`` with an optional stage
and options, as above. The first one listed is the baseline of the ratios.

All systems live in the same processes and take turns in blocks of steps (A B, B A, ...), so a
ratio always comes from one run on one machine. Before anything is timed, their losses must agree:
same initial weights, same data. Peak memory needs a process per system, so it is measured in runs
of its own. Under torchrun (``torchrun ... benchmarks/compare_ddp.py``) only the first part runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from counters import loopback_sent, machine, peak_memory, reset_peak_memory
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fxcomm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, parameter_count
from text import corpus, windows

TIMEOUT = timedelta(minutes=5)
MEMORY_STEPS = 3
MOST_TUNING_STEPS = 200
DEFAULT_SYSTEMS = ("ddp", "fxcomm:zero2")
MEGA = 1e6

Batch = tuple[Tensor, Tensor]


# ---------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class System:
    """One way to train, as named on the command line."""

    name: str
    kind: str  # "ddp", "ddp-eager" or "fxcomm"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """What to measure and how long."""

    gpt: GPTConfig
    systems: tuple[System, ...]
    ranks: int
    batch: int
    rounds: int
    steps: int
    check_steps: int
    tolerance: float
    lr: float
    clip: float
    fused: bool
    seed: int


@dataclass(frozen=True)
class Block:
    """One turn of one system."""

    step_s: float  # mean over the timed steps; the slowest rank counts
    wire_bytes: float  # per step and rank, read off the interface


@dataclass(frozen=True)
class Row:
    """What came out for one system."""

    system: str
    median_s: float
    min_s: float
    max_s: float
    ratio: float  # of medians, to the baseline
    ratio_min: float  # over rounds: each block against the baseline's block of the same round
    ratio_max: float
    wire_bytes: float  # least over blocks: other processes' traffic can only add
    wire_ideal: float  # 2(N-1)/N of the parameter bytes
    stats_wire_bytes: float | None  # by fxcomm's own count
    exposed_s: float | None


@dataclass(frozen=True)
class Memory:
    """Peak bytes of the largest rank, training one system alone."""

    start: int  # from process start through compilation and the first steps
    steady: int  # in the steps after that


# --------------------------------------------------------------------------------- one system


class Runner:
    """A system in training on this rank."""

    def __init__(self, system: System, config: Config, device: torch.device) -> None:
        self.system = system
        self.device = device
        self._clip = config.clip
        torch.manual_seed(config.seed)
        self.model = _build(system, config.gpt, device)
        self._opt = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, fused=config.fused or None
        )
        self._data: Iterator[Batch] = windows(
            corpus(),
            batch=config.batch,
            context=config.gpt.context,
            seed=config.seed,
            rank=dist.get_rank(),
            device=device,
        )

    def step(self) -> Tensor:
        x, y = next(self._data)
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._opt.step()
        self._opt.zero_grad()
        return loss.detach()

    def tune(self) -> str:
        """Train until fxcomm has settled on a plan; return what it says."""
        if self.system.kind != "fxcomm":
            return ""
        for _ in range(MOST_TUNING_STEPS):
            outcome = fxcomm.tuned(self.model)
            if outcome is not None:
                measured = {n: round(s * 1e3, 1) for n, s in outcome.measured.items()}
                predicted = {n: round(s * 1e3, 1) for n, s in outcome.predicted.items()}
                return f"{outcome.why}; ms measured {measured}, predicted {predicted}"
            self.step()
        raise SystemExit(f"{self.system.name} is still tuning after {MOST_TUNING_STEPS} steps")

    def losses(self, steps: int) -> list[float]:
        """Train; return each step's loss, the mean over ranks."""
        losses = torch.stack([self.step() for _ in range(steps)])
        self.drain()
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()

    def block(self, steps: int) -> Block:
        """One untimed step, for a system's pipeline fills there, then ``steps`` timed ones."""
        sent = _sent_by_all()
        self.step()
        self._catch_up()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._catch_up()
        seconds = torch.tensor((time.perf_counter() - begin) / steps, device=self.device)
        self.drain()
        wire = (_sent_by_all() - sent) / ((steps + 1) * dist.get_world_size())
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return Block(step_s=seconds.item(), wire_bytes=wire)

    def drain(self) -> None:
        """Leave nothing in flight that the next system would have to share the link with."""
        if self.system.kind == "fxcomm":
            fxcomm.synchronize(self.model)
        self._catch_up()

    def _catch_up(self) -> None:
        if self.device.type == "cuda":  # the compute stream only: gathers may be in flight
            torch.cuda.current_stream().synchronize()


def _build(system: System, config: GPTConfig, device: torch.device) -> nn.Module:
    model = GPT(config).to(device)
    if system.kind == "fxcomm":
        options = system.options or None
        return cast(nn.Module, torch.compile(model, backend="fxcomm", options=options))
    ddp = DistributedDataParallel(model)
    return cast(nn.Module, torch.compile(ddp)) if system.kind == "ddp" else ddp


def _sent_by_all() -> int:
    """The interface's count at a moment when every rank stands still."""
    dist.barrier()
    sent = loopback_sent()
    dist.barrier()
    return sent


# ------------------------------------------------------------------------------- measurements


def check_losses(runners: Sequence[Runner], config: Config) -> float:
    """Train a few steps with each; return the largest relative difference to the first."""
    baseline, *others = [(r.system.name, r.losses(config.check_steps)) for r in runners]
    worst = 0.0
    for name, losses in others:
        pairs = zip(losses, baseline[1], strict=True)
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        if not difference <= config.tolerance:
            raise SystemExit(
                f"losses of {name} and {baseline[0]} differ by {difference:.2e} (relative), more "
                f"than {config.tolerance:.0e}:\n  {name}: {losses}\n  {baseline[0]}: {baseline[1]}"
            )
        worst = max(worst, difference)
    return worst


def take_turns(runners: Sequence[Runner], config: Config) -> dict[str, list[Block]]:
    """Interleaved blocks: A B, B A, A B, ... after a warm-up block of each."""
    blocks: dict[str, list[Block]] = {runner.system.name: [] for runner in runners}
    for runner in runners:
        runner.block(1)
    for number in range(config.rounds):
        for runner in runners if number % 2 == 0 else reversed(runners):
            blocks[runner.system.name].append(runner.block(config.steps))
        if dist.get_rank() == 0:
            latest = ", ".join(f"{name} {b[-1].step_s * 1e3:.1f}" for name, b in blocks.items())
            print(f"round {number + 1}/{config.rounds}: {latest} ms", file=sys.stderr, flush=True)
    return blocks


def summarise(runner: Runner, blocks: list[Block], baseline: list[Block], ideal: float) -> Row:
    seconds = [block.step_s for block in blocks]
    base = [block.step_s for block in baseline]
    paired = [ours / theirs for ours, theirs in zip(seconds, base, strict=True)]
    stats = fxcomm.stats(runner.model) if runner.system.kind == "fxcomm" else None
    return Row(
        system=runner.system.name,
        median_s=statistics.median(seconds),
        min_s=min(seconds),
        max_s=max(seconds),
        ratio=statistics.median(seconds) / statistics.median(base),
        ratio_min=min(paired),
        ratio_max=max(paired),
        wire_bytes=min(block.wire_bytes for block in blocks),
        wire_ideal=ideal,
        stats_wire_bytes=stats.wire_bytes if stats else None,
        exposed_s=stats.exposed_s if stats else None,
    )


def measure_times(config: Config, device: torch.device) -> dict[str, Any]:
    """All systems in these processes, in turns."""
    runners = [Runner(system, config, device) for system in config.systems]
    agreement = check_losses(runners, config)
    for runner in runners:
        said = runner.tune()
        runner.drain()
        if said and dist.get_rank() == 0:
            print(f"{runner.system.name}: {said}", file=sys.stderr, flush=True)
    blocks = take_turns(runners, config)
    parameters = parameter_count(runners[0].model)
    world = dist.get_world_size()
    ideal = 2 * (world - 1) / world * parameters * 4
    baseline = blocks[config.systems[0].name]
    rows = [summarise(r, blocks[r.system.name], baseline, ideal) for r in runners]
    return {
        "parameters": parameters,
        "loss_difference": agreement,
        "rows": [asdict(row) for row in rows],
        "blocks": {name: [asdict(b) for b in series] for name, series in blocks.items()},
    }


def measure_memory(config: Config, device: torch.device) -> dict[str, Any]:
    """One system alone in these processes."""
    runner = Runner(config.systems[0], config, device)
    runner.losses(MEMORY_STEPS)
    start = peak_memory(device)
    reset_peak_memory(device)
    runner.losses(MEMORY_STEPS)
    peaks = torch.tensor([start, peak_memory(device)], device=device)
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    return asdict(Memory(*peaks.tolist()))


# ------------------------------------------------------------------------------------- report


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    heads = ["system", "step ms", "min", "max", "ratio", "ratio by round", "wire MB", "of ideal"]
    heads += ["exposed ms", "peak MB, first steps", "peak MB, later"]
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    lines += [_cells(row, result.get("memory", {}).get(row["system"])) for row in result["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: dict[str, Any], memory: dict[str, int] | None) -> list[str]:
    exposed = row["exposed_s"]
    return [
        row["system"],
        f"{row['median_s'] * 1e3:.1f}",
        f"{row['min_s'] * 1e3:.1f}",
        f"{row['max_s'] * 1e3:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}",
        f"{row['wire_bytes'] / MEGA:.2f}",
        f"{row['wire_bytes'] / row['wire_ideal']:.3f}" if row["wire_ideal"] else "-",
        "-" if exposed is None else f"{exposed * 1e3:.1f}",
        "-" if memory is None else f"{memory['start'] / MEGA:.0f}",
        "-" if memory is None else f"{memory['steady'] / MEGA:.0f}",
    ]


def report(result: dict[str, Any], config: Config, json_file: Path | None) -> None:
    gpt, where = config.gpt, result["machine"]
    print(
        f"\nGPT of {result['parameters'] / MEGA:.1f} M parameters (layers {gpt.layers}, width "
        f"{gpt.width}, context {gpt.context}, vocab {gpt.vocab}), batch {config.batch} per rank, "
        f"{config.ranks} ranks; {config.rounds} rounds of {config.steps} timed steps.\n"
        f"torch {where['torch']}, {where['gpu'] or str(where['cpus']) + ' CPUs'}, load average "
        f"{where['load']:.1f}. Losses agree within {result['loss_difference']:.1e} (relative) "
        f"over {config.check_steps} steps.\n\n{table(result)}\n\n"
        "Medians, minima and maxima are over blocks. Wire bytes are sent per step and rank, by "
        "the loopback\ninterface's count; peak memory is the largest rank's, compilation and the "
        f"first {MEMORY_STEPS} steps, then the next."
    )
    if json_file:
        json_file.write_text(json.dumps(result | {"config": asdict(config)}, indent=2) + "\n")


# ------------------------------------------------------------------------------------ launching


def spawn(flags: Sequence[str], part: str, config: Config, systems: Sequence[System]) -> Any:
    """Run one part on fresh ranks, one thread each, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={config.ranks}", __file__, *flags, "--part", part]
        command += ["--json", str(out), "--systems", *(system.name for system in systems)]
        code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
        if code or not out.exists():
            raise SystemExit(f"the {part} run failed (exit status {code})")
        return json.loads(out.read_text())


def launch(flags: Sequence[str], config: Config, json_file: Path | None, memory: bool) -> None:
    result = spawn(flags, "times", config, config.systems)
    if memory:
        result["memory"] = {
            system.name: spawn(flags, "memory", config, [system]) for system in config.systems
        }
    report(result, config, json_file)


def work(part: str | None, config: Config, json_file: Path | None) -> None:
    """This process is a rank."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    measure = measure_memory if part == "memory" else measure_times
    result = measure(config, device) | {"machine": machine()}
    if dist.get_rank() == 0:
        if part and json_file:
            json_file.write_text(json.dumps(result))
        else:
            report(result, config, json_file)
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- flags


def parse_system(text: str) -> System:
    """``ddp``, ``ddp-eager`` or ``fxcomm[:STAGE[,OPTION=VALUE...]]``."""
    kind, _, rest = text.partition(":")
    if kind not in ("ddp", "ddp-eager", "fxcomm") or (rest and kind != "fxcomm"):
        raise argparse.ArgumentTypeError(f"unknown system {text!r}: {parse_system.__doc__}")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        options[name if equals else "stage"] = _value(value if equals else name)
    return System(text, kind, options)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="fxcomm beside compiled DDP, in one run.")
    add = parser.add_argument
    add("--systems", nargs="+", type=parse_system, default=[*map(parse_system, DEFAULT_SYSTEMS)])
    add("--quick", action="store_true", help="a smaller model and fewer rounds: under 2 minutes")
    add("--ranks", type=int, default=2, help="ranks to start (not under torchrun)")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--context", type=int, default=256)
    add("--vocab", type=int, default=8192)
    add("--tied", action="store_true", help="the head shares the embedding's weight")
    add("--batch", type=int, default=4, help="windows per rank")
    add("--rounds", type=int, default=8, help="blocks of each system")
    add("--steps", type=int, default=4, help="timed steps of a block")
    add("--check-steps", type=int, default=5, help="steps over which losses must agree")
    add("--tolerance", type=float, default=1e-4, help="relative difference of losses allowed")
    add("--lr", type=float, default=3e-4)
    add("--clip", type=float, default=1.0, help="norm to clip gradients to; 0: do not clip")
    add("--fused", action="store_true", help="AdamW(fused=True)")
    add("--seed", type=int, default=0)
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--json", type=Path, metavar="FILE")
    add("--part", choices=("times", "memory"), help=argparse.SUPPRESS)
    return parser


QUICK = {"layers": 4, "width": 256, "heads": 4, "context": 128, "vocab": 4096, "rounds": 5}


def parse(flags: Sequence[str]) -> tuple[Config, argparse.Namespace]:
    parser = make_parser()
    args = parser.parse_args(flags)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(flags)
    if len({system.name for system in args.systems}) < len(args.systems):
        parser.error("each system can be listed once")
    gpt = GPTConfig(
        vocab=args.vocab,
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        tied=args.tied,
    )
    config = Config(
        gpt=gpt,
        systems=tuple(args.systems),
        ranks=int(os.environ.get("WORLD_SIZE", args.ranks)),
        batch=args.batch,
        rounds=args.rounds,
        steps=args.steps,
        check_steps=args.check_steps,
        tolerance=args.tolerance,
        lr=args.lr,
        clip=args.clip,
        fused=args.fused,
        seed=args.seed,
    )
    return config, args


def main() -> None:
    flags = sys.argv[1:]
    config, args = parse(flags)
    if "RANK" in os.environ:
        work(args.part, config, args.json)
    else:
        launch(flags, config, args.json, memory=not args.no_memory)


if __name__ == "__main__":
    main()
