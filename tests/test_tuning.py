"""Tuning: what measured steps say, what is tried and kept, and on real ranks that nothing changes
but the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxcomm
from fxcomm.analysis.costs import LinkCosts, LinkCurve, Schedule, StepProblem, TensorTimes
from fxcomm.analysis.measured import Event, EventKind, MeasuredStep
from fxcomm.analysis.measured_problem import problem_of
from fxcomm.analysis.schedules import named_plan, planned, schedule_of
from fxcomm.analysis.search import Limits, search
from fxcomm.analysis.simulate import SimulatedStep, simulate, step_seconds
from fxcomm.analysis.timeline import Span
from fxcomm.commands.explain import explain, read_tuned
from fxcomm.layout import ParameterSpec
from fxcomm.options import PLANS
from fxcomm.plan import GraphExecution, ObservedBackward, OverlapPlan, baseline_plan
from fxcomm.registry import REGISTRY
from fxcomm.runtime import tuning
from fxcomm.runtime.tuned_model import Tuning
from fxcomm.runtime.tuning import _MEASURED, _WARM_UP, Searched, tune
from fxcomm.tuned import Tuned
from tests.oracle import Trained, adamw, assert_equal_training, train_alone, train_compiled
from tests.ranks import Ranks
from tests.zoo import ZOO

Pools = Callable[[int], Ranks]

# --- simulated machines that can be measured ---


def plan_for(
    sizes: list[int], bucket_bytes: int, commshift: bool = True, in_backward: bool = False
) -> OverlapPlan:
    specs = [ParameterSpec(f"p{i}", n, "float32", 4, "cpu") for i, n in enumerate(sizes)]
    everything = tuple(range(len(sizes)))
    return baseline_plan(
        specs,
        ObservedBackward((GraphExecution(0, everything),)),
        list(reversed(everything)),
        world_size=2,
        bucket_bytes=bucket_bytes,
        in_flight_bytes=None,
        split=True,
        commshift=commshift,
        in_backward=in_backward,
    )


@st.composite
def problems(draw: st.DrawFn, contention: float = 1.0) -> StepProblem:
    """Steps in which every tensor is used in the forward, in reverse order of production."""
    count = draw(st.integers(2, 8))
    time = st.floats(0.01, 0.95)
    ready = sorted(draw(st.lists(time, min_size=count, max_size=count)))
    needed = sorted(draw(st.lists(time, min_size=count, max_size=count)), reverse=True)
    sizes = [64 * draw(st.integers(1, 40)) for _ in range(count)]
    rate = draw(st.floats(0.1, 5.0)) * 4 * sum(sizes)
    curve = LinkCurve.of_link(draw(st.floats(0.0, 0.05)), rate)
    return StepProblem(
        tensors=tuple(
            TensorTimes(f"p{i}", n, 4, r, 1.0, u)
            for i, (n, r, u) in enumerate(zip(sizes, ready, needed, strict=True))
        ),
        forward=1.0,
        backward=1.0,
        reduce=curve,
        gather=curve,
        between=draw(st.floats(0.0, 0.2)),
        norm=draw(st.none() | st.floats(0.01, 0.2)),
        update_per_byte=draw(st.floats(0.0, 1e-5)),
        contention=contention,
    )


def measured(problem: StepProblem, plan: OverlapPlan) -> MeasuredStep:
    """The simulated step as the runtime would have noted it."""
    step = simulate(problem, schedule_of(plan))
    return MeasuredStep(0.0, step.seconds, tuple(_events(step, problem, plan)))


def _events(step: SimulatedStep, problem: StepProblem, plan: OverlapPlan) -> Iterator[Event]:
    waits = [span for span in step.timeline if span.kind.startswith("wait")]
    (backward,) = (span for span in step.timeline if span.kind == "backward")
    yield Event(EventKind.BACKWARD, None, backward.start, backward.end)
    stands = [s for s in step.timeline if s in waits or s.kind == "update"]
    ready = 0.0
    for number, bucket in enumerate(plan.layout.buckets):
        ready = max(ready, *(problem.tensors[s.parameter].ready for s in bucket.segments))
        launched = _when_computed(ready, stands, backward.start)
        yield Event(EventKind.LAUNCH_REDUCE, number, launched, launched)
    for span in step.timeline:
        if span.kind == "update":
            yield Event(EventKind.UPDATE, span.bucket, span.start, span.end)
            yield Event(EventKind.LAUNCH_GATHER, span.bucket, span.end, span.end)
        elif span in waits:
            yield Event(EventKind(span.kind), span.bucket, span.start, span.end)
    for number, tensor in enumerate(problem.tensors):
        asked = _when_computed(tensor.needed, waits)
        yield Event(EventKind.USE, number, asked, asked)


def _when_computed(work: float, stands: list[Span], begin: float = 0.0) -> float:
    """When a phase that began at ``begin`` has computed for ``work`` seconds."""
    stood = begin
    for span in sorted(stands, key=lambda span: span.start):
        if span.start < begin:
            continue
        if span.start - stood >= work - 1e-9:
            break
        stood += span.end - span.start
    return work + stood


@settings(max_examples=150)
@given(problems(), st.integers(200, 20_000), st.booleans(), st.booleans())
def test_measuring_a_simulated_step_gives_its_problem_back(
    problem: StepProblem, bucket_bytes: int, commshift: bool, in_backward: bool
) -> None:
    early = in_backward and problem.norm is None
    plan = plan_for([t.numel for t in problem.tensors], bucket_bytes, commshift, early)
    steps = [measured(problem, plan)] * 3
    slots = {i: i for i in range(len(problem.tensors))}
    link, everywhere = LinkCosts(problem.reduce, problem.gather), len(plan.layout.buckets)
    reads = {t.name: everywhere for t in problem.tensors if t.last_read}
    found = problem_of(steps, plan, slots, link, reads)
    for ours, theirs in zip(found.tensors, problem.tensors, strict=True):
        assert ours.numel == theirs.numel
        assert ours.needed == pytest.approx(theirs.needed, abs=1e-6)
        assert ours.ready <= theirs.ready + 1e-6 or ours.ready <= problem.backward
    for name in ("forward", "backward", "norm"):
        value = getattr(problem, name)
        assert getattr(found, name) == (None if value is None else pytest.approx(value, abs=1e-6))
    # Of a bucket only the last gradient is seen, and that is all that its launch hangs on.
    again = step_seconds(found, schedule_of(plan))
    assert again == pytest.approx(steps[0].seconds, rel=1e-3, abs=1e-3)


@given(problems(contention=1.5), st.integers(200, 20_000))
def test_contention_is_taken_out_of_measured_compute(
    problem: StepProblem, bucket_bytes: int
) -> None:
    plan = plan_for([t.numel for t in problem.tensors], bucket_bytes)
    step = measured(replace(problem, contention=1.0), plan)
    slots = {i: i for i in range(len(problem.tensors))}
    link = LinkCosts(problem.reduce, problem.gather, 1.5)
    found = problem_of([step], plan, slots, link)
    assert problem.forward / 1.5 - 1e-6 <= found.forward <= problem.forward + 1e-6
    assert step_seconds(found, schedule_of(plan)) >= step.seconds * (1 - 1e-3)


def test_steps_that_are_none_are_refused() -> None:
    plan = plan_for([64, 64], 256)
    link = LinkCosts(LinkCurve.of_link(0, 1), LinkCurve.of_link(0, 1))
    with pytest.raises(ValueError, match="no step was measured"):
        problem_of([], plan, {}, link)
    with pytest.raises(ValueError, match="has a backward"):
        problem_of([MeasuredStep(0, 1, ())], plan, {}, link)
    with pytest.raises(ValueError, match="of 2 buckets, 0 were launched"):
        problem_of([MeasuredStep(0, 9, (Event(EventKind.BACKWARD, None, 1, 2),))], plan, {}, link)


# --- tuning against a machine ---


@dataclass
class Machine:
    """Trains by the simulator. Under the plan that was found, steps take ``surprise`` times as long
    as predicted."""

    problem: StepProblem
    plan: OverlapPlan
    surprise: float = 1.0
    rank: int = 0
    held: float = 2.0
    reads: dict[str, int] = field(default_factory=dict)
    heard: list[str] | None = None  # what rank 0 has said, for other ranks
    complaint: str | None = None  # of another rank
    said: list[str] = field(default_factory=list)
    switches: list[str] = field(default_factory=list)
    forgotten: bool = False

    @property
    def slots(self) -> dict[int, int]:
        return {i: i for i in range(len(self.problem.tensors))}

    def measure_link(self) -> LinkCosts:
        return LinkCosts(self.problem.reduce, self.problem.gather)

    def gather_objects(self, mine: Any) -> list[Any]:
        return [mine, mine] if self.complaint is None else [mine, self.complaint]

    def from_rank_zero(self, topic: str, text: str) -> str:
        if self.heard is not None:
            return self.heard.pop(0)
        self.said.append(text)
        return text

    def switch(self, plan: OverlapPlan) -> None:
        self.plan = plan
        self.switches.append(plan.name)

    def forget_plans(self) -> None:
        self.forgotten = True

    def step(self) -> MeasuredStep:
        step = measured(self.problem, self.plan)
        if self.plan.name == "searched":
            return replace(step, end=step.seconds * self.surprise)
        return step


FINE = Limits(grain=64)


def run_tuning(machine: Machine, limits: Limits = FINE) -> tuple[Tuned, int]:
    steps = 0
    tuned = tune(machine, Searched(limits, budget_s=0.2), lambda _: None)
    next(tuned)
    while True:
        try:
            tuned.send(machine.step())
            steps += 1
            assert steps < 200
        except StopIteration as end:
            return end.value, steps


def slow_link(bucket_bytes: int = 40_000) -> Machine:
    """Bandwidth for just what compute hides; one bucket hides nothing."""
    sizes = [64 * 20] * 8
    curve = LinkCurve.of_link(1e-3, 4 * sum(sizes))
    problem = StepProblem(
        tuple(
            TensorTimes(f"p{i}", n, 4, (i + 1) / 8, 1.0, 0.9 - i / 9) for i, n in enumerate(sizes)
        ),
        *(1.0, 1.0, curve, curve),
    )
    return Machine(problem, plan_for(sizes, bucket_bytes))


def test_what_is_faster_stays() -> None:
    machine = slow_link()
    outcome, _ = run_tuning(machine)
    assert machine.plan is outcome.plan
    assert machine.plan.name == "searched"
    assert outcome.measured["searched"] < 0.9 * outcome.measured["bucket-40000b"]
    assert outcome.predicted["searched"] == pytest.approx(outcome.measured["searched"], rel=1e-3)
    first = "bucket-40000b"
    assert machine.switches == ["searched", first, "searched", first, "searched"]
    assert machine.forgotten


def test_what_disappoints_is_dropped() -> None:
    machine = replace(slow_link(), surprise=2.0)
    outcome, _ = run_tuning(machine)
    assert outcome.plan.name == machine.plan.name == "bucket-40000b"
    assert "dropped" in outcome.why
    assert machine.forgotten


def test_nothing_is_tried_where_nothing_is_to_be_gained() -> None:
    outcome, _ = run_tuning(slow_link())
    again = replace(slow_link(), plan=replace(outcome.plan, name="good"))
    outcome, _ = run_tuning(again)
    assert outcome.plan.name == "good"
    assert not again.switches
    assert "nothing better" in outcome.why


def test_ranks_follow_rank_zero_to_the_step() -> None:
    """A rank whose search would find something else does what rank 0 does, when rank 0 does it."""
    zero = slow_link()
    ours, steps = run_tuning(zero)
    one = replace(slow_link(), rank=1, heard=list(zero.said))
    theirs, steps_of_one = run_tuning(one, Limits(in_flight_bytes=1, grain=0))
    assert ours.plan == theirs.plan
    assert zero.switches == one.switches
    assert steps == steps_of_one


def test_a_rank_without_a_problem_ends_tuning_everywhere() -> None:
    machine = replace(slow_link(), complaint="rank 2 launched nothing")
    outcome, _ = run_tuning(machine)
    assert outcome.why == "not tuned: rank 2 launched nothing"
    assert not machine.switches


def test_a_search_that_fails_leaves_the_first_plan() -> None:
    machine = slow_link()

    def broken(problem: StepProblem) -> Schedule:
        raise ZeroDivisionError("no")

    tuned = tune(machine, broken, lambda _: None)
    next(tuned)
    for _ in range(_WARM_UP + _MEASURED - 1):
        tuned.send(machine.step())
    with pytest.raises(StopIteration) as end:
        tuned.send(machine.step())
    assert "ZeroDivisionError: no" in end.value.value.why
    assert not machine.switches


# --- schedules as plans ---


@settings(max_examples=60)
@given(problems(), st.integers(200, 20_000), st.integers(0, 2**32), st.booleans())
def test_found_schedules_become_plans(
    problem: StepProblem, bucket_bytes: int, seed: int, in_backward: bool
) -> None:
    plan = plan_for([t.numel for t in problem.tensors], bucket_bytes)
    limits = Limits(in_backward=in_backward, grain=64)
    found = search(problem, limits, seed=seed, evaluations=60)
    made, schedule = planned(found.schedule, problem, plan, "searched")
    made.layout.check()
    assert OverlapPlan.from_json(made.to_json()) == made
    assert made.layout.parameters == plan.layout.parameters
    assert schedule_of(made) == schedule
    if len(schedule.buckets) == len(found.schedule.buckets):
        assert made.gather_order == found.schedule.gather_order


def test_other_parameters_are_refused() -> None:
    machine = slow_link()
    schedule = schedule_of(machine.plan)
    with pytest.raises(ValueError, match="not the problem's tensors"):
        planned(schedule, machine.problem, plan_for([64], 100), "x")


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(200, 20_000),
    st.sampled_from(["per-layer", "one-bucket", "no-fusion"]),
    st.sets(st.integers(0, 7)),
    st.integers(0, 8),
)
def test_named_plans(
    sizes: list[int], bucket_bytes: int, name: str, borders: set[int], late: int
) -> None:
    like = plan_for(sizes, bucket_bytes)
    inside = [all(s.parameter < late for s in b.segments) for b in like.layout.buckets]
    like = replace(like, in_graph=tuple(inside), in_flight_bytes=77, commshift=False)
    borders = {b for b in borders if b < len(sizes)}
    plan = named_plan(name, like, borders)
    plan.layout.check()
    assert OverlapPlan.from_json(plan.to_json()) == plan
    assert (plan.name, plan.in_flight_bytes, plan.commshift) == (name, 77, False)
    held = [sorted({s.parameter for s in b.segments}) for b in plan.layout.buckets]
    if name == "no-fusion":
        assert held == [[i] for i in range(len(sizes))]
    else:  # names without a number are all of one layer
        assert len(held) == len({*borders, 0})
        assert all(h[0] in {*borders, 0} for h in held)
    for bucket, parameters in enumerate(held):
        late_ones = [i for i in parameters if i >= late or _begins_in_late(like, i)]
        assert plan.in_graph[bucket] == (not late_ones)
    assert plan.gather_order == tuple(sorted(plan.gather_order, reverse=True))


def _begins_in_late(plan: OverlapPlan, parameter: int) -> bool:
    return any(not plan.in_graph[b] for b, _ in plan.layout.parameter_segments(parameter))


# --- on real ranks ---


def tuned_job(
    rank: int, world_size: int, case_name: str, options: dict[str, Any], clip: float
) -> tuple[Trained, Tuned | None, int, str]:
    """Trains until it is tuned; whatever is found is worth trying."""
    case = ZOO[case_name]
    model = case.model(seed=rank)
    compiled: Any = torch.compile(model, backend="fxcomm", options=options)
    optimizer = adamw(compiled.parameters())
    slow = LinkCurve.of_link(1e-3, 1e6)
    measure, worth = Tuning.measure_link, tuning._WORTH_TRYING
    Tuning.measure_link = lambda _: LinkCosts(slow, slow)  # type: ignore[method-assign]
    tuning._WORTH_TRYING = -1.0
    try:
        trained = train_compiled(case, model, compiled, optimizer, steps=50, clip=clip or None)
    finally:
        Tuning.measure_link, tuning._WORTH_TRYING = measure, worth  # type: ignore[method-assign]
    managed = REGISTRY._by_root[model]
    return trained, fxcomm.tuned(model), len(managed._parked), managed.arenas[0].plan.name


@pytest.mark.parametrize("case", ["gpt", "mlp"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_training_goes_on_while_plans_change(
    ranks: Pools, case: str, clip: float, tmp_path: Path
) -> None:
    options = {"lowering": "eager", "dump": str(tmp_path)}
    results = ranks(2).run(tuned_job, case, options, clip)
    mine, theirs = (replace(outcome, timeline=()) for _, outcome, _, _ in results if outcome)
    assert mine == theirs
    assert read_tuned(tmp_path) == results[0][1]
    assert explain(read_tuned(tmp_path)).data["measured_s"] == mine.measured
    for trained, outcome, parked, now in results:
        assert_equal_training(trained, train_alone(2, case, steps=50, clip=clip or None), 1e-9)
        assert outcome is not None
        assert len(outcome.measured) == 2, outcome.why
        assert all(math.isfinite(s) and s > 0 for s in outcome.measured.values())
        assert re.search(r"takes [\d.]+ times as long as", outcome.why)
        assert now == outcome.plan.name
        assert parked == 0


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("mlp", {"plan": "bucket-25mb"}),
        ("mlp", {"bucket_mb": 0.01}),
        ("mlp", {"stage": "ddp"}),
        ("broken", {}),  # two graphs
        ("partly_used", {}),  # parameters in no graph
    ],
)
def test_what_cannot_or_must_not_be_tuned_is_left(
    ranks: Pools, case: str, options: dict[str, Any]
) -> None:
    options = {"lowering": "eager", **options}
    for trained, outcome, _, _ in ranks(2).run(tuned_job, case, options, 0.0):
        assert_equal_training(trained, train_alone(2, case, steps=50), 1e-9)
        assert outcome is not None
        assert outcome.why.startswith("not tuned")
        assert not outcome.measured


def named_job(
    rank: int, world_size: int, case_name: str, options: dict[str, Any]
) -> tuple[Trained, str, int]:
    trained, outcome, _, name = tuned_job(rank, world_size, case_name, options, 0.0)
    assert outcome is not None
    return trained, name, len(outcome.plan.layout.buckets)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "auto"])
@pytest.mark.parametrize("case", ["gpt", "broken", "reused"])
@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_named_plans_train_like_one_process(ranks: Pools, plan: str, case: str, stage: str) -> None:
    options = {"lowering": "eager", "plan": plan, "stage": stage}
    for trained, name, buckets in ranks(2).run(named_job, case, options):
        assert_equal_training(trained, train_alone(2, case, steps=50), 1e-9)
        if plan != "mg-wfbp" or (stage == "zero2" and case != "broken"):  # which is measured first
            assert name == plan
        if plan == "no-fusion":
            trainable = [p for p in ZOO[case].model().parameters() if p.requires_grad]
            assert buckets == len(trainable)
