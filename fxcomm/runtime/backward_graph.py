"""A captured backward graph: how it runs before a plan exists, and what it launches after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from fxcomm.analysis.gradients import output_values
from fxcomm.passes.pipeline import run_passes
from fxcomm.passes.reduce import REDUCE_PASSES, ReduceContext, ReducedBucket, reduced_buckets
from fxcomm.plan import GraphExecution
from fxcomm.runtime.arena import Arena, Reduction
from fxcomm.runtime.parameters import ManagedParameter

if TYPE_CHECKING:
    from fxcomm.runtime.backward_pass import BackwardPass
    from fxcomm.runtime.model import ManagedModel

Executable = Callable[[list[Any]], Sequence[Any]]
Lower = Callable[[torch.fx.GraphModule], Executable]

# Runs of a graph that are interpreted while no plan exists. A loop that has not stepped by then
# may never step; its graph is worth compiling as it is.
_INTERPRETED_RUNS = 8


@dataclass(frozen=True)
class CapturedBackward:
    """A backward graph after AOTAutograd, as captured.

    ``gradients`` pairs output positions with the managed parameters whose gradients they are, in
    the order in which the graph computes them. ``lower`` compiles a rewritten copy of the graph.
    """

    gm: torch.fx.GraphModule
    gradients: tuple[tuple[int, ManagedParameter], ...]
    lower: Lower

    @property
    def interpretable(self) -> bool:
        """Whether running the nodes one by one gives what the compiled graph gives: not when it
        draws random numbers again that Inductor's forward drew its own way."""
        return not any("inductor_" in str(node.target) for node in self.gm.graph.nodes)


@dataclass(frozen=True)
class LaunchRun:
    """Buckets ``first`` to ``last`` of an arena, which one graph completes."""

    arena: Arena
    first: int
    last: int

    @property
    def buckets(self) -> range:
        """The buckets' numbers."""
        return range(self.first, self.last + 1)


def launch_run(arena: Arena, produced: set[int]) -> LaunchRun | None:
    """The longest run of consecutive buckets, from the first possible one, that a graph with
    gradients for the parameters ``produced`` completes; None if it completes no bucket.

    A parameter that goes on beyond the run is left out with every bucket from its first on: its
    gradient either leaves the graph or does not.
    """
    complete = [
        arena.plan.in_graph[b] and all(p.index in produced for p in arena.members(b))
        for b in range(arena.bucket_count)
    ]
    if not any(complete):
        return None
    first = complete.index(True)
    last = first
    while last + 1 < len(complete) and complete[last + 1]:
        last += 1
    while last >= first and _continues(arena, last):
        last -= 1
    return LaunchRun(arena, first, last) if last >= first else None


def _continues(arena: Arena, bucket: int) -> bool:
    segments = arena.plan.layout.buckets[bucket].segments
    return any(s.parameter_offset + s.numel < _numel(arena, s.parameter) for s in segments)


def _numel(arena: Arena, slot: int) -> int:
    return arena.plan.layout.parameters[slot].numel


@dataclass(frozen=True)
class _Variant:
    """The graph lowered to launch some buckets (or none)."""

    run: Executable
    returned: tuple[ReducedBucket, ...] = ()
    dropped: frozenset[int] = frozenset()


