"""Records the operators that a region dispatches during its capture on the host.

Views are executed on the stand-ins, since they change only metadata; every other operator is recorded and returns
memory of the region. Fused kernels are not operators, and are recorded elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from pygraph.compat import DispatchKey, FakeTensor, OpOverload
from pygraph.errors import CaptureError
from pygraph.program.recording import COLLECTIVES, AllocationKind
from pygraph.runtime.calls import OperatorCall, check_call, fake_results, leaves, with_arguments
from pygraph.runtime.eager import OWN, is_eager, record_call
from pygraph.runtime.host.recorder import Operand, Recorder
from pygraph.runtime.nondeterminism import nondeterministic_operator
from pygraph.runtime.observe import OperatorObserver, draws, operands, uses_absolute_offset
from pygraph.runtime.provenance import blaming

_VIEWS = frozenset({"inductor::_reinterpret_tensor", "inductor::_alloc_from_pool"})
"""Views not marked as such by their schema."""

_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Operators that only allocate."""


class RecordOperators(OperatorObserver):
    """Records the operators that it observes. Code that bypasses the dispatcher finds no memory behind stand-ins."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._results: dict[Hashable, list[Any]] = {}
        """Results of calls so far, by signature and layout: fake kernels take milliseconds, and layers repeat calls."""

    def observe(self, call: OperatorCall) -> Any:
        func: Any = call.op
        if isinstance(func, OpOverload) and func.namespace in OWN:
            # An operator that is defined only by others gets here only if autograd keys are switched off.
            defined = func.has_kernel_for_dispatch_key
            if defined(DispatchKey.CompositeImplicitAutograd) and not defined(DispatchKey.CPU):
                with self:
                    return func.decompose(*call.args, **call.kwargs)
        self._recorder.begin_call()
        with blaming(call.text):
            if not isinstance(func, OpOverload):
                raise CaptureError("unsupported-operator", str(func))
            if _is_eager(self._recorder, func):
                return _record_eager(self._recorder, call)
            _refuse(self._recorder, call)
            if _is_view(call):
                return _view(self._recorder, call)
            signature = call.signature(self._recorder.opaque_name)
            results = self._results_of(call, signature)
            if call.name in _EMPTY:
                return _allocate(self._recorder, call, results[0])
            return _record(self._recorder, call, results, signature)

    def _results_of(self, call: OperatorCall, signature: Hashable) -> list[Any]:
        """See ``fake_results``: called once for equal calls on tensors with equal layouts in their storages."""
        plain = filter(self._recorder.native.is_plain, call.tensors())
        lie = tuple((tensor.storage_offset(), tensor.untyped_storage().nbytes()) for tensor in plain)
        known = self._results.get((signature, lie))
        if known is None:
            known = self._results[signature, lie] = fake_results(call)
            return known
        return with_arguments(call, known)


# -- what cannot be recorded --------------------------------------------------------------------------------------


def _refuse(recorder: Recorder, call: OperatorCall) -> None:
    if call.op.namespace in COLLECTIVES:
        raise CaptureError("collective", call.name)
    check_call(call)
    for argument, value in call.operands():
        if isinstance(value, torch.device) and value.type != "cpu":
            raise CaptureError("foreign-device", f"{call.name} on {value}")
        if value is True and argument.name == "pin_memory":
            raise CaptureError("pinned-memory", call.name)
    for tensor in call.tensors():
        recorder.owned(tensor)  # raises if the owner of this memory is unknown


def _is_eager(recorder: Recorder, op: OpOverload) -> bool:
    """True if a replay calls ``op`` between two segments. An operator outside torch may count, print or communicate,
    and would do so again in each comparison."""
    return op.namespace not in OWN | COLLECTIVES or is_eager(op, recorder.eager)


# -- views --------------------------------------------------------------------------------------------------------


def _is_view(call: OperatorCall) -> bool:
    schema = call.op._schema
    return call.name in _VIEWS or (not schema.is_mutable and any(r.alias_info is not None for r in schema.returns))


def _view(recorder: Recorder, call: OperatorCall) -> Any:
    """Execute a view operator, and check that its results share memory with its arguments."""
    if uses_absolute_offset(call):
        owners = map(recorder.owner, call.tensors())
        recorder.offset_sensitive.update(owner.index for owner in owners if owner.kind is AllocationKind.INPUT)
    result = call.op(*call.args, **call.kwargs)
    bases = {recorder.native.storage_base(t) for t in call.tensors()}
    for tensor in leaves(result):
        recorder.owner(tensor)
        if recorder.native.storage_base(tensor) not in bases:
            raise CaptureError("aliasing-operator", f"{call.name} returned memory of its own")
    return result


# -- recording ----------------------------------------------------------------------------------------------------


def _allocate(recorder: Recorder, call: OperatorCall, fake: torch.Tensor) -> torch.Tensor:
    """Memory of the region for a result."""
    if fake.device.type != "cpu":
        raise CaptureError("foreign-device", call.name)
    if any(n > 1 and s == 0 for n, s in zip(fake.size(), fake.stride(), strict=True)):
        raise CaptureError("aliasing-operator", f"{call.name} returns elements that share memory")
    return recorder.allocate(fake.size(), fake.stride(), fake.dtype)


def _record(recorder: Recorder, call: OperatorCall, results: Sequence[Any], signature: Hashable) -> Any:
    native_call = recorder.native.OperatorCall(call.name, call.op._schema.overload_name, call.args, dict(call.kwargs))
    copies = _copies(call)
    given = [Operand(t, reads and not (copies and writes), writes) for t, reads, writes in operands(call)]
    if len(native_call.tensors()) != len(given):
        raise CaptureError("unsupported-operator", f"{call.name} takes tensors in a way that is not known")
    moves = [_moves(recorder, operand.tensor) for operand in given]
    stored: list[torch.Tensor | None] = []

    def place(result: torch.Tensor | None) -> torch.Tensor | None:
        """Give a fake ``result`` memory of its own; return others as they are."""
        fresh = _allocate(recorder, call, result) if isinstance(result, FakeTensor) else None
        if result is not None:
            stored.append(fresh)
        return result if fresh is None else fresh

    returned = [[place(t) for t in r] if isinstance(r, (list, tuple)) else place(r) for r in results]
    fresh = [tensor for tensor in stored if tensor is not None]
    recorder.launch(
        (native_call, moves, stored if fresh else []),
        call.text,
        signature,
        [*given, *(Operand(tensor, writes=True) for tensor in fresh)],
        random=draws(call.op),
        nondeterministic=nondeterministic_operator(call.op),
        copies=copies,
        in_place=bool(fresh),
    )
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _copies(call: OperatorCall) -> bool:
    """True if ``call`` copies the bytes of one tensor to another one, with an equal dense layout."""
    if str(call.op) != "aten.copy_.default":
        return False
    to, source = call.tensors()
    if not to.layout is source.layout is torch.strided:
        return False
    alike = (to.dtype, to.size(), to.stride()) == (source.dtype, source.size(), source.stride())
    return alike and bool(torch.ops.aten.is_non_overlapping_and_dense(to)) and to.numel() > 0


def _moves(recorder: Recorder, tensor: torch.Tensor | None) -> bool:
    """True if replays may move the memory of ``tensor``: it is no constant."""
    owner = None if tensor is None else recorder.owned(tensor).owner
    return owner is not None and owner.kind is not AllocationKind.CONSTANT


def _record_eager(recorder: Recorder, call: OperatorCall) -> Any:
    """Record a call that each replay makes."""

    def is_constant(tensor: torch.Tensor) -> bool:
        return recorder.opaque_name(tensor) is not None or recorder.owner(tensor).kind is AllocationKind.CONSTANT

    def allocate(fake: torch.Tensor) -> torch.Tensor:
        if fake.device.type != "cpu":
            raise CaptureError("foreign-device", call.name)
        return recorder.allocate(fake.size(), fake.stride(), fake.dtype)

    for tensor in call.tensors():
        recorder.owned(tensor)  # raises if the owner of this memory is unknown
        owner = None if is_constant(tensor) else recorder.owner(tensor)
        if owner is None or owner.kind is not AllocationKind.INPUT:
            continue
        if recorder.arguments[owner.index].dtype.itemsize != tensor.dtype.itemsize:
            recorder.offset_sensitive.add(owner.index)
    made = record_call(recorder.native, call, recorder.arguments, is_constant, allocate)
    given = [Operand(t, True, written) for t, written in zip(made.operands, made.written, strict=True)]
    recorder.launch(
        made.eager,
        str(call.op),
        call.signature(recorder.opaque_name),
        [*given, *(Operand(tensor, writes=True) for tensor in made.results)],
        random=made.random,
        nondeterministic=False,  # compared runs receive its results
    )
    return made.returned
