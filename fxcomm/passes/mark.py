"""The pass by which a backward graph tells when it launches and when it waits.

A mark is a ``wait_tensor`` on an input that nothing is pending on: next to nothing, unless the
runtime registers something there to be waited for, which then looks at the clock. The lowered graph
is the same whether steps are being measured or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx

from fxcomm.analysis.gradients import output_values, set_outputs
from fxcomm.passes.gather import uses_through_views
from fxcomm.passes.pipeline import GraphPass
from fxcomm.passes.stamp import KEY, BucketKey, Stamp, stamp_of

_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Mark:
    """A place in a graph: behind the launch of a bucket, or at the beginning or end of a wait for
    it."""

    bucket: BucketKey
    what: Literal["launched", "wait", "waited"]


def mark_times(gm: torch.fx.GraphModule, context: Any) -> torch.fx.GraphModule:
    """Marks every launch and every wait that fxcomm has put into a backward graph. The marks are
    one chain from a new last input to a new last output, in the order of :func:`marks_of`."""
    del context
    wanted = [(node, stamp) for node in gm.graph.nodes if (stamp := stamp_of(node)) is not None]
    wanted = [(n, s) for n, s in wanted if (s.role == "launch" and s.final) or n.target is _wait]
    if not wanted:
        return gm
    values = output_values(gm.graph)
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    example: torch.Tensor = wanted[0][0].meta["val"]
    with gm.graph.inserting_after(last):
        link = gm.graph.placeholder("marks")
    link.meta["val"] = example.new_empty(1, dtype=torch.float32)
    for node, stamp in wanted:
        if node.target is _wait:
            with gm.graph.inserting_before(node):
                link = _link(gm.graph, link, stamp, "wait")
        with gm.graph.inserting_after(node):
            what: Literal["launched", "waited"] = "waited" if node.target is _wait else "launched"
            link = _link(gm.graph, link, stamp, what)
    set_outputs(gm.graph, [*values, link])
    return gm


def _link(
    graph: torch.fx.Graph,
    earlier: torch.fx.Node,
    stamp: Stamp,
    what: Literal["launched", "wait", "waited"],
) -> torch.fx.Node:
    node = graph.call_function(_wait, (earlier,))
    node.meta["val"] = earlier.meta["val"]
    node.meta[KEY] = Stamp(stamp.bucket, "mark", stamp.phase, (), mark=what)
    return node


def marks_of(gm: torch.fx.GraphModule) -> tuple[Mark, ...]:
    """The marks of a rewritten graph, in order."""
    stamps = (stamp_of(node) for node in gm.graph.nodes)
    return tuple(Mark(s.bucket, s.mark) for s in stamps if s is not None and s.mark is not None)


def launches_before_last_reads(
    gm: torch.fx.GraphModule, parameters: Mapping[int, Collection[str]]
) -> dict[str, int]:
    """How many launches a rewritten graph makes before it last reads a parameter, by name.
    ``parameters`` names those behind its inputs, by position; what is never read is left out."""
    launched, before = 0, {}
    for node in gm.graph.nodes:
        stamp = stamp_of(node)
        before[node] = launched
        launched += stamp is not None and stamp.role == "launch" and stamp.final
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found: dict[str, int] = {}
    for position, names in parameters.items():
        readers = uses_through_views(placeholders[position])[1]
        places = [before[node] for node in readers if stamp_of(node) is None]
        for name in names if places else ():
            found[name] = max(found.get(name, 0), *places)
    return found


MARK_PASS: GraphPass[Any] = GraphPass(
    "mark_times", mark_times, requires=frozenset({"launched reductions"})
)
