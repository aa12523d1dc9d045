"""``train_step``: a training step compiled as one program, from the forward pass to the optimizer's update.

    @pygraph.train_step
    def step(x, y):
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

Dynamo traces the step with autograd inside, so that AOTAutograd sees one graph that mutates parameters and optimizer
state. ``standins`` lets Dynamo trace the backward pass, optimizers, loss scalers and schedulers. If Dynamo leaves a
step in parts, for an LSTM, and the step's state is known, the step is captured as it runs instead.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from pygraph import compat
from pygraph.graphs import Graph, graph
from pygraph.graphs.held import Walk, gives_items, reachable
from pygraph.report.model import reports
from pygraph.runtime.reasons import BUILDING, reason_of
from pygraph.settings import COMPILED, Settings
from pygraph.training.standins import Used, collected, install

__all__ = ["TrainStep", "train_step"]

P = ParamSpec("P")
R = TypeVar("R")

_ORDER = "reorder_for_locality"
"""Inductor's pass that moves each node of a graph without gradients before its first reader. In a whole step, gradients
of parameters would be computed after the backward pass, and hold until then what they are computed from."""
_VAIN = 16
"""Number of consecutive calls without a replay after which a step that was handed over is taken back."""


@overload
def train_step(
    step: Callable[P, R],
    *,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    held: Any = None,
    key: Callable[..., Any] | None = None,
) -> TrainStep[P, R]: ...


@overload
def train_step(
    step: None = None,
    *,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    held: Any = None,
    key: Callable[..., Any] | None = None,
) -> Callable[[Callable[P, R]], TrainStep[P, R]]: ...


def train_step(
    step: Callable[P, R] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    held: Any = None,
    key: Callable[..., Any] | None = None,
) -> TrainStep[P, R] | Callable[[Callable[P, R]], TrainStep[P, R]]:
    """Compile a training step with ``backend="pygraph"``: forward, backward and update become one program.

    Optimizers of ``torch.optim`` are traced into it, with a ``GradScaler`` and its overflow branch. Learning rates (and
    betas of Adam and AdamW) are values on the device: a scheduler causes no recompilation. ``scheduler.step()`` inside
    ``step`` runs after ``step``, unless the rest of ``step`` reads a value that it changes, or cannot be traced. With
    ``fullgraph``, gradients of DistributedDataParallel are averaged in the graph. Code that Dynamo cannot trace ends
    the graph and runs uncompiled, as under ``torch.compile``; so do other optimizers, and those with step hooks. With
    ``fullgraph``, they raise instead. A call under ``saved_tensors_hooks`` runs uncompiled. Step counters of optimizers
    (``state["step"]``) move to the device of their parameters.

    With ``held``, a step that Dynamo leaves in parts is handed to ``pygraph.graph``, and is under its contract: replays
    run no Python code. The parts run again if ``graph`` refuses the step, if its calls keep changing, or if it steps a
    scheduler. A step is not handed over if several processes train together, or if it uses an iterator.

    Raises OptionError for invalid options.

    Args:
        step: function or method; None: return a decorator
        options: options of the backend (see ``Settings``); default: none
        fullgraph: raise if Dynamo cannot trace the whole step; default: false
        held: state of the step, such as ``[model, optimizer]``, as in ``pygraph.graph``; None: never hand over
        key: called with the arguments; returns the other plain values on which a step that is handed over depends
    """
    if step is None:
        return functools.partial(TrainStep, options=options, fullgraph=fullgraph, held=held, key=key)
    return TrainStep(step, options=options, fullgraph=fullgraph, held=held, key=key)


class _Handed(Generic[P, R]):
    """A step that Dynamo leaves in parts, captured as it runs. Calls that it refuses run in parts, also with the option
    ``strict``: the parts raise by themselves. ``used``: objects that Dynamo has met in the step."""

    def __init__(
        self,
        step: Callable[P, R],
        held: Any,
        key: Callable[..., Any] | None,
        options: Mapping[str, Any],
        used: list[Any],
    ) -> None:
        self._schedulers = [each for each, _ in reachable(used, step) if isinstance(each, LRScheduler)]
        self._scheduled = False
        self._strict = options.get("strict", False)
        own = {name: value for name, value in options.items() if name.replace("-", "_") not in COMPILED}
        self._graph: Graph[P, R] = graph(step, held=held, key=key, options={**own, "strict": False})
        self._vain = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        record = self._graph.record
        before, counts = record.replays, _counts(self._schedulers)
        try:
            return self._graph(*args, **kwargs)
        finally:
            waits = record.reason is not None and record.reason.startswith(BUILDING)
            self._vain = 0 if record.replays > before or waits else self._vain + 1
            self._scheduled |= _counts(self._schedulers) != counts

    @property
    def fails(self) -> bool:
        """True if the step was refused for good, if its calls keep changing, or if it steps a scheduler, which a replay
        would not do."""
        record = self._graph.record
        refused = any(not reason_of(code).may_pass for code in record.refusals)
        return self._scheduled or (refused and (self._strict or not record.replays)) or self._vain >= _VAIN


def _counts(schedulers: list[LRScheduler]) -> list[Any]:
    """All numbers among the attributes of each scheduler, such as its step count."""
    return [[value for value in vars(each).values() if isinstance(value, int | float)] for each in schedulers]


class TrainStep(Generic[P, R]):
    """A compiled training step. A call raises the exceptions of the user's ``step``."""

    def __init__(
        self,
        step: Callable[P, R],
        *,
        options: Mapping[str, Any] | None,
        fullgraph: bool,
        held: Any,
        key: Callable[..., Any] | None,
    ) -> None:
        install()
        functools.update_wrapper(self, step)
        self._options, self._fullgraph = _in_traced_order(dict(options or {})), fullgraph
        self._held, self._key = held, key
        self._handed: _Handed[P, R] | None = None
        self._taken_back = self._given_up = False
        own = _own_code(step)
        self._compiled = torch.compile(own, backend="pygraph", options=self._options, fullgraph=fullgraph)
        self._used: list[Used] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if compat.saved_tensor_hooks(True):  # in a graph, they would not see tensors saved for the backward pass
            return cast("R", self.__wrapped__(*args, **kwargs))  # type: ignore[attr-defined]
        handed = self._handed  # another thread may take it back
        if handed is None:
            return self._call(args, kwargs)
        result = handed(*args, **kwargs)
        if handed.fails:
            self._handed, self._taken_back = None, True
        return result

    def _call(self, args: Any, kwargs: Any) -> R:
        """Call the step as compiled by Dynamo."""
        for used in self._used:
            used.before()
        left: set[str] = set()
        try:
            with collected(self._used, left, fullgraph=self._fullgraph) as call:
                result: R = cast("Any", self._compiled)(*args, **kwargs)
        except BaseException:
            for code in call.codes:  # after an exception in a trace, Dynamo would never compile the code again
                compat.run_compiled(code)
            raise
        finally:  # postponed work is due even if the user's code raises
            if left and reports():  # this call has traced
                reports()[-1].notes += sorted(left)
            for used in self._used:
                used.after()
            for code in call.given_up:  # captures must not take it over: they check less than Dynamo does
                self._given_up = True
                for report in reports()[-1:]:
                    report.notes.append(f"Dynamo has compiled {code.co_name} too often: from here on it runs in parts")
        if call.traced and not (call.whole or self._taken_back or self._given_up):
            self._hand_over()
        return result

    def _hand_over(self) -> None:
        """Have later calls of a step that Dynamo leaves in parts captured as they run, if the step's state is known."""
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if together or self._options.get("disable"):
            return
        used = [value for each in self._used if (value := each.value()) is not None]
        known = set(map(id, Walk((self._held,)).containers))
        missing = [each for each in used if id(each) not in known and not isinstance(each, LRScheduler)]
        step: Callable[P, R] = self.__wrapped__  # type: ignore[attr-defined]
        taken = next((path for value, path in reachable(step) if gives_items(value)), None)
        if taken is not None:
            said = f"and stays so, since captures would take items of {taken}, an iterator: pass them as arguments"
        elif self._held is None:
            said = "with held=[model, optimizer], pygraph.graph captures it as it runs"
        elif missing:
            said = f"pygraph.graph captures it as it runs if held has a {type(missing[0]).__name__} as well"
        else:
            self._handed = _Handed(step, self._held, self._key, self._options, used)
            said = "from here on, pygraph.graph captures it as it runs"
        for report in reports()[-1:]:
            report.notes.append(f"Dynamo leaves the step in parts: {said}")

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind to ``instance``, as a function does."""
        return self if instance is None else types.MethodType(self, instance)


def _in_traced_order(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` under which Inductor keeps the order in which the step was traced, unless they say otherwise. Raises
    OptionError for invalid ones."""
    settings = Settings.make(options)
    if settings.disable or not hasattr(compat.inductor_config, _ORDER):
        return options
    return {**options, "inductor": {_ORDER: False, **settings.inductor}}


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a code object of its own: Dynamo keeps programs, and counts them, by code object."""
    if not isinstance(function, types.FunctionType):
        return function
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(own, function)
