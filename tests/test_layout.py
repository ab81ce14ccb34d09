"""The layout value: packing rules, invariants, shards, JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxcomm.layout import (
    ALIGNMENT,
    Bucket,
    ParameterSpec,
    Segment,
    ShardLayout,
    build_layout,
    cut_layout,
    cuts_of,
)

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8, "float8_e5m2": 1}


def spec(name: str, numel: int, dtype: str = "float32", device: str = "cpu") -> ParameterSpec:
    return ParameterSpec(name, numel, dtype, ITEMSIZES[dtype], device)


@dataclass(frozen=True)
class Case:
    """Arguments of ``build_layout``."""

    runs: list[list[ParameterSpec]]
    world_size: int
    bucket_bytes: int
    split: bool

    def build(self) -> ShardLayout:
        return build_layout(
            self.runs,
            world_size=self.world_size,
            bucket_bytes=self.bucket_bytes,
            split=self.split,
        )

    @property
    def quantum(self) -> int:
        return math.lcm(ALIGNMENT, 8 * self.world_size)

    def target(self, itemsize: int) -> int:
        return max(self.quantum, self.bucket_bytes // itemsize // self.quantum * self.quantum)


numels = st.one_of(
    st.integers(0, 200),
    st.integers(0, 30_000),
    st.sampled_from([0, 1, 63, 64, 65, 511, 512, 513, 4096, 8191, 8193, 50_257]),
)
kinds = st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.sampled_from(["cpu", "cuda"]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    choices = draw(st.lists(kinds, min_size=1, max_size=3))
    parameter = st.tuples(numels, st.sampled_from(choices))
    drawn = draw(st.lists(st.lists(parameter, max_size=12), max_size=4))
    runs = [
        [spec(f"r{r}.p{p}", numel, *kind) for p, (numel, kind) in enumerate(run)]
        for r, run in enumerate(drawn)
    ]
    bucket_bytes = draw(
        st.one_of(
            st.integers(1, 2000), st.integers(1, 100_000), st.sampled_from([1 << 16, 1 << 40])
        )
    )
    return Case(runs, draw(st.integers(1, 17)), bucket_bytes, draw(st.booleans()))


def on_many_cases(test: Callable[[Case], None]) -> Callable[[], None]:
    return settings(deadline=None, max_examples=80)(given(cases())(test))


@on_many_cases
def test_each_element_is_owned_exactly_once(case: Case) -> None:
    layout = case.build()
    owners = [np.zeros(p.numel, dtype=int) for p in layout.parameters]
    for index in range(len(layout.buckets)):
        for rank in range(case.world_size):
            for s in layout.shard_segments(index, rank):
                assert s.numel > 0
                assert 0 <= s.offset < s.end <= layout.shard_numel(index)
                assert s.parameter_offset + s.numel <= layout.parameters[s.parameter].numel
                owners[s.parameter][s.parameter_offset : s.parameter_offset + s.numel] += 1
    assert all((count == 1).all() for count in owners)


@on_many_cases
def test_shards_of_all_ranks_in_a_row_are_the_bucket(case: Case) -> None:
    layout = case.build()
    for index, bucket in enumerate(layout.buckets):
        assert layout.shard_numel(index) * case.world_size == bucket.numel
        assert layout.shard_numel(index) % 8 == 0
        # Write each element's identity through segments and through shards; compare the two.
        whole = np.full((bucket.numel, 2), -1)
        for s in bucket.segments:
            whole[s.offset : s.end, 0] = s.parameter
            whole[s.offset : s.end, 1] = np.arange(s.numel) + s.parameter_offset
        shards = np.full((case.world_size, layout.shard_numel(index), 2), -1)
        for rank in range(case.world_size):
            for s in layout.shard_segments(index, rank):
                shards[rank, s.offset : s.end, 0] = s.parameter
                shards[rank, s.offset : s.end, 1] = np.arange(s.numel) + s.parameter_offset
        assert (shards.reshape(-1, 2) == whole).all()


@on_many_cases
def test_parameters_are_aligned_and_contiguous_in_memory(case: Case) -> None:
    layout = case.build()
    for index, parameter in enumerate(layout.parameters):
        pieces = layout.parameter_segments(index)
        assert bool(pieces) == (parameter.numel > 0)
        assert case.split or len(pieces) <= 1
        found = 0
        for number, s in pieces:
            bucket = layout.buckets[number]
            assert s in bucket.segments
            assert s.parameter == index
            assert s.parameter_offset == found
            assert bucket.memory == parameter.memory
            found += s.numel
        places = [layout.buckets[number].start + s.offset for number, s in pieces]
        assert places == [places[0] + s.parameter_offset for _, s in pieces]
        assert found == parameter.numel
        assert all(s.offset % ALIGNMENT == 0 for _, s in pieces if s.parameter_offset == 0)
        # A cut fills its bucket to the end and continues at the start of the next.
        assert all(s.end == layout.buckets[number].numel for number, s in pieces[:-1])
        assert all(s.offset == 0 for _, s in pieces[1:])


@on_many_cases
def test_buckets_are_uniform_tile_memory_and_are_numbered_by_completion(case: Case) -> None:
    layout = case.build()
    assert layout.parameters == tuple(p for run in case.runs for p in run)
    run_of = [number for number, run in enumerate(case.runs) for _ in run]
    ends: dict[tuple[str, str], int] = {}
    completions = []
    for bucket in layout.buckets:
        held = [layout.parameters[s.parameter] for s in bucket.segments]
        assert {p.memory for p in held} == {bucket.memory}
        assert {p.itemsize for p in held} == {bucket.itemsize}
        assert len({run_of[s.parameter] for s in bucket.segments}) == 1
        assert all(a.end <= b.offset for a, b in pairwise(bucket.segments))
        assert bucket.segments[-1].end <= bucket.numel
        assert bucket.start == ends.get(bucket.memory, 0)
        ends[bucket.memory] = bucket.start + bucket.numel
        completions.append(max(s.parameter for s in bucket.segments))
    assert ends == layout.memory_numel()
    assert completions == sorted(completions)
    layout.check()


@on_many_cases
def test_sizes_and_padding_are_bounded(case: Case) -> None:
    layout = case.build()
    for bucket in layout.buckets:
        target = case.target(bucket.itemsize)
        assert bucket.numel >= case.quantum
        assert bucket.numel % case.quantum == 0
        assert bucket.nbytes == bucket.numel * bucket.itemsize
        if case.split:
            assert bucket.numel <= target * 9 // 8 // case.quantum * case.quantum
        elif len(bucket.segments) > 1:
            assert bucket.numel <= target
        padding = bucket.numel - sum(s.numel for s in bucket.segments)
        assert padding < ALIGNMENT * (len(bucket.segments) - 1) + case.quantum


@on_many_cases
def test_buckets_close_only_for_a_reason(case: Case) -> None:
    """A bucket under 7/8 of its target is the last of its run, or what follows would not fit."""
    layout = case.build()
    run_of = [number for number, run in enumerate(case.runs) for _ in run]
    after: dict[tuple[str, str], Bucket] = {}
    for bucket in reversed(layout.buckets):
        following = after.get(bucket.memory)
        after[bucket.memory] = bucket
        if following is None:
            continue
        head = following.segments[0]
        if run_of[head.parameter] != run_of[bucket.segments[0].parameter]:
            continue
        target = case.target(bucket.itemsize)
        if case.split:
            assert bucket.numel > target - target / 8
        else:
            next_offset = -(-bucket.segments[-1].end // ALIGNMENT) * ALIGNMENT
            assert next_offset >= target or next_offset + head.numel > target


@on_many_cases
def test_json_round_trip(case: Case) -> None:
    layout = case.build()
    again = ShardLayout.from_json(layout.to_json())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.to_json() == layout.to_json()


def test_small_parameters_fuse_at_aligned_offsets() -> None:
    layout = build_layout(
        [[spec("b", 10), spec("a", 100), spec("empty", 0)]], world_size=2, bucket_bytes=4096
    )
    assert layout.buckets == (
        Bucket("float32", 4, "cpu", 192, 0, (Segment(0, 0, 0, 10), Segment(1, 0, 64, 100))),
    )
    assert layout.shard_segments(0, 0) == (Segment(0, 0, 0, 10), Segment(1, 0, 64, 32))
    assert layout.shard_segments(0, 1) == (Segment(1, 32, 0, 68),)
    assert layout.parameter_segments(2) == ()
    assert layout.memory_numel() == {("float32", "cpu"): 192}


def test_a_large_parameter_is_cut_and_its_tail_shares_a_bucket() -> None:
    layout = build_layout([[spec("w", 2500), spec("v", 300)]], world_size=2, bucket_bytes=4096)
    assert [b.segments for b in layout.buckets] == [
        (Segment(0, 0, 0, 1024),),
        (Segment(0, 1024, 0, 1024),),
        (Segment(0, 2048, 0, 452), Segment(1, 0, 512, 300)),
    ]
    assert [(b.start, b.numel) for b in layout.buckets] == [(0, 1024), (1024, 1024), (2048, 832)]


def test_without_split_parameters_stay_whole() -> None:
    layout = build_layout(
        [[spec("a", 600), spec("b", 600), spec("w", 2500), spec("c", 10)]],
        world_size=2,
        bucket_bytes=4096,
        split=False,
    )
    assert [[s.parameter for s in b.segments] for b in layout.buckets] == [[0], [1], [2], [3]]
    assert [b.numel for b in layout.buckets] == [640, 640, 2560, 64]


@pytest.mark.parametrize(("numel", "expected"), [(1024, 1024), (1152, 1152), (1153, 1024)])
def test_a_bucket_grows_by_an_eighth_rather_than_cut_off_a_tail(numel: int, expected: int) -> None:
    layout = build_layout([[spec("w", numel)]], world_size=1, bucket_bytes=4096)
    assert layout.buckets[0].numel == expected
    assert len(layout.buckets) == (1 if numel <= 1152 else 2)


@pytest.mark.parametrize(("filled", "cut"), [(896, True), (897, False)])
def test_a_parameter_is_not_cut_to_fill_a_sliver(filled: int, cut: bool) -> None:
    layout = build_layout([[spec("a", filled), spec("b", 500)]], world_size=1, bucket_bytes=4096)
    assert len(layout.parameter_segments(1)) == (2 if cut else 1)
    assert layout.buckets[0].numel == (1024 if cut else 960)


def test_a_bucket_without_an_aligned_start_left_is_full() -> None:
    layout = build_layout([[spec("a", 1000), spec("b", 10)]], world_size=1, bucket_bytes=4096)
    assert [b.numel for b in layout.buckets] == [1024, 64]


def test_runs_do_not_share_buckets_and_may_be_empty() -> None:
    layout = build_layout(
        [[spec("a", 10)], [], [spec("b", 10)]], world_size=1, bucket_bytes=1 << 20
    )
    assert [(b.start, b.segments[0].parameter) for b in layout.buckets] == [(0, 0), (64, 1)]


def test_dtypes_and_devices_interleave_in_completion_order() -> None:
    half, other = ("bfloat16", "cpu"), ("float32", "cuda")
    run = [
        spec("a", 100),
        spec("h", 1024, *half),
        spec("o", 10, *other),
        spec("b", 924),
        spec("k", 5, *half),
    ]
    layout = build_layout([run], world_size=1, bucket_bytes=2048)
    # Targets: 512 float32 and 1024 bfloat16 elements. b starts at 128 and is cut at 512.
    assert [(b.memory, [s.parameter for s in b.segments]) for b in layout.buckets] == [
        (half, [1]),
        (other, [2]),
        (("float32", "cpu"), [0, 3]),
        (("float32", "cpu"), [3]),
        (half, [4]),
    ]
    assert [b.start for b in layout.buckets] == [0, 0, 0, 512, 1024]


def test_nothing_to_lay_out() -> None:
    layout = build_layout([], world_size=3, bucket_bytes=1)
    assert layout.buckets == ()
    assert layout.memory_numel() == {}
    assert ShardLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        ([], {"world_size": 0}, "world_size must be at least 1, got 0"),
        ([], {"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ([spec("w", -1)], {}, "parameter 'w' has a negative numel, -1"),
        ([spec("w", 1), spec("w", 2)], {}, "parameter name 'w' occurs twice"),
        ([ParameterSpec("w", 1, "float32", 0, "cpu")], {}, "itemsize 0"),
        ([spec("w", 1), ParameterSpec("v", 1, "float32", 2, "cpu")], {}, "'v' has itemsize 2"),
    ],
)
def test_bad_arguments_are_named(
    run: list[ParameterSpec], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_layout([run], **{"world_size": 1, "bucket_bytes": 1024, **arguments})


def test_the_name_may_repeat_in_no_other_run_either() -> None:
    with pytest.raises(ValueError, match="'w' occurs twice"):
        build_layout([[spec("w", 1)], [spec("w", 1)]], world_size=1, bucket_bytes=1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    layout = build_layout([[spec("w", 1)]], world_size=2, bucket_bytes=1)
    with pytest.raises(ValueError, match=f"rank {rank} is outside"):
        layout.shard_segments(0, rank)


def sample() -> ShardLayout:
    """Two parameters in bucket 0, the second cut into bucket 1, a third of another dtype in 2."""
    run = [spec("a", 100), spec("w", 1400), spec("h", 70, "bfloat16")]
    return build_layout([run], world_size=2, bucket_bytes=4096)


def with_bucket(index: int, **changes: Any) -> ShardLayout:
    layout = sample()
    buckets = list(layout.buckets)
    buckets[index] = replace(buckets[index], **changes)
    return replace(layout, buckets=tuple(buckets))


def with_segment(bucket: int, segment: int, **changes: int) -> ShardLayout:
    segments = list(sample().buckets[bucket].segments)
    segments[segment] = replace(segments[segment], **changes)
    return with_bucket(bucket, segments=tuple(segments))


def with_buckets(*order: int) -> ShardLayout:
    layout = sample()
    return replace(layout, buckets=tuple(layout.buckets[i] for i in order))


def with_parameter(index: int, **changes: Any) -> ShardLayout:
    layout = sample()
    parameters = list(layout.parameters)
    parameters[index] = replace(parameters[index], **changes)
    return replace(layout, parameters=tuple(parameters))


BROKEN = {
    "world size": (replace(sample(), world_size=0), "world_size must be at least 1"),
    "other world size": (replace(sample(), world_size=3), "numel 1024 is not a positive multiple"),
    "repeated name": (with_parameter(1, name="a"), "name 'a' occurs twice"),
    "negative numel": (with_parameter(1, numel=-5), "'w' has a negative numel"),
    "missing elements": (with_parameter(1, numel=1401), "hold 1400 elements, it has 1401"),
    "surplus elements": (with_parameter(0, numel=99), "hold 100 elements, it has 99"),
    "unpadded bucket": (with_bucket(1, numel=505), "numel 505 is not a positive multiple of 64"),
    "no elements": (with_bucket(1, numel=0), "numel 0 is not a positive multiple"),
    "small bucket": (with_bucket(1, numel=448), "segments end at 504, past numel 448"),
    "gap in memory": (with_bucket(1, start=1088), "bucket 1: starts at 1088 .* end at 1024"),
    "overlap in memory": (with_bucket(1, start=960), "bucket 1: starts at 960 .* end at 1024"),
    "empty bucket": (with_bucket(1, segments=()), "bucket 1: no segments"),
    "dtype": (with_bucket(2, dtype="float16"), "parameter 'h' is bfloat16"),
    "device": (with_bucket(2, device="cuda"), "on cuda, parameter 'h' .* on cpu"),
    "itemsize": (with_bucket(2, itemsize=4), "bucket 2: holds bfloat16 of 4 bytes"),
    "lost chunk": (with_buckets(0, 2), "segments hold 896 elements, it has 1400"),
    "swapped chunks": (with_buckets(1, 0, 2), "bucket 0: starts at 1024"),
    "completion order": (with_buckets(2, 0, 1), "bucket 1: is complete before bucket 0"),
    "overlap": (with_segment(0, 1, offset=64), "'w' at 64 overlaps what ends at 100"),
    "negative offset": (with_segment(0, 0, offset=-64), "'a' at -64 overlaps what ends at 0"),
    "unaligned": (with_segment(0, 0, offset=8), "'a' starts at 8, not aligned to 64"),
    "past the end": (with_segment(0, 1, offset=192), "segments end at 1088, past numel 1024"),
    "empty segment": (with_segment(0, 1, numel=0), "empty segment of parameter 'w'"),
    "short segment": (with_segment(0, 1, numel=895), "continues at element 896, expected 895"),
    "hole before a chunk": (with_segment(1, 0, offset=8), "'w' is not contiguous in memory"),
    "wrong parameter": (with_segment(1, 0, parameter=0), "bucket 1: is complete before bucket 0"),
    "unknown parameter": (with_segment(1, 0, parameter=3), "is of no parameter of the layout"),
    "negative parameter": (with_segment(1, 0, parameter=-1), "is of no parameter of the layout"),
    "repeated parameter": (with_segment(0, 1, parameter=0), "'a' is not in production order"),
    "chunk offset": (with_segment(1, 0, parameter_offset=0), "element 0, expected 896"),
}


@pytest.mark.parametrize(("layout", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_check_names_the_broken_invariant(layout: ShardLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check()
    with pytest.raises(ValueError, match=message):
        ShardLayout.from_json(layout.to_json())


@pytest.mark.parametrize(
    ("numel", "offset", "message"),
    [(128, 64, "'b' at 64 overlaps what ends at 65"), (128, 128, "end at 129, past numel 128")],
)
def test_check_sees_a_single_element(numel: int, offset: int, message: str) -> None:
    layout = build_layout([[spec("a", 65), spec("b", 1)]], world_size=1, bucket_bytes=4096)
    first, second = layout.buckets[0].segments
    moved = (first, replace(second, offset=offset))
    broken = replace(layout.buckets[0], numel=numel, segments=moved)
    with pytest.raises(ValueError, match=message):
        replace(layout, buckets=(broken,)).check()


@settings(deadline=None, max_examples=80)
@given(cases(), st.data())
def test_check_catches_any_changed_number(case: Case, data: st.DataObject) -> None:
    """Whatever one number of a segment or a bucket's start is changed to, check() objects."""
    layout = case.build()
    if not layout.buckets:
        return
    number = data.draw(st.integers(0, len(layout.buckets) - 1))
    bucket = layout.buckets[number]
    change = data.draw(st.sampled_from([-64, -8, -1, 1, 8]))
    at = data.draw(st.integers(0, len(bucket.segments) - 1))
    name = data.draw(st.sampled_from(["start", "parameter_offset", "numel"]))
    if name == "start":
        broken = replace(bucket, start=bucket.start + change)
    else:
        segments = list(bucket.segments)
        segments[at] = replace(segments[at], **{name: getattr(segments[at], name) + change})
        broken = replace(bucket, segments=tuple(segments))
    buckets = (*layout.buckets[:number], broken, *layout.buckets[number + 1 :])
    with pytest.raises(ValueError, match=r"bucket \d+: |parameter '"):
        replace(layout, buckets=buckets).check()


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(sample().to_json())
    edit(raw)
    return json.dumps(raw)


