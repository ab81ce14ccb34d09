"""Training on ranks, and the one-process training that it must equal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zoo import ROWS, ZOO, Case

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass
class Trained:
    """What a training run leaves: the loss of each step (the mean over ranks), the total gradient
    norms if it clips, and after some steps the parameters, buffers and optimizer state dict."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    optimizer: dict[int, dict[str, Any]] = field(default_factory=dict)

    def keep(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Records the state after a step."""
        self.tensors[step] = {n: t.detach().clone() for n, t in model.state_dict().items()}
        self.optimizer[step] = copy.deepcopy(optimizer.state_dict())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The default optimizer of these tests."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train_ranks(
    rank: int,
    world_size: int,
    case_name: str,
    options: Mapping[str, Any],
    steps: int = 5,
    make_optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    micro_steps: int = 1,
    device: str = "cpu",
) -> Trained:
    """A job: trains a case of the zoo in an ordinary loop with ``backend="fxcomm"``."""
    case = ZOO[case_name]
    # Every rank starts from other values; training must begin by making them equal.
    model = case.model(seed=rank).to(device)
    compiled = torch.compile(model, backend="fxcomm", options=dict(options))
    optimizer = make_optimizer(compiled.parameters())
    return train_compiled(case, model, compiled, optimizer, steps, clip, micro_steps)


def train_compiled(
    case: Case,
    model: nn.Module,
    compiled: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 5,
    clip: float | None = None,
    micro_steps: int = 1,
) -> Trained:
    """The ordinary loop on one of the ranks; ``compiled`` is ``model`` for ``backend="fxcomm"``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device
    result = Trained()
    for step in range(steps):
        total = 0.0
        for micro in range(micro_steps):
            batch = case.batch(step * micro_steps + micro, ROWS * world_size)
            mine = batch[rank * ROWS : (rank + 1) * ROWS].to(device)
            loss = case.loss(compiled(mine), mine) / micro_steps
            loss.backward()
            total += loss.item()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(compiled.parameters(), clip)
            result.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        result.losses.append(mean.item() / world_size)
        if step in (0, steps - 1):
            result.keep(step, model, optimizer)
    return result


@functools.cache
def train_alone(
    world_size: int,
    case_name: str,
    steps: int = 5,
    make_optimizer: MakeOptimizer = adamw,
    clip: float | None = None,
    micro_steps: int = 1,
) -> Trained:
    """The oracle: one process, eager, on the concatenated batch. Its results are shared; do not
    write to them."""
    case = ZOO[case_name]
    model = case.model(seed=0)
    optimizer = make_optimizer(model.parameters())
    result = Trained()
    for step in range(steps):
        total = 0.0
        for micro in range(micro_steps):
            batch = case.batch(step * micro_steps + micro, ROWS * world_size)
            total += _backward(case, model, batch, world_size, micro_steps)
        if clip is not None:
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(total)
        if step in (0, steps - 1):
            result.keep(step, model, optimizer)
    return result


def _backward(
    case: Case, model: nn.Module, batch: Tensor, world_size: int, micro_steps: int
) -> float:
    if not case.per_rank_statistics:
        loss = case.loss(model(batch), batch) / micro_steps
        loss.backward()
        return loss.item()
    # BatchNorm sees each rank's rows by themselves, and rank 0's running statistics stay.
    before = {name: b.clone() for name, b in model.named_buffers()}
    total = 0.0
    for rows in reversed(batch.chunk(world_size)):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        loss = case.loss(model(rows), rows) / world_size / micro_steps
        loss.backward()
        total += loss.item()
    return total


def assert_equal_training(actual: Trained, expected: Trained, rtol: float = 1e-10) -> None:
    """Losses, parameters, buffers and optimizer state agree to ``rtol`` of each tensor's scale."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=rtol, atol=0)
    assert list(actual.tensors) == list(expected.tensors)
    for step, tensors in expected.tensors.items():
        assert list(actual.tensors[step]) == list(tensors)
        for name, tensor in tensors.items():
            assert_close(f"step {step} {name}", actual.tensors[step][name], tensor, rtol)
        _assert_equal_state(actual.optimizer[step], expected.optimizer[step], rtol)


def _assert_equal_state(actual: dict[str, Any], expected: dict[str, Any], rtol: float) -> None:
    assert actual["param_groups"] == expected["param_groups"]
    ours, theirs = actual["state"], expected["state"]
    assert list(ours) == list(theirs), "state of other parameters"
    for index, entry in theirs.items():
        assert set(ours[index]) == set(entry), f"state of parameter {index} has other entries"
        for key, value in entry.items():
            assert_close(f"state {index} {key}", ours[index][key], value, rtol)


def assert_close(name: str, actual: Any, expected: Any, rtol: float = 1e-10) -> None:
    """Equal to ``rtol`` of the tensor's scale: Adam turns rounding noise in a gradient that is
    zero by construction into changes far below any element that matters."""
    if not isinstance(expected, Tensor):
        assert actual == expected, name
        return
    assert actual.shape == expected.shape, name
    assert actual.dtype == expected.dtype, name
    actual = actual.to(expected.device)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol * max(scale, 1e-3), msg=lambda m: f"{name}: {m}"
    )
