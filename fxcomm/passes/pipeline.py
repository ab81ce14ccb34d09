"""The ordered list of passes: what each needs, gives and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.fx

from fxcomm.errors import FxcommError

Context = TypeVar("Context")


@dataclass(frozen=True)
class GraphPass(Generic[Context]):
    """A named rewrite of a graph module, with the facts it relies on and establishes."""

    name: str
    run: Callable[[torch.fx.GraphModule, Context], torch.fx.GraphModule]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its time in seconds and the number of nodes before and after."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int


def check_order(passes: Sequence[GraphPass[Context]]) -> None:
    """Raises :class:`FxcommError` if a pass would run before what it requires is provided."""
    established: set[str] = set()
    for graph_pass in passes:
        missing = graph_pass.requires - established
        if missing:
            raise FxcommError(
                f"pass {graph_pass.name!r} requires {sorted(missing)}, which no earlier pass "
                "provides; put the pass that provides it before, or switch both off"
            )
        established |= graph_pass.provides


def run_passes(
    passes: Sequence[GraphPass[Context]],
    gm: torch.fx.GraphModule,
    context: Context,
    *,
    disabled: Collection[str] = (),
    observe: Callable[[PassRecord, torch.fx.GraphModule], None] | None = None,
) -> torch.fx.GraphModule:
    """Runs ``passes`` in order on a copy of ``gm`` and returns it; ``gm`` itself is not changed.

    ``observe`` is told of each pass and the graph after it.

    Raises:
        FxcommError: the order of the passes breaks a requirement.
    """
    active = [graph_pass for graph_pass in passes if graph_pass.name not in disabled]
    check_order(active)
    gm = copy_graph_module(gm)
    for graph_pass in active:
        before, start = len(gm.graph.nodes), time.perf_counter()
        gm = graph_pass.run(gm, context)
        record = PassRecord(
            graph_pass.name, time.perf_counter() - start, before, len(gm.graph.nodes)
        )
        if observe is not None:
            observe(record, gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def copy_graph_module(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph module with its own nodes and the same attributes and node metadata."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    node = graph.output(output)
    (original,) = (n for n in gm.graph.nodes if n.op == "output")
    node.meta = dict(original.meta)
    for source, copied in copies.items():
        copied.meta = dict(source.meta)
    copied_module = torch.fx.GraphModule(gm, graph)
    copied_module.meta = dict(gm.meta)
    return copied_module
