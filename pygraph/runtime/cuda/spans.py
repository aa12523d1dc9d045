"""Memory accesses of a region's operators and Triton kernels, recorded during the capture of the region.

For each call, the nodes that it added to the graph are recorded, with the addresses that it only reads and those that
it may write. The launches of these nodes then carry these accesses. Nodes without a recorded call are assumed to write
all of their operands. In custom operators, a second mode observes the operators that their bodies call.

Before each call the stack is cleared, so that parameters which torch's kernels leave unset are zero.
"""

from __future__ import annotations

import contextlib
import sys
import types
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, zip_longest
from typing import Any

import torch

from pygraph.compat import DispatchKey, OpOverload, has_kernel, python_kernels
from pygraph.errors import CaptureError
from pygraph.program.recording import (
    COLLECTIVES,
    FUNCTIONAL_COLLECTIVES,
    UNKNOWN,
    Access,
    Allocation,
    AllocationKind,
    Bytes,
    EagerCall,
    Launch,
    LaunchKind,
    Origin,
    PythonCall,
    is_functional_collective,
)
from pygraph.runtime.calls import OperatorCall, tensors_in
from pygraph.runtime.cuda.nodes import Node
from pygraph.runtime.eager import RecordedCall, is_eager
from pygraph.runtime.nondeterminism import nondeterministic_kernels, nondeterministic_operator
from pygraph.runtime.observe import OperatorObserver, offset_of, operands, uses_absolute_offset
from pygraph.runtime.provenance import blame, blaming, here, ran
from pygraph.runtime.slots import AddressMap
from pygraph.runtime.tensors import rebound

__all__ = [
    *("EagerCalls", "Observer", "Operand", "Span"),
    *("calls_operators", "observing", "run_inside", "with_calls", "with_eager"),
]

_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")
"""Operators whose result is a Python value that depends on device memory."""

_BUILT_IN = frozenset({"aten", "prims", "inductor"})
"""Namespaces of operators that are known to launch on the current stream or not at all."""

_KERNEL_KEYS = (
    "CUDA",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)
"""Dispatch keys at which the kernel for CUDA tensors may be registered; the first wins."""

_OF_THE_WRAPPER = frozenset(
    {"torch", "math", "inf", "nan", "assert_size_stride", "assert_alignment"}
    | {"empty_strided_cuda", "reinterpret_tensor", "get_raw_stream"}
)
"""Globals of Inductor's code besides its Triton kernels. They run no operators except for allocations."""

_GENERATED = "triton_"
"""Prefix of the names of Inductor's own kernels."""

_TEMPLATES = "triton_tem_"
"""Prefix of kernels from templates: their names do not tell to which results a fused addition adds."""

_ADDRESSES = (torch.int64, torch.uint64)
"""Dtypes of tensors of addresses, which a user's kernel may follow."""

_READ_ONLY_NAMES = ("in_ptr", "arg_")
"""Prefixes of pointers in Inductor's own Triton kernels that are only loaded from."""

_WRITE_ONLY_NAMES = ("out_ptr",)
"""Prefixes of pointers to buffers that the kernel defines: it stores each element before any load of it."""


