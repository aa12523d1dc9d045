"""Costs of a node, symbolic in its sizes: an operator's flops, the bytes it moves, and one launch if it computes.

Flops of products, convolutions and attention come from ``torch.utils.flop_counter``, called with the IR's shapes; a
formula that a user registers there (``register_flop_formula``) gives a custom operator its cost. Other known operators
take at most one operation per element. Bytes are the operands read and the results written; indexing counts only the
elements that it selects. An unknown operator costs UNKNOWN, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import sympy
from torch.utils.flop_counter import flop_registry

from pygraph import compat
from pygraph.frontend.effects import VIEWS, tags_of
from pygraph.frontend.names import FrontendError, is_symbolic, resolve_op
from pygraph.ir import (
    CONSTANT,
    FREE,
    UNKNOWN,
    Arg,
    Cost,
    Dim,
    Graph,
    GraphRef,
    KernelNode,
    TensorType,
    Value,
    base_name,
    leaves,
)
from pygraph.ir.cost import total
from pygraph.ir.types import as_dim


def cost_of(node: KernelNode, graph: Graph | None = None) -> Cost:
    """The cost of ``node``. A call of a subgraph costs the sum of the subgraph's nodes, looked up in ``graph``."""
    base = base_name(node.op)
    name = base.rstrip("_")  # an in-place operator costs as much as the other one
    kind = _KINDS.get(name)
    if is_symbolic(node.op) or base in VIEWS or kind == "free" or base == CONSTANT:
        return FREE
    if base in _RUNS_SUBGRAPH and graph is not None:
        return total(inner.cost for ref in leaves(node.args, GraphRef) for inner in graph.subgraphs[ref.name].nodes)
    if kind == "gather":
        return _gather(node)
    if kind == "scatter":
        return _scatter(node)
    if name == "aten.convolution_backward":
        return _convolution_backward(node)
    if kind == "move":
        return _plain(node, 0)
    if kind == "fill":
        return Cost(_elements(node.outputs or node.inputs), 0, _written_bytes(node), 1)
    if kind == "reduction":
        return _plain(node, _elements(node.inputs[:1]))
    if kind == "elementwise" or name.startswith("aten._foreach_") or _is_pointwise(node.op):
        return _plain(node, _elements(node.outputs or _operands_written(node)))
    if _formula(base) is None:
        return UNKNOWN
    results = node.outputs[0] if len(node.outputs) == 1 else node.outputs
    return _plain(node, _counted(base, node.args, node.attrs, results))


def _plain(node: KernelNode, flops: Dim | None) -> Cost:
    """One launch that reads each operand and writes each result once. The cost of host waits is not modelled."""
    positions = node.effects.reads
    read = node.inputs if positions is None else [node.inputs[position] for position in positions]
    return Cost(flops, _bytes_of(read), _written_bytes(node), 1)


# -- operators by kind of cost. Those that Inductor always decomposes are left out. -----------------------------------

