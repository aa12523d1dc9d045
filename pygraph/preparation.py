"""``pygraph.prepare``: capture many sizes before real calls come.

    example arguments ─▸ copies of each size, largest first ─┬─ the first two or three: compile
                                                             └─ all: captured, and replayed

Dynamo compiles a separate program for the first size, and one for all sizes at the second. So sizes are called until
one compiles nothing; then all are captured. If a size still compiles a program, as sizes 0 and 1 do, all sizes are
called again.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, overload

import torch

from pygraph.compat import tree_leaves, tree_map
from pygraph.errors import OptionError, first_line
from pygraph.logs import working
from pygraph.report.facts import bytes_text, plural
from pygraph.runtime import live
from pygraph.runtime.asked import Met, asking
from pygraph.runtime.critical import capturing
from pygraph.runtime.events import counts
from pygraph.runtime.forecast import Workspace, fitted, workspace_at
from pygraph.runtime.native_build import is_building
from pygraph.runtime.variants import Variant

_log = logging.getLogger("pygraph")

Argument: TypeAlias = int | str
"""The position of an argument, or its keyword."""

Place: TypeAlias = Argument | tuple[Argument, int]
"""A Python int among the arguments, or a dimension of a tensor: ``(argument, dimension)``."""

Size: TypeAlias = tuple[Any, ...]
"""The numbers of one size, in the order of a mapping's keys; or the sizes of the tensors of an example."""

_CALLS = 8
"""Number of calls after which a size is given up."""
_REFUSALS = 2
"""Number of failed captures after which a size is given up."""
_PASSES = 3
"""Maximum number of passes over all sizes, while some still compile further programs."""
_POLL = 0.002
"""Seconds between two checks of another thread's capture, or of a library that is being built."""


@dataclass(frozen=True)
class Memory:
    """Memory of the device on which sizes are prepared. On a CPU, only ``captures`` is known; the rest is 0.

    Args:
        captures: bytes of all captures, outside of torch's allocator, by the driver's estimate
        allocated: bytes of tensors in torch's allocator
        reserved: bytes that torch's allocator reserves
        used: bytes of the device in use, by any process
    """

    captures: int = 0
    allocated: int = 0
    reserved: int = 0
    used: int = 0


@dataclass(frozen=True)
class SizeMemory:
    """Memory of one size.

    Args:
        instances: bytes of the device that its captures take outside of torch's allocator, at most
        workspace: bytes of intermediates that a replay takes from torch's allocator: the largest of ``parts``
        parts: workspaces of the regions that a call of this size replays
    """

    instances: int
    workspace: int
    parts: tuple[Workspace, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Prepared:
    """Outcome of ``prepare``. Prints as a few lines.

    Args:
        captured: sizes whose next calls are replayed, largest first: numbers in the order of the mapping's keys, or
            the tensor sizes and ints of an example
        refused: for each other size, why it is not captured (or only in part), or the exception of the model
        seconds: duration, s
        before: memory before the preparation
        after: memory after the preparation
        memory: memory of each captured size
    """

    captured: tuple[Size, ...]
    refused: Mapping[Size, str]
    seconds: float
    before: Memory
    after: Memory
    memory: Mapping[Size, SizeMemory]

    def forecast(self, *size: Any) -> SizeMemory:
        """Predict the memory of another size from the captured sizes.

        Quadratic growth, as of attention, needs three captured values of a number, or all nine combinations for two
        numbers. Sizes 0 and 1 are left out if there are others: they may be programs of their own. Raises OptionError
        if ``size`` differs from the captured sizes in a number that is equal in all of them.
        """
        if size in self.memory:
            return self.memory[size]
        at = _numbers_of(size)
        like = {_numbers_of(other): found for other, found in self.memory.items()}
        told = {point: found for point, found in like.items() if min(point, default=2) > 1} or like
        points = [point for point in told if len(point) == len(at)]
        found = [told[point] for point in points]
        instances = fitted(points, [each.instances for each in found], at) if points else None
        parts = zip(*(each.parts for each in found), strict=False)
        workspaces = [workspace_at(points, part, at) for part in parts]
        if instances is None or None in workspaces:
            raise OptionError(f"no captured sizes differ from each other as {_text(size)} does from them")
        return SizeMemory(instances, max((each or 0 for each in workspaces), default=0))

    def __str__(self) -> str:
        total = len(self.captured) + len(self.refused)
        sizes = ", ".join(map(_text, self.captured)) or "none"
        lines = [f"captured {len(self.captured)} of {plural(total, 'size')} in {self.seconds:.1f} s: {sizes}"]
        lines += [f"not captured: {_text(size)}: {first_line(why)}" for size, why in self.refused.items()]
        before, after = asdict(self.before), asdict(self.after)
        memory = [f"{name} {bytes_text(before[name])} → {bytes_text(after[name])}" for name in after if after[name]]
        lines += [f"memory: {', '.join(memory)}"] if memory else []
        return "\n".join(lines)


def _numbers_of(size: Any) -> tuple[int, ...]:
    return tuple(number for each in size for number in (_numbers_of(each) if isinstance(each, tuple) else (each,)))


def _text(size: Size) -> str:
    """``8``, ``8×128``, or ``(8, 16), (8,)``."""
    if all(isinstance(each, int) for each in size):
        return "×".join(map(str, size))
    return ", ".join(map(str, size))


@overload
def prepare(
    compiled: Callable[..., Any],
    sizes: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, ...]],
    *,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    background: Literal[False] = ...,
    progress: bool = ...,
) -> Prepared: ...


