"""Operators that legality knows by name, and why each of them cannot be captured. Names as in ``.pgir`` text.

A name without an overload (``aten.nonzero``) stands for all of them.

Sources: ``FORBIDDEN_CUDAGRAPH_OPS`` and ``is_cudagraph_unsafe_fx_node`` of ``torch/_inductor/utils.py`` (torch 2.11 and
2.13 agree), torch's tags, and a run of each operator of aten on one H200 (torch 2.11, CUDA 13.0) with
``torch.cuda.set_sync_debug_mode("error")`` and then inside ``torch.cuda.graph``; what failed there is marked measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pygraph.ir import base_name

__all__ = ["Entry", "dropout_place", "higher_order", "is_custom", "known_unsafe"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Why an operator is refused: a code of ``reasons``, the cause in words, and whether only off the host.

    ``accelerator`` entries synchronise with a device or allocate behind its back; the CPU can replay the operator.
    """

    code: str
    why: str
    accelerator: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _entries(names: str, entry: Entry) -> dict[str, Entry]:
    return dict.fromkeys(names.split(), entry)


_UNSAFE: dict[str, Entry] = {
    **_entries(
        """
        aten._local_scalar_dense aten.allclose aten.equal aten.is_nonzero aten.item aten.narrow.Tensor
        aten.tensor_split.tensor_indices_or_sections prims.item
        """,
        Entry("host-read", "reads a value on the host"),
    ),
    # measured: bounds are read, standard deviations are checked
    **_entries(
        """
        aten.linspace.Scalar_Tensor aten.linspace.Tensor_Scalar aten.linspace.Tensor_Tensor
        aten.logspace.Scalar_Tensor aten.logspace.Tensor_Scalar aten.logspace.Tensor_Tensor
        aten.normal.Tensor_Tensor aten.normal.float_Tensor
        """,
        Entry("host-read", "checks its operands on the host", accelerator=True),
    ),
    # mixtures of experts: a product for each group of rows, whose ends lie on the device
    **_entries(
        "transformers.grouped_mm_fallback transformers.grouped_mm_fallback_backward",
        Entry("host-read", "reads on the host where groups end"),
    ),
    # FORBIDDEN_CUDAGRAPH_OPS
    **_entries(
        """
        aten._assert_scalar aten._functional_assert_scalar aten._functional_sym_constrain_range
        aten._functional_sym_constrain_range_for_size aten.sym_constrain_range aten.sym_constrain_range_for_size
        """,
        Entry("host-assert", "checks a number on the host"),
    ),
    **_entries(
        """
        aten._ctc_loss aten._unique aten._unique2 aten.argwhere aten.bincount aten.linalg_lstsq aten.masked_select
        aten.nonzero aten.nonzero_numpy aten.unique_consecutive aten.unique_dim aten.unique_dim_consecutive
        torchvision.nms
        """,
        Entry("dynamic-shape", "returns as many elements as the data says"),
    ),
    # measured, batches included: results of the solver are checked on the host, or MAGMA allocates
    **_entries(
        """
        aten._linalg_check_errors aten._linalg_eigh aten._linalg_eigvals aten._linalg_svd aten.cholesky_inverse
        aten.cholesky_solve aten.linalg_cholesky aten.linalg_cond aten.linalg_eig aten.linalg_eigh aten.linalg_eigvals
        aten.linalg_inv aten.linalg_ldl_factor aten.linalg_ldl_factor_ex aten.linalg_ldl_solve aten.linalg_lu_factor
        aten.linalg_matrix_exp aten.linalg_matrix_rank aten.linalg_pinv aten.linalg_solve aten.linalg_svd
        """,
        Entry("unsafe-operator", "waits for its solver on the host", accelerator=True),
    ),
    "aten.mode": Entry("unsafe-operator", "waits for the device on long rows", accelerator=True),  # measured
    "aten._cudnn_ctc_loss": Entry("unsafe-operator", "reads lengths on the host", accelerator=True),
    "aten._cudnn_init_dropout_state": Entry("unsafe-operator", "keeps random state of its own", accelerator=True),
    # FORBIDDEN_CUDAGRAPH_OPS
    **_entries(
        """
        aten._fused_moving_avg_obs_fq_helper aten._fused_moving_avg_obs_fq_helper_functional fbgemm.dense_to_jagged
        fbgemm.jagged_to_padded_dense
        """,
        Entry("unsafe-operator", "is on Inductor's list of operators unfit for CUDA graphs", accelerator=True),
    ),
    **_entries(
        """
        aten.resize_ aten.resize_as_ aten.set_ fsdp.all_gather_copy_in inductor.resize_storage_bytes_ prims.resize
        """,
        Entry("storage-change", "changes the storage of a tensor"),
    ),
    **_entries(
        """
        aten._pin_memory aten._print aten.pin_memory inductor.accumulate_grad_ prims._make_token prims._sink_tokens
        """,
        Entry("host-code", "acts on the host"),
    ),
    "aten.record_stream": Entry("stream-operator", "belongs to streams"),
}

