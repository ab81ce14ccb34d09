"""The pass that lets gathers run on into the next forward.

``wait_at_first_use`` puts a wait before the first use of each parameter. What a wait waits for is
the runtime's to say: whatever is in flight into the parameter's memory, which may be nothing. The
graph therefore depends on no plan, and stays as it is when plans change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx

from fxcomm import compat
from fxcomm.passes.pipeline import GraphPass

_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class GatherContext:
    """``inputs`` are the graph's inputs (by position) that are parameters."""

    inputs: frozenset[int]


def wait_at_first_use(gm: torch.fx.GraphModule, context: GatherContext) -> torch.fx.GraphModule:
    """Waits for each parameter right before the first node that reads its elements.

    Views of a parameter read nothing; those made earlier move behind the wait. Outputs that hand
    the parameter on (saved for backward) keep the plain input.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index in sorted(context.inputs):
        _wait_for(gm.graph, placeholders[index], place)
    return gm


def _wait_for(
    graph: torch.fx.Graph, parameter: torch.fx.Node, place: dict[torch.fx.Node, int]
) -> None:
    views, readers = uses_through_views(parameter)
    if not readers:
        return
    first = min(readers, key=place.__getitem__)
    with graph.inserting_before(first):
        wait = graph.call_function(_wait, (parameter,))
    wait.meta["val"] = parameter.meta["val"]
    for view in sorted(views, key=place.__getitem__):
        if place[view] < place[first]:
            first.prepend(view)
    parameter.replace_all_uses_with(
        wait, delete_user_cb=lambda user: user is not wait and user.op != "output"
    )


def uses_through_views(
    value: torch.fx.Node,
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The views made of ``value``, directly or of other views, and the nodes that read elements of
    it or of one of them."""
    views: list[torch.fx.Node] = []
    readers: list[torch.fx.Node] = []
    pending, seen = [value], {value}
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if compat.is_view(user):
                views.append(user)
                pending.append(user)
            else:
                readers.append(user)
    return views, readers


def use_order(gm: torch.fx.GraphModule, inputs: frozenset[int]) -> list[int]:
    """Those of a graph's ``inputs`` whose elements it reads, in order of their first use."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    first = {
        index: min(place[reader] for reader in readers)
        for index in sorted(inputs)
        if (readers := uses_through_views(placeholders[index])[1])
    }
    return sorted(first, key=first.__getitem__)


GATHER_PASSES: tuple[GraphPass[GatherContext], ...] = (
    GraphPass("wait_at_first_use", wait_at_first_use, provides=frozenset({"waits at first use"})),
)
