"""What users do with gradients between backward and step is exact, or refused with a hint."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxcomm
from tests.ranks import Ranks
from tests.test_optimizers import (
    STOCK,
    Site,
    assert_alike,
    assert_like_one_process,
    backward,
    run_script,
    snapshot,
)
from tests.zoo import ROWS, ZOO, Block

Pools = Callable[[int], Ranks]

SHARDED_OR_NOT = pytest.mark.parametrize("stage", ["zero2", "ddp"])

# --- clipping and scaling -----------------------------------------------------------------------

Edit = Callable[[nn.Module], Any]


def _clip(model: nn.Module, *arguments: Any, **settings: Any) -> float:
    # Torch has no infinity norm of the empty parameter.
    parameters = [p for p in model.parameters() if p.numel()]
    return float(nn.utils.clip_grad_norm_(parameters, *arguments, **settings))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _clip_parts(model: nn.Module) -> list[float]:
    """Parts with norms of several kinds, some twice, then everything."""
    parts = [
        float(nn.utils.clip_grad_norm_(model.up.parameters(), 0.01, norm_type=1)),
        float(nn.utils.clip_grad_norm_(model.down.weight, 0.02)),
    ]
    return [
        *parts,
        _clip(model, 0.03),
        _clip(model, 0.03),
        _clip(model, 0.001, norm_type=torch.inf),
    ]


def _clip_in_two_calls(model: nn.Module) -> float:
    total = nn.utils.get_total_norm(_gradients(model))
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total)
    return float(total)


def _clip_value(model: nn.Module, **settings: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.001, **settings)


def _scale_each(model: nn.Module) -> None:
    for i, gradient in enumerate(_gradients(model)):
        gradient.mul_(0.5 + i)
        gradient.data.div_(torch.tensor(3.0))
    model.up.weight.grad *= 0.25
    model.down.weight.grad /= 4
    model.down.bias.grad.neg_()


def _scale_together(model: nn.Module) -> None:
    torch._foreach_mul_(_gradients(model), 0.1)


def _clamp(model: nn.Module) -> None:
    for gradient in _gradients(model):
        gradient.clamp_(-1e-3, 2e-3)


def _drop(model: nn.Module) -> None:
    model.up.weight.grad = None


def _zero(model: nn.Module) -> None:
    model.up.weight.grad.zero_()


def _log_norms(model: nn.Module) -> list[float]:
    """As training scripts log them."""
    parameters = [p for p in model.parameters() if p.numel()]
    norms = [p.grad.norm() for p in parameters]
    norms += [p.grad.detach().data.norm(2) for p in parameters]
    norms += [torch.linalg.vector_norm(p.grad, ord=torch.inf) for p in parameters]
    return [float(norm) for norm in norms]


EDITS: dict[str, Edit] = {
    "norm 2": lambda m: _clip(m, 0.01),
    "norm 2, not needed": lambda m: _clip(m, 1e6),
    "norm 2, one by one": lambda m: _clip(m, 0.01, foreach=False),
    "norm 2, together": lambda m: _clip(m, 0.01, foreach=True),
    "norm 1": lambda m: _clip(m, 0.01, norm_type=1),
    "norm 3": lambda m: _clip(m, 0.01, norm_type=3),
    "norm inf": lambda m: _clip(m, 0.01, norm_type=torch.inf),
    "norms of parts": _clip_parts,
    "norm, then clipping": _clip_in_two_calls,
    "value": _clip_value,
    "value, one by one": lambda m: _clip_value(m, foreach=False),
    "scaled one by one": _scale_each,
    "scaled together": _scale_together,
    "clamped": _clamp,
    "dropped": _drop,
    "zeroed": _zero,
    "norms for a log": _log_norms,
}


def train_edited(site: Site) -> list[tuple[str, Any, Any]]:
    """Edits gradients in one way after the other, each for two steps, the first of them the very
    first. Momentum keeps what was done to them."""
    model, compiled = site.model()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    history = []
    for step, (name, edit) in enumerate((n, e) for n, e in EDITS.items() for _ in range(2)):
        backward(site, compiled, step)
        note = edit(model)
        optimizer.step()
        optimizer.zero_grad()
        history.append((name, note, snapshot(model)))
    return history


# Tiny buckets: parameters are cut, between buckets and between ranks. One bucket: the scalar and
# the biases lie on one of three ranks.
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {"bucket_mb": 0.0005}), (2, {"stage": "ddp"}), (3, {})],
    ids=["cut", "ddp", "3 ranks"],
)
def test_edited_gradients(ranks: Pools, world_size: int, options: dict[str, Any]) -> None:
    assert_like_one_process(ranks(world_size), train_edited, **options)


def _poisoned(site: Site, number: int, value: float) -> Tensor:
    """A batch in which the first rank's first row is not finite."""
    batch = ZOO["mlp"].batch(number, ROWS * site.world_size)
    batch[0] = value
    return site.share(batch)


