"""What the dispatcher is asked for while a region is captured, and how each operator is recorded.

Views are made for real on the stand-ins (they are metadata); everything else is recorded and returns memory of the
region. Fused kernels do not come this way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.compat import (
    DataDependentOutputException,
    DispatchKey,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
)
from pygraph.errors import CaptureError
from pygraph.runtime.host.recorder import Operand, Recorder
from pygraph.runtime.nondeterminism import nondeterministic_operator
from pygraph.runtime.provenance import blame
from pygraph.runtime.recording import COLLECTIVES, AllocationKind, is_written

__all__ = ["RecordOperators"]

_BUILT_IN = frozenset({"aten", "prims", "inductor", "mkldnn", "mkl", "onednn", "quantized"})
"""Namespaces whose schemas tell all that an operator does. Any other may count, print or communicate, and would do so
once more in each comparison."""

_VIEWS = frozenset({"inductor::_reinterpret_tensor", "inductor::_alloc_from_pool"})
"""Views whose schema does not say so."""

_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Allocations, and nothing else."""

_RESIZING = frozenset({"inductor::resize_storage_bytes_", "inductor::accumulate_grad_"})
"""Operators that change storages behind their schema's back."""

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device, type(None))
"""Types of arguments whose ``repr`` is equal only for those that make an operator do the same."""


