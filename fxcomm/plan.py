"""The overlap plan: everything that a step's communication is decided by, as a value.

Analysis and planning produce it, the runtime executes it, ranks compare it; nothing else crosses.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxcomm.layout import ParameterSpec, ShardLayout, build_layout

MEGABYTE = 2**20

# DDP's bucket size; the named baseline "bucket-25mb".
BASELINE_BUCKET_BYTES = 25 * MEGABYTE
# Enough buckets for their stages to overlap, each large enough to hide what a collective costs
# besides its bytes: the first and the last bucket of a step are what nothing can hide.
_BUCKETS_OF_A_STEP = 20
_LEAST_BUCKET_BYTES = MEGABYTE
# A bucket is updated in the backward when so many later ones were launched: time for its reduction.
_UPDATE_LAG = 2
# Two baseline buckets and what comes of them: enough to keep a link busy, and bounded for models of
# any size.
BASELINE_IN_FLIGHT_BYTES = 4 * BASELINE_BUCKET_BYTES


@dataclass(frozen=True)
class GraphExecution:
    """One run of a captured backward graph: the parameters (indices) to which it contributed, in
    the order in which it produced their gradients."""

    graph: int
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class ObservedBackward:
    """What one ``backward()`` did: graph runs in order, and the parameters that received a gradient
    from outside every captured graph."""

    executions: tuple[GraphExecution, ...] = ()
    eager: frozenset[int] = frozenset()


@dataclass(frozen=True)
class OverlapPlan:
    """A layout, how its buckets are launched, and limits.

    Buckets are reduced in the order of their numbers on every rank. ``in_graph[b]`` says whether
    bucket ``b`` may start inside the backward graph that completes it; the others start when the
    backward has ended. ``in_flight_bytes`` bounds the memory of collectives in flight (None: no
    bound).

    In the optimizer's step buckets are updated and gathered in ``gather_order``: the first gather
    starts when its own bucket is updated, not when all are. With ``commshift`` the gathers run on
    into the next forward; else the step waits for them.

    The first ``len(update_after)`` buckets are updated and gathered in the backward graph that
    launches them, bucket ``b`` behind the launch of bucket ``update_after[b]``, which gives its
    reduction time; they are the first ones in ``gather_order``, in the order of their numbers.

    With ``sink_reductions`` and gradient accumulation only the last of a step's backwards reduces;
    until then gradients stay on their rank, whole. Else each backward reduces its own.
    """

    name: str
    layout: ShardLayout
    in_graph: tuple[bool, ...]
    in_flight_bytes: int | None
    gather_order: tuple[int, ...]
    commshift: bool
    update_after: tuple[int, ...] = ()
    sink_reductions: bool = False

    def to_json(self) -> str:
        """The plan as JSON text; equal plans give equal texts."""
        fields = {
            "name": self.name,
            "layout": json.loads(self.layout.to_json()),
            "in_graph": self.in_graph,
            "in_flight_bytes": self.in_flight_bytes,
            "gather_order": self.gather_order,
            "commshift": self.commshift,
            "update_after": self.update_after,
            "sink_reductions": self.sink_reductions,
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> OverlapPlan:
        """Reads :meth:`to_json`'s text.

        Raises:
            ValueError: the text is not a plan, or its parts do not fit together.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not an overlap plan: {error}") from error
        entries = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != entries:
            raise ValueError(f"an overlap plan has the entries {sorted(entries)} and no others")
        layout = ShardLayout.from_json(json.dumps(fields["layout"]))
        _check_fields(fields, len(layout.buckets))
        return cls(
            fields["name"],
            layout,
            tuple(fields["in_graph"]),
            fields["in_flight_bytes"],
            tuple(fields["gather_order"]),
            fields["commshift"],
            tuple(fields["update_after"]),
            fields["sink_reductions"],
        )