_Key = tuple[AllocationKind, int]
_Look = Callable[[int], "Allocation | None"]
"""Finds the allocation that an address points into."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand of a call. Its first element is at ``address``, and ``bytes``, relative to that, are its
    elements; None: the bytes used around them are unknown. Without ``reads``, the call writes every element."""

    address: int
    bytes: Bytes | None
    writes: bool
    reads: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor, *, writes: bool, exact: bool = True, reads: bool = True) -> Operand:
        """``tensor`` as an operand; if ``exact``, the call uses only its elements."""
        made = None
        if exact and tensor.is_contiguous():
            made = Bytes(0, tensor.nbytes)
        elif exact:
            made = Bytes.of(0, tensor.size(), tensor.stride(), tensor.element_size())
        return cls(tensor.data_ptr(), made, writes, reads or not exact)


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes ``begin`` to ``end`` (excluded) came from the call ``name`` on ``operands``.

    ``origin`` is the place of the call in the region and in the user's program. ``nondeterministic``: its results are
    known to vary between runs. ``closed``: it uses only its operands, memory that it allocates, the generator and
    libraries' own memory. ``in_place``: addresses of operands in whose place its result might be written.
    """

    begin: int
    end: int
    name: str
    operands: tuple[Operand, ...]
    origin: Origin = UNKNOWN
    nondeterministic: bool = False
    closed: bool = False
    in_place: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Addresses of operands that it only reads."""
        return tuple(operand.address for operand in self.operands if not operand.writes)

    @property
    def writes(self) -> tuple[int, ...]:
        """Addresses of operands that it may write."""
        return tuple(operand.address for operand in self.operands if operand.writes)


@dataclass(frozen=True, slots=True)
class EagerSpan:
    """An eager call after ``begin`` nodes, with ``pieces`` allocations made by then, including its results. ``words``
    are the words of its launch, ``reads`` and ``writes`` the addresses among them."""

    begin: int
    pieces: int
    eager: EagerCall
    words: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    signature: Hashable
    random: bool
    origin: Origin


@dataclass(frozen=True, slots=True)
class EagerCalls:
    """Operators that each replay calls: ``chosen``, those that no driver captures and, if ``collectives``, functional
    collectives. ``record`` records such a call; ``pieces`` returns the number of allocations so far."""

    chosen: Collection[str]
    collectives: bool
    record: Callable[[OperatorCall], RecordedCall]
    pieces: Callable[[], int]


