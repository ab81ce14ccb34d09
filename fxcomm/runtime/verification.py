"""The static verifier on what the runtime is about to run: lowered graphs, by the plans of a
model's arenas. Graphs are read once; what is kept of them are their actions.

Each rank verifies its own program. The order of launches is the plan's, so that a rank is compared
with one that runs no graph: that one launches everything when its backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx

from fxcomm.analysis.program import (
    ArenaPlan,
    ForwardAction,
    GraphActions,
    MicroStep,
    forward_actions,
    parameter_outputs,
    step_program,
)
from fxcomm.analysis.verify import require_valid
from fxcomm.runtime.collector import paused_collector


@dataclass(frozen=True, eq=False)
class ForwardGraph:
    """What must be known of a lowered forward graph: the managed parameters (indices) that it uses,
    in order of first use, what it does with parameters, and its outputs that are parameters or
    views of some (by node name, with these)."""

    uses: tuple[int, ...]
    actions: tuple[ForwardAction, ...]
    outputs: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class GraphRun:
    """One run of a captured graph in a step: its forward, and its backward if it has one."""

    forward: ForwardGraph
    backward: GraphActions | None = None


@paused_collector()
def read_forward(
    graph: torch.fx.Graph, parameter_inputs: Mapping[int, str], uses: Sequence[int]
) -> ForwardGraph:
    """Reads a lowered forward graph. ``parameter_inputs`` names its inputs that are managed
    parameters, by position; ``uses`` are their indices in order of first use."""
    return ForwardGraph(
        tuple(uses),
        forward_actions(graph, parameter_inputs),
        parameter_outputs(graph, parameter_inputs),
    )


@paused_collector()
def require_valid_step(
    rank: int,
    runs: Sequence[GraphRun],
    arenas: Iterable[ArenaPlan],
    before: Mapping[int, int] | None = None,
) -> None:
    """Checks the step that makes ``runs`` in the order of their backwards, by the plan of each of
    ``arenas``. Graphs that are not listed launched the first ``before`` buckets (by arena number).

    Raises:
        FxcommError: it would break one of DESIGN's rules 1 to 6.
    """
    forward = tuple(action for run in reversed(runs) for action in run.forward.actions)
    backward = tuple(run.backward for run in runs if run.backward is not None)
    for arena in arenas:
        first = (before or {}).get(arena.number, 0)
        steps = [[MicroStep((), ())], [MicroStep(forward, backward, before=first)]]
        if any(graph.adds_local for graph in backward):
            steps = [[MicroStep(forward, (), reduces=False), *step] for step in steps]
        programs = [step_program(rank, step, arena) for step in steps]
        require_valid(programs, in_flight_bytes=arena.plan.in_flight_bytes)
