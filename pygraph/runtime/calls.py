"""One call of an operator: its arguments in the order of its schema, its results without running anything, and its
comparison with other calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from pygraph.compat import (
    DataDependentOutputException,
    DispatchKey,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
)
from pygraph.errors import CaptureError
from pygraph.program.recording import is_written

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device, type(None))
"""Types of arguments whose ``repr`` is equal only for arguments that make an operator do the same."""


@dataclass(frozen=True)
class OperatorCall:
    """One operator with its arguments in the order of its schema, defaults filled in. Caches operands and tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """``aten::addmm``."""
        return str(self.op._schema.name)

    def operands(self) -> Sequence[tuple[Any, Any]]:
        """Each argument of the schema with its value."""
        return self._operands

    @cached_property
    def _operands(self) -> list[tuple[Any, Any]]:
        declared, args = _declared(self.op), self.args
        found = [(argument, value) for (argument, _, _), value in zip(declared, args)]  # noqa: B905
        return found + [(each, self.kwargs.get(name, default)) for each, name, default in declared[len(args) :]]

    def value(self, position: int, argument: Any) -> Any:
        """Value of ``argument``, which is at ``position`` of the schema."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs[argument.name] if argument.name in self.kwargs else _default(argument)

    def tensors(self) -> Sequence[torch.Tensor]:
        """Every tensor argument."""
        return self._tensors

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        return [t for _, value in self._operands for t in tensors_in(value)]

    def written(self) -> set[int]:
        """The ``id`` of each tensor argument that the call may write."""
        written = (value for argument, value in self.operands() if is_written(self.op._schema, argument))
        return {id(t) for value in written for t in tensors_in(value)}

    @property
    def text(self) -> str:
        """``aten.addmm.default``."""
        return text_of(self.op)

    def signature(self, opaque: Callable[[torch.Tensor], str | None] = lambda _: None) -> Hashable:
        """A hashable that is equal for calls that do the same. ``opaque`` names a tensor that has no address. Raises
        CaptureError (``unsupported-argument``) for an object that cannot be compared."""
        return (self.text, _describe([value for _, value in self.operands()], {}, opaque))


@lru_cache(maxsize=1024)
def text_of(op: Any) -> str:
    """The name of an operator with its overload. Cached, since torch makes it anew each time."""
    return str(op)


@lru_cache(maxsize=1024)
def _declared(op: OpOverload) -> tuple[tuple[Any, str, Any], ...]:
    """The arguments of an operator's schema, with names and defaults. Cached, since torch makes them anew each time."""
    return tuple((each, each.name, _default(each)) for each in op._schema.arguments)


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else None


@lru_cache(maxsize=1024)
def takes(op: OpOverload, kind: str) -> bool:
    """True if the text of the schema of ``op`` contains the type name ``kind``."""
    return kind in str(op._schema)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists and tuples that is not None, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """The tensors in nested lists and tuples, in order; or ``value`` itself if it is a tensor, as nearly always."""
    if isinstance(value, torch.Tensor):
        return (value,)
    nested = isinstance(value, (list, tuple))
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)] if nested else ()


_RESIZING = frozenset({"inductor::resize_storage_bytes_", "inductor::accumulate_grad_"})
"""Operators that change storages without declaring it in their schema."""


_OF_A_LIBRARY = frozenset({"aten::mkldnn_rnn_layer_backward"})
"""Operators that read a workspace filled by a library, which also decides its size. They crash on other contents."""

_INDEXING = frozenset({"aten::index", "aten::_unsafe_index"})


@lru_cache(maxsize=1024)
def _may_be_sized_by_data(op: OpOverload) -> bool:
    """True if the contents of arguments decide the result sizes of some calls of an operator."""
    return torch.Tag.dynamic_output_shape in op.tags


