"""Plans from files: rank 0's file is everyone's plan, and what does not fit is refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxcomm.errors import PlanError
from fxcomm.layout import ParameterSpec, build_layout
from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY
from fxcomm.runtime.agreement import Agreement
from fxcomm.runtime.replay import replayed_plan
from tests.oracle import Trained, adamw, assert_equal_training, train_ranks
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO

Pools = Callable[[int], Ranks]


def spec(name: str, numel: int, dtype: str = "float32", device: str = "cpu") -> ParameterSpec:
    return ParameterSpec(name, numel, dtype, {"float32": 4, "float64": 8}[dtype], device)


PARAMETERS = [spec("a", 700), spec("b", 5), spec("c", 0), spec("d", 64, "float64")]


def plan_for(
    parameters: list[ParameterSpec], world_size: int = 2, bucket_bytes: int = 512
) -> OverlapPlan:
    layout = build_layout([parameters], world_size=world_size, bucket_bytes=bucket_bytes)
    count = len(layout.buckets)
    return OverlapPlan("test", layout, (True,) * count, 4096, tuple(range(count)), commshift=True)


# --- reading, for one rank ---


@dataclass
class Store:
    """What ranks use of a store, in one process."""

    values: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert all(key in self.values for key in keys)


def replay(
    path: Path | str,
    parameters: list[ParameterSpec] | None = None,
    *,
    world_size: int = 2,
    split: bool = True,
) -> OverlapPlan | str:
    """What both of two ranks get: the plan or the error."""
    results: list[OverlapPlan | str] = []
    store = Store()
    for rank in range(2):
        mine = str(path) if rank == 0 else "of no use"
        try:
            results.append(
                replayed_plan(
                    mine,
                    PARAMETERS if parameters is None else parameters,
                    Agreement(store, rank, 2, 1.0),
                    "topic",
                    world_size=world_size,
                    split=split,
                )
            )
        except PlanError as error:
            results.append(str(error).replace(str(path), "FILE").replace(mine, "FILE"))
    assert results[0] == results[1]
    return results[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_for(PARAMETERS).to_json())
    return path


def test_a_plan_that_fits_is_replayed(file: Path) -> None:
    assert replay(file) == plan_for(PARAMETERS)


def test_the_order_of_parameters_is_the_plan_s(file: Path) -> None:
    assert replay(file, PARAMETERS[::-1]) == plan_for(PARAMETERS)


@pytest.mark.parametrize(
    ("parameters", "differences"),
    [
        pytest.param(
            [*PARAMETERS, spec("e", 3)],
            [
                "parameter 'e': not in the plan, the model has 3 elements of float32 (4 bytes "
                "each) on cpu"
            ],
            id="a parameter more",
        ),
        pytest.param(
            PARAMETERS[1:],
            [
                "parameter 'a': the plan has 700 elements of float32 (4 bytes each) on cpu, not "
                "the model"
            ],
            id="a parameter less",
        ),
        pytest.param(
            [spec("a", 701), *PARAMETERS[1:3], spec("d", 64, device="cuda")],
            [
                "parameter 'a': the plan has 700 elements of float32 (4 bytes each) on cpu, the "
                "model 701 elements of float32 (4 bytes each) on cpu",
                "parameter 'd': the plan has 64 elements of float64 (8 bytes each) on cpu, the "
                "model 64 elements of float32 (4 bytes each) on cuda",
            ],
            id="another size, dtype and device",
        ),
    ],
)
def test_each_difference_is_named(
    file: Path, parameters: list[ParameterSpec], differences: list[str]
) -> None:
    message = replay(file, parameters)
    assert isinstance(message, str)
    assert f"Differences ({len(differences)}):" in message
    assert [line.strip() for line in message.splitlines()[1:-1]] == differences


def test_five_differences_are_listed_and_the_others_counted(file: Path) -> None:
    message = replay(file, [*PARAMETERS, *(spec(f"e{i}", 3) for i in range(9))])
    assert isinstance(message, str)
    assert "Differences (9):" in message
    assert sum("parameter 'e" in line for line in message.splitlines()) == 5
    assert "... and 4 more" in message


def test_another_number_of_ranks(file: Path) -> None:
    message = replay(file, world_size=4)
    assert isinstance(message, str)
    assert "the plan is for 2 ranks, the model trains on 4" in message


def test_stage_ddp_takes_only_whole_parameters(tmp_path: Path, file: Path) -> None:
    message = replay(file, split=False)
    assert isinstance(message, str)
    assert "parameter 'a': the plan cuts it into 6 pieces, stage 'ddp' keeps it whole" in message
    whole = plan_for(PARAMETERS, bucket_bytes=1 << 20)
    (tmp_path / "whole.json").write_text(whole.to_json())
    assert replay(tmp_path / "whole.json", split=False) == whole


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param(None, "cannot read the plan 'FILE': FileNotFoundError", id="missing"),
        pytest.param(b"\xff\xfe", "cannot read the plan 'FILE': UnicodeDecodeError", id="binary"),
        pytest.param(b"", "'FILE' on rank 0 is not a plan", id="empty"),
        pytest.param(b'{"error": "x"}', "'FILE' on rank 0 is not a plan", id="other JSON"),
        pytest.param(b"[" * 100_000, "'FILE' on rank 0 is not a plan", id="nested too deep"),
    ],
)
def test_what_is_no_plan_is_an_error_on_every_rank(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    message = replay(path)
    assert isinstance(message, str)
    assert complaint in message


# --- on ranks ---


def replay_job(rank: int, world_size: int, directory: str, options: dict[str, Any]) -> Trained:
    """Trains by ``plan.json`` in the working directory, which only rank 0 has."""
    with contextlib.chdir(Path(directory) / f"rank{rank}"):
        everything = {"lowering": "eager", "plan": "plan.json", **options}
        return train_ranks(rank, world_size, "mlp", everything)


def _homes(tmp_path: Path, text: str) -> str:
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir(exist_ok=True)
    (tmp_path / "rank0" / "plan.json").write_text(text)
    return str(tmp_path)


def test_what_a_dump_holds_is_replayed_to_the_bit(ranks: Pools, tmp_path: Path) -> None:
    for stage in ("zero2", "ddp"):
        dumped, again = tmp_path / stage, tmp_path / f"{stage} again"
        options = {"lowering": "eager", "bucket_mb": 0.001, "stage": stage, "dump": str(dumped)}
        first = ranks(2).run(train_ranks, "mlp", options)
        text = (dumped / "plan-0.json").read_text()
        assert len(OverlapPlan.from_json(text).layout.buckets) > 2
        directory = _homes(tmp_path, text)
        second = ranks(2).run(replay_job, directory, {"stage": stage, "dump": str(again)})
        assert (again / "plan-0.json").read_text() == text
        for one, two in zip(first, second, strict=True):
            assert_equal_training(two, one, rtol=0.0)


def test_options_limit_what_is_replayed(ranks: Pools, tmp_path: Path) -> None:
    """``commshift`` and ``in_flight_mb`` hold for the plan of a file as for every other."""
    specs = [spec(name, p.numel(), "float64") for name, p in ZOO["mlp"].model().named_parameters()]
    plan = plan_for(specs, bucket_bytes=1000)
    directory = _homes(tmp_path, plan.to_json())
    limits = {"commshift": False, "in_flight_mb": 0.25, "dump": str(tmp_path / "dumped")}
    ranks(2).run(replay_job, directory, limits)
    used = OverlapPlan.from_json((tmp_path / "dumped" / "plan-0.json").read_text())
    assert used == replace(plan, commshift=False, in_flight_bytes=1 << 18)


def refused_job(rank: int, world_size: int, path: str) -> tuple[str, bool]:
    """The error of the first step, and whether it left the parameters as they were."""
    case = ZOO["mlp"]
    model = case.model()
    options = {"lowering": "eager", "plan": path, "start_timeout_s": 20}
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    batch = case.batch(rank, ROWS)
    case.loss(compiled(batch), batch).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PlanError) as error:
        adamw(compiled.parameters()).step()
    after = [p.detach() for p in model.parameters()]
    return str(error.value), all(map(torch.equal, before, after))


def test_a_file_that_cannot_serve_ends_the_first_step_on_every_rank(
    ranks: Pools, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    for content in (None, "{", plan_for(PARAMETERS).to_json()):
        if content is not None:
            path.write_text(content)
        (first, kept), (second, also_kept) = ranks(2).run(refused_job, str(path))
        assert first == second
        assert str(path) in first
        assert kept
        assert also_kept


def two_optimizers_job(rank: int, world_size: int, path: str) -> list[str]:
    """The plans of a model whose halves belong to two optimizers."""
    case = ZOO["mlp"]
    model: Any = case.model()
    options = {"lowering": "eager", "plan": path}
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    optimizers = [adamw(model.up.parameters()), adamw([*model.down.parameters(), model.scale])]
    for step in range(2):
        batch = case.batch(step, ROWS * world_size).chunk(world_size)[rank]
        case.loss(compiled(batch), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [arena.plan.to_json() for arena in REGISTRY._by_root[model].arenas]


def test_only_the_first_plan_of_a_model_is_replayed(ranks: Pools, tmp_path: Path) -> None:
    up: nn.Module = ZOO["mlp"].model().get_submodule("up")
    plan = plan_for([spec(f"up.{n}", p.numel(), "float64") for n, p in up.named_parameters()])
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    one, two = ranks(2).run(two_optimizers_job, str(path))
    assert one == two
    first, second = map(OverlapPlan.from_json, one)
    assert first == plan
    assert {s.name for s in second.layout.parameters} == {"down.weight", "down.bias", "scale"}
    assert json.loads(one[1])["name"] == "bucket-1048576b"
