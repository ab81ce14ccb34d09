"""Dumps: what was captured, rewritten and planned, as files and in torch's structured logs.

``options={"dump": "dir"}``, or else the environment variable ``FXCOMM_DUMP=dir``, has a model's
rank 0 write into a directory. Where this is not rank 0 of all processes, it writes into the
directory's ``rankN`` (N: its rank among all). Nothing is written or computed otherwise. Models of
one process never write the same file; a later run replaces files of the same names.

- ``plan-N.json``: the plans in the order in which they came, each once; ``plan-0.json`` is the
  first. ``tuned-N.json``: what tuning a model came to, for ``fxcomm explain``.
- ``step-N.json`` and ``step-N.graphml``: the step graph with the first plan's buckets, for sharded
  models of one forward and one backward graph by then. Seconds of compute are those of the roofline
  model (:mod:`fxcomm.analysis.roofline`: a "cpu-core" for CPU tensors, else an "h100") with the
  sizes that the graphs were captured for. Updates and collectives have 0 seconds, since nothing was
  measured yet, and their bytes.
- A folder for each graph: ``modelM-forwardG`` and ``modelM-backwardG``. M counts the process's
  models, G the model's graphs of that kind, in the order of capture. A backward graph is lowered
  again for other plans and for gradients that earlier backwards left: each later time has a folder
  of its own, ``modelM-backwardG-01``, and so on. Graphs that train nothing belong to no model and
  are not dumped.

In the folder of a graph, names sort in the order of events:

- ``00-captured.txt``: the graph as captured, in the form of :mod:`fxcomm.passes.text`.
- ``01-PASS.txt``: the graph after the first pass; what precedes it in order is what it was given.
  ``01-PASS.diff``: the unified diff of the two.
- ``passes.json``: ``graph``, ``plans`` (the files of the plans that it is lowered for) and
  ``passes``, a record for each: ``name``, ``seconds``, ``nodes_before``, ``nodes_after``,
  ``operators_before`` and ``operators_after`` (counts by target), ``added`` and ``removed``.

With TORCH_TRACE, every rank also puts its graphs into torch's structured logs, where tlparse shows
``fxcomm_model0_backward1_captured`` and ``fxcomm_model0_backward1_after_PASS`` with the compilation
that captured the graph.

Every file appears as a whole. A directory that cannot be written is an error when the model starts;
a write that fails later ends dumping with one warning, and training goes on.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx

from fxcomm import compat
from fxcomm.analysis.capture import PhaseGraph, capture_step, with_buckets
from fxcomm.analysis.gradients import output_values
from fxcomm.analysis.roofline import DEVICES, node_cost
from fxcomm.analysis.step_graph import Phase, PhaseKind, StepGraph
from fxcomm.passes.pipeline import PassRecord, copy_graph_module
from fxcomm.passes.text import graph_text, target_name
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned

_log = logging.getLogger("fxcomm")

VARIABLE = "FXCOMM_DUMP"
"""The environment variable that names the directory where the option does not."""

Observe = Callable[[PassRecord, torch.fx.GraphModule], None]
"""What ``run_passes`` tells of each pass."""


# --- values ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphState:
    """A graph at one moment: its text and how many nodes have each target."""

    text: str
    operators: Counter[str]

    @classmethod
    def of(cls, gm: torch.fx.GraphModule) -> GraphState:
        """Reads a graph."""
        calls = (node for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
        return cls(graph_text(gm), Counter(map(target_name, calls)))


@dataclass(frozen=True)
class PassReport:
    """What a pass, the ``number``-th on its graph, made of it."""

    number: int
    record: PassRecord
    before: GraphState
    after: GraphState

    @property
    def stem(self) -> str:
        """The name of its files."""
        return f"{self.number:02}-{self.record.name}"

    def diff(self, given: str) -> str:
        """The unified diff from the graph in the file ``given`` to that after the pass."""
        before, after = (s.text.splitlines(keepends=True) for s in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, given, f"{self.stem}.txt"))

    def fields(self) -> dict[str, object]:
        """Its record in ``passes.json``."""
        before, after = self.before.operators, self.after.operators
        return {
            "name": self.record.name,
            "seconds": self.record.seconds,
            "nodes_before": self.record.nodes_before,
            "nodes_after": self.record.nodes_after,
            "operators_before": before,
            "operators_after": after,
            "added": after - before,
            "removed": before - after,
        }


def step_with_plan(forward: PhaseGraph, backward: PhaseGraph, plan: OverlapPlan) -> StepGraph:
    """The step of a forward and its backward graph, with the buckets of ``plan``.

    Raises:
        ValueError: the graphs or the plan do not fit together.
    """
    names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    returned = enumerate(output_values(forward.graph))
    positions = {v.name: at for at, v in returned if isinstance(v, torch.fx.Node)}
    saved = {at: (0, positions[name]) for at, name in enumerate(names) if name in positions}
    joined = PhaseGraph(backward.phase, backward.graph, {}, backward.gradient_outputs, saved)
    sizes = dict(itertools.chain(_sizes(forward.graph), _sizes(backward.graph)))
    rates = DEVICES["cpu-core" if _device(forward.graph) == "cpu" else "h100"]
    step = capture_step([forward, joined], node_cost(rates, sizes))
    return with_buckets(step, plan.layout, gather_order=plan.gather_order)


def _inputs(graph: torch.fx.Graph) -> Iterator[Any]:
    return (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))


def _device(graph: torch.fx.Graph) -> str:
    tensors = [value for value in _inputs(graph) if isinstance(value, torch.Tensor)]
    return tensors[0].device.type if tensors else "cpu"


def _sizes(graph: torch.fx.Graph) -> Iterator[tuple[str, int]]:
    """The symbols among the sizes of a graph's inputs, with what they were when it was captured."""
    for value in _inputs(graph):
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and compat.size_expression(size).is_Symbol:
                hint = compat.size_hint(size)
                if hint is not None:
                    yield str(compat.size_expression(size)), hint


