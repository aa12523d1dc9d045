"""Legality and placement on traced PyTorch programs of two devices, with ``meta`` standing in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.frontend.lift import lift
from pygraph.ir import CAPTURABLE, REASON, Graph, parse_graph
from pygraph.ir.interp import interpret
from pygraph.passes import PassContext, PassManager

GPU = "meta"


def placed(fn: Callable[..., Any], *args: torch.Tensor) -> Graph:
    """The placed graph of ``fn``, traced with Inductor's decompositions."""
    module = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    graph = parse_graph(str(lift(module, kind="inference")).replace(f"@{GPU}", "@cuda:0"))
    before = graph.clone()
    PassManager("legality,placement", check="full").run(graph, PassContext("cuda"))
    assert interpret(graph) == interpret(before)
    return graph


def refused(graph: Graph) -> list[tuple[str, str | None]]:
    """Operator and reason of what is left uncaptured."""
    return [(node.op.split(".")[1], node.meta.get(REASON)) for node in graph.nodes if not node.meta.get(CAPTURABLE)]


X = torch.empty(4, 4, device=GPU)


def test_a_causal_mask_is_made_on_the_device() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[0])
        mask = position[None, :] <= position[:, None]
        return torch.where(mask.to(GPU), x, torch.tensor(-1e9))

    graph = placed(fn, X)
    assert refused(graph) == [("constant", "cpu-operator")]
    assert [node.op for node in graph.nodes if node.op.startswith("pygraph.")] == ["pygraph.constant"]


def test_a_scalar_and_a_parameter_are_uploaded_together() -> None:
    def fn(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.to(GPU)) * scale + weight.sum()

    graph = placed(fn, X, torch.tensor(2.0), torch.randn(4, 4))
    assert refused(graph) == [("sum", "cpu-operator"), ("upload", "device-copy")]
    assert len(graph.node("upload0").outputs) == 3


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, torch.eye, lambda n: (torch.arange(n) * 3 - 1) // 2])
def test_factories_leave_nothing_on_the_cpu(make: Callable[[int], torch.Tensor]) -> None:
    assert refused(placed(lambda x: x[0, 0] + make(4).to(GPU), X)) == []