@dataclass
class Observer:
    """Collects spans. ``nodes`` returns the number of nodes in the graph so far, or None once the stream is no longer
    captured: a call that breaks the capture need not raise, but is the first one after which this is None.
    ``wipe_stack`` overwrites the stack that the next call is going to use. ``calls`` handles eager calls; None: there
    are none."""

    nodes: Callable[[], int | None]
    wipe_stack: Callable[[], None] = lambda: None
    calls: EagerCalls | None = None
    eager: list[EagerSpan] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    absolute: list[int] = field(default_factory=list)
    """Addresses of tensors whose offset from the start of their storage is baked in."""
    python: list[PythonCall] = field(default_factory=list)
    """Calls of operators with Python bodies that ran during the capture."""
    failed: str | None = None
    """The call that raised an error, or broke the capture."""

    def call(
        self,
        name: str,
        operands: Sequence[Operand],
        run: Callable[[], Any],
        *,
        nondeterministic: bool = False,
        closed: bool = False,
        in_place: Callable[[Any], tuple[int, ...]] | None = None,
        inside: _Inside | None = None,
    ) -> Any:
        """Run one call, and record the nodes that it added. A custom operator, observed by ``inside``, must add nodes
        if it returns or writes memory. ``in_place`` maps the result of a call that is one kernel to addresses of
        operands in whose place the result might be written.

        Raises the exceptions of the call, and CaptureError (``capture-failed``) if the capture is broken afterwards.
        """
        begin = self._nodes_before(name)
        self.wipe_stack()
        with blaming(name, self.fail):
            result = run()
        end = self.nodes()
        if end is None:
            self.fail(name)
            raise CaptureError("capture-failed", f"{name} broke the capture of the stream")
        if (
            inside is not None
            and end == begin
            and (any(o.writes and o.address for o in operands) or any(t.numel() for t in tensors_in(result)))
        ):
            self.fail(name)
            raise CaptureError("uncaptured-work", f"{name} adds nothing to the capture: its work goes another way")
        nondeterministic = nondeterministic or (inside is not None and inside.nondeterministic)
        alike = in_place(result) if in_place is not None and end == begin + 1 else ()
        span = Span(begin, end, name, tuple(operands), here(), nondeterministic, closed, alike)
        self.spans.append(span)
        return result

    def call_eagerly(self, calls: EagerCalls, call: OperatorCall) -> Any:
        """Record a call that each replay makes. Raises CaptureError for a call that cannot be recorded."""
        name = call.text
        begin = self._nodes_before(name)
        with blaming(name, self.fail):
            for _, value in call.operands():
                _refuse_host(call.op, value)
            for tensor in call.tensors():
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
                    raise CaptureError("unsupported-tensor", f"{name} is given {type(tensor).__name__}, or a lazy view")
            made = calls.record(call)
            signature = call.signature()
        given = [tensor.data_ptr() if tensor.numel() else 0 for tensor in made.operands]
        returned = [tensor.data_ptr() if tensor.numel() else 0 for tensor in made.results]
        reads = [word for word, written in zip(given, made.written, strict=True) if not written]
        writes = [word for word, written in zip(given, made.written, strict=True) if written]
        words = (*given, *returned)
        facts = (tuple(reads), (*writes, *returned), signature, made.random, here())
        self.eager.append(EagerSpan(begin, calls.pieces(), made.eager, words, *facts))
        return made.returned

    def _nodes_before(self, name: str) -> int:
        begin = self.nodes()
        if begin is None:  # the previous call left it intact
            raise CaptureError("capture-failed", f"code before {name} broke the capture of the stream")
        return begin

    def fail(self, name: str, origin: Origin | None = None) -> None:
        """Blame the call ``name``, at ``origin`` or the region's current place, unless a call was blamed before."""
        self.failed = self.failed or name
        blame(name, origin)

    def fail_at(self, index: int) -> None:
        """Blame the call that node ``index`` came from, if there is one."""
        for span in self.spans:
            if span.begin <= index < span.end:
                self.fail(span.name, span.origin)

    def sent(self, piece: Allocation) -> bool:
        """True if a collective uses or may have allocated ``piece``: torch holds it until the next collective."""
        return any(
            span.begin <= piece.born <= span.end or any(piece.covers(operand.address) for operand in span.operands)
            for span in self.spans
            if is_functional_collective(span.name)
        )

    def makers(self, born: int) -> list[Span]:
        """The calls that may have made an allocation when the graph had ``born`` nodes."""
        return [span for span in self.spans if span.begin <= born <= span.end]


def calls_operators(fn: Callable[..., Any]) -> bool:
    """True unless ``fn`` is code of Inductor that names only Triton kernels and ``_OF_THE_WRAPPER``. Operators may call
    libraries such as cuBLAS."""
    code, known = getattr(fn, "__code__", None), getattr(fn, "__globals__", {})
    if code is None or "inductor_ops" not in known or fn.__closure__ or "ops" in code.co_names:
        return True
    named = [name for name in code.co_names if name in known]
    return not all(name in _OF_THE_WRAPPER or name.startswith("triton_") for name in named)


