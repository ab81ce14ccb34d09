"""A captured backward graph: how it runs before a plan exists, and what it launches after."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.gradients import output_values
from fxcomm.analysis.program import (
    GraphActions,
    backward_actions,
    gradient_nodes,
    peak_bytes,
    saved_parameters,
)
from fxcomm.passes.mark import MARK_PASS, Mark, launches_before_last_reads, marks_of
from fxcomm.passes.pipeline import run_passes
from fxcomm.passes.reduce import REDUCE_PASSES, ReduceContext, ReducedBucket, reduced_buckets
from fxcomm.passes.stamp import BucketKey
from fxcomm.passes.update import UpdateTask, update_pass
from fxcomm.plan import GraphExecution, ObservedBackward
from fxcomm.runtime.arena import Arena
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.verification import ForwardGraph, GraphRun, require_valid_step

if TYPE_CHECKING:
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
    ``forward`` is the forward of which it is the backward.
    """

    gm: torch.fx.GraphModule
    gradients: tuple[tuple[int, ManagedParameter], ...]
    lower: Lower
    forward: ForwardGraph

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

    @property
    def members(self) -> frozenset[int]:
        """The parameters (indices) of which the buckets hold elements."""
        return frozenset(p.index for b in self.buckets for p in self.arena.members(b))


def launch_run(arena: Arena, produced: set[int]) -> LaunchRun | None:
    """The longest run of consecutive buckets, from the first possible one, that a graph with
    gradients for the parameters ``produced`` completes; None if it completes no bucket.

    A parameter that begins before the run or goes on beyond it is left out with every bucket of
    its: its gradient either leaves the graph or does not. Behind a bucket that starts in no graph
    none can.
    """
    buckets = itertools.takewhile(arena.plan.in_graph.__getitem__, range(arena.bucket_count))
    complete = [all(p.index in produced for p in arena.members(b)) for b in buckets]
    starts = (b for b, whole in enumerate(complete) if whole and not _continued(arena, b))
    first = next(starts, None)
    if first is None:
        return None
    last = first
    while last + 1 < len(complete) and complete[last + 1]:
        last += 1
    while last >= first and _continues(arena, last):
        last -= 1
    return LaunchRun(arena, first, last) if last >= first else None


def _continued(arena: Arena, bucket: int) -> bool:
    return any(s.parameter_offset for s in arena.plan.layout.buckets[bucket].segments)


def _continues(arena: Arena, bucket: int) -> bool:
    segments = arena.plan.layout.buckets[bucket].segments
    return any(s.parameter_offset + s.numel < _numel(arena, s.parameter) for s in segments)


def _numel(arena: Arena, slot: int) -> int:
    return arena.plan.layout.parameters[slot].numel


