"""Operators that legality knows by name, and why each cannot be captured. Names are those of ``.pgir`` text.

A name without an overload (``aten.nonzero``) stands for all overloads.

Sources: ``FORBIDDEN_CUDAGRAPH_OPS`` and ``is_cudagraph_unsafe_fx_node`` of ``torch/_inductor/utils.py`` (torch 2.11 and
2.13 agree), torch's tags, and a run of each operator of aten on one H200 (torch 2.11, CUDA 13.0) with
``torch.cuda.set_sync_debug_mode("error")`` and then inside ``torch.cuda.graph``; failures there are marked measured.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pygraph.ir import base_name


class Entry(NamedTuple):
    """Reason why an operator is refused: a code of ``reasons``, and the cause in words.

    ``accelerator`` entries synchronise with a device or allocate outside the capture; the CPU can replay the operator.
    ``eager`` entries take tensors and return tensors of known sizes: a region may call them between two segments.
    """

    code: str
    why: str
    accelerator: bool = False
    eager: bool = False


_NAMES: dict[Entry | None, str] = {
    Entry("host-read", "reads a value on the host"): """
        aten._local_scalar_dense aten.allclose aten.equal aten.is_nonzero aten.item aten.narrow.Tensor
        aten.tensor_split.tensor_indices_or_sections prims.item
    """,
    # measured: bounds are read, standard deviations are checked
    Entry("host-read", "checks its operands on the host", accelerator=True): """
        aten.linspace.Scalar_Tensor aten.linspace.Tensor_Scalar aten.linspace.Tensor_Tensor
        aten.logspace.Scalar_Tensor aten.logspace.Tensor_Scalar aten.logspace.Tensor_Tensor
        aten.normal.Tensor_Tensor aten.normal.float_Tensor
    """,
    # mixtures of experts: a product for each group of rows; the ends of groups are on the device
    Entry("host-read", "reads on the host where groups end"): """
        transformers.grouped_mm_fallback transformers.grouped_mm_fallback_backward
    """,
    # FORBIDDEN_CUDAGRAPH_OPS
    Entry("host-assert", "checks a number on the host"): """
        aten._assert_scalar aten._functional_assert_scalar aten._functional_sym_constrain_range
        aten._functional_sym_constrain_range_for_size aten.sym_constrain_range aten.sym_constrain_range_for_size
    """,
    Entry("dynamic-shape", "returns as many elements as the data says"): """
        aten._ctc_loss aten._unique aten._unique2 aten.argwhere aten.bincount aten.linalg_lstsq aten.masked_select
        aten.nonzero aten.nonzero_numpy aten.unique_consecutive aten.unique_dim aten.unique_dim_consecutive
        torchvision.nms
    """,
    # measured (as is mode, below), also for batches: the host checks results of the solver, or MAGMA allocates
    Entry("unsafe-operator", "waits for its solver on the host", accelerator=True, eager=True): """
        aten._linalg_check_errors aten._linalg_eigh aten._linalg_eigvals aten._linalg_svd aten.cholesky_inverse
        aten.cholesky_solve aten.linalg_cholesky aten.linalg_cond aten.linalg_eig aten.linalg_eigh aten.linalg_eigvals
        aten.linalg_inv aten.linalg_ldl_factor aten.linalg_ldl_factor_ex aten.linalg_ldl_solve aten.linalg_lu_factor
        aten.linalg_matrix_exp aten.linalg_matrix_rank aten.linalg_pinv aten.linalg_solve aten.linalg_svd
    """,
    Entry("unsafe-operator", "waits for the device on long rows", accelerator=True, eager=True): "aten.mode",
    Entry("unsafe-operator", "reads lengths on the host", accelerator=True): "aten._cudnn_ctc_loss",
    Entry("unsafe-operator", "keeps random state of its own", accelerator=True): "aten._cudnn_init_dropout_state",
    # FORBIDDEN_CUDAGRAPH_OPS
    Entry("unsafe-operator", "is on Inductor's list of operators unfit for CUDA graphs", accelerator=True): """
        aten._fused_moving_avg_obs_fq_helper aten._fused_moving_avg_obs_fq_helper_functional fbgemm.dense_to_jagged
        fbgemm.jagged_to_padded_dense
    """,
    Entry("storage-change", "changes the storage of a tensor"): """
        aten.resize_ aten.resize_as_ aten.set_ fsdp.all_gather_copy_in inductor.resize_storage_bytes_ prims.resize
    """,
    Entry("host-code", "acts on the host"): """
        aten._pin_memory aten._print aten.pin_memory debugprims.* inductor.accumulate_grad_ prims._make_token
        prims._sink_tokens profiler.*
    """,
    Entry("host-code", "calls a Python function"): "py.*",
    Entry("stream-operator", "belongs to streams"): "aten.record_stream streams.*",
    Entry("collective", "is a collective", eager=True): "_c10d_functional* _dtensor.*",
    Entry("collective", "is a collective on a process group itself"): "c10d*",
    Entry("collective", "uses memory of other processes"): "symm_mem.*",
    Entry("unsafe-operator", "reads sizes of nested tensors on the host", accelerator=True): "aten._nested_*",
    Entry("unsafe-operator", "works on sparse tensors"): "aten._sparse_* sparse.*",
    Entry("unsafe-operator", "makes sparse tensors"): "aten._to_sparse* aten.to_sparse*",
    Entry("control-flow", "chooses on the host which of its subgraphs runs, or how often"): """
        hop.map hop.map_impl hop.scan hop.switch hop.while_loop_stack_output
    """,
    Entry("rng-state", "saves or restores the random state on the host"): """
        hop.run_and_save_rng_state hop.run_dtensor_rng_op hop.run_with_rng_state
    """,
    Entry("host-code", "runs code on the host"): """
        hop.aoti_call_delegate hop.call_torchbind hop.executorch_call_delegate hop.inductor_compiled_code
        hop.invoke_leaf_function hop.print hop.trace_wrapped hop.with_effects
    """,
    # judged by the kernel, the operator (by name) or the subgraphs (by node) that they run
    None: """
        hop.associative_scan hop.auto_functionalized hop.auto_functionalized_v2 hop.cond hop.control_deps
        hop.flex_attention
        hop.flex_attention_backward hop.foreach_map hop.graphsafe_run_with_rng_state hop.hints_wrapper
        hop.inline_asm_elementwise hop.invoke_quant hop.invoke_quant_packed hop.invoke_subgraph hop.local_map_hop
        hop.out_dtype hop.run_const_graph hop.strict_mode hop.tag_activation_checkpoint
        hop.triton_kernel_wrapper_functional hop.triton_kernel_wrapper_mutation hop.while_loop hop.wrap
        hop.wrap_activation_checkpoint
        hop.wrap_with_autocast hop.wrap_with_set_grad_enabled
    """,
}
"""Names, or beginnings of names (``py.*``), for each reason."""

_KNOWN = {name: entry for entry, names in _NAMES.items() for name in names.split()}

_DROPOUT_PLACES: dict[str, int] = {
    "aten._cudnn_attention_backward": 13,
    "aten._cudnn_attention_forward": 9,
    "aten._efficient_attention_backward": 11,
    "aten._efficient_attention_forward": 8,
    "aten._flash_attention_backward": 10,
    "aten._flash_attention_forward": 7,
    "aten._scaled_dot_product_cudnn_attention": 5,
    "aten._scaled_dot_product_cudnn_attention_backward": 13,
    "aten._scaled_dot_product_efficient_attention": 5,
    "aten._scaled_dot_product_efficient_attention_backward": 9,
    "aten._scaled_dot_product_flash_attention": 3,
    "aten._scaled_dot_product_flash_attention.quantized": 6,
    "aten._scaled_dot_product_flash_attention_backward": 10,
    "aten._scaled_dot_product_fused_attention_overrideable": 4,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": 12,
}
"""Fused attention and its backward, with the index of ``dropout_p`` (schemas of torch 2.11 and 2.13, if they have the
operator)."""

_OWN_NAMESPACES = frozenset(
    {"aten", "hop", "inductor", "mkl", "mkldnn", "onednn", "prims", "py", "pygraph", "quantized", "sym"}
)
"""Namespaces of torch's own operators, of Python functions, and of operators of this package."""


@cache
def known_unsafe(op: str) -> Entry | None:
    """Reason why an operator is refused by name, or None. Unknown higher-order operators are refused."""
    base = base_name(op)
    if base.startswith("hop.") and base not in _KNOWN:
        return Entry("unknown-higher-order", "is a higher-order operator that is not known here")
    beginnings = (entry for name, entry in _KNOWN.items() if name.endswith("*") and op.startswith(name[:-1]))
    return _KNOWN.get(op) or _KNOWN.get(base) or next(beginnings, None)


def is_custom(op: str) -> bool:
    """True if an operator is not torch's own: its effects beyond its schema are unknown."""
    return op.partition(".")[0] not in _OWN_NAMESPACES


@cache
def dropout_place(op: str) -> int | None:
    """The index of ``dropout_p`` among the arguments of a fused attention operator; None for any other operator."""
    return _DROPOUT_PLACES.get(op, _DROPOUT_PLACES.get(base_name(op)))
