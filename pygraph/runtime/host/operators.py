"""What the dispatcher is asked for while a region is captured, and how each operator is recorded.

Views are made for real on the stand-ins (they are metadata); everything else is recorded and returns memory of the
region. Fused kernels do not come this way.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
)
from pygraph.errors import CaptureError
from pygraph.runtime.host.recorder import Operand, OperatorLaunch, Recorder
from pygraph.runtime.nondeterminism import nondeterministic_operator
from pygraph.runtime.recording import COLLECTIVES, AllocationKind

__all__ = ["describe", "is_built_in", "leaves", "record_operator"]

_PLAIN = (str, torch.dtype, torch.layout, torch.memory_format, torch.device)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists and tuples that is not None, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def describe(recorder: Recorder, value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """A hashable that is equal for arguments that make an operator do the same, wherever their memory lies.

    ``seen`` numbers the tensors and storages met so far: what shares them is part of what an operator sees. Raises
    CaptureError (``unsupported-argument``) for an object that cannot be compared.
    """
    numbers = {} if seen is None else seen
    if isinstance(value, (list, tuple)):
        return tuple(describe(recorder, item, numbers) for item in value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(recorder, value, numbers)
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack("<dd", value.real, value.imag))
    if value is None or type(value) in (bool, int) or isinstance(value, _PLAIN):
        return (type(value).__name__, str(value))
    raise CaptureError("unsupported-argument", f"an operator is given {type(value).__name__}")


def _describe_tensor(recorder: Recorder, tensor: torch.Tensor, seen: dict[int, int]) -> Hashable:
    name = recorder.opaque_name(tensor)
    if name is not None:
        return ("opaque", name)
    same_tensor = seen.setdefault(id(tensor), len(seen))
    same_storage = seen.setdefault(-recorder.native.storage_base(tensor), len(seen))
    return ("tensor", tuple(tensor.size()), tuple(tensor.stride()), str(tensor.dtype), same_tensor, same_storage)


_BUILT_IN = frozenset({"aten", "prims", "inductor", "mkldnn", "mkl", "onednn", "quantized"})
"""Namespaces whose schemas tell all that an operator does."""

_VIEWS = frozenset({"inductor::_reinterpret_tensor", "inductor::_alloc_from_pool"})
"""Views whose schema does not say so."""

_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Allocations, and nothing else."""

_RESIZING = frozenset({"inductor::resize_storage_bytes_", "inductor::accumulate_grad_"})
"""Operators that change storages behind their schema's back."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator with its arguments in the order of its schema, defaults filled in."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """``aten::addmm``."""
        return str(self.op._schema.name)

    def operands(self) -> Iterator[tuple[Any, Any]]:
        """Each argument of the schema with its value."""
        for position, argument in enumerate(self.op._schema.arguments):
            if position < len(self.args):
                yield argument, self.args[position]
            elif argument.name in self.kwargs:
                yield argument, self.kwargs[argument.name]
            else:
                yield argument, argument.default_value if argument.has_default_value() else None

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor argument."""
        return [t for _, value in self.operands() for t in leaves(value) if isinstance(t, torch.Tensor)]


