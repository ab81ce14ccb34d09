"""What is kept for later runs: the folder, what tells runs apart, and a second run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxcomm.analysis.costs import LinkCosts
from fxcomm.runtime.disk_cache import DiskCache, fingerprint
from fxcomm.runtime.tuned_model import Tuning
from fxcomm.tuned import Tuned
from tests.oracle import Trained, assert_equal_training, train_alone
from tests.ranks import Ranks
from tests.test_tuning import tuned_job

Pools = Callable[[int], Ranks]


def test_what_is_put_is_found(tmp_path: Path) -> None:
    cache = DiskCache.of({"FXCOMM_CACHE": str(tmp_path)})
    assert cache.get("plan", "a") is None
    cache.put("plan", "a", "one")
    cache.put("plan", "b", "two")
    cache.put("plan", "a", "three")
    assert (cache.get("plan", "a"), cache.get("plan", "b")) == ("three", "two")
    assert cache.get("link", "a") is None
    assert len(list(tmp_path.iterdir())) == 2, "nothing half-written is left"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"FXCOMM_CACHE": "/there", "HOME": "/home/u"}, "/there"),
        ({"FXCOMM_CACHE": "", "HOME": "/home/u"}, None),
        ({"HOME": "/home/u"}, "/home/u/.cache/fxcomm"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/home/u"}, "/c/fxcomm"),
        ({}, None),
    ],
)
def test_the_folder_is_where_users_expect_it(
    environment: dict[str, str], folder: str | None
) -> None:
    assert DiskCache.of(environment).folder == (None if folder is None else Path(folder))


def test_a_folder_that_cannot_be_used_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = DiskCache.of({"FXCOMM_CACHE": str(tmp_path / "file")})
    cache.put("plan", "a", "one")
    assert cache.get("plan", "a") is None
    DiskCache(None).put("plan", "a", "one")
    assert DiskCache(None).get("plan", "a") is None


@given(st.lists(st.text()), st.lists(st.text()))
def test_fingerprints_differ_with_any_part(ours: list[str], theirs: list[str]) -> None:
    assert (fingerprint(*ours) == fingerprint(*theirs)) == (ours == theirs)
    assert fingerprint(*ours).isalnum()


def second_run_job(
    rank: int, world_size: int, folder: str, text: str | None
) -> list[tuple[Trained, Tuned | None]]:
    """Trains twice; ``text`` is put into every file of the folder in between. The second time
    nothing may be measured, unless that has spoiled it."""
    os.environ["FXCOMM_CACHE"] = folder if rank == 0 else ""
    options = {"lowering": "eager"}

    def run() -> tuple[Trained, Tuned | None]:
        trained, outcome, parked, now = tuned_job(rank, world_size, "mlp", options, 0.0)
        assert parked == 0
        assert outcome is not None
        assert outcome.plan.name == now
        return trained, outcome

    def measured(self: Any) -> LinkCosts:
        raise AssertionError("the second run measures")

    measure = Tuning._step_ended
    try:
        first = run()
        if text is None:
            Tuning._step_ended = measured  # type: ignore[assignment,method-assign]
        elif rank == 0:
            for file in Path(folder).glob("plan-*"):
                file.write_text(text)
        return [first, run()]
    finally:
        Tuning._step_ended = measure  # type: ignore[method-assign]
        os.environ["FXCOMM_CACHE"] = ""


def test_a_second_run_takes_the_first_ones_plan(ranks: Pools, tmp_path: Path) -> None:
    expected = train_alone(2, "mlp", steps=50)
    for (_, first), (again, second) in ranks(2).run(second_run_job, str(tmp_path), None):
        assert second.plan == first.plan
        assert "earlier run" in second.why
        assert_equal_training(again, expected, 1e-9)


def test_a_file_that_is_no_plan_is_passed_over(ranks: Pools, tmp_path: Path) -> None:
    for (_, first), (_, second) in ranks(2).run(second_run_job, str(tmp_path), "{torn"):
        assert "earlier run" not in second.why
        assert set(second.measured) == set(first.measured)
