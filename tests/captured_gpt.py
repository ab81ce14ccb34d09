"""A whole training step of a model, a deep GPT for one, as fxcomm captures, plans and lowers it: as
one rank of a fake process group, and without Inductor. The graphs are real; only widths are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.fx
from torch import Tensor, nn

from fxcomm.analysis.capture import NodeCost, PhaseGraph, capture_step, with_buckets
from fxcomm.analysis.gradients import output_values
from fxcomm.analysis.program import (
    ArenaPlan,
    MicroStep,
    Program,
    backward_actions,
    forward_actions,
    gradient_nodes,
    parameter_outputs,
    saved_parameters,
    step_program,
)
from fxcomm.analysis.step_graph import Phase, PhaseKind, Role, StepGraph
from fxcomm.backends import dynamo
from fxcomm.registry import REGISTRY
from tests.zoo import TiedGPT

WIDTH = 16
VOCABULARY = 23
BLOCK_MB = 4 * 12 * WIDTH**2 / 2**20
_SECONDS_PER_BYTE = 1e-9


@dataclass
class CapturedStep:
    """A step's graphs before and after the passes, and the plan. ``inputs`` are the forward's
    inputs that are parameters, ``gradients`` the backward's outputs that are gradients, by
    position."""

    forward: torch.fx.Graph
    backward: torch.fx.Graph
    lowered_forward: torch.fx.Graph
    lowered_backward: torch.fx.Graph
    inputs: Mapping[int, str]
    gradients: Mapping[int, str]
    arena: ArenaPlan

    @property
    def node_count(self) -> int:
        """Nodes of the graphs before the passes."""
        return len(self.forward.nodes) + len(self.backward.nodes)

    def compute_graph(self, cost: NodeCost) -> StepGraph:
        """The step graph without buckets."""
        positions = {
            value.name: position
            for position, value in enumerate(output_values(self.forward))
            if value is not None
        }
        saved = {
            index: (0, positions[node.name])
            for index, node in enumerate(self.backward.find_nodes(op="placeholder"))
            if node.name in positions
        }
        return capture_step(
            [
                PhaseGraph(Phase(PhaseKind.FORWARD), self.forward, {**self.inputs}),
                PhaseGraph(Phase(PhaseKind.BACKWARD), self.backward, {}, self.gradients, saved),
            ],
            cost,
        )

    def step_graph(self) -> StepGraph:
        """The step graph with the plan's buckets; costs are in proportion to bytes."""
        return with_buckets(
            self.compute_graph(_node_seconds),
            self.arena.plan.layout,
            gather_order=self.arena.plan.gather_order,
            communication_cost=_bucket_seconds,
            compute_cost=_bucket_seconds,
        )

    def programs(self) -> list[Program]:
        """The program of a rank that runs no graph, and that of one that runs these."""
        outputs = parameter_outputs(self.lowered_forward, self.inputs)
        backward = backward_actions(
            self.lowered_backward,
            gradient_nodes(self.backward, self.gradients),
            saved_parameters(self.lowered_backward, outputs),
        )
        forward = forward_actions(self.lowered_forward, self.inputs)
        steps = (MicroStep((), ()), MicroStep(forward, (backward,)))
        return [step_program(rank, [step], self.arena) for rank, step in enumerate(steps)]


def _node_seconds(node: torch.fx.Node) -> float:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0.0
    return float(value.numel() * value.itemsize * _SECONDS_PER_BYTE)


def _bucket_seconds(role: Role, nbytes: int) -> float:
    return nbytes * _SECONDS_PER_BYTE


@dataclass
class _Recorder:
    """What the backend's functions were given and gave."""

    found: dict[str, Any] = field(default_factory=dict)

    def forward(self, real: Any) -> Any:
        def record(graph: torch.fx.GraphModule, *args: Any) -> Any:
            self.found["forward"] = graph.graph
            return real(graph, *args)

        return record

    def read_forward(self, real: Any) -> Any:
        def record(graph: torch.fx.Graph, inputs: Mapping[int, str], uses: Any) -> Any:
            self.found |= {"lowered_forward": graph, "inputs": inputs}
            return real(graph, inputs, uses)

        return record

    def backward_lowering(self, real: Any) -> Any:
        def record(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self.found["backward"] = graph.graph
            lower = real(graph, *args, **kwargs)

            def lowered(rewritten: torch.fx.GraphModule) -> Any:
                self.found["lowered_backward"] = rewritten.graph
                return lower(rewritten)

            return lowered

        return record


def capture_gpt(layers: int) -> CapturedStep:
    """One step of a GPT, under the default process group, with a bucket for each block."""
    torch.manual_seed(0)
    model = TiedGPT(vocabulary=VOCABULARY, width=WIDTH, layers=layers)
    tokens = torch.randint(0, VOCABULARY, (1, 8))

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return capture(model, tokens, loss, bucket_mb=BLOCK_MB)


def capture(
    model: nn.Module, batch: Tensor, loss: Callable[[Tensor, Tensor], Tensor], **options: Any
) -> CapturedStep:
    """One step of a model that Dynamo captures as one graph, under the default process group."""
    recorder = _Recorder()
    with ExitStack() as stack:
        for name, replacement in (
            ("_forward", recorder.forward(dynamo._forward)),
            ("read_forward", recorder.read_forward(dynamo.read_forward)),
            ("backward_lowering", recorder.backward_lowering(dynamo.backward_lowering)),
        ):
            stack.enter_context(patch.object(dynamo, name, replacement))
        options = {"lowering": "eager", **options}
        compiled = torch.compile(model, backend="fxcomm", options=options)
        loss(compiled(batch), batch).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    (managed,) = REGISTRY.models_of(model.parameters())
    (arena,) = managed.arenas
    (graph,) = managed._graphs
    gradients = {position: p.name for position, p in graph._captured.gradients}
    return CapturedStep(**recorder.found, gradients=gradients, arena=arena.described())
