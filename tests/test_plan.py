"""The overlap plan: where gradients are complete, the baseline, JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.layout import ParameterSpec, build_layout
from fxcomm.plan import (
    BASELINE_BUCKET_BYTES,
    GraphExecution,
    ObservedBackward,
    OverlapPlan,
    baseline_plan,
    launch_runs,
    order_of_use,
)

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}


def spec(name: str, numel: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, numel, dtype, ITEMSIZES[dtype], "cpu")


def observed(*executions: tuple[int, tuple[int, ...]], eager: tuple[int, ...] = ()) -> Any:
    return ObservedBackward(tuple(GraphExecution(*e) for e in executions), frozenset(eager))


# --- where gradients are complete ---


@pytest.mark.parametrize(
    ("count", "seen", "runs", "rest"),
    [
        pytest.param(3, observed((0, (2, 0, 1))), [[2, 0, 1]], [], id="one graph"),
        pytest.param(
            4, observed((1, (3, 2)), (0, (1, 0))), [[3, 2], [1, 0]], [], id="runs keep their order"
        ),
        pytest.param(3, observed((0, (2, 0))), [[2, 0]], [1], id="unused"),
        pytest.param(3, observed((0, (2, 1, 0)), eager=(1,)), [[2, 0]], [1], id="also eager"),
        pytest.param(
            3, observed((0, (2, 1)), (1, (1, 0))), [[2], [0]], [1], id="shared by two graphs"
        ),
        pytest.param(3, observed((0, (2, 1)), (0, (2, 1))), [], [2, 1, 0], id="a graph run twice"),
        pytest.param(
            4,
            observed((0, (3, 2)), (1, (1, 0)), (0, (3, 2))),
            [[1, 0]],
            [3, 2],
            id="a graph run twice beside another",
        ),
        pytest.param(2, observed((0, ()), (1, (1,))), [[1]], [0], id="a graph without parameters"),
        pytest.param(3, observed(), [], [2, 1, 0], id="no graph at all"),
        pytest.param(0, observed(), [], [], id="no parameters"),
    ],
)
def test_launch_runs(
    count: int, seen: ObservedBackward, runs: list[list[int]], rest: list[int]
) -> None:
    assert launch_runs(count, seen) == (runs, rest)


@dataclass(frozen=True)
class Situation:
    """Arguments of ``baseline_plan``."""

    parameters: tuple[ParameterSpec, ...]
    seen: ObservedBackward
    world_size: int
    bucket_bytes: int | None
    split: bool

    def plan(self) -> OverlapPlan:
        return baseline_plan(
            self.parameters,
            self.seen,
            world_size=self.world_size,
            bucket_bytes=self.bucket_bytes,
            in_flight_bytes=None,
            split=self.split,
            commshift=True,
        )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    count = draw(st.integers(0, 12))
    numels = st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, 64, 65, 4096]))
    parameters = tuple(
        spec(f"p{i}", draw(numels), draw(st.sampled_from(sorted(ITEMSIZES)))) for i in range(count)
    )
    members = st.lists(st.integers(0, max(count - 1, 0)), unique=True, max_size=count)
    executions = draw(st.lists(st.tuples(st.integers(0, 3), members), max_size=4))
    return Situation(
        parameters,
        ObservedBackward(
            tuple(GraphExecution(g, tuple(ps if count else ())) for g, ps in executions),
            frozenset(draw(members) if count else ()),
        ),
        draw(st.integers(1, 9)),
        draw(st.one_of(st.none(), st.integers(1, 40_000))),
        draw(st.booleans()),
    )


on_many_situations = settings(deadline=None, max_examples=150)


@on_many_situations
@given(situations())
def test_launch_runs_partition_the_parameters(case: Situation) -> None:
    count = len(case.parameters)
    runs, rest = launch_runs(count, case.seen)
    assert sorted([p for run in runs for p in run] + rest) == list(range(count))
    assert all(runs)
    assert rest == sorted(rest, reverse=True)
    contributions = Counter(p for e in case.seen.executions for p in e.parameters)
    for run in runs:
        assert any(
            [p for p in execution.parameters if p in run] == run
            for execution in case.seen.executions
        )
        assert all(contributions[p] == 1 and p not in case.seen.eager for p in run)


@on_many_situations
@given(situations())
def test_baseline_buckets_belong_to_one_graph_run(case: Situation) -> None:
    plan = case.plan()
    runs, rest = launch_runs(len(case.parameters), case.seen)
    # The number of a parameter's run; the rest comes last.
    run_of = {f"p{p}": r for r, run in enumerate([*runs, rest]) for p in run}
    names = [spec.name for spec in plan.layout.parameters]
    assert names == [f"p{p}" for run in [*runs, rest] for p in run]
    places = []
    for bucket, in_graph in zip(plan.layout.buckets, plan.in_graph, strict=True):
        members = {run_of[names[segment.parameter]] for segment in bucket.segments}
        assert len(members) == 1
        places += members
        assert in_graph == (members != {len(runs)})
    assert places == sorted(places), "buckets are not in the order of the graph runs"


@on_many_situations
@given(situations())
def test_baseline_cuts_only_where_it_may(case: Situation) -> None:
    layout = replace(case, split=False).plan().layout
    assert all(
        len(layout.parameter_segments(p)) == (spec.numel > 0)
        for p, spec in enumerate(layout.parameters)
    )


def test_baseline_sizes_and_name() -> None:
    parameters = [spec("a", BASELINE_BUCKET_BYTES // 2), spec("b", 64)]

    def plan(bucket_bytes: int | None, split: bool) -> OverlapPlan:
        return baseline_plan(
            parameters,
            observed((0, (1, 0))),
            world_size=2,
            bucket_bytes=bucket_bytes,
            in_flight_bytes=77,
            split=split,
            commshift=False,
        )

    assert plan(None, True).name == "bucket-25mb"
    assert [b.nbytes for b in plan(None, True).layout.buckets] == [
        BASELINE_BUCKET_BYTES,
        BASELINE_BUCKET_BYTES + 256,
    ]
    assert len(plan(None, False).layout.buckets) == 2
    assert len(plan(1 << 20, True).layout.buckets) == 50
    assert plan(1 << 20, True).name != "bucket-25mb"
    assert plan(None, True).in_flight_bytes == 77


# --- the order of gathers ---


def test_order_of_use() -> None:
    """By first use; a bucket counts from the first of its parameters that is used."""
    layout = build_layout(
        [[spec("a", 64)], [spec("b", 64), spec("c", 64)], [spec("d", 64)], [spec("e", 64)]],
        world_size=1,
        bucket_bytes=1 << 20,
        split=True,
    )
    assert order_of_use(layout, [0, 3, 1, 2, 3]) == (0, 2, 1, 3)
    assert order_of_use(layout, [2, 0]) == (1, 0, 3, 2)
    assert order_of_use(layout, []) == (3, 2, 1, 0)


def test_gathers_follow_the_use_of_parameters_not_their_production() -> None:
    """Registration a, b, c; production c, a, b; use b, c, a: three orders, none like another."""
    plan = baseline_plan(
        [spec("a", 64), spec("b", 64), spec("c", 64)],
        observed((0, (2, 0, 1))),
        [1, 2, 0],
        world_size=1,
        bucket_bytes=256,
        in_flight_bytes=None,
        split=True,
        commshift=True,
    )
    names = [plan.layout.parameters[b.segments[0].parameter].name for b in plan.layout.buckets]
    assert names == ["c", "a", "b"]
    assert [names[b] for b in plan.gather_order] == ["b", "c", "a"]


def test_cut_parameters_count_in_each_of_their_buckets() -> None:
    layout = build_layout(
        [[spec("a", 64), spec("large", 1000)]], world_size=1, bucket_bytes=1024, split=True
    )
    order = order_of_use(layout, [1, 0])
    of_large = [b for b, _ in layout.parameter_segments(1)]
    assert len(of_large) > 1
    assert sorted(order[: len(of_large)]) == of_large


# --- JSON ---

LAYOUT = build_layout(
    [[spec("a", 300), spec("b", 5, "float64")], [spec("c", 700), spec("d", 0)]],
    world_size=2,
    bucket_bytes=1024,
)
PLAN = OverlapPlan(
    "test",
    LAYOUT,
    (True, True, True, False, False, False),
    in_flight_bytes=4096,
    gather_order=(5, 3, 4, 0, 2, 1),
    commshift=True,
)
ENTRIES = ["name", "layout", "in_graph", "in_flight_bytes", "gather_order", "commshift"]


def test_the_example_is_a_plan() -> None:
    assert len(PLAN.layout.buckets) == len(PLAN.in_graph)


@on_many_situations
@given(situations(), st.one_of(st.none(), st.integers(1, 1 << 60)))
def test_json_round_trip(case: Situation, limit: int | None) -> None:
    plan = replace(case.plan(), in_flight_bytes=limit)
    again = OverlapPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(PLAN.to_json()[:-1], id="cut off"),
        pytest.param("null", id="null"),
        pytest.param("[]", id="a list"),
        pytest.param("3", id="a number"),
        pytest.param("{}", id="no entries"),
        pytest.param(PLAN.layout.to_json(), id="a layout"),
        pytest.param("[" * 100_000, id="nested too deep"),
        pytest.param(changed(layout=None), id="no layout"),
        pytest.param(changed(layout=PLAN.layout.to_json()), id="layout as text"),
        pytest.param(changed(in_graph=[True]), id="too few launch places"),
        pytest.param(changed(in_graph=[True] * 7), id="too many launch places"),
        pytest.param(changed(in_graph=None), id="no launch places"),
        pytest.param(changed(in_graph="falsy!"), id="launch places as text"),
        pytest.param(changed(in_graph=["false"] * 6), id="texts as launch places"),
        pytest.param(changed(in_graph=[1, 1, 1, 0, 0, 0]), id="numbers as launch places"),
        pytest.param(changed(in_flight_bytes="4096"), id="limit as text"),
        pytest.param(changed(in_flight_bytes=4096.5), id="limit not whole"),
        pytest.param(changed(in_flight_bytes=True), id="limit true"),
        pytest.param(changed(in_flight_bytes=-1), id="limit negative"),
        pytest.param(changed(in_flight_bytes=float("nan")), id="limit nan"),
        pytest.param(changed(in_flight_bytes=float("inf")), id="limit infinite"),
        pytest.param(changed(gather_order=[0, 1, 2, 3, 4]), id="a bucket is never gathered"),
        pytest.param(changed(gather_order=[0, 1, 2, 3, 4, 4]), id="a bucket is gathered twice"),
        pytest.param(changed(gather_order=[0, True, 2, 3, 4, 5]), id="true as a bucket"),
        pytest.param(changed(gather_order=None), id="no gather order"),
        pytest.param(changed(commshift=1), id="one as true"),
        pytest.param(changed(name=None), id="no name"),
        pytest.param(changed(surprise=1), id="unknown entry"),
    ],
)
def test_malformed_plans_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind of error is the promise
        OverlapPlan.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@on_many_situations
@given(st.sampled_from(ENTRIES), json_values)
def test_another_value_is_refused_or_kept(entry: str, value: object) -> None:
    """Nothing is read as something else than what was written."""
    text = changed(**{entry: value})
    try:
        plan = OverlapPlan.from_json(text)
    except ValueError:
        return
    assert plan.to_json() == json.dumps(json.loads(text), sort_keys=True)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ENTRIES))
def test_a_missing_entry_is_named(entry: str) -> None:
    fields = json.loads(PLAN.to_json())
    del fields[entry]
    with pytest.raises(ValueError, match=entry):
        OverlapPlan.from_json(json.dumps(fields))
