"""The modelled device time of a node: its cost, at the rate of the arithmetic that it does.

Rates are the ``DeviceModel``'s; formulas of costs are the frontend's.
"""

from __future__ import annotations

from collections.abc import Mapping

from pygraph.ir import DeviceModel, KernelNode, TensorType

__all__ = ["VECTOR", "arithmetic", "node_time_us"]

VECTOR = "vector"
"""The peak of a model that arithmetic other than products of matrices has."""

_PRODUCTS = (
    "addbmm",
    "addmm",
    "addmm_",
    "_addmm_activation",
    "baddbmm",
    "baddbmm_",
    "bmm",
    "linear",
    "matmul",
    "mm",
    "_int_mm",
    "_scaled_mm",
    "_mkl_linear",
    "_linear_pointwise",
)
_PRODUCT_PARTS = ("convolution", "_scaled_dot_product")


def node_time_us(node: KernelNode, model: DeviceModel, values: Mapping[str, int]) -> float | None:
    """Device time of ``node`` in µs, or None where its cost is unknown."""
    return model.time_us(node.cost, values, arithmetic(node))


def arithmetic(node: KernelNode) -> str | None:
    """The peak that ``node`` computes at: the element type of what it takes (or returns, where it takes no tensor) for
    matrix products, convolutions and attention, ``VECTOR`` for the rest; None for a product without tensors."""
    if not _is_product(node.op):
        return VECTOR
    found = (value.type for value in (*node.inputs, *node.outputs))
    return next((type.dtype.value for type in found if isinstance(type, TensorType)), None)


def _is_product(op: str) -> bool:
    _, _, name = op.partition(".")
    return name.partition(".")[0] in _PRODUCTS or any(part in name for part in _PRODUCT_PARTS)
