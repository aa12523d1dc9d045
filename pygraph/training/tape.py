"""The tape: a step's operators below autograd, as they ran, written down as a function of the tensors from outside.

a3 …    tensors that were there before the step, by their number in the walk: the function's arguments
t0 …    what operators made
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import pygraph
from pygraph.compat import OpOverload, TorchDispatchMode, below_autocast
from pygraph.errors import CaptureError
from pygraph.program.recording import COLLECTIVES, Origin
from pygraph.runtime.calls import PLAIN, OperatorCall, check_call
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import digest

__all__ = ["HostReads", "Tape", "user_line"]

_Memory = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
"""What an operator sees of a tensor: storage, offset, size, strides, type."""

_BUILT_IN = frozenset({"aten", "prims", "mkldnn", "mkl", "onednn", "quantized"})
"""Namespaces whose schemas tell all that an operator does."""

_CONSTANT = 1 << 16
"""Bytes of the largest tensor that is made from Python numbers and kept with the tape."""

_SAME_AS = {torch.ops.aten._unsafe_view.default: torch.ops.aten.view.default}
"""Operators that do what another one does, whose schema tells it."""

_TENSORS = re.compile(r"(?<![\w'])[at]\d+(?![\w'])")
"""The tensors that a call names."""

_READ_IN_PIECES = frozenset({"tensor_split", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions that no operator stands for: they read a tensor of lengths on the host, and call operators with numbers."""

_HOMES = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (torch, pygraph))


def _memory(tensor: torch.Tensor) -> _Memory:
    """What an operator sees of ``tensor``. Raises CaptureError (``unsupported-tensor``) unless it is a plain one."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        raise CaptureError("unsupported-tensor", f"{type(tensor).__name__}, layout {tensor.layout}")
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype


def user_line(frame: FrameType | None = None) -> str | None:
    """The innermost line that is neither torch's nor PyGraph's, as ``file:line``; None where there is none, as on
    threads of the autograd engine."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_HOMES, "<")):
            return f"{os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def _below_autograd() -> Iterator[None]:
    """Operators do what they did on the tape: no gradients, and no casts but those that are written down."""
    with torch.inference_mode(False), torch.no_grad(), below_autocast():
        yield