@overload
def prepare(
    compiled: Callable[..., Any],
    sizes: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, ...]],
    *,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    background: Literal[True],
    progress: bool = ...,
) -> Future[Prepared]: ...


def prepare(
    compiled: Callable[..., Any],
    sizes: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, ...]],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    background: bool = False,
    progress: bool = True,
) -> Prepared | Future[Prepared]:
    """Call ``compiled`` with each of ``sizes``, largest first, until the next call of each is replayed.

    Calls are real, in the caller's gradient mode, autocast and stream. They run on copies of the example tensors.
    State of the model changes as in any call: caches in buffers, or statistics of a module in training mode. No
    gradient is computed, and no backward pass is captured. The state of the random generators is restored, except with
    ``background``. An exception of the model is reported for its size, not raised. The options ``ledger`` and
    ``capture_after`` delay no capture.

    With several ranks, all must prepare the same sizes at the same time: each rank calls each size equally often.

    Raises OptionError for sizes that do not fit the arguments. After a KeyboardInterrupt, sizes that were captured stay
    captured.

    Args:
        compiled: compiled module or function
        sizes: example arguments, a tuple for each size; or values of a dimension, such as ``{(0, 1): [1, 2, 4, 8]}``
            for dimension 1 of argument 0. ``("mask", 1)`` is dimension 1 of a keyword argument, ``3`` or
            ``"position"`` is a Python int, and ``((0, 0), ("mask", 0))`` are two dimensions that vary together. All
            combinations are prepared
        args: example arguments for a mapping: tensors of other sizes repeat or truncate their values
        kwargs: example keyword arguments of every size
        background: prepare on another thread, and return a future at once; default: false. Calls of other threads never
            wait: they run uncaptured while a size is captured. ``cancel()`` takes effect after the current call
        progress: show a progress line on stderr if that is a terminal; default: true; never in the background
    """
    planned = _plan(sizes, tuple(args), dict(kwargs or {}))
    if getattr(compiled, "training", False):
        _log.warning("prepare: the module is in training mode: its statistics change, and no backward pass is captured")
    device = _device(planned[0])
    if not background:
        shown = working("preparing") if progress else contextlib.nullcontext(_silent)
        with shown as tell, torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _Preparation(compiled, planned, device, tell).run()
    future: Future[Prepared] = Future()

    def is_over() -> bool:  # the process ends once this thread does
        return future.cancelled() or not threading.main_thread().is_alive()

    run = _Preparation(compiled, planned, device, _silent, is_over)
    told = (_fulfil, future, run, _Circumstances.of(device))
    threading.Thread(target=contextvars.copy_context().run, args=told, name="pygraph-prepare").start()
    return future


