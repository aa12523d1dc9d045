"""Calls that no replay could stand for run uncaptured, and say why: reason, operator, the user's line, the tensor."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed import _functional_collectives as functional_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

import pygraph
from pygraph.errors import CaptureError, OptionError
from pygraph.graphs.watch import attributes_refused
from pygraph.runtime.calls import leaves
from tests.graph.calls import assert_same, is_replay, replayed


def _move(x: torch.Tensor) -> None:
    x.set_(torch.full_like(x, 7))


_library = torch.library.Library("pygraph_refused", "DEF")
_library.define("move(Tensor(a!) x) -> ()")
_library.impl("move", _move, "CPU")
_library.impl("move", lambda x: None, "Meta")
elsewhere = torch.full((3,), 2.0)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def _line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that has ``text``."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [first + index for index, line in enumerate(lines) if text in line]
    return f"{__file__.rpartition('/')[2]}:{number}"


def _refusal(graph: Any, reason: str, *args: Any) -> Any:
    for _ in range(4):
        graph(*args)
    assert graph.record.replays == 0
    assert reason in graph.record.refusals, graph.record
    return graph.record.refusals[reason]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.rope = SimpleNamespace(cos=torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.rope.cos


def test_unknown_memory_of_an_attribute_names_its_path() -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    refusal = _refusal(graph, "unknown-memory", torch.randn(2, 3))
    assert refusal.detail == "Model.rope.cos: add it to held"
    assert refusal.launch == "aten::mul.Tensor"
    assert refusal.loc.endswith(_line(Model.forward, "self.rope.cos"))
    graph = pygraph.graph(model, held=[model, model.rope])
    replayed(graph, torch.randn(2, 3), calls=3)
    model.rope.cos = torch.full((3,), 7.0)
    x = torch.randn(2, 3)
    assert_same(graph(x), model(x))


def test_unknown_memory_of_closures_and_globals_is_named() -> None:
    weight = torch.randn(3)
    nested = {"a": [weight]}
    assert _refusal(pygraph.graph(lambda x: x * weight), "unknown-memory", torch.ones(3)).detail.startswith("weight:")
    refusal = _refusal(pygraph.graph(lambda x: x * nested["a"][0]), "unknown-memory", torch.ones(3))
    assert refusal.detail.startswith("nested.a[0]:")
    refusal = _refusal(pygraph.graph(lambda x: x * elsewhere), "unknown-memory", torch.ones(3))
    assert refusal.detail.startswith("elsewhere:")


def test_unknown_memory_that_nothing_leads_to() -> None:
    hidden = iter(lambda: torch.zeros(3), None)
    views = [torch.zeros(3)]
    source = iter(lambda: views[0], None)
    refusal = _refusal(pygraph.graph(lambda x: x * next(source)), "unknown-memory", torch.ones(3))
    assert refusal.loc is not None
    graph = pygraph.graph(lambda x: x * next(hidden))  # made inside
    x = torch.ones(3)
    assert_same(replayed(graph, x, calls=4), torch.zeros(3))


def test_a_number_that_counts_is_refused_with_its_line() -> None:
    count = [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * count[0]

    graph = pygraph.graph(function)
    refusal = _refusal(graph, "unstable-number", torch.ones(3))
    assert "aten.mul.Tensor(·, 2) became aten.mul.Tensor(·, 3)" in refusal.detail
    assert refusal.loc.endswith(_line(function, "return x * count[0]"))


@pytest.mark.parametrize("constant", [False, True])
def test_a_number_that_changes_from_call_to_call_is_refused_with_its_line(constant: bool) -> None:
    config = {"scale": 1.0}

    def function(x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(config["scale"]) if constant else config["scale"]
        return x * scale

    graph = pygraph.graph(function)
    for call in range(6):
        config["scale"] = float(call)
        assert_same(graph(torch.ones(3)), torch.full((3,), float(call)))
    assert graph.record.replays == 0
    refusal = graph.record.refusals["unstable-number"]
    assert _line(function, "scale = torch" if constant else "return x * scale") in refusal.detail


def test_a_plain_result_that_changes_from_call_to_call_is_refused() -> None:
    config = {"result": 0}
    graph = pygraph.graph(lambda x: (x.add_(1), config["result"])[1])
    for call in range(6):
        config["result"] = call
        assert graph(torch.ones(3)) == call
    assert graph.record.replays == 0
    assert "unstable-number" in graph.record.refusals


def test_other_operators_in_another_call_are_refused() -> None:
    config = {"more": False}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.neg() + 1 if config["more"] else x * 2

    graph = pygraph.graph(function)
    for call in range(6):
        config["more"] = call > 1
        assert_same(graph(torch.ones(3)), torch.zeros(3) if call > 1 else torch.full((3,), 2.0))
    assert "unstable-launches" in graph.record.refusals


HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x * 2 if x.sum() > 0 else x,
    "print": lambda x: (str(x), x + 1)[1],
    "tolist": lambda x: x * x.tolist()[0],
    "numpy": lambda x: x * float(x.numpy()[0]),
    "dlpack": lambda x: x * float(__import__("numpy").from_dlpack(x)[0]),
    "equal": lambda x: x * torch.equal(x, x),
    "nonzero": lambda x: x[x > 0],
}


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads_are_refused(name: str) -> None:
    function = HOST_READS[name]
    graph = pygraph.graph(function)
    for value in (1.0, 2.0, 3.0, -1.0):
        x = torch.full((3,), value)
        assert_same(graph(x), function(x))
    assert graph.record.captures == 0
    refusal = next(iter(graph.record.refusals.values()))
    assert refusal.reason in ("host-read", "dynamic-output", "capture-failed")
    assert refusal.loc is not None, refusal
    assert "test_refused.py" in refusal.loc


def test_a_print_that_is_refused_leaves_gradients_on() -> None:
    """Changes of ``Tensor.__repr__`` to the thread's state are undone late where it raises."""
    linear = torch.nn.Linear(3, 3)

    def function(x: torch.Tensor) -> None:
        with torch.inference_mode():
            str(linear.weight)
        linear(x).sum().backward()

    graph = pygraph.graph(function, held=linear)
    with torch.enable_grad():
        for _ in range(4):
            linear.zero_grad()
            graph(torch.ones(3))
            assert_same(linear.weight.grad, torch.ones(3, 3))
    assert "host-read" in graph.record.refusals


