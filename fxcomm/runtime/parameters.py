"""A parameter as the runtime knows it: its name, its place, the order of its elements in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxcomm import compat
from fxcomm.errors import UnsupportedModelError
from fxcomm.layout import ParameterSpec

if TYPE_CHECKING:
    from fxcomm.runtime.arena import Arena


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's dimensions from the slowest to the fastest in memory.

    A tensor that is not dense in memory is treated as contiguous.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    if tensor.permute(order).is_contiguous():
        return tuple(order)
    return tuple(range(tensor.dim()))


class ManagedParameter:
    """A trainable parameter whose gradient fxcomm synchronises.

    ``index`` numbers the model's parameters alike on every rank. ``arena`` is None until a plan
    covers the parameter; then ``slot`` is its index in that plan's layout.
    """

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.order = memory_order(parameter)
        self.arena: Arena | None = None
        self.slot = -1
        self._home: torch.Tensor | None = None
        self._accumulator: Any = None

    def __repr__(self) -> str:
        return f"ManagedParameter({self.index}, {self.name!r})"

    @property
    def spec(self) -> ParameterSpec:
        """What a layout needs to know of the parameter."""
        p = self.parameter
        return ParameterSpec(
            name=self.name,
            numel=p.numel(),
            dtype=str(p.dtype).removeprefix("torch."),
            itemsize=p.dtype.itemsize,
            device=p.device.type,
        )

    def wants_gradient(self) -> bool:
        """Whether the running backward is to accumulate into the parameter.

        Raises:
            UnsupportedModelError: it is ``torch.autograd.grad`` with respect to the parameter.
        """
        if self._accumulator is None:
            # Kept: a parameter has one accumulator as long as someone holds it.
            self._accumulator = torch.autograd.graph.get_gradient_edge(self.parameter).node
        try:
            return compat.accumulates(self._accumulator)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"torch.autograd.grad with respect to parameter {self.name!r}: its gradient would "
                "be this rank's alone. Call loss.backward() and read fxcomm.full_grad(p)."
            ) from error

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape as one dimension, in the parameter's memory order."""
        return tensor.permute(self.order).reshape(-1)

    def unflatten(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`flatten`, as a view."""
        sizes = [self.parameter.shape[d] for d in self.order]
        inverse = sorted(range(len(self.order)), key=lambda i: self.order[i])
        return flat.view(sizes).permute(inverse)

    def rebind(self, flat: torch.Tensor) -> None:
        """Moves the parameter's elements to ``flat`` and lets the parameter view them there."""
        self._home = flat
        with torch.no_grad():
            flat.copy_(self.flatten(self.parameter.detach()))
            # A storage of its own: saving one parameter must not save its neighbours, and a wait
            # on one must not wait for others.
            own = compat.alias(flat) if flat.numel() else flat.clone()
            view = self.unflatten(own)
            if view.stride() != self.parameter.stride() and self.is_dense:
                # Strides of dimensions of size one are free; guards compare them all the same.
                view = view.as_strided(self.parameter.shape, self.parameter.stride())
            self.parameter.data = view

    def keep_bound(self) -> None:
        """Brings the parameter back to its place if someone gave it other memory (by ``p.data =``).

        Raises:
            UnsupportedModelError: the new memory has another shape, dtype or device.
        """
        home, p = self._home, self.parameter
        if home is None or not p.numel() or p.data_ptr() == home.data_ptr():
            return
        if (p.numel(), p.dtype, p.device) != (home.numel(), home.dtype, home.device):
            raise UnsupportedModelError(
                f"parameter {self.name!r} became a {tuple(p.shape)} {p.dtype} on {p.device} after "
                "training began. Move or convert the model before the first optimizer step."
            )
        self.rebind(home)

    @property
    def is_dense(self) -> bool:
        """Whether the parameter's elements fill a range of memory without gaps."""
        return self.parameter.detach().permute(self.order).is_contiguous()


def overlapping(
    trained: Sequence[tuple[str, torch.Tensor]], others: Sequence[tuple[str, torch.Tensor]] = ()
) -> tuple[str, str] | None:
    """The names of two dense tensors that share memory, at least one of them trained, or None.

    Strided views that interleave are left out: their ranges overlap, their elements need not.
    """
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize, not is_trained, name)
        for is_trained, named in ((True, trained), (False, others))
        for name, t in named
        if t.numel() and t.layout is torch.strided and not t.is_meta and _is_dense(t)
    )
    ends = {True: (0, ""), False: (0, "")}  # of the furthest tensor so far, by "is not trained"
    for start, end, fixed, name in spans:
        reached, neighbour = ends[False] if fixed else max(ends.values())
        if start < reached:
            return neighbour, name
        ends[fixed] = max(ends[fixed], (end, name))
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.detach().permute(memory_order(tensor)).is_contiguous()