# --- files ----------------------------------------------------------------------------------


@dataclass
class _Directory:
    """A directory as this process writes it."""

    path: Path
    _owners: dict[str, Hashable] = field(default_factory=dict)
    _failed: bool = False

    def numbered(self, kind: str, owner: Hashable, first: int = 0) -> str:
        """``KIND-N`` that ``owner`` has got before, or the first one that no other has."""
        names = (f"{kind}-{number}" for number in itertools.count(first))
        return next(name for name in names if self._owners.setdefault(name, owner) == owner)

    def problem(self) -> str:
        """Why nothing can be written here; empty if something can."""
        try:
            self._replace(self.path / f".writable-{os.getpid()}", "").unlink()
        except OSError as error:
            return (
                f"rank 0 cannot write dumps to {str(self.path)!r} ({error}). Name a directory that "
                f"it may create and write, by options={{'dump': ...}} or {VARIABLE}, or none."
            )
        return ""

    def write(self, name: str, text: str) -> None:
        """Writes a file; readers see the old one or all of the new one."""
        if self._failed:
            return
        try:
            self._replace(self.path / name, text)
        except OSError as error:
            self._failed = True
            _log.warning("dumping to %s ends: %s", self.path, error)

    @staticmethod
    def _replace(file: Path, text: str) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        return partial.replace(file)


@functools.cache
def _directory(path: Path) -> _Directory:
    """The one object for a directory in this process: models that share it share its numbers."""
    return _Directory(path)


@dataclass
class _Compile:
    """Records one run of passes on a graph, as ``run_passes`` tells of them. ``name`` is that of
    the folder."""

    name: str
    directory: _Directory | None
    plans: Sequence[str]
    compile_id: Any
    state: GraphState
    _reports: list[PassReport] = field(default_factory=list)
    _latest: str = "00-captured.txt"

    def captured(self) -> None:
        """Writes the graph before the passes."""
        if self.directory is not None:
            self.directory.write(f"{self.name}/{self._latest}", self.state.text)

    def __call__(self, record: PassRecord, gm: torch.fx.GraphModule) -> None:
        """Takes down a pass and the graph after it."""
        before, self.state = self.state, GraphState.of(gm)
        report = PassReport(len(self._reports) + 1, record, before, self.state)
        self._reports.append(report)
        artifact = f"{artifact_name(self.name)}_after_{record.name}"
        compat.log_artifact(artifact, lambda: report.after.text, self.compile_id)
        if self.directory is not None:
            self._write(self.directory, report)

    def _write(self, directory: _Directory, report: PassReport) -> None:
        directory.write(f"{self.name}/{report.stem}.txt", report.after.text)
        directory.write(f"{self.name}/{report.stem}.diff", report.diff(self._latest))
        self._latest = f"{report.stem}.txt"
        fields = {
            "graph": self.name,
            "plans": list(self.plans),
            "passes": [report.fields() for report in self._reports],
        }
        directory.write(f"{self.name}/passes.json", json.dumps(fields, indent=1))


def artifact_name(name: str) -> str:
    """The name in structured logs of what is ``name`` in a directory."""
    return "fxcomm_" + name.replace("-", "_")