class BackwardGraph:
    """What AOTAutograd calls as the compiled backward of one graph.

    Gradients of managed parameters never reach autograd: they go into buckets inside the graph, or
    to the model's running pass.
    """

    def __init__(self, number: int, model: ManagedModel, captured: CapturedBackward) -> None:
        self.number = number
        self._model = model
        self._captured = captured
        self._output_count = len(output_values(captured.gm.graph))
        self._produced = {p.index for _, p in captured.gradients}
        self._runs: tuple[LaunchRun, ...] = ()
        self._variants: dict[tuple[LaunchRun, ...], _Variant] = {}
        self._plain_runs = 0
        self.follow_plan()

    def follow_plan(self) -> None:
        """Lowers the graph for the model's present plans; called when they change."""
        runs = (launch_run(arena, self._produced) for arena in self._model.arenas)
        self._runs = tuple(run for run in runs if run is not None)
        if self._runs:
            self._variant(self._runs)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph and hands its parameter gradients to the model."""
        wanted = {p.index for _, p in self._captured.gradients if p.wants_gradient()}
        if not wanted:
            return self._run_for_inputs(args)
        running = self._model.enter_backward()
        # A backward for some parameters only must not launch buckets that hold others.
        whole = len(wanted) == len(self._produced)
        variant = self._variant(self._runs if whole and self._may_launch(running) else ())
        outputs = list(variant.run(args))
        self._note_launches(variant, outputs)
        for position, parameter in self._captured.gradients:
            gradient, outputs[position] = outputs[position], None
            if position not in variant.dropped and parameter.index in wanted:
                running.add(parameter, gradient)
        running.produced |= wanted
        produced = (p.index for _, p in self._captured.gradients if p.index in wanted)
        running.executions.append(GraphExecution(self.number, tuple(produced)))
        return outputs[: self._output_count]

    def _run_for_inputs(self, args: list[Any]) -> list[Any]:
        """A backward that accumulates into none of the parameters (``torch.autograd.grad``, or
        ``backward(inputs=...)``)."""
        outputs = list(self._variant(()).run(args))
        for position, _ in self._captured.gradients:
            outputs[position] = None
        return outputs

    def _may_launch(self, running: BackwardPass) -> bool:
        """Whether the next buckets in order are this graph's, and nothing else contributed to
        them; else its gradients wait for the end of the backward."""
        return self._model.launches_in_graphs and all(
            run.arena.next_bucket == run.first
            and not any(p.index in running.local for b in run.buckets for p in run.arena.members(b))
            for run in self._runs
        )

    def _note_launches(self, variant: _Variant, outputs: Sequence[Any]) -> None:
        def at(index: int | None) -> torch.Tensor | None:
            return None if index is None else outputs[index]

        for returned in variant.returned:
            arena = self._model.arenas[returned.key.arena]
            arena.launched_in_graph(
                Reduction(
                    returned.key.bucket,
                    arena.collective(returned.key.bucket),
                    packed=at(returned.packed),
                    launched=at(returned.launched),
                    result=at(returned.shard),
                )
            )

    def _variant(self, runs: tuple[LaunchRun, ...]) -> _Variant:
        known = self._variants.get(runs)
        if known is not None:
            return known
        if runs:
            variant = self._lower(runs)
        elif self._interpret_for_now():
            return _Variant(interpret(self._captured.gm))
        else:
            variant = _Variant(self._captured.lower(run_passes((), self._captured.gm, None)))
        self._variants[runs] = variant
        return variant

    def _interpret_for_now(self) -> bool:
        self._plain_runs += 1
        return (
            not self._model.arenas
            and self._plain_runs <= _INTERPRETED_RUNS
            and self._captured.interpretable
        )

    def _lower(self, runs: tuple[LaunchRun, ...]) -> _Variant:
        positions = {p.index: position for position, p in self._captured.gradients}
        launched = {p.index for run in runs for b in run.buckets for p in run.arena.members(b)}
        limits = [run.arena.plan.in_flight_bytes for run in runs]
        context = ReduceContext(
            tasks=tuple(run.arena.task(b, positions) for run in runs for b in run.buckets),
            dropped=frozenset(positions[index] for index in launched),
            in_flight_bytes=min((x for x in limits if x is not None), default=None),
        )
        name = f"model{self._model.number}-backward{self.number}-arenas{len(self._model.arenas)}"
        observe = functools.partial(self._model.dump.after_pass, name)
        gm = run_passes(REDUCE_PASSES, self._captured.gm, context, observe=observe)
        # The lowered graph may be consumed by its compiler; read it first.
        returned = reduced_buckets(gm)
        return _Variant(self._captured.lower(gm), returned, context.dropped)


def interpret(gm: torch.fx.GraphModule) -> Executable:
    """Runs a graph node by node, freeing each value after its last use."""

    def run(args: list[Any]) -> Sequence[Any]:
        result: Sequence[Any] = torch.fx.Interpreter(gm).boxed_run(args)
        return result

    return run
