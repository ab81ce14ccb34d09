"""A graph as text that is the same for equal graphs, whatever process or patch release made them.

A line for each node, in the order of the graph::

    mm = call_function aten.mm.default(primals_1, t) -> cpu float32[4, 8]  # launch bucket 0.1 ...

that is: name, operation, target, arguments; result (device type, dtype, sizes, symbolic ones as
expressions, and strides unless it is contiguous); fxcomm's stamp (role, bucket, phase, parameters).
Graph modules that a graph calls follow, indented, below the node that names them. What differs
between equal graphs is left out or numbered by first appearance: process groups (``group0``),
models (``model0``), device indices; of objects that are no plain values only the type is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx

from fxcomm import compat
from fxcomm.passes.stamp import stamp_of

_GROUPS = frozenset({"group_name", "group"})
"""What operators call an argument that names a process group."""

_OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)


def graph_text(gm: torch.fx.GraphModule) -> str:
    """The graph as text; see the module's docstring. Adds no guards on symbolic sizes."""
    return "\n".join(_Writer().lines(gm)) + "\n"


def target_name(node: torch.fx.Node) -> str:
    """What a node calls or gets, by name: ``aten.mm.default``."""
    target = node.target
    return target if isinstance(target, str) else _plain(target)


class _Writer:
    """Writes one graph. ``_numbers`` are the names given to groups and models so far."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, object], str] = {}

    def lines(self, gm: torch.fx.GraphModule) -> Iterator[str]:
        for node in gm.graph.nodes:
            yield self._line(node, gm)
            called = _attribute(node, gm)
            if isinstance(called, torch.fx.GraphModule):
                yield from (f"    {line}" for line in self.lines(called))

    def _line(self, node: torch.fx.Node, gm: torch.fx.GraphModule) -> str:
        text = f"{node.name} = {node.op} {target_name(node)}({', '.join(self._arguments(node))})"
        value = node.meta["val"] if "val" in node.meta else _attribute(node, gm)
        result = _value(value)
        return text + (f" -> {result}" if result else "") + _stamp(node)

    def _arguments(self, node: torch.fx.Node) -> Iterator[str]:
        names = _argument_names(node)
        for index, argument in enumerate(node.args):
            yield self._named(node, names.get(index, ""), argument)
        for name, argument in node.kwargs.items():
            yield f"{name}={self._named(node, name, argument)}"

    def _named(self, node: torch.fx.Node, name: str, argument: Any) -> str:
        if name in _GROUPS and isinstance(argument, (str, int)):
            return self._numbered("group", argument)
        if name == "model" and target_name(node).startswith("fxcomm."):
            return self._numbered("model", argument)
        return _plain(argument)

    def _numbered(self, kind: str, value: object) -> str:
        known = sum(other == kind for other, _ in self._numbers)
        return self._numbers.setdefault((kind, value), f"{kind}{known}")


def _argument_names(node: torch.fx.Node) -> Mapping[int, str]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    return {i: argument.name for i, argument in enumerate(node.target._schema.arguments)}


def _attribute(node: torch.fx.Node, gm: torch.fx.GraphModule) -> Any:
    """What a ``get_attr`` node gets, None for other nodes."""
    value: Any = gm if node.op == "get_attr" else None
    for name in str(node.target).split(".") if node.op == "get_attr" else ():
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> str:
    """An argument as text."""
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_plain(k)}: {_plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(_plain, (value.start, value.stop, value.step)))})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, torch.SymInt):
        return str(compat.size_expression(value))
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (*_OPERATORS, torch.SymFloat, torch.SymBool)):
        return str(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _value(value: Any) -> str:
    """A node's result as text, empty for no result."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(v) or 'None' for v in value)})"
    if value is None or isinstance(value, torch.fx.GraphModule):
        return ""
    return _plain(value)


def _tensor(value: torch.Tensor) -> str:
    sizes = [compat.size_expression(size) for size in value.shape]
    text = f"{value.device.type} {_plain(value.dtype)}[{', '.join(map(str, sizes))}]"
    if value.layout is not torch.strided:
        return f"{text} {_plain(value.layout)}"
    strides = [compat.size_expression(stride) for stride in value.stride()]
    if _contiguous(sizes, strides):
        return text
    return f"{text} strides [{', '.join(map(str, strides))}]"


def _contiguous(sizes: Sequence[sympy.Expr], strides: Sequence[sympy.Expr]) -> bool:
    """Whether the strides are those of a contiguous tensor, as expressions: asking the tensor
    itself could make a guard."""
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _stamp(node: torch.fx.Node) -> str:
    stamp = stamp_of(node)
    if stamp is None:
        return ""
    words = [stamp.role, "bucket", f"{stamp.bucket.arena}.{stamp.bucket.bucket}", stamp.phase]
    words += ["final"] if stamp.final else []
    words += [stamp.mark] if stamp.mark else []
    names = f": {', '.join(stamp.parameters)}" if stamp.parameters else ""
    return f"  # {' '.join(words)}{names}"
