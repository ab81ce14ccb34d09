"""What a training step costs, as values: curves of collectives, and one step's problem.

A :class:`StepProblem` is all that the simulator, the bounds and the search know of a training step:
when each parameter's gradient is ready, when its new value is needed, and what moving and updating
bytes costs. It comes from a measured step or from a step graph with costs.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class LinkCurve:
    """Seconds that a collective takes alone, by bytes of its buffer: piecewise linear through
    ``points`` (bytes, seconds), which rise in bytes and do not fall in seconds; linear through the
    last two (or through the origin's latency, for one point) beyond them, constant below the first.

    Raises ValueError for points that are not so.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs a point")
        for (a, s), (b, t) in itertools.pairwise(self.points):
            if not (a < b and s <= t):
                raise ValueError(f"a curve rises: ({a}, {s}) comes before ({b}, {t})")
        if not all(math.isfinite(x) and x >= 0 for point in self.points for x in point):
            raise ValueError("bytes and seconds of a curve are finite and not negative")

    @classmethod
    def of_link(cls, latency: float, bytes_per_second: float) -> LinkCurve:
        """The classical curve: ``latency`` seconds and a bandwidth (alpha-beta model)."""
        return cls(((0.0, latency), (bytes_per_second, latency + 1.0)))

    def seconds(self, nbytes: float) -> float:
        """Seconds for a buffer of ``nbytes``; 0 for none."""
        if nbytes <= 0:
            return 0.0
        if len(self.points) == 1 or nbytes <= self.points[0][0]:
            return self.points[0][1]
        place = bisect.bisect_left(self.points, nbytes, key=lambda point: point[0])
        place = min(max(place, 1), len(self.points) - 1)
        (a, s), (b, t) = self.points[place - 1], self.points[place]
        return s + (t - s) * (nbytes - a) / (b - a)

    @classmethod
    def through(cls, samples: Mapping[float, Sequence[float]]) -> LinkCurve:
        """The curve through the medians of measured ``samples`` (seconds by bytes), made monotone:
        neighbours that fall are replaced by their mean (isotonic regression, Barlow et al. 1972).

        Raises:
            ValueError: there is no sample.
        """
        blocks: list[tuple[float, int]] = []  # mean seconds, number of sizes
        for nbytes in sorted(samples):
            blocks.append((median(samples[nbytes]), 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (late, m), (early, n) = blocks.pop(), blocks.pop()
                blocks.append(((early * n + late * m) / (n + m), n + m))
        seconds = [mean for mean, count in blocks for _ in range(count)]
        return cls(tuple(zip(sorted(samples), seconds, strict=True)))

    @property
    def latency(self) -> float:
        """Seconds of the smallest collective."""
        return self.points[0][1]


@dataclass(frozen=True)
class LinkCosts:
    """What is known of the link: curves by bytes of a bucket for both kinds of collective, and the
    factor by which compute is slower while one runs."""

    reduce: LinkCurve
    gather: LinkCurve
    contention: float = 1.0

    def to_json(self) -> str:
        """The costs as JSON text."""
        fields = {
            "reduce": self.reduce.points,
            "gather": self.gather.points,
            "contention": self.contention,
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> LinkCosts:
        """Reads :meth:`to_json`'s text.

        Raises:
            ValueError: the text is none.
        """
        try:
            fields = json.loads(text)
            reduce, gather = (
                LinkCurve(tuple((float(b), float(s)) for b, s in fields[name]))
                for name in ("reduce", "gather")
            )
            contention = float(fields["contention"])
        except (TypeError, KeyError, RecursionError, ValueError) as error:
            raise ValueError(f"not costs of a link: {error!r}") from error
        if not contention >= 1:
            raise ValueError(f"not costs of a link: contention {contention} is below 1")
        return cls(reduce, gather, contention)


@dataclass(frozen=True)
class TensorTimes:
    """A parameter in a step: ``numel`` elements of ``itemsize`` bytes. Its gradient is complete
    ``ready`` seconds after the backward began, its old value is last read ``last_read`` seconds
    after that, its new value first used ``needed`` seconds after the next forward began (infinite:
    never)."""

    name: str
    numel: int
    itemsize: int
    ready: float
    last_read: float
    needed: float

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.itemsize


_NUMBERS = (
    "forward",
    "backward",
    "launch",
    "held",
    "between",
    "norm",
    "update_latency",
    "update_per_byte",
    "contention",
)


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


@dataclass(frozen=True)
class StepProblem:
    """One steady-state training step on one rank.

    ``tensors`` come in the order in which gradients are produced; before those in ``borders``
    (numbers) a bucket ends, since dtype, device or graph change there. ``forward`` and ``backward``
    are seconds of compute with no communication beside it. ``reduce`` and ``gather`` are curves by
    bytes of a whole bucket; collectives of one kind run one after the other, and both kinds share
    one link. ``launch`` are seconds of the host (compute stands still) to start and finish a
    collective. A reduction in flight holds ``held`` bytes of memory for each byte of its bucket.

    The optimizer's step costs ``between`` seconds of compute besides its buckets, whose updates
    take ``update_latency`` and ``update_per_byte`` seconds each (by bytes of the whole bucket).
    Where gradients are clipped by their global norm, ``norm`` are the seconds of its all-reduce,
    which every reduction precedes and every update follows. While a collective runs, compute is
    slower by the factor ``contention`` (at least 1).
    """

    tensors: tuple[TensorTimes, ...]
    forward: float
    backward: float
    reduce: LinkCurve
    gather: LinkCurve
    launch: float = 0.0
    held: float = 2.0
    between: float = 0.0
    norm: float | None = None
    update_latency: float = 0.0
    update_per_byte: float = 0.0
    contention: float = 1.0
    borders: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for times that are negative or lie outside their phase."""
        if self.contention < 1:
            raise ValueError(f"contention {self.contention} would speed compute up")
        for tensor in self.tensors:
            inside = 0 <= tensor.ready <= self.backward and 0 <= tensor.last_read <= self.backward
            if not inside or tensor.needed < 0:
                raise ValueError(f"times of {tensor.name!r} lie outside their phases: {tensor}")
        ready = [tensor.ready for tensor in self.tensors]
        if ready != sorted(ready):
            raise ValueError("tensors are not in the order in which their gradients are ready")

    def to_json(self) -> str:
        """The problem as JSON text; what is infinite is null."""
        tensors = [
            [t.name, t.numel, t.itemsize, t.ready, t.last_read, _finite(t.needed)]
            for t in self.tensors
        ]
        plain = {name: getattr(self, name) for name in _NUMBERS}
        curves = {"reduce": self.reduce.points, "gather": self.gather.points}
        return json.dumps({"tensors": tensors, "borders": self.borders, **plain, **curves})

    @classmethod
    def from_json(cls, text: str) -> StepProblem:
        """Reads :meth:`to_json`'s text.

        Raises:
            ValueError: the text is none.
        """
        try:
            fields = json.loads(text)
            rows = fields.pop("tensors")
            tensors = tuple(
                TensorTimes(name, numel, itemsize, ready, last, math.inf if use is None else use)
                for name, numel, itemsize, ready, last, use in rows
            )
            reduce, gather = (
                LinkCurve(tuple((float(b), float(s)) for b, s in fields.pop(name)))
                for name in ("reduce", "gather")
            )
            borders = tuple(map(int, fields.pop("borders")))
            return cls(tensors=tensors, borders=borders, reduce=reduce, gather=gather, **fields)
        except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a step problem: {error!r}") from error

    @property
    def compute(self) -> float:
        """Seconds of forward and backward compute alone."""
        return self.forward + self.backward

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the problem's tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Schedule:
    """Decisions on a problem: ``buckets`` of pieces, reduced in this order, each when its last
    gradient is ready; ``gather_order`` and ``in_flight_bytes`` as in an overlap plan; the first
    ``len(update_after)`` buckets are updated and gathered in the backward, each when bucket
    ``update_after[b]`` has been launched; with ``commshift`` gathers run on into the next forward.
    """

    buckets: tuple[tuple[Piece, ...], ...]
    gather_order: tuple[int, ...]
    in_flight_bytes: int | None = None
    update_after: tuple[int, ...] = ()
    commshift: bool = True

    def bucket_bytes(self, problem: StepProblem) -> tuple[int, ...]:
        """Bytes of each bucket."""
        sizes = [tensor.itemsize for tensor in problem.tensors]
        return tuple(sum((p.stop - p.start) * sizes[p.tensor] for p in b) for b in self.buckets)


def whole_tensors(problem: StepProblem, edges: Iterable[int]) -> tuple[tuple[Piece, ...], ...]:
    """Buckets of whole tensors in production order, cut before each tensor number in ``edges``."""
    bounds = [0, *sorted({e for e in edges if 0 < e < len(problem.tensors)}), len(problem.tensors)]
    return tuple(
        tuple(Piece(i, 0, problem.tensors[i].numel) for i in range(first, last))
        for first, last in itertools.pairwise(bounds)
        if first < last
    )


def by_first_use(problem: StepProblem, buckets: Sequence[Sequence[Piece]]) -> tuple[int, ...]:
    """Buckets in the order in which the next forward needs any of their tensors."""

    def needed(bucket: int) -> tuple[float, int]:
        times = (problem.tensors[piece.tensor].needed for piece in buckets[bucket])
        return min(times, default=math.inf), -bucket

    return tuple(sorted(range(len(buckets)), key=needed))
