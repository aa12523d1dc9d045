"""What a captured step could freeze: everything that Python code can read, changed between calls or by the step itself.

Each program is run in eager and captured, and has to leave the same bits behind.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import datetime
import enum
import functools
import gc
import itertools
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import pygraph
from tests.runtime.regions import same_bits
from tests.training.steps import DEVICE, drawn, generator_state

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS = 20


@dataclass
class Program:
    """A step with its model. ``before`` is called before each call; ``call`` makes the call itself."""

    model: nn.Module
    step: Callable[..., Any]
    before: Callable[[int], Any] = lambda call: None
    call: Callable[[int, Callable[..., Any], torch.Generator], Any] = lambda call, step, g: step(*batch(g))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(generator, 4, 5), drawn(generator, 4, 2)


def net(make: Callable[[], nn.Module] = lambda: nn.Linear(5, 2)) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make().to(DEVICE)
    # One parameter after the other: in one kernel for all, updates of parameters that share memory race.
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
    loss = nn.functional.mse_loss(model(x), y) * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run(program: Program) -> list[Any]:
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    random.seed(3)
    for call in range(CALLS):
        program.before(call)
        result = program.call(call, program.step, generator)
        tensors = [t.detach().clone() for t in _leaves(result)]
        seen.append([tensors, [t.clone() for t in program.model.state_dict().values()]])
    return [*seen, generator_state()]


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if item is not None:
            yield item


def check(make: Callable[[], Program], replays: int) -> Any:
    """The captured program does what the eager one does, with at least so many replays. Returns its record."""
    expected = run(make())
    program = make()
    program.step = pygraph.capture(program.step)
    actual = run(program)
    for call, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert same_bits(one, other), f"call {call} differs"
    record = program.step.record
    assert record.replays >= replays, record
    return record


# -- state that others change ------------------------------------------------------------------------------------------

SCALE = 1.0
TABLE = {"scale": 1.0}


class Config:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)


class Plain:
    def __init__(self) -> None:
        self.scale = 1.0

    def method(self) -> float:
        return 1.0


class Other(Plain):
    def method(self) -> float:
        return 2.0


def _one() -> float:
    return 1.0


def _two() -> float:
    return 2.0


package = types.ModuleType("package_of_this_test")
package.inner = types.ModuleType("package_of_this_test.inner")

State = tuple[Callable[[], Any], Callable[[float], Any]]
"""How the step reads a number, and how it is set."""


def _global() -> State:
    return lambda: SCALE, lambda value: globals().update(SCALE=value)


def _global_dictionary() -> State:
    return lambda: TABLE["scale"], lambda value: TABLE.update(scale=value)


def _class_attribute() -> State:
    return lambda: Config.scale, lambda value: setattr(Config, "scale", value)


def _module_attribute() -> State:
    return lambda: package.inner.scale, lambda value: setattr(package.inner, "scale", value)


def _slot() -> State:
    held = Slotted()
    return lambda: held.scale, lambda value: setattr(held, "scale", value)


def _dictionary_of_an_object() -> State:
    held = Plain()
    return lambda: held.scale, lambda value: setattr(held, "__dict__", {"scale": value})


def _class_of_an_object() -> State:
    held = Plain()
    return lambda: held.method(), lambda value: setattr(held, "__class__", Plain if value == 1 else Other)


def _code_of_a_function() -> State:
    def read() -> float:
        return 1.0

    return lambda: read(), lambda value: setattr(read, "__code__", (_one if value == 1 else _two).__code__)


def _defaults_of_a_function() -> State:
    def read(scale: float = 1.0) -> float:
        return scale

    return lambda: read(), lambda value: setattr(read, "__defaults__", (value,))


def _closure_of_a_wrapped_function() -> State:
    held = [1.0]

    @torch.no_grad()
    def read() -> float:
        return held[0]

    return lambda: read(), lambda value: held.__setitem__(0, value)


def _attribute_of_a_function() -> State:
    def read() -> float:
        return read.scale

    return lambda: read(), lambda value: setattr(read, "scale", value)


def _defaults_of_a_method() -> State:
    class Read:
        def scale(self, value: float = 1.0) -> float:
            return value

    read = Read()
    return lambda: read.scale(), lambda value: setattr(Read.scale, "__defaults__", (value,))


def _keywords_of_a_partial() -> State:
    read = functools.partial(lambda scale: scale, scale=1.0)
    return lambda: read(), lambda value: read.keywords.update(scale=value)


def _property() -> State:
    held = {"scale": 1.0}

    class Computed:
        @property
        def scale(self) -> float:
            return held["scale"]

    computed = Computed()
    return lambda: computed.scale, lambda value: held.update(scale=value)


class Descriptor:
    def __init__(self) -> None:
        self.scale = 1.0

    def __get__(self, instance: Any, owner: Any) -> float:
        return self.scale


def _descriptor() -> State:
    held = Descriptor()

    class Described:
        scale = held

    described = Described()
    return lambda: described.scale, lambda value: setattr(held, "scale", value)


def _weak_reference() -> State:
    held = Plain()
    reference = weakref.ref(held)
    return lambda: reference().scale, lambda value: setattr(held, "scale", value)


def _context_variable() -> State:
    variable = contextvars.ContextVar("scale", default=1.0)
    return variable.get, variable.set


def _thread_local() -> State:
    held = threading.local()
    return lambda: held.scale, lambda value: setattr(held, "scale", value)


def _environment() -> State:
    return lambda: float(os.environ["OF_THIS_TEST"]), lambda value: os.environ.update(OF_THIS_TEST=str(value))


def _bytes() -> State:
    held = bytearray(1)
    return lambda: float(held[0]), lambda value: held.__setitem__(0, int(value))


def _ctypes() -> State:
    held = ctypes.c_double()
    return lambda: held.value, lambda value: setattr(held, "value", value)


def _array() -> State:
    held = array.array("d", [1.0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


def _numpy() -> State:
    held = np.ones(3)
    return lambda: torch.from_numpy(held).float().sum(), lambda value: held.fill(value)


def _set() -> State:
    held = {1.0}
    return lambda: 2.0 if 2.0 in held else 1.0, lambda value: (held.clear(), held.add(value))


def _number_in_a_tensor() -> State:
    held = [1.0]
    return lambda: torch.tensor(held[0], device=DEVICE), lambda value: held.__setitem__(0, value)


def _size_of_a_tensor() -> State:
    held = torch.zeros(1)
    return lambda: float(held.shape[0]), lambda value: setattr(held, "data", torch.zeros(int(value)))


def _local_import() -> State:
    module = sys.modules["module_of_this_test"] = types.ModuleType("module_of_this_test")

    def read() -> float:
        import module_of_this_test  # type: ignore[import-not-found]

        return module_of_this_test.scale  # type: ignore[no-any-return]

    return read, lambda value: setattr(module, "scale", value)


def _cached_function() -> State:
    held = [1.0]
    calls = itertools.count()

    @functools.cache
    def read() -> float:
        return held[0]

    def write(value: float) -> None:
        held[0] = value
        if next(calls) == 15:  # later than the value
            read.cache_clear()

    return read, write


class Number(float):
    scale = 1.0


class Meta(type):
    scale = 1.0


class WithMeta(metaclass=Meta):
    pass


class Base:
    scale = 1.0


class Doubled:
    scale = 2.0


class Derived(Base, Plain):
    pass


class Kind(enum.Enum):
    ONE = 1


class Partial(functools.partial):  # type: ignore[type-arg]
    pass


def _attribute_of(make: Callable[[], Any]) -> Callable[[], State]:
    def state() -> State:
        held = make()
        return lambda: held.scale, lambda value: setattr(held, "scale", value)

    return state


def _within(make: Callable[[dict[str, float]], Any], read: Callable[[Any], float]) -> Callable[[], State]:
    def state() -> State:
        inner = {"scale": 1.0}
        held = make(inner)
        return lambda: read(held), lambda value: inner.update(scale=value)

    return state


def _queue() -> State:
    held: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: 1.0 + held.qsize(), lambda value: held.put(1) if value == 2.0 and not held.qsize() else None


def _lock() -> State:
    held = threading.Lock()
    return lambda: 1.0 + held.locked(), lambda value: held.acquire(blocking=False) if value == 2.0 else None


def _seed() -> State:
    held = torch.Generator()
    return lambda: float(held.initial_seed()), lambda value: held.manual_seed(int(value))


def _bases_of_a_class() -> State:
    return lambda: Derived.scale, lambda value: setattr(Derived, "__bases__", (Base if value == 1 else Doubled, Plain))


def _arguments_of_an_exception() -> State:
    held = ValueError(1.0)
    return lambda: held.args[0], lambda value: setattr(held, "args", (value,))


def _order_of_equal_numbers() -> State:
    one, two = 1.0, 2.0
    package.first, package.second, package.third = one, one, two

    def read() -> float:
        return (package.first + package.second + package.third) / 4

    return read, lambda value: setattr(package, "second", one if value == 1 else two)


SEEN_THROUGH = [
    *(_local_import, _cached_function, _queue, _lock, _seed, _bases_of_a_class, _arguments_of_an_exception),
    _order_of_equal_numbers,
    *map(_attribute_of, (Number, lambda: WithMeta, lambda: Kind.ONE, lambda: Partial(float))),
    _within(types.MappingProxyType, lambda held: held["scale"]),
    _within(lambda inner: inner.values(), sum),
    _within(lambda inner: slice(inner, None), lambda held: held.start["scale"]),
]
"""State that lies in objects whose types are written in C, or in what is no attribute of an object."""

STATES = [
    *SEEN_THROUGH,
    *(_global, _global_dictionary, _class_attribute, _module_attribute, _slot, _dictionary_of_an_object),
    *(_class_of_an_object, _code_of_a_function, _defaults_of_a_function, _keywords_of_a_partial, _property),
    *(_weak_reference, _context_variable, _thread_local, _environment, _bytes, _ctypes, _array, _numpy, _set),
    *(_number_in_a_tensor, _size_of_a_tensor, _closure_of_a_wrapped_function, _attribute_of_a_function),
    *(_descriptor, _defaults_of_a_method),
]


@pytest.mark.parametrize(
    "state",
    [*STATES[::4], *(pytest.param(each, marks=pytest.mark.sweep) for each in STATES if each not in STATES[::4])],
)
def test_state_is_never_frozen(state: Callable[[], State]) -> None:
    def make() -> Program:
        read, write = state()
        model, optimizer = net()
        before = lambda call: write(1.0 if call < 11 else 2.0)  # noqa: E731
        return Program(model, lambda x, y: train(model, optimizer, x, y, read()), before)

    # no copy from the host is captured; a cache makes one more state
    check(make, replays=0 if state is _numpy and DEVICE == "cuda" else 4 if state is _cached_function else 8)


# -- what the step cannot do in a replay -------------------------------------------------------------------------------


def _generator() -> Iterator[float]:
    while True:
        yield from [1.0] * 7 + [2.0]


class Counter:
    calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1.0 if self.calls % 8 else 2.0


def _sometimes(draw: Callable[[], float]) -> Callable[[], float]:
    return lambda: 2.0 if draw() < 0.1 else 1.0


SOURCES: dict[str, Callable[[], Callable[[], float]]] = {
    "iterator": lambda: functools.partial(next, itertools.cycle([1.0] * 7 + [2.0])),
    "generator": lambda: _generator().__next__,
    "counter": lambda: Counter(),
    "random-module": lambda: _sometimes(random.random),
    "random-object": lambda: _sometimes(random.Random(0).random),
    "numpy-generator": lambda: _sometimes(np.random.default_rng(0).random),
    "numpy-state": lambda: _sometimes(np.random.RandomState(0).rand),
    "clock": lambda: lambda: float(datetime.datetime.now().year > 1),
    "file": lambda: lambda: float(os.path.exists(".")),
    "globals": lambda: lambda: globals()["SCALE"],
}


@pytest.mark.sweep
@pytest.mark.parametrize("source", SOURCES)
def test_numbers_from_elsewhere_are_not_captured(source: str) -> None:
    def make() -> Program:
        model, optimizer = net()
        read = SOURCES[source]()
        return Program(model, lambda x, y: train(model, optimizer, x, y, read()))

    assert check(make, replays=0).replays == 0


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()], ids=["python", "numpy"])
def test_numbers_drawn_on_the_host_are_drawn_in_every_call(draw: Callable[[], float]) -> None:
    """Although no operator takes them: what the host draws after the step shows it."""

    def make() -> Program:
        np.random.seed(3)
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            draw()
            return train(model, optimizer, x, y)

        return Program(model, step, call=lambda number, step, g: [step(*batch(g)), torch.tensor(draw())])

    assert "host-random" in check(make, replays=0).refusals


# -- torch's own state -------------------------------------------------------------------------------------------------


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    "no-gradients": torch.no_grad,
    "saved-tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
    "function-mode": Twice,
    "module-hook": lambda: _handle(nn.modules.module.register_module_forward_hook(lambda m, a, result: result * 2)),
}


@contextlib.contextmanager
def _handle(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


@pytest.mark.sweep
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_context_around_the_call(context: str) -> None:
    def make() -> Program:
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            with CONTEXTS[context]() if 9 < number < 15 else contextlib.nullcontext():
                return step(*batch(generator))

        return Program(model, step, call=call)

    check(make, replays=9)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


def _tie(model: Any, optimizer: Any, call: int) -> None:
    if call == 7:
        model.second.weight.data = model.first.weight.data
    if call == 15:
        model.second.weight.data = model.first.weight.data.clone()


def _freeze(model: Any, optimizer: Any, call: int) -> None:
    model.first.weight.requires_grad_(not 7 < call < 14)


def _replace(model: Any, optimizer: Any, call: int) -> None:
    if call == 9:
        model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def _patch(model: Any, optimizer: Any, call: int) -> None:
    if call == 9:
        model.first.forward = lambda x: x


def _give_gradients(model: Any, optimizer: Any, call: int) -> None:
    if call in (8, 12):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)


def _hook_optimizer(model: Any, optimizer: Any, call: int) -> None:
    if call == 9:
        optimizer.register_step_pre_hook(lambda *_: [model.first.weight.grad.mul_(2)].clear())


EVENTS = [_tie, _freeze, _replace, _patch, _give_gradients, _hook_optimizer]


@pytest.mark.sweep
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__[1:])
def test_models_are_changed(event: Callable[..., None]) -> None:
    def make() -> Program:
        model, optimizer = net(Three)
        before = functools.partial(event, model, optimizer)
        return Program(model, functools.partial(train, model, optimizer), before)

    check(make, replays=8)


def test_memory_that_comes_to_be_shared_between_sizes() -> None:
    """The step is written down for another size while two parameters share memory, and used when they do no more."""

    def make() -> Program:
        model, optimizer = net(Three)

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            _tie(model, optimizer, number)
            rows = 4 if number < 7 else 3
            return step(drawn(generator, rows, 5), drawn(generator, rows, 2))

        return Program(model, functools.partial(train, model, optimizer), call=call)

    check(make, replays=5)


def test_how_far_apart_tensors_begin_in_one_memory_is_part_of_the_state() -> None:
    """Two tensors share two elements at first, which no replay allows, and later none."""

    def make() -> Program:
        model = nn.Module()
        model.register_buffer("memory", torch.zeros(8, device=DEVICE))
        one, other = model.memory[:4], model.memory[2:6]

        def before(call: int) -> None:
            other.data = model.memory[2 if call < 8 else 4 :][:4]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            before_ = other.clone()
            one.add_(x.sum())
            return (other - before_) * y.sum(), other.mul_(0.5).clone()

        return Program(model, step, before)

    check(make, replays=7)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _strided(number: int, model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return (x if number < 10 else x.t().contiguous().t()), y


def _followed(number: int, model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return x.requires_grad_(number > 9), y


def _keyword(number: int, model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return (x, y) if number < 10 else (x, y, 2.0)


def _parameter(number: int, model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    return x, y, (torch.ones(2, device=DEVICE) if number < 10 else model.bias)


@pytest.mark.parametrize("given", [_strided, _followed, _keyword, _parameter], ids=lambda given: given.__name__[1:])
def test_arguments_differ(given: Callable[..., tuple[Any, ...]]) -> None:
    def make() -> Program:
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor, scale: Any = 1.0) -> Any:
            return [train(model, optimizer, x * 1, y, scale * 1.0).sum(), x.grad]

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            return step(*given(number, model, *batch(generator)))

        def scalar(x: torch.Tensor, y: torch.Tensor, scale: Any = 1.0) -> Any:
            scale = scale.detach().sum() if isinstance(scale, torch.Tensor) else scale
            return step(x, y, scale)

        return Program(model, scalar, call=call)

    check(make, replays=9)


def test_an_argument_is_written() -> None:
    def make() -> Program:
        model, optimizer = net()

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            x, y = batch(generator)
            return [step(x, y), x]

        return Program(model, lambda x, y: train(model, optimizer, x.mul_(2), y), call=call)

    check(make, replays=15)


# -- what the step leaves behind ---------------------------------------------------------------------------------------


def test_results_in_lists_dictionaries_and_closures() -> None:
    def make() -> Program:
        model, optimizer = net()
        last: list[torch.Tensor] = []
        table: dict[str, torch.Tensor] = {}

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            nonlocal last
            loss = train(model, optimizer, x, y)
            last = [*last[-2:], loss]
            table["mean"] = table.get("mean", torch.zeros((), device=DEVICE)) * 0.5 + loss
            return torch.stack(last).sum(), table["mean"]

        return Program(model, step)

    check(make, replays=11)


def test_state_in_memory_of_an_array_that_the_step_writes_is_refused() -> None:
    def make() -> Program:
        model, optimizer = net()
        told = bytearray(1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            told[0] = 7
            return train(model, optimizer, x, y)

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            told[0] = 0
            return [step(*batch(generator)), torch.tensor(told[0])]

        return Program(model, step, call=call)

    assert "python-state" in check(make, replays=0).refusals


def test_a_number_that_the_step_replaces_by_one_that_equals_it_is_replaced() -> None:
    def make() -> Program:
        model, optimizer = net()
        held = Plain()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            held.scale = -0.0
            return train(model, optimizer, x, y)

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            held.scale = 0.0
            return [step(*batch(generator)), torch.tensor(held.scale)]

        return Program(model, step, call=call)

    check(make, replays=9)


@pytest.mark.skipif(DEVICE == "cuda", reason="the host writes the memory of a CPU's tensor")
def test_a_tensor_that_is_written_by_no_operator_is_refused() -> None:
    def make() -> Program:
        model, _ = net()
        fill = functools.partial(ctypes.memset, model.bias.data_ptr(), 0, model.bias.nbytes)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            fill()
            torch.autograd.graph.increment_version([model.bias])
            return model(x).detach()

        return Program(model, step, before=lambda call: model.bias.detach().fill_(call))

    assert "unseen-write" in check(make, replays=0).refusals


@pytest.mark.parametrize("held", [False, True])
def test_a_weak_reference_is_not_made_strong(held: bool) -> None:
    """``held``: the step also reaches what it refers to in another way."""

    def make() -> Program:
        model, optimizer = net()
        alive = [Plain(), Plain()]
        known = weakref.WeakSet(alive)
        model.alive = alive if held else None

        def before(call: int) -> None:
            if call == 11:
                alive.pop()

        return Program(model, lambda x, y: train(model, optimizer, x, y, float(len(known))), before)

    check(make, replays=9)


def test_where_in_its_storage_a_tensor_begins_is_not_read() -> None:
    def make() -> Program:
        model, optimizer = net()
        held = torch.zeros(8, device=DEVICE)[:2]

        def before(call: int) -> None:
            if call == 11:
                held.data = torch.zeros(8, device=DEVICE)[3:5]

        return Program(model, lambda x, y: train(model, optimizer, x, y, 1.0 + held.storage_offset()), before)

    assert "host-read" in check(make, replays=0).refusals


@pytest.mark.parametrize("make_list", [list, lambda: collections.deque(maxlen=4)], ids=["list", "deque"])
def test_a_list_that_grows_is_refused(make_list: Callable[[], Any]) -> None:
    def make() -> Program:
        model, optimizer = net()
        losses = make_list()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            losses.append(train(model, optimizer, x, y))
            return torch.stack(list(losses)).sum()

        return Program(model, step)

    assert "python-state" in check(make, replays=0).refusals


def test_a_step_that_alternates() -> None:
    def make() -> Program:
        model, optimizer = net()
        table = {"on": False}

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            table["on"] = not table["on"]
            return train(model, optimizer, x, y, 1.0 if table["on"] else 2.0)

        return Program(model, step)

    check(make, replays=11)


def test_an_average_of_weights() -> None:
    def make() -> Program:
        model, optimizer = net()
        average = copy.deepcopy(model).requires_grad_(False)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = train(model, optimizer, x, y)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
            return loss + average(x).sum()

        return Program(model, step)

    check(make, replays=15)


def test_memory_given_to_a_parameter_by_the_step_is_refused() -> None:
    def make() -> Program:
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = train(model, optimizer, x, y)
            model.bias.data = model.bias.data * 0.9
            return loss

        return Program(model, step)

    assert "other-memory" in check(make, replays=0).refusals


def test_a_graph_that_is_left_open_is_refused() -> None:
    def make() -> Program:
        model, optimizer = net()

        def call(number: int, step: Callable[..., Any], generator: torch.Generator) -> Any:
            loss = step(*batch(generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Program(model, lambda x, y: nn.functional.mse_loss(model(x), y), call=call)

    assert "open-graph" in check(make, replays=0).refusals


# -- programs ----------------------------------------------------------------------------------------------------------


class Checkpointed(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = DEVICE == "cpu"  # a GPU's generator would be read on the host
        return self.last(checkpoint(self.hidden, x, use_reentrant=False, preserve_rng_state=keep))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x)))


class OneBuffer(nn.Module):
    """A layer whose parameters lie in one storage, and are read from there, as cuDNN's recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        buffer = torch.randn(34, device=DEVICE)
        self.weight, self.bias = nn.Parameter(buffer[:10].view(2, 5)), nn.Parameter(buffer[32:])
        self.storage = buffer.untyped_storage()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(0, device=x.device).set_(self.storage)
        return nn.functional.linear(x, self.weight, self.bias) + flat.sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one-buffer": OneBuffer,
    "checkpointed": Checkpointed,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 2)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 2)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2)),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(5, 1, 8, 0.2), nn.Linear(5, 2)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    def make() -> Program:
        model, optimizer = net(MODELS[name])
        return Program(model, functools.partial(train, model, optimizer))

    check(make, replays=15)


