"""Arguments of graphs: patched tensors, plain values by bits, pytrees, results, modes."""

from __future__ import annotations

import collections
import copy
import enum
import inspect
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import pygraph
from pygraph.graphs.callable import How
from tests.graph.calls import assert_same, is_replay, replayed

NAN, OTHER_NAN = torch.tensor([0x7FF8 << 48, (0x7FF8 << 48) + 1]).view(torch.float64).tolist()


class Pair(NamedTuple):
    left: torch.Tensor
    right: float


class Kind(enum.Enum):
    PREFILL = 0
    DECODE = 1


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_tensors_are_those_of_each_call() -> None:
    graph = pygraph.graph(lambda x, *, y: (x @ y).relu() + y.sum())
    replayed(graph, torch.randn(4, 4), y=torch.randn(4, 4))
    for _ in range(3):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        assert_same(is_replay(graph, x, y=y), (x @ y).relu() + y.sum())


def test_other_sizes_are_captured_by_themselves() -> None:
    graph = pygraph.graph(lambda x: x * 2 if x.shape[0] > 4 else x + 1)
    for size in (3, 8, 3, 8, 3, 8):
        x = torch.randn(size)
        assert_same(graph(x), x * 2 if size > 4 else x + 1)
    assert graph.record.captures == 2
    for size in (3, 8):
        x = torch.randn(size)
        assert_same(is_replay(graph, x), x * 2 if size > 4 else x + 1)


@pytest.mark.parametrize(
    "pair", [(0.0, -0.0), (True, 1), (1, 1.0), (NAN, OTHER_NAN), (2, 3), (None, 0), ("a", "b"), (0j, -0j)]
)
def test_plain_values_tell_calls_apart_by_bits(pair: tuple[Any, Any]) -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor, value: Any) -> torch.Tensor:
        seen.append(value)
        return x + 1

    graph = pygraph.graph(function)
    x = torch.randn(3)
    for value in pair:
        replayed(graph, x, value, calls=3)
        is_replay(graph, x, value)
    assert graph.record.captures == 2
    assert any(value is pair[0] for value in seen)
    assert any(value is pair[1] for value in seen)


def test_arguments_are_pytrees() -> None:
    def function(tree: Any, *, more: Any) -> Any:
        pair = tree["pairs"][0]
        return {"sum": pair.left * pair.right + more[0][0], "twice": [tree["x"] * 2, (tree["x"], None, 7, "text")]}

    graph = pygraph.graph(function)

    def arguments() -> tuple[Any, Any]:
        tree = {"pairs": [Pair(torch.randn(3), 0.5)], "x": torch.randn(2)}
        return tree, collections.OrderedDict([(0, [torch.randn(3)])])

    for call in range(4):
        tree, more = arguments()
        result = is_replay(graph, tree, more=more) if call > 1 else graph(tree, more=more)
        expected = function(tree, more=more)
        assert_same(result["sum"], expected["sum"])
        assert_same(result["twice"][0], expected["twice"][0])
        assert result["twice"][1][0] is tree["x"]
        assert result["twice"][1][1:] == (None, 7, "text")


def test_enumerations_are_plain() -> None:
    graph = pygraph.graph(lambda x, kind: x * 2 if kind is Kind.DECODE else x * 3)
    x = torch.randn(3)
    for kind in (*Kind, *Kind, *Kind):
        assert_same(graph(x, kind), x * 2 if kind is Kind.DECODE else x * 3)
    assert graph.record.captures == 2


def test_an_argument_of_another_kind_runs_uncaptured() -> None:
    graph = pygraph.graph(lambda x, thing: x + 1)
    for _ in range(4):
        graph(torch.randn(3), object())
    assert graph.record.captures == 0
    assert graph.record.reason == "argument-type: an argument is a object"


