"""How the bytes that a launch left differ from the tensor that they should be, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pygraph.runtime.nondeterminism import Distance, distance
from pygraph.runtime.stepped_memory import POISON
from pygraph.runtime.tensors import extent

__all__ = ["Mismatch", "dense", "mismatch", "shaped"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """``count`` of ``total`` elements differ, by at most ``largest`` where that can be said. ``unset``: all of them
    hold what memory holds that nobody wrote."""

    count: int
    total: int
    largest: float | None
    unset: bool

    def __str__(self) -> str:
        by = "" if self.largest is None else f", off by up to {self.largest:.3g}"
        return f"{self.count} of {self.total} elements with other bits{by}"


def mismatch(expected: torch.Tensor, data: torch.Tensor) -> Mismatch | None:
    """How ``data``, as many bytes as ``expected`` spans, differs from it in its elements; None where it does not.

    Gaps between elements do not count.
    """
    reference, actual = expected.detach(), shaped(data, expected)
    left, right = _element_bytes(reference), _element_bytes(actual)
    different = (left != right).any(1)
    count = int(different.sum())
    if not count:
        return None
    unset = bool((right[different] == POISON).all())
    apart = distance(reference, actual) if reference.is_floating_point() else None
    return Mismatch(count, different.numel(), apart.largest if isinstance(apart, Distance) else None, unset)


def shaped(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of ``data``, as many bytes as ``like`` spans, as a tensor of its dtype, sizes and strides."""
    return data.clone().view(like.dtype).as_strided(like.size(), like.stride(), 0)


def dense(tensor: torch.Tensor) -> int:
    """The bytes that ``tensor`` fills from its first one on without a gap; 0 where it has gaps."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes if nbytes == extent(tensor) else 0


def _element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), tensor.element_size())
