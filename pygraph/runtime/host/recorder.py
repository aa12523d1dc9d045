"""The state of one capture: address space, launches with their words, and the uses of each word's memory.

Each address is handed out only once, and has no memory behind it. Nothing executes during a capture, so no memory is
needed; an access by mistake faults. The recorder knows allocations and launches, not the meaning of operators.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import Allocation, AllocationKind, EagerCall, Launch, LaunchKind, TensorLayout, Use
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.provenance import here
from pygraph.runtime.tensors import extent

_ALIGNMENT = 64
"""Alignment of addresses, in bytes: that of the ordinary CPU allocator."""

_GUARD = 4096
"""Bytes between two allocations that belong to neither: an address just outside of one has no owner."""

_CHUNK = 1 << 30
"""Bytes of address space reserved at a time; more for a larger allocation."""


class Arena:
    """The address space of one capture, disjoint from that of every other arena that is open.

    ``chunks`` are the reserved ranges as (address, bytes), ``allocations`` those made so far, in order.
    ``by_storage`` maps the start address of a storage to its allocation. Closing the arena, or dropping its last
    reference, unmaps everything.
    """

    def __init__(self, native: ModuleType) -> None:
        self.chunks: list[tuple[int, int]] = []
        self.allocations: list[Allocation] = []
        self._native = native
        self._next = self._end = 0
        self.by_storage: dict[int, Allocation] = {}

    def __del__(self) -> None:
        if hasattr(self, "_native"):  # else ``__init__`` raised
            self.close()

    def close(self) -> None:
        """Release the address space. Tensors over it may live on, but their memory must not be accessed."""
        while self.chunks:
            self._native.unreserve(*self.chunks.pop())

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
        nbytes = TensorLayout(tuple(size), tuple(stride), dtype).nbytes
        front = offset * dtype.itemsize
        base = self._take(front + nbytes, front)
        allocation = Allocation(*key, base + front, nbytes, born)
        self.allocations.append(allocation)
        self.by_storage[base] = allocation
        layout = (list(size), list(stride), dtype, offset)
        tensor: torch.Tensor = self._native.tensor_at(allocation.address, front + nbytes, *layout)
        return tensor

    def _take(self, nbytes: int, front: int) -> int:
        """Start of ``nbytes`` new bytes; ``front`` bytes after it is a multiple of _ALIGNMENT."""
        pad = -front % _ALIGNMENT
        total = -(-(pad + nbytes + _GUARD) // _ALIGNMENT) * _ALIGNMENT
        if self._next + total > self._end:
            reserved = -(-(total + _GUARD) // _CHUNK) * _CHUNK
            try:
                address = self._native.reserve(reserved)
            except RuntimeError as error:
                raise CaptureError("no-address-space", str(error)) from error
            self.chunks.append((address, reserved))
            self._next, self._end = address + _GUARD, address + reserved
        start = self._next + pad
        self._next += total
        return start


OperatorLaunch = tuple[Any, list[bool], list[torch.Tensor | None]]
"""An operator: the native object with its arguments; for each tensor argument, true if its memory is patched; and for
each returned tensor, the memory to copy it to (None for an argument), or an empty list if nothing is copied."""


Payload = Kernel | OperatorLaunch | EagerCall
"""A launch's callee, for the native graph."""


class Owned(NamedTuple):
    """Memory of a tensor.

    Args:
        tensor: the tensor itself
        owner: its allocation; None: a tensor without addressable memory
        word: address in words of launches; 0 without elements, as for ``data_ptr()``
    """

    tensor: torch.Tensor
    owner: Allocation | None
    word: int


@dataclass(frozen=True, slots=True)
class Operand:
    """One word of a launch: the address of a tensor with the accesses to its memory, or a number."""

    tensor: torch.Tensor | None = None
    reads: bool = False
    writes: bool = False
    number: int = 0


