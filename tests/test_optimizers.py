"""Sharded optimizers equal plain ones: parameters, state, groups, schedules, state dicts.

Each script below is an ordinary training loop. It runs twice, on ranks with ``backend="fxcomm"``
and in one process in plain torch on the concatenated batch, and leaves the same results.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fxcomm
from tests.ranks import Ranks
from tests.zoo import ROWS, ZOO, TiedGPT

Pools = Callable[[int], Ranks]
Make = Callable[[Any], torch.optim.Optimizer]
Parameters = Iterator[nn.Parameter]

# --- scripts that run on ranks and alone --------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where a script runs: on one of several ranks with fxcomm, or alone (``rank`` None) in plain
    torch on the data of all of them."""

    world_size: int
    rank: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self, case: str = "mlp") -> tuple[nn.Module, nn.Module]:
        """A model of the zoo, and the same compiled. Every rank starts from other values."""
        model = ZOO[case].model(seed=self.rank or 0)
        return model, self.compile(model)

    def compile(self, module: nn.Module) -> nn.Module:
        """The module as the user would compile it; alone, the module."""
        if self.rank is None:
            return module
        options = {"lowering": "eager", **self.options}
        return torch.compile(module, backend="fxcomm", options=options)

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows; alone, all rows."""
        return batch if self.rank is None else batch.chunk(self.world_size)[self.rank]

    def batch(self, number: int, case: str = "mlp") -> Tensor:
        """This rank's rows of a numbered batch of a case."""
        return self.share(ZOO[case].batch(number, ROWS * self.world_size))

    def mean(self, value: float | Tensor) -> float:
        """The mean over the ranks."""
        total = torch.tensor(float(value), dtype=torch.float64)
        if self.rank is not None:
            dist.all_reduce(total)
            total /= self.world_size
        return total.item()


Script = Callable[..., Any]


def run_script(
    rank: int, world_size: int, script: Script, options: Mapping[str, Any], args: tuple[Any, ...]
) -> Any:
    """A job: runs a script on a rank."""
    return script(Site(world_size, rank, options), *args)


def assert_like_one_process(
    pool: Ranks, script: Script, *args: Any, rtol: float = 1e-10, **options: Any
) -> None:
    """Runs the script on ranks and alone; the results agree to ``rtol`` of each tensor's scale."""
    expected = script(Site(pool.world_size), *args)
    for rank, actual in enumerate(pool.run(run_script, script, options, args)):
        assert_alike(actual, expected, rtol, f"rank {rank}")


def assert_alike(actual: Any, expected: Any, rtol: float, name: str = "result") -> None:
    """Nested containers hold the same, numbers and tensors to ``rtol``."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{name}: {actual!r}"
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
        scale = expected.abs().max().item() if expected.numel() else 0.0
        torch.testing.assert_close(
            actual.detach(),
            expected.detach(),
            rtol=rtol,
            atol=rtol * max(scale, 1e-3),
            equal_nan=True,
            msg=lambda message: f"{name}: {message}",
        )
    elif isinstance(expected, float):
        same = actual == pytest.approx(expected, rel=rtol, abs=rtol * 1e-3, nan_ok=True)
        assert same, f"{name}: {actual!r} instead of {expected!r}"
    elif isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"{name}: {list(actual)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_alike(actual[key], value, rtol, f"{name}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), name
        for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_alike(mine, theirs, rtol, f"{name}[{i}]")
    else:
        assert actual == expected, f"{name}: {actual!r} instead of {expected!r}"


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a model and its optimizers, by value."""
    return copy.deepcopy(
        {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    )


def backward(site: Site, model: nn.Module, number: int, case: str = "mlp") -> float:
    """Forward and backward on a numbered batch; the mean loss."""
    batch = site.batch(number, case)
    loss = ZOO[case].loss(model(batch), batch)
    loss.backward()
    return site.mean(loss.item())


# --- which optimizers ---------------------------------------------------------------------------


def train(site: Site, make: Make, case: str = "mlp", steps: int = 4) -> dict[str, Any]:
    """The plain loop."""
    model, compiled = site.model(case)
    optimizer = make(compiled.parameters())
    losses = []
    for step in range(steps):
        losses.append(backward(site, compiled, step, case))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, **snapshot(model, optimizer)}


