"""The operators that a callable runs while it is captured, with their numbers and the user's lines."""

from __future__ import annotations

import importlib.util
import os
import struct
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph import compat
from pygraph.errors import CaptureError
from pygraph.graphs.held import PLAIN, named_storages, storage_of
from pygraph.program.recording import Origin, is_read, is_written
from pygraph.runtime.calls import leaves
from pygraph.runtime.eager import OWN
from pygraph.runtime.provenance import blame
from pygraph.runtime.tensors import extent

_CONSTANT = 64
"""Maximum number of elements of a tensor of Python numbers that a capture on the CPU fills itself."""


_FOUND = (importlib.util.find_spec(name) for name in ("torch", "pygraph", "triton"))
_HOMES = tuple(os.path.dirname(os.path.abspath(str(each.origin))) + os.sep for each in _FOUND if each is not None)
_STANDARD = os.path.dirname(os.__file__) + os.sep


def user_line(frame: types.FrameType | None = None) -> str | None:
    """The innermost line outside of torch, PyGraph, Triton and the standard library, as ``file:line``; None if there is
    none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if _is_users(frame):
            name = frame.f_code.co_filename
            return f"{os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _is_users(frame: types.FrameType) -> bool:
    name = frame.f_code.co_filename
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    return not standard and not name.startswith((*_HOMES, "<"))


def origin_of_line(frame: types.FrameType | None = None) -> Origin:
    line = user_line(frame)
    return Origin(locs=() if line is None else (line,))


def last_frame(error: BaseException) -> types.FrameType | None:
    """The frame in which ``error`` was raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return None if step is None else step.tb_frame


@contextmanager
def metadata() -> Iterator[None]:
    """Context in which tensors get other memory, unseen by dispatch modes and autograd."""
    with compat.without_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        yield


_UNKEYED = frozenset(
    {"storage_offset", "untyped_storage", "storage", "_typed_storage", "is_shared", "data_ptr", "__dict__"}
    | {"_is_view", "_base", "_version", "retains_grad"}
)
"""Attributes of all tensors that are part of no key."""

_KEYED = frozenset(dir(torch.nn.Parameter)) - _UNKEYED
_ALIGNMENT = 16
"""Bytes by which the addresses of later calls are congruent to those of a capture."""


class Address(int):
    """An address that a callable reads in a capture. It may be passed on; comparisons, and ``-`` and ``//``, raise."""

    def __add__(self, other: int) -> Address:
        return Address(int(self) + other)

    def __mod__(self, other: int) -> int:
        return int(self) % other if other > 0 and _ALIGNMENT % other == 0 else self.__hash__()

    def __hash__(self) -> int:
        return int(_refuse_use("data_ptr"))

    def __eq__(self, _: object) -> bool:
        return bool(_refuse_use("data_ptr"))

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __and__ = __or__ = __xor__ = __sub__ = __rsub__ = __floordiv__ = __rshift__ = __eq__
    __radd__ = __add__


def _refuse_use(name: str) -> Any:
    blame(f"Tensor.{name}", origin_of_line())
    raise CaptureError("host-read", f"{name} of an argument, or of what is held, which no key has")


@contextmanager
def attributes_refused(tensors: Iterable[torch.Tensor], shown: Iterable[torch.Tensor]) -> Iterator[None]:
    """In the block, user code of this thread may use neither attributes that were set on ``tensors`` nor, of tensors
    in the memory of ``shown``, attributes that are part of no key. Code of torch, PyGraph and Triton may. A use raises
    CaptureError (``host-read``)."""
    thread, storages, given = get_ident(), set(map(storage_of, shown)), set(map(id, tensors))
    get, put = torch.Tensor.__getattribute__, torch.Tensor.__setattr__

    def watches(tensor: torch.Tensor, name: str) -> bool:
        if get_ident() != thread or not _is_users(sys._getframe(2)):
            return False
        if name not in _UNKEYED:  # protocols of other libraries are no attributes that somebody sets
            return id(tensor) in given and not name.startswith("__")
        return get(tensor, "layout") is torch.strided and get(tensor, "untyped_storage")()._cdata in storages

    def getattribute(tensor: torch.Tensor, name: str) -> Any:
        if name in _KEYED or not watches(tensor, name):
            return get(tensor, name)
        return (lambda: Address(get(tensor, name)())) if name == "data_ptr" else _refuse_use(name)

    def setattribute(tensor: torch.Tensor, name: str, value: Any) -> None:
        if name not in _KEYED and watches(tensor, name):
            _refuse_use(name)
        put(tensor, name, value)

    kind: Any = torch.Tensor
    kind.__getattribute__, kind.__setattr__ = getattribute, setattribute
    try:
        yield
    finally:
        del kind.__getattribute__, kind.__setattr__


