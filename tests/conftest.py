"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks, spare_the_collector

# No test may find what an earlier run was tuned to; the ranks that tests start inherit this.
os.environ["FXCOMM_CACHE"] = ""


# On a busy machine the time of an example says nothing about it.
settings.register_profile("fxcomm", deadline=None)
settings.load_profile("fxcomm")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Gloo ranks by world size; the processes live for the whole session."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for pool in pools.values():
        pool.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="every case of the tests on real ranks, not every third",
    )


def pytest_collection_finish() -> None:
    """Spares the collector what was imported, once everything is."""
    spare_the_collector()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` on a machine without one, and, for time, two of three cases of
    each parametrised test on real ranks, unless ``--thorough``."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        on_ranks = "ranks" in getattr(item, "fixturenames", ())
        # Of each three another one, so that no level of a parameter with three is left out.
        thinned = seen[function] % 3 != seen[function] // 3 % 3
        (dropped if on_ranks and thinned else kept).append(item)
        seen[function] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
