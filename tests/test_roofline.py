"""The roofline model: arithmetic by the book, traffic by the rule of fusion, any sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxcomm.analysis.roofline import (
    DEVICES,
    DeviceRates,
    Timetable,
    Work,
    node_cost,
    total_flops,
    work_of,
)

RATES = DeviceRates({"float32": 1e9, "bfloat16": 4e9}, 1e8, 1e-6)


def trace(function: Callable[..., Any], *examples: Tensor, mode: str = "fake") -> torch.fx.Graph:
    graph: torch.fx.Graph = make_fx(function, tracing_mode=mode)(*examples).graph
    return graph


def works(graph: torch.fx.Graph) -> dict[str, Work]:
    return {node.name: work_of(node) for node in graph.nodes if work_of(node).kernel}


def test_matrix_products() -> None:
    graph = trace(lambda a, b, c: torch.addmm(c, a, b), *map(torch.randn, ((3, 5), (5, 7), (7,))))
    (work,) = works(graph).values()
    assert work.flops == 2 * 3 * 5 * 7
    assert work.nbytes == 4 * (3 * 5 + 5 * 7 + 7 + 3 * 7)


def test_a_training_step_of_layers_is_three_forwards() -> None:
    """Each weight is multiplied once forward, once for each of the gradients."""
    weights = [torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)]
    x = torch.randn(10, 8, requires_grad=True)

    def step(x: Tensor, *weights: Tensor) -> list[Tensor]:
        out = x
        for weight in weights:
            out = (out @ weight).relu()
        return list(torch.autograd.grad(out.sum(), [x, *weights]))

    graph = trace(step, x, *weights)
    products = [w for n, w in works(graph).items() if n.startswith("mm")]
    assert total_flops(products) == 6 * 10 * (8 * 16 + 16 * 4)


def test_attention_forward_and_backward() -> None:
    shape = (2, 3, 6, 8)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def step(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return list(torch.autograd.grad(out.sum(), [q, k, v]))

    graph = trace(step, q, k, v)
    found = [w.flops for n, w in works(graph).items() if "attention" in n]
    assert sum(found) == 7 * 2 * 2 * 3 * 6 * 6 * 8


def test_convolutions() -> None:
    graph = trace(
        lambda x, w: torch.nn.functional.conv2d(x, w),
        torch.randn(2, 3, 8, 8),
        torch.randn(5, 3, 3, 3),
    )
    (work,) = works(graph).values()
    assert work.flops == 2 * (2 * 5 * 6 * 6) * 3 * 3 * 3


def test_what_is_fused_is_neither_written_nor_read() -> None:
    graph = trace(lambda x: (x.relu() * 2 + 1).sum(), torch.randn(10, 10))
    nbytes = {name: work.nbytes for name, work in works(graph).items() if work.nbytes}
    assert nbytes == {"relu": 400, "sum_1": 4}, "the input is read once, the sum written"


def test_what_a_product_uses_is_written() -> None:
    graph = trace(lambda x, w: x.relu() @ w, torch.randn(10, 10), torch.randn(10, 10))
    nbytes = {name: work.nbytes for name, work in works(graph).items()}
    assert nbytes == {"relu": 800, "mm": 1200}


def test_views_cost_nothing_and_hide_nothing() -> None:
    graph = trace(lambda x: x.relu().t().reshape(-1).exp(), torch.randn(10, 10).t())
    found = works(graph)
    assert sum(int(work.nbytes) for work in found.values()) >= 800
    assert not any(name.startswith(("t", "view", "permute")) for name in found)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(2, 40))
def test_other_sizes_need_no_other_trace(rows: int, inner: int, columns: int) -> None:
    def compute(a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax((a @ b).relu() + 1, -1) @ b.t()

    symbolic = trace(compute, torch.randn(5, 6), torch.randn(6, 7), mode="symbolic")
    table = Timetable.of(symbolic)
    assert len(table.symbols) == 3
    sizes = dict(zip(_in_order(symbolic), (rows, inner, columns), strict=True))
    static = trace(compute, torch.randn(rows, inner), torch.randn(inner, columns))
    ours = table.elapsed(RATES, sizes)
    theirs = Timetable.of(static).elapsed(RATES)
    assert max(ours.values()) == pytest.approx(max(theirs.values()))
    cost = node_cost(RATES, sizes)
    assert sum(map(cost, symbolic.nodes)) == pytest.approx(max(theirs.values()))


def _in_order(graph: torch.fx.Graph) -> list[str]:
    """The symbols of the inputs' sizes, each once."""
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    sizes = [s for v in values if isinstance(v, Tensor) for s in v.shape]
    return list(dict.fromkeys(str(s) for s in sizes))


def test_elapsed_times_are_the_sum_of_costs() -> None:
    graph = trace(lambda a, b: (a @ b).relu().sum(), torch.randn(4, 5), torch.randn(5, 6))
    cost, passed = node_cost(RATES), 0.0
    elapsed = Timetable.of(graph).elapsed(RATES)
    for node in graph.nodes:
        passed += cost(node)
        assert elapsed[node.name] == pytest.approx(passed)


def test_the_roof_is_the_longer_of_both() -> None:
    small = Work(sympy.Integer(1000), sympy.Integer(1000), "float32", kernel=True)
    assert small.seconds(RATES) == pytest.approx(1000 / 1e8 + 1e-6), "bytes"
    large = replace(small, flops=sympy.Integer(10**9))
    assert large.seconds(RATES) == pytest.approx(1 + 1e-6), "arithmetic"
    assert replace(large, dtype="bfloat16").seconds(RATES) == pytest.approx(0.25 + 1e-6)
    assert replace(large, dtype="float8").seconds(RATES) == pytest.approx(1 + 1e-6)
    assert all(rates.flops_of("bfloat16") > 0 for rates in DEVICES.values())


def test_sizes_that_are_missing_are_named() -> None:
    graph = trace(lambda a: a.relu(), torch.randn(5, 6), mode="symbolic")
    first, second = Timetable.of(graph).symbols
    with pytest.raises(ValueError, match=f"no size is given for {second}"):
        Timetable.of(graph).elapsed(RATES, {first: 3})
    with pytest.raises(ValueError, match="no size is given for"):
        sum(map(node_cost(RATES), graph.nodes))
