"""What a training step cost in communication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: seconds in which this rank's host stood in a wait for communication, and
    bytes of gradients and parameters that it put on the wire."""

    exposed_s: float = 0.0
    wire_bytes: float = 0.0


class StepMeter:
    """Sums up the running step; :attr:`last` is the last complete one."""

    def __init__(self) -> None:
        self.last = StepStats()
        self._exposed_s = 0.0
        self._wire_bytes = 0.0

    def waited(self, seconds: float) -> None:
        """Adds time spent in a wait."""
        self._exposed_s += seconds

    def sent(self, nbytes: float) -> None:
        """Adds bytes that this rank sends."""
        self._wire_bytes += nbytes

    def close_step(self) -> None:
        """Ends the running step."""
        if not (self._exposed_s or self._wire_bytes):
            return  # a step within a step (super().step()) has closed it already
        self.last = StepStats(self._exposed_s, self._wire_bytes)
        self._exposed_s = self._wire_bytes = 0.0