def clip_nan(site: Site) -> dict[str, Any]:
    """One rank meets NaN; every rank skips that step."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    skipped = []
    for step in range(4):
        batch = _poisoned(site, step, torch.nan) if step in (0, 2) else site.batch(step)
        ZOO["mlp"].loss(compiled(batch), batch).backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
            optimizer.step()
        except RuntimeError as error:
            skipped.append((step, "non-finite" in str(error)))
        optimizer.zero_grad()
    return {"skipped": skipped, **snapshot(model, optimizer)}


@SHARDED_OR_NOT
def test_nan_on_one_rank_stops_all(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), clip_nan, stage=stage)


def train_scaled(site: Site, name: str, unscale: bool, overflows: list[int]) -> dict[str, Any]:
    """Loss scaling; in some steps one rank overflows."""
    model, compiled = site.model()
    optimizer = STOCK[name](compiled.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, norms = [], []
    for step in range(6):
        batch = _poisoned(site, step, torch.inf) if step in overflows else site.batch(step)
        scaler.scale(ZOO["mlp"].loss(compiled(batch), batch)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
            norms.append(float(norm) if step not in overflows else None)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return {"scales": scales, "norms": norms, **snapshot(model, optimizer)}


# Torch's fused SGD starts from uninitialised momentum if its first step overflows.
@pytest.mark.parametrize(("unscale", "stage"), [(False, "zero2"), (True, "zero2"), (True, "ddp")])
@pytest.mark.parametrize(
    ("name", "overflows"), [("AdamW", [0, 3]), ("AdamW fused", [0, 3]), ("SGD fused", [2, 3])]
)
def test_grad_scaler(
    ranks: Pools, name: str, overflows: list[int], unscale: bool, stage: str
) -> None:
    assert_like_one_process(ranks(2), train_scaled, name, unscale, overflows, stage=stage)


# --- zeroing, absence and assignment --------------------------------------------------------------

ZEROINGS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "to none": lambda m, o: o.zero_grad(),
    "in place": lambda m, o: o.zero_grad(set_to_none=False),
    "by the model": lambda m, o: m.zero_grad(),
    "by the model in place": lambda m, o: m.zero_grad(set_to_none=False),
    "never": lambda m, o: None,
}


def train_zeroed(site: Site) -> list[Any]:
    """Zeroes in one way after the other, before each backward or after each step, with a new
    optimizer for each way. The model has unused parameters, which are not decayed while they have
    no gradient."""
    model, compiled = site.model("partly_used")
    history: list[Any] = []
    for name, zero in ZEROINGS.items():
        for before in (True, False):
            model.zero_grad()
            optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01, weight_decay=0.1)
            for step in range(3):
                if before:
                    zero(compiled, optimizer)
                backward(site, compiled, step, "partly_used")
                history.append([n for n, p in model.named_parameters() if p.grad is None])
                optimizer.step()
                if not before:
                    zero(compiled, optimizer)
            history.append([n for n, p in model.named_parameters() if p.grad is None])
            history.append((name, before, snapshot(model, optimizer)))
    return history


@SHARDED_OR_NOT
def test_zeroing(ranks: Pools, stage: str) -> None:
    assert_like_one_process(ranks(2), train_zeroed, stage=stage)


class Branching(nn.Module):
    """A layer that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(13, 17), nn.Linear(17, 17), nn.Linear(17, 5)

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        if extra:
            x = x + torch.tanh(self.extra(x))
        return self.last(x)