def _check_fields(fields: dict[str, Any], buckets: int) -> None:
    """Raises ValueError if the entries of a plan besides its layout are not what they should be."""
    name, in_graph, limit = fields["name"], fields["in_graph"], fields["in_flight_bytes"]
    order = fields["gather_order"]
    if not isinstance(name, str):
        raise ValueError(f"the plan's name is {name!r}, not a text")
    if not isinstance(in_graph, list) or not all(isinstance(x, bool) for x in in_graph):
        raise ValueError("the plan's in_graph is not a list of true and false")
    if len(in_graph) != buckets:
        raise ValueError(f"the plan has {buckets} buckets and {len(in_graph)} launch places")
    # bool is an int in Python.
    if limit is not None and (type(limit) is not int or limit < 0):
        raise ValueError(f"the plan's in_flight_bytes is {limit!r}, not a number of bytes")
    numbers = isinstance(order, list) and all(type(x) is int for x in order)
    if not numbers or sorted(order) != list(range(buckets)):
        raise ValueError("the plan's gather_order does not name each bucket once")
    for name in ("commshift", "sink_reductions"):
        if not isinstance(fields[name], bool):
            raise ValueError(f"the plan's {name} is {fields[name]!r}, not true or false")
    _check_update_after(fields["update_after"], in_graph, order)


def _check_update_after(places: Any, in_graph: list[bool], gather_order: list[int]) -> None:
    if not isinstance(places, list) or len(places) > len(in_graph):
        raise ValueError("the plan's update_after is not a list for its first buckets")
    for bucket, place in enumerate(places):
        if type(place) is not int or not bucket <= place < len(in_graph):
            raise ValueError(f"the plan updates bucket {bucket} after {place!r}, no later bucket")
        if not in_graph[bucket] or not in_graph[place]:
            raise ValueError(f"the plan updates bucket {bucket} in no graph that launches it")
    if gather_order[: len(places)] != list(range(len(places))):
        raise ValueError("the plan's gather_order does not begin with what the backward updates")


def misfits(
    plan: OverlapPlan, parameters: Sequence[ParameterSpec], *, world_size: int, split: bool
) -> list[str]:
    """Why ``plan`` is none for ``parameters`` in any order on ``world_size`` ranks, a line for each
    difference; nothing if it fits. Without ``split`` it must not cut a parameter."""
    layout, lines = plan.layout, []
    if layout.world_size != world_size:
        lines.append(f"the plan is for {layout.world_size} ranks, the model trains on {world_size}")
    planned = {spec.name: spec for spec in layout.parameters}
    actual = {spec.name: spec for spec in parameters}
    for name in dict.fromkeys([*actual, *planned]):
        if name not in planned:
            lines.append(
                f"parameter {name!r}: not in the plan, the model has {_kind(actual[name])}"
            )
        elif name not in actual:
            lines.append(f"parameter {name!r}: the plan has {_kind(planned[name])}, not the model")
        elif planned[name] != actual[name]:
            ours, theirs = _kind(planned[name]), _kind(actual[name])
            lines.append(f"parameter {name!r}: the plan has {ours}, the model {theirs}")
    for index, spec in enumerate(() if split else layout.parameters):
        pieces = len(layout.parameter_segments(index))
        if pieces > 1:
            lines.append(
                f"parameter {spec.name!r}: the plan cuts it into {pieces} pieces, stage 'ddp' "
                "keeps it whole"
            )
    return lines


def _kind(spec: ParameterSpec) -> str:
    return f"{spec.numel} elements of {spec.dtype} ({spec.itemsize} bytes each) on {spec.device}"


def launch_runs(count: int, observed: ObservedBackward) -> tuple[list[list[int]], list[int]]:
    """Groups ``count`` parameters by where their gradient is complete.

    A parameter whose only contribution in a backward comes from one run of one graph is complete
    there. Everything else (several contributions, a contribution from outside the graphs, none) is
    complete only when the backward has ended.

    Returns:
        The parameters of each graph run in production order, and the rest in reverse order of
        registration, which is roughly the order of backward.
    """
    contributions = Counter(p for e in observed.executions for p in e.parameters)
    runs_of = Counter(execution.graph for execution in observed.executions)
    settled = {
        parameter
        for execution in observed.executions
        if runs_of[execution.graph] == 1
        for parameter in execution.parameters
        if contributions[parameter] == 1 and parameter not in observed.eager
    }
    runs = [[p for p in e.parameters if p in settled] for e in observed.executions]
    rest = [p for p in reversed(range(count)) if p not in settled]
    return [run for run in runs if run], rest


