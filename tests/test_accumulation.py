"""Several forwards and backwards in a step, and ranks that run different graphs, are exact."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxcomm
from tests.ranks import Ranks
from tests.test_optimizers import (
    Script,
    Site,
    assert_alike,
    assert_like_one_process,
    backward,
    run_script,
    snapshot,
)
from tests.test_reads import withheld_gathers
from tests.zoo import ROWS, ZOO, TiedGPT

Pools = Callable[[int], Ranks]
Run = Callable[[Site, nn.Module, int], None]

STAGES = ("zero2", "zero1", "ddp")
SHARDED_OR_NOT = pytest.mark.parametrize("stage", ["zero2", "ddp"])
MICRO_STEPS = 4


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


# --- micro-batches ------------------------------------------------------------------------------


def micro_batches(site: Site, case: str, quiet: str) -> dict[str, Any]:
    """Four backwards before each step. ``quiet`` says which of them run under ``no_sync``."""
    model, compiled = site.model(case)
    optimizer = _momentum(compiled.parameters())
    losses, norms = [], []
    for step in range(4):
        for micro in range(MICRO_STEPS):
            last = micro == MICRO_STEPS - 1
            silent = quiet == "all" or (quiet == "all but the last" and not last)
            with fxcomm.no_sync(compiled) if silent else contextlib.nullcontext():
                losses.append(backward(site, compiled, step * MICRO_STEPS + micro, case))
        if quiet != "all":
            norms.append(float(nn.utils.clip_grad_norm_(compiled.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, **snapshot(model, optimizer)}


@pytest.mark.parametrize(("case", "stage"), [("mlp", s) for s in STAGES] + [("broken", "zero2")])
@pytest.mark.parametrize("quiet", ["none", "all but the last", "all"])
def test_micro_batches(ranks: Pools, case: str, quiet: str, stage: str) -> None:
    assert_like_one_process(ranks(2), micro_batches, case, quiet, stage=stage, bucket_mb=0.0005)


@pytest.mark.parametrize("quiet", ["none", "all but the last"])
@pytest.mark.parametrize("case", ["gpt", "partly_used"])
def test_micro_batches_on_three_ranks(ranks: Pools, case: str, quiet: str) -> None:
    assert_like_one_process(ranks(3), micro_batches, case, quiet)


def count_wire_bytes(site: Site, micro_steps: int, quiet: bool) -> list[float]:
    """The bytes that a rank sends in each step."""
    _, compiled = site.model()
    optimizer = _momentum(compiled.parameters())
    sent = []
    for step in range(4):
        for micro in range(micro_steps):
            silent = quiet and micro < micro_steps - 1
            with fxcomm.no_sync(compiled) if silent else contextlib.nullcontext():
                backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(fxcomm.stats(compiled).wire_bytes)
    return sent


# How many of a step's reductions of accumulated gradients travel: whole gradients may wait for the
# last backward if that is within the limit.
@pytest.mark.parametrize(
    ("options", "sunk"),
    [
        ({"stage": "zero2"}, True),
        ({"stage": "zero2", "in_flight_mb": 0.001}, False),
        ({"stage": "zero1", "in_flight_mb": 1000.0}, True),
        ({"stage": "ddp"}, False),
    ],
)
def test_how_often_gradients_travel(ranks: Pools, options: Mapping[str, Any], sunk: bool) -> None:
    def sent(micro_steps: int, quiet: bool) -> list[float]:
        run = ranks(2).run(run_script, count_wire_bytes, options, (micro_steps, quiet))
        assert run[0] == run[1]
        return run[0]

    once, quiet, loud = sent(1, False), sent(MICRO_STEPS, True), sent(MICRO_STEPS, False)
    assert quiet == once
    # From the second step on; the first has no plan yet. All-reduce sends what the two others do.
    reductions = [b / 2 if options["stage"] != "ddp" else b for b in once[1:]]
    extra = [b - a for a, b in zip(once[1:], loud[1:], strict=True)]
    assert extra == pytest.approx([0 if sunk else (MICRO_STEPS - 1) * r for r in reductions])


def changing_micro_batches(site: Site) -> dict[str, Any]:
    """Steps of more and of fewer backwards than the step before."""
    model, compiled = site.model()
    optimizer = _momentum(compiled.parameters())
    batch = 0
    for backwards in (2, 3, 1, 1, 4, 2):
        for _ in range(backwards):
            backward(site, compiled, batch)
            batch += 1
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@SHARDED_OR_NOT
def test_changing_numbers_of_micro_batches(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), changing_micro_batches, stage=stage)


def uneven_micro_batches(site: Site) -> dict[str, Any]:
    """Ranks make different numbers of backwards under ``no_sync``."""
    model, compiled = site.model()
    optimizer = _momentum(compiled.parameters())
    for step in range(4):
        for rank in _played(site):
            with fxcomm.no_sync(compiled):
                for micro in range((rank + step) % 3):
                    _backward_of(site, compiled, rank, 10 * step + micro)
        for rank in _played(site):
            _backward_of(site, compiled, rank, 10 * step + 9)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


def _played(site: Site) -> list[int]:
    """The ranks whose part the script plays: its own; alone, those of all."""
    return list(range(site.world_size)) if site.rank is None else [site.rank]


def _rows_of(site: Site, rank: int, number: int, case: str = "mlp") -> Tensor:
    return ZOO[case].batch(number, ROWS * site.world_size).chunk(site.world_size)[rank]


def _backward_of(
    site: Site, model: Callable[..., Tensor], rank: int, number: int, *arguments: Any
) -> float:
    """The backward of one rank's part of the mean loss; the loss."""
    rows = _rows_of(site, rank, number)
    loss = ZOO["mlp"].loss(model(rows, *arguments), rows) / len(_played(site))
    loss.backward()
    return loss.item()