class RecordOperators(TorchDispatchMode):
    """While open, records every operator of this thread that reaches the dispatcher.

    What does not ask the dispatcher finds no memory.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = _Call(func, tuple(args), dict(kwargs or {}))
        if isinstance(func, OpOverload) and func.namespace in _BUILT_IN:
            # An operator that is defined by others alone only gets here where autograd keys are switched off.
            defined = func.has_kernel_for_dispatch_key
            if defined(DispatchKey.CompositeImplicitAutograd) and not defined(DispatchKey.CPU):
                with self:
                    return func.decompose(*call.args, **call.kwargs)
        try:
            if not isinstance(func, OpOverload):
                raise CaptureError("unsupported-operator", str(func))
            _refuse(self._recorder, call)
            if _is_view(call):
                return _view(self._recorder, call)
            results = _fake_results(call)
            if call.name in _EMPTY:
                return _allocate(self._recorder, call, results[0])
            return _record(self._recorder, call, results)
        except Exception:
            blame(str(func))
            raise


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
        return [t for _, value in self.operands() for t in _leaves(value) if isinstance(t, torch.Tensor)]


def _leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists and tuples that is not None, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


# -- what cannot be recorded --------------------------------------------------------------------------------------


def _refuse(recorder: Recorder, call: _Call) -> None:
    tags = call.op.tags
    if call.op.namespace in COLLECTIVES:
        raise CaptureError("collective", call.name)
    if call.op.namespace not in _BUILT_IN:
        raise CaptureError("opaque-operator", f"{call.name}: what it does besides its schema is not known")
    if torch.Tag.dynamic_output_shape in tags:
        raise CaptureError("dynamic-output", call.name)
    if torch.Tag.data_dependent_output in tags or any("Tensor" not in str(r.type) for r in call.op._schema.returns):
        raise CaptureError("host-read", call.name)
    if torch.Tag.inplace_view in tags or call.name in _RESIZING:
        raise CaptureError("metadata-mutation", call.name)
    for argument, value in call.operands():
        if isinstance(value, torch.Generator):
            raise CaptureError("generator-argument", call.name)
        if isinstance(value, torch.device) and value.type != "cpu":
            raise CaptureError("foreign-device", f"{call.name} on {value}")
        if argument.name == "pin_memory" and value:
            raise CaptureError("pinned-memory", call.name)
    for tensor in call.tensors():
        recorder.word(tensor)  # raises where it is not known whose memory this is


# -- views --------------------------------------------------------------------------------------------------------


def _is_view(call: _Call) -> bool:
    schema = call.op._schema
    return call.name in _VIEWS or (not schema.is_mutable and any(r.alias_info is not None for r in schema.returns))


def _view(recorder: Recorder, call: _Call) -> Any:
    """Make a view for real. It touches metadata alone, which is checked: its memory is that of an argument."""
    if any(argument.name == "storage_offset" and value is not None for argument, value in call.operands()):
        # An offset from the start of the storage bakes in where in its storage an argument lies.
        owners = map(recorder.owner, call.tensors())
        recorder.offset_sensitive.update(owner.index for owner in owners if owner.kind is AllocationKind.INPUT)
    result = call.op(*call.args, **call.kwargs)
    bases = {recorder.native.storage_base(t) for t in call.tensors()}
    for tensor in _leaves(result):
        recorder.owner(tensor)
        if recorder.native.storage_base(tensor) not in bases:
            raise CaptureError("aliasing-operator", f"{call.name} returned memory of its own")
    return result


# -- results, without running anything ----------------------------------------------------------------------------


def _fake_results(call: _Call) -> list[Any]:
    """What each return of the schema is: the argument that it is declared to be, or fake tensors (also in lists).

    No fake tensor shares memory with an argument, nor with another one.
    """
    declared = call.op._schema.returns
    # Fake tensors take 2 ms. Where nothing new is returned, meta tensors tell as well whether an argument is resized.
    has_meta = call.op.namespace == "aten" and call.op.has_kernel_for_dispatch_key(DispatchKey.Meta)
    device = "meta" if has_meta and all(r.alias_info is not None for r in declared) else "cpu"
    fakes: dict[int, torch.Tensor] = {}
    try:
        with contextlib.nullcontext() if device == "meta" else FakeTensorMode(allow_non_fake_inputs=False):
            args = _fake(call.args, fakes, device)
            kwargs = {name: _fake(value, fakes, device) for name, value in call.kwargs.items()}
            before = [(t, t.size(), t.stride()) for t in fakes.values()]
            returned = call.op(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise CaptureError("dynamic-output", call.name) from error
    if any((t.size(), t.stride()) != (size, stride) for t, size, stride in before):
        raise CaptureError("metadata-mutation", f"{call.name} resizes an argument")
    values = returned if len(declared) > 1 else [returned][: len(declared)]
    results = [value if r.alias_info is None else _aliased(call, r) for r, value in zip(declared, values, strict=True)]
    storages = {fake.untyped_storage()._cdata for fake in fakes.values()}
    for tensor in _leaves(results):
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError("host-read", f"{call.name} returns {type(tensor).__name__}")
        if not isinstance(tensor, FakeTensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CaptureError("unsupported-tensor", f"{call.name} returns layout {tensor.layout}")
        storage = tensor.untyped_storage()._cdata
        if storage in storages:
            raise CaptureError("aliasing-operator", f"{call.name} returns a view of an argument or of another result")
        storages.add(storage)
    return results


def _aliased(call: _Call, declared: Any) -> Any:
    """The written argument that a return of the schema is."""
    for argument, value in call.operands():
        alias = argument.alias_info
        if alias is not None and alias.is_write and alias.before_set == declared.alias_info.before_set:
            return value
    raise CaptureError("aliasing-operator", call.name)


def _fake(value: Any, fakes: dict[int, torch.Tensor], device: str) -> Any:
    """``value`` with every tensor replaced by one of the same layout without memory, the same object by the same."""
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(v, fakes, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in fakes:
        if value.layout is torch.strided:
            elements = value.untyped_storage().nbytes() // value.dtype.itemsize
            storage = torch.empty(elements, dtype=value.dtype, device=device)
            fakes[id(value)] = storage.as_strided(value.size(), value.stride(), value.storage_offset())
        else:
            fakes[id(value)] = torch.empty(value.size(), dtype=value.dtype, device=device)
    return fakes[id(value)]


# -- recording ----------------------------------------------------------------------------------------------------


def _allocate(recorder: Recorder, call: _Call, fake: torch.Tensor) -> torch.Tensor:
    """Memory of the region for a result."""
    if fake.device.type != "cpu":
        raise CaptureError("foreign-device", call.name)
    if any(n > 1 and s == 0 for n, s in zip(fake.size(), fake.stride(), strict=True)):
        raise CaptureError("aliasing-operator", f"{call.name} returns elements that share memory")
    return recorder.allocate(fake.size(), fake.stride(), fake.dtype)


def _record(recorder: Recorder, call: _Call, results: Sequence[Any]) -> Any:
    native_call = recorder.native.OperatorCall(call.name, call.op._schema.overload_name, call.args, dict(call.kwargs))
    operands = list(_operands(call))
    if len(native_call.tensors()) != len(operands):
        raise CaptureError("unsupported-operator", f"{call.name} takes tensors in a way that is not known")
    moves = [_moves(recorder, operand.tensor) for operand in operands]
    stored: list[torch.Tensor | None] = []

    def place(result: torch.Tensor | None) -> torch.Tensor | None:
        """What the region gets for a result: memory of its own, if it is a fake tensor."""
        fresh = _allocate(recorder, call, result) if isinstance(result, FakeTensor) else None
        if result is not None:
            stored.append(fresh)
        return result if fresh is None else fresh

    returned = [[place(t) for t in r] if isinstance(r, (list, tuple)) else place(r) for r in results]
    fresh = [tensor for tensor in stored if tensor is not None]
    operands += [Operand(tensor, writes=True) for tensor in fresh]
    recorder.launch(
        (native_call, moves, stored if fresh else []),
        str(call.op),
        (str(call.op), _describe(recorder, [value for _, value in call.operands()], {})),
        operands,
        random=torch.Tag.nondeterministic_seeded in call.op.tags or "Generator" in str(call.op._schema),
        nondeterministic=nondeterministic_operator(call.op),
    )
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _operands(call: _Call) -> Iterator[Operand]:
    """Each tensor argument in the order of the schema, and whether it is read or written."""
    for argument, value in call.operands():
        writes = is_written(call.op._schema, argument)
        reads = not (argument.is_out and call.op.namespace == "aten")
        for item in _leaves(value):
            if isinstance(item, torch.Tensor):
                yield Operand(item, reads, writes)
            elif "Tensor" in str(argument.type):
                yield Operand()


def _moves(recorder: Recorder, tensor: torch.Tensor | None) -> bool:
    """Whether the memory of a tensor argument is another at replay."""
    if tensor is None or recorder.opaque_name(tensor) is not None:
        return False
    return recorder.owner(tensor).kind is not AllocationKind.CONSTANT


def _describe(recorder: Recorder, value: Any, seen: dict[int, int]) -> Hashable:
    """A hashable that is equal for arguments that make an operator do the same, wherever their memory lies.

    ``seen`` numbers the tensors and storages met so far: what shares them is part of what an operator sees. Raises
    CaptureError (``unsupported-argument``) for an object that cannot be compared.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_describe(recorder, item, seen) for item in value)
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if not isinstance(value, torch.Tensor):
        raise CaptureError("unsupported-argument", f"an operator is given {type(value).__name__}")
    name = recorder.opaque_name(value)
    if name is not None:
        return ("opaque", name)
    same_tensor = seen.setdefault(id(value), len(seen))
    same_storage = seen.setdefault(-recorder.native.storage_base(value), len(seen))
    return (tuple(value.size()), tuple(value.stride()), str(value.dtype), same_tensor, same_storage)
