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
        fallback = interpret(rewritten)
        with reopen(), guards.recording():
            # Inductor consumes the graph it is given; the fallback keeps its own.
            compiled = compat.compile_inner(
                copy_graph_module(rewritten), example_inputs, config=config, **inductor_arguments
            )

        def run(args: list[Any]) -> Sequence[Any]:
            return compiled(args) if guards.hold(args) else fallback(args)

        return run if guards.any else compiled

    return lower
