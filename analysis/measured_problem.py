"""What measured steps say about the costs of a step: its problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from fxcomm.analysis.costs import LinkCosts, Schedule, StepProblem, TensorTimes
from fxcomm.analysis.measured import Event, EventKind, MeasuredStep
from fxcomm.analysis.schedules import borders_of, schedule_of
from fxcomm.analysis.simulate import step_seconds
from fxcomm.plan import OverlapPlan


def problem_of(
    steps: Sequence[MeasuredStep],
    plan: OverlapPlan,
    slots: Mapping[int, int],
    link: LinkCosts,
    reads: Mapping[str, int] | None = None,
) -> StepProblem:
    """The problem that measured ``steps`` by ``plan`` pose. Its tensors are the plan's parameters;
    ``slots`` gives a parameter's place among them by the number under which its USE is noted.
    ``reads`` tells how many buckets are launched before the backward last reads a parameter (by
    name); one that it does not name is not read there, without it each is read to the end.

    Times are medians over the steps, in compute time. In the backward only the launch of each
    bucket is seen: its last gradient is ready there, and the ones before in proportion to their
    elements. Compute went on while the link was busy, which made it slower; all of it is scaled
    such that the simulated step by ``plan`` takes as long as the measured ones.

    Raises:
        ValueError: there is no step, or one without a backward or without all launches.
    """
    if not steps or any(not step.backwards for step in steps):
        raise ValueError("no step was measured that has a backward")
    sizes = [bucket.nbytes for bucket in plan.layout.buckets]
    views = [_StepView(step, len(sizes)) for step in steps]
    backward = median(view.backward for view in views)
    launches = _medians(view.launches for view in views)
    ready = _ready_times(plan, launches, backward)
    last = _last_reads(plan, launches, backward, reads)
    needed = _needed_times(views, slots, len(plan.layout.parameters))
    latency, per_byte = _update_costs(sizes, _medians(view.updates for view in views))
    norms = [view.norm for view in views if view.norm is not None]
    problem = StepProblem(
        tensors=tuple(
            TensorTimes(p.name, p.numel, p.itemsize, ready[i], last[i], needed[i])
            for i, p in enumerate(plan.layout.parameters)
        ),
        forward=median(view.forward for view in views),
        backward=backward,
        reduce=link.reduce,
        gather=link.gather,
        launch=median(view.launch for view in views),
        between=median(view.between for view in views),
        norm=median(norms) if norms else None,
        update_latency=latency,
        update_per_byte=per_byte,
        contention=link.contention,
        borders=borders_of(plan.layout.parameters),
    )
    return _scaled_to(problem, schedule_of(plan), median(step.seconds for step in steps))


class _StepView:
    """One measured step in compute time."""

    def __init__(self, step: MeasuredStep, buckets: int) -> None:
        last = step.of(EventKind.BACKWARD)[-1]
        early = [e for e in step.of(EventKind.UPDATE) if last.start <= e.start < last.end]
        # Updates inside the backward are no part of its compute.
        stands = (Event(EventKind.WAIT_RANKS, None, e.start, e.end) for e in early)
        at = replace(step, events=(*step.events, *stands)).compute_at
        self._began = at(last.start)
        self.forward = self._began
        self.backward = at(last.end) - self._began
        launched = {
            e.number: at(e.start) - self._began
            for e in step.of(EventKind.LAUNCH_REDUCE)
            if last.start <= e.start <= last.end
        }
        if set(launched) != set(range(buckets)):
            raise ValueError(f"of {buckets} buckets, {len(launched)} were launched in the backward")
        self.launches = [min(launched[b], self.backward) for b in range(buckets)]
        updates = {e.number: e for e in step.of(EventKind.UPDATE)}
        took = {b: step.compute_at(e.end) - step.compute_at(e.start) for b, e in updates.items()}
        self.updates = [took.get(b, 0.0) for b in range(buckets)]
        pairs = ((e, updates.get(e.number)) for e in step.of(EventKind.LAUNCH_GATHER))
        sent = [at(e.start) - at(u.end) for e, u in pairs if u is not None and e.start >= u.end]
        self.launch = median(sent) if sent else 0.0
        late = sum(self.updates) - sum(took[e.number] for e in early)
        rest = at(step.end) - at(last.end) - late - (buckets - len(early)) * self.launch
        self.between = max(0.0, rest)
        norms = step.of(EventKind.WAIT_NORM)
        self.norm = norms[0].end - norms[0].start if norms else None
        self.uses = {e.number: at(e.start) for e in step.of(EventKind.USE) if e.start < last.start}


def _medians(rows: Iterable[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def _ready_times(plan: OverlapPlan, launches: Sequence[float], backward: float) -> list[float]:
    """When each parameter's gradient is complete, from the launches of the buckets."""
    ready = [backward] * len(plan.layout.parameters)
    began = 0.0
    for bucket, launched in zip(plan.layout.buckets, launches, strict=True):
        launched = max(began, launched)
        total, placed = sum(s.numel for s in bucket.segments), 0
        for segment in bucket.segments:
            placed += segment.numel
            # One that goes on in the next bucket was complete at the launch of its first.
            if not segment.parameter_offset:
                ready[segment.parameter] = began + (launched - began) * placed / total
        began = launched
    for empty in reversed(range(len(ready) - 1)):
        ready[empty] = min(ready[empty], ready[empty + 1])
    return ready