def train_branches(site: Site, used_by: Sequence[frozenset[int]]) -> dict[str, Any]:
    """In step i, the ranks in ``used_by[i]`` use the layer."""
    torch.manual_seed(site.rank or 0)
    model = Branching().double()
    compiled = site.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, absent = [], []
    for step, users in enumerate(used_by):
        rows = ZOO["mlp"].batch(step, ROWS * site.world_size).chunk(site.world_size)
        mine = range(site.world_size) if site.rank is None else [site.rank]
        total = 0.0
        for rank in mine:
            loss = ZOO["mlp"].loss(compiled(rows[rank], rank in users), rows[rank]) / len(mine)
            loss.backward()
            total += loss.item()
        losses.append(site.mean(total))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        absent.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "absent": absent, **snapshot(model, optimizer)}


@SHARDED_OR_NOT
@pytest.mark.parametrize(
    "used_by",
    [[{0}, {0}, {0, 1}, {1}, set()], [{1}, {1}, {1}], [set(), set(), {1}, {0}], [{0, 1}, {0}, {1}]],
    ids=["first by 0", "only by 1", "late", "first by all"],
)
def test_layer_used_by_some_ranks(ranks: Pools, used_by: Sequence[set[int]], stage: str) -> None:
    users = [frozenset(u) for u in used_by]
    assert_like_one_process(ranks(2), train_branches, users, stage=stage)


def assign_gradients(site: Site, how: str) -> dict[str, Any]:
    """The user puts gradients of his own in place."""
    model, compiled = site.model()
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        backward(site, compiled, step)
        for p in model.parameters():
            if how == "scaled":
                p.grad = fxcomm.full_grad(p) * 2
            elif how == "own" and p.ndim == 2:
                p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@SHARDED_OR_NOT
@pytest.mark.parametrize("how", ["scaled", "own"])
def test_assigned_gradients(ranks: Pools, how: str, stage: str) -> None:
    assert_like_one_process(ranks(2), assign_gradients, how, stage=stage)


# --- what a sharded gradient shows, and what it refuses -------------------------------------------


def _save(p: nn.Parameter) -> None:
    torch.save(p.grad, io.BytesIO())


REFUSED: dict[str, Callable[[nn.Parameter], Any]] = {
    "plus": lambda p: p.grad + 1,
    "minus": lambda p: 1 - p.grad,
    "times a tensor": lambda p: p.grad * torch.ones_like(p),
    "multiplied by a tensor": lambda p: p.grad.mul_(torch.full_like(p, 2.0)),
    "abs": lambda p: p.grad.abs(),
    "sum": lambda p: p.grad.sum(),
    "mean": lambda p: p.grad.mean(),
    "norm of rows": lambda p: p.grad.norm(dim=0),
    "isnan": lambda p: torch.isnan(p.grad),
    "isfinite": lambda p: torch.isfinite(p.grad),
    "compared": lambda p: p.grad == 0,
    "truth": lambda p: bool(p.grad),
    "item": lambda p: p.grad.item(),
    "element": lambda p: p.grad[0],
    "element set": lambda p: p.grad.__setitem__(0, 1.0),
    "view": lambda p: p.grad.view(-1),
    "transposed": lambda p: p.grad.t(),
    "clone": lambda p: p.grad.clone(),
    "copied to": lambda p: p.grad.copy_(torch.zeros_like(p)),
    "copied from": lambda p: torch.zeros_like(p).copy_(p.grad),
    "added to": lambda p: p.grad.add_(torch.ones_like(p)),
    "added from": lambda p: p.detach().add_(p.grad, alpha=-0.1),
    "noise": lambda p: p.grad.normal_(),
    "other dtype": lambda p: p.grad.to(torch.float16),
    "numpy": lambda p: p.grad.numpy(),
    "list": lambda p: p.grad.tolist(),
    "deep copy": lambda p: copy.deepcopy(p.grad),
    "pickle": lambda p: pickle.dumps(p.grad),
    "save": _save,
    "stack": lambda p: torch.stack([p.grad, p.grad]),
    "foreach": lambda p: torch._foreach_add_([p.grad], 1.0),
    "all-reduce": lambda p: dist.all_reduce(p.grad),
    "vector": lambda p: nn.utils.parameters_to_vector([p.grad]),
}


