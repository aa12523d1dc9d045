"""Eager calls: operators that a capture does not run, and that a replay calls between two captured segments.

While a region is captured, such a call is recorded: its operands are words like those of any launch, its results are
stand-ins like any allocation, with sizes from the operator's fake kernel. Nothing executes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import OpOverload
from pygraph.errors import CaptureError
from pygraph.program.recording import (
    COLLECTIVES,
    FUNCTIONAL_COLLECTIVES,
    EagerCall,
    EagerOperand,
    EagerResult,
    TensorLayout,
)
from pygraph.runtime.calls import OperatorCall, check_call, check_result, run_fake

OWN = frozenset({"aten", "prims", "inductor", "mkldnn", "mkl", "onednn", "quantized"})
"""Namespaces of torch's own operators, whose schemas and tags describe all of their effects."""


def base_of(operator: str) -> str:
    """``aten.mm`` for ``aten.mm.out``: an operator is eager with all of its overloads."""
    return ".".join(operator.split(".")[:2])


def is_operator(name: str) -> bool:
    """True if ``name`` has an operator's form, as in ``mylib.op.default``, and not a kernel's."""
    parts = name.split(".")
    return len(parts) == 3 and all(part.isidentifier() for part in parts)


def is_eager(op: Any, chosen: Collection[str], *, collectives: bool = True) -> bool:
    """True if each replay calls ``op``, on any device: a functional collective if ``collectives``, an operator tagged
    ``cudagraph_unsafe``, or one of those ``chosen`` (without overloads)."""
    if not isinstance(op, OpOverload):
        return False
    if op.namespace in FUNCTIONAL_COLLECTIVES:
        return collectives
    unsafe, base = _facts_of(op)
    return unsafe or base in chosen


@functools.lru_cache(maxsize=1024)
def _facts_of(op: OpOverload) -> tuple[bool, str]:
    """True if ``op`` is tagged ``cudagraph_unsafe``, and its name without overload."""
    return getattr(torch.Tag, "cudagraph_unsafe", None) in op.tags, base_of(str(op))


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A capture's record of an eager call. The region gets ``returned``. The words of its launch are the addresses of
    ``operands``, then of ``results``, which are in memory of their own. ``written``: for each operand, the call may
    write it. ``random``: it may draw."""

    eager: EagerCall
    returned: Any
    operands: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    written: tuple[bool, ...]
    random: bool


def record_call(
    native: ModuleType,
    call: OperatorCall,
    arguments: Iterable[Any],
    is_constant: Callable[[torch.Tensor], bool],
    allocate: Callable[[torch.Tensor], torch.Tensor],
    drawn: int = 0,
) -> RecordedCall:
    """Record ``call``. ``arguments``: the region's stand-ins. ``is_constant``: true for a tensor whose memory no replay
    moves. ``allocate``: makes a stand-in like a fake tensor. Raises CaptureError for an operator whose results a fake
    kernel cannot determine: numbers, sizes that depend on data, or resized arguments."""
    check_call(call)
    values, fakes = run_fake(call)
    native_call = native.OperatorCall(call.name, call.op._schema.overload_name, call.args, dict(call.kwargs))
    given: list[torch.Tensor] = native_call.tensors()
    native_call.drop_tensors()
    operands = {id(tensor): tensor for tensor in given}
    if not operands.keys() <= {id(tensor) for tensor in call.tensors()}:
        raise CaptureError("unsupported-operator", f"{call.name} takes tensors in a way that is not known")
    numbers = {key: number for number, key in enumerate(operands)}
    owners = {fakes[key].untyped_storage()._cdata: key for key in operands if fakes[key].layout is torch.strided}
    results: list[EagerResult] = []
    made: list[torch.Tensor] = []

    def stand_in(fake: Any) -> torch.Tensor:
        check_result(call, fake)
        owner = owners.get(fake.untyped_storage()._cdata)
        if owner is None:
            made.append(allocate(fake))
            results.append(EagerResult(TensorLayout.of(fake)))
            return made[-1]
        base = operands[owner]
        if base.dtype != fake.dtype:
            raise CaptureError("aliasing-operator", f"{call.name} returns an argument as another dtype")
        offset = int(fake.storage_offset() - base.storage_offset()) * base.element_size()
        itself = fake is fakes[owner]
        results.append(EagerResult(TensorLayout.of(fake), numbers[owner], offset, itself))
        return base if itself else base.as_strided(fake.size(), fake.stride(), fake.storage_offset())

    shown: list[torch.Tensor] = []

    def placed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(item) for item in value]
        if value is None:
            return None
        shown.append(stand_in(value))
        return len(shown) - 1

    places = [placed(value) for value in values]
    returned = places[0] if len(places) == 1 else places or None
    positions = {id(argument): position for position, argument in enumerate(arguments)}
    told = tuple(
        EagerOperand(TensorLayout.of(tensor), positions.get(key, -1), tensor if is_constant(tensor) else None)
        for key, tensor in operands.items()
    )
    order = tuple(numbers[id(tensor)] for tensor in given)
    group = next((value for argument, value in call.operands() if argument.name == "group_name"), None)
    eager = EagerCall(str(call.op), native_call, order, told, tuple(results), returned, drawn, group)
    written = call.written()
    return RecordedCall(
        eager,
        at_places(returned, shown),
        tuple(operands.values()),
        tuple(made),
        tuple(key in written for key in operands),
        call.op.namespace not in OWN | COLLECTIVES or torch.Tag.nondeterministic_seeded in call.op.tags,
    )


def at_places(places: Any, results: Sequence[torch.Tensor]) -> Any:
    """Replace each number in nested ``places`` by its result."""
    if isinstance(places, list):
        return [at_places(place, results) for place in places]
    return None if places is None else results[places]
