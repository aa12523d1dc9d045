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
"""Namespaces of collectives that take tensors and the name of a group: called between segments, or captured."""

COLLECTIVES = FUNCTIONAL_COLLECTIVES | {"c10d", "symm_mem"}
"""Namespaces of operators that talk to other processes. None of them runs while a driver captures."""

WAIT = "_c10d_functional.wait_tensor"
"""The operator, without an overload, that waits for the collectives that fill a tensor."""

DRAWS_IF_CALLED = frozenset({"prims.inductor_random", "prims.inductor_randint"})
"""Operators, without an overload, that draw from a generator, though kernels compute their results from a seed."""

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
"""Arguments that operators write though their schemas do not say so."""

_COLLECTIVE_KERNELS = ("ncclDevKernel", "ncclKernel", "ncclSym", "nvshmem")
"""Parts of the names of kernels that do, which libraries may launch without any operator."""


def is_functional_collective(name: str) -> bool:
    """True if ``name`` is in a namespace of ``FUNCTIONAL_COLLECTIVES``."""
    return name.partition(".")[0] in FUNCTIONAL_COLLECTIVES


def is_written(schema: Any, argument: Any) -> bool:
    """True if an operator may write ``argument``, declared or not."""
    declared = argument.alias_info is not None and argument.alias_info.is_write
    return declared or argument.name in _UNDECLARED_WRITES.get(schema.name, ())


def is_read(schema: Any, argument: Any) -> bool:
    """True if an operator may read ``argument``: false for ``out`` arguments of ATen, which it only writes."""
    return not (argument.is_out and schema.name.startswith("aten::"))


