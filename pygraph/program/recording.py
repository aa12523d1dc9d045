"""One capture as plain data: launches with their raw parameter words, allocations and outputs.

Drivers produce it; ``slots`` compares two of them; ``layout`` places their intermediates. No torch, no driver calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

WORD = 8
"""Bytes in a parameter word: an address is always one aligned word."""

FUNCTIONAL_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor"})
"""Namespaces of collectives on tensors and the name of a group: called between segments, or captured."""

COLLECTIVES = FUNCTIONAL_COLLECTIVES | {"c10d", "symm_mem"}
"""Namespaces of operators that talk to other processes. None of them runs while a driver captures."""

WAIT = "_c10d_functional.wait_tensor"
"""Operator (without its overload) that waits for the collectives that fill a tensor."""

DRAWS_IF_CALLED = frozenset({"prims.inductor_random", "prims.inductor_randint"})
"""Operators (without overload) that draw from a generator only if called; kernels compute them from a seed."""

_RUNNING_STATISTICS = ("running_mean", "running_var")
_UNDECLARED_WRITES = {
    **{
        f"aten::{name}": _RUNNING_STATISTICS
        for name in (
            "_batch_norm_impl_index",
            "batch_norm",
            "batch_norm_gather_stats",
            "batch_norm_gather_stats_with_counts",
            "batch_norm_update_stats",
            "cudnn_batch_norm",
            "instance_norm",
            "miopen_batch_norm",
            "native_batch_norm",
        )
    },
    "aten::_cudnn_rnn_backward": ("reserve",),
    "aten::miopen_rnn_backward": ("reserve",),
    "onednn::qlinear_pointwise": ("other",),
}
"""Arguments that operators write, undeclared by their schemas."""

_COLLECTIVE_KERNELS = ("ncclDevKernel", "ncclKernel", "ncclSym", "nvshmem")
"""Parts of names of kernels that talk to other processes; libraries may launch them without an operator."""


def is_functional_collective(name: str) -> bool:
    """True if ``name`` is in a namespace of ``FUNCTIONAL_COLLECTIVES``."""
    return name.partition(".")[0] in FUNCTIONAL_COLLECTIVES


def is_written(schema: Any, argument: Any) -> bool:
    """True if an operator may write ``argument``, by its schema or undeclared."""
    declared = argument.alias_info is not None and argument.alias_info.is_write
    return declared or argument.name in _UNDECLARED_WRITES.get(schema.name, ())


def is_read(schema: Any, argument: Any) -> bool:
    """True if an operator may read ``argument``: false for ``out`` arguments of ATen, which it only writes."""
    return not (argument.is_out and schema.name.startswith("aten::"))


class AllocationKind(Enum):
    """Owner of the memory at an address."""

    INPUT = "input"  # a stand-in for one tensor argument; replaced by the caller's address at each replay
    POOL = "pool"  # allocated by the region while it was captured: an output or an intermediate
    CONSTANT = "constant"  # outlives the region and never moves: a constant of the compiled module

    __hash__ = object.__hash__  # Enum's own is Python code, and a capture hashes tens of thousands of keys


PREFIXES = {AllocationKind.INPUT: "arg", AllocationKind.POOL: "buf", AllocationKind.CONSTANT: "const"}
"""Prefixes of the names of allocations."""


def name_of(key: tuple[AllocationKind, int]) -> str:
    """``%arg0``, ``%buf3``, ``%const1``: the name of an allocation in texts and errors."""
    return f"%{PREFIXES[key[0]]}{key[1]}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One range of addresses. ``(kind, index)`` identifies it across captures; a capture never reuses addresses.

    ``index`` is the argument's position (INPUT), or the number among allocations of its kind. At least one byte lies
    between two allocations, so that an address one past the end belongs to no other one. ``address`` is the start of
    the data (the first element of an INPUT); ``born`` is the number of launches recorded before it.
    """

    kind: AllocationKind
    index: int
    address: int
    nbytes: int
    born: int = 0

    @property
    def key(self) -> tuple[AllocationKind, int]:
        """Name of this allocation, equal in all captures of a region."""
        return (self.kind, self.index)

    def covers(self, address: int) -> bool:
        """True if ``address`` lies inside (an empty allocation covers its own start)."""
        return self.address <= address < self.address + max(self.nbytes, 1)


