"""What one run of a region did, without keeping its tensors: structure and fingerprints of outputs and arguments.

Two outcomes are compared here; how the runs are made and in which order is ``comparison``'s subject.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph.runtime.tensors import bits, digest, extent, span

__all__ = ["Outcome", "difference", "moved_on", "observe", "results"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``structure`` and ``contents`` of each output, fingerprints of some arguments afterwards, and the state of the
    generator that the region draws from, if it does.

    The structure of an output tensor is its type, sizes, strides, dtype, device and whose memory it is: a byte of
    which argument, or which fresh storage and offset. ``gaps`` are fingerprints of what lies between the elements of
    an argument, for those with gaps: no run writes there, however little it repeats itself.
    """

    structure: tuple[Hashable, ...]
    contents: tuple[bytes, ...]
    arguments: dict[int, bytes]
    rng: torch.Tensor | None
    gaps: Mapping[int, bytes] = field(default_factory=dict)

    def equal(self, other: Outcome) -> list[bool]:
        """For each of ``results``, whether two runs of one structure left the same bits."""
        mine, theirs = (*self.contents, *self.arguments.values()), (*other.contents, *other.arguments.values())
        return [a == b for a, b in zip(mine, theirs, strict=True)]

    def name(self, index: int) -> str:
        """What one of ``results`` is called."""
        outputs = len(self.contents)
        return f"output {index}" if index < outputs else f"argument {list(self.arguments)[index - outputs]}"


def observe(outputs: Sequence[Any], args: Sequence[Any], watched: Collection[int], rng: torch.Tensor | None) -> Outcome:
    """The outcome of a run that returned ``outputs`` and left ``args``; ``watched`` arguments are fingerprinted."""
    contents = tuple(digest(out) if isinstance(out, torch.Tensor) else b"" for out in outputs)
    arguments = {position: digest(span(args[position])) for position in sorted(watched)}
    return Outcome(_structure(outputs, args), contents, arguments, rng, _gaps([(p, args[p]) for p in sorted(watched)]))


def results(outputs: Sequence[Any], args: Sequence[Any], watched: Collection[int]) -> list[Any]:
    """What a run left: its outputs, then the ``watched`` arguments by position."""
    return [*outputs, *(args[position] for position in sorted(watched))]


def difference(reference: Outcome, other: Outcome, *, values: bool = True) -> str | None:
    """The first thing in which two runs differ but for the random state, or None. Without ``values``: in structure."""
    if len(reference.structure) != len(other.structure):
        return f"{len(other.structure)} outputs instead of {len(reference.structure)}"
    for index, (expected, actual) in enumerate(zip(reference.structure, other.structure, strict=True)):
        if expected != actual:
            return f"output {index} is {actual} instead of {expected}"
        if values and reference.contents[index] != other.contents[index]:
            return f"output {index} has other values"
    for position, fingerprint in reference.arguments.items():
        if values and other.arguments[position] != fingerprint:
            return f"argument {position} has other values afterwards"
    for position, fingerprint in reference.gaps.items():
        if other.gaps[position] != fingerprint:
            return f"argument {position} has other bytes between its elements afterwards"
    return None


def moved_on(reference: Outcome, other: Outcome) -> str | None:
    """What is to be said where two runs left other random states: they drew otherwise, or somebody else did."""
    if reference.rng is None or other.rng is None or torch.equal(reference.rng, other.rng):
        return None
    return "the random state afterwards is another one"


def _gaps(watched: Sequence[tuple[int, torch.Tensor]]) -> dict[int, bytes]:
    """The bytes between the elements of each argument, but for elements of others that lie there."""
    found: dict[int, bytes] = {}
    for position, arg in watched:
        if extent(arg) <= arg.numel() * arg.element_size():
            continue
        data = span(arg).clone()
        for _, other in watched:
            _clear(data, arg.data_ptr(), other)
        found[position] = digest(data)
    return found


def _clear(data: torch.Tensor, low: int, arg: torch.Tensor) -> None:
    """Set the bytes of ``arg``'s elements to 0 in ``data``, a copy of those that lie from the address ``low`` on."""
    start, end = max(low, arg.data_ptr()), min(low + data.numel(), arg.data_ptr() + extent(arg))
    if data.device != arg.device or start >= end:
        return
    kept = torch.ones(extent(arg), dtype=torch.uint8, device=data.device)
    width = arg.element_size()
    size = [n if step else 1 for n, step in zip(arg.size(), arg.stride(), strict=True)]  # expanded: written once
    kept.as_strided((*size, width), (*(step * width for step in arg.stride()), 1)).zero_()
    data[start - low : end - low] *= kept[start - arg.data_ptr() : end - arg.data_ptr()]


def _structure(outputs: Sequence[Any], args: Sequence[Any]) -> tuple[Hashable, ...]:
    objects: dict[int, str] = {}
    for position, arg in enumerate(args):
        objects.setdefault(id(arg), f"argument {position} itself")
    extents = [(p, a.device, a.data_ptr(), a.data_ptr() + extent(a)) for p, a in enumerate(args) if _is_tensor(a)]
    storages: dict[int, int] = {}
    found: list[Hashable] = []
    for index, out in enumerate(outputs):
        if not _is_tensor(out):
            found.append(bits(out))
        elif id(out) in objects:
            found.append(objects[id(out)])
        else:
            objects[id(out)] = f"output {index} itself"
            found.append(_describe(index, out, extents, storages))
    return tuple(found)


def _describe(
    index: int, out: torch.Tensor, extents: list[tuple[int, torch.device, int, int]], storages: dict[int, int]
) -> Hashable:
    """Facts of a tensor that no argument and no earlier output is, and whose memory it lies in."""
    facts = (type(out).__name__, tuple(out.size()), out.stride(), str(out.dtype), str(out.device), out.is_inference())
    low = out.data_ptr()
    high = low + extent(out)
    for position, device, start, end in extents:
        if device == out.device and max(low, start) < min(high, end):
            return (*facts, f"a view of argument {position} at byte {low - start}")
    if low == high:
        return (*facts, "empty")
    owner = storages.setdefault(out.untyped_storage().data_ptr(), index)
    return (*facts, f"memory of output {owner} from element {out.storage_offset()}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
