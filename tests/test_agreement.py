"""Ranks that compare notes: threads over one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.errors import RankMismatchError
from fxcomm.runtime.agreement import Agreement

PLENTY_S = 30.0
DEADLINE_S = 0.4
# What a loaded machine may add to a deadline.
LATE_S = 3.0


def on_ranks(
    world_size: int,
    act: Callable[[Agreement], Any],
    *,
    timeout_s: float = PLENTY_S,
    missing: Collection[int] = (),
    store: dist.Store | None = None,
) -> dict[int, Any]:
    """What ``act`` returns or raises on each rank, by rank, without the ``missing`` ones."""
    shared = store or dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return act(Agreement(shared, rank, world_size, timeout_s))
        except RankMismatchError as error:
            return error

    present = [rank for rank in range(world_size) if rank not in missing]
    with ThreadPoolExecutor(len(present)) as pool:
        return dict(zip(present, pool.map(one, present), strict=True))


def compare(lines: Sequence[Sequence[str]], **how: Any) -> dict[int, Any]:
    return on_ranks(len(lines), lambda a: a.require_equal("the model", lines[a.rank]), **how)


lines_of_text = st.lists(st.text(st.characters(exclude_characters="\n", codec="utf-8")), max_size=5)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), lines_of_text)
def test_equal_lines_pass(world_size: int, lines: list[str]) -> None:
    assert compare([lines] * world_size) == dict.fromkeys(range(world_size))


@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(2, 5), lines_of_text)
def test_any_difference_is_named_on_every_rank(
    data: st.DataObject, world_size: int, lines: list[str]
) -> None:
    different = data.draw(lines_of_text.filter(lambda other: (other or [""]) != (lines or [""])))
    ranks = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=world_size - 1))
    result = compare([different if r in ranks else lines for r in range(world_size)])
    messages = {str(error) for error in result.values() if isinstance(error, RankMismatchError)}
    assert sorted(result) == list(range(world_size))
    assert all(isinstance(error, RankMismatchError) for error in result.values())
    assert len(messages) == 1, "ranks tell different stories"
    # Rank 0 is the reference: if it is the odd one out, another rank differs from it.
    theirs, zeros = (lines, different) if 0 in ranks else (different, lines)
    odd = set(range(world_size)) - ranks if 0 in ranks else ranks
    (message,) = messages
    named = next(r for r in sorted(odd) if f"rank {r} has" in message)
    assert f"rank {named} has {first_unlike(theirs, zeros)}, rank 0 has" in message
    assert f"rank 0 has {first_unlike(zeros, theirs)}." in message
    assert "the model" in message


def first_unlike(mine: Sequence[str], other: Sequence[str]) -> str:
    """The first of my lines that the other has not at its place."""
    mine, other = mine or [""], other or [""]
    place = next(i for i in range(6) if mine[i : i + 1] != other[i : i + 1])
    return mine[place] if place < len(mine) else "nothing more"


def test_the_message_names_rank_place_and_both_values() -> None:
    lines = ["options {}", "parameter 'a' of shape (3,)", "parameter 'b' of shape (4,)"]
    other = [*lines[:1], "parameter 'a' of shape (5,)", *lines[2:]]
    result = compare([lines, lines, other])
    for error in result.values():
        assert str(error).startswith(
            "ranks disagree on the model: rank 2 has parameter 'a' of shape (5,), "
            "rank 0 has parameter 'a' of shape (3,)."
        )


def test_long_texts_are_compared_whole() -> None:
    lines = [f"parameter {i}" for i in range(20_000)]
    assert set(compare([lines, lines]).values()) == {None}
    error = compare([lines, [*lines[:-1], "parameter of mine"]])[0]
    assert "rank 1 has parameter of mine, rank 0 has parameter 19999" in str(error)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank_is_named_within_the_deadline(missing: int) -> None:
    start = time.monotonic()
    result = compare([["a"]] * 3, timeout_s=DEADLINE_S, missing=[missing])
    assert time.monotonic() - start < 2 * DEADLINE_S + LATE_S
    assert len(result) == 2
    for error in result.values():
        assert isinstance(error, RankMismatchError)
        assert f"for rank {missing} to agree on the model" in str(error)
        assert "start_timeout_s" in str(error)


def test_several_missing_ranks_cost_one_deadline() -> None:
    start = time.monotonic()
    result = compare([["a"]] * 8, timeout_s=DEADLINE_S, missing=[2, 4, 5, 6, 7])
    assert time.monotonic() - start < 2 * DEADLINE_S + LATE_S
    assert len({str(error) for error in result.values()}) == 1
    assert "for rank 2 to agree" in str(result[0])


def test_a_rank_may_be_late_within_the_deadline() -> None:
    def act(agreement: Agreement) -> None:
        time.sleep(0.2 * agreement.rank)
        agreement.require_equal("the model", ["a"])

    assert on_ranks(4, act) == dict.fromkeys(range(4))


def test_late_ranks_do_not_hide_the_missing_one() -> None:
    """Each late rank is within the deadline of the one before, and the last never comes: all tell
    the same story."""
    timeout_s = 1.0

    def act(agreement: Agreement) -> None:
        time.sleep({1: 0.8, 2: 1.6}.get(agreement.rank, 0.0) * timeout_s)
        agreement.require_equal("the model", ["a"])

    result = on_ranks(5, act, timeout_s=timeout_s, missing=[3])
    stories = {rank: str(error) for rank, error in result.items()}
    assert len(set(stories.values())) == 1, stories


def test_a_difference_is_told_though_another_rank_is_missing() -> None:
    start = time.monotonic()
    result = compare([["a"], ["b"], ["a"]], timeout_s=DEADLINE_S, missing=[2])
    assert time.monotonic() - start < 2 * DEADLINE_S + LATE_S
    for error in result.values():
        assert "rank 1 has b, rank 0 has a" in str(error)


# --- rank 0's value ---


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.text(st.characters(codec="utf-8")))
def test_from_rank_zero(world_size: int, text: str) -> None:
    def act(agreement: Agreement) -> str:
        return agreement.from_rank_zero("plan", text if agreement.rank == 0 else "not this")

    assert set(on_ranks(world_size, act).values()) == {text}


def test_rank_zero_waits_for_nobody() -> None:
    result = on_ranks(3, lambda a: a.from_rank_zero("plan", "p"), missing=[1, 2])
    assert result == {0: "p"}


def test_a_missing_rank_zero_is_named() -> None:
    start = time.monotonic()
    result = on_ranks(
        3, lambda a: a.from_rank_zero("model1/7/the plan", "p"), timeout_s=DEADLINE_S, missing=[0]
    )
    assert time.monotonic() - start < 2 * DEADLINE_S + LATE_S
    for rank in (1, 2):
        assert f"rank {rank} waited" in str(result[rank])
        assert "for rank 0 to agree on the plan" in str(result[rank])


# --- topics ---


def test_topics_are_apart() -> None:
    """The same words under different prefixes do not meet, in whatever order ranks get there."""

    def act(agreement: Agreement) -> list[str]:
        agreement.require_equal("model1/1/the model", ["a"])
        agreement.require_equal("model2/1/the model", ["b"])
        first = agreement.from_rank_zero("model1/2/the plan", f"first of {agreement.rank}")
        second = agreement.from_rank_zero("model2/2/the plan", f"second of {agreement.rank}")
        return [first, second]

    result = on_ranks(3, act)
    assert all(texts == ["first of 0", "second of 0"] for texts in result.values())


def test_a_refused_topic_does_not_spoil_the_next() -> None:
    store = dist.HashStore()
    lines = [["a"], ["a"], ["b"]]
    refused = compare(lines, store=store)
    assert all(isinstance(error, RankMismatchError) for error in refused.values())
    agreed = on_ranks(3, lambda a: a.require_equal("model1/2/again", ["c"]), store=store)
    assert agreed == dict.fromkeys(range(3))


def test_one_rank_agrees_with_itself() -> None:
    alone = Agreement(dist.HashStore(), 0, 1, DEADLINE_S)
    alone.require_equal("the model", ["a"])
    assert alone.from_rank_zero("the plan", "p") == "p"
