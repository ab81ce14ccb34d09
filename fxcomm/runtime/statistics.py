"""What a training step cost in communication, and when what happened in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from fxcomm import compat
from fxcomm.analysis.measured import WAITS, Event, EventKind, MeasuredStep
from fxcomm.passes.mark import Mark


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: seconds in which this rank's host stood in a wait for communication, and
    bytes of gradients and parameters that it put on the wire."""

    exposed_s: float = 0.0
    wire_bytes: float = 0.0


class StepMeter:
    """Sums up the running step; :attr:`last` is the last complete one. ``listeners`` are told of
    every complete step, event by event."""

    def __init__(self) -> None:
        self.last = StepStats()
        self.listeners: list[Callable[[MeasuredStep], None]] = []
        self._exposed_s = 0.0
        self._wire_bytes = 0.0
        self._events: list[Event] = []
        self._step_start: float | None = None

    @property
    def listening(self) -> bool:
        """Whether events are wanted that cost something to note."""
        return bool(self.listeners)

    def note(self, kind: EventKind, number: int | None, start: float, end: float) -> None:
        """Something took from ``start`` to ``end`` (``time.perf_counter()``)."""
        if kind in WAITS:
            self._exposed_s += end - start
        if self.listeners:
            self._events.append(Event(kind, number, start, end))

    def sent(self, nbytes: float) -> None:
        """Adds bytes that this rank sends."""
        self._wire_bytes += nbytes

    def close_step(self) -> None:
        """Ends the running step."""
        if not (self._exposed_s or self._wire_bytes):
            return  # a step within a step (super().step()) has closed it already
        self.last = StepStats(self._exposed_s, self._wire_bytes)
        self._exposed_s = self._wire_bytes = 0.0
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        if not self.listeners:
            self._step_start = None
            self._events.clear()
            return
        start, self._step_start = self._step_start, time.perf_counter()
        events, self._events = self._events, []
        if start is not None:  # not a step of which only a part was listened to
            step = MeasuredStep(start, self._step_start, tuple(events))
            for listener in list(self.listeners):
                listener(step)
            self._step_start = time.perf_counter()  # what listeners did is no part of a step


class GraphMarks(compat.Work):
    """Looks at the clock at the marks of a backward graph (``fxcomm.passes.mark``): something to
    be waited for that is there at once."""

    def __init__(self, meter: StepMeter, device: torch.device) -> None:
        super().__init__()
        self.tensor = torch.zeros(1, device=device)
        self._meter = meter
        self._ahead: list[Mark] = []
        self._wait_began = 0.0

    def expect(self, marks: Sequence[Mark]) -> None:
        """A graph with ``marks`` runs next."""
        if self._ahead:  # a graph that failed has left some
            self._ahead = []
            compat.wait_in_place(self.tensor)
        self._ahead = list(reversed(marks))
        if self._ahead:
            compat.register_wait(self.tensor, self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Called by the graph at each mark."""
        del timeout
        if not self._ahead:
            return True
        now, mark = time.perf_counter(), self._ahead.pop()
        if mark.what == "launched":
            self._meter.note(EventKind.LAUNCH_REDUCE, mark.bucket.bucket, now, now)
        elif mark.what == "wait":
            self._wait_began = now
        else:
            self._meter.note(EventKind.WAIT_REDUCE, mark.bucket.bucket, self._wait_began, now)
        if self._ahead:
            compat.register_wait(self.tensor, self)
        return True