class LaunchKind(Enum):
    """Operation that a launch performs."""

    KERNEL = "kernel"
    OPERATOR = "operator"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    EAGER = "eager"  # an operator that each replay calls, as in ``Launch.eager``
    WHILE = "while"  # runs its body repeatedly (``nested``)
    IF = "if"  # runs its first body, or the second, if there is one


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes accessed through one word: ``nbytes`` bytes from ``start`` on, relative to the word's address."""

    word: int
    start: int
    nbytes: int
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes ``start`` to ``end`` (excluded) of an allocation. With a ``period``, only the first
    ``width`` of every ``period`` bytes from ``start`` on: a slice of channels, if these come last."""

    start: int
    end: int
    period: int = 0
    width: int = 0

    @classmethod
    def of(cls, start: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> Bytes:
        """Bytes of a tensor's elements, the first of which is at ``start``."""
        if 0 in size:
            return cls(start, start)
        axes = sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1)
        width, period, inner = 1, 0, 0
        for place, (step, count) in enumerate(axes):
            if not period and step > width and all(further % step == 0 for further, _ in axes[place:]):
                period, inner = step, width
            width += (count - 1) * step
        return cls(start, start + width * itemsize, period * itemsize, inner * itemsize)

    def moved(self, distance: int) -> Bytes:
        """These bytes, ``distance`` further on."""
        return Bytes(self.start + distance, self.end + distance, self.period, self.width)

    def meets(self, other: Bytes) -> bool:
        """True if both may share a byte."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if not self.period or self.period != other.period:
            return True
        apart = (other.start - self.start) % self.period
        return apart < self.width or apart + other.width > self.period

    def covers(self, other: Bytes) -> bool:
        """True if these surely include each byte of ``other``."""
        return not self.period and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Access:
    """Access of a launch to bytes of an allocation.

    Args:
        key: the allocation
        bytes: superset of the accessed bytes
        writes: bytes may be written
        reads: bytes may be read; if false, each byte is written
    """

    key: tuple[AllocationKind, int]
    bytes: Bytes
    writes: bool
    reads: bool = True


class UnownedMemory(Enum):
    """Kind of memory at an address that no allocation of the capture covers."""

    STAND_IN = "stand-in"  # address space of another capture: mapped for the life of the process, without data
    BLOCK = "block"  # start of a block that the device's allocator has in use: a tensor of unknown owner
    WITHIN = "within"  # inside of such a block
    OTHER = "other"  # memory unknown to the allocator: a library's, or on the host


@dataclass(frozen=True, slots=True)
class UnownedAddress:
    """Word ``word`` of a launch reads as an address in ``memory`` without known owner; ``detail`` describes it."""

    word: int
    memory: UnownedMemory
    detail: str


_SHOWN = 3
"""Maximum number of the user's lines to show for one launch; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a launch in the user's program.

    Args:
        nodes: names of the compiled graph's operators that its line runs (one of them, if several are named)
        locs: the user's lines, if known
        modules: paths of the modules that contain the operators, or whose gradients they compute, if known
    """

    nodes: tuple[str, ...] = ()
    locs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    @property
    def loc(self) -> str | None:
        """The user's lines as one text, or None."""
        more = [f"and {len(self.locs) - _SHOWN} more"] if len(self.locs) > _SHOWN else []
        return ", ".join([*self.locs[:_SHOWN], *more]) or None


UNKNOWN = Origin()


