"""Training on ranks equals training in one process: every stage, bucket size and kind of model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.oracle import assert_equal_training, train_alone, train_ranks
from tests.ranks import Ranks
from tests.test_reads import withheld_training_job
from tests.zoo import ZOO

Pools = Callable[[int], Ranks]

# "One parameter": the bytes of TiedGPT's token embedding in float64, so that it fills a bucket.
BUCKETS = {
    "tiny": 0.0005,
    "default": None,
    "huge": 1000.0,
    "one parameter": 23 * 16 * 8 / 2**20,
}
STAGES = ("zero2", "zero1", "ddp")


# Every pair of stage, model and bucket size at 2 ranks; a part of that at 3 and 4, which are slow
# on two cores.
COMBINATIONS = [
    (world_size, stage, case, bucket)
    for world_size in (2, 3, 4)
    for s, stage in enumerate(STAGES)
    for c, case in enumerate(ZOO)
    for b, bucket in enumerate(BUCKETS)
    if (s + c + b + world_size) % (2 if world_size == 2 else 6) == 0
]


@pytest.mark.parametrize(("world_size", "stage", "case", "bucket"), COMBINATIONS)
def test_equals_one_process(
    ranks: Pools, world_size: int, stage: str, case: str, bucket: str
) -> None:
    options: dict[str, object] = {"stage": stage, "lowering": "eager"}
    if BUCKETS[bucket] is not None:
        options["bucket_mb"] = BUCKETS[bucket]
    expected = train_alone(world_size, case)
    for trained in ranks(world_size).run(train_ranks, case, options):
        assert_equal_training(trained, expected)


@pytest.mark.parametrize("commshift", [True, False])
@pytest.mark.parametrize("buckets_in_flight", [1, 2, 1000])
@pytest.mark.parametrize("bucket_kb", [1, 3, 1000])
def test_overlap_changes_nothing(
    ranks: Pools, commshift: bool, buckets_in_flight: int, bucket_kb: int
) -> None:
    """Gathers in and beyond the step, as late as they may come; room for few or many buckets;
    buckets from a fraction of a parameter (1 KB is two alignment units) to all of them."""
    options = {
        "lowering": "eager",
        "commshift": commshift,
        "bucket_mb": bucket_kb / 1024,
        "in_flight_mb": buckets_in_flight * bucket_kb / 1024,
    }
    expected = train_alone(2, "mlp")
    for trained in ranks(2).run(withheld_training_job, "mlp", options):
        assert_equal_training(trained, expected)