@contextlib.contextmanager
def observing(observer: Observer, fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A version of ``fn`` to call during its capture: its operators and Triton kernels are recorded."""
    _observers.append(observer)
    try:
        with _Operators(observer), _rebound(observer, fn) as run:
            yield run
    finally:
        _observers.remove(observer)


_observers: list[Observer] = []
"""The observer of the current capture, while its function runs."""


def run_inside(fn: Callable[..., Any], args: list[Any]) -> Any:
    """Run the function of another region; during a capture, its Triton kernels are recorded."""
    with _rebound(_observers[-1], fn) if _observers else contextlib.nullcontext(fn) as run:
        return run(args)


# -- launches -----------------------------------------------------------------------------------------------------


def with_calls(
    launches: Sequence[Launch],
    spans: Sequence[Span],
    allocations: Sequence[Allocation],
    random: Sequence[int],
) -> tuple[Launch, ...]:
    """``launches`` with the accesses and origins of their calls: ``spans``, in which a call follows the calls inside
    it. Launches that use a word of ``random`` draw random numbers."""
    addresses = AddressMap(allocations)
    reach, inside = _reach(allocations, addresses), cache(addresses.inside)  # operands are looked up many times
    everything = (inside, [a for a in allocations if a.kind is AllocationKind.CONSTANT])
    drawn = frozenset(random)
    made = [launch if drawn.isdisjoint(launch.words) else replace(launch, random=True) for launch in launches]
    for number, span in enumerate(spans):
        if span.begin == span.end:
            continue
        only_read = _owners(span.reads, inside) - _owners(span.writes, inside)
        may_access = reach(span)
        operands = _accesses(span.operands, everything) if span.closed else None
        in_place = frozenset(key for key in _owners(span.in_place, inside) if key[0] is AllocationKind.INPUT)
        for launch in made[span.begin : span.end]:
            made[launch.index] = replace(
                launch,
                call=span.name,
                group=number if launch.operands is None else launch.group,  # else an inner call, fully known
                origin=span.origin,
                nondeterministic=span.nondeterministic,
                read_only=only_read,
                may_access=may_access if launch.kind is LaunchKind.KERNEL else None,
                operands=operands,
                in_place=in_place if launch.kind is LaunchKind.KERNEL else frozenset(),
            )
    return tuple(made)


def _is_closed(name: str) -> bool:
    """True for ATen and collectives (``Span.closed``)."""
    return name.startswith("aten.") or is_functional_collective(name)


def _reach(allocations: Sequence[Allocation], addresses: AddressMap) -> Callable[[Span], frozenset[_Key] | None]:
    """A map from each call to the allocations that it can use: its operands and those that it may have made. None for
    calls of neither ATen nor collectives, since these calls may keep memory of their own, and for unowned operands."""
    pool = sorted((a for a in allocations if a.kind is AllocationKind.POOL), key=lambda a: a.born)
    births = [a.born for a in pool]
    constants = [a for a in allocations if a.kind is AllocationKind.CONSTANT]

    @cache
    def owners_of(word: int) -> frozenset[_Key]:
        return frozenset(place.key for place in addresses.places(word, sys.maxsize))

    def of(span: Span) -> frozenset[_Key] | None:
        if not _is_closed(span.name):
            return None
        given: set[_Key] = set()
        for word in filter(None, (*span.reads, *span.writes)):
            owners = owners_of(word)
            if not owners and not any(constant.covers(word) for constant in constants):
                return None
            given |= owners
        first, last = bisect_left(births, span.begin), bisect_right(births, span.end)
        return frozenset(given.union(a.key for a in pool[first:last]))

    return of


def _accesses(
    operands: Sequence[Operand], allocations: tuple[_Look, Sequence[Allocation]]
) -> tuple[Access, ...] | None:
    """Accesses of ``operands`` to ``allocations`` (moving, constant). None if an operand is in neither."""
    inside, constants = allocations
    made: list[Access] = []
    for operand in operands:
        owner = inside(operand.address) or next((c for c in constants if c.covers(operand.address)), None)
        if owner is None and operand.address and (operand.bytes is None or operand.bytes.end):
            return None
        if owner is not None:
            start = operand.address - owner.address
            there = Bytes(0, owner.nbytes) if operand.bytes is None else operand.bytes.moved(start)
            made.append(Access(owner.key, there, operand.writes, operand.reads))
    return tuple(made)


def _owners(words: Iterable[int], inside: _Look) -> frozenset[_Key]:
    return frozenset(owner.key for owner in map(inside, words) if owner is not None)


@dataclass(frozen=True, slots=True)
class Merged:
    """Launches and eager calls; the latter have no node."""

    launches: tuple[Launch, ...]
    nodes: tuple[Node | None, ...]
    phases: tuple[int, ...]
    allocations: tuple[Allocation, ...]

    def place(self, node: int) -> int:
        """Index of the launch of node ``node`` of the graph; the number of launches if there is no such node."""
        found = (place for place, each in enumerate(self.nodes) if each is not None)
        return next(islice(found, node, None), len(self.nodes))


def with_eager(
    launches: Sequence[Launch],
    nodes: Sequence[Node],
    phases: Sequence[int],
    allocations: Sequence[Allocation],
    calls: Sequence[EagerSpan],
) -> Merged:
    """``launches`` and their ``nodes``, with a launch for each of ``calls``; launch numbers count these, too. A phase
    ends before a call: launches after it wait for everything before it."""
    if not calls:
        return Merged(tuple(launches), tuple(nodes), tuple(phases), tuple(allocations))
    merged: list[Launch] = []
    places: list[Node | None] = []
    ranks: list[int] = []
    addresses, waiting, since = AddressMap(allocations), list(calls), 0
    for index in range(len(launches) + 1):
        while waiting and waiting[0].begin == index:
            span = waiting.pop(0)
            only_read = _owners(span.reads, addresses.inside) - _owners(span.writes, addresses.inside)
            facts = (span.eager.name, span.words, span.signature, None, span.origin, span.random, only_read)
            merged.append(Launch(len(merged), LaunchKind.EAGER, *facts, call=span.eager.name, eager=span.eager))
            places.append(None)
            ranks.append(ranks[-1] + 1 if ranks else 0)
            since = len(merged)
        if index < len(launches):
            same = since < len(merged) and bool(phases) and phases[index] == phases[index - 1]
            ranks.append(ranks[-1] + (not same) if ranks else 0)
            merged.append(replace(launches[index], index=len(merged)))
            places.append(nodes[index])
    pool = (a for a in allocations if a.kind is AllocationKind.POOL)
    later = {a.index: sum(span.pieces <= a.index for span in calls) for a in pool}
    born = (a.born + later[a.index] if a.kind is AllocationKind.POOL else a.born for a in allocations)
    moved = tuple(replace(a, born=birth) for a, birth in zip(allocations, born, strict=True))
    return Merged(tuple(merged), tuple(places), tuple(ranks) if phases else (), moved)


# -- operators ----------------------------------------------------------------------------------------------------


class _Operators(OperatorObserver):
    """Records every operator that reaches the dispatcher, and refuses operators that involve the host."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def observe(self, call: OperatorCall) -> Any:
        calls, func, args, named = self._observer.calls, call.op, call.args, call.kwargs
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        if calls is not None and is_eager(func, calls.chosen, collectives=calls.collectives):
            return self._observer.call_eagerly(calls, call)
        name = call.text
        try:
            given = self._operands(call)
        except CaptureError:
            self._observer.fail(name)
            raise
        if func.namespace in _BUILT_IN or func.namespace in FUNCTIONAL_COLLECTIVES:
            known = nondeterministic_operator(func)
            run, closed = (lambda: func(*args, **named)), _is_closed(name)
            in_place = partial(_in_place, call) if _is_elementwise(func) else None
            return self._observer.call(name, given, run, nondeterministic=known, closed=closed, in_place=in_place)
        inside = _Inside(self._observer, func)
        return self._observer.call(name, given, lambda: inside.run(args, named), inside=inside)

    def _operands(self, call: OperatorCall) -> list[Operand]:
        """Tensor operands of an operator. Raises CaptureError if it needs the host or other processes."""
        func, schema = call.op, call.op._schema
        calls = self._observer.calls
        captured = calls is not None and not calls.collectives and func.namespace in FUNCTIONAL_COLLECTIVES
        if func.namespace in COLLECTIVES and not captured:
            raise CaptureError("collective", f"{func} talks to other processes")
        if schema.name in _HOST_READS:
            raise CaptureError("host-read", f"{func} reads device memory while capturing")
        for value in (*call.args, *call.kwargs.values()):
            _refuse_host(func, value)
        exact = offset_of(func) is None  # else it uses memory around them
        given = [Operand.of(t, exact=exact, reads=r, writes=w) for t, r, w in operands(call) if t is not None]
        if uses_absolute_offset(call):
            self._observer.absolute += [operand.address for operand in given]
        return given


@cache
def _is_elementwise(op: OpOverload) -> bool:
    """True if each element of the result of ``op`` depends only on operands' elements at its position, even if it
    overwrites one of them: the operator has an in-place form, with the same kernel."""
    makes_one = not op._schema.is_mutable and len(op._schema.returns) == 1
    pointwise = torch.Tag.pointwise in op.tags and op.namespace == "aten"
    return makes_one and pointwise and hasattr(torch.ops.aten, f"{op.overloadpacket.__name__}_")


def _in_place(call: OperatorCall, result: Any) -> tuple[int, ...]:
    """Addresses of the operands of an elementwise ``call`` with the layout of its result."""

    def lies(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tensor.size(), tensor.stride()

    def storage(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    others = {storage(tensor) for tensor in call.tensors() if lies(tensor) != lies(result)}
    return tuple(tensor.data_ptr() for tensor in call.tensors() if storage(tensor) not in others)


class _Inside(OperatorObserver):
    """Active while the kernel of a custom operator runs. ``nondeterministic``: its results, or those of an operator
    that it calls, are known to vary between runs."""

    def __init__(self, observer: Observer, op: OpOverload) -> None:
        super().__init__()
        self._observer, self._op = observer, op
        self.nondeterministic = nondeterministic_operator(op)
        self._calls: list[str] = []
        self._explained: list[range] = []
        self._refused: CaptureError | None = None

    def run(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the operator's kernel directly: the dispatcher would call this mode first, and run the kernel without
        it. Raises CaptureError if the kernel calls an operator that must not run, even if it handles the exception."""
        name = self._op.name()
        key = next((key for key in _KERNEL_KEYS if has_kernel(name, key)), None)
        if key is None:
            return self._op(*args, **named)
        python = f"{name.replace('::', '/', 1)}/{key}" in python_kernels
        if python:
            ran(str(self._op))
        try:
            with self:
                result = self._op._op_dk(getattr(DispatchKey, key), *args, **named)
        except Exception:
            if self._refused is None:
                raise
            raise self._refused from None
        if self._refused is not None:
            raise self._refused
        if python:
            origin = here()
            made = PythonCall(str(self._op), origin.nodes, origin.loc, tuple(self._calls), tuple(self._explained))
            self._observer.python.append(made)
        return result

    def observe(self, call: OperatorCall) -> Any:
        func, args, named = call.op, call.args, call.kwargs
        if isinstance(func, OpOverload):
            if func.namespace in COLLECTIVES:
                raise self._refusal("collective", f"{self._op} talks to other processes, by {func}")
            if torch.Tag.nondeterministic_seeded in func.tags and _is_on_host(args, named):
                raise self._refusal("host-random", f"{self._op} draws from the CPU's generator, by {func}")
            self.nondeterministic = self.nondeterministic or nondeterministic_operator(func)
            if func.namespace in _BUILT_IN:
                return self._explain(func, args, named)
        return func(*args, **named)

    def _explain(self, func: OpOverload, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call an operator whose launches hold only numbers from its arguments, and uninitialised bytes."""
        given = ", ".join([*map(_plain, args), *(f"{name}={_plain(value)}" for name, value in named.items())])
        self._calls.append(f"{func}({given})")
        self._observer.wipe_stack()
        begin = self._observer.nodes()
        result = func(*args, **named)
        end = self._observer.nodes()
        if begin is not None and end is not None:  # else the enclosing operator is blamed
            self._explained.append(range(begin, end))
        return result

    def _refusal(self, reason: str, detail: str) -> CaptureError:
        """A CaptureError that blames the operator, raised before the refused call runs."""
        self._observer.fail(str(self._op))
        self._refused = CaptureError(reason, detail)
        return self._refused


def _plain(value: Any) -> str:
    """An operand as text, in which all tensors are alike."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return "tensor" if isinstance(value, torch.Tensor) else repr(value)


def _is_on_host(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """True if an operator runs on the CPU: by its operands or, without any, by its ``device``."""
    device = named.get("device")
    places = {tensor.device.type for tensor in tensors_in([*args, *named.values()])}
    return (places or {"cpu" if device is None else torch.device(device).type}) == {"cpu"}


def _refuse_host(func: Any, value: Any) -> None:
    """Refuse the CPU: a capture bakes in the contents of host memory, and cannot wait for a copy to it."""
    if any(tensor.is_cpu for tensor in tensors_in(value)):
        raise CaptureError("host-memory", f"{func} is given a tensor on the CPU")
    if isinstance(value, torch.device) and value.type == "cpu":
        raise CaptureError("host-memory", f"{func} makes a tensor on the CPU")


# -- Triton kernels -----------------------------------------------------------------------------------------------


class _Kernel:
    """Wrapper of a Triton kernel of Inductor's code, during its capture."""

    def __init__(self, observer: Observer, kernel: Any, nondeterministic: bool) -> None:
        self._observer, self._kernel, self._nondeterministic = observer, kernel, nondeterministic
        self._name = str(getattr(getattr(kernel, "fn", None), "__name__", "triton"))
        self._generated = self._name.startswith(_GENERATED)
        self._parameters = _parameters(kernel, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel, and record its accesses, by the names of its parameters."""
        run = partial(self._kernel.run, *args, **kwargs)
        closed = self._generated or all(t.dtype not in _ADDRESSES for t in tensors_in([*args, *kwargs.values()]))
        operands, known = self._operands(args, kwargs), self._nondeterministic
        return self._observer.call(self._name, operands, run, nondeterministic=known, closed=closed)

    def _operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Operand]:
        """Tensor operands of the kernel. A user's kernel may access memory beyond a tensor's elements."""
        exact, unknown = self._generated, (True, True)
        operands: list[Operand] = []
        for value, (reads, writes) in zip_longest(args, self._parameters[: len(args)], fillvalue=unknown):
            operands += [Operand.of(t, writes=writes, exact=exact, reads=reads) for t in tensors_in(value)]
        operands += [Operand.of(t, writes=True, exact=False) for value in kwargs.values() for t in tensors_in(value)]
        return operands


def _parameters(kernel: Any, kernel_name: str) -> list[tuple[bool, bool]]:
    """For each parameter of a Triton kernel, by its name, (may be read, may be written) of its argument."""
    mutated = getattr(kernel, "mutated_arg_names", None)
    signature = (getattr(kernel, "triton_meta", None) or {}).get("signature")
    names = list(signature) if isinstance(signature, dict) and mutated is not None else []
    found: list[tuple[bool, bool]] = []
    for name in names:
        whole = name not in (mutated or ())  # a buffer that it stores to is stored to completely
        read_only, write_only = (whole and name.startswith(known) for known in (_READ_ONLY_NAMES, _WRITE_ONLY_NAMES))
        found.append((not write_only or kernel_name.startswith(_TEMPLATES), not read_only))
    return found


def _rebound(observer: Observer, fn: Callable[..., Any]) -> contextlib.AbstractContextManager[Callable[..., Any]]:
    """``fn`` over a copy of its globals with observed Triton kernels: other threads are not observed."""
    if not isinstance(fn, types.FunctionType):
        return contextlib.nullcontext(fn)
    known = nondeterministic_kernels(fn.__code__.co_filename)
    return rebound(
        fn, lambda name, value: _Kernel(observer, value, name in known) if _is_triton_kernel(value) else value
    )


def _is_triton_kernel(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("torch._inductor.runtime.triton_heuristics") and hasattr(kind, "run")
