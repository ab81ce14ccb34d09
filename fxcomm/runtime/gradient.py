"""``p.grad`` of a parameter whose mean gradient is spread over the ranks.

It has the parameter's shape and holds no elements. What plain training does between ``backward``
and ``step`` works on it and is exact: clipping by norm and by value, unscaling, scaling by a
scalar, zeroing. Everything else raises :class:`~fxcomm.errors.ShardedGradientError`; nothing ever
sees a partial value.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from fxcomm import compat
from fxcomm.errors import ShardedGradientError
from fxcomm.runtime.parameters import ManagedParameter

if TYPE_CHECKING:
    from fxcomm.runtime.model import ManagedModel

_aten = torch.ops.aten

Kept = TypeVar("Kept")

# Element-wise in-place operators: the same call on each rank's elements is the call on the whole.
_IN_PLACE: frozenset[Any] = frozenset(
    {
        _aten.mul_.Tensor,
        _aten.mul_.Scalar,
        _aten.div_.Tensor,
        _aten.div_.Scalar,
        _aten.clamp_.default,
        _aten.clamp_min_.default,
        _aten.clamp_max_.default,
        _aten.neg_.default,
        _aten.zero_.default,
        _aten.nan_to_num_.default,
    }
)
_IN_PLACE_FOREACH: frozenset[Any] = frozenset(
    {
        _aten._foreach_mul_.Scalar,
        _aten._foreach_mul_.Tensor,
        _aten._foreach_div_.Scalar,
        _aten._foreach_div_.Tensor,
        _aten._foreach_clamp_min_.Scalar,
        _aten._foreach_clamp_max_.Scalar,
        _aten._foreach_zero_.default,
    }
)
_SCALE: frozenset[Any] = frozenset({_aten.mul_.Tensor, _aten._foreach_mul_.Tensor})
_ADD: frozenset[Any] = frozenset({_aten.add_.Tensor, _aten.add.Tensor})


class ShardedGradient(torch.Tensor):
    """See the module's docstring. ``reduced`` says whether the shards hold a mean gradient, which
    is yet to be multiplied by ``factors`` (tensors without dimensions): the update does it on the
    way. ``applied`` says that the backward updated with it already: it may be read, and no longer
    be changed. ``unsynced`` is this rank's own gradient from backwards under ``no_sync``, of the
    parameter's shape, until the next synchronised backward.

    It does not keep its model alive: the collector does not see that a parameter holds its
    gradient, and would never free a model that was dropped with gradients."""

    parameter_name: str
    reduced: bool
    _managed: weakref.ref[ManagedParameter]
    _model: weakref.ref[ManagedModel]
    factors: tuple[torch.Tensor, ...]
    applied: bool
    unsynced: torch.Tensor | None

    @staticmethod
    def __new__(cls, model: ManagedModel, managed: ManagedParameter) -> ShardedGradient:
        """A gradient for ``managed``, whose shards ``model`` keeps."""
        self = compat.wrapper_like(cls, managed.parameter)
        self._managed, self._model = weakref.ref(managed), weakref.ref(model)
        self.parameter_name, self.reduced, self.unsynced = managed.name, False, None
        self.factors, self.applied = (), False
        return self

    def __init__(self, model: ManagedModel, managed: ManagedParameter) -> None:
        del model, managed

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self.parameter_name!r}, shape={tuple(self.shape)})"

    @property
    def managed(self) -> ManagedParameter:
        """The parameter. Raises ShardedGradientError when its model is gone."""
        return self._alive(self._managed())

    @property
    def model(self) -> ManagedModel:
        """The model that keeps the shards. Raises ShardedGradientError when it is gone."""
        return self._alive(self._model())

    def _alive(self, kept: Kept | None) -> Kept:
        if kept is None:
            raise ShardedGradientError(
                f"the gradient of {self.parameter_name!r} went with its model, of which neither "
                "the module nor an optimizer is left. Keep one of them while you use gradients."
            )
        return kept

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        """For what reads elements without asking an operator."""
        raise _refusal("reading elements", (self,), {})

    numpy = tolist = item = __array__ = __bool__ = __reduce_ex__ = __deepcopy__ = _refuse

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs what can be exact on shards; raises on the rest."""
        return _dispatch(func, args, dict(kwargs or {}))


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first: Any = args[0] if args else None
    if func is _aten.detach.default:
        return first
    if func in _ADD and _is_plain_sum(args, kwargs):
        gradient = cast(ShardedGradient, first)
        gradient.model.contribute_from_outside(gradient.managed, args[1])
        return gradient
    if func in _SCALE and _is_factor(args[1], kwargs):
        _scale(first if isinstance(first, list) else [first], args[1])
        return first if func is _aten.mul_.Tensor else None
    if func in _IN_PLACE and _others_are_scalars(args[1:], kwargs):
        _each_shard(func, [first], args[1:], kwargs)
        return first
    if func in _IN_PLACE_FOREACH and _others_are_scalars(args[1:], kwargs):
        _each_shard(func, first, args[1:], kwargs)
        return None
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args)
    if func is _aten.linalg_vector_norm.default and _is_whole_norm(args, kwargs):
        return _norm(first, args[1] if len(args) > 1 else 2)
    if func is _aten._foreach_norm.Scalar:
        order = args[1] if len(args) > 1 else 2
        return [_norm(gradient, order) for gradient in first]
    raise _refusal(func, args, kwargs)


