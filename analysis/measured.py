"""A training step as the runtime saw it: what happened when.

Times are in seconds on one rank's clock. *Compute time* is time without the waits for
communication: the clock of a step whose communication costs nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from fxcomm.analysis.timeline import COMPUTE_ROW, GATHER_ROW, REDUCE_ROW, Span


class EventKind(Enum):
    """What was noted: a BACKWARD, the UPDATE of a bucket, the USE of a parameter by a forward; the
    launches, which are instants; and waits for communication: for a bucket, for the norm of all
    gradients, for what ranks tell each other."""

    BACKWARD = "backward"
    UPDATE = "update"
    USE = "use"
    LAUNCH_REDUCE = "launch reduce"
    LAUNCH_GATHER = "launch gather"
    WAIT_REDUCE = "wait for reduce"
    WAIT_GATHER = "wait for gather"
    WAIT_NORM = "wait for norm"
    WAIT_RANKS = "wait for ranks"


WAITS = frozenset(
    {
        EventKind.WAIT_REDUCE,
        EventKind.WAIT_GATHER,
        EventKind.WAIT_NORM,
        EventKind.WAIT_RANKS,
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took from ``start`` to ``end``. ``number`` is a bucket's, a parameter's for
    USE, None for a backward and the waits for all ranks."""

    kind: EventKind
    number: int | None
    start: float
    end: float


@dataclass(frozen=True)
class MeasuredStep:
    """From the end of one optimizer step to the end of the next, and what happened in between."""

    start: float
    end: float
    events: tuple[Event, ...]

    def of(self, kind: EventKind) -> list[Event]:
        """The events of a kind, in order of time."""
        return sorted((e for e in self.events if e.kind is kind), key=lambda e: e.start)

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.start

    @property
    def exposed(self) -> float:
        """Seconds in which compute stood still for communication."""
        return self._stood[-1]

    @cached_property
    def _waits(self) -> list[tuple[float, float]]:
        """Disjoint times of standing still, in order."""
        merged: list[tuple[float, float]] = []
        for start, end in sorted((e.start, e.end) for e in self.events if e.kind in WAITS):
            start, end = max(start, self.start), min(end, self.end)
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            elif start < end:
                merged.append((start, end))
        return merged

    @cached_property
    def _stood(self) -> list[float]:
        """Seconds of standing still before each of the waits, and after all."""
        return [0.0, *itertools.accumulate(end - start for start, end in self._waits)]

    def compute_at(self, time: float) -> float:
        """Compute time from the step's start to ``time``."""
        begun = bisect.bisect_right(self._waits, (time, float("inf")))
        stood = self._stood[begun]
        if begun and time < self._waits[begun - 1][1]:
            stood -= self._waits[begun - 1][1] - time
        return time - self.start - stood

    @property
    def backwards(self) -> int:
        """How many backwards the step had."""
        return len(self.of(EventKind.BACKWARD))


def timeline_of(steps: Sequence[MeasuredStep]) -> tuple[Span, ...]:
    """Consecutive steps as one timeline that begins with the first.

    A collective ends, on this timeline, when it was waited for: how much earlier the link was done
    with it is not seen. One whose launch or whose wait was not seen is left out.
    """
    if not steps:
        return ()
    spans = [span for step in steps for span in _on_the_compute_row(step)]
    events = sorted((e for step in steps for e in step.events), key=lambda e: e.start)
    spans += _collectives(events, EventKind.LAUNCH_REDUCE, EventKind.WAIT_REDUCE, REDUCE_ROW)
    spans += _collectives(events, EventKind.LAUNCH_GATHER, EventKind.WAIT_GATHER, GATHER_ROW)
    origin = steps[0].start
    shifted = (replace(s, start=s.start - origin, end=s.end - origin) for s in spans)
    return tuple(sorted(shifted, key=lambda span: (span.start, -span.end)))


def _on_the_compute_row(step: MeasuredStep) -> Iterator[Span]:
    nothing = Event(EventKind.BACKWARD, None, step.end, step.end)
    backward = (step.of(EventKind.BACKWARD) or [nothing])[-1]
    yield Span(COMPUTE_ROW, "forward", None, step.start, backward.start)
    yield Span(COMPUTE_ROW, "backward", None, backward.start, backward.end)
    yield Span(COMPUTE_ROW, "step", None, backward.end, step.end)
    for event in step.events:
        if event.kind in WAITS or event.kind is EventKind.UPDATE:
            yield Span(COMPUTE_ROW, event.kind.value, event.number, event.start, event.end)


def _collectives(
    events: Sequence[Event], launch: EventKind, wait: EventKind, row: str
) -> Iterator[Span]:
    began: dict[int | None, float] = {}
    for event in events:
        if event.kind is launch:
            began[event.number] = event.start
        elif event.kind is wait and event.number in began:
            yield Span(row, row, event.number, began.pop(event.number), event.end)