def record_operator(recorder: Recorder, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record ``op`` and return what the region goes on with. Raises CaptureError when it cannot be replayed."""
    if not isinstance(op, OpOverload):
        raise CaptureError("unsupported-operator", str(op))
    call = _Call(op, tuple(args), kwargs)
    _refuse(recorder, call)
    if _is_view(call):
        return _view(recorder, call)
    results = _fake_results(call)
    if call.name in _EMPTY:
        return recorder.allocate(*_layout(call, results[0]))
    return _record(recorder, call, results)


def is_built_in(op: OpOverload) -> bool:
    """Whether the schema of ``op`` tells all that it does. Any other may count, print or communicate, and would do so
    once more in each comparison."""
    return op.namespace in _BUILT_IN


# -- what cannot be recorded --------------------------------------------------------------------------------------


def _refuse(recorder: Recorder, call: _Call) -> None:
    tags = call.op.tags
    if call.op.namespace in COLLECTIVES:
        raise CaptureError("collective", call.name)
    if not is_built_in(call.op):
        raise CaptureError("opaque-operator", f"{call.name}: what it does besides its schema is not known")
    if torch.Tag.dynamic_output_shape in tags:
        raise CaptureError("dynamic-output", call.name)
    if torch.Tag.data_dependent_output in tags or any("Tensor" not in str(r.type) for r in call.op._schema.returns):
        raise CaptureError("host-read", call.name)
    if torch.Tag.inplace_view in tags or call.name in _RESIZING:
        raise CaptureError("metadata-mutation", call.name)
    for argument, value in call.operands():
        _refuse_operand(call, argument.name, value)
    for tensor in call.tensors():
        if recorder.opaque_name(tensor) is None:
            recorder.owner(tensor)


def _refuse_operand(call: _Call, name: str, value: Any) -> None:
    if isinstance(value, torch.Generator):
        raise CaptureError("generator-argument", call.name)
    if isinstance(value, torch.device) and value.type != "cpu":
        raise CaptureError("foreign-device", f"{call.name} on {value}")
    if name == "pin_memory" and value:
        raise CaptureError("pinned-memory", call.name)


# -- views --------------------------------------------------------------------------------------------------------


def _is_view(call: _Call) -> bool:
    schema = call.op._schema
    if call.name in _VIEWS:
        return True
    written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return bool(schema.returns) and not written and any(r.alias_info is not None for r in schema.returns)


def _view(recorder: Recorder, call: _Call) -> Any:
    """Make a view for real. It touches metadata alone, which is checked: its memory is that of an argument."""
    _note_absolute_offset(recorder, call)
    result = call.op(*call.args, **call.kwargs)
    bases = {recorder.native.storage_base(t) for t in call.tensors()}
    for tensor in leaves(result):
        recorder.owner(tensor)
        if recorder.native.storage_base(tensor) not in bases:
            raise CaptureError("aliasing-operator", f"{call.name} returned memory of its own")
    return result


def _note_absolute_offset(recorder: Recorder, call: _Call) -> None:
    """An offset from the start of the storage bakes in where in its storage an argument lies."""
    offsets = [value for argument, value in call.operands() if argument.name == "storage_offset"]
    if not any(offset is not None for offset in offsets):
        return
    for tensor in call.tensors():
        owner = recorder.owner(tensor)
        if owner.kind is AllocationKind.INPUT:
            recorder.offset_sensitive.add(owner.index)


# -- results, without running anything ----------------------------------------------------------------------------


def _fake_results(call: _Call) -> list[Any]:
    """What each return of the schema is: the argument that it is declared to be, or fake tensors (also in lists)."""
    declared = call.op._schema.returns
    try:
        returned, storages = _run_fake(call)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CaptureError("dynamic-output", call.name) from error
    values = returned if len(declared) > 1 else [returned][: len(declared)]
    results = [value if r.alias_info is None else _aliased(call, r) for r, value in zip(declared, values, strict=True)]
    _refuse_aliases(call, results, storages)
    return results


def _run_fake(call: _Call) -> tuple[Any, list[int]]:
    """What the operator returns on fake arguments, and the storages of those.

    Fake tensors are slow. Where only arguments are returned, so that no new memory has to be described, meta tensors
    tell as well whether one of them is resized.
    """
    if call.op.namespace == "aten" and all(r.alias_info is not None for r in call.op._schema.returns):
        try:
            return _run_on(call, "meta")
        except NotImplementedError:
            pass  # not every operator has a kernel for meta tensors: fake ones have other ways
    with FakeTensorMode(allow_non_fake_inputs=False):
        return _run_on(call, "cpu")


def _run_on(call: _Call, device: str) -> tuple[Any, list[int]]:
    memo: dict[int, torch.Tensor] = {}
    args = [_fake(value, memo, device) for value in call.args]
    kwargs = {name: _fake(value, memo, device) for name, value in call.kwargs.items()}
    before = [(t, tuple(t.size()), tuple(t.stride())) for t in memo.values()]
    returned = call.op(*args, **kwargs)
    if any((tuple(t.size()), tuple(t.stride())) != (size, stride) for t, size, stride in before):
        raise CaptureError("metadata-mutation", f"{call.name} resizes an argument")
    return returned, [fake.untyped_storage()._cdata for fake in memo.values()]


def _aliased(call: _Call, declared: Any) -> Any:
    """The written argument that a return of the schema is."""
    for argument, value in call.operands():
        alias = argument.alias_info
        if alias is not None and alias.is_write and alias.before_set == declared.alias_info.before_set:
            return value
    raise CaptureError("aliasing-operator", call.name)


def _refuse_aliases(call: _Call, results: Sequence[Any], storages: Sequence[int]) -> None:
    """No fresh result may share memory with an argument, nor with another result."""
    known = set(storages)
    for tensor in leaves(results):
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError("host-read", f"{call.name} returns {type(tensor).__name__}")
        if not _is_fake(tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CaptureError("unsupported-tensor", f"{call.name} returns layout {tensor.layout}")
        storage = tensor.untyped_storage()._cdata
        if storage in known:
            raise CaptureError("aliasing-operator", f"{call.name} returns a view of an argument or of another result")
        known.add(storage)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _fake(value: Any, memo: dict[int, torch.Tensor], device: str) -> Any:
    """``value`` with every tensor replaced by one of the same layout without memory, the same object by the same."""
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(v, memo, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in memo:
        memo[id(value)] = _fake_tensor(value, device)
    return memo[id(value)]


def _fake_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    storage = torch.empty(elements, dtype=tensor.dtype, device=device)
    return torch.as_strided(storage, tensor.size(), tensor.stride(), tensor.storage_offset())


def _layout(call: _Call, fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Sizes, strides and dtype of a result that gets memory of the region."""
    if fake.device.type != "cpu":
        raise CaptureError("foreign-device", call.name)
    size, stride = tuple(fake.size()), tuple(fake.stride())
    if any(type(n) is not int for n in (*size, *stride)):
        raise CaptureError("dynamic-output", call.name)
    if any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True)):
        raise CaptureError("aliasing-operator", f"{call.name} returns elements that share memory")
    return size, stride, fake.dtype