STOCK: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=2),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizer(ranks: Pools, name: str) -> None:
    # Tiny buckets: parameters are cut, between buckets and between ranks.
    assert_like_one_process(ranks(2), train, STOCK[name], bucket_mb=0.0005)


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "NAdam", "SGD momentum"])
def test_ranks_without_elements_of_a_parameter(ranks: Pools, name: str) -> None:
    # One bucket: the scalar and the biases lie on one of the three ranks.
    assert_like_one_process(ranks(3), train, STOCK[name])


class Lion(torch.optim.Optimizer):
    """Unknown to torch. Keeps a constant of its own outside the groups."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        self.betas = (0.9, 0.99)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                fast, slow = self.betas
                update = state["momentum"].lerp(p.grad, 1 - fast)
                p.sub_(update.sign(), alpha=group["lr"])
                state["momentum"].lerp_(p.grad, 1 - slow)
        return loss


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, on which the update depends."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps_taken = 0

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        self.steps_taken += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - 0.01 * self.steps_taken)
        return super().step(closure)


class CountingInPlace(torch.optim.SGD):
    """As before, but the count is an object that is changed, not replaced."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.steps_taken = torch.zeros(())

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        self.steps_taken += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1 - 0.01 * self.steps_taken)
        return super().step(closure)


class Shrinking(torch.optim.AdamW):
    """Steps as its parent does, and then something more."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.999)
        return loss


class Decaying(torch.optim.SGD):
    """Changes a setting of its groups in each step."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
        return loss


@pytest.mark.parametrize(
    ("make", "stage"),
    [(make, "zero2") for make in (Lion, Counting, CountingInPlace, Shrinking, Decaying)]
    + [(Counting, "ddp"), (Shrinking, "ddp")],
)
def test_unknown_element_wise_optimizer(ranks: Pools, make: Make, stage: str) -> None:
    assert_like_one_process(ranks(2), train, make, stage=stage, bucket_mb=0.0005)


def count_bytes(site: Site, make: Make) -> list[float]:
    """The bytes on the wire in each step."""
    _, compiled = site.model()
    optimizer = make(compiled.parameters())
    sent = []
    for step in range(3):
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(fxcomm.stats(compiled).wire_bytes)
    return sent


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_step_within_a_step_is_one_step(ranks: Pools, stage: str) -> None:
    def sent(make: Make) -> list[float]:
        return ranks(2).run(run_script, count_bytes, {"stage": stage}, (make,))[0]

    assert sent(Shrinking) == sent(STOCK["AdamW"])


