"""Calls that are like the last replay are told by one native look; all others are read as the first was."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pygraph
from pygraph.errors import CaptureError
from pygraph.graphs import callable as callables
from pygraph.graphs.entry import Turns
from tests.graph.calls import assert_same, is_replay, replayed


class Kind(enum.Enum):
    PREFILL = 0
    DECODE = 1


class Subclass(torch.Tensor):
    pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.tied = self.layer.weight
        self.caches = [torch.randn(4), torch.randn(4)]
        self.options = {"scale": 2.0}

    def forward(self, x: torch.Tensor, others: Any = (), *, scale: Any = 1.0) -> Any:
        y = self.layer(x) @ self.tied * self.options["scale"]
        for cache in self.caches:
            y = y + cache
        for other in others.values() if isinstance(others, dict) else others:
            y = y + (other if isinstance(other, (torch.Tensor, int, float)) else 1)
        factor = scale if isinstance(scale, (int, float)) else len(str(scale))
        return {"sum": y.sum(), "list": [y, (factor, "name")], "sign": torch.copysign(y, torch.tensor(float(factor)))}


@contextlib.contextmanager
def looks() -> Iterator[list[int]]:
    """Counts the calls in the block that Python reads."""
    seen: list[int] = []

    def read(value: Any, *args: Any) -> None:
        seen.append(1)
        original(value, *args)

    original = callables.read
    with mock.patch.object(callables, "read", read):
        yield seen


def ready(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A graph whose next call is told by one look, if it is like these."""
    graph = pygraph.graph(model, held=model)
    replayed(graph, *args, calls=4, **kwargs)
    with looks() as seen:
        assert_same(is_replay(graph, *args, **kwargs), model(*args, **kwargs))
    assert not seen
    return graph


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


