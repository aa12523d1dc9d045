"""Which operators only make another view of memory, and which hide that they do.

Schemas tell most of it; here is what they leave out. Kept apart because effects and costs both ask.
"""

from __future__ import annotations

__all__ = ["HIDDEN_VIEWS", "VIEWS"]

_ATEN_VIEWS = (
    "_conj _neg_view _reshape_alias _unsafe_view alias as_strided chunk detach diagonal expand expand_as lift_fresh "
    "movedim narrow permute real imag select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split "
    "transpose mT mH adjoint unbind unfold unflatten unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze "
    "view view_as view_as_complex view_as_real hsplit vsplit dsplit"
)
_PRIMS_VIEWS = "broadcast_in_dim collapse_view split_dim squeeze transpose view_of view_of_dtype"

VIEWS: frozenset[str] = frozenset(
    [f"aten.{name}" for name in _ATEN_VIEWS.split()] + [f"prims.{name}" for name in _PRIMS_VIEWS.split()]
)
"""Operators that always return a view and never read memory."""

HIDDEN_VIEWS: frozenset[str] = frozenset(
    {
        "aten._unsafe_view",
        "aten.dequantize",
        "aten.lift",
        "aten.set",
        "aten.unsafe_chunk",
        "aten.unsafe_split",
        "aten.unsafe_split_with_sizes",
        "inductor._reinterpret_tensor",
        "prims.inductor_force_stride_order",
    }
)
"""Operators that share memory with an operand, or may, although their schema says that they do not."""