# -- recording ----------------------------------------------------------------------------------------------------


def _record(recorder: Recorder, call: _Call, results: Sequence[Any]) -> Any:
    native_call = recorder.native.OperatorCall(call.name, call.op._schema.overload_name, call.args, dict(call.kwargs))
    uses = list(_uses(call))
    if len(native_call.tensors()) != len(uses):
        raise CaptureError("unsupported-operator", f"{call.name} takes tensors in a way that is not known")
    moves = tuple(_moves(recorder, use) for use in uses)
    returned = [_place(recorder, call, result) for result in results]
    fresh = [_if_fresh(t, before) for t, before in zip(leaves(returned), leaves(results), strict=True)]
    uses += [Operand(tensor, reads=False, writes=True) for tensor in fresh if tensor is not None]
    kept = tuple(fresh) if any(t is not None for t in fresh) else ()
    signature = (str(call.op), describe(recorder, [value for _, value in call.operands()]))
    random = torch.Tag.nondeterministic_seeded in call.op.tags or _takes_generator(call)
    launch = OperatorLaunch(native_call, moves, kept)
    nondeterministic = nondeterministic_operator(call.op)
    recorder.operator(str(call.op), uses, signature, launch, random=random, nondeterministic=nondeterministic)
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _takes_generator(call: _Call) -> bool:
    return any("Generator" in str(argument.type) for argument in call.op._schema.arguments)


def _place(recorder: Recorder, call: _Call, result: Any) -> Any:
    """``result`` with memory of the region for every fake tensor in it."""
    if isinstance(result, (list, tuple)):
        return [_place(recorder, call, item) for item in result]
    if not isinstance(result, torch.Tensor) or not _is_fake(result):
        return result
    return recorder.allocate(*_layout(call, result))


def _if_fresh(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is before else tensor


def _uses(call: _Call) -> Iterator[Operand]:
    """Each tensor argument in the order of the schema, and whether it is read or written."""
    for argument, value in call.operands():
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (argument.is_out and call.op.namespace == "aten")
        for item in leaves(value):
            if isinstance(item, torch.Tensor):
                yield Operand(item, reads, writes)
            elif "Tensor" in str(argument.type):
                yield Operand(None, reads=False, writes=False)


def _moves(recorder: Recorder, use: Operand) -> bool:
    if use.tensor is None or recorder.opaque_name(use.tensor) is not None:
        return False
    return recorder.owner(use.tensor).kind is not AllocationKind.CONSTANT
