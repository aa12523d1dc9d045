"""Which launches are known to come out otherwise each time, with the same operands: sums and stores in any order.

Results that none of them decides are held to their bits. The list is about operators, whatever the device: an operator
that repeats itself on one device is on it if it does not on another.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

from pygraph.compat import OpOverload

__all__ = ["nondeterministic_kernels", "nondeterministic_operator"]

_ATEN = (
    # torch.use_deterministic_algorithms: "will act deterministically when mode=True"
    "convolution",
    "convolution_backward",
    "convolution_overrideable",
    "convolution_backward_overrideable",
    "cudnn_convolution",
    "cudnn_convolution_add_relu",
    "cudnn_convolution_relu",
    "cudnn_convolution_transpose",
    "miopen_convolution",
    "miopen_convolution_transpose",
    "miopen_depthwise_convolution",
    "_slow_conv2d_backward",
    "gather_backward",
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce",
    "index_select_backward",
    "put",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "_index_put_impl",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    # "will throw a RuntimeError when mode=True"
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "bincount",
    "cumsum",
    "cumprod",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "histc",
    "kthvalue",
    "logcumsumexp",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "max_unpool2d",
    "max_unpool3d",
    "median",
    "nanmedian",
    "nll_loss2d_backward",
    "nll_loss2d_forward",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_ctc_loss_backward",
    "_cudnn_ctc_loss",
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward",
    # alertNotDeterministic in ATen, or a library's own documentation
    "embedding_dense_backward",
    "segment_reduce",
    "_cudnn_attention_backward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "_efficient_attention_backward",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward",
    "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_segment_reduce_backward",
)
_TORCHVISION = (
    # alertNotDeterministic in torchvision
    "_deform_conv2d_backward",
    "_ps_roi_align_backward",
    "_ps_roi_pool_backward",
    "_roi_align_backward",
    "_roi_pool_backward",
)
_OPERATORS = frozenset((*(f"aten::{name}" for name in _ATEN), *(f"torchvision::{name}" for name in _TORCHVISION)))
"""Names without overloads, and without the underscore at the end of one that works in place."""

_BITWISE = torch.Tag.nondeterministic_bitwise

_ASSIGNED = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
"""How a program of Inductor's begins to define a kernel, whose source is part of the definition."""

_ATOMIC = re.compile(r"\b(?:atomic_(?:add|add_vec|cas|xchg)|exclusive_scan_decoupled_lookback\w*)\s*[(<]")
"""Calls, in Triton and in C++, that add in the order in which threads arrive, or with which that can be written."""


def nondeterministic_operator(op: OpOverload) -> bool:
    """Whether results of ``op`` may differ from run to run: by its tag ``nondeterministic_bitwise``, or by name."""
    return _BITWISE in op.tags or str(op._schema.name).removesuffix("_") in _OPERATORS


@functools.lru_cache(maxsize=256)
def nondeterministic_kernels(source: str) -> frozenset[str]:
    """Those kernels of the program in the file ``source``, which Inductor emitted, whose results may differ from run to
    run, by their names there. None where the file cannot be read."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return frozenset()
    found = list(_ASSIGNED.finditer(text))
    bounds = [*(match.start() for match in found), len(text)]
    return frozenset(
        match[1] for match, end in zip(found, bounds[1:], strict=True) if _ATOMIC.search(text, match.start(), end)
    )
