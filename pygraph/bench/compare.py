"""Comparison of a side with eager: its results are kept while it runs, and compared afterwards.

A difference is relative to the largest magnitude of the reference, tensor by tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pygraph.runtime.judge import distance

Results = Mapping[int, list[torch.Tensor]]
"""Tensors by the number of the call that returned them, from 1."""


def save(path: Path, results: Results) -> None:
    """Write ``results`` to a file atomically: a process that is killed meanwhile leaves no partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(results, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """The tensors and numbers in nested lists, tuples and mappings, in order; other objects are ignored."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (bool, int, float)):
        yield torch.tensor(result)
    elif isinstance(result, Mapping):
        for item in result.values():
            yield from tensors_of(item)
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_of(item)


def difference(reference: Results, other: Results) -> float | None:
    """The largest relative difference over all calls of the reference; infinite if results cannot be compared.

    That is the case if a call or a tensor is missing, sizes or dtypes differ, or NaNs or infinities are elsewhere.
    None if the reference has no numbers, so that equality would mean nothing.
    """
    if not any(tensor.numel() for tensors in reference.values() for tensor in tensors):
        return None
    apart = 0.0
    for call, expected in reference.items():
        found = other.get(call)
        if found is None or len(found) != len(expected):
            return math.inf
        apart = max((apart, *map(_apart, expected, found)))
    return apart


def _apart(reference: torch.Tensor, other: torch.Tensor) -> float:
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return math.inf
    if not reference.numel():
        return 0.0
    distant = distance(*(_real(tensor) for tensor in (reference, other)))
    if isinstance(distant, str):
        return math.inf
    return float(distant.apart.max()) / (float(distant.magnitude.max()) or 1.0)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as real floating-point numbers, also if it is integral or complex."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() else tensor.double()
