"""What tuning a plan came to, as a value with a text of its own: the cache keeps it, dumps hold it
and reports are made of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fxcomm.analysis.account import Account, account_of
from fxcomm.analysis.costs import StepProblem
from fxcomm.analysis.schedules import schedule_of
from fxcomm.analysis.timeline import Span
from fxcomm.plan import OverlapPlan


@dataclass(frozen=True)
class Tuned:
    """What tuning came to: the plan that stays, and seconds of a step by plan, measured and (but
    for the first plan's) predicted. ``why`` it ended, in words. ``problem`` is what the search was
    for, None if it never came to one. ``timeline`` are the last measured steps of the plan, on
    this rank; empty if none were."""

    plan: OverlapPlan
    why: str
    measured: dict[str, float]
    predicted: dict[str, float]
    problem: StepProblem | None = None
    timeline: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Measured seconds of a step by the plan, None if it was not measured."""
        return self.measured.get(self.plan.name)

    def account(self) -> Account | None:
        """Where a step's time goes, None without a problem."""
        if self.problem is None:
            return None
        return account_of(self.plan.name, self.problem, schedule_of(self.plan))

    def to_json(self) -> str:
        """The outcome as JSON text."""
        fields = {
            "plan": json.loads(self.plan.to_json()),
            "why": self.why,
            "measured": self.measured,
            "predicted": self.predicted,
            "problem": None if self.problem is None else json.loads(self.problem.to_json()),
            "timeline": [asdict(span) for span in self.timeline],
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """Reads :meth:`to_json`'s text.

        Raises:
            ValueError: the text is none.
        """
        try:
            fields = json.loads(text)
            problem = fields["problem"]
            return cls(
                OverlapPlan.from_json(json.dumps(fields["plan"])),
                str(fields["why"]),
                {str(name): float(s) for name, s in fields["measured"].items()},
                {str(name): float(s) for name, s in fields["predicted"].items()},
                None if problem is None else StepProblem.from_json(json.dumps(problem)),
                tuple(Span(**span) for span in fields["timeline"]),
            )
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not an outcome of tuning: {error!r}") from error
