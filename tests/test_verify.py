"""The static verifier: right programs pass, and every way of breaking one is found, with its rule,
bucket and place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.analysis import verify as verifier
from fxcomm.analysis.gradients import output_node, output_values
from fxcomm.analysis.program import (
    GATHER,
    REDUCE,
    Action,
    ArenaPlan,
    CollectiveId,
    Compute,
    ForwardAction,
    GraphActions,
    Launch,
    MicroStep,
    ParameterWait,
    Program,
    ProgramBucket,
    Wait,
    buckets_of_parameters,
    gradient_nodes,
    program_buckets,
    step_program,
)
from fxcomm.analysis.verify import Violation, require_valid, verify
from fxcomm.errors import FxcommError
from fxcomm.layout import ParameterSpec, ShardLayout, build_layout
from fxcomm.passes.stamp import BucketKey, stamp_of
from fxcomm.plan import OverlapPlan
from tests.line_count import lines_run
from tests.test_program import MODELS, Situation, captured, plan_of

Key = tuple[int, int, BucketKey, str]

many = settings(deadline=None, max_examples=150)
some = settings(deadline=None, max_examples=20)


def keys(violations: Sequence[Violation]) -> set[Key]:
    return {(v.rule, v.rank, v.bucket, v.where) for v in violations}


def assert_valid(programs: Sequence[Program], limit: int | None = None) -> None:
    violations = verify(programs, in_flight_bytes=limit)
    assert not violations, "\n".join(map(str, violations[:5]))


# --- right programs, from real graphs ---


# commshift, in_graph, micro_steps, every
WAYS = (
    (True, True, 1, True),
    (False, True, 2, True),
    (True, True, 2, False),
    (False, False, 2, True),
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bucket_bytes", [1000, 2500, 10**6])
@pytest.mark.parametrize("limit", [None, 1, 8000])
def test_verify_accepts_real_steps(model: str, bucket_bytes: int, limit: int | None) -> None:
    for commshift, in_graph, micro_steps, every in WAYS:
        situation = Situation(
            model,
            bucket_bytes,
            limit,
            commshift=commshift,
            in_graph=in_graph,
            micro_steps=micro_steps,
            every=every,
            functional_operators=bucket_bytes != 2500,
            split=bucket_bytes != 2500,
        )
        steps = [MicroStep((), (), every or i == 1) for i in range(micro_steps)]
        assert_valid(
            [step_program(1, steps, situation.arena()), situation.compose()],
            limit,
        )


# --- random right programs ---


@dataclass(frozen=True)
class Step:
    """Arguments of ``step_program``."""

    arena: ArenaPlan
    micro_steps: tuple[MicroStep, ...]

    @property
    def limit(self) -> int | None:
        return self.arena.plan.in_flight_bytes

    def program(self, rank: int = 0) -> Program:
        return step_program(rank, self.micro_steps, self.arena)

    def idle(self) -> Program:
        """The program of a rank that runs no graph."""
        steps = [MicroStep((), (), step.reduces) for step in self.micro_steps]
        return step_program(9, steps, self.arena)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Steps that are right by construction."""
    names = [f"p{i}" for i in range(draw(st.integers(1, 5)))]
    specs = [ParameterSpec(n, draw(st.integers(1, 400)), "float32", 4, "cpu") for n in names]
    layout = build_layout(
        [specs],
        world_size=2,
        bucket_bytes=draw(st.sampled_from([512, 1500, 10**6])),
        split=draw(st.booleans()),
    )
    arena = draw(arenas(layout))
    numbers, every = range(draw(st.integers(1, 2))), draw(st.booleans())
    micro_steps = []
    for number in numbers:
        used = draw(st.lists(st.sampled_from(names), max_size=8))
        forward = random_forward(number, used, used)
        # Gradients that stay local for a while are not launched in graphs.
        in_graphs = every or len(numbers) == 1
        edges = sorted(draw(st.lists(st.sampled_from(edges_of(arena.plan)), max_size=3)))
        graphs = [
            random_backward(draw, f"{number}.{first}", used, arena, specs, range(first, end))
            for first, end in (itertools.pairwise(edges) if in_graphs else [(0, 0)])
        ]
        before = edges[0] if edges and in_graphs and graphs else 0
        reduces = every or number == numbers[-1]
        micro_steps.append(MicroStep(forward, tuple(graphs), reduces, before))
    return Step(arena, tuple(micro_steps))


def edges_of(plan: OverlapPlan) -> list[int]:
    """How many buckets may have started in graphs when one graph ends: no parameter goes on beyond
    the last of them."""
    members = [b.parameters for b in program_buckets(plan.layout).values()]
    count = sum(plan.in_graph)
    cuts = [i for i in range(1, len(members)) if members[i - 1] & members[i]]
    return [edge for edge in range(count + 1) if edge not in cuts]


@st.composite
def arenas(draw: st.DrawFn, layout: ShardLayout) -> ArenaPlan:
    """Plans for a layout: any order and limit; some buckets at the front may start in graphs."""
    count = len(layout.buckets)
    in_graph = draw(st.integers(0, count))
    places = [bucket < in_graph for bucket in range(count)]
    limit = draw(st.one_of(st.none(), st.integers(1, 12000)))
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    wide = draw(st.booleans())
    return ArenaPlan(
        plan_of(layout, places, limit, draw(st.permutations(range(count)))),
        tuple(2 * bucket.nbytes for bucket in layout.buckets),
        tuple(bucket.nbytes if wide else 0 for bucket in layout.buckets),
        tuple(draw(flags)),
        group="ranks",
    )


