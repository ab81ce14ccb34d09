"""The options of ``torch.compile(model, backend="fxcomm", options={...})``, checked and frozen.

A user's mapping is parsed once, by :meth:`Options.from_mapping`; everything after it may trust the
values. Each field carries what an option means, allows and defaults to, for errors and for docs.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxcomm.errors import OptionsError

T = TypeVar("T")

Stage = Literal["zero2", "zero1", "ddp"]
Update = Literal["at_step", "in_backward"]
Lowering = Literal["inductor", "eager"]

STAGES: tuple[str, ...] = get_args(Stage)
UPDATES: tuple[str, ...] = get_args(Update)
LOWERINGS: tuple[str, ...] = get_args(Lowering)
PLANS: tuple[str, ...] = (
    *("auto", "bucket-25mb", "per-layer", "one-bucket", "no-fusion", "mg-wfbp", "dear"),
)
"""Names that ``plan`` accepts, beside paths."""

_PLAN_FILE = ".json"  # how the path of a plan ends; no name does


class _RefusedError(Exception):
    """A parser refuses a value; the message, which may be empty, is a hint for the user."""


# Parsers: each turns a user's value into the stored one, or raises _RefusedError. They know neither
# the option's name nor its allowed values: from_mapping adds these to the message.


def _optional(parse: Callable[[object], T]) -> Callable[[object], T | None]:
    """``parse``, with None passed through."""
    return lambda value: None if value is None else parse(value)


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    """A parser for a fixed set of names."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise _RefusedError
        if value not in choices:
            raise _RefusedError(_did_you_mean(value, choices))
        return str(value)

    return parse


def _positive(value: object) -> float:
    """A finite number above zero, as a float, so that 25 and 25.0 are the same option."""
    # bool is an int in Python, but True megabytes is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _RefusedError
    try:
        number = float(value)
    except OverflowError:
        raise _RefusedError("The number is too large.") from None
    if not (math.isfinite(number) and number > 0):
        raise _RefusedError
    return number


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _RefusedError
    return value


def _float_dtype(value: object) -> torch.dtype:
    """A floating dtype, given as such or by name."""
    dtype = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            names = ("bfloat16", "float16", "float32", "float64")
            raise _RefusedError(_did_you_mean(name, names))
    if not isinstance(dtype, torch.dtype):
        raise _RefusedError
    if not dtype.is_floating_point:
        raise _RefusedError(f"{dtype} is not a floating dtype.")
    return dtype


def _process_group(value: object) -> dist.ProcessGroup:
    """A process group that this rank belongs to."""
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise _RefusedError("new_group() returns this on a rank outside the group.")
    if not isinstance(value, dist.ProcessGroup):
        raise _RefusedError
    return value