def _is_plain_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Autograd adds what a part outside every compiled graph contributed to a gradient."""
    return (
        isinstance(args[0], ShardedGradient)
        and not isinstance(args[1], ShardedGradient)
        and isinstance(args[1], torch.Tensor)
        and args[1].shape == args[0].shape
        and not kwargs
        and args[0].model.in_backward
    )


def _others_are_scalars(others: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    values = [*others, *kwargs.values()]
    return all(
        not isinstance(v, (list, tuple, ShardedGradient))
        and not (isinstance(v, torch.Tensor) and v.numel() != 1)
        for v in values
    )


def _is_factor(other: Any, kwargs: dict[str, Any]) -> bool:
    """Whether gradients may be multiplied by ``other`` later."""
    return (
        isinstance(other, torch.Tensor)
        and not isinstance(other, ShardedGradient)
        and not other.dim()
        and other.is_floating_point()
        and not kwargs
    )


def _scale(gradients: Sequence[Any], factor: torch.Tensor) -> None:
    """Multiplies gradients; the sharded ones when they are used, all at once with what else is
    done to them (clipping by norm and unscaling pass over no element)."""
    _refuse_applied(gradients)
    for gradient in gradients:
        if isinstance(gradient, ShardedGradient):
            gradient.model.scale_gradient(gradient.managed, factor)
        else:
            gradient.mul_(factor)


def _refuse_applied(gradients: Sequence[Any]) -> None:
    """Raises for a change of gradients that comes too late."""
    for gradient in gradients:
        if isinstance(gradient, ShardedGradient) and gradient.applied:
            raise ShardedGradientError(
                f"the gradient of {gradient.parameter_name!r} was changed after the backward had "
                "updated with it. Clipping, unscaling and other changes between backward and "
                'step() need options={"update": "at_step"}.'
            )


def _each_shard(
    func: Callable[..., Any],
    gradients: Sequence[Any],
    others: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Calls the in-place ``func`` on this rank's elements of each gradient."""
    foreach = func in _IN_PLACE_FOREACH
    _refuse_applied(gradients)
    zeroing = func in (_aten.zero_.default, _aten._foreach_zero_.default)
    shards: list[torch.Tensor] = []
    for gradient in gradients:
        if not isinstance(gradient, ShardedGradient):
            # A mix of plain and sharded gradients, as clipping over several models passes.
            shards.append(gradient)
            continue
        if zeroing:
            gradient.unsynced = None
        shards += gradient.model.gradient_shards(gradient.managed)
    for model in _models(gradients):
        model.note_write()
    if foreach and shards:
        func(shards, *others, **kwargs)
    elif not foreach:
        for shard in shards:
            func(shard, *others, **kwargs)


def _models(gradients: Sequence[Any]) -> list[ManagedModel]:
    found: list[ManagedModel] = []
    for gradient in gradients:
        if isinstance(gradient, ShardedGradient) and gradient.model not in found:
            found.append(gradient.model)
    return found


def _unscale(
    func: Callable[..., Any],
    gradients: Sequence[Any],
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
) -> None:
    """``GradScaler``: unscales gradients, and finds out whether all are finite. What one rank finds
    not finite, all ranks know."""
    shards: dict[torch.dtype, list[torch.Tensor]] = {}
    plain = [g for g in gradients if not isinstance(g, ShardedGradient)]
    if plain:
        func(plain, found_inf, inverse_scale)
    for gradient in gradients:
        if isinstance(gradient, ShardedGradient):
            for part in gradient.model.gradient_shards(gradient.managed):
                if part.numel():
                    shards.setdefault(part.dtype, []).append(part)
    for group in shards.values():
        # The largest magnitude is finite if all are; reading is half of unscaling in place.
        for largest in torch._foreach_norm(group, math.inf):
            found_inf.masked_fill_(~largest.isfinite(), 1.0)
    _scale([g for g in gradients if isinstance(g, ShardedGradient)], inverse_scale.view(()))
    for model in _models(gradients):
        model.agree_on_maximum(found_inf)


def _is_whole_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    return isinstance(args[0], ShardedGradient) and dim is None and not kwargs.get("keepdim")


def _norm(gradient: Any, order: Any) -> torch.Tensor:
    if not isinstance(gradient, ShardedGradient):
        plain: torch.Tensor = torch.linalg.vector_norm(gradient, order)
        return plain
    return gradient.model.gradient_norm(gradient.managed, float(order))


def _refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedGradientError:
    values = [*args, *kwargs.values()]
    values += [item for v in values if isinstance(v, (list, tuple)) for item in v]
    names = [v.parameter_name for v in values if isinstance(v, ShardedGradient)]
    return ShardedGradientError(
        f"{func} needs whole gradients, and the gradient of {names[0]!r} is sharded over the "
        "ranks. Call fxcomm.full_grad(p) on every rank for the whole mean gradient, or use "
        'options={"stage": "ddp"}, which keeps whole gradients on every rank.'
    )