def order_of_use(layout: ShardLayout, uses: Sequence[int]) -> tuple[int, ...]:
    """Buckets by the first use of any of their parameters in a forward that uses parameters
    (indices in the layout) in the order ``uses``; those that it does not use come last, in reverse
    order of their numbers, which is roughly the order of a forward."""
    first = {parameter: place for place, parameter in reversed(list(enumerate(uses)))}

    def place(bucket: int) -> tuple[int, int]:
        segments = layout.buckets[bucket].segments
        places = (first.get(segment.parameter, len(uses)) for segment in segments)
        return min(places, default=len(uses)), -bucket

    return tuple(sorted(range(len(layout.buckets)), key=place))


def default_bucket_bytes(total_bytes: int) -> int:
    """The bucket size for ``total_bytes`` of parameters, where neither user nor search sets it."""
    wanted = max(_LEAST_BUCKET_BYTES, total_bytes // _BUCKETS_OF_A_STEP)
    return min(BASELINE_BUCKET_BYTES, wanted)


def baseline_plan(
    parameters: Sequence[ParameterSpec],
    observed: ObservedBackward,
    uses: Sequence[int] = (),
    *,
    world_size: int,
    bucket_bytes: int | None,
    in_flight_bytes: int | None,
    split: bool,
    commshift: bool,
    in_backward: bool = False,
    sink_reductions: bool = False,
) -> OverlapPlan:
    """Fixed-size buckets in the order in which ``observed`` produced the gradients, gathered in
    the order in which a forward uses parameters (``uses``, indices).

    ``bucket_bytes`` None is DDP's 25 MB. Buckets never mix parameters of two graph runs, so that
    each starts inside the graph that completes it. ``split`` allows large tensors to be cut.
    ``in_backward`` updates and gathers inside the backward what has a later launch to do it after,
    if all of the backward is one graph.
    """
    runs, rest = launch_runs(len(parameters), observed)
    layout = build_layout(
        [[parameters[p] for p in run] for run in [*runs, rest]],
        world_size=world_size,
        bucket_bytes=bucket_bytes or BASELINE_BUCKET_BYTES,
        split=split,
    )
    late = {parameters[p].name for p in rest}
    slots = {spec.name: slot for slot, spec in enumerate(layout.parameters)}
    in_graph = tuple(
        not any(layout.parameters[s.parameter].name in late for s in bucket.segments)
        for bucket in layout.buckets
    )
    update_after = _update_places(in_graph, in_backward and _is_one_graph(observed))
    early = range(len(update_after))
    by_use = order_of_use(layout, [slots[parameters[p].name] for p in uses])
    return OverlapPlan(
        name="bucket-25mb" if bucket_bytes is None else f"bucket-{bucket_bytes}b",
        layout=layout,
        in_graph=in_graph,
        in_flight_bytes=in_flight_bytes,
        gather_order=(*early, *(bucket for bucket in by_use if bucket not in early)),
        commshift=commshift,
        update_after=update_after,
        sink_reductions=sink_reductions,
    )


def _is_one_graph(observed: ObservedBackward) -> bool:
    """Whether nothing else runs in the backward that could read a parameter after its update."""
    return len(observed.executions) == 1 and not observed.eager


def _update_places(in_graph: Sequence[bool], in_backward: bool) -> tuple[int, ...]:
    launched = next((b for b, inside in enumerate(in_graph) if not inside), len(in_graph))
    return tuple(range(_UPDATE_LAG, launched)) if in_backward else ()
