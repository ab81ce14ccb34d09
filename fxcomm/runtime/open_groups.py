"""The process groups of models, and their end.

A model opens groups of its own, each with threads, connections and, on a GPU, memory. They can go
when the model is gone; but Python's collector finds that out at another time on every rank, in the
middle of anything. So it only leaves a note. Where a rank waits for all others anyway, because they
begin a new model, they compare notes and close what nobody needs any more: the same groups in the
same order on every rank, which NCCL asks for, and none on which a rank may still wait for another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

# The global ranks that a model trains on, and its number among the models on these.
ModelKey = tuple[tuple[int, ...], int]


def dropped_everywhere(by_rank: Sequence[Collection[int]]) -> list[int]:
    """The models that every rank has dropped, in the order of their numbers."""
    first, *others = map(set, by_rank)
    return sorted(first.intersection(*others))


class OpenGroups:
    """The names of the groups that are open, by model; see the module's docstring.

    It knows names only: a group that something else closes is not kept alive here.
    """

    def __init__(self) -> None:
        self._names: dict[ModelKey, list[str]] = {}
        # Notes of finalizers, which may run while this is read: only ever appended to by them.
        self._dropped: list[ModelKey] = []

    def opened_by(self, owner: object, ranks: Sequence[int], number: int) -> Callable[[str], None]:
        """What notes the name of a group that model ``number`` on ``ranks`` opens. The model counts
        as dropped when ``owner`` is collected."""
        key = (tuple(ranks), number)
        names = self._names[key] = []
        weakref.finalize(owner, self._dropped.append, key).atexit = False
        return names.append

    def dropped(self, ranks: Sequence[int]) -> set[int]:
        """The models on ``ranks`` that this rank has dropped and whose groups are open."""
        there = tuple(ranks)
        return {number for known, number in self._dropped.copy() if known == there}

    def close(
        self, ranks: Sequence[int], numbers: Iterable[int], close: Callable[[str], None]
    ) -> None:
        """Closes the groups of dropped models on ``ranks``, in the order of ``numbers`` and of
        opening. ``close`` closes a group by its name."""
        for number in numbers:
            key = (tuple(ranks), number)
            self._dropped.remove(key)
            for name in self._names.pop(key):
                close(name)
