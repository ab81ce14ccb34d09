"""What happens before a model's first graph runs: ranks compare, parameters become equal."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import nn

from fxcomm.errors import RankMismatchError, UnsupportedModelError
from fxcomm.runtime.model import ManagedModel
from fxcomm.runtime.parameters import ManagedParameter, overlapping


def start(
    model: ManagedModel,
    named: Sequence[tuple[str, nn.Parameter]],
    root: nn.Module | None,
    used: Collection[int] = (),
) -> None:
    """Takes charge of ``named``, compares model and options over the ranks, and gives every rank
    rank 0's parameters and buffers.

    ``used`` are the parameters (by ``id``) with which something ran before the first graph, on this
    rank's own values: these must have been equal on all ranks.

    Raises:
        RankMismatchError: names the first difference, or the rank that did not come.
        UnsupportedModelError: a parameter is of a kind that cannot be sharded.
    """
    check_parameters(named)
    model.add_parameters(named)
    frozen = (
        [] if root is None else [(n, p) for n, p in root.named_parameters() if not p.requires_grad]
    )
    buffers = [] if root is None else list(root.named_buffers())
    shared = overlapping(named, [*frozen, *buffers] if model.sharded else ())
    if shared is not None:
        raise UnsupportedModelError(
            f"{shared[0]!r} and {shared[1]!r} share memory. Tie parameters by assigning the "
            "same nn.Parameter, or give each its own tensor."
        )
    if root is not None:
        model.root = weakref.ref(root)
        model.buffers.watch(root)
    lines = [f"options {model.options.describe()}"]
    lines += [describe(name, p) for name, p in [*named, *frozen]]
    lines += [describe(name, b, "buffer") for name, b in buffers]
    early = [p for p in model.parameters if id(p.parameter) in used]
    lines += [f"parameter {p.name!r} in use before the first compiled graph" for p in early]
    model.environment.agreement.require_equal(model.topic("the model and options"), lines)
    model.connect()  # not earlier: it waits for every rank, with no word about who is missing
    if early:
        require_equal_values(model, early)
    with torch.no_grad():
        for tensor in [p.detach() for _, p in [*named, *frozen]] + [b for _, b in buffers]:
            broadcast(model, tensor)
    if root is not None:
        model.buffers.watch(root)


def extend(
    model: ManagedModel, named: Sequence[tuple[str, nn.Parameter]]
) -> list[ManagedParameter]:
    """Takes charge of more parameters after the start, of which ranks may have used other values.

    Raises:
        RankMismatchError: the ranks add different parameters, or their values differ.
        UnsupportedModelError: a parameter is of a kind that cannot be sharded.
    """
    check_parameters(named)
    model.environment.agreement.require_equal(
        model.topic("parameters that joined later"), [describe(name, p) for name, p in named]
    )
    if not named:
        return []
    added = model.add_parameters(named)
    require_equal_values(model, added)
    return added


def unused_name(name: str, taken: set[str]) -> str:
    """``name``, marked if it is taken."""
    return name if name not in taken else unused_name(name + "'", taken)


def broadcast(model: ManagedModel, tensor: torch.Tensor) -> None:
    """Overwrites a tensor with rank 0's, whatever its strides."""
    if not tensor.numel() or tensor.is_meta:
        return
    if tensor.is_contiguous():
        model.dense.broadcast(tensor)
        return
    dense = tensor.contiguous()
    model.dense.broadcast(dense)
    tensor.copy_(dense)


def describe(name: str, tensor: torch.Tensor, kind: str = "parameter") -> str:
    """A line by which ranks compare a tensor's kind."""
    text = f"{kind} {name!r} of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    text += f", {tensor.dtype}, on {tensor.device.type}"
    return text if tensor.requires_grad or kind == "buffer" else text + ", frozen"


def check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuses parameters that fxcomm cannot move into flat memory."""
    for name, parameter in named:
        if type(parameter) is not nn.Parameter and type(parameter.data) is not torch.Tensor:
            raise UnsupportedModelError(
                f"parameter {name!r} is a {type(parameter).__name__}; fxcomm shards plain tensors. "
                "Do not wrap the model with another sharding (FSDP, DTensor) first."
            )
        if parameter.layout is not torch.strided or parameter.is_meta:
            raise UnsupportedModelError(
                f"parameter {name!r} is {'on the meta device' if parameter.is_meta else 'sparse'}; "
                "fxcomm needs dense parameters with values before the first forward"
            )


def require_equal_values(model: ManagedModel, added: Sequence[ManagedParameter]) -> None:
    """Parameters that join after the start have already been used: they must have been equal on
    all ranks.

    Raises:
        RankMismatchError: names the first that was not.
    """
    differs = torch.zeros(len(added), device=added[0].parameter.device)
    for i, p in enumerate(added):
        reference = p.parameter.detach().clone(memory_format=torch.contiguous_format)
        broadcast(model, reference)
        differs[i] = float(not torch.equal(reference, p.parameter.detach()))
    model.dense.all_reduce(differs, "max")
    for p, flag in zip(added, differs.tolist(), strict=True):
        if flag:
            raise RankMismatchError(
                f"parameter {p.name!r} was in use before fxcomm made the ranks' parameters equal, "
                "and differs between them. Seed every rank alike, or compile the module that "
                "contains it."
            )