class EachTensor(torch.optim.Optimizer):
    """What the optimizers below have in common: they update one tensor at a time."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p.grad), alpha=group["lr"])


class LayerWise(EachTensor):
    def update(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


class Noisy(EachTensor):
    def update(self, gradient: Tensor) -> Tensor:
        return gradient + 0.01 * torch.randn_like(gradient)


class GlobalNorm(torch.optim.SGD):
    """Clips by the norm over all parameters inside its step, as some large-batch optimizers do."""

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            for gradient in gradients:
                gradient.div_(norm + 1e-6)
        super().step()


NOT_ELEMENT_WISE: dict[str, Make] = {
    "LayerWise": LayerWise,
    "Noisy": Noisy,
    "GlobalNorm": partial(GlobalNorm, lr=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
}


def train_matrices(site: Site, make: Make) -> dict[str, Any]:
    """Trains the matrices only, with a closure if the optimizer wants one."""
    model, compiled = site.model()
    optimizer = make([p for p in model.parameters() if p.ndim == 2])
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            return torch.tensor(backward(site, compiled, step))

        torch.manual_seed(step)
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return snapshot(model)


def meet_refusals(rank: int, world_size: int) -> dict[str, str]:
    """A job: with what message fxcomm refuses each of the optimizers, also if its first learning
    rate is zero."""
    model, compiled = Site(world_size, rank).model()
    messages = {}
    for name, make in NOT_ELEMENT_WISE.items():
        for rate in (0.1, 0.0):
            optimizer = make([p for p in model.parameters() if p.ndim == 2])
            optimizer.param_groups[0]["lr"] = rate
            backward(Site(world_size, rank), compiled, 0)
            try:
                optimizer.step()
                messages[f"{name} at rate {rate}"] = "not refused"
            except fxcomm.UnsupportedOptimizerError as refusal:
                messages[f"{name} at rate {rate}"] = str(refusal)
    return messages


def test_other_optimizers_are_refused_by_name(ranks: Pools) -> None:
    for messages in ranks(2).run(meet_refusals):
        unclear = {
            key: message
            for key, message in messages.items()
            if key.split()[0] not in message or '"ddp"' not in message
        }
        assert not unclear


@pytest.mark.parametrize("name", NOT_ELEMENT_WISE)
def test_other_optimizers_train_unsharded(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks(2), train_matrices, NOT_ELEMENT_WISE[name], stage="ddp")


# --- groups and schedules -----------------------------------------------------------------------


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


SCHEDULES: dict[str, tuple[Make, Callable[[Any], lr_scheduler.LRScheduler]]] = {
    "warm-up from zero": (
        partial(torch.optim.AdamW, lr=0.01),
        partial(lr_scheduler.LambdaLR, lr_lambda=[lambda step: step / 4] * 2),
    ),
    "one cycle of momentum": (
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
    ),
    "one cycle of betas": (
        partial(torch.optim.AdamW, lr=0.01),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
    ),
    "cosine of a tensor": (
        partial(torch.optim.AdamW, lr=torch.tensor(0.01)),
        partial(lr_scheduler.CosineAnnealingLR, T_max=7),
    ),
}


def train_scheduled(site: Site, name: str) -> dict[str, Any]:
    make, schedule = SCHEDULES[name]
    model, compiled = site.model()
    optimizer = make(_two_groups(model))
    scheduler = schedule(optimizer)
    rates = []
    for step in range(5):
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(copy.deepcopy(scheduler.get_last_lr()))
    return {"rates": rates, **snapshot(model, optimizer)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_groups_under_a_schedule(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks(2), train_scheduled, name)


def train_lonely_group(site: Site, name: str) -> dict[str, Any]:
    """A group of which most ranks own no element."""
    model, compiled = site.model()
    others = [p for p in model.parameters() if p is not model.scale]
    optimizer = STOCK[name]([{"params": [model.scale], "weight_decay": 0.1}, {"params": others}])
    for step in range(4):
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "AdamW foreach", "SGD momentum", "NAdam"])
def test_group_without_elements_on_some_ranks(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks(3), train_lonely_group, name)


def train_with_two(site: Site, alternate: bool) -> dict[str, Any]:
    """Two optimizers of disjoint parts of one model; ``alternate``: they step in turns, and the
    gradient of the one that does not step goes on."""
    model, compiled = site.model()
    optimizers = (
        torch.optim.AdamW(model.up.parameters(), lr=0.01),
        torch.optim.SGD([*model.down.parameters(), model.scale], lr=0.1, momentum=0.9),
    )
    for step in range(5):
        backward(site, compiled, step)
        for optimizer in [optimizers[step % 2]] if alternate else optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model, *optimizers)


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
@pytest.mark.parametrize("alternate", [False, True])
def test_two_optimizers_of_one_model(ranks: Pools, alternate: bool, stage: str) -> None:
    assert_like_one_process(ranks(2), train_with_two, alternate, stage=stage)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train_adversaries(site: Site) -> dict[str, Any]:
    """A generator and a critic that step in turns; the generator's loss runs through the critic,
    whose gradient of it is dropped."""
    generator, generate = site.model()
    torch.manual_seed(site.rank or 0)
    critic = Critic().double()
    judge = site.compile(critic)
    of_generator = torch.optim.AdamW(generate.parameters(), lr=0.01)
    of_critic = torch.optim.AdamW(judge.parameters(), lr=0.01)
    for step in range(4):
        batch = site.batch(step)
        fake, real = generate(batch), batch[:, :5].sin()
        of_critic.zero_grad()
        (F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_generator.step()
    return {"generator": snapshot(generator, of_generator), "critic": snapshot(critic, of_critic)}


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_adversaries(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), train_adversaries, stage=stage)


def train_two_models(site: Site) -> dict[str, Any]:
    """One optimizer over two models that are compiled apart."""
    generator, generate = site.model()
    torch.manual_seed(site.rank or 0)
    critic = Critic().double()
    judge = site.compile(critic)
    optimizer = torch.optim.AdamW([*generate.parameters(), *judge.parameters()], lr=0.01)
    norms = []
    for step in range(4):
        judge(generate(site.batch(step))).square().mean().backward()
        parameters = optimizer.param_groups[0]["params"]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "critic": critic.state_dict(), **snapshot(generator, optimizer)}


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_one_optimizer_of_two_models(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), train_two_models, stage=stage)


def train_with_outsider(site: Site, clip_from: int) -> dict[str, Any]:
    """The optimizer also holds a parameter of no compiled module, and a tensor without gradient."""
    model, compiled = site.model()
    temperature = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    constant = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer = torch.optim.AdamW([*model.parameters(), temperature, constant], lr=0.01)
    norms = []
    for step in range(4):
        batch = site.batch(step)
        ZOO["mlp"].loss(compiled(batch) * temperature, batch).backward()
        if step >= clip_from:
            parameters = [*model.parameters(), temperature]
            norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "temperature": temperature.detach(), **snapshot(model, optimizer)}


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_parameter_outside_the_model(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), train_with_outsider, 1, stage=stage)


def clip_outsider_too_early(site: Site) -> str:
    with pytest.raises(fxcomm.UnsupportedModelError) as refusal:
        train_with_outsider(site, clip_from=0)
    return str(refusal.value)


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_clipping_before_a_parameter_is_known_is_refused(ranks: Pools, stage: str) -> None:
    for message in ranks(2).run(run_script, clip_outsider_too_early, {"stage": stage}, ()):
        assert "AdamW.param_groups[0][6]" in message


# --- sets of parameters that change --------------------------------------------------------------


def add_group_late(site: Site) -> dict[str, Any]:
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(model.down.parameters(), lr=0.01)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": [*model.up.parameters()], "lr": 0.02})
        backward(site, compiled, step)
        optimizer.step()
        compiled.zero_grad()
    return snapshot(model, optimizer)


def unfreeze(site: Site, add: bool, clip: bool) -> dict[str, Any]:
    """A layer is trained from step 3 on; ``add``: only then does the optimizer get it."""
    model, compiled = site.model()
    model.up.requires_grad_(False)
    others = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(others if add else model.parameters(), lr=0.01)
    norms = []
    for step in range(6):
        if step == 3:
            model.up.requires_grad_(True)
            if add:
                optimizer.add_param_group({"params": [*model.up.parameters()]})
        backward(site, compiled, step)
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **snapshot(model, optimizer)}


def freeze(site: Site) -> dict[str, Any]:
    """A layer is trained until step 2 and again from step 4 on."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        model.up.requires_grad_(step not in (2, 3))
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_group_added_after_some_steps(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), add_group_late, stage=stage)


