"""How ranks find out that they are about to do the same thing, before any collective could hang.

Everything goes through the store of the process group: a rank that is late, missing or different
ends in an error on every rank within a deadline.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from fxcomm.errors import RankMismatchError

_AGREED = "agreed"


class KeyValueStore(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class Agreement:
    """Ranks of one process group that compare notes. ``timeout_s`` bounds every wait."""

    store: KeyValueStore
    rank: int
    world_size: int
    timeout_s: float

    def require_equal(self, topic: str, lines: Sequence[str]) -> None:
        """Returns when every rank has called with the same ``lines`` for ``topic``.

        ``topic`` must be new each time and equal on all ranks.

        Raises:
            RankMismatchError: on every rank, naming the rank and the first line that differs, or
                the rank that did not come within the deadline.
        """
        text = "\n".join(lines)
        if self.rank == 0:
            self.store.set(f"{topic}/text", text)
            self.store.set(f"{topic}/digest", _digest(text))
            verdict = self._collect(topic)
            self.store.set(f"{topic}/verdict", verdict)
        else:
            self.store.set(f"{topic}/of/{self.rank}", self._compare(topic, text))
            verdict = self._get(f"{topic}/verdict", topic, "rank 0's verdict", patience=2.0)
        if verdict != _AGREED:
            raise RankMismatchError(verdict)

    def from_rank_zero(self, topic: str, text: str) -> str:
        """Rank 0's ``text``, on every rank.

        Raises:
            RankMismatchError: rank 0 did not come within the deadline.
        """
        if self.rank == 0:
            self.store.set(f"{topic}/text", text)
            return text
        return self._get(f"{topic}/text", topic, "rank 0")

    def _compare(self, topic: str, text: str) -> str:
        if self._get(f"{topic}/digest", topic, "rank 0") == _digest(text):
            return _AGREED
        theirs = self.store.get(f"{topic}/text").decode()
        return first_difference(topic, self.rank, text.split("\n"), theirs.split("\n"))

    def _collect(self, topic: str) -> str:
        deadline = time.monotonic() + self.timeout_s
        for rank in range(1, self.world_size):
            # One deadline for all ranks: the others wait for the verdict only twice that long.
            left = max(0.01, deadline - time.monotonic()) / self.timeout_s
            try:
                answer = self._get(f"{topic}/of/{rank}", topic, f"rank {rank}", patience=left)
            except RankMismatchError as error:
                return str(error)
            if answer != _AGREED:
                return answer
        return _AGREED

    def _get(self, key: str, topic: str, whom: str, patience: float = 1.0) -> str:
        timeout = timedelta(seconds=self.timeout_s * patience)
        try:
            self.store.wait([key], timeout)
        # Which exception a store raises on a timeout depends on the store and on torch's version.
        except Exception as error:
            waited = self.timeout_s * max(1.0, patience)
            raise RankMismatchError(
                f"rank {self.rank} waited {waited:.0f} s for {whom} to agree on "
                f"{topic.rsplit('/', 1)[-1]}, in vain ({type(error).__name__}). That rank has "
                "stopped, runs another program, or is slower: look at its output; "
                'options={"start_timeout_s": ...} sets the deadline.'
            ) from error
        return self.store.get(key).decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(topic: str, rank: int, ours: Sequence[str], theirs: Sequence[str]) -> str:
    """A message that names the first line in which ``rank`` differs from rank 0."""
    what = topic.rsplit("/", 1)[-1]
    for mine, zero in itertools.zip_longest(ours, theirs, fillvalue="nothing more"):
        if mine != zero:
            return (
                f"ranks disagree on {what}: rank {rank} has {mine}, rank 0 has {zero}. Every rank "
                "must build the same model and optimizer and pass the same options."
            )
    return f"ranks disagree on {what}: rank {rank} differs from rank 0"