@SHARDED_OR_NOT
def test_uneven_micro_batches(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), uneven_micro_batches, stage=stage)


# --- orders of forwards and backwards -------------------------------------------------------------


def _loss(site: Site, model: nn.Module, number: int) -> Tensor:
    batch = site.batch(number)
    return ZOO["mlp"].loss(model(batch), batch)


def _two_forwards_one_backward(site: Site, model: nn.Module, step: int) -> None:
    (_loss(site, model, 2 * step) + 2 * _loss(site, model, 2 * step + 1)).backward()


def _interleaved(site: Site, model: nn.Module, step: int) -> None:
    first, second = _loss(site, model, 2 * step), _loss(site, model, 2 * step + 1)
    first.backward()
    (2 * second).backward()


def _interleaved_backwards(site: Site, model: nn.Module, step: int) -> None:
    first, second = _loss(site, model, 2 * step), _loss(site, model, 2 * step + 1)
    (2 * second).backward()
    first.backward()


def _two_losses(site: Site, model: nn.Module, step: int) -> None:
    """Two backwards through one forward."""
    batch = site.batch(step)
    output = model(batch)
    ZOO["mlp"].loss(output, batch).backward(retain_graph=True)
    output.square().mean().backward()


def _detached_pass(site: Site, model: nn.Module, step: int) -> None:
    """A forward without gradient and one whose result is thrown away."""
    with torch.no_grad():
        target = model(site.batch(step)).detach()
    model(site.batch(step + 1))
    (model(site.batch(step + 2)) - target).square().mean().backward()


def _varying(site: Site, model: nn.Module, step: int) -> None:
    """Another number of forwards in each step."""
    sum(_loss(site, model, 3 * step + i) for i in range(1 + step % 3)).backward()


def _through_itself(site: Site, model: nn.Module, step: int) -> None:
    """The model is applied to what it has made."""
    batch = site.batch(step)
    output = model(batch)
    again = torch.cat([output, output, batch[:, :3]], dim=1)
    model(again).square().mean().backward()


ORDERS: tuple[Run, ...] = (
    _two_losses,
    _two_forwards_one_backward,
    _interleaved,
    _interleaved_backwards,
    _detached_pass,
    _varying,
    _through_itself,
)


def train_in_order(site: Site, runs: Sequence[Run], case: str) -> list[tuple[str, Any, Any]]:
    """Two steps of each of ``runs``."""
    # Else torch refuses to retain the graph of a backward that was compiled to be run once.
    with functorch_config.patch(donated_buffer=False):
        return _train_in_order(site, runs, case)


