"""The verifier in the runtime: the program that it reads is what ranks do, and what is wrong with a
lowered graph is found before anything of it runs. As one of 4 ranks of the fake process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.fx
from torch import Tensor

from fxcomm.analysis.program import (
    GATHER,
    REDUCE,
    Compute,
    Launch,
    MicroStep,
    Program,
    step_program,
)
from fxcomm.backends import dynamo
from fxcomm.backends.communicators import GlooCommunicator
from fxcomm.communicator import Collective, OperatorCall, Waitable
from fxcomm.errors import FxcommError
from fxcomm.passes.pipeline import GraphPass
from fxcomm.passes.reduce import REDUCE_PASSES, ReduceContext
from fxcomm.passes.stamp import stamp_of
from fxcomm.registry import REGISTRY
from fxcomm.runtime import backward_graph
from fxcomm.runtime.model import ManagedModel
from tests.test_fake_ranks import AsFakeRank, as_fake_rank  # noqa: F401 - a fixture
from tests.zoo import ZOO, Case

WORLD = 4

Event = tuple[str, int]
"""What happens to a collective, and its bucket."""


# --- what a rank does ---


@dataclass
class Recorder:
    """Notes the start and the wait of every reduction and gather of the plan's buckets."""

    events: list[Event] = field(default_factory=list)
    _reductions: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def collective(self, real: Collective) -> Collective:
        """``real``, which notes what is done with it."""

        def launch(buffer: Tensor) -> Tensor:
            result: Any = real.launch.target(buffer, *real.launch.arguments)
            if type(buffer) is Tensor and buffer.device.type != "meta":
                bucket = sum(kind == "reduce" for kind, _ in self.events)
                self.events.append(("reduce", bucket))
                self._reductions[id(result)] = bucket
                self._alive.append(result)  # so that its id stays its own
            return result  # type: ignore[no-any-return]

        def wait(result: Tensor) -> Tensor:
            if id(result) in self._reductions:
                self.events.append(("reduced", self._reductions[id(result)]))
            waited: Tensor = torch.ops._c10d_functional.wait_tensor.default(result)
            return waited

        finish = (OperatorCall(wait), *real.finish[1:])
        return replace(real, launch=OperatorCall(launch), finish=finish)

    def gather(self, real: Waitable, bucket: int) -> Waitable:
        """``real``, noted as that of ``bucket``."""
        self.events.append(("gather", bucket))
        return Gathering(self, bucket, real)


@dataclass
class Gathering:
    recorder: Recorder
    bucket: int
    real: Waitable

    def wait(self) -> None:
        self.recorder.events.append(("gathered", self.bucket))
        self.real.wait()


def recording(recorder: Recorder) -> Any:
    """Lets ``recorder`` see what every communicator makes."""
    scatter, reduce, gather = (
        GlooCommunicator.reduce_scatter_mean,
        GlooCommunicator.all_reduce_mean,
        GlooCommunicator.all_gather,
    )
    return patch.multiple(
        GlooCommunicator,
        reduce_scatter_mean=lambda self, n, d: recorder.collective(scatter(self, n, d)),
        all_reduce_mean=lambda self, n, d: recorder.collective(reduce(self, n, d)),
        all_gather=lambda self, b, tag: recorder.gather(gather(self, b, tag), tag),
    )