def test_a_refusal_that_the_callable_catches_is_one() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return x + x.sum().item()
        except Exception:  # noqa: BLE001
            return x

    graph = pygraph.graph(function)
    for _ in range(4):
        assert_same(graph(torch.zeros(3)), torch.zeros(3))
    assert graph.record.captures == 0
    assert graph.record.replays == 0


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "offset": lambda x: x.storage_offset(),
    "offset of a view": lambda x: x[1:].storage_offset(),
    "size of the storage": lambda x: x.untyped_storage().nbytes(),
    "view": lambda x: x._is_view(),
    "base": lambda x: x._base is None,
    "version": lambda x: x._version,
    "shared": lambda x: x.is_shared(),
    "attribute": lambda x: x.scale,
    "missing attribute": lambda x: hasattr(x, "other"),
    "dictionary": lambda x: vars(x)["scale"],
    "written attribute": lambda x: setattr(x, "scale", 3.0) or 1.0,
}


@pytest.mark.parametrize("held", [False, True], ids=["argument", "held"])
@pytest.mark.parametrize("name", READS)
def test_what_no_key_has_of_a_tensor_is_not_read(name: str, held: bool) -> None:
    read, one, two = READS[name], torch.ones(4), torch.ones(20)[4:8].add_(1).add_(1)
    one.scale, two.scale, two.other = 2.0, 3.0, 4.0  # type: ignore[attr-defined]
    places = SimpleNamespace(x=one)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * float(read(places.x if held else x))

    graph = pygraph.graph(function, held=places if held else ())
    for x in (one, one, one, two, two):
        places.x = x
        assert_same(graph(x), function(x))
    refusal = graph.record.refusals["host-read"]
    assert refusal.loc is not None
    assert "test_refused.py" in refusal.loc
    assert not {"__getattribute__", "__setattr__"} & set(vars(torch.Tensor))


