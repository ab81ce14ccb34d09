"""Which parameter elements lie where in which bucket, as a value.

The memory of one (dtype, device) is one row of elements that its buckets tile in order, without
gaps. Each bucket is cut into equal shards, one per rank. A parameter lies contiguously in its
memory, also where it spans several buckets, so it can be a plain view of that memory.

Everything here counts in elements unless a name says bytes. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

ALIGNMENT = 64
"""Elements; parameters start at multiples of it inside a bucket, and so in memory."""

# A bucket may outgrow its target by this part of it, and less room than this is not worth a cut.
_SLACK = 8

_FORMAT = "fxcomm.layout/1"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout must know of a parameter: ``numel`` elements of ``itemsize`` bytes each.

    Ranks share one layout, so ``device`` must read the same on all of them: "cuda", not "cuda:1".
    """

    name: str
    numel: int
    dtype: str
    itemsize: int
    device: str

    @property
    def memory(self) -> tuple[str, str]:
        """The (dtype, device) whose memory holds the parameter."""
        return self.dtype, self.device


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one parameter's elements, in its memory order, inside one bucket.

    ``parameter`` indexes ``ShardLayout.parameters``. ``parameter_offset`` counts elements from the
    parameter's first one, ``offset`` from the first one of the bucket (of the shard, where
    ``ShardLayout.shard_segments`` made the segment).
    """

    parameter: int
    parameter_offset: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """The element after the last, counted like ``offset``."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer that one collective moves.

    ``numel`` counts elements with padding, ``start`` is the element offset in the memory of its
    (dtype, device), ``itemsize`` is in bytes. Segments have increasing offsets.
    """

    dtype: str
    itemsize: int
    device: str
    numel: int
    start: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket, with padding."""
        return self.numel * self.itemsize

    @property
    def memory(self) -> tuple[str, str]:
        """The (dtype, device) whose memory the bucket is a part of."""
        return self.dtype, self.device


@dataclass(frozen=True)
class ShardLayout:
    """Parameters in production order, and buckets in the order in which they become complete."""

    world_size: int
    parameters: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]

    def shard_numel(self, bucket: int) -> int:
        """Elements of each rank's shard of the bucket, with padding."""
        return self.buckets[bucket].numel // self.world_size

    def shard_segments(self, bucket: int, rank: int) -> tuple[Segment, ...]:
        """The bucket's segments clipped to the rank's shard; offsets count from its start."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout's world size {self.world_size}")
        segments = self.buckets[bucket].segments
        low = rank * self.shard_numel(bucket)
        high = low + self.shard_numel(bucket)
        clipped = []
        for index in range(bisect_right(segments, low, key=lambda s: s.end), len(segments)):
            segment = segments[index]
            if segment.offset >= high:
                break
            first = max(segment.offset, low)
            skipped = first - segment.offset
            numel = min(segment.end, high) - first
            clipped.append(
                Segment(segment.parameter, segment.parameter_offset + skipped, first - low, numel)
            )
        return tuple(clipped)

    def parameter_segments(self, parameter: int) -> tuple[tuple[int, Segment], ...]:
        """The parameter's pieces as (bucket, segment), from its first element to its last."""
        return self._segments_by_parameter[parameter]

    @cached_property
    def _segments_by_parameter(self) -> tuple[tuple[tuple[int, Segment], ...], ...]:
        pieces: list[list[tuple[int, Segment]]] = [[] for _ in self.parameters]
        for index, bucket in enumerate(self.buckets):
            for segment in bucket.segments:
                pieces[segment.parameter].append((index, segment))
        return tuple(tuple(of_one) for of_one in pieces)

    def memory_numel(self) -> dict[tuple[str, str], int]:
        """Elements, with padding, of the memory of each (dtype, device)."""
        total: dict[tuple[str, str], int] = {}
        for bucket in self.buckets:
            total[bucket.memory] = total.get(bucket.memory, 0) + bucket.numel
        return total

    def to_json(self) -> str:
        """The layout as one line of JSON; equal layouts give equal text."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> ShardLayout:
        """The layout that ``to_json`` wrote; ValueError for malformed or inconsistent text."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"layout is not JSON: {error}") from error
        record = _record(raw, {"format": str, **_field_types(cls)}, "layout")
        if record["format"] != _FORMAT:
            raise ValueError(f"layout.format is {record['format']!r}, expected {_FORMAT!r}")
        layout = cls(
            record["world_size"],
            tuple(
                ParameterSpec(**_record(item, _field_types(ParameterSpec), f"parameters[{index}]"))
                for index, item in enumerate(record["parameters"])
            ),
            tuple(
                _bucket_from(item, f"buckets[{index}]")
                for index, item in enumerate(record["buckets"])
            ),
        )
        layout.check()
        return layout

    def check(self) -> None:
        """Raise ValueError that names the first broken invariant; return if all hold."""
        _check_world_size(self.world_size)
        _check_parameters(self.parameters)
        for index, bucket in enumerate(self.buckets):
            _check_bucket(self, index, bucket)
        _check_bucket_order(self.buckets)
        for index in range(len(self.parameters)):
            _check_parameter_place(self, index)