def meet_refusals(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """For each use of a gradient that cannot work, the kind and text of the error."""
    site = Site(world_size, rank)
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    backward(site, compiled, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(site, compiled, 1)
    met = {}
    for name, use in REFUSED.items():
        # A vector of one element is the hardest: every rank may hold all of it, or nothing.
        for parameter in (model.up.weight, model.scale):
            try:
                result = use(parameter)
                error = ("no error", repr(result))
            except Exception as raised:
                error = (type(raised).__name__, str(raised))
            met[f"{name} of {'up.weight' if parameter is model.up.weight else 'scale'}"] = error
    return met


@pytest.fixture(scope="module")
def refusals(ranks: Pools) -> list[dict[str, tuple[str, str]]]:
    """What each rank met."""
    return ranks(2).run(meet_refusals)


# Torch itself objects, or the tensor is a number.
NOT_FOR_SCALARS = ("element", "element set", "norm of rows", "multiplied by a tensor")


@pytest.mark.parametrize("parameter", ["up.weight", "scale"])
@pytest.mark.parametrize("use", REFUSED)
def test_other_uses_are_refused(
    refusals: list[dict[str, tuple[str, str]]], use: str, parameter: str
) -> None:
    if parameter == "scale" and use in NOT_FOR_SCALARS:
        pytest.skip("not possible with a scalar")
    for met in refusals:
        kind, text = met[f"{use} of {parameter}"]
        assert kind == "ShardedGradientError", text
        assert repr(parameter) in text
        assert "fxcomm.full_grad" in text


def describe_gradients(rank: int, world_size: int, case: str) -> None:
    """A job: metadata is the parameter's."""
    site = Site(world_size, rank, {"bucket_mb": 0.0005})
    model, compiled = site.model(case)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    backward(site, compiled, 0, case)
    optimizer.step()
    optimizer.zero_grad()
    backward(site, compiled, 1, case)
    for name, p in model.named_parameters():
        g = p.grad
        assert g is not None
        assert (g.shape, g.dtype, g.device) == (p.shape, p.dtype, p.device)
        assert (g.stride(), g.layout, g.numel(), g.ndim) == (
            p.stride(),
            p.layout,
            p.numel(),
            p.ndim,
        )
        assert not g.requires_grad
        assert g.grad_fn is None
        assert not g.is_sparse
        assert g.is_contiguous() == p.is_contiguous()
        assert name in repr(g)
        assert str(tuple(p.shape)) in str(g)
        assert len(f"{g}") < 200


@pytest.mark.parametrize("case", ["mlp", "conv"])
def test_gradient_describes_itself(ranks: Pools, case: str) -> None:
    ranks(2).run(describe_gradients, case)


class Strided(nn.Module):
    """Parameters whose memory is not contiguous in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(31, 13).t())
        self.thrice = nn.Parameter(torch.randn(7, 31, 3).permute(2, 1, 0))
        self.every_other = nn.Parameter(torch.randn(7, 10)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.turned) @ self.thrice.sum(0) @ self.every_other


def full_gradients(site: Site, case: str) -> list[dict[str, Tensor | None]]:
    """Whole gradients before the first step, later, of a clipped gradient, of an accumulated one,
    and after zeroing."""
    if case == "strided":
        torch.manual_seed(site.rank or 0)
        model: nn.Module = Strided().double()
        compiled = site.compile(model)
        case = "mlp"
    else:
        model, compiled = site.model(case)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    seen: list[dict[str, Tensor | None]] = []

    def look() -> None:
        whole = {n: fxcomm.full_grad(p) for n, p in model.named_parameters()}
        seen.append({n: g if g is None else g.clone() for n, g in whole.items()})

    backward(site, compiled, 0, case)
    look()
    optimizer.step()
    look()
    backward(site, compiled, 1, case)
    look()
    nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
    look()
    optimizer.zero_grad()
    look()
    with fxcomm.no_sync(model):
        backward(site, compiled, 2, case)
    look()
    return seen


@pytest.mark.parametrize(
    ("case", "stage"),
    [(case, "zero2") for case in ("mlp", "gpt", "strided", "partly_used", "broken")]
    + [("strided", "ddp"), ("broken", "ddp")],
)
def test_full_gradients(ranks: Pools, case: str, stage: str) -> None:
    assert_like_one_process(ranks(2), full_gradients, case, stage=stage, bucket_mb=0.0005)


# --- hooks --------------------------------------------------------------------------------------


def register_hook(site: Site, late: bool) -> str:
    """What happens to a hook on a parameter's gradient."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    if late:
        backward(site, compiled, 0)
        optimizer.step()
        optimizer.zero_grad()
    model.down.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(fxcomm.UnsupportedModelError) as refusal:
        backward(site, compiled, 1)
    return str(refusal.value)


@SHARDED_OR_NOT
@pytest.mark.parametrize("late", [False, True])
def test_gradient_hooks_are_refused(ranks: Pools, late: bool, stage: str) -> None:
    for message in ranks(2).run(run_script, register_hook, {"stage": stage}, (late,)):
        assert "'down.weight'" in message
        assert "register_hook" in message


def step_in_hooks(site: Site, late: bool) -> dict[str, Any] | str:
    """An optimizer for each parameter that steps as soon as the gradient is there; or why not."""
    model, compiled = site.model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        optimizers[p].step()
        optimizers[p].zero_grad()

    def register() -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

    if not late:
        register()
    try:
        for step in range(3):
            if late and step == 1:
                register()
            backward(site, compiled, step)
    except fxcomm.UnsupportedModelError as error:
        return str(error)
    return snapshot(model)


@SHARDED_OR_NOT
@pytest.mark.parametrize("late", [False, True])
def test_post_accumulate_hooks_work_or_are_refused(ranks: Pools, late: bool, stage: str) -> None:
    expected = step_in_hooks(Site(2), late)
    for actual in ranks(2).run(run_script, step_in_hooks, {"stage": stage}, (late,)):
        if isinstance(actual, str):
            assert "register_post_accumulate_grad_hook" in actual
            assert "parameter 'scale'" in actual
        else:
            assert_alike(actual, expected, 1e-10)


# --- failing, repeated and partial backwards ------------------------------------------------------


class Fuse(torch.autograd.Function):
    """The identity, whose backward fails on demand."""

    blow = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if Fuse.blow:
            raise ZeroDivisionError("the fuse has blown")
        return gradient


class Fused(nn.Module):
    """Graph breaks with a fuse at one place: behind, between or in front of two compiled parts."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.last = nn.Linear(13, 19), nn.Linear(19, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self._fuse(x, "front"))
        x = self.last(self._fuse(torch.tanh(x), "between"))
        return self._fuse(x, "behind")

    @torch._dynamo.disable
    def _fuse(self, x: Tensor, place: str) -> Tensor:
        return Fuse.apply(x) if place == self.place else x


def survive_failure(site: Site, place: str, steps: frozenset[int]) -> dict[str, Any]:
    """The backward of some ``steps`` fails on every rank; the loop drops it and goes on."""
    torch.manual_seed(site.rank or 0)
    model = Fused(place).double()
    compiled = site.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    failed = []
    for step in range(5):
        Fuse.blow = step in steps
        batch = site.batch(step).requires_grad_()
        loss = ZOO["mlp"].loss(compiled(batch), batch.detach())
        try:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        except ZeroDivisionError:
            failed.append(step)
        optimizer.zero_grad()
    Fuse.blow = False
    return {"failed": failed, **snapshot(model, optimizer)}


@pytest.mark.parametrize("place", ["front", "between", "behind"])
@pytest.mark.parametrize(
    ("steps", "stage"), [({2}, "zero2"), ({0, 3, 4}, "zero2"), ({0, 3, 4}, "ddp")]
)
def test_failing_backward(ranks: Pools, steps: set[int], place: str, stage: str) -> None:
    assert_like_one_process(ranks(2), survive_failure, place, frozenset(steps), stage=stage)


def backward_twice(site: Site) -> dict[str, Any]:
    """Two backwards through one retained graph in each step."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    for step in range(4):
        batch = site.batch(step)
        loss = ZOO["mlp"].loss(compiled(batch), batch)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


def backward_after_step(site: Site) -> dict[str, Any]:
    """A retained graph whose parameters have changed must refuse; training then goes on."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    for step in range(4):
        batch = site.batch(step)
        loss = ZOO["mlp"].loss(compiled(batch), batch)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


@SHARDED_OR_NOT
@pytest.mark.parametrize("script", [backward_twice, backward_after_step])
def test_retained_graph(ranks: Pools, script: Callable[[Site], dict[str, Any]], stage: str) -> None:
    assert_like_one_process(ranks(2), script, stage=stage)


def gradient_of_input(site: Site) -> dict[str, Any]:
    """A saliency map in each step. It must leave no gradient in the parameters."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    sizes, absent = [], []
    for step in range(4):
        batch = site.batch(step).requires_grad_()
        # A sum over rows: the gradient of a row does not depend on the others.
        (gradient,) = torch.autograd.grad(compiled(batch).square().sum(), batch)
        sizes.append(site.mean(gradient.square().mean()))
        absent.append([n for n, p in model.named_parameters() if p.grad is None])
        backward(site, compiled, step)
        optimizer.step()
        optimizer.zero_grad()
    return {"absent": absent, "sizes": sizes, **snapshot(model, optimizer)}


def gradient_of_some(site: Site) -> dict[str, Any]:
    """``backward(inputs=...)`` accumulates into the named parameters only."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    absent = []
    for step in range(4):
        batch = site.batch(step)
        loss = ZOO["mlp"].loss(compiled(batch), batch)
        loss.backward(inputs=list(model.down.parameters()))
        absent.append([n for n, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return {"absent": absent, **snapshot(model, optimizer)}


@SHARDED_OR_NOT
@pytest.mark.parametrize("script", [gradient_of_input, gradient_of_some])
def test_partial_backward(
    ranks: Pools, script: Callable[[Site], dict[str, Any]], stage: str
) -> None:
    assert_like_one_process(ranks(2), script, stage=stage)


def gradient_of_parameters(site: Site, allow_unused: bool) -> list[Tensor | None] | str:
    """``torch.autograd.grad`` with respect to parameters after a step; or why not."""
    model, compiled = site.model()
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    backward(site, compiled, 0)
    optimizer.step()
    optimizer.zero_grad()
    batch = site.batch(1)
    loss = ZOO["mlp"].loss(compiled(batch), batch)
    try:
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
    except fxcomm.FxcommError as error:
        return str(error)
    assert all(p.grad is None for p in model.parameters())
    return list(gradients)


@SHARDED_OR_NOT
@pytest.mark.parametrize("allow_unused", [False, True])
def test_gradient_of_parameters_is_right_or_refused(
    ranks: Pools, allow_unused: bool, stage: str
) -> None:
    expected = gradient_of_parameters(Site(2), allow_unused)
    actual = ranks(2).run(run_script, gradient_of_parameters, {"stage": stage}, (allow_unused,))
    if all(isinstance(result, str) for result in actual):
        return
    # Torch's own meaning: the gradient of this rank's loss.
    assert isinstance(expected, list)
    for index, whole in enumerate(expected):
        assert_alike((actual[0][index] + actual[1][index]) / 2, whole, 1e-10)


def differentiate_twice(site: Site) -> str:
    """A gradient penalty needs a second derivative, which torch.compile does not have."""
    _, compiled = site.model()
    batch = site.batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(batch).sum(), batch, create_graph=True)
    with pytest.raises(RuntimeError) as refusal:
        gradient.square().sum().backward()
    return str(refusal.value)


def test_second_derivative_is_refused(ranks: Pools) -> None:
    for message in ranks(2).run(run_script, differentiate_twice, {}, ()):
        assert "double backward" in message


def test_transformer_block_layer_by_layer(ranks: Pools) -> None:
    """The blocks of a model compiled one by one have one gradient each."""
    assert_like_one_process(ranks(2), train_blocks)


def train_blocks(site: Site) -> dict[str, Any]:
    torch.manual_seed(site.rank or 0)
    blocks = nn.ModuleList(Block(16, 2) for _ in range(2)).double()
    compiled = [site.compile(block) for block in blocks]
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        x = site.share(ZOO["mlp"].batch(step, ROWS * site.world_size * 3)).sin()
        x = x[:, :12].reshape(-1, 3, 4).repeat(1, 1, 4)
        for block in compiled:
            x = block(x)
        x.square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(blocks.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **snapshot(blocks, optimizer)}
