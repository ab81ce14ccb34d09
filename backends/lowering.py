"""Lowering targets: what turns a rewritten graph into something that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from fxcomm import compat
from fxcomm.options import Options
from fxcomm.passes.pipeline import copy_graph_module
from fxcomm.runtime.backward_graph import Executable, Lower, interpret


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    options: Options,
    **inductor_arguments: Any,
) -> Callable[..., Any]:
    """Compiles a graph that starts no collectives, now, in the running compilation."""
    if options.lowering == "eager":
        return compat.boxed(interpret(gm))
    config = {**options.inductor_config(), **compat.KEEP_LAUNCH_ORDER}
    return compat.compile_inner(gm, example_inputs, config=config, **inductor_arguments)


def backward_lowering(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    options: Options,
    **inductor_arguments: Any,
) -> Lower:
    """A function that compiles rewritten copies of the captured ``gm``, now or later.

    Later means after Dynamo has fixed its guards: what Inductor then assumes of symbolic sizes is
    checked on each call, and where it does not hold the graph is interpreted, which is slow and
    right.
    """
    if options.lowering == "eager":
        return interpret
    reopen = compat.compile_context()
    config = {**options.inductor_config(), **compat.KEEP_LAUNCH_ORDER}

    def lower(rewritten: torch.fx.GraphModule) -> Executable:
        guards = compat.LateGuards(example_inputs)
        placeholders = [node for node in rewritten.graph.nodes if node.op == "placeholder"]
        added = [node.meta["val"] for node in placeholders[len(example_inputs) :]]
        fallback = interpret(rewritten)
        with reopen(), guards.recording():
            # Inductor consumes the graph it is given; the fallback keeps its own.
            compiled = compat.compile_inner(
                copy_graph_module(rewritten),
                [*example_inputs, *added],
                config=config,
                **inductor_arguments,
            )

        def run(args: list[Any]) -> Sequence[Any]:
            return compiled(args) if guards.hold(args) else fallback(args)

        return run if guards.any else compiled

    return lower


# The length of runs with which an update is traced; it serves for others, too.
_EXAMPLE_LENGTH = 4096


def compile_update(
    update: Callable[..., tuple[()]],
    example: Callable[[int], list[torch.Tensor]],
    options: Options,
) -> Callable[[list[Any]], object]:
    """Compiles a function that changes flat tensors of one length in place, into one loop where
    Inductor can. The result takes the tensors in a list."""

    def interpreted(tensors: list[Any]) -> object:
        return update(*tensors)

    if options.lowering == "eager":
        return interpreted
    graph, inputs = compat.trace_in_place(update, example(_EXAMPLE_LENGTH))
    config = {**options.inductor_config(), **compat.ROUND_AS_WRITTEN}
    compiled = compat.compile_inner(graph, inputs, config=config, is_inference=True)

    def run(tensors: list[Any]) -> object:
        # A graph for any length is not for these.
        return compiled(tensors) if tensors[0].numel() > 1 else interpreted(tensors)

    return run
