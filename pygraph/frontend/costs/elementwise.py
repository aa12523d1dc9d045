"""Flops of pointwise operators, reductions, normalisations and pooling, per element as their textbook formulas go.

Exponentials, roots and divisions count one, as an addition does; so do comparisons. Traffic is the plain one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pygraph.frontend.costs.registry import FLOPS, FlopsFormula, flops
from pygraph.frontend.costs.traffic import numel, operand, product, result_numel, total_numel
from pygraph.ir import Arg, Dim, KernelNode, TensorType

__all__ = ["pointwise_flops"]

_PER_RESULT: Mapping[str, int] = {
    "aten.addcdiv": 3,
    "aten.addcmul": 3,
    "aten.clamp": 2,
    "aten.elu": 3,
    "aten.fill": 0,
    "aten.gelu": 8,
    "aten.gelu_backward": 14,
    "aten.hardsigmoid": 4,
    "aten.hardswish": 5,
    "aten.lerp": 3,
    "aten.masked_fill": 0,
    "aten.native_dropout": 2,
    "aten.native_dropout_backward": 2,
    "aten.sigmoid": 3,
    "aten.sigmoid_backward": 3,
    "aten.silu": 4,
    "aten.silu_backward": 7,
    "aten.softplus": 3,
    "aten.tanh_backward": 3,
    "aten.where": 0,
    "prims.convert_element_type": 0,
    "prims.fma": 2,
    "prims.where": 0,
}
"""Operations per element of the result. Pointwise operators that are not listed take one."""

_PER_OPERAND: Mapping[str, int] = {
    "aten.all": 1,
    "aten.amax": 1,
    "aten.amin": 1,
    "aten.aminmax": 2,
    "aten.any": 1,
    "aten.argmax": 1,
    "aten.argmin": 1,
    "aten.count_nonzero": 1,
    "aten.cummax": 1,
    "aten.cummin": 1,
    "aten.cumprod": 1,
    "aten.cumsum": 1,
    "aten.logcumsumexp": 3,
    "aten.logsumexp": 4,
    "aten.max": 1,
    "aten.mean": 1,
    "aten.min": 1,
    "aten.nansum": 1,
    "aten.norm": 2,
    "aten.linalg_vector_norm": 2,
    "aten.prod": 1,
    "aten.std": 4,
    "aten.std_mean": 4,
    "aten.sum": 1,
    "aten.var": 4,
    "aten.var_mean": 4,
    "aten._softmax": 5,
    "aten._log_softmax": 5,
    "aten._safe_softmax": 5,
    "aten._softmax_backward_data": 4,
    "aten._log_softmax_backward_data": 4,
    "aten.native_layer_norm": 8,
    "aten.native_layer_norm_backward": 13,
    "aten.native_group_norm": 8,
    "aten.native_group_norm_backward": 13,
    "aten._fused_rms_norm": 5,
    "aten._fused_rms_norm_backward": 9,
    "aten.native_batch_norm": 8,
    "aten._native_batch_norm_legit": 8,
    "aten._native_batch_norm_legit_functional": 8,
    "aten._native_batch_norm_legit_no_training": 4,
    "aten._batch_norm_with_update": 8,
    "aten._batch_norm_with_update_functional": 8,
    "aten._batch_norm_no_update": 4,
    "aten.native_batch_norm_backward": 13,
    "aten.batch_norm_backward": 13,
    "aten.nll_loss_forward": 1,
    "aten.nll_loss2d_forward": 1,
    "aten._cdist_forward": 3,
    "prims.amax": 1,
    "prims.amin": 1,
    "prims.prod": 1,
    "prims.sum": 1,
    "prims.var": 4,
}
"""Operations per element of the first operand: reductions, scans, and normalisations along a dimension."""


def pointwise_flops(node: KernelNode) -> Dim:
    """One operation for each element of each result."""
    return total_numel(node)


def _per_result(count: int) -> FlopsFormula:
    def formula(node: KernelNode) -> Dim | None:
        return product(count, result_numel(node))

    return formula


def _per_operand(count: int) -> FlopsFormula:
    def formula(node: KernelNode) -> Dim | None:
        first = operand(node, 0)
        return None if first is None else product(count, numel(first))

    return formula


FLOPS.update({op: _per_result(count) for op, count in _PER_RESULT.items()})
FLOPS.update({op: _per_operand(count) for op, count in _PER_OPERAND.items()})


# -- pooling -----------------------------------------------------------------------------------------------------------


def _windowed_pools() -> Iterator[str]:
    for dims in ("1d", "2d", "3d"):
        yield from (f"aten.avg_pool{dims}", f"aten.max_pool{dims}_with_indices", f"aten.max_pool{dims}")
    yield "prims._low_memory_max_pool_with_offsets"


@flops(*_windowed_pools())
def _pool(node: KernelNode) -> Dim | None:
    """pool(input, window, …): one operation for each element of each window."""
    window: Arg = node.args[1] if len(node.args) > 1 else None
    source = operand(node, 0)
    if not isinstance(window, tuple) or source is None:
        return None
    sides = [side for side in window if isinstance(side, int)]
    dims = len(source.shape) - 2
    area = product(*(sides if len(sides) > 1 else sides * max(dims, 1)))
    return product(result_numel(node), area)


@flops("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d")
def _adaptive_pool(node: KernelNode) -> Dim | None:
    source = operand(node, 0)
    return None if source is None else numel(source)


@flops(
    "aten._adaptive_avg_pool2d_backward",
    "aten._adaptive_avg_pool3d_backward",
    "aten.adaptive_max_pool2d_backward",
    "aten.avg_pool2d_backward",
    "aten.avg_pool3d_backward",
    "aten.max_pool2d_with_indices_backward",
    "aten.max_pool3d_with_indices_backward",
    "prims._low_memory_max_pool_offsets_to_indices",
)
def _pool_backward(node: KernelNode) -> Dim | None:
    """One addition for each gradient that is spread, at least one for each result."""
    return result_numel(node)


@flops("aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d")
def _nearest(node: KernelNode) -> Dim | None:
    return 0 if isinstance(node.outputs[0].type, TensorType) else None


@flops("aten.upsample_bilinear2d", "aten.upsample_linear1d")
def _linear(node: KernelNode) -> Dim | None:
    """Interpolation along one axis takes two multiplications and an addition; two axes take three of them."""
    axes = 3 if node.op.startswith("aten.upsample_bilinear2d") else 1
    return product(3 * axes, result_numel(node))