def test_metadata_of_tensors_that_the_callable_makes_is_read() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        made = (x + 1)[1:]
        made.scale = made.storage_offset() + made._version  # type: ignore[attr-defined]
        return made * made.scale  # type: ignore[attr-defined]

    graph = pygraph.graph(function)
    replayed(graph, torch.ones(4), calls=3)
    assert_same(is_replay(graph, torch.full((4,), 2.0)), torch.full((3,), 3.0))


def test_an_address_that_is_read_in_a_capture_decides_nothing() -> None:
    x = torch.ones(4)
    with attributes_refused([x], [x]):
        address = x.data_ptr() + 8
        assert address % 16 == 8
        for decide in (lambda: address % 64, lambda: address == 8, lambda: {address: 1}, lambda: address - 8):
            with pytest.raises(CaptureError, match="data_ptr"):
                decide()
    assert int(address) == x.data_ptr() + 8


def test_host_reads_of_what_is_held_are_refused() -> None:
    held = torch.ones(3)
    graph = pygraph.graph(lambda x: x * held.tolist()[0], held=held)
    for value in (1.0, 2.0, 3.0, 4.0):
        held.fill_(value)
        assert_same(graph(torch.ones(3)), torch.full((3,), value))
    assert list(graph.record.refusals) == ["host-read"]


def test_the_recurrent_layers_of_the_cpu_are_refused_when_they_train() -> None:
    """Their backward reads a workspace that the library has filled, and crashes on zeros."""
    lstm = torch.nn.LSTM(4, 4)

    def function(x: torch.Tensor) -> None:
        lstm(x)[0].sum().backward()

    graph = pygraph.graph(function, held=lstm)
    with torch.enable_grad():
        for _ in range(4):
            lstm.zero_grad()
            graph(torch.randn(5, 2, 4))
    assert graph.record.replays == 0
    assert lstm.weight_ih_l0.grad is not None


def test_a_generator_of_the_callers_is_refused() -> None:
    generator = torch.Generator()
    graph = pygraph.graph(lambda x: x + torch.rand(3, generator=generator))
    assert "rand" in _refusal(graph, "generator-argument", torch.ones(3)).detail


def test_numbers_of_python_and_numpy_are_refused() -> None:
    import random

    graph = pygraph.graph(lambda x: x * random.random())
    _refusal(graph, "unstable-number", torch.ones(3))


def test_a_result_that_autograd_could_go_back_from() -> None:
    linear = torch.nn.Linear(3, 3)
    graph = pygraph.graph(linear, held=linear)
    with torch.enable_grad():
        assert "detach it" in _refusal(graph, "open-graph", torch.ones(3)).detail
        graph(torch.ones(3)).sum().backward()
    assert linear.weight.grad is not None


