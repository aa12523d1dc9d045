"""The sides of the suite: those of ``pygraph bench``, CUDA graphs by hand, as torch's documentation shows them, and
training steps as a whole.

Both kinds of graph by hand count calls as all other sides do, so that the n-th result of a training step belongs to the
n-th step.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

import pygraph
from benchmarks.workload import Step
from pygraph.bench.sides import OURS, PROGRAM_ORDER, SIDES, Side
from pygraph.bench.sides import compile_as as compile_as_users_do
from pygraph.passes.pipeline import nearest

__all__ = [
    "GRAPH",
    "GRAPHED",
    "STEP",
    "STEP_IN_ORDER",
    "SUITE_SIDES",
    "WHOLE_STEP",
    "GraphedModule",
    "Inapplicable",
    "WholeStep",
    "cloning",
    "compile_as",
    "compiler_of",
    "step_as",
]

GRAPHED, WHOLE_STEP, STEP, GRAPH = "make-graphed-callables", "whole-step", "step", "graph"
STEP_IN_ORDER = f"{STEP}-{PROGRAM_ORDER}"
_BY_HAND = (
    Side(GRAPHED, cuda=True),
    Side(WHOLE_STEP, cuda=True),
)

SUITE_SIDES: dict[str, Side] = {name: side for name, side in SIDES.items() if name != OURS}
"""Sides by name, in the order of display. ``whole-step`` and ``graph`` are for workloads that allow them, sides of a
``step`` for training."""
SUITE_SIDES |= {
    side.name: side
    for side in (*_BY_HAND, SIDES[OURS], Side(STEP_IN_ORDER, cuda=True, asked=True), Side(STEP), Side(GRAPH))
}


def compile_as(name: str, target: Any) -> Any:
    """``target`` compiled as a side does. Any other name is another backend (``compiler_of``)."""
    if name in (WHOLE_STEP, STEP_IN_ORDER, STEP, GRAPH):
        return target
    if name not in SUITE_SIDES:
        return compiler_of(name)(target)
    return GraphedModule(target) if name == GRAPHED else compile_as_users_do(name, target)


def compiler_of(name: str) -> Callable[[Any], Any]:
    """The function that compiles a module or function with another backend.

    ``module:function`` names that function itself; any other name is a backend of ``torch.compile``. Raises ValueError
    if it does not exist.
    """
    module, separated, function = name.partition(":")
    if not separated:
        known = torch.compiler.list_backends(exclude_tags=())
        if name not in known:
            raise ValueError(f"torch.compile has no backend '{name}'{nearest(name, known)}")
        return functools.partial(torch.compile, backend=name)
    try:
        found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"'{name}' is no function: {error}") from error
    return found


def step_as(name: str, step: Step) -> Step:
    """``step`` as a side runs it.

    ``reduce-overhead`` needs a mark at the beginning of a step, which costs well below 1 µs, and is part of the mode.
    """
    if name == WHOLE_STEP:
        return WholeStep(step)
    if name in (STEP, STEP_IN_ORDER):
        options = {"cache_dir": None, **({} if name == STEP else {"order": "program"})}
        return pygraph.train_step(step, options=options, held=named_by(step))
    if name == GRAPH:
        return cast("Step", pygraph.graph(step, held=named_by(step)))
    if name != "reduce-overhead":
        return step
    begin: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin

    def marked() -> Any:
        begin()
        return step()

    return marked


def named_by(function: Callable[..., Any]) -> list[Any]:
    """State that a step reads or writes: objects in its closure, and in the closures of functions there."""
    found, waiting = [], [function]
    for each in waiting:
        contents = [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
        waiting += [value for value in contents if isinstance(value, types.FunctionType) and value not in waiting]
        found += [value for value in contents if not isinstance(value, types.FunctionType)]
    return found


def cloning(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target``, with clones of all tensors that it returns, also in tuples and lists."""

    def cloned(result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return result.clone()
        return type(result)(map(cloned, result)) if isinstance(result, (tuple, list)) else result

    return lambda *args, **more: cloned(target(*args, **more))


class Inapplicable(Exception):
    """A side cannot run this program at all; the message says why."""

    failure = "inapplicable"


def why_not_graphed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Reason why ``make_graphed_callables`` cannot be used for this call, in words; None if it can."""
    if not isinstance(target, nn.Module):
        return "what is compiled is no nn.Module"
    if kwargs:
        return f"the module is called with keyword arguments ({', '.join(kwargs)})"
    others = [type(arg).__name__ for arg in args if not isinstance(arg, torch.Tensor)]
    if others:
        return f"an argument is no tensor, but {others[0]}"
    if any(not arg.is_cuda for arg in args):
        return "an argument is a tensor of the CPU"
    if any(not tensor.is_cuda for tensor in (*target.parameters(), *target.buffers())):
        return "a parameter or buffer lies on the CPU"
    return None


class GraphedModule:
    """A module that ``torch.cuda.make_graphed_callables`` captures at its first call.

    That call runs the module a few times and captures it; random state and buffers are restored, so that the results
    are those of the first call. A function without arguments is not captured. Raises Inapplicable if torch refuses.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._graphed: Callable[..., Any] | None = None
        self._differentiated: list[bool] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        differentiated = [arg.requires_grad for arg in args if isinstance(arg, torch.Tensor)]
        if self._graphed is None:
            self._graphed, self._differentiated = self._make(args, kwargs), differentiated
        if differentiated != self._differentiated:
            raise Inapplicable("gradients of other arguments are wanted than in the call that was captured")
        return self._graphed(*args, **kwargs)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        if not (args or kwargs or isinstance(self._target, nn.Module)):
            update: Callable[..., Any] = self._target
            return update
        reason = why_not_graphed(self._target, args, kwargs)
        if reason is not None:
            raise Inapplicable(reason)
        samples = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
        random = torch.cuda.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self._target.buffers()]
        try:
            made: Callable[..., Any] = torch.cuda.make_graphed_callables(self._target, samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any exception of the module during capture is the reason
            raise Inapplicable(f"{type(error).__name__}: {error}") from error
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random)
        return made


class WholeStep:
    """A step captured as one graph: it runs on a side stream three times, is captured, then replayed.

    Each of these calls is one step of the program: the capture, which executes nothing, is followed by a replay.
    Raises Inapplicable if the step cannot be captured.
    """

    _WARM_CALLS = 3

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._stream = torch.cuda.Stream()

    def __call__(self) -> Any:
        if self._graph is not None:
            self._graph.replay()
            return self._result
        if self._calls < self._WARM_CALLS:
            self._calls += 1
            return self._warm()
        self._capture()
        return self()

    def _warm(self) -> Any:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._step()
        current.wait_stream(self._stream)
        return result

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any exception of the step during capture is the reason
            raise Inapplicable(f"the step cannot be captured: {type(error).__name__}: {error}") from error
        self._graph = graph
