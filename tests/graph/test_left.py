"""A callable leaves things in what is held: gradients, buffers, states of optimizers, attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pygraph
from pygraph.runtime.critical import capturing
from tests.graph.calls import assert_same, is_replay, state_of

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def _training(optimizer: str, zero: str, *, use_graph: bool, calls: int = 20) -> tuple[list[Any], Any]:
    """Results of a training loop in each step, and the step."""
    torch.manual_seed(0)
    model = Net()
    update = OPTIMIZERS[optimizer](model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if zero == "first":
            update.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        update.step()
        if zero == "last":
            update.zero_grad()
        return loss.detach()

    run = pygraph.graph(step, held=[model, update]) if use_graph else step
    generator = torch.Generator().manual_seed(5)
    seen: list[Any] = []
    for _ in range(calls):
        x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator)
        seen.append([run(x, y).clone(), *state_of(model, update), torch.get_rng_state()])
        if zero == "in place":
            update.zero_grad(set_to_none=False)
    return seen, run


ZEROED = ("first", "last", "in place", "never")
OFTEN = {*product(("adamw", "rmsprop"), ZEROED), ("sgd", "last"), ("momentum", "first"), ("foreach", "in place")}
"""Each optimizer, and each place at which gradients are zeroed with two kinds of state. The others are in the sweep."""
assert {name for name, _ in OFTEN} == {*OPTIMIZERS}
TRAINED = [pytest.param(*each, marks=[pytest.mark.sweep] * (each not in OFTEN)) for each in product(OPTIMIZERS, ZEROED)]


@pytest.mark.parametrize(("optimizer", "zero"), TRAINED)
def test_training_is_bit_equal(optimizer: str, zero: str) -> None:
    expected, _ = _training(optimizer, zero, use_graph=False)
    seen, graph = _training(optimizer, zero, use_graph=True)
    for now, then in zip(seen, expected, strict=True):
        assert_same(now, then)
    assert graph.record.replays >= 15, graph.record


def test_forward_and_backward_alone_leave_gradients() -> None:
    model = nn.Linear(4, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    graph = pygraph.graph(function, held=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Any] = []
    for call in range(6):
        x = torch.randn(3, 4)
        twin = copy.deepcopy(model)
        twin(x).square().sum().backward()
        optimizer.zero_grad()
        loss = is_replay(graph, x) if call > 1 else graph(x)
        assert_same(loss.detach(), twin(x).square().sum().detach())
        assert_same(model.weight.grad, twin.weight.grad)
        assert model.weight.grad.is_leaf
        kept.append((model.weight.grad, twin.weight.grad.clone()))
        optimizer.step()
    for gradient, expected in kept:
        assert_same(gradient, expected)


def test_gradients_of_arguments() -> None:
    graph = pygraph.graph(lambda x: (x * x).sum().backward())
    for call in range(5):
        x = torch.randn(3, requires_grad=True)
        assert (is_replay(graph, x) if call > 1 else graph(x)) is None
        assert x.grad is not None
        assert_same(x.grad, 2 * x.detach())


def test_accumulated_gradients() -> None:
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    graph = pygraph.graph(lambda x: model(x).square().sum().backward(), held=model)
    for call in range(12):
        x = torch.randn(3, 4)
        graph(x)
        twin(x).square().sum().backward()
        assert_same(model.weight.grad, twin.weight.grad)
        if call % 3 == 2:
            model.zero_grad()
            twin.zero_grad()
    assert graph.record.replays == 8


def test_attributes_and_buffers() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.last: Any = None
            self.parts: list[torch.Tensor] = []
            self.named: dict[str, Any] = {"gone": 1}
            self.even = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x, 0.5)
            self.last = x * 2
            self.parts[:] = [x + 1, self.last]
            self.named["made"] = (x - 1, "text")
            self.named.pop("gone", None)
            self.even = not self.even
            return self.last + self.mean

    module = Counter()
    twin = copy.deepcopy(module)
    graph = pygraph.graph(module, held=module)
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(3)
            assert_same(graph(x), twin(x))
            assert_same(module.mean, twin.mean)
            assert_same(module.last, twin.last)
            assert_same(module.parts, twin.parts)
            assert module.parts[1] is module.last
            assert_same(module.named["made"][0], twin.named["made"][0])
            assert (module.named["made"][1], list(module.named)) == ("text", list(twin.named))
            assert module.even == twin.even
    assert graph.record.captures == 2
    assert graph.record.replays >= 4


def test_an_attribute_that_counts_is_never_stale() -> None:
    module = nn.Module()
    module.calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        return x * module.calls

    graph = pygraph.graph(function, held=module)
    for call in range(1, 40):
        assert_same(graph(torch.ones(2)), torch.full((2,), float(call)))
        assert module.calls == call
    assert graph.record.replays == 0


def test_a_learning_rate_that_changes_is_used() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def function(gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        optimizer.step()
        parameter.grad = None

    graph = pygraph.graph(function, held=optimizer)
    expected = torch.ones(2)
    for call in range(12):
        optimizer.param_groups[0]["lr"] = 0.5 if call < 8 else 0.25
        graph(torch.ones(2))
        expected -= optimizer.param_groups[0]["lr"]
        assert_same(parameter.detach(), expected)
    assert graph.record.captures == 2


def test_loaded_state_of_an_optimizer_is_used() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    graph = pygraph.graph(step, held=[model, optimizer])
    for _ in range(4):
        graph(torch.randn(2, 3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    x = torch.randn(2, 3)
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        twin = copy.deepcopy(model)
        other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        other.load_state_dict(copy.deepcopy(saved[1]))
        graph(x)
        twin(x).sum().backward()
        other.step()
        assert_same(state_of(model), state_of(twin))


def test_what_fails_leaves_all_as_it_was() -> None:
    """A capture that fails in the middle of the callable."""
    model = nn.Linear(3, 1)
    model.extra = torch.ones(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        model.extra = model.extra + 1
        model(x).sum().backward()
        model.weight.requires_grad_(True)
        return x * x.sum().item()

    graph = pygraph.graph(function, held=model)
    twin = copy.deepcopy(model)
    for call in range(4):
        x = torch.randn(2, 3)
        address = model.weight.data_ptr()
        graph(x)
        twin(x).sum().backward()
        assert_same(model.weight.grad, twin.weight.grad)
        assert_same(model.extra, torch.full((3,), 2.0 + call))
        assert model.weight.data_ptr() == address
    assert "host-read" in graph.record.refusals


def test_an_interrupt_in_a_capture_leaves_all_as_it_was() -> None:
    model, interrupts = nn.Linear(3, 1), [True]

    def function(x: torch.Tensor) -> None:
        loss = model(x).sum()
        loss.backward()
        if capturing and interrupts.pop():
            raise KeyboardInterrupt

    graph = pygraph.graph(function, held=model)
    twin, address = copy.deepcopy(model), model.weight.data_ptr()
    x = torch.randn(2, 3)
    for _ in range(2):  # the second is the first with gradients
        graph(x)
        twin(x).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        graph(x)
    assert model.weight.data_ptr() == address
    assert_same(state_of(model), state_of(twin))
    interrupts += [False] * 20
    for _ in range(4):
        graph(x)
        twin(x).sum().backward()
        assert_same(state_of(model), state_of(twin))
    assert graph.record.replays


def test_autograd_sees_that_a_replay_wrote() -> None:
    graph = pygraph.graph(lambda x: x.mul_(2))
    with torch.no_grad():
        for _ in range(3):
            graph(torch.ones(2))
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2)
    product = weight * x
    with torch.no_grad():
        is_replay(graph, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def _steps(hook: Callable[[nn.Linear, torch.optim.Optimizer], Any], *, use_graph: bool) -> list[torch.Tensor]:
    """State behind some steps, of which the last two come after ``hook``."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    run: Any = pygraph.graph(step, held=[net, optimizer]) if use_graph else step
    for _ in range(4):
        run(torch.ones(4))
    assert not use_graph or run.record.replays
    kept = hook(net, optimizer)
    for _ in range(2):
        run(torch.ones(4))
    if hasattr(kept, "remove"):
        kept.remove()
    return state_of(net, optimizer)


