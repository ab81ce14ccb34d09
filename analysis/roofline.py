"""What the nodes of a captured graph cost before any step has run: a roofline model.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer (Williams,
Waterman, Patterson: Roofline, CACM 2009). Both are sympy expressions in the graph's symbolic sizes:
for other sizes they are evaluated again, nothing is traced again.

Inductor fuses element-wise operators and reductions with their neighbours. What one of them makes
for others of them only is therefore taken to stay in registers: it is neither written nor read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import sympy
import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from fxcomm import compat
from fxcomm.analysis.capture import NodeCost

_aten = torch.ops.aten

# Their forward is two matrix products of queries, keys and values, their backward five.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
    _aten._scaled_dot_product_fused_attention_overrideable.default: 2,
    _aten._scaled_dot_product_fused_attention_overrideable_backward.default: 5,
}

_REDUCTIONS = frozenset(
    {
        *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.prod, _aten.var, _aten.var_mean),
        *(_aten._softmax, _aten._log_softmax, _aten._softmax_backward_data),
        *(_aten._log_softmax_backward_data, _aten.any, _aten.all, _aten.cumsum),
        *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.full, _aten.cat),
        torch.ops.prims.convert_element_type,
    }
)


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches, not its peak: ``flops`` a second by dtype (the name that is missing
    runs as "float32"), ``nbytes`` a second of memory, and seconds for each kernel launched."""

    flops: Mapping[str, float]
    nbytes: float
    kernel: float

    def flops_of(self, dtype: str) -> float:
        """Operations a second in a dtype."""
        return self.flops.get(dtype, self.flops["float32"])


DEVICES: Mapping[str, DeviceRates] = MappingProxyType(
    {
        # NVIDIA's data sheets (dense, SXM): 989 and 312 TFLOP/s in bf16, 3.35 and 2.04 TB/s; taken
        # at 55% of arithmetic, as large matrix products reach, and 80% of bandwidth.
        "h100": DeviceRates(
            {"bfloat16": 544e12, "float16": 544e12, "float32": 272e12, "float64": 37e12},
            2.7e12,
            4e-6,
        ),
        "a100": DeviceRates(
            {"bfloat16": 172e12, "float16": 172e12, "float32": 86e12, "float64": 10e12},
            1.6e12,
            4e-6,
        ),
        # One core with 512-bit vectors at about 3 GHz: 32 fused multiply-adds a cycle in fp32 is
        # 190 GFLOP/s, of which matrix products of middling size reach half.
        "cpu-core": DeviceRates({"float32": 80e9, "float64": 40e9, "bfloat16": 40e9}, 10e9, 2e-6),
    }
)
"""Rates by the names that the command line takes."""


@dataclass(frozen=True)
class Work:
    """What a node does: floating-point operations in ``dtype`` and bytes of memory traffic, as
    expressions in symbolic sizes; ``kernel`` says whether it is one of its own."""

    flops: sympy.Expr
    nbytes: sympy.Expr
    dtype: str
    kernel: bool

    def seconds(self, rates: DeviceRates, sizes: Mapping[str, int] | None = None) -> float:
        """Seconds on a device, with ``sizes`` for the symbols by name.

        Raises:
            ValueError: a symbol has no size.
        """
        flops, nbytes = (_value(expression, sizes or {}) for expression in self._both)
        launch = rates.kernel if self.kernel else 0.0
        return max(flops / rates.flops_of(self.dtype), nbytes / rates.nbytes) + launch

    @property
    def _both(self) -> tuple[sympy.Expr, sympy.Expr]:
        return self.flops, self.nbytes


def _value(expression: sympy.Expr, sizes: Mapping[str, int]) -> float:
    if not expression.free_symbols:
        return float(expression)
    known = {symbol: sizes.get(str(symbol)) for symbol in expression.free_symbols}
    unknown = sorted(str(symbol) for symbol, size in known.items() if size is None)
    if unknown:
        raise ValueError(f"no size is given for {', '.join(unknown)}")
    return float(expression.subs(known))


def work_of(node: torch.fx.Node) -> Work:
    """The work of a node of a graph after AOTAutograd."""
    value = _tensors(node.meta.get("val"))
    if node.op != "call_function" or compat.is_view(node) or not value:
        return Work(sympy.Integer(0), sympy.Integer(0), "float32", kernel=False)
    flops = _flops(node)
    nbytes = _traffic(node)
    kernel = flops != 0 or nbytes != 0
    return Work(flops, nbytes, str(value[0].dtype).removeprefix("torch."), kernel)


# --- arithmetic ---


def _flops(node: torch.fx.Node) -> sympy.Expr:
    target = node.target
    if target in _ATTENTION:
        return _attention_flops(node, _ATTENTION[target])
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        arguments = torch.fx.map_arg(node.args, _shape_of)
        return sympy.sympify(formula(*arguments, **_keywords(node), out_val=_shape_of(node)))
    elements = [_numel(tensor) for tensor in _tensors(node.meta["val"])]
    return sympy.Add(*elements) if _is_fusible(node) else sympy.Integer(0)