@pytest.mark.parametrize(("clip", "stage"), [(False, "zero2"), (True, "zero2"), (True, "ddp")])
@pytest.mark.parametrize("add", [False, True], ids=["held", "added"])
def test_layer_unfrozen_after_some_steps(ranks: Pools, add: bool, clip: bool, stage: str) -> None:
    assert_like_one_process(ranks(2), unfreeze, add, clip, stage=stage)


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_layer_frozen_for_some_steps(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), freeze, stage=stage)


# --- state --------------------------------------------------------------------------------------

STATEFUL = ("AdamW amsgrad", "SGD nesterov", "NAdam", "Adagrad")


def _steps(
    site: Site, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, plain: bool
) -> None:
    """Trains some steps; ``plain``: the model is not compiled and gets the whole batch."""
    for number in numbers:
        backward(Site(site.world_size) if plain else site, model, number)
        optimizer.step()
        optimizer.zero_grad()


def resume(site: Site, name: str, midway: bool) -> dict[str, Any]:
    """State of a plain optimizer that has trained is loaded, before the first step or later."""
    earlier = ZOO["mlp"].model(seed=0)
    trained = STOCK[name](earlier.parameters())
    _steps(site, earlier, trained, range(2), plain=True)
    model, compiled = site.model()
    optimizer = STOCK[name](compiled.parameters())
    if midway:
        _steps(site, compiled, optimizer, range(5, 7), plain=False)
    model.load_state_dict(earlier.state_dict())
    optimizer.load_state_dict(trained.state_dict())
    _steps(site, compiled, optimizer, range(2, 4), plain=False)
    return snapshot(model, optimizer)