X, Y = torch.randn(2, 4), torch.randn(2, 4)
Given: TypeAlias = tuple[Any, Any]
ARGUMENTS: dict[str, tuple[Given, Given]] = {
    "sign of zero": (((), 0.0), ((), -0.0)),
    "bool": (((), True), ((), 1)),
    "float": (((), 2), ((), 2.0)),
    "text": (((), "ab"), ((), "abc")),
    "enum": (((), Kind.PREFILL), ((), Kind.DECODE)),
    "bytes": (((), b"12345"), ((), b"12")),
    "complex": (((), 1j), ((), 2j)),
    "dtype": (((), torch.float32), ((), torch.int8)),
    "none": (((), None), ((), 0)),
    "kind of sequence": (((1, Y), 1), ([1, Y], 1)),
    "length": (((Y,), 1), ((Y, Y), 1)),
    "plain in place of a tensor": (((Y,), 1), ((3,), 1)),
    "tensor in place of a plain one": (((3,), 1), ((Y,), 1)),
    "order": (({"a": 1, "b": 2}, 1), ({"b": 2, "a": 1}, 1)),
    "keys": (({"a": 1}, 1), ({"b": 1}, 1)),
    "number in a list": (([1, [2]], 1), ([1, [3]], 1)),
    "parameter": (((Y,), 1), ((Parameter(Y, requires_grad=False),), 1)),
    "subclass": (((Y,), 1), ((Y.as_subclass(Subclass),), 1)),
    "gradient": (((Y,), 1), ((Y.clone().requires_grad_(),), 1)),
    "sizes": (((Y,), 1), ((Y[:1],), 1)),
    "strides": (((Y,), 1), ((Y.T.contiguous().T,), 1)),
    "type of numbers": (((Y,), 1), ((Y.double(),), 1)),
    "negated by a bit": (((Y,), 1), ((torch.complex(X, Y).conj().imag,), 1)),
    "sparse": (((Y,), 1), ((Y.to_sparse(),), 1)),
    "twice": (((Y, Y.clone()), 1), ((Y, Y), 1)),
    "part of another": (((Y, Y.clone()), 1), ((Y, Y.view(4, 2).view(2, 4)), 1)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments_are_other_calls(name: str) -> None:
    model = Model()
    before, after = ({"others": others, "scale": scale} for others, scale in ARGUMENTS[name])
    graph = ready(model, X, **before)
    for given in (after, before, after, before, after, after, before):
        assert_same(graph(X, **given), model(X, **given))


def _modes() -> Iterator[tuple[str, Callable[[], Any]]]:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    @contextlib.contextmanager
    def hook(handle: Any) -> Iterator[None]:
        removed = handle()
        try:
            yield
        finally:
            removed.remove()

    @contextlib.contextmanager
    def set_to(put: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
        put(value)
        try:
            yield
        finally:
            put(before)

    modules, deterministic = torch.nn.modules.module, torch.use_deterministic_algorithms
    kept = torch.autograd.graph.saved_tensors_hooks
    yield "gradients", lambda: torch.enable_grad()
    yield "inference", lambda: torch.inference_mode()
    yield "autocast", lambda: torch.autocast("cpu", torch.bfloat16)
    yield "precision", lambda: set_to(torch.set_float32_matmul_precision, "medium", "highest")
    yield "default type", lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32)
    yield "determinism", lambda: set_to(deterministic, True, False)
    yield "attention", lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    yield "dispatch mode", lambda: Watching()
    yield "function mode", lambda: Function()
    yield "device", lambda: torch.device("cpu")
    yield "forward differentiation", lambda: torch.autograd.forward_ad.dual_level()
    yield "anomalies", lambda: torch.autograd.set_detect_anomaly(True)
    yield "saved tensors", lambda: kept(lambda x: x, lambda x: x)
    yield "hook of modules", lambda: hook(lambda: modules.register_module_forward_hook(lambda *_: None))
    yield "hook of optimizers", lambda: hook(lambda: register_optimizer_step_pre_hook(lambda *_: None))


MODES = [name for name, _ in _modes()]


@pytest.mark.parametrize("name", MODES)
def test_modes_and_hooks_of_all_make_other_calls(name: str) -> None:
    model = Model()
    graph = ready(model, X)
    with dict(_modes())[name](), looks() as seen:
        replays, before = graph.record.replays, graph.record.uncaptured
        graph(X)
    assert seen or graph.record.uncaptured == before + 1
    if "gradients" not in name:
        assert graph.record.replays == replays
    with looks() as seen:
        assert_same(is_replay(graph, X), model(X))
    assert len(seen) <= 1


def test_a_device_that_is_set_for_all_makes_other_calls() -> None:
    """Also if its call is the one that is replayed first."""
    graph = pygraph.graph(lambda x: x + torch.ones(4))
    with torch.device("cpu"):
        replayed(graph, X, calls=5)
        with looks() as seen:
            is_replay(graph, X)
    assert len(seen) == 1
    before = graph.record.captures
    replayed(graph, X, calls=3)
    assert graph.record.captures == before + 1


def test_function_transforms_and_traces() -> None:
    graph = ready(torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False), X)
    replays = graph.record.replays
    assert_same(torch.vmap(graph)(X), graph.function(X))
    assert_same(torch.func.jvp(graph, (X,), (X,))[0], graph.function(X))
    traced = torch.jit.trace(lambda x: graph(x) + 1, (X,), check_trace=False)
    assert_same(traced(Y), graph.function(Y) + 1)
    assert graph.record.replays == replays
    assert_same(torch.compile(lambda x: graph(x) + 1, backend="eager", fullgraph=True)(Y), graph.function(Y) + 1)


def _resized(model: Any) -> None:
    model.caches.append(torch.randn(4))


def _shrunk(model: Any) -> None:
    del model.caches[0]


def _moved(model: Any) -> None:
    model.caches[0] = torch.arange(8.0)[2:6]


def _strided(model: Any) -> None:
    model.caches[0] = torch.arange(8.0)[::2]


def _doubled(model: Any) -> None:
    model.caches[0].data = torch.randn(4, dtype=torch.float64)


def _aliased(model: Any) -> None:
    model.caches[1] = model.caches[0].view(4)


def _the_same(model: Any) -> None:
    model.caches[1] = model.caches[0]


def _untied(model: Any) -> None:
    model.tied = Parameter(torch.randn(4, 4))


def _optioned(model: Any) -> None:
    model.options["scale"] = 3.0


def _hooked(model: Any) -> None:
    model.layer.register_forward_hook(lambda _module, _given, result: result * 2)


def _frozen(model: Any) -> None:
    model.layer.weight.requires_grad_(False)


def _swapped(model: Any) -> None:
    torch.utils.swap_tensors(model.layer.weight, Parameter(torch.randn(4, 4)))


def _data(model: Any) -> None:
    model.layer.weight.data = torch.randn(4, 4)


def _other_type(model: Any) -> None:
    model.layer.__class__ = type("Other", (torch.nn.Linear,), {"forward": lambda self, x: x + self.bias})


def _deleted(model: Any) -> None:
    del model.layer.bias
    model.layer.bias = None


def _sub(model: Any) -> None:
    model.caches[0] = torch.randn(4).as_subclass(Subclass)


def _attribute(model: Any) -> None:
    model.layer.forward = lambda x: x


def _replaced(model: Any) -> None:
    model.layer.bias = Parameter(torch.randn(4))


OF_CACHES = (_resized, _shrunk, _moved, _strided, _doubled, _aliased, _the_same, _sub)
OTHERS = (_untied, _optioned, _hooked, _frozen, _swapped, _data, _other_type, _deleted, _attribute, _replaced)


@pytest.mark.parametrize(
    ("change", "grouped"),
    [
        pytest.param(change, grouped, marks=pytest.mark.sweep if grouped and change in OTHERS else ())
        for change in OF_CACHES + OTHERS
        for grouped in (False, True)
    ],
)
def test_what_is_held_changes(change: Callable[[Any], None], grouped: bool) -> None:
    model = Model()
    if grouped:
        model.caches = list(torch.randn(2, 4))  # of one storage
    graph = ready(model, X)
    change(model)
    for x in (Y, X, Y, X, Y):
        assert_same(graph(x), model(x))


def test_an_argument_that_is_held_too() -> None:
    model = Model()
    model.caches = [torch.randn(2, 4)]
    graph = ready(model, Y)
    for x in (model.caches[0], X, model.caches[0].view(2, 4), model.caches[0], X, model.caches[0]):
        assert_same(graph(x), model(x))


def test_captures_that_are_freed_are_made_anew() -> None:
    graph = ready(Model(), X)
    captures = graph.record.captures
    assert pygraph.release()
    for x in (X, Y, X, Y, X):
        assert_same(graph(x), graph.function(x))
    assert graph.record.captures == captures + 1


def test_what_raises_in_a_replay_reaches_the_caller_and_leaves_the_next_call() -> None:
    graph = ready(Model(), X)
    with (
        mock.patch.object(callables.Graph, "_replay", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        graph(X)
    assert not callables.turns._uses
    assert_same(is_replay(graph, Y), graph.function(Y))


def test_threads_replay_one_graph_with_what_each_is_given() -> None:
    model = Model()
    graph = ready(model, X)
    wrong: list[Any] = []

    def calls(x: torch.Tensor) -> None:
        with torch.no_grad():
            for _ in range(300):
                if not torch.equal(graph(x)["list"][0], model(x)["list"][0]):
                    wrong.append(x)

    threads = [Thread(target=calls, args=(torch.randn(2, 4),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_use_and_an_owner_never_miss_each_other() -> None:
    """Of a thread that begins to use tensors, and one that shows other memory in them, one always waits."""
    turns, tensor, together = Turns(), torch.ones(4), list[int]()
    inside = {"uses": 0, "owns": 0}

    def using(number: int) -> None:
        for _ in range(2000):
            use = number, tensor, (), {}
            if turns.enter(use):
                inside["uses"] += 1
                if inside["owns"]:
                    together.append(number)
                inside["uses"] -= 1
            turns.leave(use)

    def owning() -> None:
        for _ in range(200):
            with contextlib.suppress(CaptureError), turns.alone([tensor]):
                inside["owns"] = 1
                together.extend([0] * (inside["uses"] > 0))
                inside["owns"] = 0

    threads = [Thread(target=using, args=(1,)), Thread(target=owning)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together
    assert not turns._uses
    assert not turns._waiting