def random_forward(
    number: int, used: Sequence[str], waited: Sequence[str]
) -> tuple[ForwardAction, ...]:
    """Reads in order, and a wait for each parameter before its first."""
    actions: list[ForwardAction] = []
    ready: set[str] = set()
    for i, parameter in enumerate(used):
        if parameter not in ready and parameter in waited:
            actions.append(ParameterWait(parameter, f"forward {number}: wait for {parameter}"))
            ready.add(parameter)
        actions.append(Compute(f"forward {number}: read {i}", reads=frozenset({parameter})))
    return tuple(actions)


def random_backward(
    draw: st.DrawFn,
    name: str,
    used: Sequence[str],
    arena: ArenaPlan,
    specs: Sequence[ParameterSpec],
    packs: range,
) -> GraphActions:
    """Contributions and reads, and each bucket of ``packs`` when it is complete."""
    contributing = draw(st.permutations(sorted({spec.name for spec in specs})))
    contributing = contributing[: draw(st.integers(0, len(contributing)))]
    missing = set(contributing)
    actions: list[Action] = []
    buckets = program_buckets(arena.plan.layout)
    waiting = [b for b in buckets if b.bucket in packs]
    packed = frozenset(waiting)
    running: list[tuple[CollectiveId, int]] = []
    for i, parameter in enumerate([*contributing, ""]):
        reads = frozenset({draw(st.sampled_from(used))}) if used and draw(st.booleans()) else ()
        contributes = frozenset({parameter}) if parameter else frozenset()
        where = f"backward {name}: node {i}"
        actions.append(Compute(where, reads=frozenset(reads), contributes=contributes))
        missing.discard(parameter)
        while waiting and not buckets[waiting[0]].parameters & missing:
            actions += launch_with_room(name, arena, waiting.pop(0), running)
    return GraphActions(tuple(actions), packed)


def launch_with_room(
    name: str, arena: ArenaPlan, bucket: BucketKey, running: list[tuple[CollectiveId, int]]
) -> Iterator[Action]:
    limit, nbytes = arena.plan.in_flight_bytes, arena.reduce_bytes[bucket.bucket]
    name = f"backward {name}: {bucket.bucket}"
    while limit is not None and running and nbytes + sum(n for _, n in running) > limit:
        oldest, _ = running.pop(0)
        yield Wait(oldest, f"{name} wait for {oldest.bucket.bucket}")
    collective = CollectiveId(REDUCE, bucket)
    reads, writes = frozenset({f"{name} packed"}), frozenset({f"{name} reduced"})
    yield Compute(f"{name} pack", writes_buffers=reads)
    yield Launch(collective, "ranks", reads, writes, nbytes, f"{name} launch")
    running.append((collective, nbytes))


@many
@given(steps())
def test_verify_accepts_steps_that_are_right_by_construction(step: Step) -> None:
    programs = [step.idle(), *(step.program(rank) for rank in range(2))]
    assert_valid(programs, step.limit)
    require_valid(programs, in_flight_bytes=step.limit)


# --- breaking programs ---


@dataclass(frozen=True)
class Mutation:
    """A broken program and what must be found: the rule, the bucket, and the place (None: any).
    Buckets that share the buffer may be named ``instead``: pieces of one large gradient do."""

    name: str
    actions: tuple[Action, ...]
    rule: int
    bucket: BucketKey
    where: str | None = None
    limit: int | None = None
    instead: frozenset[BucketKey] = frozenset()


def without(actions: Sequence[Action], place: int) -> tuple[Action, ...]:
    return (*actions[:place], *actions[place + 1 :])


def with_action(actions: Sequence[Action], place: int, action: Action) -> tuple[Action, ...]:
    return (*actions[:place], action, *actions[place:])


def moved(actions: Sequence[Action], source: int, target: int) -> tuple[Action, ...]:
    """The action at ``source`` put before the one at ``target``."""
    rest = without(actions, source)
    return with_action(rest, target - (target > source), actions[source])


def launches_in(actions: Sequence[Action], kind: str | None = None) -> list[tuple[int, Launch]]:
    return [
        (i, a)
        for i, a in enumerate(actions)
        if isinstance(a, Launch) and kind in (None, a.collective.kind)
    ]


def flights(actions: Sequence[Action]) -> Iterator[tuple[Launch, list[int]]]:
    """Each launch with the places before which something may be inserted while it is in flight, in
    steady state."""
    count = len(actions)
    for start, launch in launches_in(actions):
        places = []
        for step in range(1, count + 1):
            place = (start + step) % count
            action = actions[place]
            # Behind the last action is before the first, but of the same repetition.
            places.append(place if place else count)
            if isinstance(action, Wait) and action.collective == launch.collective:
                break
        yield launch, places


def drop_waits(program: Program) -> Iterator[Mutation]:
    actions = program.actions
    for i, action in enumerate(actions):
        if isinstance(action, Wait) and action.collective.kind == REDUCE:
            yield Mutation("drop a wait", without(actions, i), 2, action.collective.bucket)
    for _, launch in launches_in(actions, GATHER):
        kept = tuple(
            a for a in actions if not (isinstance(a, Wait) and a.collective == launch.collective)
        )
        bucket = launch.collective.bucket
        yield Mutation("drop all waits of a gather", kept, 2, bucket, launch.where)


def drop_launches(program: Program) -> Iterator[Mutation]:
    for i, launch in launches_in(program.actions):
        waits = [
            a.where
            for a in program.actions
            if isinstance(a, Wait) and a.collective == launch.collective
        ]
        where = waits[0] if len(waits) == 1 else None
        yield Mutation(
            "drop a launch", without(program.actions, i), 2, launch.collective.bucket, where
        )


