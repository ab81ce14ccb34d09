"""From decisions on a step's problem to an overlap plan, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxcomm.analysis.costs import Piece, Schedule, StepProblem, by_first_use
from fxcomm.layout import Bucket, Cut, ParameterSpec, cut_layout
from fxcomm.plan import OverlapPlan


def schedule_of(plan: OverlapPlan) -> Schedule:
    """A plan's decisions. Its problem's tensors are the plan's parameters, in their order."""
    return Schedule(
        buckets=_pieces(plan.layout.buckets),
        gather_order=plan.gather_order,
        in_flight_bytes=plan.in_flight_bytes,
        update_after=plan.update_after,
        commshift=plan.commshift,
    )


def _pieces(buckets: Iterable[Bucket]) -> tuple[tuple[Piece, ...], ...]:
    return tuple(
        tuple(
            Piece(s.parameter, s.parameter_offset, s.parameter_offset + s.numel)
            for s in bucket.segments
        )
        for bucket in buckets
    )


def planned(
    schedule: Schedule, problem: StepProblem, like: OverlapPlan, name: str
) -> tuple[OverlapPlan, Schedule]:
    """``schedule`` as a plan for the parameters of ``like``, which are the problem's tensors in
    their order, and what it has become: cuts inside parameters move to places that a layout allows.
    What a schedule does not say is as in ``like``, of which every bucket starts in a graph.

    Raises:
        ValueError: ``like`` has buckets that start in no graph, or other parameters.
    """
    parameters = like.layout.parameters
    if not all(like.in_graph):
        raise ValueError("a plan with buckets that start in no graph has no schedule")
    if [(t.name, t.numel) for t in problem.tensors] != [(p.name, p.numel) for p in parameters]:
        raise ValueError("the plan's parameters are not the problem's tensors")
    layout = cut_layout(parameters, _cuts(schedule), world_size=like.layout.world_size)
    if len(layout.buckets) == len(schedule.buckets):
        order, places = schedule.gather_order, schedule.update_after
    else:  # a cut has been left out
        order, places = by_first_use(problem, _pieces(layout.buckets)), ()
    plan = replace(
        like,
        name=name,
        layout=layout,
        in_graph=(True,) * len(layout.buckets),
        in_flight_bytes=schedule.in_flight_bytes,
        gather_order=order,
        commshift=schedule.commshift,
        update_after=places,
    )
    return plan, schedule_of(plan)


def _cuts(schedule: Schedule) -> list[Cut]:
    """Where buckets begin. Empty tensors are in none."""
    return [(bucket[0].tensor, bucket[0].start) for bucket in schedule.buckets if bucket]


def borders_of(parameters: Sequence[ParameterSpec]) -> tuple[int, ...]:
    """Parameters (numbers, in production order) before which every bucket ends, since dtype or
    device change there."""
    pairs = enumerate(itertools.pairwise(parameters), start=1)
    return tuple(i for i, (before, after) in pairs if before.memory != after.memory)
