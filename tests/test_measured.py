"""Measured steps: what is read off events, and the events of real steps."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxcomm
from fxcomm.analysis.measured import WAITS, Event, EventKind, MeasuredStep, timeline_of
from fxcomm.analysis.timeline import COMPUTE_ROW, GATHER_ROW, REDUCE_ROW, Span, chrome_trace
from fxcomm.backends import communicators
from fxcomm.errors import FxcommError
from tests.ranks import Ranks
from tests.test_reads import EAGER, trainer

Pools = Callable[[int], Ranks]


def waiting(*times: tuple[float, float], end: float = 100.0) -> MeasuredStep:
    events = (Event(EventKind.WAIT_GATHER, i, *pair) for i, pair in enumerate(times))
    return MeasuredStep(0.0, end, tuple(events))


def test_compute_time_stands_still_in_waits() -> None:
    step = waiting((10, 20), (15, 30), (50, 60))
    assert step.exposed == 30
    assert [step.compute_at(t) for t in (0, 10, 12, 30, 40, 55, 60, 100)] == [
        *(0, 10, 10, 10, 20, 30, 30, 70)
    ]


Pair = tuple[float, float]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(lambda p: tuple(sorted(p)))))
def test_compute_time_is_what_no_wait_covers(pairs: list[Pair]) -> None:
    step = waiting(*pairs)
    grid = [i / 2 for i in range(201)]
    for time_ in grid[::10]:
        covered = _measure([(a, min(b, time_)) for a, b in pairs if a < time_])
        assert step.compute_at(time_) == pytest.approx(time_ - covered, abs=1e-9)
    assert step.exposed == pytest.approx(_measure(pairs), abs=1e-9)


def _measure(pairs: list[Pair]) -> float:
    """The length of a union of intervals, over their elementary pieces."""
    points = sorted({x for pair in pairs for x in pair})
    pieces = itertools.pairwise(points)
    return sum(b - a for a, b in pieces if any(x <= a and b <= y for x, y in pairs))


def test_timeline_of_a_step() -> None:
    events = (
        Event(EventKind.WAIT_GATHER, 0, 1, 2),
        Event(EventKind.BACKWARD, None, 3, 6),
        Event(EventKind.LAUNCH_REDUCE, 0, 5, 5),
        Event(EventKind.WAIT_REDUCE, 0, 6, 7),
        Event(EventKind.UPDATE, 0, 7, 8),
        Event(EventKind.LAUNCH_GATHER, 0, 8, 8),
    )
    following = (Event(EventKind.WAIT_GATHER, 0, 10, 11),)
    spans = timeline_of([MeasuredStep(0, 9, events)])
    assert Span(REDUCE_ROW, "reduce", 0, 5, 7) in spans
    assert Span(COMPUTE_ROW, "backward", None, 3, 6) in spans
    assert Span(COMPUTE_ROW, "update", 0, 7, 8) in spans
    assert not [s for s in spans if s.row == GATHER_ROW], "its end was not seen"
    steps = [MeasuredStep(0, 9, events), MeasuredStep(9, 20, following)]
    assert Span(GATHER_ROW, "gather", 0, 8, 11) in timeline_of(steps)


@given(
    st.lists(
        st.builds(
            lambda row, kind, bucket, start, length: Span(row, kind, bucket, start, start + length),
            st.sampled_from([COMPUTE_ROW, REDUCE_ROW, "another"]),
            st.sampled_from(["forward", "reduce"]),
            st.none() | st.integers(0, 9),
            st.floats(0, 10),
            st.floats(0, 10),
        )
    )
)
def test_chrome_traces_hold_every_span(spans: list[Span]) -> None:
    events = json.loads(json.dumps(chrome_trace({"a": spans, "b": []})))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"a", "b"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [e for e in events if e["ph"] == "X"]
    assert len(found) == len(spans)
    for span, event in zip(spans, found, strict=True):
        assert rows[event["pid"], event["tid"]] == span.row
        assert event["name"] == span.name
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)


# --- real steps ---


def recording_job(
    rank: int, world_size: int, options: dict[str, Any], steps: int
) -> tuple[list[MeasuredStep], list[Span], float, int]:
    original = communicators.GlooCommunicator.all_gather

    class Slow:
        """A gather over a slow link."""

        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            time.sleep(0.002)
            self._work.wait()

    def all_gather(self: Any, buffer: Any, tag: int) -> Slow:
        return Slow(original(self, buffer, tag))

    communicators.GlooCommunicator.all_gather = all_gather  # type: ignore[assignment,method-assign]
    try:
        made = trainer(rank, world_size, "gpt", options)
        started = time.perf_counter()
        with fxcomm.record_steps(made.model) as recorded:
            for _ in range(steps):
                made.step()
        seconds = time.perf_counter() - started
        made.step()
        parameters = len(list(made.model.parameters()))
    finally:
        communicators.GlooCommunicator.all_gather = original  # type: ignore[method-assign]
    return recorded, list(timeline_of(recorded)), seconds, parameters


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_gathers_run_on_into_the_next_forward(ranks: Pools, lowering: str) -> None:
    options = {**EAGER, "lowering": lowering, "bucket_mb": 0.01, "in_flight_mb": 0.02}
    for recorded, spans, seconds, parameters in ranks(2).run(recording_job, options, 4):
        assert len(recorded) == 3, "the first step's beginning was not seen"
        assert sum(step.seconds for step in recorded) < seconds
        buckets = {e.number for e in recorded[0].of(EventKind.UPDATE)}
        assert len(buckets) > 5
        for step in recorded:
            _is_a_whole_step(step, buckets, parameters)
        for earlier, later in itertools.pairwise(recorded):
            assert earlier.end <= later.start
            began = {e.number: e.start for e in earlier.of(EventKind.LAUNCH_GATHER)}
            ended = {e.number: e.end for e in later.of(EventKind.WAIT_GATHER)}
            backward = later.of(EventKind.BACKWARD)[0].start
            assert all(began[b] < earlier.end <= ended[b] < backward for b in buckets)
        gathers = [s for s in spans if s.row == GATHER_ROW]
        forwards = [s for s in spans if s.kind == "forward"]
        assert all(any(g.start < f.start < g.end < f.end for g in gathers) for f in forwards[1:])


def _is_a_whole_step(step: MeasuredStep, buckets: set[int | None], parameters: int) -> None:
    for kind in (
        *(EventKind.LAUNCH_REDUCE, EventKind.WAIT_REDUCE, EventKind.UPDATE),
        *(EventKind.LAUNCH_GATHER, EventKind.WAIT_GATHER),
    ):
        assert sorted(e.number for e in step.of(kind)) == sorted(buckets), kind  # type: ignore[type-var]
    assert len({e.number for e in step.of(EventKind.USE)}) == parameters
    assert step.backwards == 1
    (backward,) = step.of(EventKind.BACKWARD)
    launches = step.of(EventKind.LAUNCH_REDUCE)
    assert [e.number for e in launches] == sorted(buckets)  # type: ignore[type-var]
    assert all(backward.start <= e.start <= backward.end for e in launches)
    waits = sum(e.end - e.start for e in step.events if e.kind in WAITS)
    assert step.exposed == pytest.approx(waits, rel=1e-6), "no two waits at a time"
    assert step.exposed >= 0.002 * len(buckets)


def nested_job(rank: int, world_size: int) -> tuple[int, int, str]:
    made = trainer(rank, world_size, "mlp", EAGER)
    with fxcomm.record_steps(made.model) as outer:
        made.step()
        with fxcomm.record_steps(made.model) as inner:
            made.step()
        made.step()
    made.step()
    try:
        with fxcomm.record_steps(type(made.model)()):
            return len(outer), len(inner), ""
    except FxcommError as error:
        return len(outer), len(inner), str(error)


def test_recordings_nest_and_strangers_are_refused(ranks: Pools) -> None:
    for outer, inner, refusal in ranks(2).run(nested_job):
        assert (outer, inner) == (2, 1)
        assert "no model of fxcomm's" in refusal


def test_timelines_are_written(tmp_path: Path) -> None:
    events = (Event(EventKind.BACKWARD, None, 3, 6),)
    fxcomm.save_timeline(tmp_path / "step.json", [MeasuredStep(0, 9, events)])
    trace = json.loads((tmp_path / "step.json").read_text())
    assert {e["name"] for e in trace["traceEvents"]} >= {"forward", "backward", "step"}