def duplicates(program: Program) -> Iterator[Mutation]:
    for i, action in enumerate(program.actions):
        if isinstance(action, Compute):
            continue
        if isinstance(action, Wait) and action.collective.kind == GATHER:
            continue  # right: see test_verify_accepts_further_waits_for_a_gather
        again = replace(action, where="again")
        actions = with_action(program.actions, i + 1, again)
        yield Mutation("duplicate", actions, 2, action.collective.bucket, "again")


def early_writes(program: Program) -> Iterator[Mutation]:
    """Gathers and updates before a read of the old value."""
    actions = program.actions
    for i, action in enumerate(actions):
        if isinstance(action, Launch) and action.collective.kind == GATHER:
            buckets = [action.collective.bucket]
        elif isinstance(action, Compute) and action.updates:
            buckets = sorted(action.updates)
        else:
            continue
        for bucket, (place, read) in itertools.product(buckets, enumerate(actions[:i])):
            if isinstance(read, Compute) and read.reads & program.buckets[bucket].parameters:
                yield Mutation(
                    "write before a read", moved(actions, i, place), 3, bucket, read.where
                )


def reused_buffers(program: Program) -> Iterator[Mutation]:
    for launch, places in flights(program.actions):
        for place, buffer in itertools.product(places, sorted(launch.reads | launch.writes)):
            reuse = Compute("reuse", writes_buffers=frozenset({buffer}))
            actions = with_action(program.actions, place, reuse)
            sharing = frozenset(
                other.collective.bucket
                for _, other in launches_in(program.actions)
                if buffer in other.reads | other.writes
            )
            bucket = launch.collective.bucket
            yield Mutation("reuse a buffer", actions, 5, bucket, "reuse", instead=sharing)


def results_used_early(program: Program) -> Iterator[Mutation]:
    for launch, places in flights(program.actions):
        for place, buffer in itertools.product(places, sorted(launch.writes)):
            use = Compute("use", reads_buffers=frozenset({buffer}))
            actions = with_action(program.actions, place, use)
            yield Mutation("use a result", actions, 2, launch.collective.bucket, "use")


def early_reads(program: Program) -> Iterator[Mutation]:
    for launch, places in flights(program.actions):
        if launch.collective.kind == GATHER:
            bucket = launch.collective.bucket
            for place, parameter in itertools.product(
                places, sorted(program.buckets[bucket].parameters)
            ):
                read = Compute("read", reads=frozenset({parameter}))
                actions = with_action(program.actions, place, read)
                yield Mutation("read before the wait", actions, 3, bucket, "read")


def early_reductions(program: Program) -> Iterator[Mutation]:
    actions = program.actions
    for i, launch in launches_in(actions, REDUCE):
        bucket = launch.collective.bucket
        for place, action in enumerate(actions[:i]):
            if (
                isinstance(action, Compute)
                and action.micro_step in launch.micro_steps
                and action.contributes & program.buckets[bucket].parameters
            ):
                yield Mutation("reduce early", moved(actions, i, place), 4, bucket, launch.where)


def early_updates(program: Program) -> Iterator[Mutation]:
    """Updates before the reduction was waited for, and before it carried the last contribution."""
    actions = program.actions
    for i, action in enumerate(actions):
        for bucket in sorted(action.updates) if isinstance(action, Compute) else ():
            collective = CollectiveId(REDUCE, bucket)
            waits = [j for j, a in enumerate(actions[:i]) if waits_for(a, collective)]
            mutated = moved(actions, i, waits[-1])
            yield Mutation("update before the wait", mutated, 2, bucket, action.where)
            last = [j for j, a in launches_in(actions[:i], REDUCE) if a.collective == collective][
                -1
            ]
            carried = [
                j
                for j, a in enumerate(actions[:last])
                if isinstance(a, Compute)
                and a.micro_step == max(actions[last].micro_steps)  # type: ignore[union-attr]
                and a.contributes & program.buckets[bucket].parameters
            ]
            if carried:
                mutated = moved(actions, i, last)
                yield Mutation("update before the launch", mutated, 4, bucket, action.where)


def waits_for(action: Action, collective: CollectiveId) -> bool:
    return isinstance(action, Wait) and action.collective == collective


def wrong_waits(program: Program) -> Iterator[Mutation]:
    """Waits on another bucket: a reduction's, and the one wait before a gathered parameter's
    read."""
    actions = program.actions
    for i, action in enumerate(actions):
        if not isinstance(action, Wait):
            continue
        right = action.collective.bucket
        for wrong in program.buckets:
            if wrong == right:
                continue
            wait = replace(action, collective=replace(action.collective, bucket=wrong))
            mutated = (*actions[:i], wait, *actions[i + 1 :])
            if action.collective.kind == REDUCE:
                yield Mutation("wait on the wrong bucket", mutated, 2, right)
                continue
            read = next_touch(program, i, right)
            if read is not None and in_flight_at(actions, i, action.collective):
                yield Mutation("wait on the wrong bucket", mutated, 3, right, read.where)


def next_touch(program: Program, place: int, bucket: BucketKey) -> Compute | None:
    """What follows on a bucket's gather or parameters, if that is a read."""
    for action in program.actions[place + 1 :]:
        if isinstance(action, Compute):
            if action.reads & program.buckets[bucket].parameters:
                return action
            if bucket in action.updates:
                return None
        elif action.collective == CollectiveId(GATHER, bucket):
            return None
    return None


