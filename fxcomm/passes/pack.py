"""A flat buffer that the kernels of its parts fill: an operator, and where parts go in its buffer.

``fxcomm::pack`` says for each tensor at which offset and with which strides its elements lie in the
buffer. Inductor gives the kernel that computes the tensor that place to write to, so that a matmul
of any shape and memory order fills its part of the buffer with no copy. ``aten.cat`` of flattened
tensors would copy each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.fx
from torch import Tensor

from fxcomm import compat

_aten = torch.ops.aten

# Views that keep the elements in the order of their indices.
_RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.unsqueeze.default,
    }
)


@torch.library.custom_op("fxcomm::pack", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def pack(
    parts: Sequence[Tensor], strides: Sequence[int], offsets: Sequence[int], numel: int
) -> Tensor:
    """A flat tensor of ``numel`` elements that holds ``parts`` and zeros between and after them.

    ``parts``, of one dtype, lie one after another: each is dense, from its entry of ``offsets`` on,
    with its strides. ``strides`` lists those of all parts, dimension by dimension.
    """
    flat = parts[0].new_zeros(numel)
    left = list(strides)
    for part, offset in zip(parts, offsets, strict=True):
        own, left = left[: part.dim()], left[part.dim() :]
        flat.as_strided(part.shape, own, offset).copy_(part)
    return flat


@pack.register_fake
def _(
    parts: Sequence[Tensor], strides: Sequence[int], offsets: Sequence[int], numel: int
) -> Tensor:
    return parts[0].new_empty(numel)


compat.lower_in_place(torch.ops.fxcomm.pack.default)


@dataclass(frozen=True)
class Part:
    """A node's elements in a flat buffer: the first at ``offset``, others by ``strides``."""

    node: torch.fx.Node
    strides: tuple[int, ...]
    offset: int


def part_of(node: torch.fx.Node, order: Sequence[int], offset: int) -> Part:
    """All of a node's elements from ``offset`` on, dense, its dimensions in ``order`` from the
    slowest.

    Where the node only looks at the result of a kernel in another way, it is that result which
    gets the place: a view could but be copied there.
    """
    # A fake tensor views itself in shapes that its strides do not allow, where a size is one.
    with compat.without_fake_mode():
        place = torch.empty(node.meta["val"].shape, device="meta")
        place = place.permute(tuple(order)).contiguous().permute(_inverse(order))
        while (before := _before(node, place)) is not None:
            node, place = before
    return Part(node, place.stride(), offset)


def erase_unused_views(graph: torch.fx.Graph) -> None:
    """Erases views that nothing uses, as those are that :func:`part_of` saw through.

    Inductor settles the memory of a kernel's result when it comes to a view of it, used or not.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and compat.is_view(node):
            graph.erase_node(node)


def _before(node: torch.fx.Node, place: Tensor) -> tuple[torch.fx.Node, Tensor] | None:
    """The operand of a view, and the place of its elements (a tensor of which only shape and
    strides count) when those of the view lie at ``place``; None if there is no such place."""
    reshapes = node.target in _RESHAPES
    if not reshapes and node.target is not _aten.permute.default:
        return None
    operand = node.args[0]
    assert isinstance(operand, torch.fx.Node)
    if not reshapes:
        dims = [dim % place.dim() for dim in cast(list[int], node.args[1])]
        return operand, place.permute(_inverse(dims))
    shape = operand.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        return None
    try:
        return operand, place.view(shape)
    except RuntimeError:  # no strides describe where the operand's elements lie
        return None


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))
