"""Named ways to fuse, as schedules: what a searched one is compared with, and may be forced to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from fxcomm.analysis.costs import Piece, Schedule, StepProblem, by_first_use, whole_tensors
from fxcomm.plan import BASELINE_BUCKET_BYTES

Buckets = tuple[tuple[Piece, ...], ...]


def fixed_size(problem: StepProblem, bucket_bytes: float = BASELINE_BUCKET_BYTES) -> Buckets:
    """Buckets of about ``bucket_bytes``, in production order; a tensor that does not fit is cut."""
    size = max(1.0, bucket_bytes)
    count = max(1, round(problem.nbytes / size))
    return cut_at(problem, (problem.nbytes * i / count for i in range(1, count)))


def per_layer(problem: StepProblem) -> Buckets:
    """A bucket for each layer, as FSDP wraps a model by its blocks. A layer is what a tensor's name
    says up to its first number; what has none (embedding, head) is a layer with its neighbours."""
    layers = [_layer(tensor.name) for tensor in problem.tensors]
    edges = (i for i, (before, after) in enumerate(pairwise(layers), 1) if before != after)
    return whole_tensors(problem, [*edges, *problem.borders])


def _layer(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def one_bucket(problem: StepProblem) -> Buckets:
    """Everything at once."""
    return whole_tensors(problem, problem.borders)


def no_fusion(problem: StepProblem) -> Buckets:
    """A bucket for each tensor."""
    return whole_tensors(problem, range(len(problem.tensors)))


def mg_wfbp(problem: StepProblem) -> Buckets:
    """Merged gradients (Shi et al., MG-WFBP: Efficient Data Communication for Distributed
    Synchronous SGD Algorithms, INFOCOM 2019).

    A gradient is merged with the one produced after it where that one is ready before
    ``tau + alpha``: ``tau`` is when the communication of the first could start (not before the link
    is free of what was merged earlier), ``alpha`` the startup that merging saves. Only the backward
    and its reductions are considered, as in the paper.
    """
    alpha, tensors = problem.reduce.latency + problem.launch, problem.tensors
    edges, free, begun = [], 0.0, 0.0
    for i, tensor in enumerate(tensors[:-1]):
        begun += tensor.nbytes
        start = max(free, tensor.ready)
        if tensors[i + 1].ready >= start + alpha or i + 1 in problem.borders:
            edges.append(i + 1)
            free, begun = start + problem.reduce.seconds(begun) + problem.launch, 0.0
    return whole_tensors(problem, [*edges, *problem.borders])


_BUCKETS: Mapping[str, Callable[[StepProblem], Buckets]] = MappingProxyType(
    {
        "bucket-25mb": fixed_size,
        "per-layer": per_layer,
        "one-bucket": one_bucket,
        "no-fusion": no_fusion,
        "mg-wfbp": mg_wfbp,
        # Zhang et al., Decoupling the All-Reduce Primitive for Accelerating Distributed Deep
        # Learning, 2023: reduce-scatters in the backward, all-gathers in the next forward in order
        # of use, in its default fusion of 25 MB. The order is every schedule's here.
        "dear": fixed_size,
    }
)

NAMES = tuple(_BUCKETS)
"""The baselines that :func:`baseline` knows."""


def baseline(
    name: str,
    problem: StepProblem,
    *,
    in_flight_bytes: int | None = None,
    commshift: bool = True,
) -> Schedule:
    """The schedule of a named baseline. DDP's buckets ("bucket-25mb") gather in the order in which
    they were reduced, all others in the order of use.

    Raises:
        ValueError: there is no baseline of that name.
    """
    if name not in _BUCKETS:
        raise ValueError(f"no baseline is called {name!r}; there are {', '.join(NAMES)}")
    buckets = _BUCKETS[name](problem)
    production = tuple(range(len(buckets)))
    order = production if name == "bucket-25mb" else by_first_use(problem, buckets)
    return Schedule(buckets, order, in_flight_bytes, commshift=commshift)


def cut_at(problem: StepProblem, places: Iterable[float]) -> Buckets:
    """Buckets that end at ``places`` (bytes from the beginning in production order), each moved to
    an edge of a tensor if one is near, and at the problem's borders."""
    starts = tensor_starts(problem)
    wanted = {place for place in places if 0 < place < starts[-1]}
    return _between(problem, starts, sorted(wanted | {starts[i] for i in problem.borders}))


def tensor_starts(problem: StepProblem) -> list[int]:
    """Bytes before each tensor in production order, and of all."""
    starts = [0]
    for tensor in problem.tensors:
        starts.append(starts[-1] + tensor.nbytes)
    return starts


def _between(problem: StepProblem, starts: Sequence[int], places: Sequence[float]) -> Buckets:
    buckets: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    ahead = list(reversed(places))
    for i, tensor in enumerate(problem.tensors):
        placed = 0
        while ahead and ahead[-1] < starts[i + 1]:
            element = round((ahead.pop() - starts[i]) / tensor.itemsize)
            if element > placed:
                pieces.append(Piece(i, placed, element))
                placed = element
            if pieces:
                buckets.append(tuple(pieces))
                pieces = []
        if placed < tensor.numel:
            pieces.append(Piece(i, placed, tensor.numel))
    return tuple(buckets) + ((tuple(pieces),) if pieces else ())