def _keywords(node: torch.fx.Node) -> dict[str, Any]:
    return dict(torch.fx.map_arg(node.kwargs, _shape_of))


def _attention_flops(node: torch.fx.Node, products: int) -> sympy.Expr:
    """Products of (queries x keys) elements over the head's width; a causal mask saves half of
    them in theory and is not counted, as usual."""
    first = 0 if products == 2 else 1  # a backward begins with the output's gradient
    query, key = (_shape_of(node.args[first + i]) for i in range(2))
    batch, heads, queries, width = query
    return 2 * products * batch * heads * queries * key[-2] * width


def _shape_of(node: Any) -> Any:
    """A node's sizes as sympy numbers and symbols; those of each tensor if it has several."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(map(compat.size_expression, value.shape))
    if isinstance(value, (list, tuple)):
        return tuple(
            tuple(map(compat.size_expression, v.shape)) if isinstance(v, torch.Tensor) else v
            for v in value
        )
    return value


# --- memory ---


def _traffic(node: torch.fx.Node) -> sympy.Expr:
    """Bytes read and written, less what fusion keeps in registers."""
    fusible = _is_fusible(node)
    read = (
        _nbytes(source)
        for source in map(_behind_views, node.all_input_nodes)
        if not (fusible and _is_fusible(source) and _stays_inside(source))
    )
    written = sympy.Integer(0) if fusible and _stays_inside(node) else _nbytes(node)
    return sympy.Add(written, *read)


def _behind_views(node: torch.fx.Node) -> torch.fx.Node:
    while compat.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _stays_inside(node: torch.fx.Node) -> bool:
    """Whether only operators that fuse with it use what a node makes."""
    pending, seen = list(node.users), set(node.users)
    while pending:
        user = pending.pop()
        if compat.is_view(user):
            pending += [u for u in user.users if u not in seen]
            seen.update(user.users)
        elif not _is_fusible(user):
            return False
    return bool(node.users)


def _is_fusible(node: torch.fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _REDUCTIONS


def _nbytes(node: torch.fx.Node) -> sympy.Expr:
    tensors = _tensors(node.meta.get("val"))
    return sympy.Add(*(_numel(tensor) * tensor.itemsize for tensor in tensors))


def _numel(tensor: torch.Tensor) -> sympy.Expr:
    return sympy.Mul(*map(compat.size_expression, tensor.shape))


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


# --- whole graphs ---


def node_cost(rates: DeviceRates, sizes: Mapping[str, int] | None = None) -> NodeCost:
    """What :func:`fxcomm.analysis.capture.capture_step` asks for: seconds of a node."""
    return lambda node: work_of(node).seconds(rates, sizes)


@dataclass(frozen=True)
class Timetable:
    """The works of a graph's nodes, in order: evaluated for many sizes, read only once."""

    nodes: tuple[str, ...]
    works: tuple[Work, ...]

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> Timetable:
        """Reads a graph."""
        nodes = list(graph.nodes)
        return cls(tuple(node.name for node in nodes), tuple(map(work_of, nodes)))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that are symbolic."""
        return tuple(map(str, self._symbols))

    @cached_property
    def _symbols(self) -> list[sympy.Symbol]:
        found: set[Any] = set()
        return sorted(found.union(*(e.free_symbols for w in self.works for e in w._both)), key=str)

    @cached_property
    def _evaluate(self) -> Callable[..., list[float]]:
        expressions = [expression for work in self.works for expression in work._both]
        compiled: Callable[..., list[float]] = sympy.lambdify(self._symbols, expressions, "math")
        return compiled

    def elapsed(
        self, rates: DeviceRates, sizes: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Seconds from the graph's beginning to the end of each node, by its name.

        Raises:
            ValueError: a symbol has no size.
        """
        known = sizes or {}
        unknown = sorted(set(self.symbols) - set(known))
        if unknown:
            raise ValueError(f"no size is given for {', '.join(unknown)}")
        values = self._evaluate(*(known[name] for name in self.symbols))
        pairs = zip(values[::2], values[1::2], strict=True)
        passed, found = 0.0, {}
        for name, work, (flops, nbytes) in zip(self.nodes, self.works, pairs, strict=True):
            launch = rates.kernel if work.kernel else 0.0
            passed += max(flops / rates.flops_of(work.dtype), nbytes / rates.nbytes) + launch
            found[name] = passed
        return found


def total_flops(works: Iterable[Work], sizes: Mapping[str, int] | None = None) -> float:
    """Floating-point operations of several works."""
    return math.fsum(_value(work.flops, sizes or {}) for work in works)