MALFORMED = {
    "not JSON": ("{", "layout is not JSON"),
    "too deep": ("[" * 100_000, "layout is not JSON"),
    "no object": ("[]", "layout: expected an object, got list"),
    "other format": (edited(lambda r: r.update(format="x")), "layout.format is 'x'"),
    "missing entry": (edited(lambda r: r.pop("buckets")), "layout: entry 'buckets' is missing"),
    "unknown entry": (edited(lambda r: r.update(more=1)), "layout: unknown entry 'more'"),
    "no list": (edited(lambda r: r.update(buckets={})), "layout.buckets: expected list, got dict"),
    "parameter": (
        edited(lambda r: r["parameters"][1].update(numel=1.5)),
        r"parameters\[1\].numel: expected int, got float",
    ),
    "truth for a number": (
        edited(lambda r: r.update(world_size=True)),
        "layout.world_size: expected int, got bool",
    ),
    "null": (
        edited(lambda r: r["buckets"][0].update(dtype=None)),
        r"buckets\[0\].dtype: expected str, got NoneType",
    ),
    "segment": (
        edited(lambda r: r["buckets"][0]["segments"][1].pop("offset")),
        r"buckets\[0\].segments\[1\]: entry 'offset' is missing",
    ),
    "no segment": (
        edited(lambda r: r["buckets"][0].update(segments=[3])),
        r"buckets\[0\].segments\[0\]: expected an object, got int",
    ),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_json_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout.from_json(text)


# --- cutting at given places ---


@st.composite
def parameters_and_cuts(draw: st.DrawFn) -> tuple[list[ParameterSpec], list[tuple[int, int]], int]:
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12))
    dtypes = draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=len(sizes)))
    parameters = [spec(f"p{i}", n, dtypes[i]) for i, n in enumerate(sizes)]
    place = st.integers(0, len(sizes) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, sizes[i]))
    )
    return parameters, draw(st.lists(place, max_size=12)), draw(st.integers(1, 17))


