"""What may differ from run to run, and by how much.

Some operators and kernels are known to give other results each time for the same operands: they add or store in any
order. Only results that such a launch decides have a tolerance; all others are compared by their bits. The list is
about operators, whatever the device: an operator is on it if it is non-deterministic on any device.

A replay must be no further from an uncaptured run than uncaptured runs are from one another. That is judged block by
block: a block is up to BLOCK neighbours in a row, so that a large row does not hide a small one. In a block, an element
of the replay may be off by

    FACTOR · spread + min(TERMS · eps, COARSE) · magnitude

``spread`` is the largest difference between the reference and other uncaptured runs, ``magnitude`` the largest
magnitude of the reference, both within the block. One element alone has no spread to rely on: a sum of few terms comes
out alike in three runs by chance. Its neighbours are sums like it, and stand in for runs that were not made.

Where that is not enough, what an uncaptured run does to those before it, a replay may do, too (``Surprise``). A float32
gradient that was rounded to bfloat16 on its way is an example: one sum of a million falls on the other side, another
one in each run, by 2**-8 of its magnitude, where no other run shows a difference.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pygraph.compat import OpOverload
from pygraph.program.program import Slot
from pygraph.program.recording import AllocationKind, Recording

__all__ = [
    "RUNS",
    "Distance",
    "Surprise",
    "distance",
    "nondeterministic_kernels",
    "nondeterministic_operator",
    "too_far",
    "unrepeatable",
]

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
"""How a program of Inductor's begins to define a kernel, whose source is part of the definition."""

_ATOMIC = re.compile(r"\b(?:atomic_(?:add|add_vec|cas|xchg)|exclusive_scan_decoupled_lookback\w*)\s*[(<]")
"""Calls, in Triton and in C++, that add in the order in which threads arrive, or with which that can be written."""


def nondeterministic_operator(op: OpOverload) -> bool:
    """Whether results of ``op`` may differ from run to run: by its tag ``nondeterministic_bitwise``, or by name."""
    return _BITWISE in op.tags or _OPERATORS.fullmatch(str(op._schema.name).removesuffix("_")) is not None


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


def unrepeatable(recording: Recording, slots: Sequence[Slot]) -> frozenset[tuple[AllocationKind, int]]:
    """The allocations that may come out otherwise each time: a launch that is known to be non-deterministic writes
    them, or one that reads what such a launch wrote, and so on, also where they are overwritten."""
    used: dict[int, list[Slot]] = {}
    for slot in slots:
        used.setdefault(slot.launch, []).append(slot)
    decided: set[tuple[AllocationKind, int]] = set()
    for launch in recording.launches:
        operands = used.get(launch.index, [])
        if launch.nondeterministic or any(launch.may_read(slot.word) and slot.key in decided for slot in operands):
            decided.update(slot.key for slot in operands if launch.may_write(slot.word, slot.key))
    return frozenset(decided)


# -- how far results may lie apart --------------------------------------------------------------------------------

BLOCK = 32
"""Neighbours that share a spread, at most. Blocks end with their row."""

SHORT = 8
"""Rows with fewer elements are not told apart: too few stand in for one another, and of a million rows some would be
refused."""

TERMS = 64
"""What is allowed in any case, in units of eps: re-ordered additions of n terms differ by about sqrt(n) · eps of the
largest partial sum, and 64 allows some 4,000 terms. The largest result of a block stands in for that sum."""

COARSE = 2.0**-5
"""No more than this part, or one eps if that is more, is allowed in any case. In bfloat16, 64 · eps is a half, and
hardly anything would be wrong; nobody keeps long sums in types as coarse."""

RARE = 1 / 16
"""Part of the blocks of a result that may be a surprise, so that one of fewer blocks has none."""

RUNS = (3, 9)
"""How many more times a region that does not repeat itself runs uncaptured: so many at first, and so many more where
the replay is not within the spread of those."""

FACTOR = 4
"""How many times as far from the reference as the furthest of the other uncaptured runs a right replay may lie.

A right replay and the others are drawn alike. For one element with normal errors, with nothing allowed in any case, 4
refuses a right replay with a chance of 0.8 % after 3 runs, and of 5 in a million after 12, while what is wrong stays
outside, however often the region runs. Neighbours make that rarer still: of 2000 simulated sums of 200 bfloat16 numbers
in random order, each a tensor by itself, 8 were refused after 3 runs, and none after 12.
"""

_CHUNK = 1 << 22
"""Elements that are compared at a time, whole blocks: comparing takes memory of its own, several times theirs."""