Step = tuple[str, str, str | None]
"""An operator of a capture: its text with numbers, the memory of its tensors, and the user's line."""


_PUTS = frozenset(
    f"aten::{name}_"
    for name in (
        *("copy", "_foreach_copy", "fill", "zero", "_foreach_zero", "masked_fill", "masked_scatter"),
        *("index_copy", "index_fill", "index_put", "_index_put_impl", "scatter"),
    )
)
"""ATen operators that write values independent of the old ones."""


class Twice:
    """Finds operators that change ``memory`` again if all operators run once more: those that add to it, and those that
    write memory which an earlier operator has read. Operators other than ATen's count as only writing."""

    def __init__(self, memory: Iterable[torch.Tensor]) -> None:
        self._storages = set(map(storage_of, memory))
        self._read: list[tuple[int, int, int]] = []

    def check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises CaptureError (``uncaptured-work``)."""
        schema = getattr(func, "_schema", None)
        if not self._storages or schema is None:
            return
        is_view = not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)
        written = []
        for argument, value in _pairs(schema, args, kwargs):
            places = [_range(tensor) for tensor in _tensors_in(value) if _is_in(tensor, self._storages)]
            if is_written(schema, argument):
                written += places
                if places and is_read(schema, argument) and schema.name.startswith("aten::"):
                    self._refuse(func, adds=schema.name not in _PUTS or _accumulates(func, args, kwargs))
            elif not is_view:
                self._read += places
        self._refuse(func, adds=any(_overlap(one, other) for one in written for other in self._read))

    def _refuse(self, func: Any, *, adds: bool) -> None:
        if adds:
            blame(str(func).replace(".", "::", 1), origin_of_line())
            said = "what compare leaves out would be changed twice by a comparison: it is read, and written then"
            raise CaptureError("uncaptured-work", said)


def _pairs(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The arguments of a schema, each with its value."""
    given = [(each, kwargs.get(each.name)) for each in schema.arguments[len(args) :]]
    return [*zip(schema.arguments, args, strict=False), *given]


