"""Timelines of a step, simulated or measured, in one form: spans in rows, and Chrome's trace format
for them, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPUTE_ROW, REDUCE_ROW, GATHER_ROW = "compute", "reduce", "gather"
ROWS = (COMPUTE_ROW, REDUCE_ROW, GATHER_ROW)

_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Span:
    """Something that took from ``start`` to ``end`` (seconds) in a row of the timeline: a phase, an
    update or a wait on the compute row, a bucket's collective on one of the others."""

    row: str
    kind: str
    bucket: int | None
    start: float
    end: float

    @property
    def name(self) -> str:
        """What a viewer shows."""
        return self.kind if self.bucket is None else f"{self.kind} {self.bucket}"


def chrome_trace(timelines: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """``timelines`` by title as one trace: a process for each, a thread for each row. Times are
    written in microseconds. To be dumped as JSON and opened in Perfetto or chrome://tracing."""
    events: list[dict[str, Any]] = []
    for process, (title, spans) in enumerate(timelines.items()):
        spans = list(spans)
        rows = [*ROWS, *sorted({span.row for span in spans}.difference(ROWS))]
        events += _names(process, title, rows)
        events += [_complete(process, rows.index(span.row), span) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, title: str, rows: Sequence[str]) -> list[dict[str, Any]]:
    def meta(name: str, thread: int, value: str) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": value}}

    threads = [meta("thread_name", number, row) for number, row in enumerate(rows)]
    return [meta("process_name", 0, title), *threads]


def _complete(process: int, thread: int, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": {} if span.bucket is None else {"bucket": span.bucket},
    }
