"""How training starts: ranks compare what they are about to do, get rank 0's values, and refuse
what would go wrong. And what happens when shapes change after that."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxcomm
from fxcomm.registry import REGISTRY
from tests.oracle import train_alone
from tests.ranks import GROUP_TIMEOUT_S, Ranks
from tests.zoo import ROWS, ZOO, Case, TiedGPT

Pools = Callable[[int], Ranks]

EAGER: Mapping[str, Any] = {"lowering": "eager"}
DEADLINE_S = 2.0
# Every rank has raised after waiting once, and rank 0's verdict may take as long again.
LATEST_S = 2 * DEADLINE_S + 4.0
# For ranks that all come, on a machine that may be busy.
PATIENT: Mapping[str, Any] = {**EAGER, "start_timeout_s": 30.0}


@pytest.fixture
def fresh_ranks() -> Iterator[Pools]:
    """Ranks for one test only, which it may leave in any state."""
    pools: list[Ranks] = []

    def of(world_size: int) -> Ranks:
        pools.append(Ranks(world_size))
        return pools[-1]

    yield of
    for pool in pools:
        pool.stop(kill=True)


@dataclass
class Caught:
    """The error that a rank got: its class, that of what it wraps, its text, and after how long."""

    kind: str
    cause: str
    text: str
    seconds: float


def caught(act: Callable[[], object]) -> Caught | None:
    """The error that ``act`` raises; None if it raises none."""
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        seconds = time.monotonic() - start
        return Caught(type(error).__name__, type(cause).__name__, str(cause), seconds)
    return None


def compiled(model: nn.Module, options: Mapping[str, Any] = EAGER, **how: Any) -> Any:
    return torch.compile(model, backend="fxcomm", options=dict(options), **how)


class Stack(nn.Module):
    """Layers, a buffer and a frozen parameter, all to be varied."""

    def __init__(
        self,
        width: int = 8,
        layers: int = 2,
        buffer: int = 3,
        frozen: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(layers))
        self.register_buffer("constant", torch.randn(buffer))
        self.fixed = nn.Parameter(torch.randn(frozen), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.sum() + self.constant.sum() + self.fixed.sum()


# --- everyone gets rank 0's values ---


class Values(nn.Module):
    """Parameters and buffers of every kind: other memory orders, a scalar, empty, whole numbers,
    frozen, in no forward; and one parameter that is not dense in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.sparse_in_memory = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(4, 4).t(), requires_grad=False)
        self.unused = nn.Linear(3, 2)
        self.unused_frozen = nn.Linear(3, 2).requires_grad_(False)
        self.register_buffer("numbers", torch.randint(100, (3,)))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("passing", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).mean((2, 3)) @ self.frozen @ self.turned
        return (x * self.scale).sum() + self.sparse_in_memory.sum() + self.passing.sum()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def values_job(rank: int, world_size: int, stage: str, evaluate_first: bool) -> Any:
    """Values before and after the first forward, and whether strides and memory stayed."""
    del world_size
    torch.manual_seed(rank)
    model = Values().eval()
    before = values_of(model)
    memory = {n: (p.data_ptr(), p.stride()) for n, p in model.named_parameters()}
    net = compiled(model, {**EAGER, "stage": stage})
    if evaluate_first:
        with torch.no_grad():
            net(torch.ones(1, 3, 5, 5))
    else:
        net(torch.ones(1, 3, 5, 5))
    same = memory == {n: (p.data_ptr(), p.stride()) for n, p in model.named_parameters()}
    return before, values_of(model), same


