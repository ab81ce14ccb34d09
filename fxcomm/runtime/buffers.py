"""Buffers that training changes, such as BatchNorm's running statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

import torch
from torch import nn


class MutableBuffers:
    """Finds the buffers of a module that changed, and makes them equal on all ranks again.

    Buffers are numbered by their order when :meth:`watch` was called, alike on every rank.
    """

    def __init__(self) -> None:
        self._root: weakref.ref[nn.Module] | None = None
        self._names: list[str] = []
        self._versions: list[tuple[int, int] | None] = []

    def watch(self, root: nn.Module) -> None:
        """Starts to watch the buffers of ``root`` as they are now."""
        self._root = weakref.ref(root)
        self._names = [name for name, _ in root.named_buffers()]
        self.forget_changes()

    def __len__(self) -> int:
        return len(self._names)

    def _buffers(self) -> list[torch.Tensor | None]:
        root = None if self._root is None else self._root()
        known = {} if root is None else dict(root.named_buffers())
        return [known.get(name) for name in self._names]

    @staticmethod
    def _version(buffer: torch.Tensor | None) -> tuple[int, int] | None:
        return None if buffer is None else (id(buffer), buffer._version)

    def changed(self) -> list[bool]:
        """For each buffer, whether it was written or replaced since changes were last forgotten."""
        now = [self._version(buffer) for buffer in self._buffers()]
        return [new != old for new, old in zip(now, self._versions, strict=True)]

    def forget_changes(self) -> None:
        """Takes the buffers as they are as unchanged."""
        self._versions = [self._version(buffer) for buffer in self._buffers()]

    def sync(self, numbers: Collection[int], broadcast: Callable[[torch.Tensor], None]) -> None:
        """Gives every rank rank 0's values of the buffers ``numbers``, as DDP does. Collective.

        Buffers of one dtype and device travel together.
        """
        together: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        buffers = self._buffers()
        for number in sorted(numbers):
            buffer = buffers[number]
            if buffer is not None and buffer.numel():
                together.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for group in together.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in group])
                broadcast(flat)
                parts = flat.split([buffer.numel() for buffer in group])
                for buffer, part in zip(group, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape))
        self.forget_changes()