@dataclass(frozen=True, slots=True)
class Surprise:
    """How far one run lies outside of what others allow, in results of one type: in how many ``blocks``, and by what
    ``part`` of their magnitudes at most."""

    blocks: int = 0
    part: float = 0.0

    def __add__(self, other: Surprise) -> Surprise:
        """Of two results together."""
        return Surprise(self.blocks + other.blocks, max(self.part, other.part))

    def covers(self, other: Surprise, dtype: torch.dtype) -> bool:
        """Whether what this uncaptured run does allows what a replay (``other``) does."""
        part = min(FACTOR * self.part, COARSE - TERMS * torch.finfo(dtype).eps)
        return other.blocks <= FACTOR * self.blocks and other.part <= part


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors lie apart: the largest absolute difference (``apart``) and the largest finite magnitude of
    the first of them (``magnitude``) in each block, in float64. Rows have ``width`` elements, and blocks go by rows."""

    apart: torch.Tensor
    magnitude: torch.Tensor
    width: int

    def widened(self, other: Distance | None) -> Distance:
        """This distance with at least the differences of ``other`` from the same reference."""
        return self if other is None else replace(self, apart=torch.maximum(self.apart, other.apart))

    def allowed(self, spread: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How far another may lie from the same reference, in each block, where others are ``spread`` apart."""
        eps = torch.finfo(dtype).eps
        return FACTOR * spread + min(TERMS * eps, max(eps, COARSE)) * self.magnitude

    def surprise(self, spread: Distance, dtype: torch.dtype) -> Surprise | None:
        """How far the run of this distance lies outside of what the ``spread`` of others allows; None where it does so
        in too many blocks for a surprise."""
        if not self.apart.numel():
            return Surprise()
        excess = self.apart - self.allowed(spread.apart, dtype)
        parts = (excess / self.magnitude)[excess > 0]
        return Surprise(len(parts), max(parts.tolist(), default=0.0)) if len(parts) <= RARE * len(excess) else None

    def start(self, block: int) -> int:
        """The element that a block begins at."""
        row, column = divmod(block, -(-self.width // BLOCK))
        return row * self.width + column * BLOCK


def too_far(reference: torch.Tensor, other: torch.Tensor, spread: Distance | None) -> str | None:
    """Where and by how much a result of a replay (``other``) lies further from the reference's than the ``spread`` of
    uncaptured runs allows, if it does; None: these agree bit for bit."""
    found = distance(reference, other)
    if isinstance(found, str):
        return found
    if not found.apart.numel():
        return None
    apart = torch.zeros_like(found.apart) if spread is None else spread.apart
    allowed = found.allowed(apart, reference.dtype)
    excess = found.apart - allowed
    at = int(excess.argmax())
    if float(excess[at]) <= 0:
        return None
    off, limit, runs = (float(each[at]) for each in (found.apart, allowed, apart))
    where = f"within {BLOCK} elements from {found.start(at)} on"
    return f"is off by {off:.2e} {where}, allowed are {limit:.2e} (uncaptured runs are {runs:.2e} apart)"


def distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    """How far two tensors of one shape lie apart, or what no tolerance is for: integers and booleans that differ, a NaN
    or an infinity that only one of them has at its place, types without arithmetic. Any NaN equals any other."""
    try:
        return _distance(reference, other)
    except NotImplementedError:
        return "holds other values, of a type that has no arithmetic"


def _distance(reference: torch.Tensor, other: torch.Tensor) -> Distance | str:
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return "has another shape or dtype"
    nothing = reference.new_zeros(0, dtype=torch.float64)
    found: list[tuple[torch.Tensor, ...] | None] = [(nothing, nothing)]
    if reference.is_floating_point() or reference.is_complex():
        found += map(_of_block, _pieces(reference), _pieces(other))
    elif not torch.equal(reference, other):
        return "holds other integers"
    if None in found:
        return "has a NaN or an infinity at another place"
    apart, magnitude = map(torch.cat, zip(*filter(None, found), strict=True))
    return Distance(apart, magnitude, _width(reference))


def _width(tensor: torch.Tensor) -> int:
    """Elements in a row."""
    last = int(tensor.shape[-1]) if tensor.dim() else 1
    return last if last >= SHORT else tensor.numel()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of ``tensor`` by rows, as many at a time as _CHUNK allows. No block reaches into two pieces."""
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(-1, _width(tensor))
    for some in rows.split(max(1, _CHUNK // rows.shape[1])):
        yield from some.split(_CHUNK, 1)


def _of_block(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The largest difference and magnitude in each block of two pieces; None where they are finite at different places,
    or infinite in different ways."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    expected, actual = reference.to(wide), other.to(wide)
    finite = torch.isfinite(expected) & torch.isfinite(actual)
    alike = (torch.isnan(expected) & torch.isnan(actual)) | (expected == actual)
    if not bool((finite | alike).all()):
        return None
    nothing = torch.zeros((), dtype=torch.float64, device=expected.device)
    return tuple(_by_block(torch.where(finite, each.abs(), nothing)) for each in (expected - actual, expected))


def _by_block(rows: torch.Tensor) -> torch.Tensor:
    """The maximum of each block of non-negative numbers."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK))
    return padded.view(rows.shape[0], -1, BLOCK).amax(-1).reshape(-1)
