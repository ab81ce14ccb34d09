"""An account of a training step: where its time goes under a plan, what the named baselines would
make of it, what no plan can beat, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fxcomm.analysis.baselines import NAMES, baseline
from fxcomm.analysis.bounds import Bound, gap, lower_bound
from fxcomm.analysis.costs import LinkCurve, Schedule, StepProblem
from fxcomm.analysis.simulate import SimulatedStep, simulate

_WORTH_SAYING = 0.005  # of the step: shorter waits are not told
_MOST_WAITS = 5
_MOST_NAMES = 2


@dataclass(frozen=True)
class Wait:
    """``seconds`` for which compute stands still for the ``kind`` ("reduce", "gather" or "norm") of
    a bucket, and ``reason``, why it does, as a sentence."""

    kind: str
    bucket: int | None
    seconds: float
    reason: str


@dataclass(frozen=True)
class WhatIf:
    """A change of the machine or of the training, and the step's ``seconds`` with it."""

    change: str
    seconds: float


@dataclass(frozen=True)
class Account:
    """Everything that is told of a plan named ``name`` for ``problem``.

    ``waits`` are the longest first; those under half a percent of the step are left out.
    ``what_if`` are changes that make the step shorter, the best first, with the same plan.
    """

    name: str
    problem: StepProblem
    schedule: Schedule
    step: SimulatedStep
    bound: Bound
    baselines: Mapping[str, SimulatedStep]
    waits: tuple[Wait, ...]
    what_if: tuple[WhatIf, ...]

    @property
    def gap(self) -> float:
        """By which part the step is above the bound."""
        return gap(self.step.seconds, self.bound)

    @property
    def communication(self) -> float:
        """Seconds of the link that the step's collectives take, each alone."""
        sizes = self.schedule.bucket_bytes(self.problem)
        both = (self.problem.reduce, self.problem.gather)
        return sum(curve.seconds(size) for curve in both for size in sizes)

    @property
    def limit(self) -> str:
        """What limits the step, in a sentence."""
        hidden = 1 - self.step.exposed / self.communication if self.communication else 1.0
        return (
            f"A step takes {_ms(self.step.seconds)}: {_ms(self.problem.compute)} of forward and "
            f"backward, and {_ms(self.step.exposed)} in which compute stands still for "
            f"communication, of which {hidden:.0%} is hidden. No plan takes less than "
            f"{_ms(self.bound.seconds)}, by {self.bound.reason}."
        )


def account_of(name: str, problem: StepProblem, schedule: Schedule) -> Account:
    """The account of ``schedule``, with baselines under its limit in flight and its commshift."""
    step = simulate(problem, schedule)
    limit, commshift = schedule.in_flight_bytes, schedule.commshift
    return Account(
        name,
        problem,
        schedule,
        step,
        lower_bound(problem, in_backward=bool(schedule.update_after)),
        {
            other: simulate(
                problem, baseline(other, problem, in_flight_bytes=limit, commshift=commshift)
            )
            for other in NAMES
        },
        _waits(problem, schedule, step),
        _what_if(problem, schedule, step.seconds),
    )


# --- waits ---


def _waits(problem: StepProblem, schedule: Schedule, step: SimulatedStep) -> tuple[Wait, ...]:
    waits = [
        *(_reduce_wait(problem, schedule, b, s) for b, s in enumerate(step.exposed_reduce)),
        *(_gather_wait(problem, schedule, b, s) for b, s in enumerate(step.exposed_gather)),
    ]
    if step.exposed_norm:
        reason = (
            "gradients are clipped by their norm, which is known only when the last of them is "
            f"reduced: {_ms(step.exposed_norm)} for its all-reduce"
        )
        waits.append(Wait("norm", None, step.exposed_norm, reason))
    told = [wait for wait in waits if wait.seconds > _WORTH_SAYING * step.seconds]
    return tuple(sorted(told, key=lambda wait: -wait.seconds)[:_MOST_WAITS])