def test_key_is_what_else_the_code_decides_by() -> None:
    config = {"scale": 2.0}
    graph = pygraph.graph(lambda x: x * config["scale"], key=lambda x: config["scale"])
    x = torch.randn(3)
    for scale in (2.0, 3.0) * 4:
        config["scale"] = scale
        assert_same(graph(x), x * scale)
    assert graph.record.captures == 2
    assert graph.record.replays == 4


def test_results_are_never_overwritten() -> None:
    graph = pygraph.graph(lambda x: x * 2)
    replayed(graph, torch.ones(4))
    kept = [graph(torch.full((4,), float(number))) for number in range(5)]
    for number, result in enumerate(kept):
        assert_same(result, torch.full((4,), number * 2.0))


def test_an_argument_that_is_returned_is_that_object() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x, y.t(), y

    graph = pygraph.graph(function)
    for call in range(5):
        x, y = torch.zeros(3), torch.randn(2, 3)
        returned, view, same = is_replay(graph, x, y) if call > 1 else graph(x, y)
        assert returned is x
        assert same is y
        assert_same(x, torch.ones(3))
        assert_same(view, y.t())
        view.fill_(0)
        assert not y.any()


@pytest.mark.parametrize("value", [None, 3, 2.5, "text", (), []])
def test_plain_results(value: Any) -> None:
    graph = pygraph.graph(lambda x: (x.add_(1), copy.copy(value))[1])
    x = torch.zeros(2)
    for _ in range(4):
        assert graph(x) == value
    assert graph.record.replays == 2
    assert_same(x, torch.full((2,), 4.0))


def test_python_runs_when_it_captures_and_never_in_a_replay() -> None:
    calls: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x + 1

    graph = pygraph.graph(function)
    replayed(graph, torch.ones(2), calls=3)
    ran = len(calls)
    for _ in range(5):
        is_replay(graph, torch.ones(2))
    assert len(calls) == ran


def test_modes_are_part_of_the_key() -> None:
    graph = pygraph.graph(lambda x: torch.mm(x, x) + torch.tensor(1.5))
    x = torch.randn(4, 4)
    for _ in range(4):
        assert graph(x).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(graph(x), torch.mm(x, x) + torch.tensor(1.5))
        with torch.inference_mode():
            result = graph(x)
            assert result.is_inference()
        torch.set_default_dtype(torch.float64)
        try:
            assert_same(graph(x), torch.mm(x, x) + torch.tensor(1.5))
        finally:
            torch.set_default_dtype(torch.float32)
    assert graph.record.captures == 4
    assert graph.record.replays >= 8


def test_a_default_device_and_modes_that_watch_functions() -> None:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.Tensor.add else result

    graph = pygraph.graph(lambda x: x.add(torch.tensor([1.0, 2.0, 3.0])))
    x = torch.zeros(3)
    replayed(graph, x, calls=3)
    with Doubles():
        assert_same(graph(x), torch.tensor([2.0, 4.0, 6.0]))
    with torch.device("cpu"):
        for _ in range(3):
            assert_same(graph(x), torch.tensor([1.0, 2.0, 3.0]))
    assert graph.record.captures == 2


def test_autocast_keeps_no_cast_of_a_capture() -> None:
    linear = torch.nn.Linear(4, 4)
    twin = copy.deepcopy(linear)
    graph = pygraph.graph(linear, held=linear)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            assert_same(linear(x), twin(x))
            assert_same(graph(x), twin(x))
            assert_same(linear(x), twin(x))
    assert graph.record.replays == 2


