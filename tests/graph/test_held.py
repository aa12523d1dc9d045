"""State that graphs hold: looked up at every call, however it was replaced. Other structure is another entry."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pygraph
from pygraph.runtime import tensors
from tests.graph.calls import assert_same, is_replay, replayed


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.adapters = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("a", "b")})
        self.adapter = self.adapters["a"]
        self.register_buffer("offset", torch.randn(4))
        self.cache = [torch.randn(4), torch.randn(4)]
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu()) + self.adapter(x) * self.scale
        return y + self.offset + self.cache[0] * self.cache[1]


def _parameter(model: Model) -> None:
    model.first.weight = torch.nn.Parameter(torch.randn(4, 4))


def _data(model: Model) -> None:
    model.first.weight.data = torch.randn(4, 4)


def _in_place(model: Model) -> None:
    model.first.weight.mul_(1.5)


def _loaded(model: Model) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def _assigned(model: Model) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _swapped(model: Model) -> None:
    torch.utils.swap_tensors(model.second.weight, torch.nn.Parameter(torch.randn(4, 4)))


def _module(model: Model) -> None:
    model.second = torch.nn.Linear(4, 4)


def _adapter(model: Model) -> None:
    other = model.adapters["b"] if model.adapter is model.adapters["a"] else model.adapters["a"]
    model.adapter = other


def _cache(model: Model) -> None:
    model.cache = [torch.randn(4), torch.randn(4)]


def _entry(model: Model) -> None:
    model.cache[1] = torch.randn(4)


def _buffer(model: Model) -> None:
    model.offset = torch.randn(4)


def _set(model: Model) -> None:
    model.offset.set_(torch.randn(4))


def _scaled(model: Model) -> None:
    model.scale = 2.0 if model.scale == 1.0 else 1.0


def _tied(model: Model) -> None:
    model.second.weight = model.first.weight


def _shared(model: Model) -> None:
    model.second.weight.data = model.first.weight.data


def _untied(model: Model) -> None:
    model.second.weight = torch.nn.Parameter(torch.randn(4, 4))


CHANGES: dict[str, Callable[[Model], None]] = {
    change.__name__[1:]: change
    for change in (
        *(_parameter, _data, _in_place, _loaded, _assigned, _swapped, _module, _adapter, _cache, _entry, _buffer),
        *(_set, _scaled, _tied, _shared, _untied),
    )
}
OTHER_STRUCTURE = ("adapter", "scaled", "tied", "shared", "untied")


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in OTHER_STRUCTURE])
def test_new_memory_is_used_by_the_next_replay(name: str) -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    replayed(graph, torch.randn(2, 4), calls=3)
    for _ in range(3):
        CHANGES[name](model)
        x = torch.randn(2, 4)
        assert_same(is_replay(graph, x), model(x))
    assert graph.record.captures == 1


@pytest.mark.parametrize("name", OTHER_STRUCTURE)
def test_another_structure_is_another_entry(name: str) -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    replayed(graph, torch.randn(2, 4), calls=3)
    CHANGES[name](model)
    captures = graph.record.captures
    for _ in range(4):
        x = torch.randn(2, 4)
        assert_same(graph(x), model(x))
    assert graph.record.captures == captures + (name != "untied")


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([*CHANGES, "call", "call", "call"]), min_size=5, max_size=30))
def test_any_order_of_changes_and_calls(steps: list[str]) -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    replayed(graph, torch.randn(2, 4), calls=3)
    for step in steps:
        if step in CHANGES:
            CHANGES[step](model)
        else:
            x = torch.randn(2, 4)
            assert_same(graph(x), model(x))
    for _ in range(4):
        x = torch.randn(2, 4)
        assert_same(graph(x), model(x))


def test_memory_that_an_argument_shares_with_what_is_held() -> None:
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.ones(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return holder.weight * x + holder.weight

    graph = pygraph.graph(function, held=holder)
    replayed(graph, holder.weight.detach(), calls=3)
    holder.weight.data = torch.full((3,), 3.0)
    apart = torch.ones(3)  # the weight has got other memory: the argument shares it no longer
    for _ in range(4):
        apart.fill_(1)
        assert_same(graph(apart), torch.full((3,), 9.0))
        assert_same(holder.weight.detach(), torch.full((3,), 3.0))
    holder.weight.data = torch.full((3,), 3.0)
    assert_same(is_replay(graph, holder.weight.detach()), torch.full((3,), 42.0))


def test_tensors_of_one_storage() -> None:
    flat = torch.randn(8)
    held = [flat[:4], flat[4:]]

    def function(x: torch.Tensor) -> torch.Tensor:
        held[0].add_(x)
        return held[0] * held[1]

    graph = pygraph.graph(function, held=held)
    for call in range(5):
        x, expected = torch.randn(4), flat.clone()
        expected[:4] += x
        result = is_replay(graph, x) if call > 1 else graph(x)
        assert_same(flat, expected)
        assert_same(result, expected[:4] * expected[4:])


def test_a_cache_that_is_written_and_made_anew() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys, self.length = torch.zeros(8, 4), 8

    cache = Cache()

    def function(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.keys.index_copy_(0, position, x)
        return cache.keys.sum(0)

    graph = pygraph.graph(function, held=cache)
    for call in range(12):
        if call % 5 == 0:
            cache.keys = torch.zeros(8, 4)
        before, x, position = cache.keys.clone(), torch.randn(1, 4), torch.tensor([call % 8])
        result = graph(x, position)
        before[call % 8] = x[0]
        assert_same(cache.keys, before)
        assert_same(result, before.sum(0))
    assert graph.record.replays == 10


def test_a_large_cache_is_neither_copied_nor_compared() -> None:
    cache = [torch.zeros(1 << 20), torch.zeros(4)]
    asked: list[str] = []

    def compares(path: str, tensor: torch.Tensor) -> bool:
        asked.append(path)
        return tensor is not cache[0]

    def function(x: torch.Tensor) -> torch.Tensor:
        cache[0][:4].copy_(x)
        cache[1].add_(x)
        return cache[0][:4] + cache[1]

    graph = pygraph.graph(function, held=cache, compare=compares)
    sums = torch.zeros(4)
    with mock.patch.object(tensors, "_place", side_effect=tensors._place) as copies:
        for _ in range(5):
            x = torch.randn(4)
            sums += x
            assert_same(graph(x), x + sums)
            assert_same(cache[0][:4], x)
            assert_same(cache[1], sums)
    assert graph.record.replays == 3
    assert asked == ["held[0]", "held[1]"]
    assert not any(call.args[0].numel() == 1 << 20 for call in copies.call_args_list)


POSITION = torch.tensor([2])
CHANGED_TWICE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "added to": lambda cache, x: cache.add_(1),
    "added to by a view": lambda cache, x: cache[2:].mul_(2),
    "added to at an index": lambda cache, x: cache.index_add_(0, POSITION, x),
    "put with accumulation": lambda cache, x: cache.index_put_((POSITION,), x, accumulate=True),
    "scattered with a sum": lambda cache, x: cache.scatter_reduce_(0, POSITION, x, "sum"),
    "rolled": lambda cache, x: cache.copy_(torch.cat([cache[1:], x])),
    "added to as a result": lambda cache, x: torch.add(cache, x, out=cache),
    "foreach": lambda cache, x: torch._foreach_add_([cache], 1),
}
CHANGED_ONCE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "put": lambda cache, x: cache.index_put_((POSITION,), x),
    "copied": lambda cache, x: cache[2:3].copy_(x),
    "copied at an index": lambda cache, x: cache.index_copy_(0, POSITION, x),
    "read beside it": lambda cache, x: cache[2:3].copy_(x + cache[:1]),
    "made by an operator": lambda cache, x: torch.add(x.expand(4), 1, out=cache),
}


@pytest.mark.parametrize("name", CHANGED_TWICE | CHANGED_ONCE)
def test_what_compare_leaves_out_is_not_changed_twice(name: str) -> None:
    change, cache, twin = (CHANGED_TWICE | CHANGED_ONCE)[name], torch.ones(4), torch.ones(4)

    def function(x: torch.Tensor) -> None:
        change(cache, x)

    graph = pygraph.graph(function, held=[cache, POSITION], compare=lambda path, tensor: path != "held[0]")
    for call in range(5):
        graph(torch.full((1,), float(call)))
        change(twin, torch.full((1,), float(call)))
        assert_same(cache, twin)
    if name in CHANGED_TWICE:
        assert "changed twice" in graph.record.refusals["uncaptured-work"].detail
    else:
        assert graph.record.replays == 3


def test_adapters_that_take_turns_are_told_apart_without_a_walk() -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    for call in range(6):
        model.adapter = model.adapters["ab"[call % 2]]
        x = torch.randn(2, 4)
        assert_same(graph(x), model(x))
    with mock.patch("pygraph.graphs.callable.Walk", side_effect=AssertionError):
        for call in range(6):
            model.adapter = model.adapters["ab"[call % 2]]
            x = torch.randn(2, 4)
            assert_same(is_replay(graph, x), model(x))
    assert graph.record.captures == 2


def test_hooks_and_training_flags_are_part_of_the_structure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    graph = pygraph.graph(model, held=model)
    x = torch.randn(2, 4)
    model.eval()
    assert_same(replayed(graph, x, calls=3), model(x))
    model.train()
    for seed in range(4):
        torch.manual_seed(seed)
        result = graph(x)
        torch.manual_seed(seed)
        assert_same(result, model(x))
    model.eval()
    handle = model[0].register_forward_hook(lambda module, given, result: result * 2)
    for _ in range(3):
        assert_same(graph(x), model(x))
    handle.remove()
    assert_same(is_replay(graph, x), model(x))


def test_replaced_tensors_are_freed() -> None:
    model = Model()
    graph = pygraph.graph(model, held=model)
    replayed(graph, torch.randn(2, 4), calls=4)
    gone = [weakref.ref(model.first.weight), weakref.ref(model.cache[0]), weakref.ref(model.second)]
    _parameter(model)
    _cache(model)
    _module(model)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    x = torch.randn(2, 4)
    assert_same(is_replay(graph, x), model(x))


def test_arguments_and_results_are_freed() -> None:
    graph = pygraph.graph(lambda x: x * 2)
    replayed(graph, torch.randn(3), calls=4)
    x = torch.randn(3)
    result = graph(x)
    gone = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("ledger", [False, True])
def test_a_graph_that_is_dropped_frees_its_captures(ledger: bool) -> None:
    """Its report is kept, and with a ledger its first replays are timed."""
    model = Model()
    graph = pygraph.graph(model, held=model, options={"ledger": ledger})
    replayed(graph, torch.randn(2, 4), calls=4)
    gone = weakref.ref(model), weakref.ref(graph)
    del graph, model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class One(enum.IntEnum):
    A = 1


class Other(enum.IntEnum):
    A = 1


class Holder(torch.nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.held, (set, frozenset, range, deque)):
            return x * len(self.held)
        if isinstance(self.held, enum.Enum):
            return x * (2 if isinstance(self.held, One) else 3)
        return self.held(x) if callable(self.held) else x * float(self.held)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.sin, torch.cos),
        (torch.relu, torch.nn.functional.silu),
        (functools.partial(torch.add, other=1), functools.partial(torch.add, other=2)),
        (lambda x: x + 1, lambda x: x + 2),
        ({1}, {1, 2}),
        (frozenset({1}), frozenset({1, 2})),
        (range(2), range(3)),
        (np.float64(2.0), np.float64(3.0)),
        (Fraction(1, 2), Fraction(1, 3)),
        (One.A, Other.A),
    ],
)
def test_other_objects_count_by_identity(before: Any, after: Any) -> None:
    model, x = Holder(before), torch.ones(3)
    graph = pygraph.graph(model, held=model)
    replayed(graph, x, calls=3)
    assert_same(is_replay(graph, x), model(x))
    model.held = after
    for _ in range(4):
        assert_same(graph(x), model(x))
    assert graph.record.captures == 2


@pytest.mark.parametrize("held", [{1}, deque([1])], ids=["set", "queue"])
def test_sets_and_queues_count_by_their_items(held: Any) -> None:
    model, x = Holder(held), torch.ones(3)
    graph = pygraph.graph(model, held=model)
    replayed(graph, x, calls=3)
    held.add(2) if isinstance(held, set) else held.append(2)
    for _ in range(4):
        assert_same(graph(x), model(x))
    assert_same(is_replay(graph, x), model(x))


def test_the_order_of_an_ordered_dictionary_counts() -> None:
    held = OrderedDict(a=torch.ones(3), b=torch.full((3,), 2.0))

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = held.values()
        return x * first - second

    graph = pygraph.graph(function, held=held)
    x = torch.ones(3)
    replayed(graph, x, calls=3)
    held.move_to_end("a")
    for _ in range(4):
        assert_same(graph(x), function(x))
    assert_same(is_replay(graph, x), function(x))


@dataclass(slots=True)
class Slots:
    scale: float


def _closure(scale: float) -> Any:
    return lambda x: x * scale


@pytest.mark.parametrize(
    "held",
    [
        *(Slots(2.0), np.ones(1), torch.nn.Dropout().forward, [].append),
        *(functools.partial(Holder.forward, Holder(torch.sin)), _closure(2.0), itertools.cycle([2.0])),
    ],
    ids=["slots", "array", "method", "builtin", "partial", "closure", "iterator"],
)
def test_what_is_not_looked_into_is_refused(held: Any) -> None:
    graph = pygraph.graph(lambda x: x * 2, held=[held])
    for _ in range(4):
        graph(torch.ones(3))
    assert graph.record.captures == 0
    assert graph.record.refusals["unsupported-held"].detail.startswith("held[0] is a ")


@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_of_all_modules_and_prepended_ones(prepend: bool) -> None:
    model, x = torch.nn.Linear(3, 3), torch.ones(3)
    model.register_forward_hook(lambda module, args, result: result * 2)
    hook = model.register_forward_hook(lambda module, args, result: result + 1, prepend=prepend)
    graph = pygraph.graph(model, held=model)
    replayed(graph, x, calls=3)
    assert_same(is_replay(graph, x), model(x))
    model._forward_hooks.move_to_end(hook.id, last=prepend)
    assert_same(graph(x), model(x))
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: result * 3)
    try:
        assert_same(graph(x), model(x))
    finally:
        everywhere.remove()


class Stepping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.step = pygraph.graph(self.run, held=self.linear)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_copy_of_a_model_has_a_graph_of_its_own() -> None:
    model, x = Stepping(), torch.ones(3)
    replayed(model.step, x, calls=3)
    twin = copy.deepcopy(model)
    twin.linear.weight.add_(1)
    replayed(twin.step, x, calls=3)
    for each in (model, twin):
        assert_same(is_replay(each.step, x), each.linear(x))


def test_a_graph_belongs_to_the_session_that_it_was_made_in() -> None:
    with pygraph.Session() as session:
        graph = pygraph.graph(lambda x: x * 2)
    x = torch.randn(3)
    for _ in range(4):
        assert_same(graph(x), x * 2)
    assert graph.record.captures == 0
    with pygraph.Session() as session:
        graph = pygraph.graph(lambda x: x * 2)
        replayed(graph, x, calls=3)
        assert list(session.memory().regions) == [graph.record.regions[0].name]
        session.freeze()
        assert_same(graph(torch.ones(2)), torch.full((2,), 2.0))
        assert_same(is_replay(graph, x), x * 2)


def test_sizes_are_prepared() -> None:
    model = torch.nn.Linear(3, 3)
    graph = pygraph.graph(model, held=model)
    pygraph.prepare(graph, {(0, 0): [1, 2, 4]}, args=(torch.randn(2, 3),))
    for size in (4, 1, 2, 4):
        x = torch.randn(size, 3)
        assert_same(is_replay(graph, x), model(x))
    assert graph.record.captures == 3


def test_every_replay_is_compared_where_that_is_asked() -> None:
    holder = torch.nn.Module()
    holder.total = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        holder.total.add_(x)
        holder.last = x * 2
        return holder.last + holder.total

    graph = pygraph.graph(function, held=holder, options={"verify": "always"})
    total = torch.zeros(3)
    for _ in range(8):
        x = torch.randn(3)
        total += x
        assert_same(graph(x), x * 2 + total)
        assert_same(holder.total, total)
        assert_same(holder.last, x * 2)
    assert graph.record.replays >= 4


def test_release_and_reset() -> None:
    graph = pygraph.graph(lambda x: x * 2)
    x = torch.randn(3)
    replayed(graph, x, calls=4)
    reports = [report for report in pygraph.reports() if report.kind == "callable"]
    assert any(report.origin.function.endswith("<lambda>") for report in reports)
    assert pygraph.release() >= 1
    assert graph.record.state == "warm"
    for _ in range(4):
        assert_same(graph(x), x * 2)
    assert graph.record.captures == 2
    pygraph.reset()
    assert pygraph.counters() == {}
    assert_same(is_replay(graph, x), x * 2)
