"""Costs of operators that move memory: copies, factories, gathers and scatters, sorts, and those that launch nothing.

A gather reads what it picks, not its whole table; an out-of-place scatter copies what it does not write.
"""

from __future__ import annotations

from pygraph.frontend.costs.registry import costs, flops
from pygraph.frontend.costs.traffic import (
    bytes_of,
    moved,
    numel,
    operand,
    product,
    read_bytes,
    result_numel,
    written_bytes,
)
from pygraph.ir import FREE, UNKNOWN, Arg, Cost, Dim, KernelNode, TensorType, Value
from pygraph.ir.types import as_dim

__all__: list[str] = []


@flops(
    "aten._to_copy",
    "aten.cat",
    "aten.clone",
    "aten.constant_pad_nd",
    "aten.copy",
    "aten.flip",
    "aten.lift_fresh_copy",
    "aten.repeat",
    "aten.roll",
    "aten.stack",
    "aten.tril",
    "aten.triu",
    "aten.pixel_shuffle",
    "aten.pixel_unshuffle",
    "aten.slice_scatter",
    "aten.select_scatter",
    "aten.diagonal_scatter",
    "aten.as_strided_scatter",
    "aten.reflection_pad2d",
    "aten.replication_pad2d",
    "prims.as_strided_scatter",
    "prims.cat",
    "prims.clone",
    "prims.device_put",
    "prims.rev",
)
def _copy(_node: KernelNode) -> Dim | None:
    """Elements moved unchanged (or converted)."""
    return 0


@costs("aten.copy_", "prims.copy_to")
def _copy_into(node: KernelNode) -> Cost:
    """copy_(destination, source): the destination is written, not read."""
    source, target = operand(node, 1), operand(node, 0)
    if target is None:
        return UNKNOWN
    read = bytes_of(source) if source is not None else 0
    return Cost(0, read, bytes_of(target), 1, 0)


@costs("aten.contiguous", "aten.reshape", "aten.to", "aten.resolve_conj", "aten.resolve_neg")
def _copy_if_needed(node: KernelNode) -> Cost:
    """Whether these copy depends on strides; they do when the result is not laid out as the operand is."""
    source, result = operand(node, 0), node.outputs[0].type if node.outputs else None
    if source is None or not isinstance(result, TensorType):
        return UNKNOWN
    if source.stride is None and source.dtype is result.dtype:
        return FREE
    return Cost(0, bytes_of(source), bytes_of(result), 1, 0)


# -- fresh memory ------------------------------------------------------------------------------------------------------


@costs(
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.empty_permuted",
    "aten.new_empty",
    "aten.new_empty_strided",
    "prims.empty",
    "prims.empty_permuted",
    "prims.empty_strided",
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
)
def _nothing(_node: KernelNode) -> Cost:
    """Allocates, or checks on the host: nothing runs on the device."""
    return FREE


@costs(
    "aten.arange",
    "aten.eye",
    "aten.fill_",
    "aten.full",
    "aten.full_like",
    "aten.linspace",
    "aten.new_full",
    "aten.new_ones",
    "aten.new_zeros",
    "aten.ones",
    "aten.ones_like",
    "aten.scalar_tensor",
    "aten.zero_",
    "aten.zeros",
    "aten.zeros_like",
    "prims.full",
    "prims.full_like",
    "prims.iota",
    "prims.scalar_tensor",
    "prims.inductor_seed",
    "prims.inductor_seeds",
)
def _fill(node: KernelNode) -> Cost:
    """Writes constants, whatever tensor lends its shape."""
    return moved(node, 0)


@costs(
    "aten.bernoulli",
    "aten.bernoulli_",
    "aten.exponential_",
    "aten.normal_",
    "aten.normal_functional",
    "aten.rand",
    "aten.rand_like",
    "aten.randint",
    "aten.randint_like",
    "aten.randn",
    "aten.randn_like",
    "aten.randperm",
    "aten.uniform",
    "aten.uniform_",
    "prims.normal",
)
def _random(node: KernelNode) -> Cost:
    """One operation for each number drawn; nothing is read but what tells the shape."""
    return moved(node, 0, flops=result_numel(node))


@costs("prims.inductor_random", "prims.inductor_randint", "prims.inductor_lookup_seed")
def _random_from_seed(node: KernelNode) -> Cost:
    drawn = 0 if node.op.startswith("prims.inductor_lookup_seed") else result_numel(node)
    return moved(node, 8, flops=drawn)


# -- gathers and scatters ----------------------------------------------------------------------------------------------


def _bytes_in(arg: Arg) -> Dim:
    if isinstance(arg, tuple):
        return as_dim(sum((_bytes_in(item) for item in arg), 0))
    return bytes_of(arg.type) if isinstance(arg, Value) and isinstance(arg.type, TensorType) else 0