class HostReads(TorchFunctionMode):
    """While open, ``tape`` is refused if a function reads a tensor on the host that no operator is given."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in _READ_IN_PIECES and any(map(_is_lengths, (*args[1:], *given.values()))):
            self._tape.refuse("host-read", "the host reads lengths from a tensor", name, user_line())
        return func(*args, **given)


def _is_lengths(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_floating_point()


class Tape(TorchDispatchMode):
    """While open, operators run and are written down.

    ``outside`` are the tensors from outside, in the order of the walk. The first operator that a tape cannot hold is
    the ``refusal``: the step goes on, unwritten.
    """

    supports_higher_order_operators = True

    def __init__(self, outside: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: Refusal | None = None
        self.arguments: list[int] = []
        """Tensors from outside that operators use, by their number in the walk. From the length of the walk on: all of
        the memory behind such a tensor, as one row."""
        self.written: set[int] = set()
        """Those of them that operators write."""
        self.lines: list[tuple[str, str, str]] = []
        """Results, call and user's line of each operator."""
        self._outside = outside
        self._names: dict[_Memory, str] = {}
        self._numbers: dict[_Memory, int] = {}
        """Tensors from outside that no operator has used. What an operator makes may look the same."""
        self._owners: dict[int, str] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._globals: dict[str, Any] = {
            "torch": torch,
            "device": torch.device,
            "inf": float("inf"),
            "nan": float("nan"),
        }
        self._made = 0
        for number, tensor in enumerate(outside):
            try:
                memory = _memory(tensor)
            except CaptureError:
                continue  # it is refused where an operator meets it
            self._numbers.setdefault(memory, number)
            self._hold(tensor)

    # -- writing ------------------------------------------------------------------------------------------------------

    def operators(self) -> list[str]:
        """The names of the operators that were written down, in order."""
        named = [call.partition("(")[0] for target, call, _ in self.lines if target != "return"]
        return [str(self._globals.get(name, name)) for name in named]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        before = None
        if self.refusal is None:
            before = self._guarded(func, lambda: self._call(func, args, given))
        result = func(*args, **given)
        if before is not None:
            self._guarded(func, lambda: self._record(func, before, result))
        return result

    def refuse(self, reason: str, detail: str, name: str | None = None, line: str | None = None) -> None:
        """Give the tape up, unless it was before."""
        if self.refusal is None:
            self.refusal = Refusal(reason, detail, name, line)

    def _guarded(self, func: Any, write: Callable[[], Any]) -> Any:
        profiler = sys.getprofile()
        sys.setprofile(None)
        try:
            return write()
        except CaptureError as error:
            self.refuse(error.reason, error.detail, str(func), user_line())
        except Exception as error:  # noqa: BLE001 - the step is the user's, and must go on
            self.refuse("tape-failed", f"{type(error).__name__}: {error}", str(func), user_line())
        finally:
            sys.setprofile(profiler)
        return None

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """The call of an operator that is about to run; None for one that is none."""
        if not isinstance(func, OpOverload):
            raise CaptureError("unsupported-operator", str(func))
        if func.namespace == "profiler":
            return None
        if func is torch.ops.aten.set_.source_Storage and self._made_here(args[0]) and not args[0].numel():
            return self._whole_storage(args[1], args[0].dtype)
        call = OperatorCall(func, tuple(args), kwargs)
        if func.namespace in COLLECTIVES:
            raise CaptureError("collective", call.name)
        if func.namespace not in _BUILT_IN:
            raise CaptureError("opaque-operator", f"{call.name}: what it does besides its schema is not known")
        check_call(call)
        written = call.written()
        owners = [self._owner(tensor) for tensor in call.tensors() if id(tensor) in written]
        self.written.update(int(owner[1:]) % len(self._outside) for owner in owners if owner.startswith("a"))
        if func is torch.ops.aten.lift_fresh.default and self._is_new(args[0]):
            if not args[0].numel():
                made = f"{list(args[0].size())}, dtype={args[0].dtype}, device={args[0].device!r}"
                return f"{self._named(torch.ops.aten.empty.memory_format)}({made})"
            return f"{self._named(torch.ops.aten.clone.default)}({self._constant(args[0])})"
        func = _SAME_AS.get(func, func)
        texts = [self._text(value) for value in args]
        texts += [f"{name}={self._text(value)}" for name, value in kwargs.items()]
        return f"{self._named(func)}({', '.join(texts)})"

    def _made_here(self, tensor: torch.Tensor) -> bool:
        return self._owners.get(_memory(tensor)[0], "").startswith("t")

    def _whole_storage(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> str:
        """An empty tensor that gets a storage from outside becomes a view of it: so do cuDNN's recurrent layers see all
        of their weights. Raises CaptureError for another storage or type."""
        for number, tensor in enumerate(self._outside):
            if tensor.dtype == dtype and tensor.untyped_storage()._cdata == storage._cdata:
                whole = len(self._outside) + number
                if whole not in self.arguments:
                    self.arguments.append(whole)
                return f"{self._named(torch.ops.aten.alias.default)}(a{whole})"
        raise CaptureError("metadata-mutation", "aten::set_")

    def operands(self, outside: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The function's arguments, of the tensors that a walk finds."""
        count = len(outside)
        return [outside[n] if n < count else _whole(outside[n - count]) for n in self.arguments]

    def _named(self, func: Any) -> str:
        """The name that an operator has in the function."""
        name = str(func).replace(".", "_")
        self._globals[name] = func
        return name

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether no operator has made the memory of ``tensor``, nor was it there before the step."""
        return _memory(tensor)[0] not in self._storages

    def _is_idle(self, tensor: torch.Tensor) -> bool:
        """Whether a new tensor is an empty one of the CPU, in a step that computes elsewhere. No replay makes it."""
        elsewhere = not any(each.is_cpu for each in self._outside)
        return elsewhere and tensor.is_cpu and not tensor.numel() and self._is_new(tensor)

    def _constant(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that Python code fills with numbers, as ``torch.tensor`` does: one for its contents."""
        if tensor.nbytes > _CONSTANT:
            raise CaptureError(
                "large-constant", f"the step makes a tensor of {tensor.nbytes} bytes from Python numbers"
            )
        value = tensor.detach().clone()
        facts = repr((value.dtype, value.size(), value.stride(), value.device)).encode()
        name = f"c_{hashlib.sha256(facts + digest(value)).hexdigest()[:32]}"
        self._globals[name] = value
        return name

    def _record(self, func: Any, call: str, result: Any) -> None:
        before = self._made
        if isinstance(result, torch.Tensor) and self._is_idle(result):
            call = self._constant(result)
        target = self._target(result)
        if func._schema.is_mutable or self._made > before:
            self.lines.append((target if self._made > before else "", call, user_line() or ""))
        elif not _returns_views(func):
            self.lines.append(("", call, user_line() or ""))

    def _target(self, result: Any) -> str:
        """What stands left of ``=`` for a result: a new name for each tensor that was not there before."""
        if isinstance(result, (list, tuple)):
            return f"({' '.join(f'{self._target(item)},' for item in result)})"
        if not isinstance(result, torch.Tensor):
            return "_"
        memory = _memory(result)
        if memory in self._names:
            return "_"
        name = f"t{self._made}"
        self._made += 1
        self._names[memory] = name
        if memory[0] not in self._storages:
            self._owners[memory[0]] = name
        self._hold(result)
        return name

    def _hold(self, tensor: torch.Tensor) -> None:
        """Make sure that nothing else ever has the address of a storage. Its memory is not kept."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def _name(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that an operator is given."""
        memory = _memory(tensor)
        if memory in self._names:
            return self._names[memory]
        if memory not in self._numbers:
            if memory[0] in self._storages:
                raise CaptureError("unknown-view", "a tensor is a view of another one that no operator made")
            raise CaptureError(
                "unreachable-tensor",
                f"a tensor of size {list(tensor.size())} was there before the step, at a place that the step's "
                "arguments, closure and globals do not lead to",
            )
        number = self._numbers[memory]
        source = self._outside[number]
        if source.requires_grad and not source.is_leaf:
            raise CaptureError("outer-graph", "a tensor from outside of the step has a history that autograd follows")
        self._names[memory] = f"a{number}"
        self.arguments.append(number)
        self._owners.setdefault(memory[0], f"a{number}")
        return f"a{number}"

    def _owner(self, tensor: torch.Tensor) -> str:
        """The tensor that first showed the memory of ``tensor``."""
        self._name(tensor)
        return self._owners[_memory(tensor)[0]]

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._name(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) not in PLAIN:  # these are written as Python writes them
            raise CaptureError("unsupported-argument", f"an operator is given {type(value).__name__}")
        return repr(value)

    # -- reading ------------------------------------------------------------------------------------------------------

    def returning(self, results: Sequence[torch.Tensor]) -> None:
        """End the tape: the function returns ``results``, each a tensor of its own. Raises CaptureError for one that no
        operator made."""
        names: list[str] = []
        for result in results:
            name = self._name(result)
            if name in names or name.startswith("a"):
                self.lines.append((f"t{self._made}", f"{self._named(torch.ops.aten.alias.default)}({name})", ""))
                name = f"t{self._made}"
                self._made += 1
            names.append(name)
        self.lines.append(("return", f"[{', '.join(names)}]", ""))
        self._outside = ()
        for kept in (self._names, self._numbers, self._owners, self._storages):
            kept.clear()

    def differs(self, other: Tape) -> Refusal | None:
        """What the other tape has otherwise, at the first operator that is another one."""
        if self.arguments == other.arguments and [x[:2] for x in self.lines] == [x[:2] for x in other.lines]:
            return None
        for (_, mine, _), (_, its, line) in zip(self.lines, other.lines, strict=False):
            if mine != its:
                detail = f"from one call to the next, {mine} became {its}"
                return Refusal("unsteady-step", detail, its.partition("(")[0], line or None)
        return Refusal("unsteady-step", f"{len(self.lines)} operators in one call, {len(other.lines)} in the next")

    def function(self) -> tuple[Callable[[list[Any]], Any], dict[int, Origin]]:
        """The tape as a function of the tensors ``arguments``, in a list that it empties, and what its lines run."""
        last: dict[str, int] = {}
        for index, (_, call, _) in enumerate(self.lines):
            last.update(dict.fromkeys(_TENSORS.findall(call), index))
        dead: dict[int, list[str]] = {}
        for name, index in last.items():
            dead.setdefault(index, []).append(name)
        taken = "".join(f"a{number}, " for number in self.arguments)
        text = ["def step(args):", f"    {taken}= args" if taken else "    pass", "    args.clear()"]
        text.append("    with below_autograd():")
        origins: dict[int, Origin] = {}
        for index, (target, call, line) in enumerate(self.lines):
            joined = f"return {call}" if target == "return" else f"{target} = {call}" if target else call
            text.append(f"        {joined}")
            origins[len(text)] = Origin((call.partition("(")[0],), (line,) if line else ())
            if target != "return" and dead.get(index):
                text.append(f"        del {', '.join(dead[index])}")
        namespace = {**self._globals, "below_autograd": _below_autograd}
        exec(compile("\n".join(text), "<pygraph tape>", "exec"), namespace)
        return namespace["step"], origins


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _returns_views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None for each in returns)