class AllocationKind(Enum):
    """Who owns the memory behind an address."""

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
    """One range of addresses. ``(kind, index)`` names it across captures; addresses are never reused in a capture.

    ``index`` is the argument's position (INPUT), or the order among those of its kind. At least a byte lies between any
    two allocations, so that an address one past the end is nobody else's. ``address`` is where the data begins (of an
    INPUT, its first element); ``born`` is the number of launches recorded before it.
    """

    kind: AllocationKind
    index: int
    address: int
    nbytes: int
    born: int = 0

    @property
    def key(self) -> tuple[AllocationKind, int]:
        """The name that this allocation has in every capture of the same region."""
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
    EAGER = "eager"  # an operator that each replay calls anew: ``Launch.eager`` says how
    WHILE = "while"  # runs its body again and again (``nested``)
    IF = "if"  # runs its first body or the second one, if there is one


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes that one word's memory is accessed at: from ``start`` (relative to the word's address), ``nbytes`` long."""

    word: int
    start: int
    nbytes: int
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes ``start`` to ``end`` (excluded) of an allocation. With a ``period``, of every so many bytes from ``start``
    on the first ``width`` alone: a slice of channels, where these come last."""

    start: int
    end: int
    period: int = 0
    width: int = 0

    @classmethod
    def of(cls, start: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> Bytes:
        """Those of a tensor's elements, whose first is at ``start``."""
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
        """True if each byte of ``other`` is surely one of these."""
        return not self.period and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Access:
    """Access of a launch to bytes of an allocation.

    Args:
        key: the allocation
        bytes: those that are accessed, at most
        writes: they may be written
        reads: they may be read; if not, each is written
    """

    key: tuple[AllocationKind, int]
    bytes: Bytes
    writes: bool
    reads: bool = True


class UnownedMemory(Enum):
    """Where an address lies that is none of a capture's own."""

    STAND_IN = "stand-in"  # address space of another capture: mapped as long as the process lives, nothing behind it
    BLOCK = "block"  # where a piece of memory begins that the device's allocator has in use: a tensor of anybody's
    WITHIN = "within"  # inside of such a piece
    OTHER = "other"  # memory that the allocator knows nothing of: a library's, or on the host


@dataclass(frozen=True, slots=True)
class UnownedAddress:
    """Word ``word`` of a launch reads as an address in ``memory`` of nobody's; ``detail`` says which."""

    word: int
    memory: UnownedMemory
    detail: str


_SHOWN = 3
"""Lines of the user's that one launch is said to come from; more are counted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a launch comes from in the user's program.

    Args:
        nodes: the operators of the compiled graph that its line runs, by name (one of them, where several are named)
        locs: the user's lines, if known
        modules: the paths of the modules that they were written in, or whose gradient they compute, if known
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
    """How many threads a kernel is launched with.

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

    ``words`` are the parameters' raw words; ``signature`` is all else that decides what the launch does, and must be
    equal in two captures. ``uses`` is exact where the driver knows it, else None: it may use all that it can reach.
    """

    index: int
    kind: LaunchKind
    name: str
    words: tuple[int, ...]
    signature: Hashable
    uses: tuple[Use, ...] | None = None
    origin: Origin = UNKNOWN
    random: bool = False
    """Draws from a generator: such launches keep their order among themselves."""
    read_only: frozenset[tuple[AllocationKind, int]] = frozenset()
    """Allocations that the launch surely does not write, where its uses are unknown."""
    call: str | None = None
    """The call that it came from, if known."""
    group: int | None = None
    """The number of that call among all: a kernel may leave addresses in memory for the next one of its call."""
    may_access: frozenset[tuple[AllocationKind, int]] | None = None
    """Where the call is known to use nothing but what it was given and what it allocates: those allocations (it may
    use fewer). None: it may use anything."""
    nondeterministic: bool = False
    """Known to come out otherwise each time, with the same operands."""
    unowned: tuple[UnownedAddress, ...] = ()
    """Words that read as addresses of memory that is nobody's: the driver looked each of them up."""
    eager: EagerCall | None = None
    """How the operator is called, where each replay calls it."""
    operands: tuple[Access, ...] | None = None
    """Accesses of the call that it came from to its arguments, where that call has no other effect but on what it
    allocates. None: it may do anything."""
    geometry: Geometry | None = None
    """Of a device's kernel; None for all that is none."""
    code: Hashable = None
    """Beside kind and name, all of a kernel that is the same in each launch, at whatever sizes, in any process."""
    bodies: tuple[Any, ...] = ()
    """Of a loop or a branch: the programs that it runs (``nested``)."""
    in_place: frozenset[tuple[AllocationKind, int]] = frozenset()
    """Arguments that it reads, and whose bytes may be those of a result: what it needs of a byte, it reads before it
    writes that."""

    @property
    def count(self) -> int:
        """Launches that it stands for: itself, or those of its bodies."""
        return sum(each.count for body in self.bodies for each in body.recording.launches) if self.bodies else 1

    @property
    def collective(self) -> bool:
        """True if it talks to other processes and is not called anew by each replay."""
        if self.eager is not None:
            return False
        return self.name.partition(".")[0] in COLLECTIVES or any(part in self.name for part in _COLLECTIVE_KERNELS)

    @property
    def functional(self) -> bool:
        """True if it came from a functional collective, all of whose arguments are known."""
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
        """That of ``tensor``."""
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """From the first element to one past the last."""
        if 0 in self.size:
            return 0
        reach = 1
        for count, step in zip(self.size, self.stride, strict=True):
            reach += (count - 1) * step
        return reach * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class EagerOperand:
    """A tensor that an eager call is given: word number i of its launch for operand i. ``argument``: the very object
    that is passed at this position; -1: none. ``like`` is the tensor itself where its memory is no allocation's."""

    layout: TensorLayout
    argument: int = -1
    like: Any = None


@dataclass(frozen=True, slots=True)
class EagerResult:
    """A tensor that an eager call returns: ``offset`` bytes behind the first element of operand ``operand``, which it
    is ``itself`` or not; -1: in memory of its own, to which the next word behind those of the operands points."""

    layout: TensorLayout
    operand: int = -1
    offset: int = 0
    itself: bool = False


@dataclass(frozen=True, slots=True)
class EagerCall:
    """How an operator is called between two segments. ``call`` is the native OperatorCall, without tensors; ``leaves``
    are the operands that stand in their places. ``returned`` has the place of each of ``results``, by number, in what
    it returns: nested lists. ``drawn``: how far the launches before it advance the generator. ``group`` is the name of
    the process group that a collective is sent by."""

    name: str
    call: Any
    leaves: tuple[int, ...]
    operands: tuple[EagerOperand, ...]
    results: tuple[EagerResult, ...]
    returned: Any = None
    drawn: int = 0
    group: str | None = None


class OutputKind(Enum):
    """Where a value that the region returns comes from."""

    ARGUMENT = "argument"  # the very object passed at position ``index``
    VIEW = "view"  # a fresh view of the tensor argument ``index``
    FRESH = "fresh"  # memory of the POOL allocation ``index``; outputs that name the same one share a storage
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
    """A call of a custom operator written in Python, whose body ran while it was captured.

    ``calls`` are those of ATen that the body made, with all that they were given besides tensors. The launches that
    they made, ranges of ``explained``, hold no other numbers. ``nodes`` are as a Refusal's.
    """

    name: str
    nodes: tuple[str, ...] = ()
    loc: str | None = None
    calls: tuple[str, ...] = ()
    explained: tuple[range, ...] = ()


class Payload(Protocol):
    """A driver's own handle on a recording."""

    def part(self, launches: Sequence[int | None]) -> Payload:
        """That of a recording of some of the launches, in their order; None stands for one that has bodies."""


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop or branch of which each body was captured once, one behind the other.

    Args:
        kind: WHILE, or IF
        decides: address of what decides (``nested``)
        bounds: the first launch of each body, and the one behind the last body
        names: those of the bodies
    """

    kind: LaunchKind
    decides: int
    bounds: tuple[int, ...]
    names: tuple[str, ...]

    def moved(self, first: int) -> Nest:
        """This one, whose first launch is number ``first``."""
        return replace(self, bounds=tuple(bound - self.bounds[0] + first for bound in self.bounds))


@dataclass(frozen=True, slots=True)
class Recording:
    """One capture. ``payload`` is the driver's own handle on it (not compared, freed with the recording)."""

    launches: tuple[Launch, ...]
    allocations: tuple[Allocation, ...]
    outputs: tuple[Output, ...]
    payload: Payload | None = None
    offset_sensitive: frozenset[int] = frozenset()
    """Arguments whose storage offset was baked into the capture, so that it has to stay the same."""
    alignment: int = 64
    """Bytes that every POOL address was a multiple of, so that it has to be one at replay."""
    out_of_range_pointers: bool = False
    """True if launches may hold addresses outside of the allocation that they belong to (a kernel that begins before
    its tensor, at padding). Then no two allocations move by the same distance between two captures."""
    scratch: int = 0
    """An address in the midst of mapped memory that belongs to nobody; 0: there is none."""
    phases: tuple[int, ...] = ()
    """The phase of each launch, ascending from 0. All launches of a phase have completed before one of the next starts,
    while those of one phase may run side by side. Empty: each launch is a phase of its own."""
    python: tuple[PythonCall, ...] = ()
    """The calls of operators written in Python, in order. A replay runs none of their bodies."""
    device: str = "cpu"
    """The kind of device that it was captured on."""
    nests: tuple[Nest, ...] = ()
    """Loops and branches whose bodies are among the launches, each one before that around it."""

    def owner(self, output: Output) -> tuple[AllocationKind, int] | None:
        """Whose memory an output shows, if that is the region's or an argument's."""
        if output.kind is OutputKind.SAME:
            return self.owner(self.outputs[output.index])
        if output.kind is OutputKind.OBJECT:
            return None
        return (AllocationKind.POOL if output.kind is OutputKind.FRESH else AllocationKind.INPUT, output.index)

    def calls(self) -> tuple[range, ...]:
        """For each launch, those from the first one of its call to the last one, also of calls inside of it. A launch
        whose call is not known is by itself."""
        found: dict[int, range] = {}
        for launch in self.launches:
            if launch.group is not None:
                first = found.get(launch.group, range(launch.index, launch.index)).start
                found[launch.group] = range(first, launch.index + 1)
        return tuple(
            range(launch.index, launch.index + 1) if launch.group is None else found[launch.group]
            for launch in self.launches
        )