def _accumulates(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    added = "index_put" in str(func) and (kwargs.get("accumulate", False) or any(args[3:4]))
    return bool(added or "reduce" in str(func))


def _is_in(tensor: torch.Tensor, storages: Collection[int]) -> bool:
    return tensor.layout is torch.strided and storage_of(tensor) in storages


def _range(tensor: torch.Tensor) -> tuple[int, int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return storage_of(tensor), begin, begin + extent(tensor)


def _overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


class Watch(compat.TorchDispatchMode):
    """Mode that logs the operators of a capture before the driver records them. ``spared``: tensors that a comparison
    does not copy.

    Raises CaptureError (``unknown-memory``) for a tensor that existed before and is not held, if its name is found; the
    driver refuses tensors without a name.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        shown: Iterable[torch.Tensor],
        spared: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[Step] = []
        self._twice = Twice(spared)
        self._function, self._device = function, device
        self._known: dict[int, tuple[int, int]] = {}
        """For each storage of arguments and of results of operators: its number, and its first byte."""
        self._kept = list[StorageWeakRef]()
        """While these live, no storage that kernels' code makes unseen takes the place of a freed one."""
        self._made = 0
        self._written: list[tuple[int, int, int]] = []
        """Memory written by custom operators: under a dispatch mode, autograd may not notice."""
        self._named: dict[int, str] | None = None
        for tensor in shown:
            begin = int(tensor.storage_offset()) * tensor.element_size()
            number, first = self._known.get(storage_of(tensor), (self._number(), begin))
            self._known[storage_of(tensor)] = number, min(first, begin)
            self._kept.append(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "namespace", "") == "profiler":
            with compat.without_dispatch_modes():
                return func(*args, **given)
        if func is torch.ops.aten.lift_fresh.default and args[0].device.type == "cpu":
            if not args[0].untyped_storage().resizable():  # the memory is NumPy's, or of another such owner
                raise CaptureError("unknown-memory", "a tensor over memory of another library's")
            return self._constant(args[0])
        if func is torch.ops.aten.detach_.default:  # from torch.tensor: below autograd, it does nothing
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default
        line = user_line()
        operands = list(_tensors_in((args, given)))
        for tensor in operands:
            self._check(tensor, func)
        self._twice.check(func, args, given)
        if isinstance(func, compat.OpOverload) and func.namespace not in OWN:
            for argument, value in _pairs(func._schema, args, given):
                if is_written(func._schema, argument):
                    strided = (tensor for tensor in _tensors_in(value) if tensor.layout is torch.strided)
                    self._written += map(_range, strided)
        text, where = f"{func}({', '.join(_texts((args, given)))})", self.memory(operands)
        result = func(*args, **given)
        self._note(result, operands)
        self.log.append((text, f"{where} -> {self.memory(_tensors_in(result))}", line))
        return result

    def writes(self, tensor: torch.Tensor) -> bool:
        """True if a custom operator has written to the memory of ``tensor``, by its schema."""
        return any(_overlap(_range(tensor), each) for each in self._written)

    def memory(self, tensors: Iterable[torch.Tensor]) -> str:
        """Memory of tensors as text that is equal in each capture."""
        return ", ".join(map(self._place, tensors))

    def _place(self, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided:
            return str(tensor.layout)
        number, first = self._known.get(storage_of(tensor), (-1, 0))
        begin = int(tensor.storage_offset()) * tensor.element_size() - first
        return f"{number}+{begin} {tensor.dtype} {tuple(tensor.size())} {tensor.stride()}"

    def _number(self) -> int:
        self._made += 1
        return self._made

    def _constant(self, tensor: torch.Tensor) -> Any:
        """A tensor of a capture for one that is made of Python numbers."""
        small = tensor.numel() <= _CONSTANT
        with metadata():
            values = tensor.flatten().tolist() if small else []
        self.log.append((f"tensor({', '.join(map(_bits_text, values))})", str(tensor.dtype), user_line()))
        if small and self._device.type == "cpu":
            made: Any = torch.ops.aten.empty.memory_format(tensor.size(), dtype=tensor.dtype)
            flat = torch.ops.aten.view.default(made, [-1])
            for index, value in enumerate(values):
                torch.ops.aten.fill_.Scalar(torch.ops.aten.select.int(flat, 0, index), value)
        else:
            made = torch.ops.aten.lift_fresh.default(tensor)
        self._note(made, ())
        return made

    def _note(self, result: Any, operands: Sequence[torch.Tensor]) -> None:
        """Number new memory, which may lie at the address of freed memory."""
        old = {storage_of(tensor) for tensor in operands if tensor.layout is torch.strided}
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and storage_of(tensor) not in old:
                self._known[storage_of(tensor)] = self._number(), 0
                self._kept.append(StorageWeakRef(tensor.untyped_storage()))
                old.add(storage_of(tensor))

    def is_known(self, tensor: torch.Tensor) -> bool:
        """True if the memory of ``tensor`` is that of a stand-in, or was made in the capture."""
        return tensor.layout is torch.strided and storage_of(tensor) in self._known

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = storage_of(tensor)
        if storage in self._known:
            return
        if self._named is None:
            self._named = named_storages(self._function)
        name = self._named.get(storage)
        if name is not None:
            blame(str(func).replace(".", "::", 1), origin_of_line())
            raise CaptureError("unknown-memory", f"{name}: add it to held")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _texts(value: Any) -> Iterator[str]:
    """Texts of an operator's arguments: of plain values their bits, of tensors a dot."""
    if isinstance(value, torch.Tensor):
        yield "·"
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (f"{name}={text}" for text in _texts(item))
    else:
        yield _bits_text(value) if type(value) in PLAIN else type(value).__name__


def _bits_text(value: Any) -> str:
    return f"{value!r}" if type(value) is not float or value == value else f"nan {struct.pack('<d', value).hex()}"


def hold_against(before: Sequence[Step], now: Sequence[Step]) -> None:
    """Raise CaptureError if the operators of two captures differ."""
    for (text, memory, _), (other, elsewhere, line) in zip(before, now, strict=False):
        if (text, memory) != (other, elsewhere):
            name, same = other.partition("(")[0], text.partition("(")[0] == other.partition("(")[0]
            blame(name.replace(".", "::", 1), Origin(locs=(line,) if line else ()))
            said = f"{text} became {other}" if text != other else f"{name} got, or made, another tensor"
            said += f" at {line}" if line else ""
            raise CaptureError("unstable-number" if same and text != other else "unstable-launches", said)
    if len(before) != len(now):
        raise CaptureError("unstable-launches", f"{len(before)} operators in one capture, {len(now)} in the next")
