"""The report of a training step as one HTML file that needs no other."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fxcomm.analysis.account import Account
from fxcomm.analysis.timeline import REDUCE_ROW, ROWS, Span

_PLACE = "__DATA__"
_MOST_NAMES = 6


def html_report(
    account: Account,
    *,
    measured: Sequence[Span] = (),
    measured_seconds: float | None = None,
    title: str = "fxcomm",
) -> str:
    """The text of the file: what limits the step, what would help, how other plans compare, the
    simulated and (if given) the measured timeline, memory in flight, and all buckets."""
    data = _data(account, measured, measured_seconds, title)
    # No text of ours may end the element that holds the data, whatever a parameter is called.
    text = json.dumps(data).replace("<", "\\u003c")
    template = files("fxcomm.analysis").joinpath("report.html").read_text(encoding="utf-8")
    return template.replace(_PLACE, text)


def memory_in_flight(account: Account) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes) at each change of the memory that reductions hold, over one simulated step,
    if each holds it while it is on the link. Those that wait for the link, or whose result waits to
    be used, hold it longer: the step's ``peak_bytes`` count that, too."""
    sizes = account.schedule.bucket_bytes(account.problem)
    changes: list[tuple[float, float]] = []
    for span in account.step.timeline:
        if span.row == REDUCE_ROW and span.bucket is not None:
            held = account.problem.held * sizes[span.bucket]
            changes += [(span.start, held), (span.end, -held)]
    points, total = [(0.0, 0.0)], 0.0
    for seconds, change in sorted(changes):  # at one moment, what is given back comes first
        total += change
        points.append((seconds, max(total, 0.0)))
    return tuple(points)


def _data(
    account: Account, measured: Sequence[Span], measured_seconds: float | None, title: str
) -> dict[str, Any]:
    step, problem = account.step, account.problem
    timelines = [("simulated", step.timeline), ("measured", tuple(measured))]
    return {
        "title": title,
        "plan": account.name,
        "limit": account.limit,
        "seconds": step.seconds,
        "measured": measured_seconds,
        "compute": problem.compute,
        "exposed": step.exposed,
        "bound": account.bound.seconds,
        "gap": account.gap,
        "parameters": len(problem.tensors),
        "bytes": problem.nbytes,
        "waits": [{"seconds": w.seconds, "reason": w.reason} for w in account.waits],
        "what_if": [{"change": w.change, "seconds": w.seconds} for w in account.what_if],
        "plans": [
            {"name": name, "seconds": s.seconds, "exposed": s.exposed, "peak": s.peak_bytes}
            for name, s in [(account.name, step), *account.baselines.items()]
        ],
        "timelines": [{"title": name, "spans": _spans(spans)} for name, spans in timelines],
        "rows": ROWS,
        "memory": memory_in_flight(account),
        "buckets": [_bucket(account, number) for number in range(len(account.schedule.buckets))],
    }


def _spans(spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [
        {"row": s.row, "kind": s.kind, "bucket": s.bucket, "start": s.start, "end": s.end}
        for s in spans
    ]


def _bucket(account: Account, number: int) -> dict[str, Any]:
    tensors = [account.problem.tensors[p.tensor] for p in account.schedule.buckets[number]]
    names = list(dict.fromkeys(tensor.name for tensor in tensors))
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    needed = min(tensor.needed for tensor in tensors)
    return {
        "number": number,
        "bytes": account.schedule.bucket_bytes(account.problem)[number],
        "ready": max(tensor.ready for tensor in tensors),
        "needed": needed if math.isfinite(needed) else None,
        "exposed_reduce": account.step.exposed_reduce[number],
        "exposed_gather": account.step.exposed_gather[number],
        "names": ", ".join(names[:_MOST_NAMES]) + more,
    }
