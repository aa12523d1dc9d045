"""CUDA graphs by hand: where they apply, and that making them is no step of the program. Torch's part is a stand-in."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from benchmarks import sides
from benchmarks.sides import SUITE_SIDES, GraphedModule, WholeStep, step_as, why_not_graphed
from pygraph.bench.sides import sides_for
from pygraph.bench.worker import Inapplicable


def test_where_it_does_not_apply_it_says_why() -> None:
    x, module = torch.ones(2, 2), nn.Linear(2, 2)
    assert why_not_graphed(torch.sin, [x], {}) == "what is compiled is no nn.Module"
    assert why_not_graphed(module, [], {"input": x}) == "the module is called with keyword arguments (input)"
    assert why_not_graphed(module, [x, 3], {}) == "an argument is no tensor, but int"
    assert why_not_graphed(module, [x, [x]], {}) == "an argument is no tensor, but list"
    assert why_not_graphed(module, [x], {}) == "an argument is a tensor of the CPU"
    with FakeTensorMode():
        there = torch.empty(2, 2, device="cuda")
    assert why_not_graphed(module, [there], {}) == "a parameter or buffer lies on the CPU"
    assert why_not_graphed(nn.ReLU(), [there], {}) is None


class Counted(nn.Module):
    """Changes a buffer at each call, as batch normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.rand(()) if self.training else x * self.calls


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lets CPU tensors pass, and has torch.cuda.make_graphed_callables call what it is given three times."""
    made: list[Any] = []

    def make(module: nn.Module, samples: tuple[torch.Tensor, ...]) -> nn.Module:
        made.append(samples)
        for _ in range(3):
            module(*samples)
        return module

    monkeypatch.setattr(sides, "why_not_graphed", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    return made


def test_making_a_graph_leaves_buffers_and_random_state_as_they_were(graphs: list[Any]) -> None:
    for training in (True, False):
        torch.manual_seed(5)
        alone = Counted().train(training)
        expected = [alone(torch.ones(2)) for _ in range(3)]
        torch.manual_seed(5)
        call = GraphedModule(Counted().train(training))
        found = [call(torch.ones(2)) for _ in range(3)]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(graphs) == 2


def test_samples_are_copies_that_want_gradients_as_the_arguments_do(graphs: list[Any]) -> None:
    with_grad, without = torch.ones(2, requires_grad=True), torch.ones(2)

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    GraphedModule(Sum())(with_grad, without)
    (samples,) = graphs
    assert [sample.requires_grad for sample in samples] == [True, False]
    assert samples[1].data_ptr() != without.data_ptr()


def test_what_torch_refuses_does_not_apply(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    with pytest.raises(Inapplicable, match="RuntimeError: operation not permitted"):
        GraphedModule(nn.ReLU())(torch.ones(1))

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", full)
    with pytest.raises(torch.OutOfMemoryError):
        GraphedModule(nn.ReLU())(torch.ones(1))


class Graph:
    """Replays by running the step that was captured, as the device would."""

    step: Any = None

    def replay(self) -> None:
        Graph.step()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Streams that do nothing, and a capture during which nothing takes effect."""
    state = {"capturing": False}

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    @contextlib.contextmanager
    def capture(graph: Graph) -> Any:
        state["capturing"] = True
        yield
        state["capturing"] = False

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return state


def test_every_call_of_a_whole_step_is_one_step(device: dict[str, bool]) -> None:
    done = torch.zeros(())

    def step() -> torch.Tensor:
        if not device["capturing"]:
            done.add_(1)
        return done

    Graph.step = staticmethod(step)
    whole = WholeStep(step)
    assert [float(whole()) for _ in range(6)] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_cannot_be_captured_does_not_apply(device: dict[str, bool]) -> None:
    def step() -> None:
        if device["capturing"]:
            raise RuntimeError("cannot copy to the host while capturing")

    whole = WholeStep(step)
    for _ in range(3):
        whole()
    with pytest.raises(Inapplicable, match="the step cannot be captured: RuntimeError: cannot copy"):
        whole()


def test_sides_are_those_that_a_device_has() -> None:
    by_hand = ("make-graphed-callables", "whole-step")
    assert sides_for([], "cuda", SUITE_SIDES) == ("eager", "default", "reduce-overhead", *by_hand, "pygraph")
    assert sides_for([], "cpu", SUITE_SIDES) == ("eager", "default", "pygraph")
    assert sides_for(["pygraph"], "cpu", SUITE_SIDES) == ("eager", "pygraph")


def test_steps_are_left_as_they_are_but_for_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))

    def step() -> int:
        return 3

    assert step_as("pygraph", step) is step_as("default", step) is step
    assert step_as("reduce-overhead", step)() == 3
    assert marks == [1]
