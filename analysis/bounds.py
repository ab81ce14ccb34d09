"""What no schedule of a problem can beat.

In the steady state every second of a step is one second of the compute stream and one of the link.
Each bound counts what one of them, or a chain that alternates between them, has to do between two
points of the loop; :func:`lower_bound` takes the largest. They hold for every partition of the
tensors into buckets, every order and every limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxcomm.analysis.costs import LinkCurve, StepProblem

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """``seconds`` that a step takes at least, and ``reason``, what it is that takes them."""

    seconds: float
    reason: str


def gap(seconds: float, bound: Bound) -> float:
    """By which part ``seconds`` are above the bound; 0 for the bound itself."""
    return seconds / bound.seconds - 1 if bound.seconds else 0.0


def lower_bound(problem: StepProblem, *, in_backward: bool = True) -> Bound:
    """The largest bound. Without ``in_backward`` it holds only for schedules that update nothing in
    the backward, and is larger."""
    bounds = [_compute(problem), _link(problem), _loop(problem, in_backward)]
    return max(bounds, key=lambda bound: bound.seconds)


def least_seconds(curve: LinkCurve, nbytes: float | _Floats, total: float) -> _Floats:
    """What collectives take at least for ``nbytes`` in whatever pieces of at most ``total``: the
    cheapest rate of any size of piece. A curve is linear between its points, so that its rate is
    least at one of them or at the largest piece."""
    sizes = [size for size, _ in curve.points if 0 < size < total] + [total]
    rate = min((curve.seconds(size) / size for size in sizes), default=0.0) if total else 0.0
    return np.asarray(nbytes, dtype=np.float64) * rate


def _least_compute(problem: StepProblem) -> float:
    """Compute of a step in one bucket, the cheapest: what more buckets add is more."""
    return problem.compute + problem.between + _updates(problem)


def _updates(problem: StepProblem) -> float:
    if not problem.tensors:
        return 0.0
    return problem.update_latency + problem.update_per_byte * problem.nbytes


def _compute(problem: StepProblem) -> Bound:
    """All compute, a launch of each kind, and the norm's all-reduce; compute that runs beside the
    link is slower: in ``L`` seconds of the link it gets at most ``L / contention`` done."""
    launches = 2 if problem.tensors else 0
    stands = launches * problem.launch + (problem.norm or 0.0)
    work, link = _least_compute(problem), _least_link(problem)
    # What the link does while compute stands anyway slows nothing.
    slowed = min(max(0.0, link - stands), work * problem.contention)
    seconds = work + stands + slowed * (1 - 1 / problem.contention)
    return Bound(seconds, f"compute: {_ms(work)} of work, slowed by the link beside it")


def _least_link(problem: StepProblem) -> float:
    total = problem.nbytes
    both = (problem.reduce, problem.gather)
    return sum(float(least_seconds(curve, total, total)) for curve in both)


def _link(problem: StepProblem) -> Bound:
    """Every byte is reduced and gathered once in a step."""
    seconds = _least_link(problem)
    return Bound(seconds, f"the link: {_ms(seconds)} to reduce and gather {problem.nbytes} bytes")


def _loop(problem: StepProblem, in_backward: bool) -> Bound:
    """From a point ``r`` of the backward to a point ``n`` of the next forward.

    Gradients that are ready at ``r`` or later are reduced in between, as all reductions end before
    the step does. Parameters needed up to ``n`` are gathered in between, all of them if gathers
    start behind the backward, else those that are reduced there. The rest of the loop, from ``n``
    to ``r``, takes its compute.
    """
    if not problem.tensors:
        return Bound(0.0, "nothing is trained")
    total = problem.nbytes
    ready = np.array([t.ready for t in problem.tensors])
    needed = np.array([t.needed for t in problem.tensors])
    sizes = np.array([t.nbytes for t in problem.tensors], dtype=np.float64)
    points = np.unique(needed[needed <= problem.forward])
    if not len(points):
        return Bound(0.0, "nothing is used in the forward")
    reduced = least_seconds(problem.reduce, np.cumsum(sizes[::-1])[::-1], total)  # by r's tensor
    early = (needed[None, :] <= points[:, None]) * sizes[None, :]  # by n, tensor
    if in_backward:
        gathered = np.cumsum(early[:, ::-1], axis=1)[:, ::-1]  # ready at r or later
    else:
        gathered = np.broadcast_to(early.sum(axis=1)[:, None], early.shape)
    gathers = least_seconds(problem.gather, gathered, total)
    seconds = _around(problem, ready[None, :], points[:, None], reduced[None, :], gathers)
    n, r = np.unravel_index(int(seconds.argmax()), seconds.shape)
    first = next(t for t in problem.tensors if t.needed == points[n])
    reason = (
        f"a chain around the loop: the gradients from {problem.tensors[r].name!r} on are ready "
        f"{_ms(problem.backward - ready[r])} before the backward ends, and what {first.name!r} and "
        f"those before it need is needed {_ms(points[n])} into the forward: "
        f"{_ms(float(reduced[r] + gathers[n, r]))} of reductions and gathers lie between"
    )
    return Bound(float(seconds[n, r]), reason)


def _around(
    problem: StepProblem, r: _Floats, n: _Floats, reduced: _Floats, gathers: _Floats
) -> _Floats:
    """Seconds of a step by what lies between ``r`` and ``n``: compute and link run side by side
    there, but with clipping all reductions come before the norm and all gathers behind it."""
    outside = (problem.forward - n) + r
    before, after = problem.backward - r + problem.between, _updates(problem) + n
    if problem.norm is None:
        between = np.maximum(reduced + gathers, before + after)
    else:
        ahead = np.maximum(reduced, before)
        between = ahead + problem.norm + np.maximum(gathers, after)
    result: _Floats = outside + between
    return result


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if math.isfinite(seconds) else "any time"
