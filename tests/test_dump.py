"""What ``options={"dump": "dir"}``, ``FXCOMM_DUMP`` and ``TORCH_TRACE`` write."""

from __future__ import annotations

import json
import logging
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import chdir, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import networkx as nx
import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import nn

import fxcomm
from fxcomm.analysis.step_graph import PhaseKind, Role, StepGraph
from fxcomm.dump import Dump
from fxcomm.errors import OptionsError
from fxcomm.passes.gather import GATHER_PASSES
from fxcomm.passes.mark import MARK_PASS
from fxcomm.passes.reduce import REDUCE_PASSES
from fxcomm.passes.stamp import KEY, BucketKey, Stamp
from fxcomm.passes.text import graph_text
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned
from tests.oracle import train_ranks
from tests.ranks import Ranks
from tests.test_fake_ranks import AsFakeRank, as_fake_rank  # noqa: F401
from tests.zoo import ZOO

PASSES = [graph_pass.name for graph_pass in (*REDUCE_PASSES, MARK_PASS)]
BUCKET_MB = 0.001
PATCH_LINE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def train(case_name: str, *, dynamic: bool = False, **options: Any) -> None:
    """Two steps of a new model on the ranks that there are, each of two backwards, the first of
    which stays local."""
    case = ZOO[case_name]
    model = case.model()
    options = {"lowering": "eager", "bucket_mb": BUCKET_MB, **options}
    compiled: Any = torch.compile(model, backend="fxcomm", options=options, dynamic=dynamic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(2):
            batch = case.batch(2 * step + micro, 4)
            with nullcontext() if micro else fxcomm.no_sync(compiled):
                case.loss(compiled(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Models of a process that are gone are not told from new ones by Dynamo.
    torch._dynamo.reset()


def training_job(
    rank: int,
    world_size: int,
    cases: list[str],
    environment: Mapping[str, str],
    where: str = ".",
    **options: Any,
) -> None:
    """Trains a model of each case, in the directory ``where``."""
    with patch.dict(os.environ, environment), chdir(where):
        for case in cases:
            train(case, **options)


def numbered_job(rank: int, world_size: int, cases: list[str], options: dict[str, Any]) -> None:
    training_job(rank, world_size, cases, {}, **options)


def environment_job(
    rank: int, world_size: int, environment: dict[str, str], where: str, options: dict[str, Any]
) -> None:
    training_job(rank, world_size, ["mlp"], environment, where, **options)


def files(directory: Path) -> dict[str, str]:
    """All files below a directory, by relative path."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in found}


def by_model(directory: Path) -> list[dict[str, str]]:
    """The graphs of each model, in order; the model's number is cut from the names."""
    models: dict[int, dict[str, str]] = {}
    for name, text in files(directory).items():
        if match := re.match(r"model(\d+)-(.*)", name):
            models.setdefault(int(match[1]), {})[match[2]] = text
    return [models[number] for number in sorted(models)]


def folders(directory: Path, graph: str) -> list[Path]:
    """Each model's folder of a graph, in the order of the models."""
    return sorted(
        directory.glob(f"model*-{graph}"), key=lambda path: int(path.name[5:].split("-")[0])
    )


def applied(text: str, diff: str) -> str:
    """What the unified diff makes of the text."""
    old, new, place = text.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if match := PATCH_LINE.match(line):
            start = int(match[1]) - (match[2] != "0")
            new += old[place:start]
            place = start
        elif line[0] == "+":
            new.append(line[1:])
        else:
            assert old[place] == line[1:]
            place += 1
            new += [line[1:]] if line[0] == " " else []
    return "\n".join([*new, *old[place:]]) + "\n"


@pytest.fixture(scope="module")
def dumped(as_fake_rank: AsFakeRank, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The dump of two equal models and another, trained one after another in one process."""
    directory = tmp_path_factory.mktemp("dump") / "made" / "on demand"
    options = {"dump": str(directory)}
    as_fake_rank(0, 4, numbered_job, ["gpt", "gpt", "mlp"], options)
    return directory


# --- graphs ---


def test_a_folder_for_each_graph_and_a_file_for_each_event(dumped: Path) -> None:
    events = ["00-captured.txt", *(f"{i:02}-{name}" for i, name in enumerate(PASSES, 1))]
    for model in by_model(dumped):
        found: dict[str, list[str]] = {}
        for name in model:
            folder, file = name.split("/")
            found.setdefault(folder, []).append(file)
        # Once as for every step, once for what an earlier backward left on the rank.
        assert list(found) == ["backward0", "backward0-01", "forward0"]
        for folder in ("backward0", "backward0-01"):
            stems = [file.removesuffix(".diff") for file in found[folder] if ".txt" not in file]
            assert stems == [*events[1:], "passes.json"]
            assert [f.removesuffix(".txt") for f in found[folder] if ".txt" in f] == [
                "00-captured",
                *events[1:],
            ]
        assert f"01-{GATHER_PASSES[0].name}.diff" in found["forward0"]


def test_equal_models_have_equal_texts(dumped: Path) -> None:
    one, two, other = by_model(dumped)
    texts = [{n: t for n, t in model.items() if "json" not in n} for model in (one, two, other)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def texts_of_equal_models(directory: Path) -> str:
    """The texts of either of two models, which are checked to be equal."""
    one, two = (
        {n: t for n, t in model.items() if "json" not in n} for model in by_model(directory)
    )
    assert one == two
    return "\n".join(one.values())


def test_symbolic_sizes_are_printed(as_fake_rank: AsFakeRank, tmp_path: Path) -> None:  # noqa: F811
    options = {"dump": str(tmp_path), "dynamic": True}
    as_fake_rank(0, 4, numbered_job, ["mlp", "mlp"], options)
    assert re.search(r"float64\[s\d+, 13\]", texts_of_equal_models(tmp_path))
    step = StepGraph.from_json((tmp_path / "step-0.json").read_text())
    assert step.seconds > 0


def test_models_are_numbered_by_appearance(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    options = {"dump": str(tmp_path), "update": "in_backward"}
    ranks(2).run(numbered_job, ["mlp", "mlp"], options)
    assert "], model0, 0, " in texts_of_equal_models(tmp_path)


def test_texts_hold_no_addresses_paths_or_groups(dumped: Path) -> None:
    for name, text in files(dumped).items():
        if name.endswith((".txt", ".diff")):
            assert "0x" not in text, name
            assert str(Path(__file__).parents[1]) not in text, name
            assert "fxcomm/[" not in text, name
    (path,) = folders(dumped, "backward0")[0].glob("*mark_times.txt")
    assert "group0" in path.read_text()


def test_each_diff_leads_from_the_text_before_to_the_next(dumped: Path) -> None:
    changed = 0
    for folder in dumped.glob("model*"):
        texts = sorted(folder.glob("*.txt"))
        assert len(texts) > 1
        for before, after in pairwise(texts):
            diff = after.with_suffix(".diff").read_text()
            assert applied(before.read_text(), diff) == after.read_text()
            assert not diff or diff.startswith(f"--- {before.name}\n+++ {after.name}\n")
            changed += bool(diff)
    assert changed > 10


def test_a_graph_is_captured_once_however_often_it_is_lowered(dumped: Path) -> None:
    for model in by_model(dumped):
        assert model["backward0/00-captured.txt"] == model["backward0-01/00-captured.txt"]


def test_passes_json_counts_what_the_texts_show(dumped: Path) -> None:
    for folder in dumped.glob("model*"):
        fields = json.loads((folder / "passes.json").read_text())
        assert fields["graph"] == folder.name
        texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
        assert len(fields["passes"]) == len(texts) - 1
        for record, (before, after) in zip(fields["passes"], pairwise(texts), strict=True):
            assert 0 <= record["seconds"] < 60
            assert record["nodes_before"] == len(before.splitlines())
            assert record["nodes_after"] == len(after.splitlines())
            assert record["operators_before"] == operators(before)
            assert record["operators_after"] == operators(after)
            assert record["added"] == operators(after) - operators(before)
            assert record["removed"] == operators(before) - operators(after)


def operators(text: str) -> Counter[str]:
    return Counter(re.findall(r" = call_\w+ ([\w.]+)\(", text))


def test_stamps_name_bucket_and_parameters(dumped: Path) -> None:
    plan = OverlapPlan.from_json((dumped / "plan-0.json").read_text())
    (path,) = folders(dumped, "backward0")[0].glob("*launch_reductions.txt")
    launches = [line for line in path.read_text().splitlines() if "# launch bucket" in line]
    final = [line for line in launches if " final" in line]
    assert len(final) == len(plan.layout.buckets) > 2
    names = {parameter.name for parameter in plan.layout.parameters}
    for line in final:
        assert set(line.rsplit(": ", 1)[1].split(", ")) <= names


# --- plans and steps ---


def test_each_model_has_its_plan_and_step(dumped: Path) -> None:
    names = sorted(path.name for path in dumped.iterdir() if path.is_file())
    steps = [f"step-{i}.{kind}" for i in range(3) for kind in ("graphml", "json")]
    assert names == [*(f"plan-{i}.json" for i in range(3)), *steps]
    for number in range(3):
        plan = OverlapPlan.from_json((dumped / f"plan-{number}.json").read_text())
        folder = folders(dumped, "backward0")[number]
        passes = json.loads((folder / "passes.json").read_text())
        assert passes["plans"] == [f"plan-{number}.json"]
        step = StepGraph.from_json((dumped / f"step-{number}.json").read_text())
        check_step(step, plan)
        drawn = nx.parse_graphml((dumped / f"step-{number}.graphml").read_text())
        assert set(drawn) == set(step.operations)


def check_step(step: StepGraph, plan: OverlapPlan) -> None:
    buckets = len(plan.layout.buckets)
    assert set(step.by_bucket) == {
        (b, role) for b in range(buckets) for role in (Role.REDUCE, Role.UPDATE, Role.GATHER)
    }
    seconds = dict.fromkeys(PhaseKind, 0.0)
    for operation in step.operations.values():
        seconds[operation.phase.kind] += operation.seconds
    assert seconds[PhaseKind.BACKWARD] > seconds[PhaseKind.FORWARD] > 0
    assert seconds[PhaseKind.UPDATE] == 0
    for parameter in plan.layout.parameters:
        assert step.contributors[parameter.name]
        assert step.readers[parameter.name]
    # What the forward saves ties the backward to it.
    assert any(
        edge.source.startswith("forward0/") and edge.target.startswith("backward0/")
        for edge in step.edges
        if edge.dependency.why.value == "data"
    )


def test_models_of_several_graphs_have_no_step(
    as_fake_rank: AsFakeRank,  # noqa: F811
    tmp_path: Path,
) -> None:
    as_fake_rank(0, 4, numbered_job, ["broken"], {"dump": str(tmp_path)})
    names = {path.name for path in tmp_path.iterdir()}
    assert "plan-0.json" in names
    assert not any(name.startswith("step") for name in names)
    assert sum("backward" in name for name in names) > 1


def test_a_plan_is_written_once_and_models_share_the_numbers(dumped: Path, tmp_path: Path) -> None:
    first = OverlapPlan.from_json((dumped / "plan-0.json").read_text())
    second = replace(first, name="another")
    one, two = (Dump.of(str(tmp_path), {}, rank=0, process=0) for _ in range(2))
    for dump, plan in ((one, first), (two, first), (one, second), (one, first), (two, first)):
        dump.plan(0, plan)
    written = files(tmp_path)
    assert written == {
        "plan-0.json": first.to_json(),
        "plan-1.json": first.to_json(),
        "plan-2.json": second.to_json(),
    }
    for dump, why in ((one, "one"), (two, "two"), (one, "again")):
        dump.tuned(1, Tuned(first, why, {}, {}))
    outcomes = {n: Tuned.from_json(t).why for n, t in files(tmp_path).items() if "tuned" in n}
    assert outcomes == {"tuned-1.json": "again", "tuned-2.json": "two"}


# --- who writes, and when ---


def test_nothing_is_written_otherwise(as_fake_rank: AsFakeRank, tmp_path: Path) -> None:  # noqa: F811
    as_fake_rank(0, 4, environment_job, {"FXCOMM_DUMP": ""}, str(tmp_path), {})
    assert not list(tmp_path.iterdir())


def test_nothing_is_computed_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this process may have had torch log to somebody.
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])
    gm = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    dump = Dump.of(None, {}, rank=0, process=0)
    with patch("fxcomm.dump.graph_text", side_effect=AssertionError):
        dump.graph("graph", gm)
        assert dump.passes("graph", gm) is None


def test_the_environment_names_a_directory_and_the_option_wins(
    as_fake_rank: AsFakeRank,  # noqa: F811
    tmp_path: Path,
) -> None:
    variable, option = tmp_path / "variable", tmp_path / "option"
    environment = {"FXCOMM_DUMP": "variable"}  # relative to where the process is
    as_fake_rank(0, 4, environment_job, environment, str(tmp_path), {"dump": str(option)})
    assert "plan-0.json" in files(option)
    assert not variable.exists()
    as_fake_rank(0, 4, environment_job, environment, str(tmp_path), {})
    assert "plan-0.json" in files(variable)


def own_directory_job(rank: int, world_size: int, directory: str) -> None:
    options = {"lowering": "eager", "bucket_mb": BUCKET_MB, "dump": f"{directory}/{rank}"}
    train_ranks(rank, world_size, "mlp", options, 2)


def test_only_rank_0_writes(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2).run(own_directory_job, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert "plan-0.json" in files(tmp_path / "0")


def test_rank_0_of_other_processes_writes_beside(tmp_path: Path, dumped: Path) -> None:
    plan = OverlapPlan.from_json((dumped / "plan-0.json").read_text())
    for rank, process in ((0, 2), (1, 3)):
        Dump.of(str(tmp_path), {}, rank=rank, process=process).plan(0, plan)
    assert list(files(tmp_path)) == ["rank2/plan-0.json"]


def refused_job(rank: int, world_size: int, directory: str) -> str:
    with pytest.raises(OptionsError) as caught:
        train("mlp", dump=directory, start_timeout_s=60)
    dist.barrier()
    return str(caught.value)


def test_a_directory_that_cannot_be_made_is_an_error_on_every_rank(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "dump")
    messages = ranks(2).run(refused_job, directory, timeout_s=50)
    assert messages[0] == messages[1]
    assert repr(directory) in messages[0]
    assert "FXCOMM_DUMP" in messages[0]


def test_a_write_that_fails_later_is_said_once(
    dumped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = OverlapPlan.from_json((dumped / "plan-0.json").read_text())
    directory = tmp_path / "dump"
    dump = Dump.of(str(directory), {}, rank=0, process=0)
    assert dump.problem() == ""
    assert list(directory.iterdir()) == []
    directory.rmdir()
    directory.write_text("")
    with caplog.at_level(logging.WARNING, logger="fxcomm"):
        dump.plan(0, plan)
        dump.plan(0, replace(plan, name="another"))
    assert [str(directory) in record.message for record in caplog.records] == [True]


def test_files_appear_as_a_whole(dumped: Path, tmp_path: Path) -> None:
    plan = OverlapPlan.from_json((dumped / "plan-0.json").read_text())
    dump = Dump.of(str(tmp_path), {}, rank=0, process=0)
    dump.plan(0, plan)
    interrupted = patch.object(Path, "replace", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        dump.tuned(0, Tuned(plan, "", {}, {}))
    visible = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert visible == ["plan-0.json"]


# --- structured logs ---


class Taken(logging.Handler):
    """Takes fxcomm's artifacts from torch's structured logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[tuple[str, str, bool]] = []

    def emit(self, record: logging.LogRecord) -> None:
        metadata: dict[str, Any] = getattr(record, "metadata", {})
        name = metadata.get("artifact", {}).get("name", "")
        if name.startswith("fxcomm_"):
            self.found.append((name, getattr(record, "payload", ""), "frame_id" in metadata))


def traced_job(rank: int, world_size: int, where: str) -> list[tuple[str, str, bool]]:
    taken, log = Taken(), logging.getLogger("torch.__trace")
    log.addHandler(taken)
    try:
        training_job(rank, world_size, ["mlp"], {}, where)
    finally:
        log.removeHandler(taken)
    return taken.found


@pytest.mark.parametrize("rank", [0, 3])
def test_artifacts_are_logged_without_a_directory(
    as_fake_rank: AsFakeRank,  # noqa: F811
    tmp_path: Path,
    rank: int,
) -> None:
    found = as_fake_rank(rank, 4, traced_job, str(tmp_path))
    names = [re.sub(r"model\d+", "model", name) for name, _, _ in found]
    backward = [f"after_{name}" for name in PASSES]
    assert names == [
        "fxcomm_model_forward0_captured",
        f"fxcomm_model_forward0_after_{GATHER_PASSES[0].name}",
        "fxcomm_model_backward0_captured",
        *(f"fxcomm_model_backward0_{name}" for name in backward),
        *(f"fxcomm_model_backward0_01_{name}" for name in backward),
    ]
    assert all(" = output output(" in text for _, text, _ in found)
    assert all(compiled for _, _, compiled in found), "shown with the compilation"
    assert not list(tmp_path.iterdir())


# --- texts of small graphs ---


class Plain:
    """A value whose ``repr`` holds an address."""


def select(*arguments: object, dtype: torch.dtype) -> None:
    """A function that a graph calls."""


def example_graph(device: str = "cpu", group: str = "7", value: object = None) -> str:
    inner = torch.fx.Graph()
    inner.output(inner.call_function(operator.neg, (inner.placeholder("y"),)))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty_strided((4, 6), (1, 4), device="meta", dtype=torch.bfloat16)
    body = graph.get_attr("body")
    ops = torch.ops._c10d_functional
    sent = graph.call_function(ops.all_reduce.default, (x, "sum", group))
    sent.meta[KEY] = Stamp(BucketKey(1, 2), "launch", "BACKWARD", ("w", "b"), final=True)
    other = graph.call_function(ops.all_reduce.default, (sent, "sum", group + "1"))
    again = graph.call_function(ops.all_reduce.default, (other, "sum", group))
    again.meta["val"] = (torch.empty(2, 3, device="meta"), None)
    arguments: Any = ([x, (again, 1.5)], {"a": True}, slice(0, None, 2), torch.device(device), body)
    made = graph.call_function(select, arguments, {"dtype": torch.int8})
    made.meta["val"] = value
    graph.output((made, None))
    return graph_text(torch.fx.GraphModule({"body": torch.fx.GraphModule({}, inner)}, graph))


def test_the_text_of_a_graph() -> None:
    reduce = "call_function _c10d_functional.all_reduce.default"
    assert example_graph(value=Plain()).splitlines() == [
        "x = placeholder x() -> meta bfloat16[4, 6] strides [1, 4]",
        "body = get_attr body()",
        "    y = placeholder y()",
        "    neg = call_function _operator.neg(y)",
        "    output = output output(neg)",
        f"all_reduce_default = {reduce}(x, 'sum', group0)"
        "  # launch bucket 1.2 BACKWARD final: w, b",
        f"all_reduce_default_1 = {reduce}(all_reduce_default, 'sum', group1)",
        f"all_reduce_default_2 = {reduce}(all_reduce_default_1, 'sum', group0)"
        " -> (meta float32[2, 3], None)",
        "select = call_function tests.test_dump.select([x, (all_reduce_default_2, 1.5)], "
        "{'a': True}, slice(0, None, 2), cpu, body, dtype=int8) -> tests.test_dump.Plain",
        "output = output output((select, None))",
    ]


def test_what_varies_between_processes_does_not_show() -> None:
    one, two = example_graph("cuda:0", "7", Plain()), example_graph("cuda:3", "12", Plain())
    assert one == two
    assert one != example_graph("cpu", "7", Plain())


def test_a_one_in_the_sizes_has_any_stride() -> None:
    graph = torch.fx.Graph()
    for sizes, strides in (((3, 1, 2), (2, 9, 1)), ((3, 1, 2), (3, 9, 1)), ((), ()), ((0,), (1,))):
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = torch.empty_strided(sizes, strides, device="meta")
    graph.output(None)
    lines = graph_text(torch.fx.GraphModule({}, graph)).splitlines()[:-1]
    assert ["strides" in line for line in lines] == [False, True, False, False]
