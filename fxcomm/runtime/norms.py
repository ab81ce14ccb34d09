"""Norms of gradients whose elements are spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxcomm.communicator import Communicator
from fxcomm.errors import ShardedGradientError


def gradient_norms(
    shards: Sequence[Sequence[torch.Tensor]],
    order: float,
    communicator: Communicator,
    device: torch.device,
) -> list[torch.Tensor]:
    """The vector norm of each gradient, of which this rank holds the elements in ``shards[i]``.

    ``order`` is infinity, 0 (the number of non-zero elements) or positive. Partial results are
    combined in float64 by one all-reduce, which every rank must join.

    Raises:
        ShardedGradientError: the order is negative.
    """
    if order < 0 or math.isnan(order):
        raise ShardedGradientError(
            f"norms of order {order} of sharded gradients are not supported; use a positive order"
        )
    flat = [(i, t) for i, parts in enumerate(shards) for t in parts if t.numel()]
    totals = torch.zeros(len(shards), dtype=torch.float64, device=device)
    if flat:
        norms = torch._foreach_norm([t for _, t in flat], order)
        partial = torch.stack([norm.to(torch.float64) for norm in norms])
        owner = torch.tensor([i for i, _ in flat], device=device)
        _combine(totals, owner, partial, order)
    if math.isinf(order):
        return _maximum(totals, communicator)
    communicator.all_reduce(totals, "sum")
    return list(totals if order == 0 else totals.pow(1 / order))


def _combine(
    totals: torch.Tensor, owner: torch.Tensor, partial: torch.Tensor, order: float
) -> None:
    if math.isinf(order):
        totals.scatter_reduce_(0, owner, partial, "amax")
    else:
        totals.index_add_(0, owner, partial if order == 0 else partial.pow(order))


def _maximum(totals: torch.Tensor, communicator: Communicator) -> list[torch.Tensor]:
    # A reduction by maximum may lose NaN, which a norm must not.
    lost = totals.isnan()
    both = torch.cat([totals.masked_fill(lost, 0.0), lost.to(totals.dtype)])
    communicator.all_reduce(both, "max")
    maximum, lost = both.chunk(2)
    return list(maximum.masked_fill(lost > 0, math.nan))