@pytest.mark.parametrize("midway", [False, True], ids=["before the first step", "later"])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_loaded(ranks: Pools, name: str, midway: bool) -> None:
    assert_like_one_process(ranks(2), resume, name, midway, bucket_mb=0.0005)


def move_to_plain(site: Site, name: str) -> dict[str, Any]:
    """What fxcomm trained goes on in plain torch, from state dicts."""
    model, compiled = site.model()
    optimizer = STOCK[name](compiled.parameters())
    _steps(site, compiled, optimizer, range(2), plain=False)
    later = ZOO["mlp"].model(seed=5)
    other = STOCK[name](later.parameters())
    later.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    _steps(site, later, other, range(2, 4), plain=True)
    return snapshot(later, other)


@pytest.mark.parametrize("name", STATEFUL)
def test_state_goes_on_in_plain_torch(ranks: Pools, name: str) -> None:
    assert_like_one_process(ranks(2), move_to_plain, name, bucket_mb=0.0005)


def reset_state(site: Site) -> dict[str, Any]:
    """Loading a state dict from before training starts the state anew."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    fresh = copy.deepcopy(optimizer.state_dict())
    _steps(site, compiled, optimizer, range(2), plain=False)
    optimizer.load_state_dict(fresh)
    _steps(site, compiled, optimizer, range(2, 4), plain=False)
    return snapshot(model, optimizer)


def test_state_is_reset(ranks: Pools) -> None:
    assert_like_one_process(ranks(2), reset_state)


def count_state_bytes(rank: int, world_size: int, bucket_mb: float | None) -> tuple[int, int]:
    """A job: bytes of state on this rank, as fxcomm says, and in the user's own optimizer."""
    torch.manual_seed(0)
    model = TiedGPT(vocabulary=301, width=48, layers=3)
    site = Site(world_size, rank, {"bucket_mb": bucket_mb})
    compiled = site.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    backward(site, compiled, 0, "gpt")
    optimizer.step()
    held = sum(
        value.untyped_storage().nbytes()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    )
    return fxcomm.optimizer_state_bytes(optimizer), held


@pytest.mark.parametrize("bucket_mb", [None, 0.05])
@pytest.mark.parametrize("world_size", [2, 3])
def test_state_is_cut_evenly(ranks: Pools, world_size: int, bucket_mb: float | None) -> None:
    model = TiedGPT(vocabulary=301, width=48, layers=3)
    numels = [p.numel() for p in model.parameters()]
    counts = ranks(world_size).run(count_state_bytes, bucket_mb)
    moments = 2 * 4 * sum(numels)
    # Besides the two moments AdamW keeps a step number of 4 bytes for each run of elements, of
    # which there are at most as many as parameters and buckets. A run may span the unused elements
    # between parameters, which start at multiples of 64 elements.
    buckets = 1 if bucket_mb is None else sum(numels) * 4 // int(bucket_mb * 2**20) + 2
    steps = 4 * (len(numels) + buckets)
    gaps = 2 * 4 * 64 * len(numels)
    total = sum(count for count, _ in counts)
    assert moments < total <= moments + gaps + world_size * steps
    for count, held in counts:
        assert abs(count - moments / world_size) <= gaps + steps
        assert count < 1.05 * moments / world_size
        assert held == 0


