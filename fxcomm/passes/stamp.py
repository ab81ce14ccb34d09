"""The metadata that fxcomm leaves on every node that it inserts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.fx

from fxcomm.communicator import OperatorCall

KEY = "fxcomm"

Role = Literal["pack", "launch", "finish", "update", "mark"]


@dataclass(frozen=True, order=True)
class BucketKey:
    """A bucket of the model: the arena that holds it and its number there."""

    arena: int
    bucket: int


@dataclass(frozen=True)
class Stamp:
    """What an inserted node is for. ``final`` says that it completes its role, ``mark`` what a node
    of role "mark" stands at."""

    bucket: BucketKey
    role: Role
    phase: str
    parameters: tuple[str, ...]
    final: bool = False
    mark: Literal["launched", "wait", "waited"] | None = None


def stamp_of(node: torch.fx.Node) -> Stamp | None:
    """The node's stamp, or None if fxcomm did not insert it."""
    return node.meta.get(KEY)


def insert_call(
    graph: torch.fx.Graph,
    call: OperatorCall,
    value: torch.fx.Node | list[torch.fx.Node],
    stamp: Stamp,
) -> torch.fx.Node:
    """Appends ``call`` on ``value`` (a node or nodes) at the graph's insertion point, stamped and
    with the fake result that later passes and Inductor expect in ``meta["val"]``."""
    node = graph.call_function(call.target, (value, *call.arguments))  # type: ignore[arg-type]
    inputs = [v.meta["val"] for v in value] if isinstance(value, list) else value.meta["val"]
    node.meta["val"] = call.target(inputs, *call.arguments)
    node.meta[KEY] = stamp
    return node
