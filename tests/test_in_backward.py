"""Updates inside the backward: the same training, earlier; and refused where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcomm
from fxcomm.runtime.gradient import ShardedGradient
from tests.oracle import assert_equal_training, train_alone, train_ranks
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO

Pools = Callable[[int], Ranks]

EARLY: dict[str, Any] = {"update": "in_backward", "bucket_mb": 0.0005, "lowering": "eager"}


@pytest.mark.parametrize("commshift", [True, False])
@pytest.mark.parametrize("in_flight_mb", [0.0005, None])
@pytest.mark.parametrize("case", ["gpt", "mlp", "conv"])
def test_equals_one_process(
    ranks: Pools, case: str, in_flight_mb: float | None, commshift: bool
) -> None:
    options = {**EARLY, "in_flight_mb": in_flight_mb, "commshift": commshift}
    expected = train_alone(2, case)
    for trained in ranks(2).run(train_ranks, case, options):
        assert_equal_training(trained, expected)


def test_equals_one_process_compiled(ranks: Pools) -> None:
    expected = train_alone(2, "gpt")
    for trained in ranks(2).run(train_ranks, "gpt", {**EARLY, "lowering": "inductor"}):
        assert_equal_training(trained, expected)


class Loop:
    """An ordinary training loop on a rank."""

    def __init__(self, rank: int, case: str = "gpt", **options: Any) -> None:
        self.case, self.rank = ZOO[case], rank
        self.model = self.case.model(seed=0)
        self.compiled = torch.compile(self.model, backend="fxcomm", options={**EARLY, **options})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batches = 0

    def backward(self) -> None:
        batch = self.case.batch(self.batches, ROWS * 2).chunk(2)[self.rank]
        self.batches += 1
        self.case.loss(self.compiled(batch), batch).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def applied(self) -> list[bool]:
        """For each parameter, whether the backward has updated it."""
        gradients = [p.grad for p in self.model.parameters()]
        return [isinstance(g, ShardedGradient) and g.applied for g in gradients]


def see_updates(rank: int, world_size: int) -> tuple[list[bool], list[bool], list[bool]]:
    """A job: what the second backward has updated, whether values changed, and what is marked
    after the step."""
    loop = Loop(rank)
    loop.backward()
    loop.step()
    fxcomm.synchronize(loop.model)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.backward()
    applied = loop.applied()
    fxcomm.synchronize(loop.model)
    changed = [
        not torch.equal(p.detach(), b) for p, b in zip(loop.model.parameters(), before, strict=True)
    ]
    loop.optimizer.step()
    return applied, changed, loop.applied()


def test_most_parameters_are_updated_before_the_step(ranks: Pools) -> None:
    for applied, changed, after in ranks(2).run(see_updates):
        assert sum(applied) > len(applied) / 2
        # A parameter that lies in several buckets may be updated in part.
        assert all(c or not a for a, c in zip(applied, changed, strict=True))
        assert not any(after)


def _clip(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def _clip_values(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.1)


def _unscale(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(loop.optimizer)


def _again(loop: Loop) -> None:
    loop.backward()


def try_change(rank: int, world_size: int, change: Callable[[Loop], None]) -> str:
    """A job: what comes of ``change`` between a backward that updates and its step."""
    loop = Loop(rank)
    loop.backward()
    change(loop)  # the first step is an ordinary one
    loop.step()
    loop.backward()
    try:
        change(loop)
    except fxcomm.FxcommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", [_clip, _clip_values, _unscale, _again])
def test_changes_after_the_update_are_refused(ranks: Pools, change: Callable[[Loop], None]) -> None:
    for message in ranks(2).run(try_change, change):
        assert "at_step" in message or "no_sync" in message


def read_norm(rank: int, world_size: int) -> list[float]:
    """A job: norms of gradients with which the backward has updated."""
    found = []
    for update in ("in_backward", "at_step"):
        loop = Loop(rank, update=update)
        loop.backward()
        loop.step()
        loop.backward()
        found.append(float(nn.utils.get_total_norm([p.grad for p in loop.model.parameters()])))
    return found


def test_applied_gradients_may_be_read(ranks: Pools) -> None:
    for early, late in ranks(2).run(read_norm):
        assert early == pytest.approx(late, rel=1e-12)


def accumulate(rank: int, world_size: int, update: str) -> list[Tensor]:
    """A job: parameters after steps of two backwards, the first under no_sync."""
    loop = Loop(rank, update=update)
    for _ in range(3):
        with fxcomm.no_sync(loop.compiled):
            loop.backward()
        loop.backward()
        loop.step()
    return [p.detach().clone() for p in loop.model.parameters()]


def test_accumulation_under_no_sync(ranks: Pools) -> None:
    early, late = (ranks(2).run(accumulate, update)[0] for update in ("in_backward", "at_step"))
    for mine, theirs in zip(early, late, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def keep_gradients(rank: int, world_size: int, update: str) -> list[Tensor]:
    """A job: parameters after steps that never zero their gradients."""
    loop = Loop(rank, update=update)
    for _ in range(3):
        loop.backward()
        loop.optimizer.step()
    return [p.detach().clone() for p in loop.model.parameters()]


def test_gradients_that_go_on(ranks: Pools) -> None:
    early, late = (ranks(2).run(keep_gradients, update)[0] for update in ("in_backward", "at_step"))
    for mine, theirs in zip(early, late, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class Watching(torch.optim.AdamW):
    """An optimizer that may do anything in its step."""


def step_of_the_users_own(rank: int, world_size: int) -> list[bool]:
    """A job: what the backward updates for an optimizer that fxcomm does not know."""
    loop = Loop(rank)
    loop.optimizer = Watching(loop.model.parameters(), lr=0.01)
    loop.backward()
    loop.step()
    loop.backward()
    return loop.applied()


def test_unknown_optimizers_update_in_their_step(ranks: Pools) -> None:
    for applied in ranks(2).run(step_of_the_users_own):
        assert not any(applied)