def copy_optimizer(site: Site) -> tuple[dict[str, Any], list[Any]]:
    """The state of a trained optimizer, and for each way of copying the object, the state of the
    copy or why there is none."""
    _, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    _steps(site, compiled, optimizer, range(2), plain=False)
    copies: list[Any] = []
    for way in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        try:
            copies.append(way(optimizer).state_dict())
        except fxcomm.FxcommError as error:
            copies.append(str(error))
    return optimizer.state_dict(), copies


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_copied_optimizer_keeps_its_state_or_is_refused(ranks: Pools, stage: str) -> None:
    for state, copies in ranks(2).run(run_script, copy_optimizer, {"stage": stage}, ()):
        for copied in copies:
            if isinstance(copied, str):
                assert "state_dict" in copied
            else:
                assert_alike(copied, state, 0.0)


# --- what else users do with an optimizer --------------------------------------------------------


def step_with_closure(site: Site, name: str) -> dict[str, Any]:
    model, compiled = site.model()
    optimizer = STOCK[name](compiled.parameters())
    losses = []
    for step in range(4):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            return backward(site, compiled, step)

        losses.append(optimizer.step(closure))
    return {"losses": losses, **snapshot(model, optimizer)}


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_closure(ranks: Pools, name: str, stage: str) -> None:
    assert_like_one_process(ranks(2), step_with_closure, name, stage=stage)


def watch_steps(site: Site) -> dict[str, Any]:
    """Hooks on the optimizer run once in each step, before and after the update."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    seen: list[tuple[str, Any]] = []

    def note(when: str, stepping: torch.optim.Optimizer) -> None:
        assert stepping is optimizer
        seen.append((when, copy.deepcopy(model.state_dict())))

    optimizer.register_step_pre_hook(lambda o, *_: note("before", o))
    optimizer.register_step_post_hook(lambda o, *_: note("after", o))
    for step in range(3):
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen}


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_step_hooks(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), watch_steps, stage=stage)


def change_parameters(site: Site, how: str) -> dict[str, Any]:
    """Somebody else writes the parameters between steps, and between backward and step."""
    model, compiled = site.model()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        if step == 1:
            _change(model, how)
        backward(site, compiled, step)
        if step == 3:
            _change(model, how)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@torch.no_grad()
def _change(model: nn.Module, how: str) -> None:
    if how == "load_state_dict":
        model.load_state_dict(ZOO["mlp"].model(seed=7).state_dict())
    elif how == "other strides":
        model.up.weight.data = model.up.weight.data.t().contiguous().t() * 0.9
    elif how == "new data":
        for p in model.parameters():
            p.data = p.data * 0.9
    else:
        for p in model.parameters():
            p.mul_(0.9)


@pytest.mark.parametrize(
    ("how", "stage"),
    [(how, "zero2") for how in ("load_state_dict", "new data", "other strides", "in place")]
    + [("new data", "ddp")],
)
def test_parameters_written_by_others(ranks: Pools, how: str, stage: str) -> None:
    assert_like_one_process(ranks(2), change_parameters, how, stage=stage)


# --- precision ----------------------------------------------------------------------------------

STEPS = 150


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@dataclass(frozen=True)
class Precision:
    """What is kept in which dtype. ``rounded`` is that of the parameters as a forward sees them."""

    parameters: torch.dtype
    rounded: torch.dtype
    options: Mapping[str, Any] = field(default_factory=dict)


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16),
    "float16": Precision(torch.float16, torch.float16),
    "gathered as bfloat16": Precision(
        torch.float32, torch.bfloat16, {"gather_dtype": torch.bfloat16}
    ),
}


def _net(dtype: torch.dtype, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def _net_loss(net: nn.Module, batch: Tensor, dtype: torch.dtype) -> Tensor:
    output = net(batch.to(dtype))
    return F.mse_loss(output.float(), batch[:, :5].sin().float())


def _tiny(parameters: Any) -> torch.optim.Optimizer:
    """Most of its updates are smaller than half a rounding of a 16-bit parameter."""
    return torch.optim.SGD(parameters, lr=0.0001, momentum=0.9)


def train_rounded(rank: int, world_size: int, precision: Precision) -> dict[str, Tensor]:
    """A job: the plain loop on 16-bit parameters."""
    site = Site(world_size, rank, precision.options)
    net = _net(precision.parameters, seed=rank)
    compiled = site.compile(net)
    optimizer = _tiny(compiled.parameters())
    for step in range(STEPS):
        _net_loss(compiled, site.batch(step), precision.parameters).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in state.values())
    return {n: t.detach().clone() for n, t in net.state_dict().items()}


def train_masters(
    world_size: int, precision: Precision
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The oracle: a plain optimizer of float32 masters, to which the parameters are rounded after
    each step. The first and the final masters."""
    net = _net(precision.parameters, seed=0)
    named = dict(net.named_parameters())
    masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in named.items()}
    first = {n: m.detach().clone() for n, m in masters.items()}
    optimizer = _tiny(masters.values())
    for step in range(STEPS):
        batch = ZOO["mlp"].batch(step, ROWS * world_size)
        for rows in batch.chunk(world_size):
            (_net_loss(net, rows, precision.parameters) / world_size).backward()
        for name, p in named.items():
            masters[name].grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name].to(precision.rounded))
    return first, {n: m.detach() for n, m in masters.items()}