def in_flight_at(actions: Sequence[Action], place: int, collective: CollectiveId) -> bool:
    """Whether the collective is in flight before the action at ``place``, in steady state."""
    before = [*actions[place:], *actions[:place]]
    touching = [a for a in before if not isinstance(a, Compute) and a.collective == collective]
    return bool(touching) and isinstance(touching[-1], Launch)


def exceeded_limits(program: Program) -> Iterator[Mutation]:
    running: dict[CollectiveId, int] = {}
    for repetition, action in itertools.product(range(2), program.actions):
        if isinstance(action, Wait):
            running.pop(action.collective, None)
        elif isinstance(action, Launch):
            others = sum(running.values())
            if repetition and others and action.nbytes:
                limit = others + action.nbytes - 1
                bucket, where = action.collective.bucket, action.where
                yield Mutation("exceed", program.actions, 6, bucket, where, limit)
            running[action.collective] = action.nbytes


def forgotten_gathers(program: Program) -> Iterator[Mutation]:
    """Neither launch nor waits: no rule on collectives alone would see that."""
    read = {p for a in program.actions if isinstance(a, Compute) for p in a.reads}
    for _, launch in launches_in(program.actions, GATHER):
        bucket = launch.collective.bucket
        kept = tuple(
            a
            for a in program.actions
            if isinstance(a, Compute) or a.collective != launch.collective
        )
        if read & program.buckets[bucket].parameters:
            yield Mutation("forget a gather", kept, 3, bucket)


def forgotten_reductions(program: Program) -> Iterator[Mutation]:
    for _, launch in launches_in(program.actions, REDUCE):
        bucket = launch.collective.bucket
        kept = tuple(
            a
            for a in program.actions
            if isinstance(a, Compute) or a.collective != launch.collective
        )
        contributed = {p for a in kept if isinstance(a, Compute) for p in a.contributes}
        if contributed & program.buckets[bucket].parameters:
            yield Mutation("forget a reduction", kept, 4, bucket)


MUTATIONS: tuple[Callable[[Program], Iterator[Mutation]], ...] = (
    drop_waits,
    drop_launches,
    duplicates,
    early_writes,
    reused_buffers,
    results_used_early,
    early_reads,
    early_reductions,
    early_updates,
    wrong_waits,
    exceeded_limits,
    forgotten_gathers,
    forgotten_reductions,
)


def assert_found(mutation: Mutation, program: Program, limit: int | None) -> None:
    limit = limit if mutation.limit is None else mutation.limit
    violations = verify([replace(program, actions=mutation.actions)], in_flight_bytes=limit)
    buckets = mutation.instead | {mutation.bucket}
    found = [v for v in violations if v.rule == mutation.rule and v.bucket in buckets]
    if mutation.where is not None:
        found = [v for v in found if v.where == mutation.where]
    assert found, (mutation.name, mutation.rule, mutation.bucket, mutation.where, violations)
    assert all(repr(v.where) in v.message for v in found)
    assert all(f"{v.bucket.arena}.{v.bucket.bucket}" in v.message for v in found)


@pytest.mark.parametrize("mutate", MUTATIONS)
@some
@given(step=steps())
def test_verify_finds_every_mutation(
    mutate: Callable[[Program], Iterator[Mutation]], step: Step
) -> None:
    program = step.program()
    for mutation in mutate(program):
        assert_found(mutation, program, step.limit)


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize(
    "situation",
    [
        Situation("mlp", 1500, micro_steps=2, limit=6000),
        Situation("reused", 500, split=True),
        Situation("reused", 1500, commshift=False, micro_steps=2, every=False),
    ],
    ids=str,
)
def test_verify_finds_every_mutation_of_real_steps(
    mutate: Callable[[Program], Iterator[Mutation]], situation: Situation
) -> None:
    program = situation.compose()
    found = 0
    # Every position would be too many for one test; a stride reaches all kinds of places.
    for mutation in itertools.islice(mutate(program), 0, None, 7):
        assert_found(mutation, program, situation.limit)
        found += 1
    assert found or (mutate is exceeded_limits and situation.limit is not None)


@some
@given(steps(), st.data())
def test_verify_finds_launches_in_another_order_on_one_rank(
    step: Step, data: st.DataObject
) -> None:
    program = step.program()
    launches = launches_in(program.actions)
    others = [replace(program, rank=rank) for rank in (0, 2)]
    pairs = [
        pair
        for pair in itertools.combinations(launches, 2)
        if len({(launch.collective, launch.nbytes) for _, launch in pair}) == 2
    ]
    for (i, one), (j, other) in data.draw(st.permutations(pairs))[:5]:
        actions = list(program.actions)
        actions[i], actions[j] = other, one
        odd = Program(1, tuple(actions), program.buckets)
        place = data.draw(st.integers(0, 2))
        programs = [*others[:place], odd, *others[place:]]
        found = [v for v in verify(programs) if v.rule == 1]
        assert [(v.rank, v.bucket, v.where) for v in found] == [
            (1, other.collective.bucket, other.where)
        ]
        assert repr(other.where) in found[0].message


