"""Measures what collectives cost on the live process group, and what they cost compute."""

from __future__ import annotations

import time
from statistics import median

import torch

from fxcomm import compat
from fxcomm.analysis.costs import LinkCosts, LinkCurve
from fxcomm.communicator import Communicator, apply_calls, call_eagerly

# Bytes of whole buckets. A bucket beyond the largest costs as the last two say.
_SIZES = tuple(2**exponent for exponent in (14, 18, 22, 24))
# Collectives in flight together, as in a step: what one costs behind others. Buffers on the way
# swallow some bytes at once, so that a few small messages say nothing of many.
_MOST_IN_FLIGHT, _BYTES_IN_FLIGHT = 16, 2**24
_REPEATS = 3
_MATMUL = 192  # rows of the square matrices that stand for compute
_CONTENTION_SHARE = 0.15  # of the time budget


def measure_link(
    communicator: Communicator, device: torch.device, budget_s: float = 1.8
) -> LinkCosts:
    """Costs of the collectives that a step makes on ``communicator``, on tensors of ``device``, in
    about ``budget_s`` seconds. Collective; every rank gets the same costs.

    Two sizes are measured on any link, larger ones as long as they fit into the budget: a slow link
    is known after few.
    """
    reduce, gather = _curves(communicator, device, (1 - _CONTENTION_SHARE) * budget_s)
    contention = _contention(communicator, device, reduce, _CONTENTION_SHARE * budget_s)
    return LinkCosts(reduce, gather, _shared(communicator, device, contention))


def _shared(communicator: Communicator, device: torch.device, value: float) -> float:
    """The largest of the ranks' values: no rank may decide by another one."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    communicator.all_reduce(shared, "max")
    return float(shared)


def _curves(
    communicator: Communicator, device: torch.device, budget_s: float
) -> tuple[LinkCurve, LinkCurve]:
    reduces: dict[float, list[float]] = {}
    gathers: dict[float, list[float]] = {}
    spent = 0.0  # of times that all ranks share, so that all of them stop together
    for nbytes in _SIZES:
        numel = nbytes // 4 // communicator.world_size * communicator.world_size
        buffer = torch.zeros(numel, device=device)
        if not reduces:  # opens connections
            _time_reduces(communicator, buffer), _time_gathers(communicator, buffer)
        for turn in range(_REPEATS):
            reduce = _shared(communicator, device, _time_reduces(communicator, buffer))
            gather = _shared(communicator, device, _time_gathers(communicator, buffer))
            reduces.setdefault(float(numel * 4), []).append(reduce)
            gathers.setdefault(float(numel * 4), []).append(gather)
            took = _in_flight(nbytes) * (reduce + gather)
            spent += took
            if turn and spent + took > budget_s:
                break
        # The next one is four times as many bytes, and as much time where bytes are what counts.
        if len(reduces) > 1 and spent + 2 * 4 * took > budget_s:
            break
    return LinkCurve.through(reduces), LinkCurve.through(gathers)


def _in_flight(nbytes: int) -> int:
    """How many collectives of a size are measured together."""
    return min(_MOST_IN_FLIGHT, max(2, _BYTES_IN_FLIGHT // nbytes))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_reduces(communicator: Communicator, buffer: torch.Tensor) -> float:
    """Seconds for each of several reductions in flight together."""
    collective = communicator.reduce_scatter_mean(buffer.numel(), buffer.dtype)
    wait, count = collective.finish[0], _in_flight(4 * buffer.numel())
    _synchronize(buffer.device)
    start = time.perf_counter()
    with compat.below_autograd():
        operands = [
            apply_calls(collective.prepare, buffer.clone(), call_eagerly) for _ in range(count)
        ]
        for landed in [call_eagerly(collective.launch, operand) for operand in operands]:
            call_eagerly(wait, landed)
    _synchronize(buffer.device)
    return (time.perf_counter() - start) / count


def _time_gathers(communicator: Communicator, buffer: torch.Tensor) -> float:
    """Seconds for each of several gathers in flight together."""
    count = _in_flight(4 * buffer.numel())
    buffers = [buffer.clone() for _ in range(count)]
    _synchronize(buffer.device)
    start = time.perf_counter()
    for work in [communicator.all_gather(b, tag) for tag, b in enumerate(buffers)]:
        work.wait()
    _synchronize(buffer.device)
    return (time.perf_counter() - start) / count


def _contention(
    communicator: Communicator, device: torch.device, reduce: LinkCurve, budget_s: float
) -> float:
    """By how much compute is slower while reductions run, at least 1."""
    largest = reduce.points[-1][0]
    buffer = torch.zeros(int(largest) // 4, device=device)
    collective = communicator.reduce_scatter_mean(buffer.numel(), buffer.dtype)
    alone, beside = [], []
    seconds = min(reduce.seconds(largest), budget_s / _REPEATS / 3)
    for _ in range(_REPEATS):
        alone.append(_compute_rate(device, seconds))
        with compat.below_autograd():
            operand = apply_calls(collective.prepare, buffer.clone(), call_eagerly)
            landed = call_eagerly(collective.launch, operand)
            beside.append(_compute_rate(device, seconds))
            call_eagerly(collective.finish[0], landed)
    return max(1.0, median(alone) / median(beside))


def _compute_rate(device: torch.device, seconds: float) -> float:
    """Matrix products per second, over about ``seconds``."""
    matrix = torch.ones(_MATMUL, _MATMUL, device=device)
    _synchronize(device)
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        matrix @ matrix
        _synchronize(device)
        count += 1
    return count / (time.perf_counter() - start)
