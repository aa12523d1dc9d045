"""Flops of matrix products: two for each multiply-add.

A bias or a scale is left out, as in torch.utils.flop_counter.
"""

from __future__ import annotations

from pygraph.frontend.costs.registry import flops
from pygraph.frontend.costs.traffic import numel, operand, product, result_numel, shape_of
from pygraph.ir import Dim, KernelNode

__all__: list[str] = []


def _contracted(node: KernelNode, left: int) -> Dim | None:
    """``2 · results · k`` where ``k`` is the last dimension of positional argument ``left``."""
    shape = shape_of(node, left)
    return product(2, result_numel(node), shape[-1]) if shape else None


@flops("aten.mm", "aten.bmm", "aten._int_mm", "aten._scaled_mm", "aten.matmul", "aten.mv", "aten.linear")
def _product(node: KernelNode) -> Dim | None:
    return _contracted(node, 0)


@flops("aten.addmm", "aten.baddbmm", "aten.addmv", "aten._addmm_activation", "aten.addmm_", "aten.baddbmm_")
def _product_and_bias(node: KernelNode) -> Dim | None:
    return _contracted(node, 1)


@flops("aten.addbmm", "aten.addr")
def _summed_product(node: KernelNode) -> Dim | None:
    """addbmm sums over the batch too; addr is an outer product."""
    shape = shape_of(node, 1)
    inner = shape[0] * shape[2] if len(shape) == 3 else 1
    return product(2, result_numel(node), inner)


@flops("aten.dot", "aten.vdot")
def _dot(node: KernelNode) -> Dim | None:
    left = operand(node, 0)
    return None if left is None else product(2, numel(left))


@flops("mkldnn._linear_pointwise", "mkl._mkl_linear")
def _packed_linear(node: KernelNode) -> Dim | None:
    """The weight may be packed, so the contracted size is taken from the input."""
    return _contracted(node, 0)
