"""The analysis of a real step: a GPT of 24 layers, captured and lowered by fxcomm itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from fxcomm.analysis.dependencies import (
    Launch,
    Wait,
    earliest_launch,
    first_use_in_next_forward,
    gather_order,
    last_read_of_old_value,
    latest_wait,
    slack,
    steady_state_bound,
)
from fxcomm.analysis.program import Program
from fxcomm.analysis.program import Wait as ProgramWait
from fxcomm.analysis.step_graph import PhaseKind, Role, StepGraph
from fxcomm.analysis.verify import verify
from fxcomm.plan import OverlapPlan
from tests.captured_gpt import capture_gpt
from tests.test_fake_ranks import AsFakeRank, as_fake_rank  # noqa: F401 - a fixture

WORLD = 4
LAYERS = 24
ROUNDING = 1e-12  # of sums of seconds


@dataclass(frozen=True)
class Analysed:
    """The step graph, the programs and the plan."""

    step: StepGraph
    programs: list[Program]
    plan: OverlapPlan
    nodes: int

    @property
    def buckets(self) -> range:
        return range(len(self.plan.layout.buckets))

    def members(self, bucket: int) -> set[str]:
        layout = self.plan.layout
        return {layout.parameters[s.parameter].name for s in layout.buckets[bucket].segments}

    def kinds(self, names: tuple[str, ...]) -> set[PhaseKind]:
        return {self.step.operations[name].phase.kind for name in names}


def analysing_job(rank: int, world_size: int) -> tuple[str, list[Program], str, int]:
    del rank, world_size
    captured = capture_gpt(LAYERS)
    plan = captured.arena.plan.to_json()
    return captured.step_graph().to_json(), captured.programs(), plan, captured.node_count


@pytest.fixture(scope="module")
def analysed(as_fake_rank: AsFakeRank) -> Analysed:  # noqa: F811
    step, programs, plan, nodes = as_fake_rank(1, WORLD, analysing_job)
    return Analysed(StepGraph.from_json(step), programs, OverlapPlan.from_json(plan), nodes)


def test_it_is_a_deep_step_in_many_buckets(analysed: Analysed) -> None:
    assert analysed.nodes > 50 * LAYERS
    assert len(analysed.buckets) >= LAYERS
    assert all(analysed.plan.in_graph)


def test_each_gather_is_waited_for_in_the_next_forward(analysed: Analysed) -> None:
    step = analysed.step
    for bucket in analysed.buckets:
        wait: Wait = latest_wait(step, bucket, Role.GATHER)
        assert wait.carried == 1
        assert analysed.kinds(wait.consumers) == {PhaseKind.FORWARD}
        for name in wait.consumers:
            assert step.operations[name].reads & analysed.members(bucket)
        assert -ROUNDING <= wait.seconds <= step.seconds
    waits = [latest_wait(step, b, Role.GATHER).seconds for b in analysed.plan.gather_order]
    assert waits == sorted(waits), "gathers start in the order in which they are needed"
    assert max(waits) > step.seconds / 10, "the last ones have much of a forward to hide behind"


def test_gathers_are_in_the_order_that_the_analysis_finds(analysed: Analysed) -> None:
    """The plan has it from the runtime, which saw forwards run."""
    assert gather_order(analysed.step) == analysed.plan.gather_order


def test_each_reduction_starts_in_the_backward_and_is_used_in_the_same_step(
    analysed: Analysed,
) -> None:
    starts = []
    for bucket in analysed.buckets:
        launch: Launch = earliest_launch(analysed.step, bucket, Role.REDUCE)
        contributions = [n for n in launch.after if not n.startswith("reduce/")]
        assert analysed.kinds(tuple(contributions)) <= {PhaseKind.BACKWARD}
        starts.append(launch.seconds)
        wait = latest_wait(analysed.step, bucket, Role.REDUCE)
        assert (wait.consumers, wait.carried) == ((f"update/{bucket}",), 0)
    assert starts == sorted(starts)
    assert len(set(starts)) == len(starts), "no two become complete at once"


def test_every_parameter_is_free_between_two_steps(analysed: Analysed) -> None:
    step = analysed.step
    for bucket in analysed.buckets:
        update = step.by_bucket[bucket, Role.UPDATE]
        for parameter in analysed.members(bucket):
            (last,) = last_read_of_old_value(step, parameter)
            (first,) = first_use_in_next_forward(step, parameter)
            assert step.depends_on(update, last)
            assert analysed.kinds((first,)) == {PhaseKind.FORWARD}
            gather = step.by_bucket[bucket, Role.GATHER]
            assert any(
                edge.source == gather and edge.target == first and edge.dependency.carried == 1
                for edge in step.carried_edges
            )


def test_no_collective_has_to_start_before_it_can(analysed: Analysed) -> None:
    room = slack(analysed.step)
    assert len(room) == 2 * len(analysed.buckets)
    assert min(room.values()) >= -ROUNDING
    assert max(room.values()) > 0


def test_the_steady_state_is_bounded_by_the_busiest_stream_or_a_cycle(analysed: Analysed) -> None:
    found = steady_state_bound(analysed.step)
    assert found.seconds == max(found.cycle_seconds, *found.busy.values())
    assert 0 < found.seconds <= analysed.step.seconds


def test_the_lowered_graphs_break_no_rule(analysed: Analysed) -> None:
    limit = analysed.plan.in_flight_bytes
    assert verify(analysed.programs, in_flight_bytes=limit) == ()
    _, program = analysed.programs
    # And it is no empty claim: without the forward's waits it breaks one.
    kept = tuple(a for a in program.actions if not (isinstance(a, ProgramWait) and a.parameter))
    assert {v.rule for v in verify([replace(program, actions=kept)])} >= {2, 3}
