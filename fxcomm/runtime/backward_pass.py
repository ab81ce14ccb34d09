"""One ``backward()`` as the runtime sees it: what contributed, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fxcomm.plan import GraphExecution, ObservedBackward
from fxcomm.runtime.parameters import ManagedParameter


@dataclass
class BackwardPass:
    """The running backward. ``local`` holds gradients of this rank that are in no bucket yet (by
    parameter index, of the parameter's shape); ``produced`` the parameters that got any gradient
    on this rank; ``kept`` the ``p.grad`` that were set aside to tell new gradients from old;
    ``announced`` the sharded parameters that have their ``p.grad`` already, ``accumulating`` those
    of them whose earlier gradient is kept; ``at_step`` the arenas that this backward updates no
    further."""

    backward_id: int
    local: dict[int, torch.Tensor] = field(default_factory=dict)
    produced: set[int] = field(default_factory=set)
    eager: set[int] = field(default_factory=set)
    executions: list[GraphExecution] = field(default_factory=list)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    announced: set[int] = field(default_factory=set)
    accumulating: set[int] = field(default_factory=set)
    at_step: set[int] = field(default_factory=set)

    def add(self, parameter: ManagedParameter, gradient: torch.Tensor) -> None:
        """Adds a contribution of this rank to the parameter's gradient."""
        known = self.local.get(parameter.index)
        # Out of place: graphs may return one tensor as the gradient of two parameters.
        self.local[parameter.index] = gradient if known is None else known + gradient
        self.produced.add(parameter.index)

    def take(self, parameter: ManagedParameter) -> torch.Tensor | None:
        """Removes and returns the flat local gradient, None if there is none."""
        gradient = self.local.pop(parameter.index, None)
        return None if gradient is None else parameter.flatten(gradient)

    def observed(self) -> ObservedBackward:
        """The pass as planning wants it."""
        return ObservedBackward(tuple(self.executions), frozenset(self.eager))


class PresenceExchange:
    """What every rank tells all others at the end of a backward: which parameters got a gradient,
    which buffers changed, and which buckets need another round because a contribution came after
    their launch.

    A small all-reduce on a group of its own that nobody waits for until the answer is needed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        present: Sequence[bool],
        changed: Sequence[bool],
        late: Sequence[bool],
    ) -> None:
        self._lengths = [len(present), len(changed), len(late)]
        self._flags = torch.tensor([*present, *changed, *late], dtype=torch.uint8)
        self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def _part(self, number: int) -> set[int]:
        if self._work is not None:
            self._work.wait()
            self._work = None
        part = self._flags.split(self._lengths)[number]
        return set(part.nonzero().flatten().tolist())

    def present(self) -> set[int]:
        """Parameters that got a gradient on some rank. Waits for the other ranks."""
        return self._part(0)

    def changed(self) -> set[int]:
        """Buffers that changed on some rank. Waits for the other ranks."""
        return self._part(1)

    def late(self) -> set[int]:
        """Buckets, counted through all arenas, that need another round on some rank. Waits."""
        return self._part(2)
