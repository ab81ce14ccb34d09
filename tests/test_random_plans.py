"""Random plans: what the runtime accepts trains like one process, the rest is refused unrun."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fxcomm.errors import FxcommError
from fxcomm.layout import ALIGNMENT, Bucket, ParameterSpec, Segment, ShardLayout
from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY
from fxcomm.runtime.model import ManagedModel
from tests.oracle import Trained, adamw, assert_equal_training, train_alone, train_compiled
from tests.ranks import Ranks
from tests.test_reads import withheld_gathers
from tests.zoo import ZOO

Pools = Callable[[int], Ranks]

# --- the generator ---


def random_plan(
    seed: int, parameters: Sequence[ParameterSpec], *, world_size: int, split: bool = True
) -> OverlapPlan:
    """Any plan for ``parameters``: order, places, bucket edges, launches, limit, gathers.

    Without ``split`` no parameter is cut.
    """
    rng = np.random.default_rng(seed)
    layout = _random_layout(rng, parameters, world_size, split)
    count = len(layout.buckets)
    largest = max(bucket.nbytes for bucket in layout.buckets)
    limits = [1, largest, 2 * largest, count * largest, None]
    return OverlapPlan(
        name=f"random {seed}",
        layout=layout,
        in_graph=_random_launches(rng, count),
        in_flight_bytes=limits[rng.integers(len(limits))],
        gather_order=tuple(rng.permutation(count).tolist()),
        commshift=bool(rng.integers(2)),
    )


def _random_launches(rng: np.random.Generator, count: int) -> tuple[bool, ...]:
    """All inside the graphs, the first few of them, or any."""
    first = [count, rng.integers(count + 1), 0][rng.choice(3, p=[0.5, 0.25, 0.25])]
    return tuple(bool(b < first or (not first and rng.integers(2))) for b in range(count))


# Alignment units of a memory that may be cut one by one; more take long and show nothing more.
_FINE_UNITS = 16


def _random_layout(
    rng: np.random.Generator, parameters: Sequence[ParameterSpec], world_size: int, split: bool
) -> ShardLayout:
    ordered = tuple(parameters[i] for i in rng.permutation(len(parameters)))
    density = rng.choice([0.02, 0.2, 0.6, 1.0])
    fine = rng.random()  # around which part of a memory edges are dense
    unit = math.lcm(ALIGNMENT, 8 * world_size)
    buckets: list[Bucket] = []
    for memory in dict.fromkeys(spec.memory for spec in ordered):
        places = _random_places(rng, ordered, memory)
        end = max((start + ordered[slot].numel for slot, start in places.items()), default=0)
        edges = [0]
        for edge in range(unit, end, unit):
            cuts = any(s < edge < s + ordered[slot].numel for slot, s in places.items())
            near = abs(edge - fine * end) < _FINE_UNITS * unit / 2
            if rng.random() < (density if near else 0.05) and (split or not cuts):
                edges.append(edge)
        buckets += _buckets_between([*edges, -(-end // unit) * unit], ordered, places)
    buckets.sort(key=lambda bucket: (bucket.segments[-1].parameter, bucket.start))
    return ShardLayout(world_size, ordered, tuple(buckets))


def _random_places(
    rng: np.random.Generator, parameters: Sequence[ParameterSpec], memory: tuple[str, str]
) -> dict[int, int]:
    """Where in a memory its parameters start, now and then after a gap."""
    places, end = {}, 0
    for slot, spec in enumerate(parameters):
        if spec.memory == memory and spec.numel:
            gap = ALIGNMENT * int(rng.integers(1, 4)) if rng.random() < 0.1 else 0
            places[slot] = -(-end // ALIGNMENT) * ALIGNMENT + gap
            end = places[slot] + spec.numel
    return places


def _buckets_between(
    edges: Sequence[int], parameters: Sequence[ParameterSpec], places: dict[int, int]
) -> list[Bucket]:
    """The buckets of one memory; one without elements becomes a part of the next."""
    buckets: list[Bucket] = []
    low = edges[0]
    for high in edges[1:]:
        segments = []
        for slot, start in places.items():
            first, last = max(start, low), min(start + parameters[slot].numel, high)
            if first < last:
                segments.append(Segment(slot, first - start, first - low, last - first))
        if segments:
            like = parameters[segments[0].parameter]
            buckets.append(
                Bucket(like.dtype, like.itemsize, like.device, high - low, low, tuple(segments))
            )
            low = high
    return buckets


MIXED = [
    ParameterSpec("large", 1000, "float32", 4, "cpu"),
    ParameterSpec("odd", 65, "float64", 8, "cpu"),
    ParameterSpec("empty", 0, "bfloat16", 2, "cpu"),
    ParameterSpec("one", 1, "float32", 4, "cpu"),
    ParameterSpec("cut", 640, "float64", 8, "cpu"),
]


def test_random_plans_are_plans_of_every_kind() -> None:
    plans = [random_plan(seed, MIXED, world_size=1 + seed % 5) for seed in range(400)]
    for plan in plans:
        assert OverlapPlan.from_json(plan.to_json()) == plan  # which checks every invariant
    buckets = [(plan, bucket) for plan in plans for bucket in plan.layout.buckets]
    firsts = [
        (bucket, plan.layout.parameters[bucket.segments[0].parameter]) for plan, bucket in buckets
    ]
    assert any(bucket.numel == ALIGNMENT < first.numel for bucket, first in firsts)
    assert any(len(bucket.segments) > 1 for _, bucket in buckets)
    assert any(bucket.segments[0].offset for _, bucket in buckets)
    assert {plan.commshift for plan in plans} == {True, False}
    assert {plan.in_flight_bytes is None for plan in plans} == {True, False}
    assert {all(plan.in_graph) for plan in plans} == {True, False}
    assert len({tuple(s.name for s in plan.layout.parameters) for plan in plans}) > 50
    assert any(plan.gather_order != tuple(sorted(plan.gather_order)) for plan in plans)


def test_without_split_nothing_is_cut() -> None:
    for seed in range(100):
        layout = random_plan(seed, MIXED, world_size=2, split=False).layout
        layout.check()
        assert all(len(layout.parameter_segments(i)) <= 1 for i in range(len(MIXED)))


# --- training by random plans ---

STEPS = 5  # the first has no plan yet, the second begins with nothing in flight
REFUSED = "the overlap plan would compute wrong results or hang; nothing was run"


def _forget_plan(managed: ManagedModel) -> None:
    """Brings a model back to where it has no plan, so that it need not be compiled again."""
    managed.settle()
    managed.finish_gathers()
    if managed.arenas:
        # Groups live as long as their model; one is enough.
        communicator = managed.arenas[0].communicator
        managed.environment = replace(managed.environment, connect=lambda _: communicator)
    managed.arenas.clear()
    for p in managed.parameters:
        p.arena, p.slot, p._home = None, -1, None
        p.parameter.grad = None
    for graph in managed._graphs:
        graph._runs = ()
        graph._variants = {runs: variant for runs, variant in graph._variants.items() if not runs}


def _specs(case_name: str) -> list[ParameterSpec]:
    return [
        ParameterSpec(name, p.numel(), "float64", 8, "cpu")
        for name, p in ZOO[case_name].model().named_parameters()
        if p.requires_grad
    ]


def train_by_plans(
    rank: int, world_size: int, case_name: str, seeds: Sequence[int], stage: str, path: str
) -> list[bool]:
    """Trains one compiled model from its start by each of many plans, a few steps, while gathers
    come as late as they may. Returns which plans were accepted; fails where an accepted one gives
    other results than one process, and where a refused one has changed anything."""
    expected = train_alone(world_size, case_name, steps=STEPS)
    model = ZOO[case_name].model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"lowering": "eager", "stage": stage, "plan": path}
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    accepted = []
    for seed in seeds:
        plan = random_plan(seed, _specs(case_name), world_size=world_size, split=stage != "ddp")
        if rank == 0:
            Path(path).write_text(plan.to_json())
        with withheld_gathers():
            trained = _train_or_refuse(case_name, model, compiled)
        accepted.append(trained is not None)
        if trained is None:
            now = model.state_dict()
            assert all(torch.equal(now[name], value) for name, value in start.items()), seed
        else:
            _assert_equal(trained, expected, plan)
        managed = REGISTRY._by_root[model]
        if trained is not None and stage != "ddp":
            assert managed.arenas[0].plan == plan
        _forget_plan(managed)
        model.load_state_dict(start)
    return accepted


def _train_or_refuse(case_name: str, model: nn.Module, compiled: Any) -> Trained | None:
    try:
        optimizer = adamw(compiled.parameters())
        return train_compiled(ZOO[case_name], model, compiled, optimizer, STEPS)
    except FxcommError as error:
        if REFUSED not in str(error):
            raise
        return None


def _assert_equal(trained: Trained, expected: Trained, plan: OverlapPlan) -> None:
    try:
        assert_equal_training(trained, expected)
    except AssertionError as error:
        raise AssertionError(f"by the plan {plan.to_json()}") from error


PLANS = {"mlp": 70, "gpt": 20, "reused": 40, "partly_used": 40, "broken": 30}


def test_random_plans_train_like_one_process_or_are_refused(ranks: Pools, tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    for number, (case, count) in enumerate(PLANS.items()):
        seeds = range(1000 * number, 1000 * number + count)
        path = str(tmp_path / f"{case}.json")
        one, two = ranks(2).run(train_by_plans, case, seeds, "zero2", path, timeout_s=300.0)
        assert one == two
        counts[case] = sum(one)
    print("plans accepted:", json.dumps(counts), "of", json.dumps(PLANS))
    assert sum(PLANS.values()) == 200
    assert all(counts[case] > count / 2 for case, count in PLANS.items())


def test_random_plans_of_whole_gradients(ranks: Pools, tmp_path: Path) -> None:
    """Stage ddp, where no parameter is cut."""
    for case in ("mlp", "broken"):
        path = str(tmp_path / f"{case}.json")
        one, two = ranks(2).run(train_by_plans, case, range(20), "ddp", path)
        assert one == two
        assert sum(one) > 10