_UNSAFE_PREFIXES: tuple[tuple[str, Entry], ...] = (
    ("_c10d_functional", Entry("collective", "is a collective")),
    ("_dtensor.", Entry("collective", "is a collective")),
    ("c10d", Entry("collective", "is a collective")),
    ("symm_mem.", Entry("collective", "uses memory of other processes")),
    ("streams.", Entry("stream-operator", "belongs to streams")),
    ("profiler.", Entry("host-code", "acts on the host")),
    ("debugprims.", Entry("host-code", "acts on the host")),
    ("py.", Entry("host-code", "calls a Python function")),
    ("aten._nested_", Entry("unsafe-operator", "reads sizes of nested tensors on the host", accelerator=True)),
    ("aten._sparse_", Entry("unsafe-operator", "works on sparse tensors")),
    ("aten._to_sparse", Entry("unsafe-operator", "makes sparse tensors")),
    ("aten.to_sparse", Entry("unsafe-operator", "makes sparse tensors")),
    ("sparse.", Entry("unsafe-operator", "works on sparse tensors")),
)

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
"""Fused attention and its backward, with the place of ``dropout_p`` (schemas of torch 2.11 and 2.13, where they have
the operator)."""

_HIGHER_ORDER: dict[str, Entry] = {
    **_entries(
        "cond map map_impl scan switch while_loop while_loop_stack_output",
        Entry("control-flow", "chooses on the host which of its subgraphs runs, or how often"),
    ),
    **_entries(
        "run_and_save_rng_state run_dtensor_rng_op run_with_rng_state",
        Entry("rng-state", "saves or restores the random state on the host"),
    ),
    **_entries(
        """
        aoti_call_delegate call_torchbind executorch_call_delegate inductor_compiled_code invoke_leaf_function print
        trace_wrapped with_effects
        """,
        Entry("host-code", "runs code on the host"),
    ),
}

_RUNS_ITS_OPERANDS = _names(
    """
    associative_scan auto_functionalized auto_functionalized_v2 control_deps flex_attention flex_attention_backward
    foreach_map graphsafe_run_with_rng_state hints_wrapper inline_asm_elementwise invoke_quant invoke_quant_packed
    invoke_subgraph local_map_hop out_dtype run_const_graph strict_mode tag_activation_checkpoint
    triton_kernel_wrapper_functional triton_kernel_wrapper_mutation wrap wrap_activation_checkpoint wrap_with_autocast
    wrap_with_set_grad_enabled
    """
)
"""Higher-order operators that are judged by what they run: a kernel, an operator (by name), or subgraphs (by node)."""

_OWN_NAMESPACES = frozenset(
    {"aten", "hop", "inductor", "mkl", "mkldnn", "onednn", "prims", "py", "pygraph", "quantized", "sym"}
)
"""Where torch's own operators are, Python functions, and those of this package."""

_UNKNOWN_HIGHER_ORDER = Entry("unknown-higher-order", "is a higher-order operator that is not known here")


@cache
def known_unsafe(op: str) -> Entry | None:
    """The entry of an operator that is known by name, or None."""
    found = _UNSAFE.get(op) or _UNSAFE.get(base_name(op))
    if found is not None:
        return found
    return next((entry for prefix, entry in _UNSAFE_PREFIXES if op.startswith(prefix)), None)


def is_custom(op: str) -> bool:
    """Whether an operator is of somebody else's than torch's: what it does besides its schema is not known."""
    return op.partition(".")[0] not in _OWN_NAMESPACES


@cache
def dropout_place(op: str) -> int | None:
    """The place of ``dropout_p`` among the arguments of a fused attention operator; None for any other operator."""
    return _DROPOUT_PLACES.get(op, _DROPOUT_PLACES.get(base_name(op)))


def higher_order(op: str) -> Entry | None:
    """Why a higher-order operator (``hop.…``) is refused, or None where it depends on what it runs."""
    name = base_name(op).removeprefix("hop.")
    return None if name in _RUNS_ITS_OPERANDS else _HIGHER_ORDER.get(name, _UNKNOWN_HIGHER_ORDER)