class Recorder:
    """State of one capture, and the payload of its recording.

    ``payloads`` match ``launches``. ``arguments`` are stand-ins or Python values; ``exclusive`` are pairs of arguments
    of one operator, the first of which it writes: they must not overlap at replay, as they did not when recorded.
    ``constants`` are the tensors of the compiled module, by name; ``eager`` are the operators that each replay calls.
    """

    def __init__(
        self,
        native: ModuleType,
        arena: Arena,
        constants: Mapping[str, torch.Tensor],
        eager: Collection[str] = (),
    ) -> None:
        self.native = native
        self.eager = eager
        self.arena = arena
        self.arguments: tuple[Any, ...] = ()
        self.launches: list[Launch] = []
        self.payloads: list[Payload | None] = []
        self.exclusive: set[tuple[int, int]] = set()
        self.offset_sensitive: set[int] = set()
        self.constants = dict(sorted(constants.items()))
        self.constant_allocations: list[Allocation] = []
        self._names = {id(tensor): name for name, tensor in self.constants.items()}
        self._owned: dict[int, Owned] = {}
        self._pool = 0
        for index, tensor in enumerate(self.constants.values()):
            plain = native.is_plain(tensor)
            address, nbytes = (native.element_address(tensor), extent(tensor)) if plain else (0, 0)
            allocation = Allocation(AllocationKind.CONSTANT, index, address, nbytes)
            self.constant_allocations.append(allocation)
            if address:
                arena.by_storage[native.storage_base(tensor)] = allocation

    def part(self, launches: Sequence[int | None]) -> Recorder:
        """See ``Payload.part``."""
        made = copy.copy(self)
        made.payloads = [None if launch is None else self.payloads[launch] for launch in launches]
        return made

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over new memory of the region."""
        key = (AllocationKind.POOL, self._pool)
        self._pool += 1
        return self.arena.tensor(key, size, stride, dtype, born=len(self.launches))

    def owner(self, tensor: torch.Tensor) -> Allocation:
        """The allocation of ``tensor``; for constants that share a storage, any of them. Raises CaptureError if it is
        unknown, or if the tensor reaches beyond an argument, or beyond memory that was allocated here."""
        self.check_plain(tensor)
        allocation = self.arena.by_storage.get(self.native.storage_base(tensor))
        if allocation is None:
            raise CaptureError("unknown-memory", "a tensor that is no argument, no constant, nor allocated here")
        if allocation.kind is AllocationKind.CONSTANT or not tensor.numel():
            return allocation
        address = self.native.element_address(tensor)
        if not allocation.address <= address <= allocation.address + allocation.nbytes - extent(tensor):
            name = f"{allocation.kind.value} {allocation.index}"
            raise CaptureError("outside-allocation", f"a view reaches beyond the elements of {name}")
        return allocation

    def place(self, tensor: torch.Tensor) -> tuple[Allocation, int]:
        """See ``CaptureMemory.place``."""
        owner = self.owner(tensor)
        if owner.kind is AllocationKind.CONSTANT:
            raise CaptureError("unsupported-output", "a view of a constant")
        return owner, int(self.native.element_address(tensor)) - owner.address

    def check_plain(self, tensor: torch.Tensor) -> None:
        """Raise CaptureError unless ``tensor`` is an ordinary strided CPU tensor."""
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and self.native.is_plain(tensor):
            return
        if tensor.device.type != "cpu":
            raise CaptureError("foreign-device", f"a tensor on {tensor.device}")
        raise CaptureError("unsupported-tensor", f"{type(tensor).__name__}, layout {tensor.layout}")

    def opaque_name(self, tensor: torch.Tensor) -> str | None:
        """The name of a constant without addressable memory (packed weights), else None."""
        name = self._names.get(id(tensor))
        return None if name is None or tensor.device.type != "cpu" or self.native.is_plain(tensor) else name

    # -- launches ---------------------------------------------------------------------------------------------------

    def kernel(self, kernel: Kernel, args: Sequence[Any]) -> None:
        """Record one call of a fused kernel."""
        parameters = kernel.parameters
        if len(args) != len(parameters):
            raise CaptureError("unknown-kernel", f"{kernel.name} takes {len(parameters)} parameters, not {len(args)}")
        floats = parameters.count(Parameter.FLOAT)
        if floats > self.native.MAX_FLOATS or len(parameters) - floats > self.native.MAX_WORDS:
            raise CaptureError("too-many-parameters", f"{kernel.name} has {len(parameters)}")
        self.begin_call()
        operands = []
        for parameter, argument in zip(parameters, args, strict=True):
            if not parameter.is_pointer:
                operands.append(Operand(number=_value(parameter, argument)))
            elif isinstance(argument, torch.Tensor):
                operands.append(Operand(argument, True, parameter is Parameter.WRITE))
            else:
                raise CaptureError("unknown-kernel", f"{kernel.name} is given {type(argument).__name__} for an address")
        tensors = (operand.tensor for operand in operands)
        layouts = tuple(None if t is None else (tuple(t.size()), tuple(t.stride()), str(t.dtype)) for t in tensors)
        signature = (kernel.file, parameters, layouts)
        nondeterministic, code = kernel.nondeterministic, (kernel.file, tuple(each.name for each in parameters))
        self.launch(kernel, kernel.name, signature, operands, nondeterministic=nondeterministic, code=code)

    def begin_call(self) -> None:
        """Begin to record another call: tensors may have changed since the previous one."""
        self._owned.clear()

    def owned(self, tensor: torch.Tensor) -> Owned:
        """Memory of ``tensor``, cached for one call, which asks for it several times. Raises CaptureError as ``owner``
        does."""
        found = self._owned.get(id(tensor))
        if found is None:  # the entry keeps the tensor alive, so that no other one gets its id
            found = self._owned[id(tensor)] = self._look_up(tensor)
        return found

    def _look_up(self, tensor: torch.Tensor) -> Owned:
        if self.opaque_name(tensor) is not None:
            return Owned(tensor, None, 0)
        return Owned(tensor, self.owner(tensor), int(self.native.element_address(tensor)) if tensor.numel() else 0)

    def launch(
        self,
        payload: Payload,
        name: str,
        signature: Hashable,
        operands: Sequence[Operand],
        *,
        nondeterministic: bool,
        random: bool = False,
        code: Hashable = None,
        copies: bool = False,
        in_place: bool = False,
    ) -> None:
        """Record a launch that accesses only ``operands``. ``copies``: it copies bytes. ``in_place``: it computes all
        of its results before it writes any."""
        eager = payload if isinstance(payload, EagerCall) else None
        kind = LaunchKind.KERNEL if isinstance(payload, Kernel) else LaunchKind.OPERATOR
        kind = LaunchKind.EAGER if eager is not None else LaunchKind.MEMCPY if copies else kind
        words: list[int] = []
        uses: list[Use] = []
        given, written = set(), set()  # arguments
        for position, operand in enumerate(operands):
            _, owner, word = (None, None, operand.number) if operand.tensor is None else self.owned(operand.tensor)
            words.append(word)
            if operand.tensor is None or owner is None or word == 0:
                continue
            start, nbytes = 0, extent(operand.tensor)
            if owner.kind is AllocationKind.INPUT:
                if not copies:
                    start, nbytes = owner.address - word, owner.nbytes  # all: a caller may hold more than it passes
                given.add(owner.index)
                if operand.writes:
                    written.add(owner.index)
            uses.append(Use(position, start, nbytes, operand.reads, operand.writes))
        if kind in (LaunchKind.OPERATOR, LaunchKind.MEMCPY):
            # Operators behave differently if an argument that they write overlaps another argument.
            self.exclusive.update((w, other) for w in written for other in given if other != w)
        index, origin = len(self.launches), here()
        known = (index, kind, name, tuple(words), signature, tuple(uses), origin, random)
        kept = frozenset((AllocationKind.INPUT, index) for index in given - written) if in_place else frozenset()
        facts = Launch(*known, nondeterministic=nondeterministic, eager=eager, code=code, in_place=kept)
        self.launches.append(facts)
        self.payloads.append(payload)


def _value(parameter: Parameter, argument: Any) -> int:
    """The word for a Python number, converted as by Inductor's own binding."""
    if not isinstance(argument, (int, float)):
        raise CaptureError("unsupported-argument", f"a kernel is given {type(argument).__name__} for a number")
    if parameter is Parameter.FLOAT:
        return int.from_bytes(bytes(ctypes.c_float(argument)), sys.byteorder)
    if not isinstance(argument, int) or not -(1 << 63) <= argument < 1 << 63:
        raise CaptureError("unsupported-argument", f"a kernel is given {argument!r} for a 64-bit integer")
    return argument % (1 << 64)