@dataclass(frozen=True, slots=True)
class Geometry:
    """Threads and shared memory of a kernel launch.

    Args:
        grid: blocks along x, y and z
        block: threads of a block along x, y and z
        shared: dynamic shared memory of a block, bytes
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, operator, copy or fill in the order of capture.

    ``words`` are the parameters' raw words; ``signature`` is everything else that determines the launch, and must be
    equal in two captures. ``uses`` is exact if the driver knows it, else None: the launch may use all memory in reach.
    """

    index: int
    kind: LaunchKind
    name: str
    words: tuple[int, ...]
    signature: Hashable
    uses: tuple[Use, ...] | None = None
    origin: Origin = UNKNOWN
    random: bool = False
    """True if it draws from a generator: such launches keep their order among themselves."""
    read_only: frozenset[tuple[AllocationKind, int]] = frozenset()
    """Allocations that the launch surely does not write, if its uses are unknown."""
    call: str | None = None
    """Name of the call that it came from, if known."""
    group: int | None = None
    """Number of that call: a kernel may leave addresses in memory for the next kernel of its call."""
    may_access: frozenset[tuple[AllocationKind, int]] | None = None
    """Allocations to which the call is limited, if it is known to use only its operands and memory that it allocates.
    None: it may use any memory."""
    nondeterministic: bool = False
    """True if its results are known to vary between runs with equal operands."""
    unowned: tuple[UnownedAddress, ...] = ()
    """Words that read as addresses of memory without known owner, as looked up by the driver."""
    eager: EagerCall | None = None
    """The eager call, if each replay calls the operator."""
    operands: tuple[Access, ...] | None = None
    """Accesses of its call to the call's arguments, if the call affects nothing else but memory that it allocates.
    None: it may do anything."""
    geometry: Geometry | None = None
    """Threads and shared memory of a device kernel; None for any other launch."""
    code: Hashable = None
    """Identity of a kernel's code besides kind and name: equal for all launches, sizes and processes."""
    bodies: tuple[Any, ...] = ()
    """Programs that a loop or branch runs (``nested``)."""
    in_place: frozenset[tuple[AllocationKind, int]] = frozenset()
    """Arguments that it reads, and whose memory a result may take: it reads each byte for the last time before it
    writes that byte."""

    @property
    def count(self) -> int:
        """Number of launches that it represents: 1, or those of its bodies."""
        return sum(each.count for body in self.bodies for each in body.recording.launches) if self.bodies else 1

    @property
    def collective(self) -> bool:
        """True if it talks to other processes and is not an eager call."""
        if self.eager is not None:
            return False
        return self.name.partition(".")[0] in COLLECTIVES or any(part in self.name for part in _COLLECTIVE_KERNELS)

    @property
    def functional(self) -> bool:
        """True if it came from a functional collective, whose arguments are all known."""
        return self.call is not None and is_functional_collective(self.call)

    def may_read(self, word: int) -> bool:
        """True if it may read the memory that word ``word`` points into."""
        return self.uses is None or any(a.reads and a.word == word for a in self.uses)

    def may_write(self, word: int, owner: tuple[AllocationKind, int]) -> bool:
        """True if it may write the memory of ``owner`` that word ``word`` points into."""
        if self.uses is None:
            return owner not in self.read_only
        return any(a.writes and a.word == word for a in self.uses)

    def unowned_at(self, word: int) -> UnownedAddress | None:
        """The entry of ``unowned`` for word ``word``, or None."""
        return next((found for found in self.unowned if found.word == word), None)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Sizes and strides, in elements, and a torch.dtype."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, tensor: Any) -> TensorLayout:
        """Layout of ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to one past the last."""
        if 0 in self.size:
            return 0
        reach = 1
        for count, step in zip(self.size, self.stride, strict=True):
            reach += (count - 1) * step
        return reach * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class EagerOperand:
    """A tensor operand of an eager call: operand i is word i of its launch. ``argument``: position of the argument that
    is this very object; -1: none. ``like`` is the tensor itself if its memory belongs to no allocation."""

    layout: TensorLayout
    argument: int = -1
    like: Any = None


@dataclass(frozen=True, slots=True)
class EagerResult:
    """A tensor result of an eager call, ``offset`` bytes after the first element of operand ``operand``; ``itself``: it
    is that operand. Operand -1: memory of its own, to which the next word after those of the operands points."""

    layout: TensorLayout
    operand: int = -1
    offset: int = 0
    itself: bool = False


@dataclass(frozen=True, slots=True)
class EagerCall:
    """A call of an operator between two segments. ``call`` is the native OperatorCall, without tensors; ``leaves`` are
    the operands in place of these. ``returned`` is the structure of the returned value: nested lists of numbers of
    ``results``. ``drawn``: how far earlier launches advance the generator. ``group`` is the name of the process group
    of a collective."""

    name: str
    call: Any
    leaves: tuple[int, ...]
    operands: tuple[EagerOperand, ...]
    results: tuple[EagerResult, ...]
    returned: Any = None
    drawn: int = 0
    group: str | None = None


