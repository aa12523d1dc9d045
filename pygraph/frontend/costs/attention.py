"""Flops of fused attention: the two products forward and the five backward, softmax and masks left out.

Causal masks are not discounted, as in torch.utils.flop_counter. Layouts: (batch, heads, length, width).
"""

from __future__ import annotations

from typing import TypeAlias

from pygraph.frontend.costs.registry import flops
from pygraph.frontend.costs.traffic import product, shape_of
from pygraph.ir import Dim, KernelNode
from pygraph.ir.types import as_dim

__all__: list[str] = []


_Shape: TypeAlias = "tuple[Dim, ...]"


def _products(query: _Shape, key: _Shape, value: _Shape, counts: tuple[int, int]) -> Dim | None:
    """``counts`` products of length × length × width, over the width of the queries and over that of the values."""
    if len(query) != 4 or len(key) != 4 or len(value) != 4:
        return None
    batch, heads, length, width = query
    scores = product(2, batch, heads, length, key[2])
    return as_dim(scores * (counts[0] * width + counts[1] * value[3]))


@flops(
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten.scaled_dot_product_attention",
)
def _forward(node: KernelNode) -> Dim | None:
    return _products(shape_of(node, 0), shape_of(node, 1), shape_of(node, 2), (1, 1))


@flops(
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
)
def _backward(node: KernelNode) -> Dim | None:
    """backward(grad, query, key, value, …): scores again, then the gradients of both products."""
    return _products(shape_of(node, 1), shape_of(node, 2), shape_of(node, 3), (3, 2))