def test_a_tensor_gets_other_memory() -> None:
    def make() -> Program:
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = train(model, optimizer, x, y)
            return loss, x.clone().set_(y.untyped_storage()).sum()

        return Program(model, step)

    assert "metadata-mutation" in check(make, replays=0).refusals


def test_a_compiled_function_is_not_taken_apart() -> None:
    def make() -> Program:
        model, optimizer = net()
        compiled = torch.compile(model, backend="eager")
        return Program(model, lambda x, y: train(compiled, optimizer, x, y))

    assert "compiled-function" in check(make, replays=0).refusals


def test_tensors_made_from_python_numbers() -> None:
    def make() -> Program:
        model, optimizer = net()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            scale = torch.cat([torch.tensor([]), torch.tensor([0.5, 1.5]).mul_(2)]).to(DEVICE)
            return train(model, optimizer, x, y, scale.sum())

        return Program(model, step)

    check(make, replays=15 if DEVICE == "cpu" else 0)


def test_gradients_of_gradients() -> None:
    def make() -> Program:
        model, optimizer = net(Three)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            x = x.clone().requires_grad_()
            loss = nn.functional.mse_loss(torch.tanh(model(x)), y)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            return train(lambda _: loss + gradient.square().sum(), optimizer, x, torch.zeros((), device=DEVICE))

        return Program(model, step)

    check(make, replays=15)