class Dump:
    """What a model dumps; see the module's docstring. Without a directory and without TORCH_TRACE
    its methods do nothing."""

    def __init__(self, directory: _Directory | None = None) -> None:
        self._directory = directory
        self._owner = object()
        self._plans: dict[int, str] = {}  # by arena, the file of its present plan
        self._compiles: Counter[str] = Counter()
        self._compile_ids: dict[str, Any] = {}
        self._planned = False
        self._forwards: weakref.WeakKeyDictionary[Any, PhaseGraph] = weakref.WeakKeyDictionary()
        self._backwards: list[tuple[weakref.ref[Any], PhaseGraph]] = []

    @classmethod
    def of(
        cls, option: str | None, environment: Mapping[str, str], *, rank: int, process: int
    ) -> Dump:
        """The dump of a model that the ``dump`` option or the environment (variables) asks for;
        ``rank`` is that in the model's group, ``process`` that among all processes."""
        named = environment.get(VARIABLE) if option is None else option
        if not named or rank != 0:
            return cls()
        path = Path(named).absolute()
        return cls(_directory(path if process == 0 else path / f"rank{process}"))

    def problem(self) -> str:
        """Why the directory cannot be written; empty if it can, or there is none."""
        return "" if self._directory is None else self._directory.problem()

    # --- graphs ---

    def graph(self, name: str, gm: torch.fx.GraphModule) -> None:
        """Takes a graph as captured, in the compilation that captured it."""
        if not self._wanted:
            return
        self._compile_ids[name] = compat.current_compile_id()
        artifact = f"{artifact_name(name)}_captured"
        compat.log_artifact(artifact, lambda: graph_text(gm), None)
        if self._directory is not None:
            self._directory.write(f"{name}/00-captured.txt", graph_text(gm))

    def passes(self, name: str, gm: torch.fx.GraphModule) -> Observe | None:
        """What is to be told of the passes that are about to run on a graph; None if nobody wants
        to know."""
        if not self._wanted:
            return None
        number = self._compiles[name]
        self._compiles[name] += 1
        folder = f"{name}-{number:02}" if number else name
        plans = [f"{self._plans[arena]}.json" for arena in sorted(self._plans)]
        compile_id = self._compile_ids.get(name)
        run = _Compile(folder, self._directory, plans, compile_id, GraphState.of(gm))
        run.captured()
        return run

    @property
    def _wanted(self) -> bool:
        return self._directory is not None or compat.structured_logs()

    # --- the step ---

    def forward(
        self, forward: object, gm: torch.fx.GraphModule, parameters: Mapping[int, str]
    ) -> None:
        """Keeps a copy of a forward graph as captured, with its inputs that are parameters (by
        position), for the step graph. ``forward`` stands for it."""
        if self._keeps_graphs:
            inputs: dict[str | int, str] = dict(parameters.items())
            graph = copy_graph_module(gm).graph
            self._forwards[forward] = PhaseGraph(Phase(PhaseKind.FORWARD), graph, inputs)

    def backward(
        self, forward: object, gm: torch.fx.GraphModule, gradients: Mapping[int, str]
    ) -> None:
        """Keeps the backward graph of ``forward`` with its outputs that are gradients."""
        if self._keeps_graphs:
            graph = PhaseGraph(Phase(PhaseKind.BACKWARD), gm.graph, {}, gradients)
            self._backwards.append((weakref.ref(forward), graph))

    @property
    def _keeps_graphs(self) -> bool:
        return self._directory is not None and not self._planned

    def step(self, plan: OverlapPlan) -> None:
        """Writes the step graph with the first plan of a sharded model, if it is simple."""
        if not self._keeps_graphs:
            return
        self._planned = True
        backwards, self._backwards = self._backwards, []
        forwards = dict(self._forwards)
        self._forwards.clear()
        if len(backwards) != 1 or self._directory is None:
            return
        known, backward = backwards[0]
        forward = forwards.get(known())
        if forward is None:
            return
        try:
            step = step_with_plan(forward, backward, plan)
        except ValueError as error:
            _log.info("no step graph is dumped: %s", error)
            return
        self.step_graph(self._directory.numbered("step", self._owner), step)

    def step_graph(self, name: str, step: StepGraph) -> None:
        """Writes a step graph as ``NAME.json`` and ``NAME.graphml``."""
        if self._directory is not None:
            self._directory.write(f"{name}.json", step.to_json())
            self._directory.write(f"{name}.graphml", step.to_graphml())

    # --- plans ---

    def plan(self, arena: int, plan: OverlapPlan) -> None:
        """Writes the plan that an arena has from now on as ``plan-N.json``, if it is new."""
        if self._directory is None:
            return
        text = plan.to_json()
        name = self._directory.numbered("plan", (self._owner, arena, text))
        if self._plans.get(arena) != name:
            self._plans[arena] = name
            self._directory.write(f"{name}.json", text)

    def tuned(self, number: int, outcome: Tuned) -> None:
        """Writes what tuning a model came to as ``tuned-NUMBER.json``, or under the next number
        that no other model has."""
        if self._directory is not None:
            name = self._directory.numbered("tuned", self._owner, number)
            self._directory.write(f"{name}.json", outcome.to_json())
