"""Tunes a model's plan while it trains: measures some steps, searches, tries, and keeps what is
faster.

All ranks do the same at the same step: what they do next hangs on the number of steps and on what
rank 0 tells them, never on a rank's own clock.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Protocol

from fxcomm.analysis.baselines import baseline
from fxcomm.analysis.bounds import gap
from fxcomm.analysis.costs import LinkCosts, Schedule, StepProblem
from fxcomm.analysis.measured import MeasuredStep, timeline_of
from fxcomm.analysis.measured_problem import problem_of
from fxcomm.analysis.schedules import planned, schedule_of
from fxcomm.analysis.search import Limits, search
from fxcomm.analysis.simulate import step_seconds
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned

_log = logging.getLogger("fxcomm")

# Steps before anything is measured: the first ones compile, and fill caches.
_WARM_UP = 4
_AFTER_SWITCH = 2
_MEASURED = 6
_TOLD = 2  # steps on the timeline that is kept: gathers of the first end in the second
_TURNS = 2  # of the plan that was found, each followed by one of the first plan
_WORTH_TRYING = 0.01  # predicted gain, as a part of the step


class Tunable(Protocol):
    """What tuning needs of a model. All of it is collective but ``plan``, ``slots``, ``held``,
    ``reads`` and ``rank``,
    and is called on every rank in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def plan(self) -> OverlapPlan:
        """The present plan."""

    @property
    def slots(self) -> dict[int, int]:
        """The place of a parameter in the plan's layout, by its number."""

    @property
    def held(self) -> float:
        """Bytes that a reduction holds in flight, by byte of its bucket."""

    @property
    def reads(self) -> Mapping[str, int]:
        """Buckets launched before the last read of a parameter in the backward, by its name."""

    def measure_link(self) -> LinkCosts: ...
    def gather_objects(self, mine: Any) -> list[Any]: ...
    def from_rank_zero(self, topic: str, text: str) -> str: ...
    def switch(self, plan: OverlapPlan) -> None: ...
    def forget_plans(self) -> None: ...


Choose = Callable[[StepProblem], Schedule]


@dataclass(frozen=True)
class Searched:
    """Chooses by search within ``limits``; see :func:`fxcomm.analysis.search.search`."""

    limits: Limits
    budget_s: float

    def __call__(self, problem: StepProblem) -> Schedule:
        found = search(problem, self.limits, budget_s=self.budget_s)
        _log.info(
            "search: step of %.1f ms predicted, %.1f%% above the bound (%s); best baseline %.1f ms",
            found.seconds * 1e3,
            gap(found.seconds, found.bound) * 100,
            found.bound.reason,
            min(found.baselines.values()) * 1e3,
        )
        return found.schedule


@dataclass(frozen=True)
class Named:
    """Chooses a baseline by its name, within ``limits``."""

    name: str
    limits: Limits

    def __call__(self, problem: StepProblem) -> Schedule:
        limit, commshift = self.limits.in_flight_bytes, self.limits.commshift
        return baseline(self.name, problem, in_flight_bytes=limit, commshift=commshift)


def tune(
    model: Tunable, choose: Choose, say: Callable[[str], None], *, forced: str | None = None
) -> Generator[None, MeasuredStep, Tuned]:
    """A generator that is sent each measured step, and returns :class:`Tuned` in the end. Between
    two of them it may switch the model's plan. What is ``forced`` (a name) is taken as it is
    chosen, whatever it brings."""
    first = model.plan
    say(f"measuring {first.name!r}")
    steps = yield from _measure(_WARM_UP)
    problem = _agreed_problem(model, steps, model.measure_link())
    if isinstance(problem, str):
        return Tuned(first, f"not tuned: {problem}", {}, {})
    say("searching")
    proposal = _proposal(model, problem, choose, forced)
    measured = {first.name: _agreed_seconds(model, steps)}
    if isinstance(proposal, str):
        return Tuned(first, proposal, measured, {}, problem, timeline_of(steps[-_TOLD:]))
    plan, predicted = proposal
    if forced is not None:
        model.switch(plan)
        model.forget_plans()
        return Tuned(
            plan, f"{plan.name!r} was asked for", measured, {plan.name: predicted}, problem
        )
    tried: dict[str, list[MeasuredStep]] = {first.name: [*steps], plan.name: []}
    for candidate in (plan, first) * _TURNS:
        model.switch(candidate)
        say(f"measuring {candidate.name!r}")
        tried[candidate.name] += yield from _measure(_AFTER_SWITCH)
    # Plans take turns: what the machine did beside the first one it may not have done later.
    measured = {name: _agreed_seconds(model, found) for name, found in tried.items()}
    best = plan if measured[plan.name] < measured[first.name] else first
    model.switch(best)
    model.forget_plans()
    verdict = _verdict(best, first, plan, measured)
    timeline = timeline_of(tried[best.name][-_TOLD:])
    return Tuned(best, verdict, measured, {plan.name: predicted}, problem, timeline)