def _reduce_wait(problem: StepProblem, schedule: Schedule, bucket: int, seconds: float) -> Wait:
    ready = max((problem.tensors[p.tensor].ready for p in schedule.buckets[bucket]), default=0.0)
    reason = (
        f"the gradients of {describe_bucket(problem, schedule, bucket)} are ready "
        f"{_ms(problem.backward - ready)} before the backward ends, and their reduction takes "
        f"{_ms(problem.reduce.seconds(schedule.bucket_bytes(problem)[bucket]))} once the link is "
        f"free: {_ms(seconds)} of it are exposed"
    )
    return Wait("reduce", bucket, seconds, reason)


def _gather_wait(problem: StepProblem, schedule: Schedule, bucket: int, seconds: float) -> Wait:
    needed = min((problem.tensors[p.tensor].needed for p in schedule.buckets[bucket]), default=0.0)
    place = schedule.gather_order.index(bucket)
    before = "first of all gathers" if not place else f"after {place} other gathers"
    reason = (
        f"{describe_bucket(problem, schedule, bucket)} is needed {_ms(needed)} into the next "
        f"forward and gathered {before}: {_ms(seconds)} of that are exposed"
    )
    return Wait("gather", bucket, seconds, reason)


def describe_bucket(problem: StepProblem, schedule: Schedule, bucket: int) -> str:
    """A bucket by number, size and the first names of its parameters."""
    names = list(dict.fromkeys(problem.tensors[p.tensor].name for p in schedule.buckets[bucket]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    size = schedule.bucket_bytes(problem)[bucket] / 2**20
    return f"bucket {bucket} ({', '.join(names[:_MOST_NAMES])}{more}; {size:.1f} MB)"


# --- what would help ---


def _what_if(problem: StepProblem, schedule: Schedule, seconds: float) -> tuple[WhatIf, ...]:
    told = [
        WhatIf(change, simulate(changed, other).seconds)
        for change, changed, other in _changes(problem, schedule)
    ]
    helping = [w for w in told if w.seconds < seconds * (1 - _WORTH_SAYING)]
    return tuple(sorted(helping, key=lambda w: w.seconds))


def _changes(
    problem: StepProblem, schedule: Schedule
) -> Iterator[tuple[str, StepProblem, Schedule]]:
    reduce, gather = problem.reduce, problem.gather
    fast = replace(problem, reduce=_faster(reduce), gather=_faster(gather))
    yield "a link twice as fast", fast, schedule
    yield (
        "half the bytes of each gather (gather_dtype)",
        replace(problem, gather=_halved(gather)),
        schedule,
    )
    yield (
        "half the bytes of each reduction (reduce_dtype)",
        replace(problem, reduce=_halved(reduce)),
        schedule,
    )
    if problem.contention > 1:
        yield "communication that slows no compute", replace(problem, contention=1.0), schedule
    if problem.norm is not None:
        yield "no clipping by norm", replace(problem, norm=None), schedule
    if not schedule.commshift:
        yield (
            "gathers that run on into the forward (commshift)",
            problem,
            replace(schedule, commshift=True),
        )
    if schedule.in_flight_bytes is not None:
        yield "no limit in flight (in_flight_mb)", problem, replace(schedule, in_flight_bytes=None)
    free = replace(problem, update_latency=0.0, update_per_byte=0.0)
    yield "an update that costs nothing", free, schedule
    yield "launches that cost nothing", replace(problem, launch=0.0), schedule


def _faster(curve: LinkCurve) -> LinkCurve:
    return LinkCurve(tuple((size, seconds / 2) for size, seconds in curve.points))


def _halved(curve: LinkCurve) -> LinkCurve:
    """The curve by bytes of a bucket of which half as many travel."""
    return LinkCurve(tuple((2 * size, seconds) for size, seconds in curve.points))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
