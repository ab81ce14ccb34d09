"""What a captured step would be on so many ranks of a device, without any of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxcomm.analysis.account import Account, account_of
from fxcomm.analysis.capture import with_buckets
from fxcomm.analysis.costs import LinkCosts, LinkCurve, StepProblem
from fxcomm.analysis.dependencies import CriticalPath, critical_path
from fxcomm.analysis.problems import problem_of_graph
from fxcomm.analysis.roofline import DeviceRates
from fxcomm.analysis.schedules import planned
from fxcomm.analysis.search import Limits, SearchResult, search
from fxcomm.analysis.step_graph import Role
from fxcomm.analysis.trace import Capture
from fxcomm.layout import build_layout
from fxcomm.plan import OverlapPlan

# Bytes for each byte of a parameter in fp32: it, its gradient and two moments are read, and all but
# the gradient are written.
_UPDATE_TRAFFIC = 7
_MASTER_ITEMSIZE = 4
_STATES = 2  # of the optimizer, for each element
_BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 2 * 2**30


@dataclass(frozen=True)
class Cluster:
    """``world_size`` ranks of a device, each of which sends and receives ``bytes_per_second`` at a
    time, and ``latency`` seconds of a message.

    Raises ValueError for less than one rank, or rates that are not positive.
    """

    world_size: int
    device: DeviceRates
    bytes_per_second: float
    latency: float = 5e-6

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"a world of {self.world_size} ranks")
        if not self.bytes_per_second > 0 or self.latency < 0:
            raise ValueError("a link has a positive bandwidth and a latency that is not negative")

    @property
    def link(self) -> LinkCosts:
        """What a reduce-scatter or an all-gather of a bucket costs: (N-1)/N of its bytes leave each
        rank, and ceil(log2 N) messages follow each other (recursive halving and doubling; Thakur et
        al. 2005)."""
        parts = (self.world_size - 1) / self.world_size
        if not parts:
            return LinkCosts(LinkCurve(((0.0, 0.0),)), LinkCurve(((0.0, 0.0),)))
        alpha = self.latency * math.ceil(math.log2(self.world_size))
        curve = LinkCurve.of_link(alpha, self.bytes_per_second / parts)
        return LinkCosts(curve, curve)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank, by what they are for."""

    parameters: int
    optimizer_state: int
    saved_for_backward: int
    reductions_in_flight: int

    @property
    def total(self) -> int:
        """All of them together."""
        return (
            self.parameters
            + self.optimizer_state
            + self.saved_for_backward
            + self.reductions_in_flight
        )


@dataclass(frozen=True)
class Projection:
    """A step on a cluster: the plan for its ranks, where its time goes, what the search found, and
    memory on each rank. ``path`` is the critical path of one step by itself."""

    cluster: Cluster
    plan: OverlapPlan
    account: Account
    found: SearchResult
    memory: Memory
    path: CriticalPath


def project(capture: Capture, cluster: Cluster, *, budget_s: float = 1.0) -> Projection:
    """Searches a plan for ``capture`` on ``cluster`` and says what comes of it.

    State is that of Adam in fp32 with a master copy for parameters of fewer bytes.
    """
    problem = _problem(capture, cluster)
    found = search(problem, Limits(in_flight_bytes=_IN_FLIGHT), budget_s=budget_s)
    named = {spec.name: spec for spec in capture.parameters}
    ordered = [named[tensor.name] for tensor in problem.tensors]
    layout = build_layout([ordered], world_size=cluster.world_size, bucket_bytes=_BUCKET_BYTES)
    count = len(layout.buckets)
    first = OverlapPlan(
        "first", layout, (True,) * count, _IN_FLIGHT, tuple(reversed(range(count))), True
    )
    plan, schedule = planned(found.schedule, problem, first, name="searched")
    account = account_of(plan.name, problem, schedule)
    costs = {Role.REDUCE: problem.reduce.seconds, Role.GATHER: problem.gather.seconds}
    step = with_buckets(
        capture.step,
        plan.layout,
        gather_order=plan.gather_order,
        communication_cost=lambda role, nbytes: costs[role](nbytes),
    )
    return Projection(
        cluster, plan, account, found, _memory(capture, plan, account), critical_path(step)
    )


def _problem(capture: Capture, cluster: Cluster) -> StepProblem:
    problem = problem_of_graph(capture.step, capture.parameters, cluster.link)
    device = cluster.device
    itemsize = min(spec.itemsize for spec in capture.parameters)
    traffic = _UPDATE_TRAFFIC * _MASTER_ITEMSIZE / itemsize
    return replace(
        problem,
        launch=device.kernel,
        update_latency=device.kernel,
        update_per_byte=traffic / device.nbytes / cluster.world_size,
    )


def _memory(capture: Capture, plan: OverlapPlan, account: Account) -> Memory:
    layout = plan.layout
    state = 0
    for number, bucket in enumerate(layout.buckets):
        copies = _STATES + (bucket.itemsize < _MASTER_ITEMSIZE)
        state += layout.shard_numel(number) * max(bucket.itemsize, _MASTER_ITEMSIZE) * copies
    parameters = sum(bucket.nbytes for bucket in layout.buckets)
    peak = math.ceil(account.step.peak_bytes)
    return Memory(parameters, state, capture.saved_bytes, peak)