@pytest.mark.parametrize("name", PRECISIONS)
def test_small_updates_are_kept_in_masters(ranks: Pools, name: str) -> None:
    precision = PRECISIONS[name]
    first, expected = train_masters(2, precision)
    mine, theirs = ranks(2).run(train_rounded, precision)
    step = torch.finfo(precision.rounded).eps
    moved = total = 0
    for key, master in expected.items():
        assert torch.equal(mine[key], theirs[key]), f"{key} differs between the ranks"
        actual = mine[key].float()
        assert torch.equal(actual, actual.to(precision.rounded).float())
        # Gradients go through some ten roundings to 16 bits, in another order than the oracle's:
        # an error of so much of the way; and parameters are rounded once.
        way = (master - first[key]).abs()
        bound = 10 * step * way.max() + step * master.abs() + 1e-6
        assert ((actual - master).abs() <= bound).all(), key
        moved += int((way > bound).sum())
        total += master.numel()
    # The test would see updates that are rounded away: parameters that stay where they began.
    assert moved > total / 4


def reload_rounded(rank: int, world_size: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The parameters after a checkpoint was loaded and one step of almost nothing made."""
    site = Site(world_size, rank)
    net = _net(dtype, seed=rank)
    compiled = site.compile(net)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:
            net.load_state_dict(_net(dtype, seed=9).state_dict())
            optimizer.param_groups[0]["lr"] = 1e-9
        _net_loss(compiled, site.batch(step), dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [dict(net.state_dict()), dict(_net(dtype, seed=9).state_dict())]


def test_masters_follow_a_loaded_checkpoint(ranks: Pools) -> None:
    for actual, loaded in ranks(2).run(reload_rounded, torch.bfloat16):
        for name, tensor in loaded.items():
            assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("stage", ["zero2", "ddp"])
def test_reduction_in_bfloat16(ranks: Pools, stage: str) -> None:
    start = ZOO["mlp"].model(seed=0).state_dict()
    expected = train(Site(2), STOCK["SGD"])["model"]
    options = {"stage": stage, "reduce_dtype": "bfloat16"}
    mine, theirs = ranks(2).run(run_script, train, options, (STOCK["SGD"],))
    for name, tensor in expected.items():
        actual = mine["model"][name]
        assert torch.equal(actual, theirs["model"][name]), f"{name} differs between the ranks"
        # Each gradient is rounded on its rank and once as a mean, and gradients of later steps
        # follow the parameters: a few roundings of the way that the parameter went.
        way = (tensor - start[name]).abs().max().item() if tensor.numel() else 0.0
        bound = 8 * torch.finfo(torch.bfloat16).eps * way
        assert ((actual - tensor).abs() <= bound).all(), name
    assert not torch.equal(mine["model"]["up.weight"], expected["up.weight"])