def _is_sized_by_data(call: OperatorCall) -> bool:
    """True if the contents of arguments decide the result sizes of ``call``; of indices, only those of masks do."""
    if not _may_be_sized_by_data(call.op):
        return False
    given = {argument.name: value for argument, value in call.operands()}
    if call.name == "aten::repeat_interleave":
        return given.get("output_size") is None
    masks = (torch.bool, torch.uint8)
    return call.name not in _INDEXING or any(index.dtype in masks for index in tensors_in(given["indices"]))


@lru_cache(maxsize=1024)
def _never_captured(op: OpOverload) -> str | None:
    """Reason why no call of an operator is captured, if so."""
    name, returns = str(op._schema.name), [str(each.type) for each in op._schema.returns]
    if name in _OF_A_LIBRARY:
        return "dynamic-output"
    if torch.Tag.data_dependent_output in op.tags or (returns and not any("Tensor" in each for each in returns)):
        return "host-read"
    return "metadata-mutation" if torch.Tag.inplace_view in op.tags or name in _RESIZING else None


def check_call(call: OperatorCall) -> None:
    """Raise CaptureError for an operator whose results are not known without running it, and for one that changes the
    metadata of its arguments, or draws from a generator that it takes as an argument."""
    reason = "dynamic-output" if _is_sized_by_data(call) else _never_captured(call.op)
    if reason is not None:
        raise CaptureError(reason, call.name)
    if takes(call.op, "Generator") and any(isinstance(value, torch.Generator) for _, value in call.operands()):
        raise CaptureError("generator-argument", call.name)


# -- results, without running anything ----------------------------------------------------------------------------


