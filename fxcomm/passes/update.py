"""The pass that updates and gathers buckets inside a backward graph.

At the place that the plan names, ``fxcomm::update_bucket`` hands a bucket's reduction to the
runtime, which waits for it, updates this rank's shard and starts the gather. From there on the
bucket's parameters hold other values, so that the operator comes after every read of them in the
graph; it is declared to write them, which keeps compilers from moving a read behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor

from fxcomm.analysis.gradients import output_values, set_outputs
from fxcomm.passes.gather import uses_through_views
from fxcomm.passes.pipeline import GraphPass
from fxcomm.passes.stamp import KEY, BucketKey, Stamp, stamp_of

_LIBRARY = torch.library.Library("fxcomm", "FRAGMENT")
_LIBRARY.define(
    "update_bucket(Tensor(a!) reduced, Tensor? packed, Tensor(b!)[] parameters, "
    "int model, int arena, int bucket) -> ()"
)


@torch.library.register_fake("fxcomm::update_bucket", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(*arguments: object) -> None:
    """Compilers learn that it returns nothing."""


UpdateBucket = Callable[[Tensor, Tensor | None, int, int, int], None]


def implement_update_bucket(update: UpdateBucket) -> None:
    """Says what ``fxcomm::update_bucket`` does, for the life of the process: it is called with the
    reduction's raw result and its operand, or with the finished mean and None, and with the numbers
    of model, arena and bucket."""

    def run(
        reduced: Tensor,
        packed: Tensor | None,
        parameters: Sequence[Tensor],
        model: int,
        arena: int,
        bucket: int,
    ) -> None:
        del parameters  # named for their dependencies only
        update(reduced, packed, model, arena, bucket)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl("update_bucket", run, device)


@dataclass(frozen=True)
class UpdateTask:
    """One bucket to update in a graph: right behind the launch of bucket ``after``, or as soon
    after that as nothing reads its parameters any more. ``parameters`` are the graph's inputs (by
    position) that are the bucket's parameters or views of them."""

    key: BucketKey
    after: BucketKey
    model: int
    parameters: frozenset[int]


def update_buckets(gm: torch.fx.GraphModule, tasks: Sequence[UpdateTask]) -> torch.fx.GraphModule:
    """Updates the buckets of ``tasks``, in order, and returns them no longer."""
    nodes = list(gm.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    place = {node: i for i, node in enumerate(nodes)}
    final = {(s.role, s.bucket): n for n in nodes if (s := stamp_of(n)) is not None and s.final}
    anchor = 0
    dropped: set[torch.fx.Node] = set()
    for task in tasks:
        parameters = [placeholders[i] for i in sorted(task.parameters)]
        # Earlier updates, which name the same parameter, are no reads.
        readers = [r for p in parameters for r in uses_through_views(p)[1] if r in place]
        launch, mean = final["launch", task.key], final.get(("finish", task.key))
        before = [launch, final["launch", task.after], *readers]
        anchor = max([anchor, *(place[node] for node in before)])
        if mean is not None:
            anchor = max(anchor, place[mean])
        packed = None if mean is not None else final["pack", task.key]
        stamp = stamp_of(launch)
        assert stamp is not None
        with gm.graph.inserting_after(_last_inserted(nodes[anchor])):
            update = gm.graph.call_function(
                torch.ops.fxcomm.update_bucket.default,
                (mean or launch, packed, parameters, task.model, task.key.arena, task.key.bucket),
            )
        update.meta["val"] = None
        update.meta[KEY] = replace(stamp, role="update", final=True)
        dropped |= {node for node in (launch, mean, final["pack", task.key]) if node is not None}
    set_outputs(gm.graph, [v for v in output_values(gm.graph) if v not in dropped])
    return gm


def _last_inserted(node: torch.fx.Node) -> torch.fx.Node:
    """The last of the updates that were already put behind ``node``."""
    while _is_update(node.next):
        node = node.next
    return node


def _is_update(node: torch.fx.Node) -> bool:
    stamp: Stamp | None = stamp_of(node)
    return stamp is not None and stamp.role == "update"


def update_pass(tasks: Sequence[UpdateTask]) -> GraphPass[Any]:
    """:func:`update_buckets` of ``tasks``, after the reduce passes."""
    return GraphPass(
        "update_buckets",
        lambda gm, context: update_buckets(gm, tasks),
        requires=frozenset({"launched reductions"}),
    )