_NAMES = {
    # allocates, or checks on the host: nothing runs on the device
    "free": """
        aten.empty aten.empty_strided aten.new_empty_strided prims.empty prims.empty_permuted prims.empty_strided
        aten._assert_tensor_metadata aten._assert_scalar aten.sym_constrain_range aten.sym_constrain_range_for_size
    """,
    # elements are moved, unchanged or converted
    "move": """
        aten._local_scalar_dense aten._to_copy aten.as_strided_scatter aten.cat aten.clone aten.constant_pad_nd
        aten.copy aten.diagonal_scatter aten.lift_fresh_copy aten.repeat aten.select_scatter aten.slice_scatter
        prims.as_strided_scatter prims.cat prims.clone prims.copy_to prims.device_put prims.inductor_lookup_seed
        prims.rev
    """,
    # constants and random numbers are written; a tensor operand may provide the shape
    "fill": """
        aten.arange aten.bernoulli aten.exponential aten.fill aten.full aten.full_like aten.normal
        aten.normal_functional aten.rand aten.rand_like aten.randint aten.randint_like aten.randn aten.randn_like
        aten.randperm aten.scalar_tensor aten.uniform aten.zero aten.zeros_like prims.full prims.full_like
        prims.inductor_seed prims.inductor_seeds prims.iota prims.normal prims.scalar_tensor
    """,
    # one operation for each element of the first operand: reductions, scans, sorts, normalisations, pooling
    "reduction": """
        aten._adaptive_avg_pool2d aten._adaptive_avg_pool3d aten._cdist_forward aten.adaptive_max_pool2d
        aten.adaptive_max_pool3d aten.all aten.amax aten.amin aten.any aten.argmax aten.argmin aten.avg_pool2d
        aten.avg_pool3d aten.cummax aten.cummin aten.cumprod aten.cumsum aten.embedding_dense_backward aten.kthvalue
        aten.logcumsumexp aten.masked_select aten.max aten.max_pool2d_with_indices aten.max_pool3d_with_indices
        aten.mean aten.median aten.min aten.mode aten.native_layer_norm aten.nonzero aten.prod aten.sort aten.sum
        aten.topk aten.var aten.var_mean prims._low_memory_max_pool_with_offsets prims.amax prims.amin prims.prod
        prims.sum prims.var
    """,
    # one operation for each element of the results; so do operators that are tagged pointwise
    "elementwise": """
        aten._adaptive_avg_pool2d_backward aten._adaptive_avg_pool3d_backward aten._assert_async
        aten.adaptive_max_pool2d_backward aten.adaptive_max_pool3d_backward aten.avg_pool2d_backward
        aten.avg_pool3d_backward aten.max_pool2d_with_indices_backward aten.max_pool3d_with_indices_backward
        aten.native_dropout aten.upsample_bilinear2d aten.upsample_nearest2d aten.where prims.inductor_randint
        prims.inductor_random prims.where prims._low_memory_max_pool_offsets_to_indices
    """,
    "gather": """
        aten._unsafe_index aten._unsafe_masked_index aten.embedding aten.gather aten.index aten.index_select aten.take
    """,
    "scatter": """
        aten._unsafe_index_put aten._unsafe_masked_index_put_accumulate aten.index_add aten.index_copy aten.index_fill
        aten.index_put aten.scatter aten.scatter_add aten.scatter_reduce
    """,
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_RUNS_SUBGRAPH = ("hop.invoke_subgraph", "hop.tag_activation_checkpoint")


@cache
def _is_pointwise(op: str) -> bool:
    try:
        return "pointwise" in tags_of(resolve_op(op))
    except FrontendError:
        return False


# -- products: the formulas of torch.utils.flop_counter ----------------------------------------------------------------

_COUNTED_AS = {
    "_int_mm": "mm",
    "_flash_attention_for_cpu": "_flash_attention",
    "_fused_attention_overrideable": "_flash_attention",
}
"""Replacements in names of operators without a formula in torch, which give an operator with the same operands."""


class _Shape(tuple[Dim, ...]):
    """A shape in place of a tensor: most formulas take shapes; those registered raw take tensors and read ``shape``."""

    __slots__ = ()

    @property
    def shape(self) -> _Shape:
        return self


def _formula(base: str) -> Callable[..., Any] | None:
    """Torch's formula for an operator, or for the out-of-place form of an in-place operator."""
    for name in (base, base.rstrip("_")):
        for uncounted, counted in _COUNTED_AS.items():
            name = name.replace(uncounted, counted)
        try:
            found = resolve_op(name)
        except FrontendError:
            continue
        if isinstance(found, compat.OpOverloadPacket) and found in flop_registry:
            formula: Callable[..., Any] = flop_registry[found]
            return formula
    return None


def _counted(base: str, args: Iterable[Arg], attrs: Mapping[str, Arg], results: Arg) -> Dim | None:
    """Flops of the operator ``base`` by torch's formula; None if the formula fails."""
    formula = _formula(base)
    assert formula is not None
    given, named = _shapes(tuple(args)), {name: _shapes(arg) for name, arg in attrs.items()}
    try:
        if "_scaled_dot_product_" in base:  # as if no heads shared keys: torch 2.11 counts nothing if they do
            heads = given[0][1]
            given = [_Shape((x[0], heads, *x[2:])) if isinstance(x, _Shape) and len(x) == 4 else x for x in given]
        flops = formula(*given, **named, out_val=_shapes(results))
    except Exception:  # noqa: BLE001 - a formula is anybody's code, and may ask for more than shapes
        return None
    return as_dim(flops) if isinstance(flops, (int, sympy.Expr)) else None


def _shapes(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple([_shapes(item) for item in arg])
    return _Shape(arg.type.shape) if isinstance(arg, Value) and isinstance(arg.type, TensorType) else arg


def _convolution_backward(node: KernelNode) -> Cost:
    """convolution_backward(grad, input, weight, …, transposed [7], …, mask [10]): each gradient takes as many flops as
    the forward pass. Torch's own formula counts the gradient of a grouped weight once for each group."""
    grad, image, weight, *others = node.args
    mask = others[7] if len(others) > 7 else None
    forward = (image, weight, *others[:5])
    once = _counted("aten.convolution", forward, {}, grad)
    gradients = sum(wanted is True for wanted in mask[:2]) if isinstance(mask, tuple) else None
    return _plain(node, None if once is None or gradients is None else as_dim(once * gradients))


# -- indexing ----------------------------------------------------------------------------------------------------------


def _gather(node: KernelNode) -> Cost:
    """Reads all indices, and as many bytes of the table as it returns."""
    written = _written_bytes(node)
    return Cost(0, as_dim(_bytes_of(node.inputs[1:]) + written), written, 1)


def _scatter(node: KernelNode) -> Cost:
    """Writes the selected elements; out of place, a separate launch copies the target first."""
    if not isinstance(node.inputs[0].type, TensorType):
        return UNKNOWN
    target, *others = _tensors(node.inputs)
    picked = next((type for type in reversed(others) if type.dtype is target.dtype and type.shape), None)
    count = (picked or next(iter(others), target)).numel
    touched, copied = count * target.dtype.itemsize, 0 if node.effects.writes else target.nbytes
    read = as_dim(copied + _bytes_of(node.inputs[1:]))
    return Cost(count, read, as_dim(copied + touched), 1 if node.effects.writes else 2)


# -- bytes and elements ------------------------------------------------------------------------------------------------


def _tensors(values: Iterable[Value]) -> list[TensorType]:
    return [value.type for value in dict.fromkeys(values) if isinstance(value.type, TensorType)]


def _elements(values: Iterable[Value]) -> Dim:
    return as_dim(sum((type.numel for type in _tensors(values)), 0))


def _bytes_of(values: Iterable[Value]) -> Dim:
    """Bytes of the distinct tensors among ``values``."""
    return as_dim(sum((_held_bytes(type) for type in _tensors(values)), 0))


@lru_cache(maxsize=16384)
def _held_bytes(type: TensorType) -> Dim:
    """Bytes of memory that hold the elements: an expanded dimension, of stride 0, counts as size 1."""
    if type.stride is None:
        return type.nbytes
    sizes = (size for size, step in zip(type.shape, type.stride, strict=True) if step != 0)
    return replace(type, shape=tuple(sizes), stride=None).nbytes


def _written_bytes(node: KernelNode) -> Dim:
    """Bytes of the results in new memory, and of the operands that the node writes."""
    in_place = {output for output, _ in node.effects.aliases}
    return _bytes_of((*(v for v in node.outputs if v.index not in in_place), *_operands_written(node)))


def _operands_written(node: KernelNode) -> tuple[Value, ...]:
    return tuple(node.inputs[position] for position in node.effects.writes)
