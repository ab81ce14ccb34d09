"""When a backward graph produces its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx


def output_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The graph's output node, which ends it."""
    node: torch.fx.Node = next(iter(reversed(graph.nodes)))
    return node


def output_values(graph: torch.fx.Graph) -> list[torch.fx.Node | None]:
    """What the graph returns, one entry for each output."""
    return list(output_node(graph).args[0])  # type: ignore[arg-type]


def production_order(graph: torch.fx.Graph, positions: Iterable[int]) -> list[int]:
    """Output ``positions`` sorted by where the graph computes them; equal places keep their order.

    fx keeps nodes in execution order, and AOTAutograd's partitioner orders a backward graph as
    autograd's engine would run it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    values = output_values(graph)

    def produced(position: int) -> int:
        value = values[position]
        return -1 if value is None else place[value]

    return sorted(positions, key=produced)


def leaves_behind(values: Iterable[object]) -> set[int]:
    """The ``id`` of each leaf tensor from which autograd has already computed one of ``values``."""
    pending: list[Any] = [
        value.grad_fn
        for value in values
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]
    seen, leaves = set(pending), set()
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves


def set_outputs(graph: torch.fx.Graph, values: Sequence[torch.fx.Node | None]) -> None:
    """Makes ``values`` the graph's outputs."""
    node = output_node(graph)
    node.args = (tuple(values),)
    if "user_visible_output_idxs" in node.meta:
        # Inductor keeps the strides of visible outputs; ours have but one.
        visible = set(node.meta["user_visible_output_idxs"])
        node.meta["user_visible_output_idxs"] = [
            i for i, v in enumerate(values) if i in visible and v is not None
        ]
