"""Operators and kernels whose results vary for the same operands, and the memory of a program that they decide.

They add or store in any order. The list does not distinguish devices: an operator is on it if it is non-deterministic
on any device. ``judge`` has a tolerance only for results that they decide.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from pygraph.compat import OpOverload
from pygraph.program.program import Slot
from pygraph.program.recording import AllocationKind, Recording

_OPERATORS = re.compile(
    r"""aten::(?:
    # torch.use_deterministic_algorithms: "will act deterministically when mode=True"
    (_slow_conv2d|convolution|gather|index_select|replication_pad[123]d)_backward|
    (cudnn_|miopen_)?convolution|convolution(_backward)?_overrideable|
    cudnn_convolution_(add_)?relu|(cudnn|miopen)_convolution_transpose|miopen_depthwise_convolution|
    index_(add|copy|put|reduce)|_index_put_impl|_unsafe_index_put|_unsafe_masked_index_put_accumulate|
    put|scatter(_add|_reduce)?|
    # "will throw a RuntimeError when mode=True"
    bincount|cumsum|cumprod|histc|kthvalue|logcumsumexp|(nan)?median|max_unpool[23]d|nll_loss2d_forward|
    (adaptive_max_pool[23]d|avg_pool3d|fractional_max_pool[23]d|max_pool[23]d_with_indices)_backward|
    (grid_sampler_[23]d|nll_loss2d|reflection_pad[123]d|_adaptive_avg_pool[23]d)_backward|
    (upsample_(bicubic2d|bilinear2d|linear1d|trilinear3d)|_upsample_(bicubic|bilinear)2d_aa)_backward|
    _ctc_loss_backward|_cudnn_ctc_loss|
    # alertNotDeterministic in ATen, or a library's own documentation
    _cudnn_rnn(_backward)?|segment_reduce|_segment_reduce_backward|
    embedding_dense_backward|_embedding_bag(_dense|_per_sample_weights)?_backward|
    _(cudnn|efficient|flash)_attention_backward|
    _scaled_dot_product_(cudnn|efficient|flash|fused)_attention(_overrideable)?_backward|
    # measured on H200s: with one query and more than 64 keys, steps of a decoder differ, by no compiler as well
    _cudnn_attention_forward|_scaled_dot_product_cudnn_attention
    )|torchvision::(?:
    # alertNotDeterministic in torchvision
    _deform_conv2d|_(ps_)?roi_(align|pool)
    )_backward""",
    re.VERBOSE,
)
"""Names without overloads, and without the underscore at the end of one that works in place."""

_BITWISE = torch.Tag.nondeterministic_bitwise

_ASSIGNED = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)
"""Start of a kernel's definition in an Inductor program; the source is part of the definition."""

_ATOMIC = re.compile(r"\b(?:atomic_(?:add|add_vec|cas|xchg)|exclusive_scan_decoupled_lookback\w*)\s*[(<]")
"""Calls, in Triton and in C++, that add in the order in which threads arrive, or that can implement this."""


@functools.lru_cache(maxsize=1024)
def nondeterministic_operator(op: OpOverload) -> bool:
    """True if results of ``op`` may differ between runs, by its tag ``nondeterministic_bitwise`` or its name."""
    return _BITWISE in op.tags or _OPERATORS.fullmatch(str(op._schema.name).removesuffix("_")) is not None


@functools.lru_cache(maxsize=256)
def nondeterministic_kernels(source: str) -> frozenset[str]:
    """Names of the kernels in the file ``source``, a program emitted by Inductor, whose results may differ from run to
    run. Empty if the file cannot be read."""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return frozenset()
    found = list(_ASSIGNED.finditer(text))
    bounds = [*(match.start() for match in found), len(text)]
    return frozenset(
        match[1] for match, end in zip(found, bounds[1:], strict=True) if _ATOMIC.search(text, match.start(), end)
    )


def unrepeatable(recording: Recording, slots: Sequence[Slot]) -> frozenset[tuple[AllocationKind, int]]:
    """The allocations whose contents may differ each time: a launch that is known to be non-deterministic writes them,
    or one that reads from such an allocation, and so on, even if they are overwritten."""
    used: dict[int, list[Slot]] = {}
    for slot in slots:
        used.setdefault(slot.launch, []).append(slot)
    decided: set[tuple[AllocationKind, int]] = set()
    for launch in recording.launches:
        operands = used.get(launch.index, [])
        if launch.nondeterministic or any(launch.may_read(slot.word) and slot.key in decided for slot in operands):
            decided.update(slot.key for slot in operands if launch.may_write(slot.word, slot.key))
    return frozenset(decided)
