"""Records what a region launches: memory, the words of each launch, and what each word's memory is used for.

It knows allocations and launches, not operators' meaning (``operators``) nor how the region's calls arrive here
(``interception``).
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
from pygraph.runtime.host.arena import Arena
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.host.launches import OperatorLaunch
from pygraph.runtime.provenance import here
from pygraph.runtime.recording import Allocation, AllocationKind, Launch, LaunchKind, Use

__all__ = ["Operand", "Recorder"]

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
