"""Observation of a region under capture, for both drivers: the operators that it dispatches, and its outputs.

    region ─┬─ aten.add.Tensor(x, y)   ─► operands: x and y are read           recorded, or run and captured
            ├─ mylib.op.default(x)     ─► eager: each replay calls it          noted, with stand-ins for results
            └─ return z, x             ─► outputs: memory of z, argument 0

A driver defines how an operator is observed (``OperatorObserver.observe``), and in whose memory a tensor lies
(``CaptureMemory``).
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from pygraph.compat import OpOverload, TorchDispatchMode, dispatch_keys_kept
from pygraph.errors import CaptureError
from pygraph.program.recording import (
    DRAWS_IF_CALLED,
    Allocation,
    AllocationKind,
    Output,
    OutputKind,
    is_read,
    is_written,
)
from pygraph.runtime.calls import OperatorCall, leaves
from pygraph.runtime.eager import base_of
from pygraph.runtime.provenance import is_out_of_memory, reset_blame

SCALARS = (bool, int, float, type(None))
"""Types of the arguments and outputs that a capture fixes."""


# -- operators ---------------------------------------------------------------------------------------------------------


class OperatorObserver(TorchDispatchMode, ABC):
    """While open, observes every operator of this thread that reaches the dispatcher, except those that ``observe``
    itself calls."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.observe(OperatorCall(func, tuple(args), dict(kwargs or {})))

    @abstractmethod
    def observe(self, call: OperatorCall) -> Any:
        """Return the region's result of ``call``. Its ``op`` may be higher-order, without a schema."""


def operands(call: OperatorCall) -> Iterator[tuple[torch.Tensor | None, bool, bool]]:
    """Each tensor operand of a call, in the order of the schema, and whether the operator may read and write it. None
    stands for a number in place of a declared tensor."""
    given = call.operands()
    for position, reads, writes in _given_tensors(call.op):
        value = given[position][1]
        for item in (value,) if isinstance(value, torch.Tensor) else leaves(value):
            is_tensor = isinstance(item, torch.Tensor)
            yield (item, reads, writes) if is_tensor else (None, False, False)


@functools.lru_cache(maxsize=1024)
def _given_tensors(op: OpOverload) -> tuple[tuple[int, bool, bool], ...]:
    """The arguments of an operator that are tensors or lists of them: position, whether it may read and write them."""
    schema = op._schema
    found = ((at, each) for at, each in enumerate(schema.arguments) if "Tensor" in str(each.type))
    return tuple((at, is_read(schema, each), is_written(schema, each)) for at, each in found)


@functools.lru_cache(maxsize=1024)
def offset_of(op: OpOverload) -> tuple[int, Any] | None:
    """The position and the argument by which an operator takes an offset from the start of a storage, if any."""
    return next(((at, each) for at, each in enumerate(op._schema.arguments) if each.name == "storage_offset"), None)


def uses_absolute_offset(call: OperatorCall) -> bool:
    """True if ``call`` sets an offset from the start of a storage: its tensors' offsets are then baked in."""
    found = offset_of(call.op)
    return found is not None and call.value(*found) is not None


@functools.lru_cache(maxsize=1024)
def draws(op: OpOverload) -> bool:
    """True if ``op`` may draw random numbers."""
    seeded = torch.Tag.nondeterministic_seeded in op.tags or "Generator" in str(op._schema)
    return seeded or base_of(str(op)) in DRAWS_IF_CALLED


# -- a region under capture --------------------------------------------------------------------------------------------


def run_region(run: Callable[[], Any], explain: Callable[[Exception], tuple[str, str]]) -> list[Any]:
    """Call ``run`` and return its results as a new list. Raises CaptureError; out-of-memory errors pass through.

    Args:
        run: calls the region on stand-ins
        explain: returns reason and detail of the CaptureError that replaces any other exception
    """
    reset_blame()
    failure: CaptureError
    try:
        with dispatch_keys_kept(), _frames_cleared():
            returned = run()
        if not isinstance(returned, (list, tuple)):
            raise CaptureError("unsupported-output", f"the region returned {type(returned).__name__}")
        return list(returned)
    except CaptureError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # A region runs code of Inductor, of operator libraries and of users: whatever any of it raises on stand-ins
        # means that the region cannot be captured, and nothing else.
        failure = CaptureError(*explain(error))
    raise failure  # out here, it keeps no frames with stand-ins alive


@contextlib.contextmanager
def _frames_cleared() -> Iterator[None]:
    """Within the block, an exception keeps no locals of the frames that it passed through alive."""
    try:
        yield
    except BaseException as error:
        waiting: list[BaseException | None] = [error]
        for each in waiting:
            if each is not None and len(waiting) < 64:
                traceback.clear_frames(each.__traceback__)
                waiting += (each.__cause__, each.__context__)
        raise


class CaptureMemory(Protocol):
    """Memory of a capture under way. ``offset_sensitive``: arguments whose storage offset is baked in."""

    offset_sensitive: set[int]

    @property
    def arguments(self) -> Sequence[Any]:
        """Stand-ins and values of the region's arguments."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the compiled module, by name."""

    def place(self, tensor: torch.Tensor) -> tuple[Allocation, int]:
        """The allocation of a returned tensor, and the bytes from its start to the tensor's first element. Raises
        CaptureError for a tensor that cannot be returned."""


def describe_outputs(returned: Sequence[Any], memory: CaptureMemory) -> tuple[Output, ...]:
    """An Output for each value. Raises CaptureError (``unsupported-output``)."""
    first: dict[int, int] = {}
    outputs: list[Output] = []
    for position, value in enumerate(returned):
        before = first.setdefault(id(value), position)
        again = before < position and isinstance(value, torch.Tensor)
        outputs.append(Output(OutputKind.SAME, before) if again else _output(value, memory))
    return tuple(outputs)


def _output(value: Any, memory: CaptureMemory) -> Output:
    if type(value) in SCALARS or any(value is constant for constant in memory.constants.values()):
        return Output(OutputKind.OBJECT, value=value)
    if not isinstance(value, torch.Tensor):
        raise CaptureError("unsupported-output", f"the region returned {type(value).__name__}")
    for index, argument in enumerate(memory.arguments):
        if value is argument:
            return Output(OutputKind.ARGUMENT, index)
    owner, distance = memory.place(value)
    if distance % value.element_size():
        raise CaptureError("unsupported-output", "a tensor that begins inside an element")
    place = (distance // value.element_size(), tuple(value.size()), tuple(value.stride()), value.dtype)
    if owner.kind is AllocationKind.POOL:
        return Output(OutputKind.FRESH, owner.index, *place)
    if memory.arguments[owner.index].element_size() != value.element_size():
        memory.offset_sensitive.add(owner.index)
    return Output(OutputKind.VIEW, owner.index, *place)