def run_fake(call: OperatorCall, device: str | None = None) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Each return of the schema on fake tensors (or on tensors of the ``device`` ``meta``, if given), and the fake
    tensor of each tensor argument by its ``id``. Raises CaptureError: ``dynamic-output``, ``metadata-mutation``.
    """
    declared = call.op._schema.returns
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
    return list(returned if len(declared) > 1 else [returned][: len(declared)]), fakes


def fake_results(call: OperatorCall) -> list[Any]:
    """Each return of the schema: the argument that it is declared to be, or fake tensors (also in lists).

    No fake tensor shares memory with an argument or with another fake tensor.
    """
    # Fake tensors take 2 ms. If nothing new is returned, meta tensors also show whether an argument is resized.
    has_meta = call.op.namespace == "aten" and call.op.has_kernel_for_dispatch_key(DispatchKey.Meta)
    values, fakes = run_fake(call, "meta" if has_meta and None not in returned_arguments(call.op) else None)
    results = with_arguments(call, _laid_out(call, values))
    storages = {fake.untyped_storage()._cdata for fake in fakes.values()}
    for tensor in leaves(results):
        check_result(call, tensor)
        if not isinstance(tensor, FakeTensor):
            continue
        storage = tensor.untyped_storage()._cdata
        if storage in storages:
            raise CaptureError("aliasing-operator", f"{call.name} returns a view of an argument or of another result")
        storages.add(storage)
    return results


def _laid_out(call: OperatorCall, fakes: list[Any]) -> list[Any]:
    """``fakes`` with the strides that CPU kernels give to results. If an argument is not contiguous, fake kernels often
    return different ones, such as that of log_softmax's backward (2.13). The operator is run on zeros to find out,
    unless it draws or writes an argument; if it fails on zeros, the strides of ``fakes`` are kept."""
    changes = call.op._schema.is_mutable or torch.Tag.nondeterministic_seeded in call.op.tags
    if changes or not fakes or all(tensor.is_contiguous() for tensor in call.tensors()):
        return fakes
    zeros: dict[int, torch.Tensor] = {}
    try:
        arguments = _fake(call.args, zeros, None)
        returned = call.op(*arguments, **{name: _fake(value, zeros, None) for name, value in call.kwargs.items()})
    except (RuntimeError, IndexError, ValueError):
        return fakes
    return [_relaid(*pair) for pair in zip(fakes, returned if len(fakes) > 1 else [returned], strict=True)]


def _relaid(fake: Any, real: Any) -> Any:
    if isinstance(fake, (list, tuple)):
        return [_relaid(*pair) for pair in zip(fake, real, strict=True)]
    if not isinstance(fake, FakeTensor) or fake.size() != real.size() or fake.stride() == real.stride():
        return fake
    with fake.fake_mode:
        return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=real.device)


def check_result(call: OperatorCall, result: Any) -> None:
    """Raise CaptureError unless ``result`` is a tensor that is fully described by its address and layout."""
    if not isinstance(result, torch.Tensor):
        raise CaptureError("host-read", f"{call.name} returns {type(result).__name__}")
    if result.layout is not torch.strided or result.is_quantized:
        raise CaptureError("unsupported-tensor", f"{call.name} returns layout {result.layout}")
    if result.is_conj() or result.is_neg():  # a tensor at an address has neither bit
        raise CaptureError("unsupported-tensor", f"{call.name} returns a lazy view")


def with_arguments(call: OperatorCall, values: Sequence[Any]) -> list[Any]:
    """``values`` of each return of the schema; if a return is a written argument, that argument instead."""
    places = zip(returned_arguments(call.op), values, strict=True)
    return [value if place is None else call.operands()[place][1] for place, value in places]


@lru_cache(maxsize=1024)
def returned_arguments(op: OpOverload) -> tuple[int | None, ...]:
    """For each return of the schema of ``op``, the position of the written argument that it is; None if it is new.
    Raises CaptureError (``aliasing-operator``) if it is an argument that is not written."""
    written = [(at, argument.alias_info) for at, (argument, _, _) in enumerate(_declared(op))]
    places = {
        frozenset(alias.before_set): at for at, alias in reversed(written) if alias is not None and alias.is_write
    }
    sets = [None if each.alias_info is None else frozenset(each.alias_info.before_set) for each in op._schema.returns]
    if any(each is not None and each not in places for each in sets):
        raise CaptureError("aliasing-operator", str(op._schema.name))
    return tuple(None if each is None else places[each] for each in sets)


def _fake(value: Any, fakes: dict[int, torch.Tensor], device: str | None) -> Any:
    """``value`` with every tensor replaced by zeros of the same layout (without memory, under a mode for fake tensors);
    one object is always replaced by the same zeros."""
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(v, fakes, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in fakes:
        where: Any = device or value.device
        if value.layout is torch.strided:
            elements, make = value.untyped_storage().nbytes() // value.dtype.itemsize, torch.zeros
            if device == "meta":  # which has no contents
                make = torch.empty
            storage = make(elements, dtype=value.dtype, device=where)
            fakes[id(value)] = storage.as_strided(value.size(), value.stride(), value.storage_offset())
        else:
            fakes[id(value)] = torch.zeros(value.size(), dtype=value.dtype, device=where)
    return fakes[id(value)]


# -- comparing two calls ------------------------------------------------------------------------------------------


def _describe(value: Any, seen: dict[int, int], opaque: Callable[[torch.Tensor], str | None]) -> Hashable:
    """A hashable that is equal for arguments that make an operator do the same, wherever their memory lies.

    ``seen`` numbers the tensors and storages met so far, since sharing them matters to an operator. ``opaque`` names a
    tensor that has no address. Raises CaptureError (``unsupported-argument``) for an object that cannot be compared.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_describe(item, seen, opaque) for item in value)
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if not isinstance(value, torch.Tensor):
        raise CaptureError("unsupported-argument", f"an operator is given {type(value).__name__}")
    name = opaque(value)
    if name is not None:
        return ("opaque", name)
    same_tensor = seen.setdefault(id(value), len(seen))
    same_storage = seen.setdefault(-value.untyped_storage()._cdata, len(seen))
    return (tuple(value.size()), tuple(value.stride()), str(value.dtype), same_tensor, same_storage)