@dataclass(frozen=True)
class _Variant:
    """The graph lowered to launch some buckets (or none). ``peaks`` are the most bytes that they
    have in flight in it, by arena number. It takes as more inputs what earlier backwards left of
    the gradients of ``local``, and as its last one what its ``marks`` are set on. ``reads`` tells
    how many launches come before the last read of a parameter (by name), of those that it reads."""

    run: Executable
    returned: tuple[ReducedBucket, ...] = ()
    dropped: frozenset[int] = frozenset()
    peaks: Mapping[int, int] = field(default_factory=dict)
    local: tuple[ManagedParameter, ...] = ()
    marks: tuple[Mark, ...] = ()
    reads: Mapping[str, int] = field(default_factory=dict)


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
        self._variants: dict[tuple[tuple[LaunchRun, ...], bool], _Variant] = {}
        self._actions: dict[tuple[LaunchRun, ...], GraphActions] = {}
        self._plain_runs = 0
        self.follow_plan()

    def follow_plan(self) -> None:
        """Lowers the graph for the model's present plans; called when they change.

        Raises:
            FxcommError: a step that runs this graph alone would break a rule of DESIGN.
        """
        runs = (launch_run(arena, self._produced) for arena in self._model.arenas)
        self._runs = tuple(run for run in runs if run is not None)
        if self._runs:
            self._variant(self._runs)
        if self._model.arenas:
            self._require_valid(self._runs, self.described(self._runs))

    def forget(self, arenas: Collection[Arena]) -> None:
        """Drops what is lowered for ``arenas``, which launch no more."""
        gone = set(arenas)

        def stays(runs: tuple[LaunchRun, ...]) -> bool:
            return not any(run.arena in gone for run in runs)

        self._variants = {key: v for key, v in self._variants.items() if stays(key[0])}
        self._actions = {runs: a for runs, a in self._actions.items() if stays(runs)}

    def _require_valid(self, runs: tuple[LaunchRun, ...], described: GraphRun) -> None:
        require_valid_step(
            self._model.rank,
            [described],
            [arena.described() for arena in self._model.arenas],
            before={run.arena.number: run.first for run in runs},
        )

    @property
    def reads(self) -> Mapping[str, int]:
        """How many of the buckets that the graph launches are launched before it last reads a
        parameter (by name), of those that it reads."""
        return self._variant(self._runs).reads if self._runs else {}

    @property
    def forward(self) -> ForwardGraph:
        """The forward graph of which this is the backward."""
        return self._captured.forward

    def described(self, runs: tuple[LaunchRun, ...]) -> GraphRun:
        """What a run of this graph does that launches ``runs``."""
        if runs not in self._actions:
            assert not runs, "the graph was never lowered for these"
            self._actions[runs] = self._read(self._captured.gm.graph)
        return GraphRun(self.forward, self._actions[runs])

    def launches(
        self, wanted: Collection[int], next_bucket: Callable[[Arena], int], local: Collection[int]
    ) -> tuple[LaunchRun, ...]:
        """What the graph launches in a backward that accumulates into its parameters ``wanted``:
        its buckets, if they are the next ones in order and nothing else contributed to them (the
        parameters ``local``); else nothing, and its gradients wait for the end of the backward."""
        # A backward for some parameters only must not launch buckets that hold others.
        if len(set(wanted)) < len(self._produced):
            return ()
        follows = all(
            next_bucket(run.arena) == run.first and not run.members & set(local)
            for run in self._runs
        )
        return self._runs if follows else ()

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph and hands its parameter gradients to the model."""
        wanted = {p.index for _, p in self._captured.gradients if p.wants_gradient()}
        if not wanted:
            return self._run_for_inputs(args)
        running = self._model.enter_backward()
        runs: tuple[LaunchRun, ...] = ()
        if self._model.launches_in_graphs:
            runs = self.launches(wanted, lambda arena: arena.next_bucket, running.local)
        local = self._model.has_local_gradients
        if local and not all(run.arena.sharded for run in runs):
            runs = ()  # replicated gradients are added when the backward ends
        variant = self._variant(runs, adds_local=local and bool(runs))
        for number, nbytes in variant.peaks.items():
            self._model.arenas[number].make_room(nbytes)
        args.extend(self._model.take_local(p) for p in variant.local)
        if variant.marks:
            args.append(self._marks_input(variant))
        with compat.below_autograd():
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

    def _marks_input(self, variant: _Variant) -> torch.Tensor:
        marks = self._model.marks
        if self._model.meter.listening:
            marks.expect(variant.marks)
        return marks.tensor

    def _run_for_inputs(self, args: list[Any]) -> list[Any]:
        """A backward that accumulates into none of the parameters (``torch.autograd.grad``, or
        ``backward(inputs=...)``)."""
        outputs = list(self._variant(()).run(args))
        for position, _ in self._captured.gradients:
            outputs[position] = None
        return outputs

    def _note_launches(self, variant: _Variant, outputs: Sequence[Any]) -> None:
        def at(index: int | None) -> torch.Tensor | None:
            return None if index is None else outputs[index]

        for returned in variant.returned:
            self._model.arenas[returned.key.arena].launched_in_graph(
                returned.key.bucket,
                packed=at(returned.packed),
                launched=at(returned.launched),
                result=at(returned.shard),
            )

    def _variant(self, runs: tuple[LaunchRun, ...], *, adds_local: bool = False) -> _Variant:
        known = self._variants.get((runs, adds_local))
        if known is not None:
            return known
        if runs:
            variant = self._lower(runs, adds_local)
        elif self._interpret_for_now():
            return _Variant(interpret(self._captured.gm))
        else:
            variant = _Variant(self._captured.lower(run_passes((), self._captured.gm, None)))
        self._variants[runs, adds_local] = variant
        return variant

    def _interpret_for_now(self) -> bool:
        self._plain_runs += 1
        return (
            not self._model.arenas
            and self._plain_runs <= _INTERPRETED_RUNS
            and self._captured.interpretable
        )

    def _lower(self, runs: tuple[LaunchRun, ...], adds_local: bool) -> _Variant:
        positions = {p.index: position for position, p in self._captured.gradients}
        launched = frozenset[int]().union(*(run.members for run in runs))
        local = [
            (at, p) for at, p in self._captured.gradients if adds_local and p.index in launched
        ]
        limits = [run.arena.plan.in_flight_bytes for run in runs]
        context = ReduceContext(
            tasks=tuple(run.arena.task(b, positions) for run in runs for b in run.buckets),
            dropped=frozenset(positions[index] for index in launched),
            in_flight_bytes=min((x for x in limits if x is not None), default=None),
            local=tuple((position, p.order) for position, p in local),
        )
        name = f"model{self._model.serial}-backward{self.number}"
        observe = self._model.dump.passes(name, self._captured.gm)
        updates = self._updates(runs)
        passes = (*REDUCE_PASSES, MARK_PASS, *([update_pass(updates)] if updates else []))
        gm = run_passes(passes, self._captured.gm, context, observe=observe)
        # The lowered graph may be consumed by its compiler; read it first.
        returned, marks = reduced_buckets(gm), marks_of(gm)
        saved = saved_parameters(self._captured.gm.graph, self.forward.outputs)
        reads = launches_before_last_reads(gm, saved)
        actions = replace(self._read(gm.graph), adds_local=adds_local)
        if adds_local:
            self._require_valid(runs, GraphRun(self.forward, actions))
        else:
            self._actions[runs] = actions
        peaks = {run.arena.number: peak_bytes(actions.actions, run.arena.number) for run in runs}
        lowered = self._captured.lower(gm)
        return _Variant(
            lowered,
            returned,
            context.dropped,
            peaks,
            tuple(p for _, p in local),
            marks,
            reads,
        )

    def _updates(self, runs: tuple[LaunchRun, ...]) -> tuple[UpdateTask, ...]:
        """What the plans update in this graph, which launches ``runs``: their first buckets."""
        saved = saved_parameters(self._captured.gm.graph, self.forward.outputs)
        tasks: list[UpdateTask] = []
        for run in runs:
            for bucket, after in enumerate(run.arena.plan.update_after):
                if bucket not in run.buckets or after not in run.buckets:
                    break
                names = {p.name for p in run.arena.members(bucket)}
                tasks.append(
                    UpdateTask(
                        BucketKey(run.arena.number, bucket),
                        BucketKey(run.arena.number, after),
                        self._model.serial,
                        frozenset(i for i, found in saved.items() if names & found),
                    )
                )
        return tuple(tasks)

    def _read(self, graph: torch.fx.Graph) -> GraphActions:
        """What the captured graph, or a rewritten copy of it, does."""
        names = {position: p.name for position, p in self._captured.gradients}
        return backward_actions(
            graph,
            gradient_nodes(self._captured.gm.graph, names),
            saved_parameters(graph, self.forward.outputs),
            name=f"graph {self.number}",
        )


def observed_runs(
    observed: ObservedBackward, graphs: Iterable[BackwardGraph]
) -> tuple[GraphRun, ...]:
    """What the graphs of a backward like ``observed`` do by their model's present plans; without
    those graphs that are gone."""
    known = {graph.number: graph for graph in graphs}
    launched: Counter[int] = Counter()  # by arena
    local: set[int] = set()
    found = []
    for execution in observed.executions:
        graph = known.get(execution.graph)
        if graph is None:
            continue
        runs = graph.launches(execution.parameters, lambda arena: launched[arena.number], local)
        launched.update({run.arena.number: len(run.buckets) for run in runs})
        local |= set(execution.parameters).difference(*(run.members for run in runs))
        found.append(graph.described(runs))
    return tuple(found)


def interpret(gm: torch.fx.GraphModule) -> Executable:
    """Runs a graph node by node, freeing each value after its last use."""

    def run(args: list[Any]) -> Sequence[Any]:
        result: Sequence[Any] = torch.fx.Interpreter(gm).boxed_run(args)
        return result

    return run
