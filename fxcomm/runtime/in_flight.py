"""Parameters whose new values are on their way, and what must wait for them.

A gather that was started writes into its parameters' memory until it is waited for. A compiled
graph waits before its first use of a parameter (``fxcomm.passes.gather``); what runs eagerly gets
parameters from their modules, which ask :meth:`InFlightParameters.before_read` first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fxcomm import compat
from fxcomm.analysis.measured import EventKind
from fxcomm.communicator import Waitable
from fxcomm.runtime.statistics import StepMeter

_log = logging.getLogger("fxcomm")


class BucketGather(compat.Work):
    """The gather of one bucket. It is done once, by whoever waits first.

    ``elements`` is the bucket; ``buffer`` what the communicator fills, another tensor if parameters
    travel in another dtype; ``extra_bytes`` is its size then. ``meter`` is told of the wait.
    """

    def __init__(
        self,
        bucket: int,
        work: Waitable,
        elements: torch.Tensor,
        buffer: torch.Tensor,
        meter: StepMeter,
    ) -> None:
        super().__init__()
        self._bucket = bucket
        self._pending: tuple[Waitable, torch.Tensor, torch.Tensor] | None = (work, elements, buffer)
        self.extra_bytes = 0 if buffer is elements else buffer.numel() * buffer.itemsize
        self._meter = meter
        self._lock = threading.Lock()  # data loaders may read parameters in threads of their own

    @property
    def done(self) -> bool:
        """Whether the parameters have their new values."""
        return self._pending is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the parameters have their new values; c10d passes a ``timeout``, which the
        process group has, too."""
        del timeout
        with self._lock:
            if self._pending is not None:
                work, elements, buffer = self._pending
                start = time.perf_counter()
                work.wait()
                if buffer is not elements:
                    elements.copy_(buffer)
                self._meter.note(EventKind.WAIT_GATHER, self._bucket, start, time.perf_counter())
                self._pending = None
        return True


class NotedUse(compat.Work):
    """A gather as one of its parameters (number ``index``) is asked for: notes when that is."""

    def __init__(self, gather: BucketGather, index: int, meter: StepMeter) -> None:
        super().__init__()
        self._gather = gather
        self._index = index
        self._meter = meter

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the gather."""
        start = time.perf_counter()
        done = self._gather.wait(timeout)
        self._meter.note(EventKind.USE, self._index, start, time.perf_counter())
        return done


class InFlightParameters:
    """The gathers that nobody has waited for, by parameter, and the parameters for which no gather
    may run on beyond its step, since not every read of them can be made to wait."""

    def __init__(self) -> None:
        self._gathers: dict[int, list[BucketGather]] = {}
        self._uses: dict[int, list[compat.Work]] = {}  # c10d keeps only their C++ halves
        self._parameters: dict[int, torch.Tensor] = {}
        self._unseen = WeakIdKeyDictionary()
        self._anything_unseen: str | None = None
        self._told: set[str] = set()

    def started(
        self, parameter: torch.Tensor, gather: BucketGather, use: BucketGather | NotedUse
    ) -> None:
        """Makes reads of ``parameter`` wait for ``gather``, those of compiled graphs by ``use``."""
        compat.register_wait(parameter, use)
        self._gathers.setdefault(id(parameter), []).append(gather)
        self._uses.setdefault(id(parameter), []).append(use)
        self._parameters[id(parameter)] = parameter

    def before_read(self, value: object) -> None:
        """Waits for what is in flight into ``value``, if anything is."""
        for gather in self._gathers.get(id(value), ()):
            gather.wait()

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """Waits for what is in flight into ``parameters`` and forgets it."""
        for parameter in parameters:
            for gather in self._gathers.pop(id(parameter), ()):
                gather.wait()
            if self._parameters.pop(id(parameter), None) is not None:
                compat.wait_in_place(parameter)
            self._uses.pop(id(parameter), None)

    def finish_all(self) -> None:
        """Waits for everything."""
        self.finish(list(self._parameters.values()))

    def cannot_see(self, where: str, parameters: Iterable[torch.Tensor] | None) -> None:
        """Code ``where`` gets ``parameters`` (None: it may be any) without asking a module: from
        now on their gathers end in the step that starts them."""
        self.finish_all()
        if parameters is None:
            self._anything_unseen = where
            return
        for parameter in parameters:
            self._unseen[parameter] = where

    def may_run_on(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether a gather into ``parameters`` may run on beyond its step."""
        if self._anything_unseen is None and not self._unseen:
            return True
        reasons = (self._anything_unseen or self._unseen.get(p) for p in parameters)
        reason = next((r for r in reasons if r is not None), None)
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            _log.warning(
                "%s reads parameters where fxcomm cannot make it wait for their new values: it is "
                "compiled by another backend, or passes a parameter on over a graph break. "
                "optimizer.step() therefore waits for their communication. To hide it, compile "
                "that code with fxcomm, or let it take parameters from a module.",
                reason,
            )
        return reason is None


def seen_parameters(root: nn.Module) -> set[int]:
    """The parameters (``id``) of ``root`` whose every read goes through their module.

    Not those of modules written in TorchScript, nor those that a module also keeps elsewhere, as
    ``nn.LSTM`` does in a list.
    """
    seen: set[int] = set()
    kept_elsewhere: set[int] = set()
    for module in root.modules():
        own = {id(p) for p in module.parameters(recurse=False)}
        (seen if compat.hands_out_parameters(module) else kept_elsewhere).update(own)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules"):
                kept_elsewhere.update(id(tensor) for tensor in _tensors_in(value))
    return seen - kept_elsewhere


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)
