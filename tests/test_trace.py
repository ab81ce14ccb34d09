"""Captures of whole models without ranks, and what they would be on many."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxcomm import compat
from fxcomm.analysis.dependencies import use_order
from fxcomm.analysis.projection import Cluster, project
from fxcomm.analysis.roofline import DEVICES, node_cost
from fxcomm.analysis.trace import Capture, default_loss, trace_step
from fxcomm.commands.simulate import bytes_per_second, capture_named, simulate
from fxcomm.errors import FxcommError
from tests.zoo import TiedGPT

CPU = node_cost(DEVICES["cpu-core"])


def gpt() -> TiedGPT:
    torch.manual_seed(0)
    return TiedGPT(vocabulary=23, width=16, layers=3)


@cache
def captured() -> Capture:
    return trace_step(gpt(), [torch.randint(0, 23, (2, 8))]).captured("gpt", "cpu-core", CPU)


# --- captures ---


def test_every_gradient_is_contributed_once() -> None:
    model, capture = gpt(), captured()
    named = dict(model.named_parameters())
    assert [spec.name for spec in capture.parameters] == list(named)
    assert all(spec.numel == named[spec.name].numel() for spec in capture.parameters)
    contributors = capture.step.contributors
    assert set(contributors) == set(named)
    assert all(len(found) == 1 for found in contributors.values())


def test_gradients_and_uses_come_in_the_order_of_eager_training() -> None:
    """A block's are complete before those of the block before it; uses go the other way."""
    ends = captured().step.position
    contributors = captured().step.contributors

    def blocks(names: list[str]) -> list[int]:
        numbers = [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]
        return list(dict.fromkeys(numbers))

    order = sorted(contributors, key=lambda name: ends[contributors[name][-1]])
    assert blocks(order) == [2, 1, 0]
    assert blocks([*use_order(captured().step)]) == [0, 1, 2]


def test_nothing_is_computed_for_tensors_without_memory() -> None:
    with compat.without_memory():
        model = nn.Sequential(nn.Linear(2**15, 2**15), nn.Linear(2**15, 2**15))  # 8 GiB
        traced = trace_step(model, [torch.zeros(4, 2**15)])
    capture = traced.captured("wide", "cpu-core", CPU)
    assert len(capture.step.contributors) == 4
    # The second layer's gradient needs what the first made; the batch itself is an input.
    assert capture.saved_bytes == 4 * 2**15 * 4


def test_memory_changes_nothing() -> None:
    with compat.without_memory():
        fake = trace_step(gpt(), [torch.randint(0, 23, (2, 8))]).captured("gpt", "cpu-core", CPU)
    assert fake == captured()


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_captures_survive_files(name: str, tmp_path: Path) -> None:
    captured().save(tmp_path / name)
    assert Capture.load(tmp_path / name) == captured()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(FxcommError, match=r"step\.json is no captured step"):
        Capture.load(tmp_path / "step.json")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]


def test_what_cannot_be_captured_is_refused() -> None:
    batch = [torch.randn(2, 4)]
    with pytest.raises(FxcommError, match="no parameter that requires a gradient"):
        trace_step(nn.ReLU(), batch)
    with pytest.raises(FxcommError, match="2 graphs"):
        trace_step(Broken(), batch)
    with pytest.raises(FxcommError, match="pass loss="):
        default_loss({"tokens": torch.zeros(2, dtype=torch.long)})


# --- projections ---


@pytest.mark.parametrize("world_size", [1, 3, 1024])
def test_a_projection_is_a_plan_for_its_ranks(world_size: int) -> None:
    cluster = Cluster(world_size, DEVICES["cpu-core"], 1e8)
    found = project(captured(), cluster, budget_s=0.1)
    layout, total = found.plan.layout, sum(spec.numel for spec in captured().parameters)
    layout.check()
    assert layout.world_size == world_size
    assert sum(s.numel for b in layout.buckets for s in b.segments) == total
    assert found.account.step.seconds >= found.account.bound.seconds - 1e-12
    memory = found.memory
    assert memory.parameters == sum(bucket.nbytes for bucket in layout.buckets) >= 4 * total
    assert memory.optimizer_state * world_size == 2 * memory.parameters
    assert (
        memory.total
        == memory.parameters
        + memory.optimizer_state
        + memory.saved_for_backward
        + (memory.reductions_in_flight)
    )
    if world_size == 1:
        assert found.account.communication == 0
    assert found.path.seconds > 0


def test_more_ranks_and_slower_links_take_longer() -> None:
    def seconds(world_size: int, rate: float) -> float:
        cluster = Cluster(world_size, DEVICES["cpu-core"], rate)
        return project(captured(), cluster, budget_s=0.1).account.communication

    assert seconds(2, 1e8) < seconds(8, 1e8) < seconds(8, 1e7)


def test_halves_of_a_bucket_leave_two_ranks() -> None:
    link = Cluster(2, DEVICES["cpu-core"], 1e6, latency=0.0).link
    assert link.reduce.seconds(2e6) == pytest.approx(1.0)
    assert Cluster(1024, DEVICES["cpu-core"], 1e6, latency=1.0).link.gather.latency == 10.0


def test_clusters_that_make_no_sense_are_refused() -> None:
    device = DEVICES["cpu-core"]
    for change in ({"world_size": 0}, {"bytes_per_second": 0.0}, {"latency": -1.0}):
        with pytest.raises(ValueError, match=r"a world of|a link has"):
            replace(Cluster(2, device, 1e6), **change)


# --- the command ---


def test_rates_of_links() -> None:
    assert bytes_per_second("100Gbit/s") == bytes_per_second("12.5 GB/s") == 12.5e9
    assert bytes_per_second("800Gbps") == bytes_per_second("800Gb/s") == 1e11
    for text in ("100", "fast", "1.2.3Gbit/s", "0Gbit/s", "100Gbit"):
        with pytest.raises(FxcommError, match="simulate"):
            bytes_per_second(text)


def test_a_script_and_a_file_are_simulated_alike(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(
        "from torch import nn, zeros\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), {'input': zeros(4, 64)}\n"
    )
    options = {"world_size": 16, "link": "1Gbit/s", "device": "cpu-core", "budget_s": 0.1}
    document = simulate(str(script), **options)  # type: ignore[arg-type]
    assert document.data["world_size"] == 16
    assert document.data["memory_bytes"]["parameters"] >= 4 * (64 * 64 + 64 + 64 + 1)
    assert "16 ranks" in document.to_text()
    json.loads(document.to_json())
    capture_named(str(script), "cpu-core", 1, 2).save(tmp_path / "net.json")
    again = simulate(str(tmp_path / "net.json"), **options)  # type: ignore[arg-type]
    assert math.isclose(again.data["step_s"], document.data["step_s"], rel_tol=0.05)
    with pytest.raises(FxcommError, match="--device cpu-core"):
        simulate(str(tmp_path / "net.json"), world_size=16, link="1Gbit/s", device="h100")


def test_unknown_models_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    for model, message in (
        ("nothing", "gptj-6b"),
        (str(tmp_path / "empty.py"), r"model\(\)"),
        (str(tmp_path / "none.py"), "no file"),
    ):
        with pytest.raises(FxcommError, match=message):
            simulate(model, world_size=2, link="1Gbit/s")
    with pytest.raises(FxcommError, match="no device 'abacus'"):
        simulate("gpt2", world_size=2, link="1Gbit/s", device="abacus")
    with pytest.raises(FxcommError, match="0 ranks"):
        simulate("gpt2", world_size=0, link="1Gbit/s")