def _silent(text: str) -> None:
    pass


# -- the calls ---------------------------------------------------------------------------------------------------------


class _Cancelled(Exception):
    """The preparation was cancelled."""


@dataclass(eq=False)
class _Planned:
    """A size to prepare.

    Args:
        size: the size, as reported
        weight: sort key: bytes of its tensors, then the sum of its Python ints
        tensors: tensors of the example
        make: makes new arguments for each call, since the model may change them
        captured: variants that its calls captured
        left: variants or refusals that its last call met and ran uncaptured
        replayed: true if a call was replayed or captured
        why: why it is not captured, or None
    """

    size: Size
    weight: tuple[int, int]
    tensors: Sequence[torch.Tensor]
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    captured: dict[Variant, None] = field(default_factory=dict)
    left: list[Met] = field(default_factory=list)
    replayed: bool = False
    why: str | None = None


@dataclass
class _Preparation:
    """Calls ``compiled`` for each size in ``planned``. ``tell`` shows progress; ``is_over`` returns true to end it."""

    compiled: Callable[..., Any]
    planned: list[_Planned]
    device: torch.device
    tell: Callable[[str], None]
    is_over: Callable[[], bool] = lambda: False

    def run(self) -> Prepared:
        began, before = time.perf_counter(), _memory(self.device)
        for number, planned in enumerate(self.planned):
            programs = live.regions()
            self._show("compiling", number, planned)
            self._call(planned)
            if number and programs == live.regions():
                break
        while is_building():
            self._wait()
        for _ in range(_PASSES):
            programs = live.regions()
            for number, planned in enumerate(self.planned):
                self._show("capturing", number, planned)
                self._capture(planned)
            if programs == live.regions():
                break  # otherwise, a new program may serve sizes that were captured before
        refused = {planned.size: why for planned in self.planned if (why := _refusal(planned)) is not None}
        captured = tuple(planned.size for planned in self.planned if planned.size not in refused)
        memory = {planned.size: _taken(planned) for planned in self.planned if planned.size in captured}
        return Prepared(captured, refused, time.perf_counter() - began, before, _memory(self.device), memory)

    def _show(self, doing: str, number: int, planned: _Planned) -> None:
        self.tell(f"{doing} {number + 1} of {len(self.planned)}: {_text(planned.size)}")

    def _capture(self, planned: _Planned) -> None:
        """Call until everything that can be captured is. Of several ranks, each calls equally often."""
        ranks = _is_one_of_several()
        for _ in range(_REFUSALS if ranks else _CALLS):
            if planned.why is not None:
                return
            while capturing and threading.get_ident() not in capturing:
                self._wait()
            self._call(planned)
            left = [each for each in planned.left if isinstance(each, Variant)]
            if not ranks and all(variant.off or variant.refused >= _REFUSALS for variant in left):
                return

    def _call(self, planned: _Planned) -> None:
        """Call once, on this thread."""
        if self.is_over():
            raise _Cancelled
        replays = counts["replays"]
        with asking() as met:
            try:
                args, kwargs = planned.make()
                self.compiled(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the model's own; it says so of one size
                planned.why = f"{type(error).__name__}: {error}"
        captured = [each for each in met if isinstance(each, Variant) and each.replay is not None]
        planned.captured |= dict.fromkeys(captured)
        planned.left = [each for each in met if each not in captured]
        planned.replayed = planned.replayed or bool(captured) or counts["replays"] > replays

    def _wait(self) -> None:
        if self.is_over():
            raise _Cancelled
        time.sleep(_POLL)


def _refusal(planned: _Planned) -> str | None:
    """Why a size is not captured; None if it is."""
    if planned.why is not None:
        return planned.why
    for each in planned.left:
        refusal = each.refusal if isinstance(each, Variant) else each
        return "another thread captured meanwhile" if refusal is None else str(refusal)
    if any(variant.replay is None for variant in planned.captured):
        return "its capture was freed for others"
    return None if planned.replayed else "no compiled region ran: pygraph.reports() says what was compiled"


def _taken(planned: _Planned) -> SizeMemory:
    held = sum(variant.held_bytes for variant in planned.captured)
    parts = tuple(variant.workspace for variant in planned.captured if variant.workspace is not None)
    return SizeMemory(held, max((part.nbytes for part in parts), default=0), parts)


def _is_one_of_several() -> bool:
    """True if this process is one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


# -- the sizes ---------------------------------------------------------------------------------------------------------

_Changes: TypeAlias = Mapping[Argument, int | Mapping[int, int]]
"""The number that is passed, or the sizes of a tensor's dimensions, by argument."""


def _plan(sizes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Planned]:
    """The sizes to be prepared, largest first. Raises OptionError."""
    if isinstance(sizes, Mapping):
        planned = _combinations(sizes, args, kwargs)
    elif args:
        raise OptionError("args are the example arguments of a mapping of sizes: leave one of both out")
    else:
        planned = [_planned(None, _tuple(example), kwargs, {}) for example in sizes]
    if not planned:
        raise OptionError("there are no sizes to prepare")
    return sorted(planned, key=lambda one: one.weight, reverse=True)


def _tuple(example: Any) -> tuple[Any, ...]:
    if not isinstance(example, tuple):
        raise OptionError(f"each example is a tuple of arguments, not {type(example).__name__}")
    return example


def _combinations(sizes: Mapping[Any, Iterable[int]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Planned]:
    given: dict[Argument, Any] = dict([*enumerate(args), *kwargs.items()])
    axes = [_places(key, given) for key in sizes]
    numbers = [_numbers(key, values) for key, values in sizes.items()]
    planned = []
    for size in itertools.product(*numbers):
        changes: dict[Argument, Any] = {}
        for places, number in zip(axes, size, strict=True):
            for place in places:
                if isinstance(place, tuple):
                    argument, dim = place
                    changes.setdefault(argument, {})[dim % given[argument].dim()] = number
                else:
                    changes[place] = number
        planned.append(_planned(size, args, kwargs, changes))
    return planned


def _places(key: Any, given: Mapping[Argument, Any]) -> tuple[Place, ...]:
    """The places that a key of the mapping names. Raises OptionError."""
    places = key if isinstance(key, tuple) and key and all(isinstance(each, tuple) for each in key) else (key,)
    for place in places:
        argument, *dims = place if isinstance(place, tuple) else (place,)
        value = given.get(argument)
        if len(dims) == 1 and isinstance(dims[0], int) and isinstance(value, torch.Tensor):
            if not -value.dim() <= dims[0] < value.dim():
                raise OptionError(f"argument {argument!r} has {plural(value.dim(), 'dimension')}, not {dims[0]!r}")
        elif dims or type(value) is not int:
            known = "is not given" if argument not in given else f"is a {type(value).__name__}"
            raise OptionError(
                f"sizes has the key {key!r}, and argument {argument!r} {known}: "
                "a key is (argument, dimension) of a tensor, or the argument of an int"
            )
    return places


def _numbers(key: Any, values: Iterable[int]) -> list[int]:
    numbers = list(dict.fromkeys(values))
    for number in numbers:
        if not isinstance(number, int) or (isinstance(key, tuple) and number < 0):
            raise OptionError(f"sizes of {key!r} are whole numbers, not {number!r}")
    return numbers


def _planned(size: Size | None, args: tuple[Any, ...], kwargs: dict[str, Any], changes: _Changes) -> _Planned:
    """A size to prepare: the example arguments with ``changes``."""
    facts: list[Any] = []
    tensors: list[torch.Tensor] = []
    nbytes = total = 0
    given: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
    for argument, value in given:
        change = changes.get(argument, {})
        for leaf in [change] if isinstance(change, int) else tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                shape = _shape(leaf, change if isinstance(change, Mapping) else {})
                facts.append(shape)
                tensors.append(leaf)
                nbytes += math.prod(shape) * leaf.element_size()
            elif type(leaf) is int:
                facts.append(leaf)
                total += leaf
    size = tuple(facts) if size is None else size
    return _Planned(size, (nbytes, total), tensors, lambda: _copies(args, kwargs, changes))


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any], changes: _Changes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, with copies of all tensors. One that is passed twice is copied once."""
    made: dict[int, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _copy(leaf, {})
        return made[id(leaf)]

    def passed(argument: Argument, value: Any) -> Any:
        change = changes.get(argument)
        if change is None:
            return tree_map(copied, value)
        return _copy(value, change) if isinstance(change, Mapping) else change

    return (
        tuple(passed(position, value) for position, value in enumerate(args)),
        {name: passed(name, value) for name, value in kwargs.items()},
    )


def _shape(example: torch.Tensor, sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(dim, size) for dim, size in enumerate(example.shape))


def _copy(example: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A copy with other sizes of some dimensions, along which values are repeated or cut off. Strides keep their order;
    those that depend on no changed size are equal."""
    if type(example) not in (torch.Tensor, torch.nn.Parameter) or example.layout is not torch.strided:
        if sizes:
            raise OptionError(f"a {type(example).__name__} takes no other sizes: pass examples of each")
        return example.detach().clone().requires_grad_(example.requires_grad)
    shape = _shape(example, sizes)
    with torch.inference_mode(example.is_inference()), torch.no_grad():
        values = example.detach()
        for dim, size in sizes.items():
            taken = torch.arange(size, device=example.device) % max(example.shape[dim], 1)
            values = values.index_select(dim, taken) if example.shape[dim] else values.new_zeros(shape)
        strides = _strides(example, shape)
        once = [slice(0, 1) if stride == 0 else slice(None) for stride in strides]  # one value for all
        copy = torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)
        copy[tuple(once)] = values[tuple(once)]
    if isinstance(example, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, requires_grad=False)
    copy.requires_grad_(example.requires_grad)
    copy.__dict__.update({name: mark for name, mark in vars(example).items() if name.startswith("_dynamo_")})
    return copy


