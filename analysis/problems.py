"""The problem that a captured step poses, whose operations have costs, before any step has run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fxcomm.analysis.costs import LinkCosts, StepProblem, TensorTimes
from fxcomm.analysis.schedules import borders_of
from fxcomm.analysis.step_graph import COMPUTE_STREAM, PhaseKind, StepGraph
from fxcomm.layout import ParameterSpec


def problem_of_graph(
    step: StepGraph, parameters: Sequence[ParameterSpec], link: LinkCosts
) -> StepProblem:
    """The problem of a ``step`` without buckets, of one forward and one backward.

    Its tensors are ``parameters`` in the order in which their gradients are complete; one without a
    gradient in the step is ready when the backward ends, in the reverse of the given order.
    Launches, updates and what happens between steps are left at nothing: see
    :class:`~fxcomm.analysis.costs.StepProblem` for what may be replaced.

    Raises:
        ValueError: the step has several micro-steps, or none of one of the phases.
    """
    forward, backward = (_phase_span(step, kind) for kind in _PHASES)
    ends = _ends(step)
    times = {
        p.name: TensorTimes(
            p.name,
            p.numel,
            p.itemsize,
            ready=_within(step.contributors.get(p.name, ()), ends, backward, backward[1]),
            last_read=_last_read(step, p.name, ends, backward),
            needed=_first_use(step, p.name, forward, backward),
        )
        for p in parameters
    }
    trained = {name for name in times if step.contributors.get(name)}
    produced = [p for p in parameters if p.name in trained]
    produced.sort(key=lambda p: times[p.name].ready)
    ordered = [*produced, *(p for p in reversed(parameters) if p.name not in trained)]
    return StepProblem(
        tensors=tuple(times[p.name] for p in ordered),
        forward=forward[1] - forward[0],
        backward=backward[1] - backward[0],
        reduce=link.reduce,
        gather=link.gather,
        contention=link.contention,
        borders=borders_of(ordered),
    )


_PHASES = (PhaseKind.FORWARD, PhaseKind.BACKWARD)
_Span = tuple[float, float]


def _ends(step: StepGraph) -> dict[str, float]:
    starts = step.earliest_starts
    return {name: starts[name] + o.seconds for name, o in step.operations.items()}


def _phase_span(step: StepGraph, kind: PhaseKind) -> _Span:
    """When the computation of a phase begins and ends."""
    names = [
        name
        for name, operation in step.operations.items()
        if operation.phase.kind is kind and operation.stream == COMPUTE_STREAM
    ]
    phases = {step.operations[name].phase for name in names}
    if len(phases) != 1:
        raise ValueError(
            f"the step has {len(phases)} phases of {kind.value}; a problem is made of steps with "
            "one micro-step"
        )
    ends = _ends(step)
    return min(step.earliest_starts[name] for name in names), max(ends[name] for name in names)


def _within(
    names: Iterable[str], times: Mapping[str, float], phase: _Span, otherwise: float
) -> float:
    """The latest of the operations' times, from the phase's beginning and inside it."""
    latest = max((times[name] for name in names), default=otherwise)
    return min(max(latest - phase[0], 0.0), phase[1] - phase[0])


def _last_read(step: StepGraph, parameter: str, ends: Mapping[str, float], phase: _Span) -> float:
    readers = step.readers.get(parameter, ())
    late = [n for n in readers if step.operations[n].phase.kind is PhaseKind.BACKWARD]
    return _within(late, ends, phase, phase[0])


def _first_use(step: StepGraph, parameter: str, forward: _Span, backward: _Span) -> float:
    """Seconds of compute from the forward's beginning to the first read; none is infinite."""
    starts, first = step.earliest_starts, math.inf
    for name in step.readers.get(parameter, ()):
        kind = step.operations[name].phase.kind
        if kind is PhaseKind.FORWARD:
            first = min(first, starts[name] - forward[0])
        elif kind is PhaseKind.BACKWARD:
            first = min(first, forward[1] - forward[0] + starts[name] - backward[0])
    return first