def test_threads_and_models_as_arguments() -> None:
    """One captured step, four threads, each with a model of its own."""

    def train_all(step: Callable[..., Any]) -> list[Any]:
        models = [net(Three) for _ in range(4)]

        def work(index: int) -> None:
            generator = torch.Generator().manual_seed(index)
            for _ in range(CALLS):
                step(*models[index], *batch(generator))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [list(model.state_dict().values()) for model, _ in models]

    captured = pygraph.capture(train)
    assert same_bits(train_all(train), train_all(captured))
    assert captured.record.replays + captured.record.uncaptured == 4 * CALLS


def test_nothing_is_kept_alive() -> None:
    """Between calls, a captured step holds no batch and no result."""
    model, optimizer = net()
    captured = pygraph.capture(functools.partial(train, model, optimizer))
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        x, y = batch(generator)
        result = captured(x, y)
        references = [weakref.ref(x), weakref.ref(y), weakref.ref(result)]
        del x, y, result
        assert [reference() for reference in references] == [None] * 3
    assert captured.record.replays


def test_a_collection_during_a_step_is_none_of_its_code() -> None:
    def told(phase: str, info: dict[str, int]) -> None:
        global _collections
        _collections += 1

    model, optimizer = net()
    captured = pygraph.capture(functools.partial(train, model, optimizer))
    gc.callbacks.append(told)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(8):
            captured(*batch(torch.Generator()))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(told)
    assert _collections > 6
    assert captured.record.replays >= 2, captured.record


_collections = 0
