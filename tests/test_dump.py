"""What ``options={"dump": "dir"}`` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fxcomm.passes.reduce import REDUCE_PASSES
from fxcomm.plan import OverlapPlan
from tests.oracle import train_ranks
from tests.ranks import Ranks


def test_dump_holds_graphs_passes_and_plan(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    directory = tmp_path / "dump"
    options = {"lowering": "eager", "bucket_mb": 0.001, "dump": str(directory)}
    ranks(2).run(train_ranks, "mlp", options, 2)
    plan = OverlapPlan.from_json((directory / "plan-0.json").read_text())
    assert len(plan.layout.buckets) > 1
    for graph_pass in REDUCE_PASSES:
        (path,) = directory.glob(f"*-{graph_pass.name}.txt")
        text = path.read_text()
        assert str(Path(__file__).parents[1]) not in text
    assert "up.weight" in text
    launches = [line for line in text.splitlines() if "# launch bucket" in line]
    assert len(launches) == len(plan.layout.buckets)
    assert json.loads(plan.to_json())


def test_nothing_is_written_otherwise(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2).run(train_ranks, "mlp", {"lowering": "eager"}, 1)
    assert not list(tmp_path.iterdir())