@given(parameters_and_cuts())
def test_cut_layouts_are_layouts_and_end_where_told(
    case: tuple[list[ParameterSpec], list[tuple[int, int]], int],
) -> None:
    parameters, cuts, world_size = case
    layout = cut_layout(parameters, cuts, world_size=world_size)
    layout.check()
    assert layout.parameters == tuple(parameters)
    held = [{s.parameter for s in bucket.segments} for bucket in layout.buckets]
    for index, element in cuts:
        if element == 0:  # nothing from before it shares a bucket with anything behind it
            assert not any(min(h) < index <= max(h) for h in held)
    begins = set(cuts_of(layout))
    quantum = math.lcm(ALIGNMENT, 8 * world_size)
    for index, element in begins:
        if element:  # a cut inside a parameter is near one that was asked for
            assert any(i == index and abs(e - element) <= quantum for i, e in cuts)
    again = cut_layout(parameters, begins, world_size=world_size)
    if len({p.memory for p in parameters}) == 1:
        assert again == layout


@given(parameters_and_cuts())
def test_no_cut_of_one_memory_is_lost(
    case: tuple[list[ParameterSpec], list[tuple[int, int]], int],
) -> None:
    parameters, cuts, world_size = case
    parameters = [spec(p.name, p.numel) for p in parameters]
    layout = cut_layout(parameters, cuts, world_size=world_size)
    before = [0, *itertools.accumulate(p.numel for p in parameters)]
    ends = {0, before[-1], *(before[index] + element for index, element in cuts_of(layout))}
    quantum = math.lcm(ALIGNMENT, 8 * world_size)
    for index, element in cuts:
        assert min(abs(before[index] + element - end) for end in ends) <= quantum


@given(parameters_and_cuts(), st.integers(1, 20_000))
def test_any_layout_of_one_memory_is_its_cuts(
    case: tuple[list[ParameterSpec], list[tuple[int, int]], int], bucket_bytes: int
) -> None:
    parameters, _, world_size = case
    parameters = [spec(p.name, p.numel) for p in parameters]
    layout = build_layout([parameters], world_size=world_size, bucket_bytes=bucket_bytes)
    assert cut_layout(parameters, cuts_of(layout), world_size=world_size) == layout


@pytest.mark.parametrize("cut", [(1, 0), (-1, 0), (0, 11), (0, -1)])
def test_cuts_outside_the_parameters_are_refused(cut: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no element"):
        cut_layout([spec("p", 10)], [cut], world_size=2)