def test_verify_finds_a_rank_that_does_less_or_other_sizes() -> None:
    program = Situation("mlp", 1500).compose()
    (i, launch), *_ = reversed(launches_in(program.actions))
    less = Program(1, without(program.actions, i), program.buckets)
    ranks = [program, less, replace(program, rank=2)]
    (found,) = [v for v in verify(ranks) if v.rule == 1]
    assert (found.rank, found.bucket, found.where) == (
        1,
        launch.collective.bucket,
        "the step's end",
    )
    other = (*program.actions[:i], replace(launch, nbytes=1), *program.actions[i + 1 :])
    ranks[1] = Program(1, other, program.buckets)
    (found,) = verify(ranks)
    assert (found.rule, found.rank, found.where) == (1, 1, launch.where)
    more = Program(1, (*program.actions, replace(launch, where="more")), program.buckets)
    (found, *_) = verify([program, more, replace(program, rank=2)])
    assert (found.rule, found.rank, found.where) == (1, 1, "more")
    # Another group is another order.
    group = (*program.actions[:i], replace(launch, group="other"), *program.actions[i + 1 :])
    assert {v.rule for v in verify([program, Program(1, group, program.buckets)])} == {1}


@some
@given(steps())
def test_verify_accepts_further_waits_for_a_gather(step: Step) -> None:
    program = step.program()
    for i, action in enumerate(program.actions):
        if isinstance(action, Wait) and action.collective.kind == GATHER:
            twice = with_action(program.actions, i + 1, replace(action, where="again"))
            assert_valid([replace(program, actions=twice)], step.limit)


def test_verify_asks_for_every_bucket_of_a_cut_parameter() -> None:
    situation = Situation("gpt", 1000)
    program = situation.compose()
    places = buckets_of_parameters(program.buckets)
    parameter = max(places, key=lambda p: len(places[p]))
    assert len(places[parameter]) > 2
    for bucket in places[parameter]:
        # Of this bucket's waits, all but the last ones come before the parameter's first read.
        kept = tuple(
            a
            for a in program.actions
            if not (isinstance(a, Wait) and a.collective == CollectiveId(GATHER, bucket))
        )
        found = verify([replace(program, actions=kept)])
        assert any(
            (v.rule, v.bucket) == (3, bucket) and repr(parameter) in v.message for v in found
        )


# --- breaking graphs ---


def stamped(gm: torch.fx.GraphModule, role: str) -> list[torch.fx.Node]:
    """The nodes that complete a role, in order."""
    return [n for n in gm.graph.nodes if (s := stamp_of(n)) and s.role == role and s.final]


def key_of(node: torch.fx.Node) -> BucketKey:
    stamp = stamp_of(node)
    assert stamp is not None
    return stamp.bucket


GRAPHS = pytest.mark.parametrize(
    "situation",
    [
        Situation("gpt", 3000, limit=18000),
        Situation("reused", 500, limit=2200, micro_steps=2),
        Situation("mlp", 1500, limit=1, functional_operators=False),
    ],
    ids=str,
)


def verify_graph(situation: Situation, gm: torch.fx.GraphModule) -> tuple[Violation, ...]:
    """Rebuilds rank 1's program from a changed backward graph."""
    right = situation.compose()
    ranks = [right, situation.compose(1, gm), replace(right, rank=2)]
    violations = verify(ranks, in_flight_bytes=situation.limit)
    assert all(v.rank == 1 for v in violations)
    return violations


def assert_names(
    violations: Sequence[Violation], rule: int, bucket: BucketKey, node: str | None = None
) -> None:
    found = [v for v in violations if (v.rule, v.bucket) == (rule, bucket)]
    if node is not None:
        found = [v for v in found if v.where.endswith(f": {node}")]
    assert found, (rule, bucket, node, violations)


@GRAPHS
def test_verify_finds_an_erased_wait_in_a_graph(situation: Situation) -> None:
    situation = replace(situation, functional_operators=True)
    count = len(stamped(situation.lowered(), "finish"))
    assert count
    for i in range(count):
        gm = situation.lowered()
        shard = stamped(gm, "finish")[i]
        launch = next(n for n in stamped(gm, "launch") if key_of(n) == key_of(shard))
        wait = waits_on(launch)
        users = [n.name for n in wait.users]
        assert len(users) == 1
        wait.replace_all_uses_with(launch)
        gm.graph.erase_node(wait)
        assert_names(verify_graph(situation, gm), 2, key_of(shard))


def waits_on(launch: torch.fx.Node) -> torch.fx.Node:
    """The node that waits for a launch in its graph."""
    (wait,) = [n for n in launch.users if n.op != "output"]
    return wait


@GRAPHS
def test_verify_finds_an_erased_launch_in_a_graph(situation: Situation) -> None:
    for i in range(len(stamped(situation.lowered(), "launch"))):
        gm = situation.lowered()
        launch = stamped(gm, "launch")[i]
        (packed,) = launch.all_input_nodes
        launch.replace_all_uses_with(packed)
        gm.graph.erase_node(launch)
        assert_names(verify_graph(situation, gm), 2, key_of(launch))


@GRAPHS
def test_verify_finds_swapped_launches_in_a_graph(situation: Situation) -> None:
    for i in range(len(stamped(situation.lowered(), "launch")) - 1):
        gm = situation.lowered()
        first, second = stamped(gm, "launch")[i : i + 2]
        # The earlier bucket is launched later: its operand exists, nothing else is wrong.
        second.append(first)
        violations = verify_graph(situation, gm)
        assert_names(violations, 1, key_of(second), second.name)


@GRAPHS
def test_verify_finds_a_launch_before_a_contribution_in_a_graph(situation: Situation) -> None:
    case = captured(situation.model)
    gradients = gradient_nodes(case.backward.graph, case.gradients)
    for i in range(len(stamped(situation.lowered(), "launch"))):
        gm = situation.lowered()
        launch = stamped(gm, "launch")[i]
        nodes = list(gm.graph.nodes)
        before = nodes[: nodes.index(launch)]
        stamp = stamp_of(launch)
        assert stamp is not None
        pieces = reachable(launch)
        needed = [n for n in before if n.name in gradients and n in pieces]
        needed[-1].prepend(launch)
        assert_names(verify_graph(situation, gm), 4, key_of(launch), launch.name)


