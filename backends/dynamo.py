"""The Dynamo entry point: what ``torch.compile(model, backend="fxcomm")`` calls with each graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.fx
from torch import nn

from fxcomm import compat
from fxcomm.analysis.gradients import leaves_behind, output_node, production_order
from fxcomm.backends.groups import open_environment, training_group
from fxcomm.backends.lowering import backward_lowering, compile_graph
from fxcomm.errors import FxcommError, OptionsError
from fxcomm.options import Options
from fxcomm.passes.gather import GATHER_PASSES, GatherContext, use_order
from fxcomm.passes.pipeline import run_passes
from fxcomm.registry import REGISTRY
from fxcomm.runtime.backward_graph import CapturedBackward
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.parameters import ManagedParameter
from fxcomm.runtime.start import extend, start, unused_name
from fxcomm.runtime.verification import ForwardGraph, read_forward


def fxcomm(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, object] | None = None,
    **torch_compile_arguments: object,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph for training on several ranks.

    In one process it is plain Inductor. Otherwise the first graph of a model makes ranks compare
    the model and gives all of them rank 0's parameters, and backward graphs reduce gradients.

    Raises:
        FxcommError: something cannot be done right; the message says what to change.
    """
    del torch_compile_arguments  # such as mode, which torch.compile passes on
    try:
        return _compile(gm, example_inputs, options)
    except FxcommError as error:
        raise compat.past_dynamo(error) from error


def _compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, object] | None,
) -> Callable[..., Any]:
    parsed = Options.from_mapping(options)
    group = training_group(parsed)
    parameters = {
        index: value
        for index, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) and value.requires_grad
    }
    if group is None:
        return compat.compile_fx(gm, example_inputs, config=parsed.inductor_config())
    REGISTRY.graph_with_waits()
    compat.guard_identity(gm, parameters)
    model = _model_for(gm, example_inputs, list(parameters.values()), parsed, group)
    forward: ForwardGraph | None = None

    def compile_post_aot(
        graph: torch.fx.GraphModule, inputs: Sequence[object], **kwargs: Any
    ) -> Callable[..., Any]:
        nonlocal forward
        if not kwargs.get("is_backward"):
            graph, forward = _forward(graph, example_inputs, parsed, model)
            run = compile_graph(graph, inputs, parsed, **kwargs)
            return run if model is None else compat.boxed(model.observing_uses(forward, run))
        if model is None:
            return compile_graph(graph, inputs, parsed, **kwargs)
        assert forward is not None, "AOTAutograd compiles the forward first"
        lower = backward_lowering(graph, inputs, parsed, **kwargs)
        gradients = _gradients(graph, parameters, model)
        return compat.boxed(model.add_graph(CapturedBackward(graph, gradients, lower, forward)))

    return compat.compile_fx(
        gm, example_inputs, config=parsed.inductor_config(), inner_compile=compile_post_aot
    )


def _forward(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    model: ManagedModel | None,
) -> tuple[torch.fx.GraphModule, ForwardGraph]:
    """A forward or inference graph made to wait for each parameter at its first use, and what it
    then does: trained or frozen now, another graph may have the parameter updated."""
    parameters = {
        position: example_inputs[index]
        for position, index in compat.plain_inputs(graph).items()
        if isinstance(example_inputs[index], nn.Parameter)
    }
    found = {position: REGISTRY.find(p) for position, p in parameters.items()}
    managed = {i: entry[1] for i, entry in found.items() if entry and entry[0] is model}
    uses = [managed[i].index for i in use_order(graph, frozenset(managed))]
    observe = None if model is None else model.observe_passes(graph)
    captured, names = graph, {i: p.name for i, p in managed.items()}
    if options.stage != "ddp" and options.commshift:
        context = GatherContext(frozenset(parameters))
        graph = run_passes(GATHER_PASSES, graph, context, observe=observe)
    forward = read_forward(graph.graph, names, uses)
    if model is not None:
        model.dump.forward(forward, captured, names)
    return graph, forward


def _model_for(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    parameters: Sequence[nn.Parameter],
    options: Options,
    group: dist.ProcessGroup,
) -> ManagedModel | None:
    """The model that manages the graph's parameters, begun if this is its first graph; None for a
    graph that trains none."""
    known = REGISTRY.models_of(parameters)
    if known:
        if known[0].options != options:
            raise OptionsError(
                "the model was compiled with other fxcomm options before; pass the same options "
                "to every torch.compile of its parts"
            )
        late = [p for p in parameters if REGISTRY.find(p) is None]
        if late:
            _take_late(gm, known[0], late)
        return known[0]
    if not parameters:
        return None
    root = _root_of(parameters)
    number = REGISTRY.next_number(dist.get_process_group_ranks(group))
    environment = open_environment(group, options, number, REGISTRY.in_flight, REGISTRY.groups)
    model = ManagedModel(number, options, environment)
    start(model, _named(gm, parameters, root), root, leaves_behind(example_inputs))
    REGISTRY.add(model, root)
    return model


def _take_late(
    gm: torch.fx.GraphModule, model: ManagedModel, parameters: Sequence[nn.Parameter]
) -> None:
    """Takes charge of parameters that were frozen when the model's first graph was compiled."""
    root = _root_of(parameters)
    taken = {p.name for p in model.parameters}
    unmanaged = [(name, p) for name, p in _named(gm, parameters, root) if REGISTRY.find(p) is None]
    extend(model, [(unused_name(name, taken), p) for name, p in unmanaged])
    REGISTRY.refresh(model)


def _root_of(parameters: Sequence[nn.Parameter]) -> nn.Module | None:
    """The outermost module being called that contains the graph's parameters: the user's model,
    of which perhaps only a part is compiled."""
    wanted = {id(p) for p in parameters}
    owners = [
        module
        for module in compat.modules_on_stack()
        if any(id(p) in wanted for p in module.parameters())
    ]
    return owners[-1] if owners else None


def _named(
    gm: torch.fx.GraphModule, parameters: Sequence[nn.Parameter], root: nn.Module | None
) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters with their names, each once: all of the root's, or the graph's alone."""
    if root is not None:
        named = [
            (n.replace(compat.COMPILED_PREFIX, ""), p)
            for n, p in root.named_parameters()
            if p.requires_grad
        ]
    else:
        named = []
    covered = {id(p) for _, p in named}
    names = list(compat.parameter_names(gm).values())
    strays = [p for p in dict.fromkeys(parameters) if id(p) not in covered]
    for number, parameter in enumerate(strays):
        name = names[number] if root is None and len(names) == len(strays) else f"graph.{number}"
        named.append((name, parameter))
    return named


def _gradients(
    gm: torch.fx.GraphModule, parameters: Mapping[int, nn.Parameter], model: ManagedModel
) -> tuple[tuple[int, ManagedParameter], ...]:
    """The positions of the model's parameter gradients among a backward graph's outputs, in the
    order in which the graph computes them."""
    inputs = compat.gradient_inputs(output_node(gm.graph))
    gradients = []
    for position in production_order(gm.graph, inputs):
        parameter = parameters.get(inputs[position])
        found = None if parameter is None else REGISTRY.find(parameter)
        # Another model's gradient leaves the graph; autograd hands it over as from outside.
        if found is not None and found[0] is model:
            gradients.append((position, found[1]))
    return tuple(gradients)


REGISTRY.begin(fxcomm)