def _argument(node: KernelNode, index: int) -> Arg:
    return node.args[index] if index < len(node.args) else None


@costs("aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten._unsafe_index", "aten.take")
def _gather(node: KernelNode) -> Cost:
    """Reads the indices and as many elements as it returns."""
    indices = sum((_bytes_in(arg) for arg in node.args[1:]), 0)
    return moved(node, as_dim(indices + written_bytes(node)))


@costs("aten._unsafe_masked_index")
def _masked_gather(node: KernelNode) -> Cost:
    return moved(node, as_dim(_bytes_in(node.args[1:3]) + written_bytes(node)))


@costs(
    "aten._unsafe_index_put",
    "aten._unsafe_masked_index_put_accumulate",
    "aten.index_add",
    "aten.index_copy",
    "aten.index_fill",
    "aten.index_put",
    "aten.scatter",
    "aten.scatter_add",
    "aten.scatter_reduce",
)
def _scatter(node: KernelNode) -> Cost:
    """A copy of the target, with the picked places written."""
    return _scattered(node, copies=True)


@costs(
    "aten.index_add_",
    "aten.index_copy_",
    "aten.index_put_",
    "aten.scatter_",
    "aten.scatter_add_",
    "aten.scatter_reduce_",
)
def _scatter_in_place(node: KernelNode) -> Cost:
    """Only the picked places of the target are touched."""
    return _scattered(node, copies=False)


def _scattered(node: KernelNode, *, copies: bool) -> Cost:
    target = operand(node, 0)
    if target is None:
        return UNKNOWN
    adds = "add" in node.op or "reduce" in node.op or _argument(node, 3) is True
    picked = _picked(node, target)
    indices = as_dim(_bytes_in(node.args[1:]))
    touched = product(picked, target.dtype.itemsize)
    whole = bytes_of(target) if copies else 0
    read = as_dim(whole + indices + (touched if adds else 0))
    return Cost(picked if adds else 0, read, as_dim(whole + touched), 2 if copies else 1, 0)


def _picked(node: KernelNode, target: TensorType) -> Dim:
    """Elements written: as many as the source or the index says (the larger operand after the target)."""
    values = [v for v in node.inputs[1:] if isinstance(v.type, TensorType) and v.type.dtype is target.dtype]
    if values and isinstance(values[-1].type, TensorType) and values[-1].type.shape:
        return numel(values[-1].type)
    indices = [v.type for v in node.inputs[1:] if isinstance(v.type, TensorType)]
    return numel(indices[0]) if indices else numel(target)


@costs("aten.embedding_dense_backward")
def _embedding_backward(node: KernelNode) -> Cost:
    """Clears the table's gradient, then adds each row's gradient to it."""
    grad = operand(node, 0)
    if grad is None:
        return UNKNOWN
    added = bytes_of(grad)
    return Cost(numel(grad), as_dim(read_bytes(node) + added), as_dim(written_bytes(node) + added), 2, 0)


# -- sorts and reads ---------------------------------------------------------------------------------------------------


@costs("aten.sort", "aten.argsort", "aten.msort")
def _sort(node: KernelNode) -> Cost:
    """A radix sort: one pass over keys and positions for each byte of the key. No floating-point operations."""
    keys = operand(node, 0)
    if keys is None:
        return UNKNOWN
    passes = keys.dtype.itemsize
    pair = product(numel(keys), keys.dtype.itemsize + 8)
    return Cost(0, product(passes, pair), product(passes, pair), 1, 0)


@costs("aten.topk", "aten.kthvalue", "aten.median", "aten.mode")
def _select(node: KernelNode) -> Cost:
    """A radix selection: one pass over the keys for each byte of the key."""
    keys = operand(node, 0)
    if keys is None:
        return UNKNOWN
    return moved(node, product(keys.dtype.itemsize, bytes_of(keys)))


@costs("aten.nonzero", "aten.masked_select")
def _compact(node: KernelNode) -> Cost:
    """Reads twice, once to count and once to write; the host waits in between, for a time that nobody knows."""
    return Cost(0, product(2, read_bytes(node)), written_bytes(node), 2, None)


@costs("aten._local_scalar_dense", "aten.item")
def _read_scalar(node: KernelNode) -> Cost:
    """One element comes to the host, which waits for a time that nobody knows."""
    source = operand(node, 0)
    return UNKNOWN if source is None else Cost(0, source.dtype.itemsize, 0, 0, None)


@costs("aten._assert_async")
def _check(node: KernelNode) -> Cost:
    return Cost(0, read_bytes(node), 0, 1, 0)