def _train_in_order(site: Site, runs: Sequence[Run], case: str) -> list[tuple[str, Any, Any]]:
    model, compiled = site.model(case)
    optimizer = _momentum(compiled.parameters())
    history = []
    for step, run in enumerate(run for run in runs for _ in range(2)):
        run(site, compiled, step)
        norm = float(nn.utils.clip_grad_norm_(compiled.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        history.append((run.__name__, norm, snapshot(model, optimizer)))
    return history


@SHARDED_OR_NOT
@pytest.mark.parametrize("case", ["mlp", "broken"])
def test_orders_of_forward_and_backward(ranks: Pools, case: str, stage: str) -> None:
    assert_like_one_process(ranks(2), train_in_order, ORDERS, case, stage=stage, bucket_mb=0.0005)


@pytest.mark.parametrize("run", ORDERS[2:])
def test_first_steps_of_other_kinds(ranks: Pools, run: Run) -> None:
    """The plan is made from what the first step did; later steps differ from it."""
    runs = [run, ORDERS[1]]
    assert_like_one_process(ranks(2), train_in_order, runs, "broken", bucket_mb=0.0005)


# --- gradients that go on, or do not --------------------------------------------------------------


def keep_gradients(site: Site, case: str) -> dict[str, Any]:
    """Gradients go on over steps and are dropped now and then; some stay on their rank for a
    while."""
    model, compiled = site.model(case)
    optimizer = _momentum(compiled.parameters())
    for step in range(8):
        with fxcomm.no_sync(compiled) if step in (2, 3, 6) else contextlib.nullcontext():
            backward(site, compiled, step, case)
        if step != 2:
            optimizer.step()
        if step == 4:
            optimizer.zero_grad()
    return snapshot(model, optimizer)


@SHARDED_OR_NOT
@pytest.mark.parametrize("case", ["mlp", "broken"])
def test_gradients_go_on_over_steps(ranks: Pools, case: str, stage: str) -> None:
    assert_like_one_process(ranks(2), keep_gradients, case, stage=stage)


def drop_gradients(site: Site, case: str) -> list[Any]:
    """A first backward, whose gradient is dropped, and a second one."""
    model, compiled = site.model(case)
    optimizer = _momentum(compiled.parameters())
    history = []
    for step, (quiet, to_none) in enumerate(itertools.product((True, False), repeat=2)):
        for repeated in range(2):
            number = 4 * step + 2 * repeated
            with fxcomm.no_sync(compiled) if quiet else contextlib.nullcontext():
                backward(site, compiled, number, case)
            optimizer.zero_grad(set_to_none=to_none)
            backward(site, compiled, number + 1, case)
            optimizer.step()
        history.append((quiet, to_none, snapshot(model, optimizer)))
    return history


@SHARDED_OR_NOT
@pytest.mark.parametrize("case", ["mlp", "broken"])
def test_zeroing_between_backwards(ranks: Pools, case: str, stage: str) -> None:
    assert_like_one_process(ranks(2), drop_gradients, case, stage=stage)


# --- models of which a part is compiled -----------------------------------------------------------


class Halves(nn.Module):
    """An encoder and a head; ``shared`` is used by both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 11))
        self.head = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What fxcomm warns of."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("fxcomm")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def train_halves(site: Site, apart: bool, quiet: bool) -> dict[str, Any]:
    """Only the encoder is compiled. ``apart``: the script itself calls encoder and head, of which
    fxcomm learns in the first step."""
    torch.manual_seed(0 if apart else site.rank or 0)
    model = Halves().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    encoder = site.compile(model.encoder)
    if not apart:
        model.encoder = encoder
    norms = []
    with _warnings() as messages:
        for step in range(4):
            for micro in range(2):
                x = site.batch(2 * step + micro)
                with fxcomm.no_sync(model) if quiet and not micro else contextlib.nullcontext():
                    output = model.head(torch.tanh(encoder(x))) if apart else model(x)
                    ZOO["mlp"].loss(output, x).backward()
            if not apart or step > 0:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    if site.rank == 0 or (apart and site.rank is not None):
        assert len(messages) == 1, messages
        name = "AdamW.param_groups[0][4]" if apart else "head.weight"
        assert name in messages[0]
    result = snapshot(model, optimizer)
    result["model"] = {n.replace("_orig_mod.", ""): t for n, t in result["model"].items()}
    return {"norms": norms, **result}


@pytest.mark.parametrize(("quiet", "stage"), [(False, "zero2"), (True, "zero2"), (True, "ddp")])
@pytest.mark.parametrize("apart", [False, True], ids=["head in the model", "head outside"])
def test_half_compiled(ranks: Pools, apart: bool, quiet: bool, stage: str) -> None:
    assert_like_one_process(ranks(2), train_halves, apart, quiet, stage=stage)


class Checkpointed(nn.Module):
    """Eager, with compiled blocks that run again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(13, 17)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(17, 17), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def train_checkpointed(site: Site, reentrant: bool, whole: bool) -> dict[str, Any]:
    """``whole``: the model is compiled with the checkpoints inside."""
    torch.manual_seed(0)
    model = Checkpointed(reentrant).double()
    if not whole:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = site.compile(block)
    compiled = site.compile(model) if whole else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(4):
        _loss(site, compiled, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    result = snapshot(model, optimizer)
    result["model"] = {n.replace("_orig_mod.", ""): t for n, t in result["model"].items()}
    return {"norms": norms, **result}


@pytest.mark.parametrize(
    ("reentrant", "whole", "stage"),
    [
        (False, False, "zero2"),
        (True, False, "zero2"),
        (False, True, "zero2"),
        (True, False, "ddp"),
    ],
)
def test_checkpointed_blocks(ranks: Pools, reentrant: bool, whole: bool, stage: str) -> None:
    assert_like_one_process(ranks(2), train_checkpointed, reentrant, whole, stage=stage)


class EagerFirst(nn.Module):
    """An eager part comes before everything that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, 17), nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self._outside(x)))

    @torch._dynamo.disable
    def _outside(self, x: Tensor) -> Tensor:
        return self.first(x)


def train_eager_first(site: Site, whole: bool) -> dict[str, Any] | str:
    """Ranks start from other values, of which the eager part has seen some before the first graph
    is compiled; the results, or why it cannot work."""
    torch.manual_seed(site.rank or 0)
    model = EagerFirst().double()
    compiled = site.compile(model) if whole else model
    if not whole:
        model.last = site.compile(model.last)
    optimizer = _momentum(model.parameters())
    losses = []
    try:
        for step in range(3):
            losses.append(backward(site, compiled, step))
            optimizer.step()
            optimizer.zero_grad()
    except fxcomm.FxcommError as error:
        return str(error)
    result = snapshot(model, optimizer)
    result["model"] = {n.replace("_orig_mod.", ""): t for n, t in result["model"].items()}
    return {"losses": losses, **result}


@pytest.mark.parametrize("whole", [True, False])
def test_eager_part_before_the_first_graph_is_right_or_refused(ranks: Pools, whole: bool) -> None:
    expected = train_eager_first(Site(2), whole)
    for result in ranks(2).run(run_script, train_eager_first, {}, (whole,)):
        if isinstance(result, str):
            assert "first." in result
        else:
            assert_alike(result, expected, 1e-10)


# --- ranks that run different graphs --------------------------------------------------------------


def run_with_late_gathers(rank: int, world_size: int, *script: Any) -> Any:
    """A job: runs a script on a rank while gathers come as late as they may."""
    with withheld_gathers():
        return run_script(rank, world_size, *script)


def _assert_like_one_process(pool: Ranks, script: Script, *args: Any, **options: Any) -> None:
    expected = script(Site(pool.world_size), *args)
    for rank, actual in enumerate(pool.run(run_with_late_gathers, script, options, args)):
        assert_alike(actual, expected, 1e-10, f"rank {rank}")


class Breaking(nn.Module):
    """Breaks the graph on demand, and applies its middle layer as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(13, 17), nn.Linear(17, 17), nn.Linear(17, 5)

    def forward(self, x: Tensor, breaks: bool, times: int) -> Tensor:
        x = torch.tanh(self.first(x))
        if breaks:
            torch._dynamo.graph_break()
        for _ in range(times):
            x = torch.tanh(self.middle(x))
        if breaks:
            torch._dynamo.graph_break()
        return self.last(x)


def train_breaking(site: Site, breaks: list[set[int]], times: list[tuple[int, ...]]) -> Any:
    """In step i the ranks in ``breaks[i]`` break the graph, and rank r applies the middle layer
    ``times[i][r]`` times: it is no part of the graph of a rank that does not use it."""
    torch.manual_seed(site.rank or 0)
    model = Breaking().double()
    compiled = site.compile(model)
    optimizer = _momentum(model.parameters())
    losses, norms = [], []
    for step, (breaking, of_rank) in enumerate(zip(breaks, times, strict=True)):
        total = 0.0
        for rank in _played(site):
            arguments = (rank in breaking, of_rank[rank])
            total += _backward_of(site, compiled, rank, step, *arguments)
        losses.append(site.mean(total))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, **snapshot(model, optimizer)}


@pytest.mark.parametrize(("world_size", "stage"), [(2, "zero2"), (2, "ddp"), (3, "zero2")])
@pytest.mark.parametrize("first", [set(), {0}, {1}], ids=["nobody", "rank 0", "rank 1"])
def test_graph_breaks_on_some_ranks(
    ranks: Pools, first: set[int], world_size: int, stage: str
) -> None:
    breaks = [first, first, {0}, {1}, {0, 1}, set()]
    times = [(1, 1, 1), (1, 2, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
    options = {"stage": stage, "bucket_mb": 0.0005}
    _assert_like_one_process(ranks(world_size), train_breaking, breaks, times, **options)


@SHARDED_OR_NOT
@pytest.mark.parametrize("first", [(1, 1), (1, 0), (0, 1)], ids=["nobody", "rank 1", "rank 0"])
def test_a_branch_unused_on_some_ranks(ranks: Pools, first: tuple[int, int], stage: str) -> None:
    """Unused from the first step, from which the plan is made, or later; and by all at last."""
    times = [first, (1, 0), (0, 1), (1, 1), (2, 0), (0, 0)]
    breaks: list[set[int]] = [set()] * 5 + [{0}]
    options = {"stage": stage, "bucket_mb": 0.0005}
    _assert_like_one_process(ranks(2), train_breaking, breaks, times, **options)


def train_lengths(site: Site, lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """In step i, rank r has sequences of ``lengths[i][r]`` tokens."""
    torch.manual_seed(site.rank or 0)
    model = TiedGPT(layers=1).double()
    compiled = site.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    losses = []
    for step, of_rank in enumerate(lengths):
        total = 0.0
        for rank in _played(site):
            tokens = _rows_of(site, rank, step, "gpt")[: 1 + of_rank[rank] % 4, : of_rank[rank]]
            loss = ZOO["gpt"].loss(compiled(tokens), tokens) / len(_played(site))
            loss.backward()
            total += loss.item()
        losses.append(site.mean(total))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **snapshot(model, optimizer)}


@pytest.mark.parametrize(
    ("lengths", "stage"),
    [
        ([(9, 7), (9, 9), (6, 9), (5, 8)], "zero2"),
        ([(9, 9), (9, 5), (9, 6), (8, 8)], "ddp"),
    ],
    ids=["from the first step", "later"],
)
def test_sequences_of_other_length(
    ranks: Pools, lengths: list[tuple[int, int]], stage: str
) -> None:
    _assert_like_one_process(ranks(2), train_lengths, lengths, stage=stage)


def train_on_some(site: Site) -> dict[str, Any]:
    """After the first step, one rank's loss depends on a part of the model only, which it calls
    by itself, outside the compiled model."""
    model, compiled = site.model()
    optimizer = _momentum(compiled.parameters())
    for step in range(5):
        for rank in _played(site):
            rows = _rows_of(site, rank, step)
            if step == 0 or (rank + step) % 2:
                loss = ZOO["mlp"].loss(compiled(rows), rows)
            else:
                loss = model.down(torch.ones(1, 37, dtype=torch.float64)).square().mean()
            (loss / len(_played(site))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@SHARDED_OR_NOT
def test_one_rank_goes_around_the_compiled_model(ranks: Pools, stage: str) -> None:
    _assert_like_one_process(ranks(2), train_on_some, stage=stage)
