"""The code that Inductor emits for rewritten backward graphs: where collectives start, where they
are waited for, and which memory is used meanwhile. On the fake process group, as one of 4 ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from fxcomm.plan import OverlapPlan
from fxcomm.registry import REGISTRY
from tests.test_fake_ranks import AsFakeRank, as_fake_rank  # noqa: F401 - a fixture
from tests.zoo import TiedGPT

WORLD = 4


# --- the emitted code as events ---


@dataclass(frozen=True)
class Event:
    """A line of the emitted function that matters here.

    ``kind`` is "launch", "wait", "matmul" or "other" (any other line). ``buffer`` is what a launch
    makes or a wait waits for, ``operand`` what a launch sends.
    """

    kind: str
    line: str
    buffer: str = ""
    operand: str = ""


_COLLECTIVE = r"torch\.ops\._c10d_functional\."
_LAUNCH = re.compile(
    rf"(\w+) = (?:{_COLLECTIVE}(?:all_to_all_single|all_reduce)|torch\.ops\.fxcomm\.exchange)"
    r"\.default\((\w+)"
)
_LAUNCH_IN_PLACE = re.compile(rf"{_COLLECTIVE}all_reduce_\.default\((\w+)")
_WAIT = re.compile(rf"{_COLLECTIVE}wait_tensor\.default\((\w+)\)")
_MATMUL = re.compile(r"extern_kernels\.\w*mm\(|_flash_attention_for_cpu_backward")


def events_of(code: str) -> list[Event]:
    """The lines of the emitted ``call`` in order."""
    body = code[code.index("def call(") :]
    body = body[: body.index("\n        return")]
    return [_event(line.strip()) for line in body.splitlines()]


def _event(line: str) -> Event:
    if found := _LAUNCH.search(line):
        return Event("launch", line, found[1], found[2])
    if found := _LAUNCH_IN_PLACE.search(line):
        return Event("launch", line, found[1], found[1])
    if found := _WAIT.search(line):
        return Event("mark" if found[1] == "marks" else "wait", line, found[1])
    return Event("matmul" if _MATMUL.search(line) else "other", line)


# --- what is compiled ---


class Layers(nn.Sequential):
    """Equal layers; a bucket for each. Each but the first costs two matmuls in backward."""

    def __init__(self, width: int) -> None:
        super().__init__(*[f for _ in range(6) for f in (nn.Linear(width, width), nn.Tanh())])


LAYER_MB = 4 * (48 * 48 + 64) / 2**20
WIDE_MB = 4 * (512 * 512 + 512) / 2**20  # large enough to be exchanged
GPT_MB = 0.008
# The benchmark's blocks, in buckets of its default size.
BLOCK = {"width": 384, "layers": 2}
BLOCKS_MB = 4.0


@dataclass(frozen=True)
class Emitted:
    """The backward code that holds collectives, and the plan."""

    events: tuple[Event, ...]
    plan: OverlapPlan
    returned: str
    code: str

    def places(self, kind: str) -> list[int]:
        """Indices of the events of a kind."""
        return [i for i, event in enumerate(self.events) if event.kind == kind]

    def launches(self) -> list[Event]:
        return [event for event in self.events if event.kind == "launch"]

    def between(self, start: int, end: int, kind: str) -> int:
        """How many events of a kind lie between two places."""
        return sum(event.kind == kind for event in self.events[start + 1 : end])


def _without_kernels() -> AbstractContextManager[object]:
    """Emitted C++ kernels do nothing, as collectives do here: compiling them takes minutes."""

    def nothing(self: AsyncCompile, argtypes: Sequence[str], source: str) -> Callable[..., None]:
        return lambda *args: None

    return patch.object(AsyncCompile, "cpp_pybinding", nothing)


def emitting_job(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    """Trains two steps with Inductor; the emitted codes and the plan."""
    del rank, world_size
    torch.manual_seed(0)
    size = BLOCK if name == "blocks" else {"width": 16, "layers": 3}
    width = {"layers": 48, "wide layers": 512}.get(name)
    model: nn.Module = Layers(width) if width else TiedGPT(vocabulary=23, **size)
    inputs = torch.randn(8, width) if width else torch.randint(0, 23, (2, 9))
    compiled = torch.compile(model, backend="fxcomm", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(2):
            compiled(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    # A hit in the graph cache would emit nothing.
    with inductor_config.patch(fx_graph_cache=False), _without_kernels():
        _, codes = run_and_get_code(train)
    (managed,) = REGISTRY.models_of(model.parameters())
    return codes, managed.arenas[0].plan.to_json()


@pytest.fixture(scope="module")
def emit(as_fake_rank: AsFakeRank) -> Callable[..., Emitted]:  # noqa: F811
    """Compiles a model (once for all tests) and reads its backward."""

    @cache
    def run(name: str, **options: Any) -> Emitted:
        codes, plan = as_fake_rank(1, WORLD, emitting_job, name, options)
        launching = [code for code in codes if any(e.kind == "launch" for e in events_of(code))]
        assert len(launching) == 1, "one backward graph launches all collectives"
        (code,) = launching
        returned = re.findall(r"\n        return \((.*)\)", code)[-1]
        return Emitted(tuple(events_of(code)), OverlapPlan.from_json(plan), returned, code)

    return run


Emit = Callable[..., Emitted]

# name: (model, options)
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers": ("layers", {"bucket_mb": LAYER_MB}),
    "layers, little in flight": ("layers", {"bucket_mb": LAYER_MB, "in_flight_mb": 4 * LAYER_MB}),
    "gpt": ("gpt", {"bucket_mb": GPT_MB}),
    "gpt, little in flight": ("gpt", {"bucket_mb": GPT_MB, "in_flight_mb": 5 * GPT_MB}),
    "gpt, 16 bits": ("gpt", {"bucket_mb": GPT_MB, "reduce_dtype": "bfloat16"}),
    "layers, ddp": ("layers", {"bucket_mb": LAYER_MB, "stage": "ddp"}),
    "wide layers": ("wide layers", {"bucket_mb": WIDE_MB}),
    "wide layers, little in flight": (
        "wide layers",
        {"bucket_mb": WIDE_MB, "in_flight_mb": 4 * WIDE_MB},
    ),
}
LITTLE = [name for name in PROGRAMS if "little" in name]


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, emit: Emit) -> Emitted:
    name, options = PROGRAMS[request.param]
    return emit(name, **options)


@pytest.fixture(params=LITTLE)
def little(request: pytest.FixtureRequest, emit: Emit) -> Emitted:
    name, options = PROGRAMS[request.param]
    return emit(name, **options)


# --- what must hold of it ---


def test_every_bucket_is_launched_once_in_plan_order(program: Emitted) -> None:
    sizes = [bucket.numel for bucket in program.plan.layout.buckets]
    assert len(sizes) >= 4
    assert all(program.plan.in_graph)
    launches = program.launches()
    assert len(launches) == len(sizes)
    assert len({event.operand for event in launches}) == len(launches)
    for event, numel in zip(launches, sizes, strict=True):
        if "all_to_all" in event.line:
            assert str([numel // WORLD] * WORLD) in event.line


def test_large_buckets_are_exchanged(emit: Emit) -> None:
    for which, exchanged in (("layers", False), ("wide layers", True)):
        name, options = PROGRAMS[which]
        for event in emit(name, **options).launches():
            assert ("fxcomm.exchange" in event.line) == exchanged


def test_launches_are_spread_over_the_backward(program: Emitted) -> None:
    """Each bucket starts before kernels that compute later gradients, the first one early."""
    launches, matmuls = program.places("launch"), program.places("matmul")
    done = [sum(m < launch for m in matmuls) for launch in launches]
    assert done == sorted(done)
    assert done[0] < len(matmuls) / 2
    assert done[-2] < len(matmuls), "only the last bucket may start when all is computed"
    # A bucket waits for none of the next bucket's matmuls, unless both end in one gradient.
    assert len(set(done)) >= len(done) - 1


def test_a_layers_bucket_starts_right_after_its_gradients(emit: Emit) -> None:
    name, options = PROGRAMS["layers"]
    program = emit(name, **options)
    matmuls = program.places("matmul")
    done = [sum(m < launch for m in matmuls) for launch in program.places("launch")]
    # Two a layer, for its input's gradient and its weight's; the first layer has only one.
    assert len(matmuls) == 11
    assert done == [2, 4, 6, 8, 10, 11]


def test_times_are_marked_where_they_are(program: Emitted) -> None:
    """Behind each launch, before and behind each wait, with no compute between."""
    timed = [e for e in program.events if e.kind in ("launch", "wait", "mark", "matmul")]
    kinds = ["edge", *(e.kind for e in timed), "edge"]
    for before, kind, after in zip(kinds, kinds[1:], kinds[2:], strict=False):
        if kind == "launch":
            assert after == "mark"
        elif kind == "wait":
            assert before == after == "mark"
    waits = kinds.count("wait")
    assert kinds.count("mark") == kinds.count("launch") + 2 * waits


def test_without_need_nothing_is_waited_for_in_the_graph(emit: Emit) -> None:
    for which in ("layers", "gpt", "gpt, 16 bits", "layers, ddp"):
        name, options = PROGRAMS[which]
        assert emit(name, **options).places("wait") == []


def test_waits_are_not_next_to_their_launches(little: Emitted) -> None:
    started = {little.events[i].buffer: i for i in little.places("launch")}
    waits = little.places("wait")
    assert waits, "the limit asks for waits"
    for wait in waits:
        launch = started[little.events[wait].buffer]
        assert launch < wait
        assert little.between(launch, wait, "matmul") >= 1
        assert little.between(launch, wait, "launch") >= 1


def test_bytes_in_flight_stay_under_the_limit_in_the_emitted_order(little: Emitted) -> None:
    limit = little.plan.in_flight_bytes
    assert limit is not None
    # A bucket and what comes of it, which for an all-to-all is as large.
    sizes = iter([2 * bucket.nbytes for bucket in little.plan.layout.buckets])
    running: dict[str, int] = {}
    for event in little.events:
        if event.kind == "launch":
            running[event.buffer] = next(sizes)
            assert sum(running.values()) <= limit
        elif event.kind == "wait":
            del running[event.buffer]


def test_memory_in_flight_is_left_alone(program: Emitted) -> None:
    """Between launch and wait nothing reads the result, and nothing gets the operand's memory; what
    the graph does not wait for, it returns."""
    in_flight: dict[str, str] = {}
    for event in program.events:
        if event.kind == "launch":
            in_flight[event.buffer] = event.operand
        elif event.kind == "wait":
            in_flight.pop(event.buffer)
        elif not event.line.startswith("assert_"):
            for result, operand in in_flight.items():
                words = re.findall(r"\w+", event.line)
                assert result not in words, f"{event.line!r} before the wait for {result}"
                assert operand not in words, f"{event.line!r} while {operand} is being sent"
    returned = re.findall(r"\w+", program.returned)
    for result, operand in in_flight.items():
        assert result in returned
        assert operand in returned


# --- what is copied into buckets ---


@dataclass(frozen=True, order=True)
class Place:
    """Where something is written: elements from ``offset`` of a bucket on."""

    bucket: int
    offset: int


_ALIAS = re.compile(r"(\w+) = reinterpret_tensor\((\w+), .*, (\d+)\)  # alias")
_MATMUL_INTO = re.compile(r"extern_kernels\.\w*mm\(.*out=(\w+)\)")
_CALL = re.compile(r"(cpp_fused_\w+)\((.*)\)")
_KERNEL = re.compile(
    r"(cpp_fused_\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)", re.DOTALL
)
_PARAMETERS = re.compile(r"void  kernel\((.*?)\)", re.DOTALL)
# A value that is loaded and, with nothing done to it, stored.
_COPY = re.compile(r"auto (tmp\d+) = [^;]*_ptr\d+[^;]*;\s*(?:\1\.store\((\w+)|(\w+)\[.*\] = \1;)")


def places_of(program: Emitted) -> dict[str, Place]:
    """The places in buckets that variables of the emitted code stand for."""
    buckets = {event.operand: number for number, event in enumerate(program.launches())}
    found = (_ALIAS.match(event.line) for event in program.events)
    return {m[1]: Place(buckets[m[2]], int(m[3])) for m in found if m and m[2] in buckets}


def written_by_matmuls(program: Emitted) -> set[Place]:
    places = places_of(program)
    found = (_MATMUL_INTO.match(event.line) for event in program.events)
    return {places[m[1]] for m in found if m and m[1] in places}


def copied(program: Emitted) -> set[Place]:
    """What C++ kernels fill with nothing but copies."""
    bodies = dict(_KERNEL.findall(program.code))
    places = places_of(program)
    found = set()
    for call in filter(None, (_CALL.match(event.line) for event in program.events)):
        signature = _PARAMETERS.search(bodies[call[1]])
        assert signature is not None
        names = [parameter.split("*")[-1].strip() for parameter in signature[1].split(",")]
        given = dict(zip(names, call[2].split(", "), strict=True))
        stored = {given[copy[2] or copy[3]] for copy in _COPY.finditer(bodies[call[1]])}
        found |= {places[name] for name in stored if name in places}
    return found


def whole_and_cut(plan: OverlapPlan) -> tuple[dict[Place, str], dict[Place, str]]:
    """The parameters that lie whole in a bucket, and those of which a part does, by place."""
    whole, cut = {}, {}
    for number, bucket in enumerate(plan.layout.buckets):
        for segment in bucket.segments:
            spec = plan.layout.parameters[segment.parameter]
            of = whole if segment.numel == spec.numel else cut
            of[Place(number, segment.offset)] = spec.name
    return whole, cut


@pytest.fixture(params=["gpt", "blocks"])
def packed_program(request: pytest.FixtureRequest, emit: Emit) -> Emitted:
    return emit(request.param, bucket_mb=GPT_MB if request.param == "gpt" else BLOCKS_MB)


def test_matmuls_write_whole_gradients_into_their_buckets(packed_program: Emitted) -> None:
    whole, _ = whole_and_cut(packed_program.plan)
    # The tied weight is an embedding's, too: its gradient is a sum of two.
    matmuls = {p for p, name in whole.items() if re.search(r"(qkv|out|up|down)\.weight", name)}
    assert matmuls
    assert matmuls <= written_by_matmuls(packed_program)


def test_only_parts_of_gradients_are_copied(packed_program: Emitted) -> None:
    whole, cut = whole_and_cut(packed_program.plan)
    copies = copied(packed_program)
    assert cut
    assert copies >= cut.keys(), "what is copied must be found"
    assert not [whole[place] for place in copies if place in whole]


# --- the forward, whose waits let gathers run on into it ---


@dataclass(frozen=True)
class ForwardCode:
    """The lines of an emitted forward, and the inputs that it waits for with their places."""

    lines: tuple[str, ...]
    waits: dict[str, int]

    def first_use(self, name: str) -> int:
        """The first line that hands ``name`` to a kernel."""
        used = re.compile(rf"\(.*\b{name}\b")
        return next(
            i
            for i, line in enumerate(self.lines)
            if used.search(line) and not line.startswith("assert") and not _WAIT.search(line)
        )


def forward_code(code: str) -> ForwardCode:
    lines = tuple(event.line for event in events_of(code))
    found = ((i, _WAIT.search(line)) for i, line in enumerate(lines))
    return ForwardCode(lines, {match[1]: i for i, match in found if match})


@pytest.fixture(scope="module", params=["layers", "gpt"])
def forward(request: pytest.FixtureRequest, as_fake_rank: AsFakeRank) -> ForwardCode:  # noqa: F811
    codes, _ = as_fake_rank(1, WORLD, emitting_job, request.param, {"bucket_mb": GPT_MB})
    events = {code: [event.kind for event in events_of(code)] for code in codes}
    (code,) = [c for c, kinds in events.items() if "wait" in kinds and "launch" not in kinds]
    return forward_code(code)


def test_a_forward_waits_for_each_parameter_before_it_uses_it(forward: ForwardCode) -> None:
    assert len(forward.waits) >= 12
    for name, place in forward.waits.items():
        assert place < forward.first_use(name), f"{name} is used before its wait"


def test_a_forward_waits_late(forward: ForwardCode) -> None:
    """A wait stands less than a layer ahead of its use, not at the head of the forward."""
    kernels = [i for i, line in enumerate(forward.lines) if "kernel" in line or "extern" in line]
    for name, place in forward.waits.items():
        between = [i for i in kernels if place < i < forward.first_use(name)]
        assert len(between) <= 2, f"{name} is waited for {len(between)} kernels ahead of its use"