def recorded_job(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> tuple[list[Event], Program, int]:
    """What happens from one optimizer step to the next, and the program of it."""
    del rank, world_size
    case, recorder = ZOO[name], Recorder()
    with recording(recorder):
        model = case.model()
        compiled = torch.compile(model, backend="fxcomm", options={"lowering": "eager", **options})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(4):
            recorder.events.clear()
            train(case, compiled, optimizer, step)
    events = list(recorder.events)  # before a read of parameters waits for their gathers
    (managed,) = REGISTRY.models_of(model.parameters())
    return events, observed_program(managed), len(managed._graphs)


def train(case: Case, compiled: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = case.batch(step, 4)
    case.loss(compiled(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def observed_program(managed: ManagedModel) -> Program:
    graphs = list(managed._graphs)
    runs = backward_graph.observed_runs(managed.observed, graphs)
    forward = tuple(a for run in reversed(runs) for a in run.forward.actions)
    backward = tuple(run.backward for run in runs if run.backward is not None)
    (arena,) = managed.arenas
    return step_program(0, [MicroStep(forward, backward)], arena.described())


def events_of(program: Program) -> list[Event]:
    """The starts and the effective waits of the program, in steady state."""
    names = {(REDUCE, True): "reduce", (REDUCE, False): "reduced"}
    names |= {(GATHER, True): "gather", (GATHER, False): "gathered"}
    running = set()
    for repetition in range(2):
        events = []
        for action in program.actions:
            if isinstance(action, Compute):
                continue
            starts, collective = isinstance(action, Launch), action.collective
            if starts or collective in running:
                events.append((names[collective.kind, starts], collective.bucket.bucket))
            (running.add if starts else running.discard)(collective)
        del repetition
    return events


def unordered_gathered(events: Sequence[Event]) -> list[Any]:
    """Gathers that are waited for together may be so in any order."""
    groups = itertools.groupby(events, key=lambda event: event[0])
    return [sorted(group) if kind == "gathered" else list(group) for kind, group in groups]


LITTLE = 0.004
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("mlp", {"bucket_mb": 0.002}),
    "reused": ("reused", {"bucket_mb": 0.002, "in_flight_mb": 0.008}),
    "gpt": ("gpt", {"bucket_mb": LITTLE}),
    "gpt, two buckets in flight": ("gpt", {"bucket_mb": LITTLE, "in_flight_mb": 4 * LITTLE}),
    "gpt, none beside another": ("gpt", {"bucket_mb": LITTLE, "in_flight_mb": 0.0001}),
    "gpt, no commshift": ("gpt", {"bucket_mb": LITTLE, "commshift": False}),
    "gpt, gathers in 32 bits": (
        "gpt",
        {"bucket_mb": LITTLE, "in_flight_mb": 3 * LITTLE, "gather_dtype": "float32"},
    ),
    "graph breaks": ("broken", {"bucket_mb": 0.0005, "in_flight_mb": 0.002}),
    "unused parameters": (
        "partly_used",
        {"bucket_mb": 0.001, "in_flight_mb": 0.003, "gather_dtype": "float32"},
    ),
    "whole gradients": ("gpt", {"bucket_mb": LITTLE, "stage": "ddp", "in_flight_mb": 4 * LITTLE}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_that_is_verified_is_what_runs(
    as_fake_rank: AsFakeRank,  # noqa: F811
    name: str,
) -> None:
    case, options = CASES[name]
    events, program, graphs = as_fake_rank(1, WORLD, recorded_job, case, options)
    expected = events_of(program)
    if case == "broken":
        # Eager code between the graphs reads parameters, too, and waits for them.
        events, expected = ([e for e in seen if e[0] != "gathered"] for seen in (events, expected))
    assert unordered_gathered(events) == unordered_gathered(expected)
    buckets = len(program.buckets)
    assert buckets > 2
    assert [b for kind, b in events if kind == "reduce"] == list(range(buckets))
    assert graphs == (2 if case == "broken" else 1)


# --- what is wrong is found before it runs ---


def swap_launches(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """The first two reductions start in the wrong order."""
    first, second = stamped(gm, "launch")[:2]
    second.append(first)
    return gm


def lose_an_operand(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """The graph does not return the operand of a reduction that it leaves in flight."""
    output = next(iter(reversed(gm.graph.nodes)))
    lost = next(n for n in reversed(stamped(gm, "pack")) if n in output.args[0])
    output.args = (tuple(None if value is lost else value for value in output.args[0]),)
    return gm


def launch_early(gm: torch.fx.GraphModule, context: ReduceContext) -> torch.fx.GraphModule:
    """A reduction starts before the gradients of its bucket are there, with something else."""
    launch, task = stamped(gm, "launch")[0], context.tasks[0]
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "call_function")):
        zeros = gm.graph.call_function(torch.ops.aten.full.default, ([task.numel], 0.0))
    zeros.meta["val"] = launch.all_input_nodes[0].meta["val"]
    launch.replace_input_with(launch.all_input_nodes[0], zeros)
    zeros.append(launch)
    return gm


def stamped(gm: torch.fx.GraphModule, role: str) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if (s := stamp_of(n)) and s.role == role and s.final]


def broken_backward(*passes: GraphPass[ReduceContext]) -> Any:
    return patch.object(backward_graph, "REDUCE_PASSES", passes)


def with_pass(run: Callable[..., torch.fx.GraphModule]) -> Any:
    return broken_backward(*REDUCE_PASSES, GraphPass(run.__name__, run))


LIMIT = "bound_in_flight"

BREAKS: dict[str, tuple[int, Callable[[], Any]]] = {
    "order": (1, lambda: with_pass(swap_launches)),
    "no waits in the forward": (3, lambda: patch.object(dynamo, "GATHER_PASSES", ())),
    "early": (4, lambda: with_pass(launch_early)),
    "memory freed": (5, lambda: with_pass(lose_an_operand)),
    "no limit": (6, lambda: broken_backward(*(p for p in REDUCE_PASSES if p.name != LIMIT))),
}
OPTIONS = {"lowering": "eager", "bucket_mb": LITTLE, "in_flight_mb": 5 * LITTLE}


def refused_job(rank: int, world_size: int, which: str, when: str) -> tuple[str, str, int]:
    """What is raised, by which call, and how many reductions of buckets had started by then."""
    del rank, world_size
    case, recorder = ZOO["gpt"], Recorder()
    model = case.model()
    compiled = torch.compile(model, backend="fxcomm", options=OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, broken = BREAKS[which]
    if when == "later":
        train(case, compiled, optimizer, 0)
        torch._dynamo.reset()  # all graphs are compiled again, as for another shape
    batch = case.batch(0, 3)
    stage = "forward"
    with recording(recorder), broken():
        try:
            loss = case.loss(compiled(batch), batch)
            stage = "backward"
            loss.backward()
            stage = "step"
            recorder.events.clear()  # without a plan gradients are reduced one by one
            optimizer.step()
        except FxcommError as error:
            return str(error), stage, len(recorder.events)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("which", BREAKS)
def test_what_is_wrong_is_refused_before_it_runs(
    as_fake_rank: AsFakeRank,  # noqa: F811
    which: str,
    when: str,
) -> None:
    """With the first plan at the step that makes it; by a plan that exists, as it is compiled."""
    message, stage, started = as_fake_rank(1, WORLD, refused_job, which, when)
    rule, _ = BREAKS[which]
    assert f"rule {rule}, rank 1: " in message
    assert "nothing was run" in message
    forward = which == "no waits in the forward"
    assert stage == ("step" if when == "first" else "forward" if forward else "backward")
    assert started == 0


def test_an_inference_graph_without_waits_is_refused(
    as_fake_rank: AsFakeRank,  # noqa: F811
) -> None:
    message = as_fake_rank(1, WORLD, inference_job)
    assert "rule 3, rank 1: " in message


def inference_job(rank: int, world_size: int) -> str:
    del rank, world_size
    case = ZOO["gpt"]
    model = case.model()
    compiled = torch.compile(model, backend="fxcomm", options=OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with patch.object(dynamo, "GATHER_PASSES", ()), torch.no_grad():
        compiled(case.batch(0, 3))
    try:
        train(case, compiled, optimizer, 0)
    except FxcommError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def caught_job(rank: int, world_size: int) -> list[str]:
    """What the steps after a refused one say to a caller who goes on."""
    del rank, world_size
    case = ZOO["gpt"]
    model = case.model()
    compiled = torch.compile(model, backend="fxcomm", options=OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    messages = []
    _, broken = BREAKS["order"]
    with broken():
        for step in range(3):
            try:
                train(case, compiled, optimizer, step)
                messages.append("")
            except FxcommError as error:
                messages.append(str(error))
    return messages


def test_what_was_refused_stays_so(as_fake_rank: AsFakeRank) -> None:  # noqa: F811
    messages = as_fake_rank(1, WORLD, caught_job)
    assert all("nothing was run" in message for message in messages)
