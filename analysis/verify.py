"""The static verifier: checks the ranks' programs against the first six of DESIGN's rules.

1. Every rank launches the same collectives in the same order on each group.
2. Every launch has one wait before the first use of its result, every wait a launch. A wait for a
   gather that was waited for already does nothing and is right: each parameter of a bucket waits.
3. No parameter is read between the start of its gather and the wait. No update or gather begins to
   write before the step's last read, and what a rank updated of a sharded bucket is gathered before
   anything reads it.
4. A reduction starts after every contribution that it carries; every contribution is carried once,
   and before its bucket is updated.
5. Nothing writes a buffer that a collective may still read or write. (Reading one that a collective
   still writes is use before the wait: rule 2.)
6. Bytes in flight stay under the limit, unless one collective alone exceeds it.

Programs repeat, so each is followed through two repetitions: the first only leaves behind what is
in flight at the step's boundary, the second is reported. After a wrong action the verifier goes on
as if it had been meant, so that one mistake is reported once. All of it takes time linear in the
sizes of programs and layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from fxcomm.analysis.program import (
    GATHER,
    REDUCE,
    CollectiveId,
    Compute,
    Launch,
    Program,
    Wait,
    buckets_of_parameters,
)
from fxcomm.errors import FxcommError
from fxcomm.passes.stamp import BucketKey

_SHOWN = 5  # violations that an error lists


@dataclass(frozen=True)
class Violation:
    """A broken rule: by which rank, on which bucket, at which place of its program."""

    rule: int
    rank: int
    bucket: BucketKey
    where: str
    message: str

    def __str__(self) -> str:
        return f"rule {self.rule}, rank {self.rank}: {self.message}"


def verify(
    programs: Sequence[Program], *, in_flight_bytes: int | None = None
) -> tuple[Violation, ...]:
    """What is wrong with the programs of a step, one for each rank; nothing if they are right.

    ``in_flight_bytes`` limits the bytes that a rank's collectives have in flight (None: no limit).
    At most one violation is reported for a rule, rank, bucket and place.
    """
    found: dict[tuple[int, int, BucketKey, str], Violation] = {}

    def report(violation: Violation) -> None:
        key = violation.rule, violation.rank, violation.bucket, violation.where
        found.setdefault(key, violation)

    _compare_ranks(programs, report)
    for program in programs:
        _Follower(program, in_flight_bytes, report).follow()
    return tuple(found.values())


def require_valid(programs: Sequence[Program], *, in_flight_bytes: int | None = None) -> None:
    """Checks programs as :func:`verify` does.

    Raises:
        FxcommError: they break a rule; the message lists the first violations.
    """
    violations = verify(programs, in_flight_bytes=in_flight_bytes)
    if violations:
        listed = "\n".join(f"  {violation}" for violation in violations[:_SHOWN])
        rest = len(violations) - _SHOWN
        more = f"\n  ... and {rest} more" if rest > 0 else ""
        raise FxcommError(
            "the overlap plan would compute wrong results or hang; nothing was run. Use another "
            "plan (options={'plan': ...}), and report this one if fxcomm made it:\n"
            f"{listed}{more}"
        )


# --- rule 1 ---

_Signature = tuple[CollectiveId, int]


def _launches_by_group(program: Program) -> dict[str, list[Launch]]:
    launches: dict[str, list[Launch]] = {}
    for action in program.actions:
        if isinstance(action, Launch):
            launches.setdefault(action.group, []).append(action)
    return launches


def _compare_ranks(programs: Sequence[Program], report: Callable[[Violation], None]) -> None:
    """Compares each rank with what most ranks do, in each group; reports the first difference."""
    by_rank = [(program.rank, _launches_by_group(program)) for program in programs]
    for group in sorted({group for _, launches in by_rank for group in launches}):
        orders = [
            tuple((launch.collective, launch.nbytes) for launch in launches.get(group, ()))
            for _, launches in by_rank
        ]
        # Of equally common orders, the one of the first rank.
        usual = Counter(orders).most_common(1)[0][0]
        for (rank, launches), order in zip(by_rank, orders, strict=True):
            if order != usual:
                report(_difference(rank, group, launches.get(group, []), usual))


def _difference(
    rank: int, group: str, launches: Sequence[Launch], usual: Sequence[_Signature]
) -> Violation:
    for place, (launch, expected) in enumerate(zip_longest(launches, usual)):
        if launch is None:
            bucket, where = expected[0].bucket, "the step's end"
            does = "ends its step there"
        elif expected is None or (launch.collective, launch.nbytes) != expected:
            bucket, where = launch.collective.bucket, launch.where
            does = f"starts the {launch.collective} ({launch.nbytes} bytes) at {where!r}"
        else:
            continue
        others = "end their step" if expected is None else f"start the {expected[0]}"
        if expected is not None:
            others += f" ({expected[1]} bytes)"
        return Violation(
            1,
            rank,
            bucket,
            where,
            f"as launch {place + 1} of the step on group {group!r} it {does}, where other ranks "
            f"{others}; the ranks would wait for each other for ever. All ranks must follow one "
            "plan",
        )
    raise AssertionError("the orders are equal")


# --- rules 2 to 6 ---


@dataclass(frozen=True)
class _Hazard:
    """Why a parameter must not be read: its elements in a bucket were written since ``repetition``.

    "gathering": the collective runs. "updated": this rank wrote its shard and nobody else's.
    "replaced": all of it has the next step's value; right to read from the next repetition on.
    """

    kind: Literal["gathering", "updated", "replaced"]
    where: str
    repetition: int


@dataclass(frozen=True)
class _Flight:
    launch: Launch
    repetition: int


class _Follower:
    """Follows one rank's program through its repetitions, with the state that each action leaves.

    ``_readers`` and ``_writers`` hold, for each buffer, the collectives in flight that use it, the
    oldest first. ``_hazards`` holds for each parameter the buckets that make reading it wrong.
    ``_uncarried`` holds for each bucket and micro-step the contributions (parameter, place) that
    no reduction carries yet, ``_carried`` the place of the reduction that did in this repetition.
    """

    def __init__(
        self, program: Program, limit: int | None, report: Callable[[Violation], None]
    ) -> None:
        self._program, self._limit, self._report = program, limit, report
        self._buckets_of = buckets_of_parameters(program.buckets)
        self._launched = {a.collective for a in program.actions if isinstance(a, Launch)}
        waited = {a.collective for a in program.actions if isinstance(a, Wait)}
        self._reduced = {c.bucket for c in self._launched | waited if c.kind == REDUCE}
        self._repetition = 0
        self._in_flight: dict[CollectiveId, _Flight] = {}
        self._nbytes = 0
        self._readers: dict[str, dict[CollectiveId, None]] = {}
        self._writers: dict[str, dict[CollectiveId, None]] = {}
        self._hazards: dict[str, dict[BucketKey, _Hazard]] = {}
        self._ready: set[BucketKey] = set()
        self._uncarried: dict[BucketKey, dict[int, dict[str, str]]] = {}
        self._carried: dict[tuple[BucketKey, int], str] = {}

    def follow(self) -> None:
        """Goes through the program twice and reports what is wrong the second time."""
        for self._repetition in range(2):
            self._carried = {}
            for action in self._program.actions:
                if isinstance(action, Launch):
                    self._launch(action)
                elif isinstance(action, Wait):
                    self._wait(action)
                else:
                    self._compute(action)

    def _found(self, rule: int, bucket: BucketKey, where: str, message: str) -> None:
        if self._repetition:
            self._report(Violation(rule, self._program.rank, bucket, where, message))

    # --- launches and waits ---

    def _launch(self, launch: Launch) -> None:
        collective = launch.collective
        earlier = self._in_flight.get(collective)
        if earlier is not None:
            self._found(
                2,
                collective.bucket,
                launch.where,
                f"the {collective} starts at {launch.where!r} while the one that started at "
                f"{earlier.launch.where!r} was never waited for; wait for each exactly once",
            )
            self._release(earlier.launch)
        self._use_buffers(launch.where, launch.reads, launch.writes)
        self._check_room(launch)
        self._hold(launch)
        if collective.kind == REDUCE:
            self._carry(launch)
        elif collective.kind == GATHER:
            self._endanger(collective.bucket, "gathering", launch.where)

    def _hold(self, launch: Launch) -> None:
        self._in_flight[launch.collective] = _Flight(launch, self._repetition)
        self._nbytes += launch.nbytes
        for buffer in launch.reads:
            self._readers.setdefault(buffer, {})[launch.collective] = None
        for buffer in launch.writes:
            self._writers.setdefault(buffer, {})[launch.collective] = None

    def _release(self, launch: Launch) -> None:
        del self._in_flight[launch.collective]
        self._nbytes -= launch.nbytes
        for buffer in launch.reads:
            del self._readers[buffer][launch.collective]
        for buffer in launch.writes:
            del self._writers[buffer][launch.collective]

    def _check_room(self, launch: Launch) -> None:
        total = self._nbytes + launch.nbytes
        # What alone exceeds the limit is allowed, beside what holds nothing.
        shares = launch.nbytes > 0 and self._nbytes > 0
        if self._limit is not None and total > self._limit and shares:
            self._found(
                6,
                launch.collective.bucket,
                launch.where,
                f"with the {launch.collective}, which starts at {launch.where!r}, {total} bytes "
                f"are in flight, over the limit of {self._limit}; wait for an older collective "
                "first, or raise in_flight_mb",
            )

    def _wait(self, wait: Wait) -> None:
        collective, bucket = wait.collective, wait.collective.bucket
        flight = self._in_flight.get(collective)
        if flight is None:
            # Only a gather is waited for through each parameter of its bucket.
            if collective.kind != GATHER or collective not in self._launched:
                self._found(
                    2,
                    bucket,
                    wait.where,
                    f"{wait.where!r} waits for the {collective}, which is not in flight there: it "
                    "was never started, or was waited for before; pair each launch with one wait",
                )
            return
        self._release(flight.launch)
        if collective.kind == REDUCE:
            self._ready.add(bucket)
        elif collective.kind == GATHER and flight.repetition == self._repetition:
            self._endanger(bucket, "replaced", flight.launch.where)
        elif collective.kind == GATHER:
            for parameter in self._parameters(bucket):
                self._hazards.get(parameter, {}).pop(bucket, None)

    # --- compute ---

    def _compute(self, compute: Compute) -> None:
        for parameter in sorted(compute.reads):
            self._read(parameter, compute.where)
        self._use_buffers(compute.where, compute.reads_buffers, compute.writes_buffers)
        for parameter in sorted(compute.contributes):
            self._contribute(parameter, compute)
        for bucket in sorted(compute.updates):
            self._update(bucket, compute.where)

    def _use_buffers(self, where: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        for buffer in sorted(reads):
            for writer in self._oldest(self._writers, buffer):
                self._found(
                    2,
                    writer.bucket,
                    where,
                    f"{where!r} uses {buffer!r} while the {writer}, started at "
                    f"{self._in_flight[writer].launch.where!r}, still writes it; wait for it first",
                )
        for buffer in sorted(writes):
            for held, does in ((self._writers, "write"), (self._readers, "read")):
                for collective in self._oldest(held, buffer):
                    self._found(
                        5,
                        collective.bucket,
                        where,
                        f"{where!r} writes or frees {buffer!r} while the {collective}, started at "
                        f"{self._in_flight[collective].launch.where!r}, may still {does} it; wait "
                        "for it first, or keep the buffer until then",
                    )

    @staticmethod
    def _oldest(held: dict[str, dict[CollectiveId, None]], buffer: str) -> Iterator[CollectiveId]:
        """The first collective that holds the buffer, if one does."""
        yield from [*held.get(buffer, ())][:1]

    # --- rule 3 ---

    def _parameters(self, bucket: BucketKey) -> frozenset[str]:
        found = self._program.buckets.get(bucket)
        return found.parameters if found is not None else frozenset()

    def _endanger(
        self,
        bucket: BucketKey,
        kind: Literal["gathering", "updated", "replaced"],
        where: str,
    ) -> None:
        hazard = _Hazard(kind, where, self._repetition)
        for parameter in self._parameters(bucket):
            self._hazards.setdefault(parameter, {})[bucket] = hazard

    def _read(self, parameter: str, where: str) -> None:
        """A read. Each hazard is reported at the first read that it spoils, then forgotten."""
        for bucket, hazard in self._hazards.pop(parameter, {}).items():
            now = hazard.repetition == self._repetition
            if hazard.kind == "replaced" and not now:
                continue
            if now:
                cause = (
                    f"after {hazard.where!r} began to write its elements in the bucket, in the "
                    "same step; updates and gathers must come after the step's last read"
                )
            elif hazard.kind == "gathering":
                cause = (
                    f"while its gather, started at {hazard.where!r} in the step before, runs; "
                    "wait for the gather of each of its buckets before the first use"
                )
            else:
                cause = (
                    f"but {hazard.where!r} updated only this rank's shard of the bucket in the "
                    "step before; gather the bucket after its update"
                )
            self._found(
                3,
                bucket,
                where,
                f"{where!r} reads {parameter!r} of bucket {bucket.arena}.{bucket.bucket} {cause}",
            )

    # --- rules 2 and 4: from contributions to the update ---

    def _contribute(self, parameter: str, compute: Compute) -> None:
        for bucket in self._buckets_of.get(parameter, ()):
            launched = self._carried.get((bucket, compute.micro_step))
            if launched is None:
                waiting = self._uncarried.setdefault(bucket, {})
                waiting.setdefault(compute.micro_step, {})[parameter] = compute.where
                continue
            self._found(
                4,
                bucket,
                launched,
                f"the reduction of bucket {bucket.arena}.{bucket.bucket} starts at {launched!r}, "
                f"before {compute.where!r} contributes the gradient of {parameter!r}; launch it "
                "after the last contribution",
            )

    def _carry(self, launch: Launch) -> None:
        bucket = launch.collective.bucket
        for micro_step in sorted(launch.micro_steps):
            self._uncarried.get(bucket, {}).pop(micro_step, None)
            earlier = self._carried.get((bucket, micro_step))
            if earlier is not None:
                self._found(
                    4,
                    bucket,
                    launch.where,
                    f"the {launch.collective} that starts at {launch.where!r} carries gradients of "
                    f"micro-step {micro_step}, which the one at {earlier!r} carried already; "
                    "reduce each gradient once",
                )
            self._carried[bucket, micro_step] = launch.where

    def _update(self, bucket: BucketKey, where: str) -> None:
        name = f"bucket {bucket.arena}.{bucket.bucket}"
        running = CollectiveId(REDUCE, bucket) in self._in_flight
        if bucket in self._reduced and (running or bucket not in self._ready):
            self._found(
                2,
                bucket,
                where,
                f"{where!r} updates {name} before its reduction in this step was waited for; wait "
                "for it first",
            )
        self._ready.discard(bucket)
        for micro_step, waiting in self._uncarried.pop(bucket, {}).items():
            parameter, place = next(iter(waiting.items()))
            self._found(
                4,
                bucket,
                where,
                f"{where!r} updates {name} without the gradient of {parameter!r} that {place!r} "
                f"contributed in micro-step {micro_step}: no reduction carried it; launch one "
                "between the two",
            )
        found = self._program.buckets.get(bucket)
        sharded = found is not None and found.sharded
        self._endanger(bucket, "updated" if sharded else "replaced", where)