def _mesh(value: object) -> tuple[DeviceMesh, str | int | None]:
    """A mesh and the dimension to use; None stands for the only dimension of a 1-D mesh."""
    pair = value if isinstance(value, tuple) else (value, None)
    if len(pair) != 2:
        raise _RefusedError
    mesh, dim = pair
    if not isinstance(mesh, DeviceMesh) or isinstance(dim, bool):
        raise _RefusedError
    if not isinstance(dim, (str, int, type(None))):
        raise _RefusedError
    # Ask torch itself: only it knows flattened dimensions and whether this rank is in the mesh.
    try:
        mesh.get_group(dim)
    except (RuntimeError, LookupError, ValueError, AssertionError) as error:
        dims: tuple[object, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        reason = " ".join(map(str, error.args))
        raise _RefusedError(f"The mesh has dimensions {dims}. torch says: {reason}") from error
    return mesh, dim


def _plan(value: object) -> str:
    """The name of a plan or the path of its file, as a string. Only rank 0 needs the file."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and text.endswith(_PLAN_FILE):
        return text
    if isinstance(text, str) and (text is not value or os.sep in text or "." in text):
        raise _RefusedError(f"The path of a plan ends in {_PLAN_FILE}.")
    return _one_of(PLANS)(text)


def _directory(value: object) -> str:
    """A path, as a string. The directory need not exist yet."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise _RefusedError
    return path


def _config(value: object) -> tuple[tuple[str, Hashable], ...]:
    """A configuration mapping as pairs sorted by key: hashable, and the same in any order."""
    if not isinstance(value, Mapping):
        raise _RefusedError
    for key, entry in value.items():
        if not isinstance(key, str):
            raise _RefusedError(f"The key {key!r} is not a string.")
        try:
            hash(entry)
        except TypeError:
            raise _RefusedError(
                f"The value of {key!r} is not hashable; give a list as a tuple, for example."
            ) from None
    # Values may not be comparable, so only keys decide the order.
    return tuple(sorted(value.items(), key=lambda pair: pair[0]))


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    """A hint that names the nearest of ``names``; empty if none is near."""
    near = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def _quoted(choices: tuple[str, ...]) -> str:
    return ", ".join(map(repr, choices))


def _about(
    parse: Callable[[object], object], *, allowed: str, help: str, agreed: bool = True
) -> dict[str, object]:
    """Metadata of a field of Options. ``agreed``: its value must be the same on every rank.

    It is agreed on unless said otherwise, so that an option added later cannot be forgotten.
    """
    return {"help": help, "allowed": allowed, "parse": parse, "agreed": agreed}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. Build it with :meth:`from_mapping`, which checks the values.

    It is hashable, and equal for equal mappings: Dynamo recompiles on every call otherwise.
    """

    process_group: dist.ProcessGroup | None = field(
        default=None,
        metadata=_about(
            _optional(_process_group),
            allowed="a torch.distributed.ProcessGroup, or None",
            help="Ranks to train over. None means the default group. Excludes mesh.",
            agreed=False,
        ),
    )
    mesh: tuple[DeviceMesh, str | int | None] | None = field(
        default=None,
        metadata=_about(
            _optional(_mesh),
            allowed="a 1-D DeviceMesh, a pair (DeviceMesh, dimension name or index), or None",
            help="Ranks to train over, as a dimension of a DeviceMesh. Excludes process_group.",
            agreed=False,
        ),
    )
    stage: Stage = field(
        default="zero2",
        metadata=_about(
            _one_of(STAGES),
            allowed=_quoted(STAGES),
            help="What is sharded: optimizer state and gradients (zero2), optimizer state (zero1), "
            "or nothing (ddp: full gradients on every rank).",
        ),
    )
    plan: str = field(
        default="auto",
        metadata=_about(
            _plan,
            allowed=f"{_quoted(PLANS)}, or the path of a {_PLAN_FILE} file as str or os.PathLike",
            help="The overlap plan: found by search and tuned (auto), a named baseline, or a file "
            "with a plan that 'dump' wrote, which only rank 0 reads.",
        ),
    )
    bucket_mb: float | None = field(
        default=None,
        metadata=_about(
            _optional(_positive),
            allowed="a finite number > 0, or None",
            help="Target bucket size in MB (2**20 bytes) where the plan leaves it open. "
            "None leaves it to the plan.",
        ),
    )
    in_flight_mb: float | None = field(
        default=None,
        metadata=_about(
            _optional(_positive),
            allowed="a finite number > 0, or None",
            help="Memory limit in MB (2**20 bytes) for collectives in flight. "
            "None leaves it to the plan.",
        ),
    )
    commshift: bool = field(
        default=True,
        metadata=_about(
            _flag,
            allowed="True, False",
            help="Whether collectives may leave their phase: gathers run on into the next forward, "
            "where each parameter is waited for at its first use. False keeps them in the step.",
        ),
    )
    update: Update = field(
        default="at_step",
        metadata=_about(
            _one_of(UPDATES),
            allowed=_quoted(UPDATES),
            help="When parameters are updated: in optimizer.step(), or those of late layers "
            "already in the backward, when nothing reads the old values any more. Gradients cannot "
            "be clipped or unscaled then, and each backward needs its step.",
        ),
    )
    reduce_dtype: torch.dtype | None = field(
        default=None,
        metadata=_about(
            _optional(_float_dtype),
            allowed="a floating torch.dtype or its name, such as 'bfloat16', or None",
            help="Dtype of gradients on the wire. None means the parameter's dtype.",
        ),
    )
    gather_dtype: torch.dtype | None = field(
        default=None,
        metadata=_about(
            _optional(_float_dtype),
            allowed="a floating torch.dtype or its name, such as 'bfloat16', or None",
            help="Dtype of parameters on the wire. None means the parameter's dtype.",
        ),
    )
    lowering: Lowering = field(
        default="inductor",
        metadata=_about(
            _one_of(LOWERINGS),
            allowed=_quoted(LOWERINGS),
            help="What runs the rewritten graphs: Inductor, or eager (for tests and debugging).",
        ),
    )
    inductor: tuple[tuple[str, Hashable], ...] = field(
        default=(),
        metadata=_about(
            _config,
            allowed="a mapping of Inductor configuration names to hashable values",
            help="Inductor configuration for the graphs that fxcomm compiles.",
        ),
    )
    dump: str | None = field(
        default=None,
        metadata=_about(
            _optional(_directory),
            allowed="a directory as str or os.PathLike, or None",
            help="Directory in which rank 0 writes plans, step graphs, and graphs before and after "
            "each pass. None leaves it to the environment variable FXCOMM_DUMP; without that, "
            "nothing is dumped.",
            agreed=False,
        ),
    )
    start_timeout_s: float = field(
        default=300.0,
        metadata=_about(
            _positive,
            allowed="a finite number > 0",
            help="Seconds that ranks have at start to agree on the model and the options.",
            agreed=False,
        ),
    )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object] | None) -> Options:
        """Check ``torch.compile``'s ``options``; raise OptionsError for what is not allowed."""
        if mapping is None:
            return cls()
        if not isinstance(mapping, Mapping):
            kind = type(mapping).__name__
            raise OptionsError(f"fxcomm options must be a mapping of names to values, not a {kind}")
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in mapping.items():
            if name not in known:
                hint = _did_you_mean(str(name), known)
                raise OptionsError(
                    _sentence(f"unknown fxcomm option {name!r}.", hint, f"Options: {[*known]}.")
                )
            metadata = known[name].metadata
            try:
                values[name] = metadata["parse"](value)
            except _RefusedError as refused:
                allowed = f"Allowed: {metadata['allowed']}."
                raise OptionsError(
                    _sentence(f"fxcomm option {name!r}: got {value!r}.", allowed, str(refused))
                ) from refused.__cause__
        options = cls(**values)
        if options.process_group is not None and options.mesh is not None:
            raise OptionsError(
                "fxcomm options 'process_group' and 'mesh' both name the ranks; give only one"
            )
        return options

    def group(self) -> dist.ProcessGroup | None:
        """The process group to train over; None means the default group."""
        if self.mesh is None:
            return self.process_group
        mesh, dim = self.mesh
        return mesh.get_group(dim)

    @property
    def plan_file(self) -> str | None:
        """The path of the file whose plan is replayed; None if ``plan`` names a plan."""
        return self.plan if self.plan.endswith(_PLAN_FILE) else None

    def inductor_config(self) -> dict[str, object]:
        """The ``inductor`` option as a new dict."""
        return dict(self.inductor)

    def describe(self) -> str:
        """All that ranks must agree on, as JSON text: equal on ranks with equal options."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["agreed"]}
        values["inductor"] = self.inductor_config()
        return json.dumps(_plain(values), sort_keys=True)


def _sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _plain(value: object) -> object:
    """``value`` in JSON's types, the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, frozenset):
        # Iteration order follows hashes, which differ between processes for strings.
        return sorted((_plain(entry) for entry in value), key=json.dumps)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    # A function, class or object, whose repr may hold an address: its name, or its type's, is all
    # that can be compared between processes.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