def _of_a_node(net: nn.Linear, optimizer: torch.optim.Optimizer) -> Any:
    node = net.weight.view_as(net.weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] * 3,))
    return node


def _step_twice(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step
    optimizer.step = lambda *args: (step(), step())[1]  # type: ignore[method-assign]


def _triple(net: nn.Linear) -> None:
    net.weight.grad.mul_(3)


@pytest.mark.parametrize(
    "hook",
    [
        lambda net, optimizer: net.weight.register_hook(lambda gradient: gradient * 3),
        lambda net, optimizer: net.weight.register_post_accumulate_grad_hook(lambda _: _triple(net)),
        lambda net, optimizer: optimizer.register_step_pre_hook(lambda *_: _triple(net)),
        lambda net, optimizer: register_optimizer_step_pre_hook(lambda *_: _triple(net)),
        _of_a_node,
        _step_twice,
    ],
    ids=["tensor", "accumulated", "optimizer", "every optimizer", "node", "step replaced"],
)
def test_hooks_that_come_later_are_called(hook: Callable[..., Any]) -> None:
    assert_same(_steps(hook, use_graph=True), _steps(hook, use_graph=False))


@pytest.mark.parametrize("kind", [list, set, dict, OrderedDict])
def test_a_held_container_is_returned(kind: Any) -> None:
    held = kind({"a": 1}) if kind in (dict, OrderedDict) else kind([1])
    graph = pygraph.graph(lambda x: (held, x + 1), held=held)
    for _ in range(5):
        assert graph(torch.ones(3))[0] is held
    assert graph.record.replays


def test_the_order_of_a_dictionary_is_left() -> None:
    held = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}

    def function(x: torch.Tensor) -> torch.Tensor:
        held["a"] = held.pop("a")
        return held["a"] + x

    graph = pygraph.graph(function, held=held)
    for _ in range(5):
        held["b"] = held.pop("b")
        graph(torch.ones(3))
        assert list(held) == ["b", "a"]
    assert graph.record.replays


def test_a_function_that_is_put_in_a_place_is_left() -> None:
    held = SimpleNamespace(act=torch.cos)

    def function(x: torch.Tensor) -> torch.Tensor:
        held.act = torch.sin
        return x + 1

    graph = pygraph.graph(function, held=held)
    for _ in range(5):
        held.act = torch.cos
        graph(torch.ones(3))
        assert held.act is torch.sin
    assert graph.record.replays


def test_an_object_that_is_put_in_a_place_is_refused() -> None:
    held, objects = SimpleNamespace(), [SimpleNamespace(), SimpleNamespace()]

    def function(x: torch.Tensor) -> torch.Tensor:
        held.object = objects[1]
        return x + 1

    graph = pygraph.graph(function, held=held)
    for _ in range(5):
        held.object = objects[0]
        graph(torch.ones(3))
        assert held.object is objects[1]
    assert "unsupported-result" in graph.record.refusals
