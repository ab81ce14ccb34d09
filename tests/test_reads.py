"""Reads between steps see updated parameters, while gathers run on into the next forward.

The gathers of these tests are withheld: what other ranks send becomes visible only when something
waits. A read that forgot to wait is caught every time, not when the network happens to be slow.
"""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fxcomm
from fxcomm.backends import communicators
from fxcomm.registry import REGISTRY
from tests.oracle import (
    Trained,
    adamw,
    assert_close,
    assert_equal_training,
    train_alone,
    train_compiled,
    train_ranks,
)
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO

Pools = Callable[[int], Ranks]
EAGER = {"lowering": "eager", "bucket_mb": 0.001}


@dataclass
class Withheld:
    """A gather into a copy, put in its place by the wait."""

    work: Any
    buffer: Tensor
    received: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.received)


@contextmanager
def withheld_gathers() -> Iterator[None]:
    original = communicators.GlooCommunicator.all_gather

    def all_gather(self: Any, buffer: Tensor, tag: int) -> Withheld:
        received = buffer.clone()
        return Withheld(original(self, received, tag), buffer, received)

    communicators.GlooCommunicator.all_gather = all_gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        communicators.GlooCommunicator.all_gather = original  # type: ignore[method-assign]


def gathers_in_flight(model: nn.Module) -> int:
    # Asking the model for its parameters would wait.
    managed = REGISTRY._by_root[model].parameters
    gathers = REGISTRY.in_flight._gathers
    return sum(not gather.done for p in managed for gather in gathers.get(id(p.parameter), ()))


