"""The account of a step: true to the simulation, and in words that name what limits it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from fxcomm.analysis.account import account_of
from fxcomm.analysis.baselines import NAMES
from fxcomm.analysis.costs import LinkCurve, Schedule, StepProblem
from fxcomm.analysis.simulate import simulate, step_seconds
from tests.test_simulate import every, problem_of, small_cases, small_problems


@settings(max_examples=100)
@given(small_cases())
def test_tells_what_the_simulation_found(case: tuple[StepProblem, Schedule]) -> None:
    problem, schedule = case
    account = account_of("plan", problem, schedule)
    assert account.step == simulate(problem, schedule)
    assert set(account.baselines) == set(NAMES)
    assert [w.seconds for w in account.waits] == sorted(w.seconds for w in account.waits)[::-1]
    assert sum(w.seconds for w in account.waits) <= account.step.exposed + 1e-9
    longest = max((*account.step.exposed_reduce, *account.step.exposed_gather))
    if longest > 0.005 * account.step.seconds:
        assert account.waits[0].seconds >= longest
    seconds = [change.seconds for change in account.what_if]
    assert seconds == sorted(seconds)
    assert all(s < account.step.seconds for s in seconds)


@settings(max_examples=100)
@given(small_problems())
def test_problems_survive_json(problem: StepProblem) -> None:
    assert StepProblem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tensors": [[1]]}', '{"tensors": 3}', "null"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # json's own, for what is no JSON
        StepProblem.from_json(text)


def test_says_why_the_embedding_cannot_be_hidden() -> None:
    problem = problem_of([8.0], [0.0], sizes=[2])
    account = account_of("plan", problem, every(problem))
    kinds = {(wait.kind, wait.bucket): wait for wait in account.waits}
    assert "ready 0.0 ms before the backward ends" in kinds["reduce", 0].reason
    assert "needed 0.0 ms into the next forward" in kinds["gather", 0].reason
    assert "4000.0 ms in which compute stands still" in account.limit
    assert account.what_if[0].change == "a link twice as fast"
    assert account.what_if[0].seconds == pytest.approx(account.step.seconds - 2)


def test_what_costs_nothing_helps_nobody() -> None:
    problem = problem_of([2.0, 8.0], [4.0, math.inf], reduce=LinkCurve(((0.0, 0.0),)))
    free = replace(problem, gather=LinkCurve(((0.0, 0.0),)))
    account = account_of("plan", free, every(free))
    assert account.waits == account.what_if == ()
    assert account.step.seconds == step_seconds(free, every(free)) == 12


def test_the_norm_is_told() -> None:
    problem = problem_of([2.0, 8.0], [0.0, 2.0], norm=1.0)
    account = account_of("plan", problem, every(problem))
    assert any(wait.kind == "norm" and wait.seconds == 1 for wait in account.waits)
    assert "no clipping by norm" in [change.change for change in account.what_if]
