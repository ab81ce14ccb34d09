"""The command line: what commands tell, how they print it, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fxcomm
from fxcomm.analysis.costs import Schedule, StepProblem
from fxcomm.analysis.simulate import step_seconds
from fxcomm.analysis.timeline import Span
from fxcomm.commands.compare_plans import compare_plans, read_plan
from fxcomm.commands.document import Document, Table
from fxcomm.commands.explain import explain, read_tuned, write_report
from fxcomm.errors import FxcommError
from fxcomm.layout import ParameterSpec, build_layout
from fxcomm.plan import OverlapPlan
from fxcomm.tuned import Tuned
from tests.test_simulate import problem_of


def a_plan(name: str = "first", bucket_bytes: int = 1024) -> OverlapPlan:
    specs = [ParameterSpec(f"p{i}", 256, "float32", 4, "cpu") for i in range(3)]
    layout = build_layout([specs], bucket_bytes=bucket_bytes, world_size=2)
    count = len(layout.buckets)
    return OverlapPlan(name, layout, (True,) * count, None, tuple(reversed(range(count))), True)


def a_problem() -> StepProblem:
    problem = problem_of([2.0, 5.0, 8.0], [3.0, 1.0, 0.0], sizes=[256, 256, 256])
    return replace(problem, tensors=tuple(replace(t, itemsize=4) for t in problem.tensors))


def outcome() -> Tuned:
    spans = (Span("compute", "forward", None, 0.0, 4.0), Span("reduce", "reduce", 1, 2.0, 9.0))
    return Tuned(a_plan(), "'first' is best", {"first": 30.0}, {}, a_problem(), spans)


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fxcomm", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
        check=False,
    )


# --- values ---


def test_outcomes_survive_json() -> None:
    assert Tuned.from_json(outcome().to_json()) == outcome()
    bare = Tuned(a_plan(), "not tuned", {}, {})
    assert Tuned.from_json(bare.to_json()) == bare
    assert bare.account() is None
    assert bare.seconds is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"problem": 1}', a_plan().to_json()])
def test_other_text_is_no_outcome(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # json's own, for what is no JSON
        Tuned.from_json(text)


def test_documents_as_text_and_data() -> None:
    table = Table("Things", ("name", "ms"), (("long name", "1.5"), ("x", "10.25")))
    document = Document({"a": 1}, ["Said.", table], 1)
    assert document.to_text() == (
        "Said.\n\nThings\n  name          ms\n  long name    1.5\n  x          10.25\n"
    )
    assert json.loads(document.to_json()) == {"a": 1}


# --- explain ---


def test_explain_tells_the_simulated_step() -> None:
    tuned = outcome()
    document = explain(tuned)
    assert tuned.problem is not None
    account = tuned.account()
    assert account is not None
    schedule: Schedule = account.schedule
    assert document.data["step_s"] == step_seconds(tuned.problem, schedule)
    assert document.data["measured_s"] == {"first": 30.0}
    text = document.to_text()
    assert all(wait.reason in text for wait in account.waits)
    assert all(change.change in text for change in account.what_if)
    assert "bucket-25mb" in text
    json.loads(document.to_json())


def test_explain_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FxcommError, match=r"tuned-\*\.json.*dump"):
        read_tuned(tmp_path)
    with pytest.raises(FxcommError, match="cannot be read"):
        read_tuned(tmp_path / "none.json")
    (tmp_path / "tuned-0.json").write_text("{torn")
    with pytest.raises(FxcommError, match=r"tuned-0\.json"):
        read_tuned(tmp_path)
    with pytest.raises(FxcommError, match="the model has changed"):
        explain(Tuned(a_plan(), "the model has changed", {}, {}))


def test_a_report_needs_a_tuned_plan(tmp_path: Path) -> None:
    with pytest.raises(FxcommError, match="about 45 steps"):
        fxcomm.save_report(tmp_path / "report.html", torch.nn.Linear(1, 1))
    write_report(tmp_path / "report.html", outcome())
    assert outcome().plan.name in (tmp_path / "report.html").read_text()
    with pytest.raises(FxcommError, match="cannot be written"):
        write_report(tmp_path / "no" / "report.html", outcome())


# --- diff ---


def test_equal_plans_do_not_differ() -> None:
    document = compare_plans(a_plan(), a_plan())
    assert (document.exit_code, document.data["same"]) == (0, True)


def test_differences_are_told() -> None:
    document = compare_plans(a_plan(), replace(a_plan("other", 3072), commshift=False))
    assert document.exit_code == 1
    assert set(document.data["decisions"]) >= {"name", "buckets", "gathers into the forward"}
    assert document.data["decisions"]["gathers into the forward"] == ["True", "False"]
    assert document.data["parameters"], "parameters have moved"
    assert "gathers into the forward" in document.to_text()


def test_plans_are_read_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(a_plan().to_json())
    (tmp_path / "tuned.json").write_text(outcome().to_json())
    assert read_plan(tmp_path / "plan.json") == read_plan(tmp_path / "tuned.json") == a_plan()
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "none.json"):
        with pytest.raises(FxcommError, match=name):
            read_plan(tmp_path / name)


# --- processes ---


def test_the_command_explains_and_compares(tmp_path: Path) -> None:
    (tmp_path / "tuned-0.json").write_text(outcome().to_json())
    (tmp_path / "plan-0.json").write_text(a_plan("other", 3072).to_json())
    told = run("explain", tmp_path, "--html", tmp_path / "report.html")
    assert told.returncode == 0, told.stderr
    assert "What would help" in told.stdout
    assert "\x1b" not in told.stdout, "no colours but on a terminal"
    assert "<html" in (tmp_path / "report.html").read_text()
    compared = run("diff", tmp_path / "tuned-0.json", tmp_path / "plan-0.json", "--json")
    assert compared.returncode == 1
    assert json.loads(compared.stdout)["same"] is False
    missing = run("explain", tmp_path / "nothing")
    assert missing.returncode == 2
    assert missing.stderr.startswith("fxcomm: explain: ")


def test_calibrate_needs_ranks() -> None:
    alone = run("calibrate", RANK="0", WORLD_SIZE="1")
    assert alone.returncode == 2
    assert "torchrun" in alone.stderr


def test_calibrate_measures_ranks() -> None:
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m fxcomm"
    arguments = [sys.executable, *command.split(), "calibrate", "--json", "--seconds", "0.3"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        arguments, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    data = json.loads(ended.stdout)
    assert data["world_size"] == 2
    assert data["contention"] >= 1
    assert all(seconds > 0 for _, seconds in data["reduce"])


def test_the_doctor_finds_this_machine_well() -> None:
    told = run("doctor", "--json", FXCOMM_CACHE="")
    found = json.loads(told.stdout)
    assert told.returncode == 0, found
    assert found["torch"]["well"]
    assert found["a step with backend='fxcomm'"]["found"].startswith("loss")


def test_the_doctor_tells_what_would_fail(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    told = run("doctor", FXCOMM_CACHE=str(blocked / "cache"), CXX="no-such-compiler", PATH="")
    assert told.returncode == 1
    assert "set FXCOMM_CACHE" in told.stdout
    assert "install g++" in told.stdout
