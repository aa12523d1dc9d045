"""One launch of a host program at a time, and the uncaptured program with its kernels and operators observed."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import OpOverload, TorchDispatchMode, without_dispatch_modes
from pygraph.errors import CaptureError
from pygraph.runtime.driver import Program
from pygraph.runtime.host.instantiate import add_launch, native_word
from pygraph.runtime.host.interception import decomposed
from pygraph.runtime.host.kernels import Kernel, Parameter, is_native_function
from pygraph.runtime.host.launches import HostCapture
from pygraph.runtime.host.operators import fresh_results, operand_uses
from pygraph.runtime.host.recorder import Use
from pygraph.runtime.recording import Launch
from pygraph.runtime.stepping import Operand, Repeat, Watcher
from pygraph.runtime.tensors import rebound

__all__ = ["HostStepper", "trace"]


class HostStepper:
    """Makes a native graph of each launch for itself. Every word with an address is an argument of that graph."""

    device = torch.device("cpu")

    def __init__(self, native: ModuleType, program: Program) -> None:
        self._native, self._launches, self._capture = native, program.recording.launches, _payload(program)

    def run(self, launch: int, words: Mapping[int, int]) -> None:
        """As ``Stepper.run`` says."""
        payload = self._capture.launches[launch]
        graph = self._native.HostGraph(0)
        add_launch(graph, self._launches[launch], payload)
        places: list[torch.Tensor] = []
        for word, address in words.items():
            places.append(_byte_at(address))
            source = graph.add_tensor_argument(places[-1], False, -1, 0, 1, 0)
            graph.add_patch(0, native_word(payload, word), source, 0)
        graph.set_order([0], False)
        if graph.replay(places) is None:
            raise CaptureError("replay-declined", "a launch by itself")


def _byte_at(address: int) -> torch.Tensor:
    """A tensor that begins at ``address``; only its address is of interest."""
    memory = (ctypes.c_ubyte * 1).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _payload(program: Program) -> HostCapture:
    payload = program.recording.payload
    if not isinstance(payload, HostCapture):
        raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
    return payload


# -- the uncaptured program ---------------------------------------------------------------------------------------


def trace(
    program: Program, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any], watcher: Watcher
) -> Sequence[Any]:
    """As ``Steps.trace`` says."""
    if not isinstance(fn, types.FunctionType):
        raise CaptureError("unsupported-region", f"{type(fn).__name__} is no plain Python function")
    calls = _Calls(program, watcher)
    with torch.no_grad(), _Operators(calls), _rebound(calls, fn) as run:
        returned: Sequence[Any] = run(args)
    calls.finish()
    return returned


class _Calls:
    """Counts the calls that are launches, and holds each against the one recorded."""

    def __init__(self, program: Program, watcher: Watcher) -> None:
        self._launches, self._payloads = program.recording.launches, _payload(program).launches
        self._watcher = watcher
        self._next = 0

    def kernel(self, name: str, value: Callable[..., Any], args: Sequence[Any]) -> Any:
        """A fused kernel is called."""
        index, launch = self._expect(name)
        payload = self._payloads[index]
        parameters = payload.parameters if isinstance(payload, Kernel) else ()
        if len(parameters) != len(args):
            raise _otherwise(index, name)
        uses = [
            Use(arg if parameter.is_pointer else None, reads=True, writes=parameter is Parameter.WRITE)
            for arg, parameter in zip(args, parameters, strict=True)
        ]
        given = _operands(launch, uses)
        self._before(index, given)
        returned = value(*args)

        def repeat() -> list[Operand]:
            value(*args)
            return []

        self._after(index, given, [], repeat)
        return returned

    def operator(self, op: OpOverload, uses: Sequence[Use], run: Callable[[], Any]) -> Any:
        """An operator is called that is no view and no mere allocation."""
        index, launch = self._expect(str(op))
        given = _operands(launch, uses)

        def made(returned: Any) -> list[Operand]:
            results = [Use(tensor, reads=False, writes=True) for tensor in fresh_results(op, returned)]
            if len(uses) + len(results) != len(launch.words):
                raise _otherwise(index, launch.name)
            return _operands(launch, results, first=len(uses))

        self._before(index, given)
        returned = run()
        self._after(index, given, made(returned), lambda: made(run()))
        return returned

    def finish(self) -> None:
        """Raise CaptureError if launches are left over."""
        if self._next != len(self._launches):
            raise _otherwise(self._next, "the end")

    def _expect(self, name: str) -> tuple[int, Launch]:
        index = self._next
        self._next += 1
        if index >= len(self._launches) or self._launches[index].name != name:
            raise _otherwise(index, name)
        return index, self._launches[index]

    def _before(self, index: int, given: Sequence[Operand]) -> None:
        with without_dispatch_modes():
            self._watcher.before(index, index + 1, given)

    def _after(self, index: int, given: Sequence[Operand], returned: Sequence[Operand], repeat: Repeat) -> None:
        with without_dispatch_modes():
            self._watcher.after(index, index + 1, given, returned, repeat)


def _otherwise(index: int, name: str) -> CaptureError:
    return CaptureError("unstable-launches", f"launch {index} is {name} in an uncaptured run")


def _operands(launch: Launch, uses: Sequence[Use], first: int = 0) -> list[Operand]:
    """``uses`` from word ``first`` on; words without an address belong to nothing in memory."""
    words = launch.words[first : first + len(uses)]
    return [
        Operand(word, use.tensor, use.writes)
        for word, use in zip(words, uses, strict=True)
        if word and use.tensor is not None
    ]


class _Operators(TorchDispatchMode):
    """Tells of every operator that reaches the dispatcher."""

    supports_higher_order_operators = True

    def __init__(self, calls: _Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        result = decomposed(self, func, args, named)
        if result is not NotImplemented:
            return result
        uses = operand_uses(func, args, named)
        if uses is None:
            return func(*args, **named)
        return self._calls.operator(func, uses, lambda: func(*args, **named))


def _rebound(calls: _Calls, fn: types.FunctionType) -> AbstractContextManager[Callable[..., Any]]:
    """``fn`` over a copy of its globals in which fused kernels are told of."""
    return rebound(fn, lambda name, value: _observed(calls, name, value) if is_native_function(value) else value)


def _observed(calls: _Calls, name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: calls.kernel(name, value, args)