def _measure(warm_up: int) -> Generator[None, MeasuredStep, list[MeasuredStep]]:
    steps = []
    for _ in range(warm_up):
        yield
    for _ in range(_MEASURED):
        steps.append((yield))
    return steps


def _agreed_seconds(model: Tunable, steps: Sequence[MeasuredStep]) -> float:
    """The median step, as the mean over ranks."""
    return fmean(model.gather_objects(median(step.seconds for step in steps)))


def _agreed_problem(
    model: Tunable, steps: Sequence[MeasuredStep], link: LinkCosts
) -> StepProblem | str:
    """The problem as the ranks see it on average, or why there is none."""
    mine: StepProblem | str
    try:
        mine = problem_of(steps, model.plan, model.slots, link, model.reads)
        mine = replace(mine, held=model.held)
    except ValueError as error:
        mine = str(error)
    everyone = model.gather_objects(mine)
    refused = next((found for found in everyone if isinstance(found, str)), None)
    return _mean_problem(everyone) if refused is None else refused


def _mean_problem(problems: Sequence[StepProblem]) -> StepProblem:
    """Every time as its mean over ``problems``, which are of the same tensors."""
    tensors = tuple(
        replace(together[0], **_means(together, ("ready", "last_read", "needed")))
        for together in zip(*(problem.tensors for problem in problems), strict=True)
    )
    times = ["forward", "backward", "launch", "between", "update_latency", "update_per_byte"]
    if all(problem.norm is not None for problem in problems):
        times.append("norm")
    return replace(problems[0], tensors=tensors, **_means(problems, times))


def _means(items: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: fmean(getattr(item, name) for item in items) for name in names}


def _proposal(
    model: Tunable, problem: StepProblem, choose: Choose, forced: str | None
) -> tuple[OverlapPlan, float] | str:
    """The plan that rank 0 chooses and its predicted seconds, or why it is not to be tried."""
    told: dict[str, Any] = {}
    if model.rank == 0:
        try:
            told = _choice(problem, model.plan, choose, forced)
        except Exception as error:  # every rank must learn of it
            _log.warning("the search for a plan failed; the first one stays", exc_info=True)
            told = {"why": f"the search failed: {type(error).__name__}: {error}"}
    told = json.loads(model.from_rank_zero("the tuned plan", json.dumps(told)))
    if "plan" not in told:
        return str(told["why"])
    return OverlapPlan.from_json(told["plan"]), float(told["seconds"])


def _choice(
    problem: StepProblem, first: OverlapPlan, choose: Choose, forced: str | None
) -> dict[str, Any]:
    plan, schedule = planned(choose(problem), problem, first, name=forced or "searched")
    now, then = (step_seconds(problem, s) for s in (schedule_of(first), schedule))
    if forced is None and then > now * (1 - _WORTH_TRYING):
        return {"why": f"nothing better was found than {first.name!r}"}
    return {"plan": plan.to_json(), "seconds": then}


def _verdict(
    best: OverlapPlan, first: OverlapPlan, plan: OverlapPlan, measured: dict[str, float]
) -> str:
    ratio = measured[plan.name] / measured[first.name]
    kept = "kept" if best is plan else "dropped"
    return f"{plan.name!r} takes {ratio:.3f} times as long as {first.name!r}: {kept}"