def _last_reads(
    plan: OverlapPlan,
    launches: Sequence[float],
    backward: float,
    reads: Mapping[str, int] | None,
) -> list[float]:
    """When each parameter's old value is read last, taken as late as the launch behind that."""
    if reads is None:
        return [backward] * len(plan.layout.parameters)
    ends = [*launches, backward]
    found = ((p.name in reads, reads.get(p.name, 0)) for p in plan.layout.parameters)
    return [ends[min(before, len(launches))] if read else 0.0 for read, before in found]


def _needed_times(views: Sequence[_StepView], slots: Mapping[int, int], count: int) -> list[float]:
    """When each parameter is first used in the forward; infinite where it was in no step."""
    found: list[list[float]] = [[] for _ in range(count)]
    for view in views:
        for number, time in view.uses.items():
            if number is not None and number in slots:
                found[slots[number]].append(time)
    return [median(times) if times else math.inf for times in found]


def _update_costs(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds per byte of an update, by least squares; both not negative."""
    mean_size, mean = fmean(sizes), fmean(seconds)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    if spread < (0.1 * mean_size) ** 2 * len(sizes):  # buckets of one size tell nothing of latency
        return 0.0, mean / mean_size
    slope = sum(
        (size - mean_size) * (took - mean) for size, took in zip(sizes, seconds, strict=True)
    )
    slope = min(max(0.0, slope / spread), mean / mean_size)
    return mean - slope * mean_size, slope


def _scaled_to(problem: StepProblem, schedule: Schedule, seconds: float) -> StepProblem:
    """The problem with compute scaled between 1 and 1 / contention of what was measured, such that
    its step takes ``seconds`` (or as near as that gets): bisection, as the step only grows with
    compute."""
    low, high = 1 / problem.contention, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if step_seconds(_with_compute(problem, middle), schedule) < seconds:
            low = middle
        else:
            high = middle
    return _with_compute(problem, high)


def _with_compute(problem: StepProblem, factor: float) -> StepProblem:
    return replace(
        problem,
        tensors=tuple(
            replace(
                t,
                ready=t.ready * factor,
                last_read=t.last_read * factor,
                needed=t.needed * factor,
            )
            for t in problem.tensors
        ),
        forward=problem.forward * factor,
        backward=problem.backward * factor,
        between=problem.between * factor,
        update_latency=problem.update_latency * factor,
        update_per_byte=problem.update_per_byte * factor,
    )