def reachable(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The stamped inputs of a node, and theirs, and the gradients behind them."""
    found: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                if stamp_of(source) is not None:
                    pending.append(source)
    return found


@GRAPHS
def test_verify_finds_a_wait_on_the_wrong_bucket_in_a_graph(situation: Situation) -> None:
    names = [(n.name, key_of(n)) for n in stamped(situation.lowered(), "launch")]
    for i in range(len(stamped(situation.lowered(), "finish"))):
        for wrong in (names[i - 1], names[i + 1 - len(names)]):
            gm = situation.lowered()
            bucket = key_of(stamped(gm, "finish")[i])
            launches = {n.name: n for n in stamped(gm, "launch")}
            right = next(n for n in launches.values() if key_of(n) == bucket)
            waits_on(right).replace_input_with(right, launches[wrong[0]])
            violations = verify_graph(situation, gm)
            assert_names(violations, 2, bucket)


@GRAPHS
def test_verify_finds_a_doubled_wait_in_a_graph(situation: Situation) -> None:
    for i in range(len(stamped(situation.lowered(), "finish"))):
        gm = situation.lowered()
        bucket = key_of(stamped(gm, "finish")[i])
        wait = waits_on(next(n for n in stamped(gm, "launch") if key_of(n) == bucket))
        with gm.graph.inserting_after(wait):
            again = gm.graph.node_copy(wait)
        assert_names(verify_graph(situation, gm), 2, bucket, again.name)


@GRAPHS
def test_verify_finds_buffers_that_a_graph_does_not_keep(situation: Situation) -> None:
    """What is in flight at the graph's end must be among its outputs."""
    lowered = situation.lowered()
    returned = set(output_values(lowered.graph))
    names = [n.name for n in stamped(lowered, "launch") if n in returned]
    assert names
    for name, lost in itertools.product(names, ("launch", "pack")):
        gm = situation.lowered()
        launch = next(n for n in gm.graph.nodes if n.name == name)
        node = next(n for n in stamped(gm, lost) if key_of(n) == key_of(launch))
        output = output_node(gm.graph)
        output.args = (tuple(v for v in output_values(gm.graph) if v is not node),)
        violations = verify_graph(situation, gm)
        # Other pieces of a large gradient keep its storage.
        if "slice" not in str(node.target):
            assert_names(violations, 5, key_of(launch))


@GRAPHS
def test_verify_finds_in_place_writes_in_a_graph(situation: Situation) -> None:
    for i in range(len(stamped(situation.lowered(), "launch"))):
        gm = situation.lowered()
        launch = stamped(gm, "launch")[i]
        (packed,) = launch.all_input_nodes
        with gm.graph.inserting_after(launch):
            gm.graph.call_function(torch.ops.aten.zero_.default, (packed,))
        assert_names(verify_graph(situation, gm), 5, key_of(launch), "zero__default")


# --- a slow second opinion ---


def oracle(programs: Sequence[Program], limit: int | None) -> set[Key]:
    """What is wrong, found by looking at all earlier actions again at each action."""
    found = set()
    for program in programs:
        history = History(program)
        count = len(program.actions)
        for now in range(count, 2 * count):
            found |= {
                (rule, program.rank, bucket, where)
                for rule, bucket, where in history.wrong(now, limit)
            }
    return found | different_orders(programs)


def different_orders(programs: Sequence[Program]) -> set[Key]:
    """Rule 1 for two or more ranks of which most agree, or else the first is right."""
    found: set[Key] = set()
    groups = {a.group for p in programs for a in p.actions if isinstance(a, Launch)}
    for group in groups:
        orders = [
            [a for a in p.actions if isinstance(a, Launch) and a.group == group] for p in programs
        ]
        plain = [[(a.collective, a.nbytes) for a in order] for order in orders]
        usual = max(plain, key=plain.count)
        for program, order, these in zip(programs, orders, plain, strict=True):
            if these != usual:
                place = next(i for i in range(len(these) + 1) if these[: i + 1] != usual[: i + 1])
                bucket = (these[place:] or usual[place:])[0][0].bucket
                where = order[place].where if place < len(order) else "the step's end"
                found.add((1, program.rank, bucket, where))
    return found


class History:
    """Two repetitions of a program; every question is answered by going through all of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.count = len(program.actions)
        self.events: list[Action] = [*program.actions, *program.actions]

    def repetition(self, i: int) -> int:
        return i // self.count

    def on(self, collective: CollectiveId, now: int) -> list[int]:
        return [
            i
            for i in range(now)
            if not isinstance(e := self.events[i], Compute) and e.collective == collective
        ]

    def flight(self, collective: CollectiveId, now: int) -> int | None:
        """The launch by which the collective is in flight before ``now``."""
        touching = self.on(collective, now)
        return touching[-1] if touching and isinstance(self.events[touching[-1]], Launch) else None

    def running(self, now: int) -> list[Launch]:
        """What is in flight before ``now``, in order of launch."""
        ids = {e.collective for e in self.events if isinstance(e, Launch)}
        starts = sorted(s for c in ids if (s := self.flight(c, now)) is not None)
        return [e for s in starts if isinstance(e := self.events[s], Launch)]

    def wrong(self, now: int, limit: int | None) -> Iterator[tuple[int, BucketKey, str]]:
        action = self.events[now]
        if isinstance(action, Wait):
            known = any(
                isinstance(e, Launch) and e.collective == action.collective for e in self.events
            )
            if self.flight(action.collective, now) is None and not (
                action.collective.kind == GATHER and known
            ):
                yield 2, action.collective.bucket, action.where
        elif isinstance(action, Launch):
            yield from self.wrong_launch(now, action, limit)
        else:
            yield from self.buffers(now, action.where, action.reads_buffers, action.writes_buffers)
            for parameter in action.reads:
                yield from self.wrong_read(now, parameter, action.where)
            for parameter in action.contributes:
                yield from self.late(now, parameter, action.micro_step)
            for bucket in action.updates:
                yield from self.wrong_update(now, bucket, action.where)

    def buffers(
        self,
        now: int,
        where: str,
        reads: frozenset[str],
        writes: frozenset[str],
        own: CollectiveId | None = None,
    ) -> Iterator[tuple[int, BucketKey, str]]:
        running = [launch for launch in self.running(now) if launch.collective != own]
        for buffer in reads | writes:
            writing = [launch.collective.bucket for launch in running if buffer in launch.writes]
            reading = [launch.collective.bucket for launch in running if buffer in launch.reads]
            if buffer in reads:
                yield from ((2, bucket, where) for bucket in writing[:1])
            if buffer in writes:
                yield from ((5, bucket, where) for bucket in [*writing[:1], *reading[:1]])

    def wrong_launch(
        self, now: int, launch: Launch, limit: int | None
    ) -> Iterator[tuple[int, BucketKey, str]]:
        own, bucket = launch.collective, launch.collective.bucket
        if self.flight(own, now) is not None:
            yield 2, bucket, launch.where
        yield from self.buffers(now, launch.where, launch.reads, launch.writes, own)
        others = [other.nbytes for other in self.running(now) if other.collective != own]
        shares = launch.nbytes > 0 and sum(others) > 0
        if limit is not None and shares and sum(others) + launch.nbytes > limit:
            yield 6, bucket, launch.where
        if own.kind == REDUCE:
            for i in self.carriers(bucket, now):
                earlier = self.events[i]
                assert isinstance(earlier, Launch)
                if earlier.micro_steps & launch.micro_steps:
                    yield 4, bucket, launch.where

    def carriers(self, bucket: BucketKey, now: int) -> list[int]:
        """The reductions of a bucket that started in this repetition before ``now``."""
        start = self.repetition(now) * self.count
        collective = CollectiveId(REDUCE, bucket)
        return [
            i for i in self.on(collective, now) if i >= start and isinstance(self.events[i], Launch)
        ]

    def late(self, now: int, parameter: str, step: int) -> Iterator[tuple[int, BucketKey, str]]:
        for bucket, info in self.program.buckets.items():
            if parameter in info.parameters:
                launches = [self.events[i] for i in self.carriers(bucket, now)]
                missed = [e for e in launches if isinstance(e, Launch) and step in e.micro_steps]
                yield from ((4, bucket, e.where) for e in missed[-1:])

    def updates(self, bucket: BucketKey, now: int) -> list[int]:
        return [
            i
            for i in range(now)
            if isinstance(e := self.events[i], Compute) and bucket in e.updates
        ]

    def wrong_update(
        self, now: int, bucket: BucketKey, where: str
    ) -> Iterator[tuple[int, BucketKey, str]]:
        collective = CollectiveId(REDUCE, bucket)
        since = max(self.updates(bucket, now), default=-1)
        if self.on(collective, 2 * self.count):
            ready = any(
                isinstance(self.events[i], Wait) and self.flight(collective, i) is not None
                for i in self.on(collective, now)
                if i > since
            )
            if not ready or self.flight(collective, now) is not None:
                yield 2, bucket, where
        for i in range(since + 1, now + 1):
            event = self.events[i]
            if not isinstance(event, Compute):
                continue
            for _ in event.contributes & self.program.buckets[bucket].parameters:
                step = event.micro_step
                lost = any(step in self.launch(j).micro_steps for j in self.carriers(bucket, i))
                carried = any(
                    isinstance(e := self.events[j], Launch) and step in e.micro_steps
                    for j in self.on(collective, now)
                    if j > i
                )
                if not lost and not carried:
                    yield 4, bucket, where

    def launch(self, i: int) -> Launch:
        event = self.events[i]
        assert isinstance(event, Launch)
        return event

    def wrong_read(
        self, now: int, parameter: str, where: str
    ) -> Iterator[tuple[int, BucketKey, str]]:
        for bucket, info in self.program.buckets.items():
            if parameter not in info.parameters:
                continue
            since = self.last_change(bucket, now)
            if since is None or any(
                isinstance(e := self.events[i], Compute) and parameter in e.reads
                for i in range(since + 1, now)
            ):
                continue  # nothing changed, or an earlier read was spoilt by it already
            if self.spoils(bucket, since, now):
                yield 3, bucket, where

    def last_change(self, bucket: BucketKey, now: int) -> int | None:
        """The last update, launch or effective wait of the bucket's gather before ``now``."""
        collective = CollectiveId(GATHER, bucket)
        changes = [
            i
            for i in self.on(collective, now)
            if isinstance(self.events[i], Launch) or self.flight(collective, i) is not None
        ]
        return max([*changes, *self.updates(bucket, now)], default=None)

    def spoils(self, bucket: BucketKey, since: int, now: int) -> bool:
        change = self.events[since]
        same = self.repetition(since) == self.repetition(now)
        if isinstance(change, Launch):
            return True
        if isinstance(change, Compute):
            return same or self.program.buckets[bucket].sharded
        started = self.flight(CollectiveId(GATHER, bucket), since)
        assert started is not None
        return same and self.repetition(started) == self.repetition(now)


NAMES = ("a", "b", "c")
BUCKETS = (BucketKey(0, 0), BucketKey(0, 1))
BUFFERS = ("x", "y", "z")


def subsets(values: Sequence[Any], most: int = 1) -> st.SearchStrategy[frozenset[Any]]:
    return st.frozensets(st.sampled_from(values), max_size=most)


@st.composite
def any_programs(draw: st.DrawFn) -> list[Program]:
    """One to three ranks with any actions, mostly wrong."""
    buckets: Mapping[BucketKey, ProgramBucket] = {
        b: ProgramBucket(draw(subsets(NAMES, 3)), draw(st.booleans())) for b in BUCKETS
    }
    ids = st.builds(
        CollectiveId, st.sampled_from([REDUCE, GATHER, "sum"]), st.sampled_from(BUCKETS)
    )
    launch = st.builds(
        Launch,
        ids,
        st.sampled_from(["g", "g", "g", "h"]),
        subsets(BUFFERS),
        subsets(BUFFERS),
        st.integers(0, 2),
        st.just(""),
        subsets((0, 1), 2),
    )
    compute = st.builds(
        Compute,
        st.just(""),
        subsets(NAMES, 2),
        subsets(BUCKETS),
        subsets(BUFFERS),
        subsets(BUFFERS),
        subsets(NAMES),
        st.integers(0, 1),
    )
    action = st.one_of(launch, st.builds(Wait, ids, st.just("")), compute)
    programs = []
    for rank in range(draw(st.integers(1, 3))):
        if rank == 0 or draw(st.booleans()):
            actions = draw(st.lists(action, max_size=14))
        named = tuple(replace(a, where=f"node {i}") for i, a in enumerate(actions))
        programs.append(Program(rank, named, buckets))
    return programs


@settings(deadline=None, max_examples=200)
@given(any_programs(), st.one_of(st.none(), st.integers(0, 5)))
def test_verify_agrees_with_the_oracle_on_any_programs(
    programs: list[Program], limit: int | None
) -> None:
    assert keys(verify(programs, in_flight_bytes=limit)) == oracle(programs, limit)


@some
@given(steps(), st.data())
def test_verify_agrees_with_the_oracle_on_broken_steps(step: Step, data: st.DataObject) -> None:
    program = step.program()
    assert oracle([program], step.limit) == set()
    actions = list(program.actions)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(actions) - 1))
        action = actions.pop(place)
        if data.draw(st.booleans()):
            actions.insert(data.draw(st.integers(0, len(actions))), action)
    broken = replace(program, rank=1, actions=tuple(actions))
    ranks, limit = [program, broken], step.limit
    assert keys(verify(ranks, in_flight_bytes=limit)) == oracle(ranks, limit)