def test_a_history_of_which_a_part_is_left() -> None:
    used, left = (torch.ones(3, requires_grad=True) for _ in range(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        used.grad = None
        loss = (used * used * x).sum()
        loss.backward()
        return loss + (left * left).sum()

    graph = pygraph.graph(function, held=[used, left])
    with torch.enable_grad():
        for _ in range(5):
            assert_same(torch.autograd.grad(graph(torch.ones(3)), left)[0], torch.full((3,), 2.0))
    assert "open-graph" in graph.record.refusals


def test_an_argument_with_a_history() -> None:
    weight = torch.ones(3, requires_grad=True)
    graph = pygraph.graph(lambda x: x.sum().backward())
    with torch.enable_grad():
        for _ in range(4):
            graph(weight * 2)
    assert_same(weight.grad, torch.full((3,), 8.0))
    assert "outer-graph" in graph.record.refusals


def test_a_result_of_another_kind() -> None:
    graph = pygraph.graph(lambda x: SimpleNamespace(y=x + 1))
    assert "SimpleNamespace" in _refusal(graph, "unsupported-result", torch.ones(3)).detail
    assert_same(graph(torch.ones(3)).y, torch.full((3,), 2.0))


def test_memory_that_the_callable_gives_to_a_tensor() -> None:
    held = torch.ones(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        held.data = x + 1
        return held * 2

    graph = pygraph.graph(function, held=held)
    for value in range(4):
        assert_same(graph(torch.full((3,), float(value))), torch.full((3,), 2.0 * value + 2))
    assert "metadata-mutation" in graph.record.refusals


def test_tensors_of_subclasses() -> None:
    class Mine(torch.Tensor):
        pass

    held = torch.ones(3).as_subclass(Mine)
    graph = pygraph.graph(lambda x: x * held, held=held)
    _refusal(graph, "unsupported-tensor", torch.ones(3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, first: (x if first else w) - (w if first else x),
        lambda x, w, first: (x + 1, x + 2)[:: 1 if first else -1],
        lambda x, w, first: (
            x.view(1, 3, 1, 1)
            .repeat(1, 1, 2, 2)
            .clone(memory_format=torch.channels_last if first else torch.contiguous_format)
        ),
    ],
    ids=["operands", "results", "layout"],
)
def test_tensors_that_change_places_before_the_third_call_are_refused(function: Callable[..., Any]) -> None:
    first = [True]
    graph = pygraph.graph(lambda x, w: function(x, w, first[0]))
    x, w = torch.ones(3), torch.zeros(3)
    replayed(graph, x, w)
    first[0] = False
    for _ in range(2):
        result, expected = graph(x, w), function(x, w, False)
        assert_same(result, expected)
        assert [t.stride() for t in leaves(result)] == [t.stride() for t in leaves(expected)]
    assert graph.record.replays == 0
    assert "unstable-launches" in graph.record.refusals or "unstable-number" in graph.record.refusals


def test_memory_of_numpy_is_refused() -> None:
    array = np.ones(3, dtype=np.float32)
    graph = pygraph.graph(lambda x: x * torch.from_numpy(array))
    for call in range(5):
        array[:] = call
        assert_same(graph(torch.ones(3)), torch.full((3,), float(call)))
    assert graph.record.refusals["unknown-memory"].detail == "a tensor over memory of another library's"


def test_strict_raises() -> None:
    graph = pygraph.graph(lambda x: x * x.sum().item(), options={"strict": True})
    graph(torch.ones(3))
    with pytest.raises(CaptureError, match="host-read"):
        graph(torch.ones(3))


@pytest.mark.parametrize("options", [{"passes": "legality"}, {"dump-dir": "dumps"}, {"inductor": {}}])
def test_options_of_compiled_programs_raise(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"the option '{name}' is one of compiled programs"):
        pygraph.graph(lambda x: x + 1, options=options)
    with pytest.raises(OptionError, match=f"the option '{name}' is one of compiled programs"):
        pygraph.loop(lambda state: state + 1, torch.ones(2), steps=2, options=options)


@pytest.mark.parametrize(
    ("passes", "told"),
    [("ordr", "did you mean 'order'"), ("segments,legality", "it runs on a graph, and this is a launch program")],
)
def test_launch_passes_that_cannot_run_raise(passes: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        pygraph.graph(lambda x: x + 1, options={"launch_passes": passes})


def test_disable_runs_the_callable() -> None:
    graph = pygraph.graph(lambda x: x + 1, options={"disable": True})
    for _ in range(4):
        assert_same(graph(torch.zeros(3)), torch.ones(3))
    assert graph.record.captures == 0
    assert graph.record.reason == "the option disable is set"


def test_what_is_refused_for_good_costs_next_to_nothing() -> None:
    linear = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(100)])

    def function(x: torch.Tensor) -> float:
        return x.sum().item()

    graph = pygraph.graph(function, held=linear)
    x = torch.ones(2)
    for _ in range(2500):  # looks become rare
        graph(x)

    def best(call: Callable[[Any], Any]) -> float:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            for _ in range(50):
                call(x)
            times.append((time.perf_counter() - began) / 50)
        return min(times)

    assert best(graph) - best(function) < 10e-6


NEVER: dict[str, Callable[..., torch.Tensor]] = {
    "refused for good": lambda x, number: x * x.sum().item(),
    "always another value": lambda x, number: x * number,
    "an argument of another kind": lambda x, number: x * 2,
}


@pytest.mark.parametrize("name", NEVER)
def test_calls_that_find_nothing_are_not_looked_at(name: str) -> None:
    """Of such a call, neither arguments nor what is held is read, nor is a key asked for."""
    looks: list[int] = []
    graph = pygraph.graph(NEVER[name], held=torch.nn.Linear(2, 2), key=lambda x, number: looks.append(0))
    for call in range(8000):
        assert_same(
            graph(torch.ones(2), SimpleNamespace() if "kind" in name else call), NEVER[name](torch.ones(2), call)
        )
    assert len(looks) < 80


@pytest.mark.parametrize("every", [2, 3, 7])
def test_structures_that_change_before_captures_pay_are_captured_three_times(every: int) -> None:
    net = torch.nn.Linear(2, 2)
    net.scale, looks = 0, []

    def function(x: torch.Tensor) -> torch.Tensor:
        return net(x) * net.scale

    graph = pygraph.graph(function, held=net, key=looks.append, options={"ledger": True})
    for call in range(3000):
        net.scale = call // every
        assert_same(graph(torch.ones(2)), function(torch.ones(2)))
    assert graph.record.captures <= 4
    assert len(looks) < 150
    assert graph.record.reason


def test_what_is_refused_is_tried_again_when_asked() -> None:
    config = {"reads": True}
    graph = pygraph.graph(lambda x: x * x.sum().item() if config["reads"] else x * 2)
    x = torch.ones(3)
    for _ in range(40):
        graph(x)
    config["reads"] = False
    assert pygraph.retry(every=True) >= 1
    for _ in range(4):
        assert_same(graph(x), torch.full((3,), 2.0))
    assert graph.record.replays >= 1


def test_reports_tell_of_graphs() -> None:
    pygraph.reset()
    graph = pygraph.graph(lambda x: x * x.sum().item())
    for _ in range(3):
        graph(torch.ones(3))
    (report,) = pygraph.reports()
    assert any("host-read" in note for note in report.notes)
    assert report.regions[0].state == "uncaptured"
    assert "host-read" in report.regions[0].why


def test_what_a_functional_collective_returns_outside_of_compiled_code() -> None:
    """A tensor of a class of its own, which has no memory."""
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        step = pygraph.graph(
            lambda x: functional_collectives.all_reduce(x * 2, "sum", torch.distributed.group.WORLD) + 1
        )
        refusal = _refusal(step, "comparison-failed", torch.ones(3))
        assert "returns AsyncCollectiveTensor" in refusal.detail
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 3.0))
    finally:
        torch.distributed.destroy_process_group()


