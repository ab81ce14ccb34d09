"""``fxcomm diff``: what differs between two overlap plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fxcomm.commands.document import Document, Table, mb
from fxcomm.errors import FxcommError
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned


def read_plan(path: Path) -> OverlapPlan:
    """The plan in a file, by itself or as the outcome of tuning.

    Raises:
        FxcommError: the file cannot be read or holds no plan.
    """
    try:
        text = path.read_text()
        return OverlapPlan.from_json(text)
    except OSError as error:
        raise FxcommError(f"diff: {path} cannot be read: {error}") from error
    except ValueError as error:
        try:
            return Tuned.from_json(text).plan
        except ValueError:
            raise FxcommError(f"diff: {path} is no plan: {error}") from error


def compare_plans(ours: OverlapPlan, theirs: OverlapPlan) -> Document:
    """The differences of two plans; the exit code is 1 if there are any, as that of ``diff``."""
    facts = [
        (name, a, b)
        for (name, a), (_, b) in zip(_facts(ours), _facts(theirs), strict=True)
        if a != b
    ]
    moved = _moved(ours, theirs)
    if not facts and not moved:
        return Document({"same": True}, ["The plans are the same."])
    parts: list[str | Table] = [
        Table(
            "Decisions that differ",
            ("", ours.name or "first", theirs.name or "second"),
            tuple(facts),
        )
    ]
    if moved:
        columns = ("parameter", "buckets in the first", "in the second")
        parts.append(Table(f"Parameters in other buckets ({len(moved)})", columns, tuple(moved)))
    data = {
        "same": False,
        "decisions": {name: [a, b] for name, a, b in facts},
        "parameters": {name: [a, b] for name, a, b in moved},
    }
    return Document(data, parts, exit_code=1)


def _facts(plan: OverlapPlan) -> Iterator[tuple[str, str]]:
    sizes = [bucket.nbytes for bucket in plan.layout.buckets]
    limit = plan.in_flight_bytes
    yield "name", plan.name
    yield "world size", str(plan.layout.world_size)
    yield "parameters", str(len(plan.layout.parameters))
    yield "megabytes", mb(sum(sizes))
    yield "buckets", str(len(sizes))
    yield "bucket megabytes", " ".join(map(mb, sizes))
    yield "buckets launched in a graph", str(sum(plan.in_graph))
    yield "gather order", " ".join(map(str, plan.gather_order))
    yield "megabytes in flight", "any" if limit is None else mb(limit)
    yield "gathers into the forward", str(plan.commshift)
    yield "updated in the backward", " ".join(map(str, plan.update_after))
    yield "reductions only in the last micro-step", str(plan.sink_reductions)


def _moved(ours: OverlapPlan, theirs: OverlapPlan) -> list[tuple[str, str, str]]:
    """Parameters, with the buckets that hold elements of them, where these are not the same."""
    first, second = _places(ours), _places(theirs)
    return [
        (name, first.get(name, "none"), second.get(name, "none"))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _places(plan: OverlapPlan) -> dict[str, str]:
    places: dict[str, list[str]] = {}
    for number, bucket in enumerate(plan.layout.buckets):
        for segment in bucket.segments:
            spec = plan.layout.parameters[segment.parameter]
            whole = segment.numel == spec.numel
            part = (
                ""
                if whole
                else f"[{segment.parameter_offset}:{segment.parameter_offset + segment.numel}]"
            )
            places.setdefault(spec.name, []).append(f"{number}{part}")
    return {name: " ".join(found) for name, found in places.items()}