class OutputKind(Enum):
    """Source of a value that the region returns."""

    ARGUMENT = "argument"  # the very object passed at position ``index``
    VIEW = "view"  # a fresh view of the tensor argument ``index``
    FRESH = "fresh"  # memory of the POOL allocation ``index``; outputs of one allocation share a storage
    OBJECT = "object"  # ``value`` itself: a tensor of the compiled module, or a Python value fixed by the key
    SAME = "same"  # the very tensor that is returned at the earlier position ``index``


@dataclass(frozen=True, slots=True)
class Output:
    """One value returned by the region. ``offset``, sizes and strides are in elements; ``dtype`` is a torch.dtype."""

    kind: OutputKind
    index: int = -1
    offset: int = 0
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: object = None
    value: object = None


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call of a custom operator written in Python, whose body ran during the capture.

    ``calls`` are the ATen calls of the body, with all arguments except tensors. Their launches, the ranges
    ``explained``, hold no numbers but these arguments. ``nodes`` are as those of a Refusal.
    """

    name: str
    nodes: tuple[str, ...] = ()
    loc: str | None = None
    calls: tuple[str, ...] = ()
    explained: tuple[range, ...] = ()


class Payload(Protocol):
    """A driver's own handle on a recording."""

    def part(self, launches: Sequence[int | None]) -> Payload:
        """Payload of a recording of some of the launches, in their order; None for a launch with bodies."""


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop or branch. Each body was captured once, one after the other.

    Args:
        kind: WHILE, or IF
        decides: address of the deciding bytes (``nested``)
        bounds: number of the first launch of each body, then of the launch after the last body
        names: names of the bodies
    """

    kind: LaunchKind
    decides: int
    bounds: tuple[int, ...]
    names: tuple[str, ...]

    def moved(self, first: int) -> Nest:
        """This loop or branch, moved so that its first launch is number ``first``."""
        return replace(self, bounds=tuple(bound - self.bounds[0] + first for bound in self.bounds))


@dataclass(frozen=True, slots=True)
class Recording:
    """One capture. ``payload`` is the driver's own handle on it (not compared, freed with the recording)."""

    launches: tuple[Launch, ...]
    allocations: tuple[Allocation, ...]
    outputs: tuple[Output, ...]
    payload: Payload | None = None
    offset_sensitive: frozenset[int] = frozenset()
    """Arguments whose storage offset was baked into the capture, and must not change."""
    alignment: int = 64
    """Alignment of POOL addresses in bytes, also required at replay."""
    out_of_range_pointers: bool = False
    """True if launches may hold addresses outside of the allocation that they belong to (a kernel that starts before
    its tensor, in padding). Then no two allocations move by the same distance between two captures."""
    scratch: int = 0
    """An address in the middle of mapped memory without data; 0: none."""
    phases: tuple[int, ...] = ()
    """The phase of each launch, ascending from 0. All launches of a phase have completed before one of the next starts;
    those of one phase may run in parallel. Empty: each launch is a phase of its own."""
    python: tuple[PythonCall, ...] = ()
    """Calls of operators written in Python, in order. Replays do not run their bodies."""
    device: str = "cpu"
    """Type of the device of the capture."""
    nests: tuple[Nest, ...] = ()
    """Loops and branches whose bodies are among the launches; an inner one before the one around it."""

    def owner(self, output: Output) -> tuple[AllocationKind, int] | None:
        """Allocation of an output's memory; None unless it is the region's or an argument's."""
        if output.kind is OutputKind.SAME:
            return self.owner(self.outputs[output.index])
        if output.kind is OutputKind.OBJECT:
            return None
        return (AllocationKind.POOL if output.kind is OutputKind.FRESH else AllocationKind.INPUT, output.index)

    def calls(self) -> tuple[range, ...]:
        """For each launch, the range from the first to the last launch of its call, including calls inside it. A launch
        without a known call is a range of its own."""
        found: dict[int, range] = {}
        for launch in self.launches:
            if launch.group is not None:
                first = found.get(launch.group, range(launch.index, launch.index)).start
                found[launch.group] = range(first, launch.index + 1)
        return tuple(
            range(launch.index, launch.index + 1) if launch.group is None else found[launch.group]
            for launch in self.launches
        )
