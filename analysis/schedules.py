"""From decisions on a step's problem to an overlap plan, and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxcomm.analysis.baselines import baseline
from fxcomm.analysis.costs import (
    LinkCurve,
    Piece,
    Schedule,
    StepProblem,
    TensorTimes,
    by_first_use,
)
from fxcomm.layout import Bucket, Cut, ParameterSpec, ShardLayout, cut_layout
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
    What a schedule does not say is as in ``like``, also whether a parameter's buckets may start in
    a graph.

    Raises:
        ValueError: ``like`` has other parameters.
    """
    parameters = like.layout.parameters
    if [(t.name, t.numel) for t in problem.tensors] != [(p.name, p.numel) for p in parameters]:
        raise ValueError("the plan's parameters are not the problem's tensors")
    layout = cut_layout(parameters, _cuts(schedule), world_size=like.layout.world_size)
    if len(layout.buckets) == len(schedule.buckets):
        order, places = schedule.gather_order, schedule.update_after
    else:  # two cuts have become one
        order, places = by_first_use(problem, _pieces(layout.buckets)), ()
    plan = replace(
        like,
        name=name,
        layout=layout,
        in_graph=_in_graph(layout, like),
        in_flight_bytes=schedule.in_flight_bytes,
        gather_order=order,
        commshift=schedule.commshift,
        update_after=places,
    )
    return plan, schedule_of(plan)


def _in_graph(layout: ShardLayout, like: OverlapPlan) -> tuple[bool, ...]:
    """Of each bucket, whether all of its parameters may start in a graph by the plan ``like``."""
    late = {
        segment.parameter
        for bucket, inside in zip(like.layout.buckets, like.in_graph, strict=True)
        for segment in bucket.segments
        if not inside
    }
    return tuple(late.isdisjoint(s.parameter for s in b.segments) for b in layout.buckets)


def named_plan(name: str, like: OverlapPlan, borders: Iterable[int] = ()) -> OverlapPlan:
    """The plan of a named baseline that needs no times, for the parameters of ``like``, in whose
    order of gathers parameters are used. Buckets end before the parameters ``borders`` (numbers),
    and where dtype or device change.

    Raises:
        ValueError: there is no baseline of that name.
    """
    parameters = like.layout.parameters
    problem = _untimed(like, tuple(sorted({*borders, *borders_of(parameters)} - {0})))
    named = baseline(name, problem, in_flight_bytes=like.in_flight_bytes, commshift=like.commshift)
    return planned(named, problem, like, name)[0]


def _untimed(like: OverlapPlan, borders: tuple[int, ...]) -> StepProblem:
    """The parameters of a plan with times that say no more than their order."""
    count = len(like.layout.parameters)
    needed = [float(len(like.gather_order))] * count
    for place, bucket in enumerate(like.gather_order):
        for segment in like.layout.buckets[bucket].segments:
            needed[segment.parameter] = min(needed[segment.parameter], float(place))
    unknown = LinkCurve.of_link(0.0, 1.0)
    return StepProblem(
        tuple(
            TensorTimes(p.name, p.numel, p.itemsize, float(i), float(i), needed[i])
            for i, p in enumerate(like.layout.parameters)
        ),
        forward=float(len(like.gather_order)),
        backward=float(count),
        reduce=unknown,
        gather=unknown,
        borders=borders,
    )


def _cuts(schedule: Schedule) -> list[Cut]:
    """Where buckets begin. Empty tensors are in none."""
    return [(bucket[0].tensor, bucket[0].start) for bucket in schedule.buckets if bucket]


def borders_of(parameters: Sequence[ParameterSpec]) -> tuple[int, ...]:
    """Parameters (numbers, in production order) before which every bucket ends, since dtype or
    device change there."""
    pairs = enumerate(itertools.pairwise(parameters), start=1)
    return tuple(i for i, (before, after) in pairs if before.memory != after.memory)
