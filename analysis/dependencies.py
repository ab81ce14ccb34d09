"""Questions about a step graph: when a collective may start, who waits for it, and what bounds a
step.

Times are in seconds. Every answer is exact for the graph as it stands, ORDER edges included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import add, itemgetter

from fxcomm.analysis.step_graph import PhaseKind, Role, StepGraph, Why

# Enough to tell apart cycles that differ by a millionth of the step.
_BISECTIONS = 20

# From one hub to another, so many steps later.
_Hop = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """The operations after which something may start, and when (from the step's start) the last of
    them can have ended. The operations do not depend on each other."""

    after: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Wait:
    """The first operations that use a result, ``carried`` steps later, and the time on that step's
    clock at which the first of them must start. Without any, the time is the step's end."""

    consumers: tuple[str, ...]
    carried: int
    seconds: float


@dataclass(frozen=True)
class CriticalPath:
    """Operations of one step, each of which waits for the one before, and their total."""

    operations: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class SteadyState:
    """What bounds the time from one step to the next in a long run.

    ``seconds`` is the bound: the busiest stream's time or ``cycle_seconds``, whichever is larger.
    ``cycle`` is a cycle of operations whose time per step is the largest of all cycles,
    ``cycle_seconds``; it is empty, and 0, if no cycle takes time. ``busy`` is by stream.
    """

    seconds: float
    cycle_seconds: float
    cycle: tuple[str, ...]
    busy: Mapping[str, float]


def operation_of(step: StepGraph, bucket: int, role: Role) -> str:
    """The name of a bucket's operation; ValueError if the step has none."""
    name = step.by_bucket.get((bucket, role))
    if name is None:
        raise ValueError(f"the step graph has no {role.value} of bucket {bucket}")
    return name


def earliest_launch(step: StepGraph, bucket: int, role: Role) -> Launch:
    """After what, and how early in the step, a bucket's operation may start.

    Raises ValueError if the step has no such operation.
    """
    name = operation_of(step, bucket, role)
    return Launch(latest_of(step, step.predecessors(name)), step.earliest_starts[name])


def latest_wait(step: StepGraph, bucket: int, role: Role) -> Wait:
    """Who first uses the result of a bucket's operation, and how late, if neither that step nor
    this one is to become longer.

    Raises ValueError if the step has no such operation.
    """
    name = operation_of(step, bucket, role)
    carried_of: dict[str, int] = {}
    for _, target, dependency in step.outgoing.get(name, ()):
        if dependency.why is Why.DATA:
            carried = carried_of.setdefault(target, dependency.carried)
            carried_of[target] = min(carried, dependency.carried)
    if not carried_of:
        return Wait((), 0, step.seconds)
    soonest = min(carried_of.values())
    consumers = earliest_of(step, [t for t, carried in carried_of.items() if carried == soonest])
    return Wait(consumers, soonest, min(step.latest_starts[c] for c in consumers))


def last_read_of_old_value(step: StepGraph, parameter: str) -> tuple[str, ...]:
    """The compute operations after which no other reads the parameter in this step.

    Several only where their order is open; none if nothing reads it.
    """
    return latest_of(step, step.readers.get(parameter, ()))


def first_use_in_next_forward(step: StepGraph, parameter: str) -> tuple[str, ...]:
    """The forward operations that read the parameter before any other does.

    Several only where their order is open; none if the forward does not read it.
    """
    return earliest_of(step, _forward_readers(step, parameter))


def use_order(step: StepGraph) -> tuple[str, ...]:
    """Parameters in the order in which the forward first reads them; those of one operation by
    name. Parameters that the forward does not read are left out."""
    first = {p: _forward_readers(step, p)[:1] for p in step.readers}
    used = [
        (step.position[readers[0]], parameter) for parameter, readers in first.items() if readers
    ]
    return tuple(parameter for _, parameter in sorted(used))


def gather_order(step: StepGraph) -> tuple[int, ...]:
    """Gathered buckets by the first use of any of their parameters in the next forward; those that
    it does not use come last, and equal ones in reverse order of their numbers, which is roughly
    the order of a forward (as ``fxcomm.plan.order_of_use`` has it)."""
    place = {parameter: index for index, parameter in enumerate(use_order(step))}

    def first_use(bucket: int) -> tuple[int, int]:
        parameters = step.operations[step.by_bucket[bucket, Role.GATHER]].writes
        return min((place.get(p, len(place)) for p in parameters), default=len(place)), -bucket

    buckets = [bucket for bucket, role in step.by_bucket if role is Role.GATHER]
    return tuple(sorted(buckets, key=first_use))


def slack(step: StepGraph) -> dict[str, float]:
    """By collective (each REDUCE and GATHER, and the NORM of all buckets), the seconds by which it
    may start after its earliest start.

    The next step starts when this one's critical path ends, and none of its operations may miss
    its own latest start; within that, a collective may run past the end of its step.
    """
    starts = _latest_starts_over_the_boundary(step)
    return {
        name: starts[name] - step.earliest_starts[name]
        for name, operation in step.operations.items()
        if operation.role in (Role.REDUCE, Role.GATHER)
        or (operation.role is Role.NORM and operation.bucket is None)
    }


def critical_path(step: StepGraph) -> CriticalPath:
    """A longest chain of operations of one step, from its start to its end."""
    ends = list(map(add, step.earliest, step.costs))
    path: list[str] = []
    candidates: Sequence[int] = range(len(ends))
    while candidates:
        last = max(candidates, key=ends.__getitem__)
        path.append(step.order[last])
        candidates = step.before[last]
    return CriticalPath(tuple(reversed(path)), step.seconds)


def busy_seconds(step: StepGraph) -> dict[str, float]:
    """By stream, the seconds for which one step's operations keep it busy."""
    seconds: dict[str, list[float]] = {}
    for operation in step.operations.values():
        seconds.setdefault(operation.stream, []).append(operation.seconds)
    return {stream: math.fsum(values) for stream, values in seconds.items()}


def steady_state_bound(step: StepGraph) -> SteadyState:
    """A lower bound on the time of one step in a long run of them; see ``SteadyState``."""
    busy = busy_seconds(step)
    cycle_seconds, cycle = _largest_cycle_ratio(step)
    return SteadyState(max([cycle_seconds, *busy.values()]), cycle_seconds, cycle, busy)


def latest_of(step: StepGraph, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` on which no other of them depends within the step, in ``step.order``."""
    some = sorted(step.last_on_chains(names), key=step.position.__getitem__)
    return tuple(
        name
        for index, name in enumerate(some)
        if not any(step.depends_on(later, name) for later in some[index + 1 :])
    )


def earliest_of(step: StepGraph, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that depend on no other of them within the step, in ``step.order``."""
    some = sorted(step.first_on_chains(names), key=step.position.__getitem__)
    return tuple(
        name
        for index, name in enumerate(some)
        if not any(step.depends_on(name, earlier) for earlier in some[:index])
    )


def _forward_readers(step: StepGraph, parameter: str) -> tuple[str, ...]:
    readers = step.readers.get(parameter, ())
    return tuple(n for n in readers if step.operations[n].phase.kind is PhaseKind.FORWARD)


def _latest_starts_over_the_boundary(step: StepGraph) -> dict[str, float]:
    """Like ``step.latest_starts``, but what only later steps wait for may run until they do."""
    until: dict[str, float] = {}
    for source, target, dependency in step.carried_edges:
        end = dependency.carried * step.seconds + step.latest_starts[target]
        until[source] = min(end, until.get(source, math.inf))
    ends = [
        until.get(name, math.inf if targets else step.seconds)
        for name, targets in zip(step.order, step.after, strict=True)
    ]
    return dict(zip(step.order, step.latest(ends), strict=True))


@dataclass(frozen=True)
class _Hubs:
    """A step graph for cycle search: only operations with edges that leave their chain or the step.

    Hubs are numbered in ``step.order``. ``edges`` (source, target, cost) join hubs within a step,
    sorted so that one pass over them follows every path; ``carried`` (source, target, cost, steps)
    join them over steps. A cost is the sum of the operations from the source up to the target,
    without the target, in whole ``unit`` seconds: integers make every comparison exact.
    """

    names: list[str]
    edges: list[tuple[int, int, int]]
    carried: list[tuple[int, int, int, int]]
    unit: Fraction


def _hubs(step: StepGraph) -> _Hubs:
    exact = [float(seconds).as_integer_ratio() for seconds in step.costs]
    scale = math.lcm(*{denominator for _, denominator in exact})
    cost = [numerator * (scale // denominator) for numerator, denominator in exact]
    fewest: dict[tuple[int, int], int] = {}
    for source, target, dependency in step.carried_edges:
        ends = step.position[source], step.position[target]
        fewest[ends] = min(dependency.carried, fewest.get(ends, dependency.carried))
    chain_of = [step.chains[name][0] for name in step.order]
    # An edge that skips along a chain is never longer than the chain.
    crossing = [
        (source, target)
        for target, sources in enumerate(step.before)
        for source in sources
        if chain_of[source] != chain_of[target]
    ]
    places = sorted({place for ends in (*crossing, *fewest) for place in ends})
    number = {place: index for index, place in enumerate(places)}
    edges = [(number[u], number[v], cost[u]) for u, v in crossing]
    # By chain: the last hub on it, the cost up to that hub, and the cost so far.
    along: dict[int, tuple[int | None, int, int]] = {}
    for place, chain in enumerate(chain_of):
        last, then, now = along.get(chain, (None, 0, 0))
        if place in number:
            if last is not None:
                edges.append((last, number[place], now - then))
            last, then = number[place], now
        along[chain] = last, then, now + cost[place]
    edges.sort(key=itemgetter(1))
    carried = [(number[u], number[v], cost[u], steps) for (u, v), steps in fewest.items()]
    names = [step.order[place] for place in places]
    return _Hubs(names, edges, carried, Fraction(1, scale))


def _largest_cycle_ratio(step: StepGraph) -> tuple[float, tuple[str, ...]]:
    """The largest seconds per carried step of all cycles, and a cycle that has it.

    Bisection comes near the ratio whatever the number of cycles; then, while some cycle exceeds the
    best ratio so far, its own ratio is the next (Newton's method), which ends at the exact one.
    """
    hubs = _hubs(step)
    best, cycle = Fraction(0), list[_Hop]()
    # Within a step no path is longer than this, so no cycle is longer for each step it crosses.
    high = math.ceil(Fraction(step.seconds) / hubs.unit)
    for _ in range(_BISECTIONS):
        middle = Fraction((math.floor(best) + high) // 2)
        probe = max(best, middle)
        found = _cycle_above(hubs, probe)
        if found is not None:
            best, cycle = found
        elif probe == best:
            break
        else:
            high = math.floor(probe)
    while found := _cycle_above(hubs, best):
        best, cycle = found
    return float(best * hubs.unit), tuple(_operations_of(step, hubs, cycle))


def _cycle_above(hubs: _Hubs, ratio: Fraction) -> tuple[Fraction, list[_Hop]] | None:
    """A cycle whose cost per carried step exceeds ``ratio``, with its own; None if there is none.

    Bellman-Ford for longest paths, with whole steps as rounds: paths settle after as many rounds
    as they cross steps, or their last hops close a cycle that exceeds the ratio.
    """
    scale, price = ratio.denominator, ratio.numerator
    edges = [(u, v, cost * scale) for u, v, cost in hubs.edges]
    carried = [(u, v, cost * scale - steps * price, steps) for u, v, cost, steps in hubs.carried]
    length = [0] * len(hubs.names)
    via: dict[int, _Hop] = {}
    while True:
        for u, v, cost in edges:
            if length[u] + cost > length[v]:
                length[v] = length[u] + cost
                via[v] = u, v, 0
        settled = True
        for u, v, cost, steps in carried:
            if length[u] + cost > length[v]:
                length[v] = length[u] + cost
                via[v] = u, v, steps
                settled = False
        if settled:
            return None
        cycle = _cycle_of(via)
        if cycle:
            return _ratio_of(hubs, cycle), cycle


def _ratio_of(hubs: _Hubs, cycle: list[_Hop]) -> Fraction:
    costs = {(u, v, 0): cost for u, v, cost in hubs.edges}
    costs.update(((u, v, steps), cost) for u, v, cost, steps in hubs.carried)
    return Fraction(sum(costs[hop] for hop in cycle), sum(steps for _, _, steps in cycle))


def _operations_of(step: StepGraph, hubs: _Hubs, cycle: list[_Hop]) -> Iterator[str]:
    """The cycle's operations, with those of the chains between its hubs."""
    members: dict[int, list[str]] = {}
    for name in step.order if cycle else ():
        members.setdefault(step.chains[name][0], []).append(name)
    for u, v, steps in cycle:
        (chain, place), (other, end) = (step.chains[hubs.names[hub]] for hub in (u, v))
        along = chain == other and steps == 0
        yield from members[chain][place : end if along else place + 1]


def _cycle_of(via: Mapping[int, _Hop]) -> list[_Hop]:
    """A cycle of the hops by which ``via`` says that each hub is reached; empty if none."""
    walk_of: dict[int, int] = {}
    for start in via:
        hub = start
        while hub in via and hub not in walk_of:
            walk_of[hub] = start
            hub = via[hub][0]
        if hub in via and walk_of[hub] == start:
            cycle = [via[hub]]
            while cycle[-1][0] != hub:
                cycle.append(via[cycle[-1][0]])
            return cycle[::-1]
    return []
