"""The state of one capture: address space, launches with their words, and what each word's memory is used for.

Addresses are handed out once and never again, with nothing behind them. Nothing executes while capturing, so that no
byte is ever needed; an access by mistake faults. The recorder knows allocations and launches, not operators' meaning.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.provenance import here
from pygraph.runtime.recording import Allocation, AllocationKind, Launch, LaunchKind, Use

__all__ = ["ALIGNMENT", "Arena", "HostCapture", "Operand", "OperatorLaunch", "Recorder", "extent"]

ALIGNMENT = 64
"""Bytes that every address is a multiple of, as the ordinary CPU allocator's are."""

GUARD = 4096
"""Bytes that lie between two allocations and belong to neither: an address just outside of one is nobody's."""

CHUNK = 1 << 30
"""Bytes of address space reserved at a time; more for a larger allocation."""


def extent(size: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; sizes and strides in elements."""
    if any(n == 0 for n in size):
        return 0
    return (sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * itemsize


class Arena:
    """The address space of one capture, disjoint from that of every other arena that is open.

    ``allocations`` are in the order of allocation. Closing, or dropping the last reference, unmaps everything.
    """

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self._chunks: list[tuple[int, int]] = []
        self._next = self._end = 0
        self._by_base: dict[int, Allocation] = {}
        self.allocations: list[Allocation] = []

    def __del__(self) -> None:
        if hasattr(self, "_chunks"):  # an exception may have come before
            self.close()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The reserved ranges as (address, bytes)."""
        return tuple(self._chunks)

    def close(self) -> None:
        """Give the address space back. Tensors over it may live on, but not be touched."""
        while self._chunks:
            self._native.unreserve(*self._chunks.pop())

    def tensor(
        self,
        key: tuple[AllocationKind, int],
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        *,
        offset: int = 0,
        born: int = 0,
    ) -> torch.Tensor:
        """A tensor over a new allocation ``key``, whose storage begins ``offset`` elements before the allocation."""
        nbytes = extent(size, stride, dtype.itemsize)
        front = offset * dtype.itemsize
        base = self._take(front + nbytes, front)
        allocation = Allocation(*key, base + front, nbytes, born)
        self.allocations.append(allocation)
        self._by_base[base] = allocation
        tensor: torch.Tensor = self._native.tensor_at(
            allocation.address, front + nbytes, list(size), list(stride), dtype, offset
        )
        return tensor

    def owner(self, storage_base: int) -> Allocation | None:
        """The allocation whose storage begins at ``storage_base``."""
        return self._by_base.get(storage_base)

    def _take(self, nbytes: int, front: int) -> int:
        """The start of ``nbytes`` new bytes; ``front`` bytes behind it lies a multiple of ALIGNMENT."""
        pad = -front % ALIGNMENT
        total = -(-(pad + nbytes + GUARD) // ALIGNMENT) * ALIGNMENT
        if self._next + total > self._end:
            self._grow(total)
        start = self._next + pad
        self._next += total
        return start

    def _grow(self, least: int) -> None:
        nbytes = -(-(least + GUARD) // CHUNK) * CHUNK
        try:
            address = self._native.reserve(nbytes)
        except RuntimeError as error:
            raise CaptureError("no-address-space", str(error)) from error
        self._chunks.append((address, nbytes))
        self._next, self._end = address + GUARD, address + nbytes


@dataclass(frozen=True, slots=True)
class OperatorLaunch:
    """An operator: ``call`` is the native object with its arguments.

    ``moves`` tells for each tensor argument whether its memory is patched. ``results`` holds, for each tensor that
    the operator returns, the memory it is copied to (None for one that is an argument); empty when there is none.
    """

    call: Any
    moves: tuple[bool, ...]
    results: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class HostCapture:
    """``launches`` match those of the recording; ``arguments`` are the stand-ins, or the Python values themselves.

    ``written`` are the arguments that any launch writes; ``exclusive`` the pairs of a written argument and another
    that one operator is given, which must not overlap at replay, as they did not when recorded. ``same`` maps the
    position of an output to that of an earlier one which is the same object. ``constants`` keeps alive what the
    launches point into.
    """

    arena: Arena
    launches: tuple[Kernel | OperatorLaunch, ...]
    arguments: tuple[Any, ...]
    written: frozenset[int]
    exclusive: frozenset[tuple[int, int]]
    same: dict[int, int]
    constants: tuple[torch.Tensor, ...]

    @property
    def libraries(self) -> tuple[object, ...]:
        """The loaded libraries that the launches' code lies in."""
        return tuple(launch.library for launch in self.launches if isinstance(launch, Kernel))


_WORD_MASK = (1 << 64) - 1
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor among the words of a launch, and what happens to its memory. None: a word that is no address."""

    tensor: torch.Tensor | None
    reads: bool
    writes: bool


class Recorder:
    """The state of one capture. ``constants`` are the tensors of the compiled module, by name."""

    def __init__(self, native: ModuleType, arena: Arena, constants: Mapping[str, torch.Tensor]) -> None:
        self.native = native
        self.arena = arena
        self.launches: list[Launch] = []
        self.payloads: list[Kernel | OperatorLaunch] = []
        self.written: set[int] = set()
        self.exclusive: set[tuple[int, int]] = set()
        self.offset_sensitive: set[int] = set()
        self.constants = dict(sorted(constants.items()))
        self.constant_allocations: list[Allocation] = []
        self._constant_bases: dict[int, list[Allocation]] = {}
        self._names = {id(tensor): name for name, tensor in self.constants.items()}
        self._pool = 0
        for index, tensor in enumerate(self.constants.values()):
            self._add_constant(index, tensor)

    # -- memory -----------------------------------------------------------------------------------------------------

    def stand_in(self, index: int, argument: torch.Tensor) -> torch.Tensor:
        """A tensor that takes the place of argument ``index``: its layout, over addresses of its own."""
        key = (AllocationKind.INPUT, index)
        offset = int(argument.storage_offset())
        return self.arena.tensor(key, argument.size(), argument.stride(), argument.dtype, offset=offset)

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over new memory of the region."""
        key = (AllocationKind.POOL, self._pool)
        self._pool += 1
        return self.arena.tensor(key, size, stride, dtype, born=len(self.launches))

    def owner(self, tensor: torch.Tensor) -> Allocation:
        """Whose memory ``tensor`` shows. Raises CaptureError when that is not known, or it shows more than that."""
        self.check_plain(tensor)
        base, address = self.native.storage_base(tensor), self.native.element_address(tensor)
        allocation = self.arena.owner(base)
        if allocation is None:
            return self._constant_owner(base, address)
        end = address + self.native.extent(tensor)
        if tensor.numel() and not (allocation.address <= address and end <= allocation.address + allocation.nbytes):
            name = f"{allocation.kind.value} {allocation.index}"
            raise CaptureError("outside-allocation", f"a view reaches beyond the elements of {name}")
        return allocation

    def check_plain(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError unless ``tensor`` is an ordinary strided CPU tensor."""
        if tensor.device.type != "cpu":
            raise CaptureError("foreign-device", f"a tensor on {tensor.device}")
        if type(tensor) not in _TENSOR_TYPES or not self.native.is_plain(tensor):
            raise CaptureError("unsupported-tensor", f"{type(tensor).__name__}, layout {tensor.layout}")

    def opaque_name(self, tensor: torch.Tensor) -> str | None:
        """The name of a constant without addressable memory (packed weights), else None."""
        name = self._names.get(id(tensor))
        if name is None or tensor.device.type != "cpu" or self.native.is_plain(tensor):
            return None
        return name

    def _add_constant(self, index: int, tensor: torch.Tensor) -> None:
        address = nbytes = 0
        if tensor.device.type == "cpu" and self.native.is_plain(tensor):
            address, nbytes = self.native.element_address(tensor), self.native.extent(tensor)
        allocation = Allocation(AllocationKind.CONSTANT, index, address, nbytes)
        self.constant_allocations.append(allocation)
        if address:
            self._constant_bases.setdefault(self.native.storage_base(tensor), []).append(allocation)

    def _constant_owner(self, base: int, address: int) -> Allocation:
        candidates = self._constant_bases.get(base)
        if not candidates:
            raise CaptureError("unknown-memory", "a tensor that is no argument, no constant, and not allocated here")
        return next((a for a in candidates if a.covers(address)), candidates[0])

    # -- launches ---------------------------------------------------------------------------------------------------

    def kernel(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Record one call of a fused kernel."""
        parameters = kernel.parameters
        if len(args) != len(parameters):
            raise CaptureError("unknown-kernel", f"{kernel.name} takes {len(parameters)} parameters, not {len(args)}")
        floats = parameters.count(Parameter.FLOAT)
        if floats > self.native.MAX_FLOATS or len(parameters) - floats > self.native.MAX_WORDS:
            raise CaptureError("too-many-parameters", f"{kernel.name} has {len(parameters)}")
        operands = [_kernel_use(kernel, p, a) for p, a in zip(parameters, args, strict=True)]
        words = [
            self.word(u) if u.tensor is not None else _value(p, a)
            for u, p, a in zip(operands, parameters, args, strict=True)
        ]
        shapes = tuple(_layout(use.tensor) for use in operands)
        facts = (kernel.name, words, (kernel.identity, parameters, shapes), operands)
        self._launch(LaunchKind.KERNEL, *facts, nondeterministic=kernel.nondeterministic)
        self.payloads.append(kernel)

    def operator(
        self,
        name: str,
        operands: Sequence[Operand],
        signature: Hashable,
        launch: OperatorLaunch,
        *,
        random: bool,
        nondeterministic: bool,
    ) -> None:
        """Record one call of an operator, which does nothing besides what ``operands`` says."""
        words = [self.word(use) for use in operands]
        self._note_exclusive(operands)
        kind = LaunchKind.OPERATOR
        self._launch(kind, name, words, signature, operands, random=random, nondeterministic=nondeterministic)
        self.payloads.append(launch)

    def _note_exclusive(self, operands: Sequence[Operand]) -> None:
        """Operators look at whether what they write overlaps what else they are given, and then do another thing."""
        owners = [None if u.tensor is None or self.opaque_name(u.tensor) else self.owner(u.tensor) for u in operands]
        arguments = [
            (o.index, use.writes)
            for o, use in zip(owners, operands, strict=True)
            if o is not None and o.kind is AllocationKind.INPUT
        ]
        self.exclusive.update((w, i) for w, writes in arguments if writes for i, _ in arguments if i != w)

    def word(self, use: Operand) -> int:
        """The address that ``use`` bakes into its launch: 0 for no elements, as ``data_ptr()`` has it."""
        if use.tensor is None or self.opaque_name(use.tensor) is not None:
            return 0
        self.owner(use.tensor)
        return int(self.native.element_address(use.tensor)) if use.tensor.numel() else 0

    def _launch(
        self,
        kind: LaunchKind,
        name: str,
        words: Sequence[int],
        signature: Hashable,
        operands: Sequence[Operand],
        *,
        random: bool = False,
        nondeterministic: bool = False,
    ) -> None:
        used = tuple(a for a in map(self._use, range(len(words)), words, operands) if a is not None)
        index, origin = len(self.launches), here()
        launch = Launch(index, kind, name, tuple(words), signature, used, origin, random)
        self.launches.append(replace(launch, nondeterministic=nondeterministic))

    def _use(self, position: int, word: int, use: Operand) -> Use | None:
        """What is accessed through one word. Of an argument, all of it: its caller may hold more than is passed."""
        if use.tensor is None or word == 0:
            return None
        owner = self.owner(use.tensor)
        if use.writes and owner.kind is AllocationKind.INPUT:
            self.written.add(owner.index)
        if owner.kind is AllocationKind.INPUT:
            return Use(position, owner.address - word, owner.nbytes, use.reads, use.writes)
        return Use(position, 0, self.native.extent(use.tensor), use.reads, use.writes)


def _kernel_use(kernel: Kernel, parameter: Parameter, argument: Any) -> Operand:
    if not parameter.is_pointer:
        return Operand(None, reads=False, writes=False)
    if not isinstance(argument, torch.Tensor):
        raise CaptureError("unknown-kernel", f"{kernel.name} is given {type(argument).__name__} for an address")
    return Operand(argument, reads=True, writes=parameter is Parameter.WRITE)


def _value(parameter: Parameter, argument: Any) -> int:
    """The word that a Python number is passed as, converted as Inductor's own binding does."""
    if not isinstance(argument, (int, float)):
        raise CaptureError("unsupported-argument", f"a kernel is given {type(argument).__name__} for a number")
    if parameter is Parameter.FLOAT:
        return int.from_bytes(bytes(ctypes.c_float(argument)), sys.byteorder)
    if not isinstance(argument, int) or not -(1 << 63) <= argument < 1 << 63:
        raise CaptureError("unsupported-argument", f"a kernel is given {argument!r} for a 64-bit integer")
    return argument & _WORD_MASK


def _layout(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.size()), tuple(tensor.stride()), str(tensor.dtype))