# --- errors and cost ---


def test_verify_errors_list_the_first_violations() -> None:
    program = Situation("mlp", 1500).compose()
    broken = replace(program, actions=tuple(a for a in program.actions if not isinstance(a, Wait)))
    count = len(verify([broken]))
    assert count > 6
    with pytest.raises(FxcommError, match=r"nothing was run.*:\n  rule \d, rank 0: ") as raised:
        require_valid([broken])
    lines = str(raised.value).splitlines()
    assert len(lines) == 7
    assert lines[-1] == f"  ... and {count - 5} more"
    require_valid([program])
    require_valid([])


def test_verify_ignores_what_it_does_not_know() -> None:
    unknown = Program(
        0,
        (Compute("node", reads=frozenset({"stranger"}), contributes=frozenset({"stranger"})),),
        {},
    )
    assert_valid([unknown])
    assert_valid([Program(0, (), {})])


def chain_program(layers: int, rank: int = 0) -> Program:
    """A step of a model of equal layers, each parameter cut over two buckets."""
    specs = [ParameterSpec(f"p{i}", 256, "float32", 4, "cpu") for i in range(layers)]
    layout = build_layout([specs], world_size=2, bucket_bytes=512, split=True)
    plan, names = plan_of(layout), [spec.name for spec in specs]
    forward = random_forward(0, names, names)
    actions: list[Action] = []
    for i, name in enumerate(reversed(names)):
        actions.append(Compute(f"backward: {i}", frozenset({name}), contributes=frozenset({name})))
    step = MicroStep(forward, (GraphActions(tuple(actions)),))
    sizes = tuple(2 * bucket.nbytes for bucket in layout.buckets)
    return step_program(rank, [step], ArenaPlan(plan, sizes, sizes, (True,) * len(sizes)))


@pytest.mark.parametrize("broken", [False, True])
def test_verify_takes_linear_time(broken: bool) -> None:
    """Lines per action do not grow with the program, also where everything is wrong."""
    costs = []
    for layers in (40, 320):
        program = chain_program(layers)
        if broken:
            kept = tuple(a for a in program.actions if not isinstance(a, Wait))
            program = replace(program, actions=kept[::-1])
        ranks = [program, replace(program, rank=1)]
        lines = lines_run(
            lambda ranks=ranks: verify(ranks, in_flight_bytes=10**9), verifier.__file__
        )
        costs.append(lines / len(program.actions))
    assert costs[0] > 0
    assert costs[1] < 1.05 * costs[0]
