"""Bytes and elements of a node's operands and results, the raw material of every formula.

Memory that strides visit again (expanded dimensions, overlapping windows) counts once.
"""

from __future__ import annotations

from functools import lru_cache

from pygraph.ir import Arg, Cost, Dim, KernelNode, TensorType, Value
from pygraph.ir.types import as_dim

__all__ = [
    "bytes_of",
    "moved",
    "numel",
    "operand",
    "plain",
    "product",
    "read_bytes",
    "result_numel",
    "shape_of",
    "total_numel",
    "written_bytes",
]


def product(*factors: Dim) -> Dim:
    """The product of sizes; an int when all of them are."""
    result: Dim = 1
    for factor in factors:
        result = result * factor
    return as_dim(result)


@lru_cache(maxsize=16384)
def numel(type: TensorType) -> Dim:
    """Elements of a tensor."""
    return product(*type.shape)


@lru_cache(maxsize=16384)
def bytes_of(type: TensorType) -> Dim:
    """Bytes of memory behind a tensor's elements: a dimension of stride 0 holds one element's worth."""
    if type.stride is None:
        return as_dim(numel(type) * type.dtype.itemsize)
    held = product(*(size for size, step in zip(type.shape, type.stride, strict=True) if step != 0))
    if isinstance(held, int) and held > 0 and all(isinstance(step, int) for step in type.stride):
        held = min(held, _extent(type.shape, type.stride))
    return as_dim(held * type.dtype.itemsize)


def _extent(shape: tuple[Dim, ...], stride: tuple[Dim, ...]) -> int:
    """Elements from the first to the last that the strides reach."""
    return 1 + sum(int(step) * (int(size) - 1) for size, step in zip(shape, stride, strict=True) if step != 0)


def operand(node: KernelNode, index: int) -> TensorType | None:
    """The type of positional argument ``index``, when it is a tensor."""
    arg: Arg = node.args[index] if index < len(node.args) else None
    return arg.type if isinstance(arg, Value) and isinstance(arg.type, TensorType) else None


def shape_of(node: KernelNode, index: int) -> tuple[Dim, ...]:
    """The shape of positional argument ``index``; empty when it is no tensor."""
    type = operand(node, index)
    return () if type is None else type.shape


def _tensors(values: tuple[Value, ...]) -> list[TensorType]:
    return [value.type for value in dict.fromkeys(values) if isinstance(value.type, TensorType)]


def read_bytes(node: KernelNode) -> Dim:
    """Bytes of the distinct tensors that the node reads."""
    positions = node.effects.reads
    read = node.inputs if positions is None else tuple(node.inputs[p] for p in positions)
    return as_dim(sum((bytes_of(type) for type in _tensors(read)), 0))


def written_bytes(node: KernelNode) -> Dim:
    """Bytes of the fresh results and of the operands that the node writes."""
    in_place = {output for output, _ in node.effects.aliases}
    fresh = tuple(value for value in node.outputs if value.index not in in_place)
    mutated = tuple(node.inputs[position] for position in node.effects.writes)
    return as_dim(sum((bytes_of(type) for type in _tensors((*fresh, *mutated))), 0))


def result_numel(node: KernelNode) -> Dim:
    """Elements of the first tensor result, else of the first operand written; 0 when there is neither."""
    written = [node.inputs[position] for position in node.effects.writes]
    types = _tensors((*node.outputs, *written))
    return numel(types[0]) if types else 0


def total_numel(node: KernelNode) -> Dim:
    """Elements of all results, or of all operands written when there are no results."""
    types = _tensors(node.outputs) or _tensors(tuple(node.inputs[position] for position in node.effects.writes))
    return as_dim(sum((numel(type) for type in types), 0))


def plain(node: KernelNode, flops: Dim | None) -> Cost:
    """One launch that reads each operand and writes each result once."""
    return Cost(flops, read_bytes(node), written_bytes(node), 1, 0)


def moved(node: KernelNode, read: Dim, *, flops: Dim = 0) -> Cost:
    """One launch that reads ``read`` bytes and writes its results."""
    return Cost(flops, read, written_bytes(node), 1, 0)
