"""What both drivers ask of the values that a region returned while it was captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["repeated"]


def repeated(returned: Sequence[Any]) -> dict[int, int]:
    """Position of each tensor returned before ▸ where it was returned first."""
    first: dict[int, int] = {}
    positions = [(i, first.setdefault(id(v), i)) for i, v in enumerate(returned) if isinstance(v, torch.Tensor)]
    return {i: earlier for i, earlier in positions if i != earlier}