@pytest.mark.parametrize("evaluate_first", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_everyone_gets_rank_zeros_values(ranks: Pools, stage: str, evaluate_first: bool) -> None:
    results = ranks(3).run(values_job, stage, evaluate_first)
    wanted = results[0][0]
    for _, after, same_memory in results:
        assert list(after) == list(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(after[name], tensor), name
        assert same_memory


def frozen_job(rank: int, world_size: int) -> Any:
    """What training does to frozen parameters."""
    del world_size
    torch.manual_seed(rank)
    model = Stack()
    net = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    address, first = model.fixed.data_ptr(), None
    for _ in range(3):
        net(torch.ones(2, 8)).backward()
        first = model.fixed.detach().clone() if first is None else first
        optimizer.step()
        optimizer.zero_grad()
    untouched = model.fixed.data_ptr() == address and torch.equal(model.fixed, first)
    state = optimizer.state_dict()["state"]
    position = [n for n, _ in model.named_parameters()].index("fixed")
    return untouched, model.fixed.grad is None, position in state, model.fixed.detach().clone()


def test_frozen_parameters_are_broadcast_and_else_untouched(ranks: Pools) -> None:
    results = ranks(2).run(frozen_job)
    for untouched, no_gradient, has_state, value in results:
        assert untouched
        assert no_gradient
        assert not has_state
        assert torch.equal(value, results[0][3])


# --- ranks that differ ---


@dataclass(frozen=True)
class Difference:
    """How one rank differs, and what the message says of it and of the others."""

    odd: str
    others: str
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


DIFFERENCES = {
    "width": Difference("'layers.0.weight' of shape (9, 9)", "of shape (8, 8)", {"width": 9}),
    "more layers": Difference("'layers.2.weight'", "'fixed' of shape (5,)", {"layers": 3}),
    "fewer layers": Difference("'fixed' of shape (5,)", "'layers.1.weight'", {"layers": 1}),
    "dtype": Difference("torch.float64", "torch.float32", {"dtype": torch.float64}),
    "buffer": Difference("buffer 'constant' of shape (4,)", "of shape (3,)", {"buffer": 4}),
    "frozen": Difference("'fixed' of shape (6,)", "of shape (5,)", {"frozen": 6}),
    "stage": Difference('"stage": "zero1"', '"stage": "zero2"', options={"stage": "zero1"}),
    "bucket": Difference('"bucket_mb": 2', '"bucket_mb": null', options={"bucket_mb": 2}),
    "wire": Difference("float16", "null", options={"reduce_dtype": "float16"}),
}


def difference_job(rank: int, world_size: int, name: str, odd: int) -> Caught | None:
    """Starts a model that is different on rank ``odd``."""
    del world_size
    difference = DIFFERENCES[name]
    mine = difference if rank == odd else Difference("", "")
    model = Stack(**mine.model)
    width = mine.model.get("width", 8)
    net = compiled(model, {**PATIENT, **mine.options})
    return caught(lambda: net(torch.ones(2, width)))


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_different_model_or_option_is_named_on_every_rank(
    ranks: Pools, name: str, odd: int
) -> None:
    difference = DIFFERENCES[name]
    mine, zeros = difference.odd, difference.others
    if odd == 0:
        mine, zeros = zeros, mine
    for error in ranks(3).run(difference_job, name, odd):
        assert error is not None
        assert error.cause == "RankMismatchError"
        ours, _, theirs = error.text.partition(" rank 0 has ")
        assert f"rank {odd or 1} has " in ours
        assert mine in ours
        assert zeros in theirs


def test_the_error_is_fxcomms_own(ranks: Pools) -> None:
    """Users catch ``fxcomm.RankMismatchError``, not what Dynamo makes of it."""
    for error in ranks(3).run(difference_job, "width", 2):
        assert error is not None
        assert error.kind == "RankMismatchError"


def repaired_job(rank: int, world_size: int) -> bool:
    """A model that was refused, then a right one."""
    if difference_job(rank, world_size, "width", 1) is None:
        return False
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Stack()
    net, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    net(torch.ones(2, 8)).backward()
    optimizer.step()
    return True


def test_after_a_refusal_a_right_model_trains(ranks: Pools) -> None:
    assert all(ranks(2).run(repaired_job))


OPTIMIZERS: dict[str, Callable[[nn.ModuleList], torch.optim.Optimizer]] = {
    "usual": lambda layers: torch.optim.AdamW(layers.parameters(), lr=0.25),
    "rate": lambda layers: torch.optim.AdamW(layers.parameters(), lr=0.125),
    "class": lambda layers: torch.optim.SGD(layers.parameters(), lr=0.25),
    "decay": lambda layers: torch.optim.AdamW(layers.parameters(), lr=0.25, weight_decay=0.75),
    "fewer": lambda layers: torch.optim.AdamW(layers[:1].parameters(), lr=0.25),
    "order": lambda layers: torch.optim.AdamW([*layers.parameters()][::-1], lr=0.25),
    "outsider": lambda layers: torch.optim.AdamW(
        [*layers.parameters(), nn.Parameter(torch.ones(77))], lr=0.25
    ),
}
SAID = {
    "rate": ("'lr': 0.125", "'lr': 0.25"),
    "class": ("optimizer SGD", "optimizer AdamW"),
    "decay": ("'weight_decay': 0.75", "'weight_decay': 0.01"),
    "fewer": ("nothing more", "layers.1.weight"),
    "order": ("layers.1.bias", "layers.0.weight"),
    "outsider": ("shape (77,)", ""),
}


def optimizer_job(rank: int, world_size: int, name: str, odd: int) -> Caught | None:
    """The first step of an optimizer that is different on rank ``odd``."""
    del world_size
    model = Stack()
    net = compiled(model, PATIENT)
    optimizer = OPTIMIZERS[name if rank == odd else "usual"](model.layers)
    net(torch.ones(2, 8)).backward()
    return caught(optimizer.step)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", SAID)
def test_a_different_optimizer_is_named_on_every_rank(ranks: Pools, name: str, odd: int) -> None:
    mine, zeros = SAID[name] if odd else SAID[name][::-1]
    for error in ranks(2).run(optimizer_job, name, odd):
        assert error is not None
        assert error.kind == "RankMismatchError"
        ours, _, theirs = error.text.partition(" rank 0 has ")
        assert "rank 1 has " in ours
        assert mine in ours
        assert zeros in theirs


class Noted(torch.optim.SGD):
    """An optimizer whose groups hold a setting that is an object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.25)
        self.param_groups[0]["schedule"] = lambda step: 1.0 / step
        self.param_groups[0]["owner"] = nn.Identity.forward


def object_setting_job(rank: int, world_size: int) -> Caught | None:
    del world_size
    # Objects lie at other addresses on each rank, which is no difference.
    model, ballast = Stack(), [object() for _ in range(1000 * rank)]
    net, optimizer = compiled(model), Noted(model.parameters())
    net(torch.ones(2, 8)).backward()
    del ballast
    return caught(optimizer.step)


def test_settings_without_a_text_are_no_difference(ranks: Pools) -> None:
    assert ranks(2).run(object_setting_job) == [None, None]


def close_rates_job(rank: int, world_size: int) -> Caught | None:
    del world_size
    model = Stack()
    net = compiled(model, PATIENT)
    rate = torch.tensor(0.001 + 1e-8 * rank, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=False, foreach=False)
    net(torch.ones(2, 8)).backward()
    return caught(optimizer.step)


def test_a_difference_that_printing_hides_is_found(ranks: Pools) -> None:
    for error in ranks(2).run(close_rates_job):
        assert error is not None
        assert error.kind == "RankMismatchError"


# --- ranks that do not come ---


def absent_job(rank: int, world_size: int, absent: int, at: str) -> Caught | None:
    """Rank ``absent`` stops before the first forward or before the first step."""
    del world_size
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # imports, which take their time
    dist.barrier()
    if rank == absent and at == "start":
        return None
    model = Stack()
    net = compiled(model, {**EAGER, "start_timeout_s": DEADLINE_S})
    if at == "start":
        return caught(lambda: net(torch.ones(2, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    net(torch.ones(2, 8)).backward()
    return None if rank == absent else caught(optimizer.step)


@pytest.mark.parametrize(("world_size", "absent"), [(2, 0), (3, 2)])
def test_a_rank_that_does_not_come_is_named_in_time(
    fresh_ranks: Pools, world_size: int, absent: int
) -> None:
    pool = fresh_ranks(world_size)
    for at in ("step", "start"):
        results = pool.run(absent_job, absent, at, timeout_s=60)
        for rank, error in enumerate(results):
            if rank == absent:
                continue
            assert error is not None
            assert error.seconds < LATEST_S
            assert error.cause == "RankMismatchError"
            assert f"rank {absent}" in error.text


def timeouts_job(rank: int, world_size: int) -> set[float]:
    """Seconds after which collectives fail, of every group of the process."""
    del rank, world_size
    model = Stack()
    net, optimizer = compiled(model), torch.optim.AdamW(model.parameters())
    net(torch.ones(2, 8)).backward()
    optimizer.step()
    (managed,) = REGISTRY.models_of(model.parameters())
    groups = [managed.control, managed.arenas[0].communicator.group]  # type: ignore[attr-defined]
    return {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}


def test_collectives_fail_after_the_time_that_the_user_chose(ranks: Pools) -> None:
    """``init_process_group(timeout=...)`` means fxcomm's groups, too; torch's default is long."""
    assert ranks(2).run(timeouts_job) == [{GROUP_TIMEOUT_S}] * 2


# --- one process ---


def test_torchrun_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch._dynamo.reset()
    error = caught(lambda: compiled(Stack())(torch.ones(2, 8)))
    assert error is not None
    assert error.cause == "FxcommError"
    assert "process 1 of 4" in error.text
    assert "init_process_group" in error.text


def test_torchrun_without_a_group_is_fxcomms_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torch._dynamo.reset()
    with pytest.raises(fxcomm.FxcommError, match="init_process_group"):
        compiled(Stack())(torch.ones(2, 8))


def alone_job(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Trains in one process, eagerly and compiled; what can be seen of fxcomm."""
    del rank, world_size
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    plain = copy.deepcopy(model)
    net = torch.compile(model, backend="fxcomm")
    memory = [p.data_ptr() for p in model.parameters()]
    seen: dict[str, Any] = {}
    for module, called in ((plain, plain), (model, net)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(3):
            called(torch.full((3, 6), 0.1 * step)).square().sum().backward()
            seen["gradients"] = {type(p.grad) for p in module.parameters()}
            optimizer.step()
            optimizer.zero_grad()
        seen["state bytes"] = fxcomm.optimizer_state_bytes(optimizer)
        seen["state"] = {
            type(value)
            for entry in optimizer.state.values()
            for key, value in entry.items()
            if key != "step"
        }
        seen["state of parameters"] = set(optimizer.state) == set(module.parameters())
    with fxcomm.no_sync(model):
        net(torch.ones(3, 6)).sum().backward()
    fxcomm.synchronize(model)
    seen["equal"] = all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    seen["memory"] = memory == [p.data_ptr() for p in model.parameters()]
    seen["models"] = len(REGISTRY.models_of(model.parameters()))
    seen["sent"] = fxcomm.stats(model).wire_bytes
    return seen


ALONE = {
    "gradients": {Tensor},
    "state": {Tensor},
    "state bytes": 2 * 4 * (6 * 7 + 7 + 7 * 2 + 2) + 4 * 4,
    "state of parameters": True,
    "equal": True,
    "memory": True,
    "models": 0,
    "sent": 0.0,
}


def test_one_process_without_a_group_is_plain_inductor() -> None:
    assert alone_job() == ALONE


def test_a_group_of_one_is_plain_inductor(ranks: Pools) -> None:
    assert ranks(1).run(alone_job) == [ALONE]


# --- parameters that share ---


class Sharing(nn.Module):
    """Two parameters over the same memory, wholly or in part; ``second`` may be frozen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        memory = torch.randn(12)
        self.first = nn.Parameter(memory[:8])
        start = {"whole": 0, "part": 6, "frozen": 0, "buffer": 0}[how]
        view = memory[start : start + 4 if start else 8]
        if how == "buffer":
            self.register_buffer("second", view)
        else:
            self.second = nn.Parameter(view, requires_grad=how != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * (self.first.sum() + self.second.square().sum())


def sharing_job(rank: int, world_size: int, how: str) -> tuple[Caught | None, bool]:
    """The error, and whether the two still share after a step."""
    del world_size
    torch.manual_seed(rank)
    model = Sharing(how)
    net, optimizer = compiled(model), torch.optim.SGD([model.first], lr=0.1)

    def step() -> None:
        net(torch.ones(3)).backward()
        optimizer.step()

    error = caught(step)
    return error, torch.equal(model.first, model.second)


@pytest.mark.parametrize("how", ["whole", "part"])
def test_parameters_that_share_memory_are_refused_by_name(ranks: Pools, how: str) -> None:
    for error, _ in ranks(2).run(sharing_job, how):
        assert error is not None
        assert error.cause == "UnsupportedModelError"
        assert "'first'" in error.text
        assert "'second'" in error.text


@pytest.mark.parametrize("how", ["frozen", "buffer"])
def test_what_shares_a_parameters_memory_follows_it_or_is_refused(ranks: Pools, how: str) -> None:
    for error, shares in ranks(2).run(sharing_job, how):
        if error is None:
            assert shares, f"the {how} tensor is not what training made of it"
        else:
            assert error.cause == "UnsupportedModelError"
            assert "'first'" in error.text
            assert "'second'" in error.text


def tied_job(rank: int, world_size: int) -> tuple[list[str], int, int, bool]:
    """Names that are managed, elements in buckets, elements of the model, still tied."""
    del rank, world_size
    model = TiedGPT()
    net = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters())
    net(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    optimizer.step()
    (managed,) = REGISTRY.models_of(model.parameters())
    names = [p.name for p in managed.parameters]
    layout = managed.arenas[0].plan.layout
    placed = sum(segment.numel for bucket in layout.buckets for segment in bucket.segments)
    numel = sum(p.numel() for p in model.parameters())
    return names, placed, numel, model.head.weight is model.token.weight


def test_tied_parameters_are_there_once(ranks: Pools) -> None:
    for names, placed, numel, tied in ranks(2).run(tied_job):
        assert "token.weight" in names
        assert "head.weight" not in names
        assert len(names) == len(set(names))
        assert placed == numel
        assert tied


# --- some of the ranks ---


def group_job(
    rank: int, world_size: int, how: str, members: list[int], steps: int = 3
) -> dict[str, Tensor] | None:
    """The MLP of the zoo trained by a part of the ranks; None on the others."""
    options: dict[str, Any] = dict(EAGER)
    if how == "group":
        group = dist.new_group(members)
        if rank not in members:
            return None
        options["process_group"] = group
    elif how == "mesh":
        mesh = init_device_mesh("cpu", (world_size,))
        options["mesh"], group = mesh, mesh.get_group()
    else:
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("outer", "inner"))
        options["mesh"], group = (mesh, how), mesh.get_group(how)
    case = ZOO["mlp"]
    model = case.model(seed=rank if dist.get_rank(group) else 0)
    net = compiled(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    mine, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(steps):
        batch = case.batch(step, ROWS * size)[mine * ROWS : (mine + 1) * ROWS]
        case.loss(net(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


def assert_equal_values(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


def test_a_part_of_the_ranks_trains(ranks: Pools) -> None:
    members = [1, 2]
    expected = train_alone(2, "mlp", steps=3).tensors[2]
    results = ranks(3).run(group_job, "group", members)
    assert [rank for rank, values in enumerate(results) if values is not None] == members
    for rank in members:
        assert_equal_values(results[rank], expected)


@pytest.mark.parametrize(("how", "world_size"), [("mesh", 2), ("inner", 4), ("outer", 4)])
def test_a_dimension_of_a_mesh_trains(ranks: Pools, how: str, world_size: int) -> None:
    expected = train_alone(2, "mlp", steps=3).tensors[2]
    for values in ranks(world_size).run(group_job, how, [*range(world_size)]):
        assert_equal_values(values, expected)


def two_models_job(rank: int, world_size: int) -> dict[str, Tensor] | None:
    """A model on ranks 0 and 1 of three, then another one on all."""
    group_job(rank, world_size, "group", [0, 1], steps=1)
    torch._dynamo.reset()
    return group_job(rank, world_size, "mesh", [0, 1, 2])


def test_after_a_part_of_the_ranks_all_can_train(ranks: Pools) -> None:
    """Ranks need not have made equally many models before."""
    expected = train_alone(3, "mlp", steps=3).tensors[2]
    for values in ranks(3).run(two_models_job, timeout_s=40):
        assert_equal_values(values, expected)


def other_groups_job(rank: int, world_size: int) -> dict[str, Tensor] | None:
    """A program with groups of its own, of which ranks are in unequally many."""
    dist.new_group([0, 1])
    return group_job(rank, world_size, "mesh", [0, 1, 2])


def test_the_programs_own_groups_do_not_matter(ranks: Pools) -> None:
    expected = train_alone(3, "mlp", steps=3).tensors[2]
    for values in ranks(3).run(other_groups_job, timeout_s=40):
        assert_equal_values(values, expected)


# --- dtypes, and shapes that change ---


class MixedDtypes(nn.Module):
    """Two separate paths, one in each precision."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.double_ = nn.ModuleList(nn.Linear(13, 13, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        single, double = x.float(), x
        for one, two in zip(self.single, self.double_, strict=True):
            single, double = torch.tanh(one(single)), torch.tanh(two(double))
        return single, double


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(13, 5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.phase).abs() * self.scale


def _mixed_loss(outputs: Any, batch: Tensor) -> Tensor:
    single, double = outputs
    return single.double().square().mean() + (double - batch.sin()).square().mean()


CASES: dict[str, Case] = {
    **ZOO,
    "gpt": replace(ZOO["gpt"], build=lambda: TiedGPT(layers=1)),  # its length varies, which is slow
    "mixed": Case(MixedDtypes, ZOO["mlp"].batch, _mixed_loss),
    "complex": Case(Complex, ZOO["mlp"].batch, ZOO["mlp"].loss),
}


def _same(step: int, rank: int, world_size: int) -> list[int]:
    return [ROWS]


def _growing(step: int, rank: int, world_size: int) -> list[int]:
    return [(4, 4, 6, 3, 7, 4)[step]]


def _twice(step: int, rank: int, world_size: int) -> list[int]:
    return [4, (4, 6, 3, 6, 4, 5)[step]]


def _uneven(step: int, rank: int, world_size: int) -> list[int]:
    """Other sizes on each rank, so that they recompile at other times."""
    return [3 + (rank * step) % 4]


def _uneven_count(step: int, rank: int, world_size: int) -> list[int]:
    """Ranks call the model a different number of times before they go backward."""
    return [4] * (1 + (rank + step) % 2)


SCHEDULES = {
    f.__name__.removeprefix("_"): f for f in (_same, _growing, _twice, _uneven, _uneven_count)
}


def inputs_of(
    case: str, schedule: str, step: int, rank: int, world_size: int, vary_length: bool
) -> list[Tensor]:
    """The batches of one step on one rank: one forward for each, then one backward."""
    sizes = SCHEDULES[schedule](step, rank, world_size)
    found = []
    for call, rows in enumerate(sizes):
        batch = CASES[case].batch(1000 * step + 10 * rank + call, rows)
        if vary_length:
            batch = batch[:, : 9 - step]
        found.append(batch)
    return found


def make_model(case: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = CASES[case].build()
    return model if case in ("mixed", "complex") else model.double()


@dataclass(frozen=True)
class Run:
    """A training run of this section."""

    case: str
    schedule: str = "same"
    steps: int = 6
    dynamic: bool | None = None
    vary_length: bool = False
    bucket_mb: float = 0.001
    stage: str = "zero2"
    lowering: str = "eager"


def scheduled_job(rank: int, world_size: int, run: Run) -> Any:
    """Trains on this rank's batches; the values after each step, or the error."""
    model = make_model(run.case, seed=rank)
    options = {"lowering": run.lowering, "bucket_mb": run.bucket_mb, "stage": run.stage}
    net = compiled(model, options, dynamic=run.dynamic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(run.steps):
        loss = torch.zeros((), dtype=torch.float64)
        for x in inputs_of(run.case, run.schedule, step, rank, world_size, run.vary_length):
            if run.vary_length:
                torch._dynamo.mark_dynamic(x, 1)
            loss = loss + CASES[run.case].loss(net(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(values_of(model))
    return history


def scheduled_alone(world_size: int, run: Run) -> list[dict[str, Tensor]]:
    """The same in one process: the mean of the ranks' losses."""
    model = make_model(run.case, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(run.steps):
        for rank in range(world_size):
            for x in inputs_of(run.case, run.schedule, step, rank, world_size, run.vary_length):
                (CASES[run.case].loss(model(x), x) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(values_of(model))
    return history


def assert_trains_alike(pool: Ranks, run: Run, **how: Any) -> None:
    expected = scheduled_alone(pool.world_size, run)
    for history in pool.run(scheduled_job, run, **how):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            for name, tensor in theirs.items():
                rtol = 1e-10 if tensor.dtype in (torch.float64, torch.complex128) else 1e-5
                torch.testing.assert_close(
                    ours[name],
                    tensor,
                    rtol=rtol,
                    atol=rtol,
                    msg=lambda m, s=step, n=name: f"step {s}, {n}: {m}",
                )


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_parameters_of_several_dtypes(ranks: Pools, stage: str) -> None:
    assert_trains_alike(ranks(3), Run("mixed", stage=stage))


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_complex_parameters_train_or_are_refused(ranks: Pools, stage: str) -> None:
    run = Run("complex", stage=stage)
    errors = ranks(2).run(refused_job, run)
    for error in errors:
        assert error is None or error.cause == "UnsupportedModelError", error
        assert error is None or "'phase'" in error.text
    if errors == [None, None]:
        assert_trains_alike(ranks(2), run)


def refused_job(rank: int, world_size: int, run: Run) -> Caught | None:
    return caught(lambda: scheduled_job(rank, world_size, run))


@pytest.mark.parametrize(
    ("case", "schedule", "dynamic"),
    [
        ("mlp", "growing", None),
        ("mlp", "growing", True),
        ("mlp", "growing", False),
        ("mlp", "twice", None),
        ("mlp", "uneven", None),
        ("mlp", "uneven_count", True),
        ("broken", "twice", True),
        ("broken", "uneven", None),
        ("broken", "uneven_count", None),
    ],
)
def test_batch_sizes_may_change(
    ranks: Pools, case: str, schedule: str, dynamic: bool | None
) -> None:
    assert_trains_alike(ranks(2), Run(case, schedule, dynamic=dynamic))


@pytest.mark.parametrize(
    ("stage", "schedule"), [("zero1", "twice"), ("ddp", "twice"), ("ddp", "uneven_count")]
)
def test_batch_sizes_may_change_in_every_stage(ranks: Pools, stage: str, schedule: str) -> None:
    assert_trains_alike(ranks(2), Run("mlp", schedule, stage=stage))


def test_sequence_lengths_may_change(ranks: Pools) -> None:
    run = Run("gpt", "growing", steps=3, vary_length=True)
    assert_trains_alike(ranks(2), run)


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_may_change_with_inductor(ranks: Pools, dynamic: bool | None) -> None:
    run = Run("mlp", "growing", steps=4, dynamic=dynamic, lowering="inductor")
    assert_trains_alike(ranks(2), run)
