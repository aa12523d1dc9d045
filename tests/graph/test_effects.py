"""Effects of Python code on what is not held: containers among the arguments, hooks, caches, modes of torch."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pygraph
from tests.graph.calls import assert_same, is_replay, replayed

X = torch.arange(1.0, 5.0)


@pytest.mark.parametrize("items", [[X.clone()], {"a": X.clone()}], ids=["list", "dict"])
def test_a_held_container_that_is_returned_is_that_object(items: Any) -> None:
    tensor = next(iter(items.values() if isinstance(items, dict) else items))

    def function(x: torch.Tensor) -> Any:
        tensor.add_(x)
        return items, x + 1

    graph = pygraph.graph(function, held=[items])
    for call in range(5):
        assert (is_replay(graph, X) if call > 1 else graph(X))[0] is items


@pytest.mark.parametrize("argument", [[X], {"x": X}], ids=["list", "dict"])
def test_a_container_among_the_arguments_that_is_returned(argument: Any) -> None:
    graph = pygraph.graph(lambda d: d)
    for _ in range(5):
        assert graph(argument) is argument
    assert list(graph.record.refusals) == ["unsupported-result"]


def test_a_container_among_the_arguments_that_is_written_to() -> None:
    def function(d: dict[str, Any], items: list[Any]) -> None:
        d["y"] = d["x"] + 1
        items[0] = 3

    graph = pygraph.graph(function)
    for call in range(5):
        written, items = {"x": X + call}, [2]
        graph(written, items)
        assert_same(written["y"], X + call + 1)
        assert items == [3]
    assert list(graph.record.refusals) == ["unsupported-argument"]


def test_a_hook_that_is_registered_inside() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    handles: list[Any] = []

    def function(x: torch.Tensor) -> None:
        weight.grad = None
        handles.append(weight.register_hook(lambda gradient: gradient * 2))
        (weight * x).sum().backward()

    graph = pygraph.graph(function, held=weight)
    for _ in range(5):
        graph(X)
        assert_same(weight.grad, X * 2)
        while handles:
            handles.pop().remove()
    assert list(graph.record.refusals) == ["metadata-mutation"]


def test_a_key_that_returns_a_tensor() -> None:
    config = {"scale": 1.0}
    graph = pygraph.graph(lambda x: x * config["scale"], key=lambda x: torch.tensor(config["scale"]))
    for _ in range(4):
        graph(X)
    config["scale"] = 2.0
    assert_same(graph(X), X * 2)
    assert "key returns a tensor" in graph.record.reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_runs_uncaptured() -> None:
    graph = pygraph.graph(lambda x: x + x)
    replayed(graph, X, calls=4)
    nested = torch.nested.nested_tensor([X, X[:2]])
    for _ in range(4):
        assert_same(graph(nested).unbind()[1], 2 * X[:2])
    assert list(graph.record.refusals) == ["unsupported-tensor"]


def test_a_copy_of_a_module_with_a_graph_uses_the_copy() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.step: Any = pygraph.graph(self.run, held=self.linear)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    with torch.no_grad():
        net = Net()
        replayed(net.step, X)
        twin = copy.deepcopy(net)
        twin.linear.weight.add_(1)
        for call in range(4):
            assert_same(is_replay(twin.step, X) if call > 1 else twin.step(X), twin.run(X))
            assert_same(is_replay(net.step, X), net.run(X))


@pytest.mark.parametrize("kind", ["plain value", "structure"])
def test_calls_that_are_never_alike_have_a_reason(kind: str) -> None:
    held: dict[str, int] = {"count": 0}

    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        held["count"] += kind == "structure"
        return x * (held["count"] + number)

    graph = pygraph.graph(function, held=held)
    for call in range(60):
        graph(X, call if kind == "plain value" else 0)
    assert "no call had" in graph.record.reason


def test_what_is_dropped_is_counted_and_forgotten() -> None:
    graph: Callable[..., Any] = pygraph.graph(lambda x, number: x * number)
    for number in range(80):
        replayed(graph, X, number)
    record: Any = graph.record  # type: ignore[attr-defined]
    assert (record.captures, len(record.regions)) == (80, 64)
    assert len({region.name for region in record.regions}) == 64


@pytest.mark.parametrize("kind", ["dictionary", "attribute", "list", "queue", "set", "variable", "nested"])
def test_tensors_that_are_kept_elsewhere_are_taken_out_and_the_call_is_refused(kind: str) -> None:
    """A call that captures finds nothing there that has no memory, and neither does its caller."""
    kept: Any = SimpleNamespace(tables={}, last=None, made=[], queue=deque(), met=set())
    variable, number = torch.zeros(4), [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal variable
        made = torch.full((4,), 7.0) + number[0]
        if kind == "dictionary":
            made = kept.tables.setdefault(number[0], made)
        elif kind == "attribute":
            kept.last = made
        elif kind == "list":
            kept.made.append(made)
        elif kind == "queue":
            kept.queue.append(made)
        elif kind == "set":
            kept.met.add(made)
        elif kind == "nested":
            kept.last = SimpleNamespace(parts=(made,))
        else:
            variable = made
        return x * made

    graph = pygraph.graph(function)
    for call in range(4):
        number[0] = call
        assert_same(graph(X), X * (7.0 + call))
        seen = {
            "dictionary": [*kept.tables.values()],
            "attribute": [kept.last],
            "list": kept.made,
            "queue": kept.queue,
            "set": sorted(kept.met, key=lambda tensor: float(tensor[0])),
            "variable": [variable],
            "nested": [*getattr(kept.last, "parts", ())],
        }[kind]
        assert_same(seen[-1], torch.full((4,), 7.0 + call))
        assert len(seen) == (1 if kind in ("attribute", "variable", "nested") else call + 1)
    assert list(graph.record.refusals) == ["survivor"]


@pytest.mark.parametrize("kind", [list, set, deque, dict])
def test_a_container_of_before_is_left_where_it_was(kind: Any) -> None:
    held, others = SimpleNamespace(place=None), [kind(), kind()]

    def function(x: torch.Tensor) -> torch.Tensor:
        held.place = others[1]
        return x + 1

    graph = pygraph.graph(function, held=held)
    for _ in range(5):
        held.place = others[0]
        graph(X)
        assert held.place is others[1]
    assert "unsupported-result" in graph.record.refusals


def test_a_queue_that_is_held_is_written_by_a_replay() -> None:
    held, twin = SimpleNamespace(queue=deque(maxlen=2)), deque(maxlen=2)

    def function(x: torch.Tensor) -> None:
        held.queue.append(x + 1)

    graph = pygraph.graph(function, held=held)
    for call in range(7):
        graph(X + call)
        twin.append(X + call + 1)
        assert_same(list(held.queue), list(twin))
    assert graph.record.replays


def test_a_cache_of_a_function_that_is_filled_in_a_capture() -> None:
    @functools.lru_cache
    def table(length: int) -> torch.Tensor:
        return torch.arange(length).float() + 1

    graph = pygraph.graph(lambda x: x * table(4))
    graph(X)
    table.cache_clear()
    for _ in range(3):
        assert_same(graph(X), X * torch.arange(1.0, 5.0))
        assert_same(table(4), torch.arange(1.0, 5.0))


def test_a_seed_that_is_set_inside() -> None:
    def run(*, captured: bool) -> list[torch.Tensor]:
        def function() -> torch.Tensor:
            torch.manual_seed(3)
            return torch.rand(3)

        step: Any = pygraph.graph(function) if captured else function
        torch.manual_seed(0)
        drawn = [each for _ in range(5) for each in (step(), torch.rand(2))]
        assert not captured or "host-random" in step.record.refusals
        return drawn

    assert_same(run(captured=True), run(captured=False))


@pytest.mark.parametrize(
    ("get", "put", "value"),
    [
        (torch.is_grad_enabled, torch.set_grad_enabled, False),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    ],
    ids=["gradients", "dtype", "deterministic"],
)
def test_a_mode_that_is_left_changed(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        made = x + torch.zeros(4)
        put(value)
        return made

    graph, before = pygraph.graph(function), get()
    try:
        for _ in range(5):
            put(before)
            assert_same(graph(X), X)
            assert get() == value
        assert list(graph.record.refusals) == ["uncaptured-work"]
    finally:
        put(before)


@torch.library.custom_op("tests_effects::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@pytest.mark.parametrize("write", [torch.Tensor.mul_, halve])
def test_autograd_notices_a_write(write: Callable[..., Any]) -> None:
    """An earlier forward pass has saved the old values, which its backward pass needs."""
    cache, arguments = torch.ones(4), (2,) if write is torch.Tensor.mul_ else ()

    @pygraph.graph(held=cache)
    def function(x: torch.Tensor) -> torch.Tensor:
        write(cache, *arguments)
        return cache + x

    for _ in range(5):
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * cache).sum()
        with torch.no_grad():
            function(X)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert function.record.replays
