"""Options: what is accepted, what is refused and with which words, and what ranks compare."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxcomm.errors import OptionsError
from fxcomm.options import LOWERINGS, PLANS, STAGES, UPDATES, Options

NAMES = [f.name for f in fields(Options)]


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh_2d(world: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def refusal(**options: object) -> str:
    with pytest.raises(OptionsError) as caught:
        Options.from_mapping(options)
    return str(caught.value)


# Defaults and accepted values


@pytest.mark.parametrize("mapping", [None, {}])
def test_defaults(mapping: dict[str, object] | None) -> None:
    options = Options.from_mapping(mapping)
    assert {name: getattr(options, name) for name in NAMES} == {
        "process_group": None,
        "mesh": None,
        "stage": "zero2",
        "plan": "auto",
        "bucket_mb": None,
        "in_flight_mb": None,
        "commshift": True,
        "update": "at_step",
        "reduce_dtype": None,
        "gather_dtype": None,
        "lowering": "inductor",
        "inductor": (),
        "dump": None,
        "start_timeout_s": 300.0,
    }
    assert options.group() is None
    assert options.inductor_config() == {}


def test_each_default_is_itself_an_allowed_value() -> None:
    defaults = {f.name: f.default for f in fields(Options)} | {"inductor": {}}
    assert Options.from_mapping(defaults) == Options()


def test_each_field_documents_itself() -> None:
    for f in fields(Options):
        assert f.metadata["help"], f.name
        assert f.metadata["allowed"], f.name


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().stage = "ddp"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "choices"),
    [("stage", STAGES), ("plan", PLANS), ("update", UPDATES), ("lowering", LOWERINGS)],
)
def test_each_choice_is_accepted(name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(Options.from_mapping({name: choice}), name) == choice


@pytest.mark.parametrize("name", ["reduce_dtype", "gather_dtype"])
@pytest.mark.parametrize("value", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_given_by_name(name: str, value: object) -> None:
    assert getattr(Options.from_mapping({name: value}), name) is torch.bfloat16


@pytest.mark.parametrize("value", ["out/dump", Path("out/dump")])
def test_dump_is_stored_as_text(value: object) -> None:
    assert Options.from_mapping({"dump": value}).dump == os.path.join("out", "dump")


@pytest.mark.parametrize("value", ["plans/mine.json", Path("plans/mine.json")])
def test_a_plan_may_be_a_file(value: object) -> None:
    options = Options.from_mapping({"plan": value})
    assert options.plan_file == os.path.join("plans", "mine.json")
    assert options.describe() != Options().describe()


@pytest.mark.parametrize("name", PLANS)
def test_a_named_plan_is_no_file(name: str) -> None:
    assert Options.from_mapping({"plan": name}).plan_file is None


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False) | st.integers(1, 2**40))
def test_any_positive_finite_number_is_a_size(number: float) -> None:
    stored = Options.from_mapping({"bucket_mb": number}).bucket_mb
    assert isinstance(stored, float)
    assert stored == number


def test_inductor_config_is_a_copy() -> None:
    given_config = {"max_autotune": True, "a": (1, 2)}
    options = Options.from_mapping({"inductor": given_config})
    given_config["max_autotune"] = False
    options.inductor_config()["a"] = None
    assert options.inductor_config() == {"max_autotune": True, "a": (1, 2)}


# Refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("process_group", "world"),
        ("process_group", 0),
        ("mesh", "dp"),
        ("mesh", ("mesh", "dp")),
        ("mesh", ()),
        ("stage", "zero3"),
        ("stage", 2),
        ("stage", None),
        ("stage", ["zero2"]),
        ("plan", "fastest"),
        ("plan", None),
        ("plan", b"plan.json"),
        ("bucket_mb", "25"),
        ("reduce_dtype", torch.int32),
        ("reduce_dtype", "int32"),
        ("reduce_dtype", "torch"),
        ("reduce_dtype", "nn"),
        ("reduce_dtype", 16),
        ("gather_dtype", torch.bool),
        ("gather_dtype", float),
        ("lowering", "aot"),
        ("dump", True),
        ("dump", ""),
        ("dump", b"out"),
        ("inductor", None),
        ("inductor", [("max_autotune", True)]),
        ("start_timeout_s", None),
    ],
)
def test_a_wrong_value_is_refused_in_full(name: str, value: object) -> None:
    message = refusal(**{name: value})
    allowed = {f.name: f.metadata["allowed"] for f in fields(Options)}[name]
    assert f"option {name!r}: got {value!r}. Allowed: {allowed}." in message


@pytest.mark.parametrize("name", ["bucket_mb", "in_flight_mb", "start_timeout_s"])
@pytest.mark.parametrize(
    "value", [0, -1, 0.0, -0.5, True, False, float("nan"), float("inf"), 10**400, 1j]
)
def test_a_size_or_time_is_a_positive_finite_number(name: str, value: object) -> None:
    assert f"option {name!r}: got {value!r}. Allowed: a finite number > 0" in refusal(
        **{name: value}
    )


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("stage", "zero-2", "zero2"),
        ("stage", "ZeRO1", "zero1"),
        ("stage", "DDP", "ddp"),
        ("plan", "bucket-25", "bucket-25mb"),
        ("lowering", "inducter", "inductor"),
        ("reduce_dtype", "bf16", "bfloat16"),
        ("gather_dtype", "torch.flaot32", "float32"),
    ],
)
def test_a_near_miss_is_told_the_nearest_value(name: str, value: str, near: str) -> None:
    assert refusal(**{name: value}).endswith(f"Did you mean {near!r}?")


@pytest.mark.parametrize("value", ["plans/mine", "mine.jsn", Path("mine"), "auto.json.gz"])
def test_a_path_that_names_no_plan_file_is_told_the_ending(value: object) -> None:
    assert refusal(plan=value).endswith("The path of a plan ends in .json.")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("stages", "stage"),
        ("bucket_size_mb", "bucket_mb"),
        ("in-flight-mb", "in_flight_mb"),
        ("reducedtype", "reduce_dtype"),
        ("Inductor", "inductor"),
    ],
)
def test_an_unknown_option_is_told_the_nearest_name(name: str, near: str) -> None:
    message = refusal(**{name: 1})
    assert f"unknown fxcomm option {name!r}. Did you mean {near!r}?" in message
    assert str(NAMES) in message


def test_an_unknown_option_far_from_all_gets_the_list_only() -> None:
    message = refusal(qqq=1)
    assert "Did you mean" not in message
    assert str(NAMES) in message


def test_an_option_name_that_is_no_string_is_unknown() -> None:
    with pytest.raises(OptionsError, match="unknown fxcomm option 3"):
        Options.from_mapping({3: "zero2"})  # type: ignore[dict-item]


@pytest.mark.parametrize("options", ["zero2", [("stage", "zero2")], 1])
def test_options_that_are_no_mapping_are_refused(options: object) -> None:
    with pytest.raises(OptionsError, match="must be a mapping"):
        Options.from_mapping(options)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, ("a", [1])])
def test_an_inductor_value_must_be_hashable(value: object) -> None:
    message = refusal(inductor={"max_autotune": True, "some.list": value})
    assert "'some.list' is not hashable" in message


def test_an_inductor_key_must_be_a_string() -> None:
    assert "key 1 is not a string" in refusal(inductor={1: True})


# Hash and equality


def shuffled(mapping: dict[str, object], seed: int) -> dict[str, object]:
    items = list(mapping.items())
    random.Random(seed).shuffle(items)
    return dict(items)


sizes = st.none() | st.floats(1e-3, 1e6)
dtypes = st.sampled_from([None, torch.float16, torch.bfloat16, "float32", "torch.float64"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
configs = st.dictionaries(
    st.text(), st.recursive(scalars, lambda s: st.lists(s).map(tuple), max_leaves=4)
)
mappings = st.fixed_dictionaries(
    {},
    optional={
        "stage": st.sampled_from(STAGES),
        "plan": st.sampled_from(PLANS) | st.text(max_size=3).map(lambda name: f"{name}.json"),
        "update": st.sampled_from(UPDATES),
        "lowering": st.sampled_from(LOWERINGS),
        "bucket_mb": sizes,
        "in_flight_mb": sizes,
        "commshift": st.booleans(),
        "reduce_dtype": dtypes,
        "gather_dtype": dtypes,
        "inductor": configs,
        "dump": st.none() | st.text(min_size=1),
        "start_timeout_s": st.floats(1e-3, 1e6),
    },
)


@given(mappings, st.integers())
def test_order_of_keys_does_not_matter(mapping: dict[str, object], seed: int) -> None:
    other = shuffled(mapping, seed)
    if isinstance(config := mapping.get("inductor"), dict):
        other["inductor"] = shuffled(config, seed)
    first, second = Options.from_mapping(mapping), Options.from_mapping(other)
    assert first == second
    assert hash(first) == hash(second)
    assert first.describe() == second.describe()


@given(mappings, mappings)
def test_describe_differs_when_what_ranks_agree_on_does(
    one: dict[str, object], two: dict[str, object]
) -> None:
    local = {"dump": None, "start_timeout_s": 1}
    first, second = Options.from_mapping(one | local), Options.from_mapping(two | local)
    if first != second:
        assert first.describe() != second.describe()


def test_spellings_of_a_value_are_equal() -> None:
    one = Options.from_mapping({"bucket_mb": 25, "reduce_dtype": "bfloat16", "dump": "d"})
    two = Options.from_mapping(
        {"bucket_mb": 25.0, "reduce_dtype": torch.bfloat16, "dump": Path("d"), "stage": "zero2"}
    )
    assert one == two
    assert hash(one) == hash(two)


@pytest.mark.parametrize(
    "mapping",
    [{"stage": "ddp"}, {"bucket_mb": 1}, {"inductor": {"a": 1}}, {"dump": "d"}],
)
def test_another_value_is_another_options(mapping: dict[str, object]) -> None:
    assert Options.from_mapping(mapping) != Options()


# describe


def test_describe_is_json_of_what_ranks_agree_on() -> None:
    options = Options.from_mapping(
        {
            "stage": "zero1",
            "bucket_mb": 25,
            "reduce_dtype": "bfloat16",
            "inductor": {"b": (1, None), "a": torch.float32},
            "dump": "rank0",
            "start_timeout_s": 5,
        }
    )
    assert json.loads(options.describe()) == {
        "stage": "zero1",
        "plan": "auto",
        "bucket_mb": 25.0,
        "in_flight_mb": None,
        "commshift": True,
        "update": "at_step",
        "reduce_dtype": "torch.bfloat16",
        "gather_dtype": None,
        "lowering": "inductor",
        "inductor": {"a": "torch.float32", "b": [1, None]},
    }


def test_describe_leaves_out_what_may_differ_between_ranks(world: None) -> None:
    local = {"dump": "rank3", "start_timeout_s": 1, "process_group": dist.group.WORLD}
    assert Options.from_mapping(local).describe() == Options().describe()


def test_describe_is_the_same_in_processes_with_other_hashes_and_addresses() -> None:
    script = (
        "from fxcomm.options import Options\n"
        "class Pass:\n    pass\n"
        "config = {'set': frozenset('abcdefgh'), 'object': Pass(), 'function': lambda g: g}\n"
        "text = Options.from_mapping({'inductor': config}).describe()\n"
        "print(text)\n"
    )
    # An order that this process does not have, whatever the seed of its hashes.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    here: dict[str, object] = {"__name__": "__main__"}
    exec(script, here)
    assert here["text"] == there
    config = json.loads(there)["inductor"]
    assert config["set"] == list("abcdefgh")
    assert config["object"] == "__main__.Pass"


# Process groups and meshes


def test_a_process_group_is_used_as_given(world: None) -> None:
    group = dist.new_group([0, 1])
    options = Options.from_mapping({"process_group": group})
    assert options.group() is group
    assert hash(options) == hash(Options.from_mapping({"process_group": group}))


def test_a_group_without_this_rank_is_refused(world: None) -> None:
    assert "a rank outside the group" in refusal(process_group=dist.new_group([1, 2]))


def test_a_mesh_of_one_dimension_needs_no_dimension(world: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    options = Options.from_mapping({"mesh": mesh})
    assert options.group() is mesh.get_group()
    assert options == Options.from_mapping({"mesh": mesh})
    assert hash(options) == hash(Options.from_mapping({"mesh": mesh}))


@pytest.mark.parametrize(("dim", "name"), [("dp", "dp"), ("tp", "tp"), (0, "dp"), (1, "tp")])
def test_a_dimension_is_named_or_numbered(mesh_2d: DeviceMesh, dim: str | int, name: str) -> None:
    options = Options.from_mapping({"mesh": (mesh_2d, dim)})
    assert options.group() is mesh_2d.get_group(name)
    assert options.describe() == Options().describe()


def test_a_slice_of_a_mesh_is_a_mesh_of_one_dimension(mesh_2d: DeviceMesh) -> None:
    assert Options.from_mapping({"mesh": mesh_2d["tp"]}).group() is mesh_2d.get_group("tp")


@pytest.mark.parametrize("dim", [None, "pp", 2])
def test_a_missing_or_wrong_dimension_is_told_the_dimensions(
    mesh_2d: DeviceMesh, dim: object
) -> None:
    value = mesh_2d if dim is None else (mesh_2d, dim)
    assert "The mesh has dimensions ('dp', 'tp')" in refusal(mesh=value)


@pytest.mark.parametrize("dim", [True, 1.0, ("dp",)])
def test_a_dimension_of_another_type_is_refused(mesh_2d: DeviceMesh, dim: object) -> None:
    assert "option 'mesh'" in refusal(mesh=(mesh_2d, dim))


def test_a_mesh_without_this_rank_is_refused(world: None) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]))
    assert "option 'mesh'" in refusal(mesh=mesh)


def test_group_and_mesh_exclude_each_other(mesh_2d: DeviceMesh) -> None:
    message = refusal(process_group=dist.group.WORLD, mesh=(mesh_2d, "dp"))
    assert "'process_group' and 'mesh'" in message
    group_only = Options.from_mapping({"process_group": dist.group.WORLD, "mesh": None})
    assert group_only.group() is dist.group.WORLD