@dataclass
class Trainer:
    """A model in training on one rank, by turns with what a test does to it."""

    model: nn.Module
    compiled: Any
    optimizer: torch.optim.Optimizer
    batch: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]

    def step(self) -> None:
        self.loss(self.compiled(self.batch), self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def trainer(
    rank: int, world_size: int, case_name: str, options: dict[str, Any], steps: int = 2
) -> Trainer:
    """Some steps on, with gathers in flight if something holds them."""
    case = ZOO[case_name]
    model = case.model(seed=rank)
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    batch = case.batch(0, ROWS * world_size).chunk(world_size)[rank]
    made = Trainer(model, compiled, adamw(compiled.parameters()), batch, case.loss)
    for _ in range(steps):
        made.step()
    return made


# --- each way to read ---


def _state_dict(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return list(model.state_dict().values())


def _wrapper_state_dict(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return list(compiled.state_dict().values())


def _parameters(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def _named_parameters(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [p.detach() for _, p in compiled.named_parameters()]


def _of_a_child(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [p.detach() for child in model.children() for p in child.parameters()]


def _attributes(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    found = []
    for module in model.modules():
        names = [name for name, p in module._parameters.items() if p is not None]
        found += [getattr(module, name).detach() for name in names]
    return found


def _get_parameter(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    names = [n for m, module in model.named_modules() for n in _names(m, module)]
    return [model.get_parameter(name).detach() for name in names]


def _names(prefix: str, module: nn.Module) -> list[str]:
    present = (name for name, p in module._parameters.items() if p is not None)
    return [f"{prefix}.{name}" if prefix else name for name in present]


def _deepcopy(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [p.detach() for p in copy.deepcopy(model).parameters()]


def _pickle(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [p.detach() for p in torch.load(file, weights_only=False).parameters()]


def _average(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    average = AveragedModel(model)
    average.update_parameters(model)
    return [p.detach() for p in average.parameters()]


def _converted(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [p.detach() for p in copy.deepcopy(model).float().parameters()]


def _compiled_evaluation(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    compiled.eval()
    with torch.no_grad():
        output = compiled(batch)
    compiled.train()
    return [output]


def _eager_evaluation(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch)]


def _functional_call(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    parameters = {name: 2 * p.detach() for name, p in model.named_parameters()}
    return [torch.func.functional_call(model, parameters, (batch,)).detach()]


def _training_forward(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    return [compiled(batch).detach()]


def _frozen_graph(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    """As a GAN's discriminator while the generator trains: nothing in this graph is trained."""
    model.requires_grad_(False)
    output = compiled(batch)
    model.requires_grad_(True)
    return [output.detach()]


def _another_backend(model: nn.Module, compiled: Any, batch: Tensor) -> list[Tensor]:
    other = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        return [other(batch)]


READS = [
    _state_dict,
    _wrapper_state_dict,
    _parameters,
    _named_parameters,
    _of_a_child,
    _attributes,
    _get_parameter,
    _deepcopy,
    _pickle,
    _average,
    _converted,
    _compiled_evaluation,
    _eager_evaluation,
    _functional_call,
    _training_forward,
    _frozen_graph,
    _another_backend,
]


def read_job(
    rank: int, world_size: int, case_name: str, options: dict[str, Any]
) -> dict[str, tuple[int, float]]:
    """For each way to read: how much was in flight before, and how far the values were from those
    after a drain."""
    found = {}
    with withheld_gathers():
        training = trainer(rank, world_size, case_name, options)
        model, compiled, batch = training.model, training.compiled, training.batch
        for read in READS:
            training.step()
            in_flight = gathers_in_flight(model)
            values = [t.clone() for t in read(model, compiled, batch)]
            fxcomm.synchronize(model)
            expected = read(model, compiled, batch)
            pairs = [(a, b) for a, b in zip(values, expected, strict=True) if a.numel()]
            found[read.__name__] = in_flight, max((a - b).abs().max().item() for a, b in pairs)
    return found


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt", "broken"])
def test_reads_wait(ranks: Pools, case: str) -> None:
    for found in ranks(2).run(read_job, case, EAGER):
        for name, (in_flight, off) in found.items():
            assert in_flight > 0, f"{name}: nothing was in flight, the test shows nothing"
            assert off == 0.0, f"{name} saw old values"


# --- references held outside ---


def held_job(rank: int, world_size: int) -> tuple[bool, bool]:
    with withheld_gathers():
        training = trainer(rank, world_size, "mlp", EAGER)
        layer: Any = training.model.up
        held = layer.weight
        training.step()
        early = held.detach().clone()
        fxcomm.synchronize(training.model)
        late = held.detach().clone()
        return torch.equal(early, late), torch.equal(late, layer.weight.detach())


def test_held_references_need_synchronize(ranks: Pools) -> None:
    """And the window of these tests is open: without it they read old values."""
    for early_is_late, late_is_right in ranks(2).run(held_job):
        assert not early_is_late
        assert late_is_right


# --- parameters that are kept where no module hands them out ---


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(13, 8), nn.LSTM(8, 8), nn.Linear(8, 5)
        self.kept = [self.last.bias]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._recur(torch.tanh(self.first(x))))

    @torch._dynamo.disable
    def _recur(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(0))[0].squeeze(0)


def recurrent(seed: int) -> Recurrent:
    torch.manual_seed(seed)
    return Recurrent().double()


def train_recurrent(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    optimizer = adamw(model.parameters())
    for batch in batches:
        ZOO["mlp"].loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def recurrent_job(rank: int, world_size: int) -> list[Tensor]:
    batches = [ZOO["mlp"].batch(s, ROWS * world_size).chunk(world_size)[rank] for s in range(4)]
    with withheld_gathers():
        model: Any = torch.compile(recurrent(rank), backend="fxcomm", options=EAGER)
        return train_recurrent(model, batches)


def test_parameters_kept_elsewhere(ranks: Pools) -> None:
    """``nn.LSTM`` runs on a list of its own; nothing could make it wait."""
    batches = [ZOO["mlp"].batch(s, ROWS * 2) for s in range(4)]
    expected = train_recurrent(recurrent(0), batches)
    for actual in ranks(2).run(recurrent_job):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_close(str(i), a, b)


class Skipped(Recurrent):
    """Dynamo gives up on a forward that calls an LSTM, and runs all of it eagerly."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.first(x).unsqueeze(0))[0].squeeze(0))


def skipped_job(rank: int, world_size: int) -> str:
    model: Any = torch.compile(Skipped().double(), backend="fxcomm")
    with pytest.raises(fxcomm.FxcommError) as error:
        train_recurrent(model, [ZOO["mlp"].batch(rank, ROWS)])
    return str(error.value)


def test_a_model_of_which_nothing_is_compiled_is_refused(ranks: Pools) -> None:
    for message in ranks(2).run(skipped_job):
        assert "Skipped" in message
        assert "graph_breaks" in message


# --- code that another backend compiled ---


def other_backend_job(rank: int, world_size: int) -> tuple[int, int, int]:
    """Gathers in flight after a step: before anything else was compiled, after a strange model was
    by another backend, and after this one was."""
    with withheld_gathers():
        training = trainer(rank, world_size, "mlp", EAGER)
        found = [gathers_in_flight(training.model)]
        for model in (nn.Linear(13, 2).double(), training.model):
            torch.compile(model, backend="aot_eager")(training.batch)
            training.step()
            found.append(gathers_in_flight(training.model))
    return found[0], found[1], found[2]


def test_only_what_another_backend_reads_is_gathered_inside_the_step(ranks: Pools) -> None:
    for before, stranger, same in ranks(2).run(other_backend_job):
        assert before > 0
        assert stranger == before
        assert same == 0


# --- whole runs ---


def withheld_training_job(rank: int, world_size: int, *args: Any) -> Any:
    with withheld_gathers():
        return train_ranks(rank, world_size, *args)


@pytest.mark.parametrize("case", ["broken", "gpt", "mlp", "partly_used", "reused", "conv"])
@pytest.mark.parametrize("extra", [{}, {"commshift": False}, {"in_flight_mb": 0.001}])
def test_training_with_withheld_gathers(ranks: Pools, case: str, extra: dict[str, Any]) -> None:
    expected = train_alone(2, case)
    for actual in ranks(2).run(withheld_training_job, case, {**EAGER, **extra}):
        assert_equal_training(actual, expected)


@pytest.mark.parametrize("limit", [{}, {"in_flight_mb": 1e-6}, {"in_flight_mb": 0.002}])
def test_gathers_in_another_dtype(ranks: Pools, limit: dict[str, Any]) -> None:
    """They travel in buffers of their own, which are limited; running on changes no bit."""
    options = {**EAGER, "gather_dtype": "float32"}
    still = ranks(2).run(withheld_training_job, "gpt", {**options, "commshift": False})
    shifted = ranks(2).run(withheld_training_job, "gpt", {**options, **limit})
    for a, b in zip(shifted, still, strict=True):
        assert_equal_training(a, b, rtol=0.0)


def inductor_job(rank: int, world_size: int) -> tuple[Trained, int, float]:
    """A training, how much was in flight after one more step, and how far a forward's output then
    was from that after a drain."""
    with withheld_gathers():
        training = trainer(rank, world_size, "gpt", {"bucket_mb": 0.001}, steps=0)
        model, compiled = training.model, training.compiled
        trained = train_compiled(ZOO["gpt"], model, compiled, training.optimizer)
        training.step()
        in_flight = gathers_in_flight(model)
        output = compiled(training.batch).detach()
        fxcomm.synchronize(model)
        return trained, in_flight, (output - model(training.batch)).abs().max().item()


def test_inductor_waits(ranks: Pools) -> None:
    expected = train_alone(2, "gpt")
    for trained, in_flight, off in ranks(2).run(inductor_job):
        assert_equal_training(trained, expected)
        assert in_flight > 0
        assert off < 1e-12


# --- errors and the end ---


def failing_job(rank: int, world_size: int) -> tuple[int, list[Tensor]]:
    """An exception between forward and backward, then training goes on."""
    with withheld_gathers():
        training = trainer(rank, world_size, "mlp", EAGER)
        with pytest.raises(ZeroDivisionError):
            training.compiled(training.batch).sum() / (1 // 0)
        training.step()
        in_flight = gathers_in_flight(training.model)
        return in_flight, list(training.model.state_dict().values())


def test_an_exception_in_a_step_leaves_a_usable_model(ranks: Pools) -> None:
    (first, ours), (second, theirs) = ranks(2).run(failing_job)
    assert first > 0
    assert second > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


# Each way to leave is tried by two processes that end as scripts do, forked from one that has
# imported everything: imports take seconds. What they print goes to a file of their own.
LAST_STEP = """
    import gc, os, sys, time, torch, torch.distributed as dist
    from torch import nn
    import torch._inductor.compile_fx, fxcomm.backends.dynamo

    def train(rank, destroys, directory):
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/{destroys}", rank=rank, world_size=2
        )
        torch.manual_seed(0)
        model = torch.compile(nn.Linear(300, 300), backend="fxcomm", options={"lowering": "eager"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.full((4, 300), float(rank + step))).sum().backward()
            if rank == 1 and step == 2:
                time.sleep(1.5)  # rank 0 leaves before rank 1 takes its last step
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and destroys == "early":
            dist.destroy_process_group()
        if rank == 1:
            with open(f"{directory}/{destroys}.sum", "w") as file:
                file.write(str(model.weight.double().sum().item()))
        if destroys == "late":
            dist.destroy_process_group()

    gc.freeze()  # else each process looks through all that was imported when it ends
    children = []
    for destroys in ("early", "late", "never"):
        for rank in range(2):
            child = os.fork()
            if child == 0:
                train(rank, destroys, sys.argv[1])
                sys.exit()
            children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    assert not any(failed), failed
"""


def test_the_last_step_before_exit_is_applied(tmp_path: Path) -> None:
    """A rank that leaves, with or without ``destroy_process_group``, has sent what others need."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LAST_STEP))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        total = sum(model(torch.full((4, 300), float(r + step))).sum() for r in range(2))
        (total / 2).backward()
        optimizer.step()
    expected = pytest.approx(model.weight.double().sum().item(), rel=1e-5)
    for destroys in ("early", "late", "never"):
        assert float((tmp_path / f"{destroys}.sum").read_text()) == expected


def asking_job(rank: int, world_size: int) -> dict[str, int]:
    """How many gathers are left in flight by what tells of a model and reads none of it."""
    left = {}
    with withheld_gathers():
        made = trainer(rank, world_size, "gpt", EAGER)
        for name, ask in {
            "nothing": lambda: None,
            "stats": lambda: fxcomm.stats(made.compiled),
            "tuned": lambda: fxcomm.tuned(made.compiled),
            "record_steps": lambda: fxcomm.record_steps(made.model).__enter__(),
            "no_sync": lambda: fxcomm.no_sync(made.model).__enter__(),
        }.items():
            made.step()
            ask()
            left[name] = gathers_in_flight(made.model)
    return left


def test_what_reads_no_parameter_waits_for_none(ranks: Pools) -> None:
    for left in ranks(2).run(asking_job):
        assert left["nothing"] > 5
        assert set(left.values()) == {left["nothing"]}