def _strides(example: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Strides of a tensor like ``example`` with another ``shape``: from the innermost dimension with another size
    outwards, it is dense."""
    strides, within, differs = list(example.stride()), 1, False
    single = [size <= 1 for size in example.shape]  # their strides may be anything
    order = [(math.inf if single[dim] and not stride else stride, -dim) for dim, stride in enumerate(strides)]
    for dim in sorted(range(example.dim()), key=order.__getitem__):
        if strides[dim] == 0 and not single[dim]:
            continue
        if differs or (single[dim] and strides[dim] < within):
            strides[dim] = within
        within = strides[dim] * max(shape[dim], 1)
        differs = differs or shape[dim] != example.shape[dim]
    return strides


# -- the thread of the calls -------------------------------------------------------------------------------------------


def _device(planned: _Planned) -> torch.device:
    """Device of the first tensor that is not on a CPU; else the CPU."""
    devices = (leaf.device for leaf in planned.tensors)
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _memory(device: torch.device) -> Memory:
    held = live.held_bytes(device)
    if device.type != "cuda":
        return Memory(held)
    free, total = torch.cuda.mem_get_info(device)
    return Memory(held, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free)


@dataclass(frozen=True)
class _Circumstances:
    """Modes of a thread on which a call depends, and the owner of its programs, for use on another thread."""

    owner: live.Owner
    device: torch.device
    stream: Any
    gradients: bool
    inference: bool
    autocast: Mapping[str, tuple[bool, torch.dtype]]
    caching: bool

    @staticmethod
    def of(device: torch.device) -> _Circumstances:
        """The circumstances of this thread."""
        kinds = dict.fromkeys(("cpu", device.type))
        return _Circumstances(
            live.owner(),
            device,
            torch.cuda.current_stream(device) if device.type == "cuda" else None,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context with these circumstances on the current thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(live.owned_by(self.owner))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.caching))
            yield


def _fulfil(future: Future[Prepared], run: _Preparation, circumstances: _Circumstances) -> None:
    """Run on this thread, and set the outcome of ``future``, which can be cancelled until then."""
    try:
        with circumstances.again():
            outcome = run.run()
    except _Cancelled:
        future.cancel()
        future.set_running_or_notify_cancel()
    except BaseException as error:  # noqa: BLE001 - whoever waits is told
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(outcome)