def test_a_result_with_an_attribute() -> None:
    def tagged(x: torch.Tensor) -> Any:
        made: Any = x * 2
        made.scale = 2
        return made

    graph = pygraph.graph(tagged)
    assert "attribute scale" in _refusal(graph, "unsupported-result", torch.ones(3)).detail
    assert graph(torch.ones(3)).scale == 2


def test_an_operator_that_gives_its_argument_other_memory() -> None:
    def moved(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.pygraph_refused.move(y)
        return y + 1

    graph = pygraph.graph(moved)
    assert "gives it other memory" in _refusal(graph, "comparison-failed", torch.ones(3)).detail
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 8.0))


def test_arguments_and_results_that_contain_themselves_or_are_deep() -> None:
    def around(x: torch.Tensor) -> list[Any]:
        made: list[Any] = [x * 2]
        made.append(made)
        return made

    def innermost(value: Any) -> torch.Tensor:
        while isinstance(value, list):
            value = value[0]
        return value * 2

    graph = pygraph.graph(around)
    assert "contain themselves" in _refusal(graph, "unsupported-result", torch.ones(3)).detail
    assert torch.equal(graph(torch.ones(3))[0], torch.full((3,), 2.0))
    graph = pygraph.graph(innermost)
    assert "contain themselves" in _refusal(graph, "argument-type", around(torch.ones(3))).detail
    deep: Any = torch.ones(3)
    for _ in range(450):
        deep = [deep]
    graph = pygraph.graph(innermost)
    for _ in range(6):
        assert torch.equal(graph(deep), torch.full((3,), 2.0))
