"""Writes what was captured, planned and rewritten to a directory: ``options={"dump": "dir"}``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.fx

from fxcomm.passes.pipeline import PassRecord
from fxcomm.passes.stamp import stamp_of
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned


def graph_text(gm: torch.fx.GraphModule) -> str:
    """A graph as text, a line for each node: name, operation, arguments, result, fxcomm's stamp.

    Holds no addresses and no paths, so that equal graphs give equal texts.
    """
    return "\n".join(_node_text(node) for node in gm.graph.nodes) + "\n"


def _node_text(node: torch.fx.Node) -> str:
    arguments = [repr(a) if isinstance(a, str) else str(a) for a in node.args]
    arguments += [f"{key}={value}" for key, value in node.kwargs.items()]
    text = f"{node.name} = {node.op} {node.target}({', '.join(arguments)})"
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text += f" -> {dtype}{list(value.shape)}"
    stamp = stamp_of(node)
    if stamp is not None:
        names = ", ".join(stamp.parameters)
        text += f"  # {stamp.role} bucket {stamp.bucket.arena}.{stamp.bucket.bucket}: {names}"
    return text


class Dump:
    """A directory that takes dumps; with no directory, nothing is written."""

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)

    def _write(self, name: str, text: str) -> None:
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / name).write_text(text)

    def graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        """Writes a graph as ``NAME.txt``."""
        if self._directory is not None:
            self._write(f"{name}.txt", graph_text(gm))

    def after_pass(self, name: str, record: PassRecord, gm: torch.fx.GraphModule) -> None:
        """Writes a graph after a pass, headed by what the pass took."""
        if self._directory is not None:
            head = (
                f"# {record.name}: {record.seconds * 1e3:.2f} ms, "
                f"{record.nodes_before} -> {record.nodes_after} nodes\n"
            )
            self._write(f"{name}-{record.name}.txt", head + graph_text(gm))

    def tuned(self, number: int, outcome: Tuned) -> None:
        """Writes what tuning a model came to as ``tuned-NUMBER.json``, for ``fxcomm explain``."""
        if self._directory is not None:
            self._write(f"tuned-{number}.json", outcome.to_json())

    def plan(self, number: int, plan: OverlapPlan) -> None:
        """Writes a plan as ``plan-NUMBER.json``."""
        if self._directory is not None:
            self._write(f"plan-{number}.json", plan.to_json())
