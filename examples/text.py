"""Training text that every Python has: the standard library's documentation, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor


def corpus() -> Tensor:
    """All help topics one after the other, one uint8 token per byte."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def windows(
    tokens: Tensor,
    *,
    batch: int,
    context: int,
    seed: int,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches ``(x, y)`` of random windows; ``y`` is ``x`` moved on by one token.

    The same seed and rank always give the same batches; every rank draws its own.
    """
    if len(tokens) <= context:
        raise ValueError(f"a context of {context} needs a text longer than {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed + rank)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        cut = tokens[starts + offsets].long().to(device)
        yield cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