def build_layout(
    runs: Sequence[Sequence[ParameterSpec]],
    *,
    world_size: int,
    bucket_bytes: int,
    split: bool = True,
) -> ShardLayout:
    """Pack parameters into buckets of about ``bucket_bytes`` bytes each.

    ``runs`` list the parameters in the order in which backward produces their gradients; a bucket
    never holds parameters of two runs. With ``split``, a parameter that overflows the room left is
    cut to fill its bucket exactly and continues in the next; a bucket then exceeds its target by at
    most 1/8, which it does where that spares a cut. Without ``split`` no parameter is cut, and only
    a bucket of one parameter may exceed the target. The target is never below one quantum.
    """
    parameters = tuple(spec for run in runs for spec in run)
    _check_world_size(world_size)
    _check_parameters(parameters)
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    quantum = _quantum(world_size)
    packers: dict[tuple[str, str], _Packer] = {}
    index = 0
    for run in runs:
        for spec in run:
            if spec.memory not in packers:
                target = max(quantum, _round_down(bucket_bytes // spec.itemsize, quantum))
                packers[spec.memory] = _Packer(spec, quantum, target, split)
            packers[spec.memory].append(index, spec.numel)
            index += 1
        for packer in packers.values():
            packer.close()
    return ShardLayout(world_size, parameters, _in_order(packers.values()))


Cut = tuple[int, int]
"""A place where a bucket ends: before an element of a parameter (its index, the element)."""


def cut_layout(
    parameters: Sequence[ParameterSpec], cuts: Iterable[Cut], *, world_size: int
) -> ShardLayout:
    """Packs ``parameters``, in production order, into buckets that end at ``cuts``.

    A cut inside a parameter moves to the nearest place at which a bucket may end there (it must not
    leave padding inside the parameter), or to where the parameter begins or ends. Buckets of
    several dtypes or devices that are open at a cut between parameters all end there.

    Raises:
        ValueError: a cut is at no element of a parameter.
    """
    _check_world_size(world_size)
    _check_parameters(parameters)
    inside: dict[int, list[int]] = {}
    for index, element in sorted(set(cuts)):
        if not 0 <= index < len(parameters) or not 0 <= element <= parameters[index].numel:
            raise ValueError(f"there is no element {element} of parameter {index} to cut before")
        inside.setdefault(index, []).append(element)
    packers: dict[tuple[str, str], _Packer] = {}
    for index, spec in enumerate(parameters):
        if 0 in inside.get(index, ()):
            for packer in packers.values():
                packer.close()
        if spec.memory not in packers:
            packers[spec.memory] = _Packer(spec, _quantum(world_size), sys.maxsize, split=True)
        packers[spec.memory].append_cut(index, spec.numel, inside.get(index, ()))
    for packer in packers.values():
        packer.close()
    return ShardLayout(world_size, tuple(parameters), _in_order(packers.values()))


def cuts_of(layout: ShardLayout) -> tuple[Cut, ...]:
    """Where the buckets of a layout begin, in the order of its parameters."""
    firsts = (bucket.segments[0] for bucket in layout.buckets)
    return tuple(sorted((s.parameter, s.parameter_offset) for s in firsts))


def _in_order(packers: Iterable[_Packer]) -> tuple[Bucket, ...]:
    """All buckets. One is complete when its last segment's parameter is; ties lie in one memory."""
    buckets = [bucket for packer in packers for bucket in packer.buckets]
    buckets.sort(key=lambda bucket: (bucket.segments[-1].parameter, bucket.start))
    return tuple(buckets)


@dataclass
class _Packer:
    """Fills the memory that holds parameters like ``like``, with one bucket open at a time."""

    like: ParameterSpec
    quantum: int
    target: int
    split: bool
    buckets: list[Bucket] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    start: int = 0

    def append(self, parameter: int, numel: int) -> None:
        """Place all elements of the parameter, closing buckets as they fill."""
        placed = 0
        while placed < numel:
            offset = self._next_offset()
            count = self._fitting(offset, numel - placed)
            if count == 0:
                self.close()
                continue
            self.segments.append(Segment(parameter, placed, offset, count))
            placed += count
            if self._next_offset() >= self.target:
                self.close()

    def append_cut(self, parameter: int, numel: int, cuts: Sequence[int]) -> None:
        """Place all elements of the parameter, ending buckets near ``cuts``: inside it, or where it
        begins or ends."""
        placed, ends = 0, False
        for cut in filter(None, cuts):
            offset = self._next_offset()
            end = _round_down(offset + cut - placed + self.quantum // 2, self.quantum)
            count = end - offset
            if placed + count >= numel:
                ends = True
            elif count > 0:
                self.segments.append(Segment(parameter, placed, offset, count))
                placed += count
                self.close()
            elif not placed:
                self.close()
        if placed < numel:
            self.segments.append(Segment(parameter, placed, self._next_offset(), numel - placed))
            if ends:
                self.close()

    def close(self) -> None:
        """Pad the open bucket to the quantum and open the next; nothing if it is still empty."""
        if not self.segments:
            return
        numel = _round_up(self.segments[-1].end, self.quantum)
        like = self.like
        self.buckets.append(
            Bucket(like.dtype, like.itemsize, like.device, numel, self.start, tuple(self.segments))
        )
        self.segments.clear()
        self.start += numel

    def _next_offset(self) -> int:
        return _round_up(self.segments[-1].end, ALIGNMENT) if self.segments else 0

    def _fitting(self, offset: int, remaining: int) -> int:
        """How many of the remaining elements go to the offset; 0 asks for another bucket first."""
        if not self.split:
            return remaining if offset == 0 or offset + remaining <= self.target else 0
        # Rounded down to the quantum, so that padding cannot push a bucket over the allowance.
        limit = _round_down(self.target + self.target // _SLACK, self.quantum)
        if offset + remaining <= limit:
            return remaining
        room = self.target - offset
        # A cut ends at the target, a multiple of the quantum, so it leaves no padding inside the
        # parameter and it stays contiguous in memory.
        return room if offset == 0 or room * _SLACK >= self.target else 0


def _quantum(world_size: int) -> int:
    """Elements that every bucket is a multiple of.

    Shards are then equal and start at multiples of 8 elements (16 bytes for 2-byte types), and the
    next bucket starts aligned in memory.
    """
    return math.lcm(ALIGNMENT, 8 * world_size)


def _round_down(value: int, step: int) -> int:
    return value // step * step


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")


def _check_parameters(parameters: Sequence[ParameterSpec]) -> None:
    names: set[str] = set()
    itemsizes: dict[str, int] = {}
    for spec in parameters:
        if spec.name in names:
            raise ValueError(f"parameter name {spec.name!r} occurs twice")
        names.add(spec.name)
        if spec.numel < 0:
            raise ValueError(f"parameter {spec.name!r} has a negative numel, {spec.numel}")
        if spec.itemsize < 1:
            raise ValueError(f"parameter {spec.name!r} has itemsize {spec.itemsize}, below 1 byte")
        known = itemsizes.setdefault(spec.dtype, spec.itemsize)
        if spec.itemsize != known:
            raise ValueError(
                f"parameter {spec.name!r} has itemsize {spec.itemsize} for {spec.dtype}, "
                f"an earlier parameter {known}"
            )


def _check_bucket(layout: ShardLayout, index: int, bucket: Bucket) -> None:
    """What one bucket promises by itself."""
    quantum = _quantum(layout.world_size)
    if bucket.numel < quantum or bucket.numel % quantum:
        raise ValueError(
            f"bucket {index}: numel {bucket.numel} is not a positive multiple of {quantum}"
        )
    if not bucket.segments:
        raise ValueError(f"bucket {index}: no segments")
    end, last = 0, -1
    for segment in bucket.segments:
        if not 0 <= segment.parameter < len(layout.parameters):
            raise ValueError(f"bucket {index}: {segment} is of no parameter of the layout")
        spec = layout.parameters[segment.parameter]
        if (*spec.memory, spec.itemsize) != (*bucket.memory, bucket.itemsize):
            raise ValueError(
                f"bucket {index}: holds {bucket.dtype} of {bucket.itemsize} bytes on "
                f"{bucket.device}, parameter {spec.name!r} is {spec.dtype} of {spec.itemsize} "
                f"bytes on {spec.device}"
            )
        if segment.parameter <= last:
            raise ValueError(f"bucket {index}: parameter {spec.name!r} is not in production order")
        if segment.numel < 1:
            raise ValueError(f"bucket {index}: empty segment of parameter {spec.name!r}")
        if segment.offset < end:
            raise ValueError(
                f"bucket {index}: parameter {spec.name!r} at {segment.offset} overlaps what ends "
                f"at {end}"
            )
        end, last = segment.end, segment.parameter
    if end > bucket.numel:
        raise ValueError(f"bucket {index}: segments end at {end}, past numel {bucket.numel}")


def _check_bucket_order(buckets: Sequence[Bucket]) -> None:
    """Buckets are numbered by completion and tile the memory of each (dtype, device) in order."""
    ends: dict[tuple[str, str], int] = {}
    complete_at = -1
    for index, bucket in enumerate(buckets):
        end = ends.get(bucket.memory, 0)
        if bucket.start != end:
            raise ValueError(
                f"bucket {index}: starts at {bucket.start} in the memory of {bucket.dtype} on "
                f"{bucket.device}, where the earlier buckets end at {end}"
            )
        ends[bucket.memory] = end + bucket.numel
        if bucket.segments[-1].parameter < complete_at:
            raise ValueError(f"bucket {index}: is complete before bucket {index - 1}")
        complete_at = bucket.segments[-1].parameter


def _check_parameter_place(layout: ShardLayout, parameter: int) -> None:
    """A parameter's segments hold each of its elements once, contiguous in memory and aligned."""
    spec = layout.parameters[parameter]
    found = 0
    base = None
    for index, segment in layout.parameter_segments(parameter):
        where = f"bucket {index}: parameter {spec.name!r}"
        if segment.parameter_offset != found:
            raise ValueError(
                f"{where} continues at element {segment.parameter_offset}, expected {found}"
            )
        place = layout.buckets[index].start + segment.offset
        if base is None:
            if place % ALIGNMENT:
                raise ValueError(f"{where} starts at {segment.offset}, not aligned to {ALIGNMENT}")
            base = place
        if place != base + found:
            raise ValueError(f"{where} is not contiguous in memory")
        found += segment.numel
    if found != spec.numel:
        raise ValueError(
            f"parameter {spec.name!r}: segments hold {found} elements, it has {spec.numel}"
        )


def _field_types(record: type[Any]) -> dict[str, type[Any]]:
    """A record's JSON type by field; fields of other records are JSON lists."""
    scalars = {"int": int, "str": str}
    return {f.name: scalars.get(str(f.type), list) for f in dataclasses.fields(record)}


def _record(raw: object, types: Mapping[str, type[Any]], where: str) -> dict[str, Any]:
    """``raw`` as a dict with exactly the named entries, of their types."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected an object, got {type(raw).__name__}")
    for name, expected in types.items():
        if name not in raw:
            raise ValueError(f"{where}: entry {name!r} is missing")
        # type() and not isinstance(): JSON true must not pass for the number 1.
        if type(raw[name]) is not expected:
            raise ValueError(
                f"{where}.{name}: expected {expected.__name__}, got {type(raw[name]).__name__}"
            )
    unknown = sorted(raw.keys() - types.keys())
    if unknown:
        raise ValueError(f"{where}: unknown entry {unknown[0]!r}")
    return raw


def _bucket_from(raw: object, where: str) -> Bucket:
    record = _record(raw, _field_types(Bucket), where)
    segments = tuple(
        Segment(**_record(item, _field_types(Segment), f"{where}.segments[{index}]"))
        for index, item in enumerate(record["segments"])
    )
    return Bucket(**{**record, "segments": segments})