@pytest.mark.parametrize("first", range(4))
def test_a_cast_that_autocast_keeps_is_used(first: int) -> None:
    """Within one context, it does not see that a parameter is written: no replay may, either."""
    linear = torch.nn.Linear(4, 4)
    twin = copy.deepcopy(linear)
    graph = pygraph.graph(linear, held=linear)
    x = torch.randn(2, 4)
    for call in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(call + 1 if call < 2 else 1):
                assert_same(graph(x), twin(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)
        for call in range(8):
            assert_same(graph(x), twin(x))
            if call >= first:
                linear.weight.mul_(2)
                twin.weight.mul_(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(is_replay(graph, x), twin(x))
    assert "autocast" in graph.record.refusals["uncaptured-work"].detail


def test_dropout_draws_from_the_state_of_today() -> None:
    graph = pygraph.graph(lambda x: torch.nn.functional.dropout(x, 0.5))
    x = torch.ones(64)
    replayed(graph, x)
    for seed in range(4):
        torch.manual_seed(seed)
        result, state = is_replay(graph, x), torch.get_rng_state()
        torch.manual_seed(seed)
        assert_same(result, torch.nn.functional.dropout(x, 0.5))
        assert torch.equal(state, torch.get_rng_state())


def test_a_compiled_function_inside_is_captured_as_it_is_compiled() -> None:
    inner = torch.compile(lambda x: torch.relu(x * 2) + 1, backend="pygraph")
    graph = pygraph.graph(lambda x: inner(x) * 3)
    for call in range(5):
        x = torch.randn(4, 4)
        result = is_replay(graph, x) if call > 1 else graph(x)
        assert_same(result, (torch.relu(x * 2) + 1) * 3)
    assert graph.record.regions[0].launches == 2


def test_a_graph_inside_of_a_compiled_function_is_compiled_with_it() -> None:
    graph = pygraph.graph(lambda x: x * 2)
    outer = torch.compile(lambda x: graph(x) + 1, backend="eager", fullgraph=True)
    x = torch.randn(3)
    assert_same(outer(x), x * 2 + 1)
    assert (graph.record.captures, graph.record.uncaptured) == (0, 0)


def test_graphs_inside_of_graphs_step_aside() -> None:
    inner = pygraph.graph(lambda x: x * 2)
    graph = pygraph.graph(lambda x: inner(x) + 1)
    for call in range(5):
        x = torch.randn(4)
        result = is_replay(graph, x) if call > 2 else graph(x)
        assert_same(result, x * 2 + 1)


def test_threads_call_one_graph() -> None:
    linear = torch.nn.Linear(16, 16)
    graph = pygraph.graph(lambda x: linear(x).relu(), held=linear)
    wrong: list[Any] = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for call in range(40):
                x = torch.randn(1 + (seed + call) % 3, 16, generator=generator)
                expected = torch.nn.functional.linear(x, weight, bias).relu()
                if not torch.equal(graph(x), expected):
                    wrong.append((seed, call))

    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    for _ in range(2):
        before = graph.record.replays
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
    assert graph.record.replays > before + 60


def test_recursion() -> None:
    def function(x: torch.Tensor, depth: int) -> torch.Tensor:
        return graph(x, depth - 1) + 1 if depth else x * 2

    graph = pygraph.graph(function)
    for _ in range(6):
        x = torch.randn(3)
        assert_same(graph(x, 2), x * 2 + 1 + 1)
    assert graph.record.replays


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    @pygraph.graph(key=lambda self, x: self)
    def decorated(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_bound_method_whose_object_is_held() -> None:
    scaled = Scaled(2.0)
    graph = pygraph.graph(scaled.method, held=scaled)
    x = torch.randn(3)
    replayed(graph, x)
    scaled.scale = torch.tensor(5.0)
    assert_same(is_replay(graph, x), x * 5.0)


def test_decorator_of_a_function_and_of_a_method() -> None:
    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        """Doubles."""
        return x * 2

    assert (function.__name__, function.__doc__) == ("function", "Doubles.")
    x = torch.randn(3)
    assert_same(replayed(function, x, calls=3), x * 2)

    @pygraph.graph(options={"order": "program"})
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    assert_same(replayed(other, x, calls=3), x * 3)


def test_the_types_of_keywords_are_those_of_the_signature() -> None:
    keywords = dict(inspect.signature(pygraph.graph).parameters)
    del keywords["function"]
    assert {name: each.annotation for name, each in keywords.items()} == {
        name: each.__forward_arg__ for name, each in How.__annotations__.items()
    }


def test_partials_and_modules() -> None:
    import functools

    graph = pygraph.graph(functools.partial(torch.add, alpha=2))
    x, y = torch.randn(3), torch.randn(3)
    assert_same(replayed(graph, x, y, calls=3), x + 2 * y)
    linear = torch.nn.Linear(3, 3)
    graph = pygraph.graph(linear, held=linear)
    assert_same(replayed(graph, x, calls=3), linear(x))


def test_exceptions_reach_the_caller_unchanged() -> None:
    error = ValueError("mine")

    def function(x: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise error
        return x + 1

    graph = pygraph.graph(function)
    x = torch.randn(3)
    for _ in range(4):
        with pytest.raises(ValueError, match="mine") as raised:
            graph(x, True)
        assert raised.value is error
        assert_same(graph(x, False), x + 1)
    assert graph.record.replays == 2


def test_two_arguments_that_share_memory() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    graph = pygraph.graph(function)
    for _ in range(4):
        x = torch.ones(4)
        assert_same(graph(x, x[1:3]), torch.full((2,), 3.0))
        x = torch.ones(4)
        assert_same(graph(x, torch.ones(2)), torch.full((2,), 2.0))
    assert graph.record.captures == 2
    assert graph.record.replays == 4


class Node:
    def __init__(self, tensor: torch.Tensor, context: Any) -> None:
        self.tensor, self.context = tensor, context


torch.utils._pytree.register_pytree_node(
    Node, lambda node: ([node.tensor], node.context), lambda children, context: Node(next(iter(children)), context)
)


@pytest.mark.parametrize(("left", "right"), [(0.0, -0.0), (True, 1.0), (1, 1.0), ([0.0], [-0.0])])
def test_contexts_of_pytrees_count_by_bits(left: Any, right: Any) -> None:
    graph = pygraph.graph(lambda node: node.tensor + 1 if repr(node.context) == repr(left) else node.tensor + 2)
    x = torch.ones(3)
    replayed(graph, Node(x, left), calls=3)
    assert_same(graph(Node(x, right)), x + 2)
    assert_same(is_replay(graph, Node(x, left)), x + 1)


def test_a_context_of_another_kind_is_refused() -> None:
    graph = pygraph.graph(lambda node: node.tensor * float(node.context.sum()))
    for count in range(4):
        assert_same(graph(Node(torch.ones(3), np.full(3, count))), torch.full((3,), 3.0 * count))
    assert graph.record.refusals["argument-type"].detail.endswith("with a ndarray in its context")


def test_enumerations_of_two_types_are_two_arguments() -> None:
    one, other = enum.IntEnum("One", {"A": 1}), enum.IntEnum("Other", {"A": 1})
    graph = pygraph.graph(lambda x, kind: x + 1 if isinstance(kind, one) else x + 2)
    x = torch.ones(3)
    replayed(graph, x, one.A, calls=3)
    assert_same(graph(x, other.A), x + 2)
    assert_same(is_replay(graph, x, one.A), x + 1)


def test_backends_of_attention_are_part_of_the_key() -> None:
    graph = pygraph.graph(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    q = torch.randn(2, 4, 33, 16)
    replayed(graph, q, calls=3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_same(graph(q), torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_forward_differentiation_runs_the_callable() -> None:
    graph = pygraph.graph(lambda x: x.sin())
    replayed(graph, torch.ones(3), calls=3)
    with torch.autograd.forward_ad.dual_level(), torch.enable_grad():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert torch.autograd.forward_ad.unpack_dual(graph(dual)).tangent is not None


def test_a_size_that_is_returned() -> None:
    graph = pygraph.graph(lambda x: ((x * 2).shape, x + 1))
    for rows in (2, 2, 2, 3, 3, 3):
        size, _ = graph(torch.ones(rows, 3))
        assert type(size) is torch.Size
        assert size == (rows, 3)
    assert graph.record.replays
