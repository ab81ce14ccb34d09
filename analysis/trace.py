"""Captures a training step of a model without ranks, and with tensors that take no memory.

The graphs are those that Inductor would compile, from the same pipeline as in training.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from fxcomm import compat
from fxcomm.analysis.capture import NodeCost, PhaseGraph, capture_step
from fxcomm.analysis.gradients import output_node, output_values
from fxcomm.analysis.step_graph import Phase, PhaseKind, StepGraph
from fxcomm.errors import FxcommError
from fxcomm.layout import ParameterSpec

_FORMAT = "fxcomm.capture/1"

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Capture:
    """A training step of one forward and one backward: its graph with costs on ``device``, without
    buckets; the trained parameters in order of registration; and the bytes of what the forward
    saves for the backward, besides parameters."""

    name: str
    device: str
    step: StepGraph
    parameters: tuple[ParameterSpec, ...]
    saved_bytes: int

    def to_json(self) -> str:
        """The capture as JSON text."""
        return json.dumps(
            {
                "format": _FORMAT,
                "name": self.name,
                "device": self.device,
                "step": json.loads(self.step.to_json()),
                "parameters": [asdict(spec) for spec in self.parameters],
                "saved_bytes": self.saved_bytes,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Capture:
        """Reads :meth:`to_json`'s text.

        Raises:
            ValueError: the text is none.
        """
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format is {fields['format']!r}, expected {_FORMAT!r}")
            return cls(
                str(fields["name"]),
                str(fields["device"]),
                StepGraph.from_json(json.dumps(fields["step"])),
                tuple(ParameterSpec(**spec) for spec in fields["parameters"]),
                int(fields["saved_bytes"]),
            )
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a captured step: {error!r}") from error

    def save(self, path: Path) -> None:
        """Writes the capture, compressed where the name ends in ``.gz``."""
        data = self.to_json().encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    @classmethod
    def load(cls, path: Path) -> Capture:
        """Reads what :meth:`save` wrote.

        Raises:
            FxcommError: the file cannot be read, or holds something else.
        """
        try:
            data = path.read_bytes()
            return cls.from_json((gzip.decompress(data) if path.suffix == ".gz" else data).decode())
        except (OSError, EOFError, ValueError) as error:
            raise FxcommError(f"{path} is no captured step: {error}") from error


@dataclass(frozen=True)
class TracedStep:
    """The graphs of a step before any pass of fxcomm's, and the parameters that it trains."""

    forward: PhaseGraph
    backward: PhaseGraph
    parameters: tuple[ParameterSpec, ...]

    def captured(self, name: str, device: str, cost: NodeCost) -> Capture:
        """The step with the costs of a device, as a value that can be kept."""
        step = capture_step([self.forward, self.backward], cost)
        return Capture(name, device, step, self.parameters, self._saved_bytes())

    def _saved_bytes(self) -> int:
        values = output_values(self.forward.graph)
        given = set(self.forward.graph.find_nodes(op="placeholder"))
        saved = {values[position] for _, position in self.backward.saved.values()} - given
        return sum(_nbytes(node) for node in saved if node is not None)


def trace_step(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
) -> TracedStep:
    """Runs a forward and a backward of ``model`` and keeps the graphs of both.

    Model and inputs may be fake (:func:`fxcomm.compat.without_memory`): then nothing is computed.
    ``loss`` makes a scalar of what the model returns; by default that is its ``loss``, or the sum
    of the means of all floating tensors in it.

    Raises:
        FxcommError: the model trains no parameter, does not become one graph, or no gradient
            reaches a parameter.
    """
    names = {id(p): name for name, p in reversed([*model.named_parameters()]) if p.requires_grad}
    if not names:
        raise FxcommError("capture: the model has no parameter that requires a gradient")
    recorder = _Recorder(names)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recorder.compile, dynamic=False)
    (loss or default_loss)(compiled(*args, **(kwargs or {}))).backward()
    torch._dynamo.reset()
    specs = tuple(_spec(n, p) for n, p in model.named_parameters() if p.requires_grad)
    return recorder.traced(specs)


def default_loss(output: Any) -> Tensor:
    """The output's ``loss``, or the sum of the means of all floating tensors in it."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss  # type: ignore[no-any-return]
    found = [
        value
        for value in torch.utils._pytree.tree_leaves(output)
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    if not found:
        raise FxcommError("capture: the model returns no floating tensor; pass loss=")
    return torch.stack([value.float().mean() for value in found]).sum()


def _spec(name: str, parameter: nn.Parameter) -> ParameterSpec:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterSpec(name, parameter.numel(), dtype, parameter.itemsize, parameter.device.type)


def _nbytes(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    return int(value.untyped_storage().nbytes())


@dataclass
class _Recorder:
    """A Dynamo backend that keeps the graphs. ``names`` are the trained parameters' by ``id``."""

    names: Mapping[int, str]
    forwards: list[PhaseGraph] = field(default_factory=list)
    backwards: list[PhaseGraph] = field(default_factory=list)

    def compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called for each of Dynamo's graphs."""
        known = {i: self.names[id(v)] for i, v in enumerate(inputs) if id(v) in self.names}

        def keep(graph: torch.fx.GraphModule, _: Sequence[object], **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                self.backwards.append(self._backward(graph, known))
            else:
                given = compat.plain_inputs(graph).items()
                parameters: dict[str | int, str] = {
                    place: known[index] for place, index in given if index in known
                }
                phase = Phase(PhaseKind.FORWARD)
                self.forwards.append(PhaseGraph(phase, graph.graph, parameters))
            return compat.boxed(lambda args: graph.forward(*args))

        return compat.compile_fx(gm, inputs, config={}, inner_compile=keep)

    def _backward(self, graph: torch.fx.GraphModule, known: Mapping[int, str]) -> PhaseGraph:
        if len(self.forwards) != 1:
            raise FxcommError(
                f"capture: the model became {len(self.forwards)} graphs. Run it with "
                "TORCH_LOGS=graph_breaks to see where, or capture a part of it."
            )
        inputs = compat.gradient_inputs(output_node(graph.graph))
        gradients = {place: known[i] for place, i in inputs.items() if i in known}
        outputs = enumerate(output_values(self.forwards[0].graph))
        # The partitioner gives a saved value the same name in both graphs.
        place_of = {value.name: place for place, value in outputs if value is not None}
        saved = {
            index: (0, place_of[node.name])
            for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))
            if node.name in place_of
        }
        return PhaseGraph(Phase(PhaseKind.BACKWARD), graph.graph, {}, gradients, saved)

    def traced(self, parameters: tuple[ParameterSpec, ...]) -> TracedStep:
        """What was kept."""
        if len(self.forwards) != 1 or len(self.backwards) != 1:
            raise FxcommError(
                f"capture: {len(self.forwards)} forward and {len(self.backwards)} backward graphs; "
                "a step of one graph each can be captured"
            )
        if not self.backwards[0].gradient_outputs:
            raise FxcommError("capture: no gradient reaches a parameter")
        return TracedStep(self.forwards[0], self.backwards[0], parameters)
