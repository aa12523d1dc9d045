"""Products with a bias take the form that is faster on the device; here by times that the tests make up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pygraph
from pygraph import compat
from pygraph.inductor import products
from pygraph.inductor.products import Products, Times

aten = torch.ops.aten
Build = Callable[..., Any]
MM, ADD, ADDMM, RELU = "aten::mm", "aten::add.Tensor", "aten::addmm", "aten::relu"
FAST_ADDMM, FAST_MM, ALIKE = Times(31.0, 2.8, 1.5), Times(7.5, 20.8, 1.5), Times(10.0, 10.5, 1.5)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[Any]]:
    """Make the device take these times. Returns what is timed."""

    def give(times: Times) -> list[Any]:
        asked: list[Any] = []
        monkeypatch.setattr(products, "measure", lambda *operands: asked.append(operands) or times)
        monkeypatch.setattr(products, "machine", lambda device: "a machine")
        monkeypatch.setattr(products, "_known", {})
        return asked

    return give


def module_of(build: Build, m: Any = 8, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Any:
    """A module whose graph ``build`` makes of bias [16], x [m, 32] and w [32, 16]."""
    graph, mode = torch.fx.Graph(), FakeTensorMode()
    sizes = {"bias": (16,), "x": (m, 32), "w": (32, 16)}
    given = {name: graph.placeholder(name) for name in sizes}
    with mode:
        for name, node in given.items():
            node.meta["val"] = torch.empty(sizes[name], dtype=dtype, device=device)
        made = build(lambda op, *args, **kwargs: graph.call_function(op, args, kwargs), **given)
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = torch.empty((m, 16), dtype=dtype, device=device)
    graph.output(made)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def split(call: Build, bias: Any, x: Any, w: Any) -> Any:
    return call(aten.relu.default, call(aten.add.Tensor, bias, call(aten.mm.default, x, w)))


def fused(call: Build, bias: Any, x: Any, w: Any) -> Any:
    return call(aten.relu.default, call(aten.addmm.default, bias, x, w))


def returned(call: Build, bias: Any, x: Any, w: Any) -> Any:
    return call(aten.addmm.default, bias, x, w)


def used_twice(call: Build, bias: Any, x: Any, w: Any) -> Any:
    product = call(aten.mm.default, x, w)
    return call(aten.relu.default, call(aten.add.Tensor, bias, product)), product


def doubled(call: Build, bias: Any, x: Any, w: Any) -> Any:
    return call(aten.relu.default, call(aten.add.Tensor, call(aten.mm.default, x, w), bias, alpha=2))


def written_between(call: Build, bias: Any, x: Any, w: Any) -> Any:
    product = call(aten.mm.default, x, w)
    call(aten.fill_.Scalar, x, 7.0)
    return call(aten.relu.default, call(aten.add.Tensor, bias, product))


def bias_made_later(call: Build, bias: Any, x: Any, w: Any) -> Any:
    product = call(aten.mm.default, x, w)
    made = call(aten.sin.default, bias)
    made.meta["val"] = bias.meta["val"]
    return call(aten.relu.default, call(aten.add.Tensor, product, made))


def names(gm: Any) -> list[str]:
    gm.graph.lint()
    return [node.target.name() for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("build", "times", "expected"),
    [
        (split, FAST_ADDMM, [ADDMM, RELU]),
        (split, FAST_MM, [MM, ADD, RELU]),
        (split, ALIKE, [MM, ADD, RELU]),
        (written_between, FAST_ADDMM, [ADDMM, "aten::fill_.Scalar", RELU]),
        (bias_made_later, FAST_ADDMM, [MM, "aten::sin", ADD, RELU]),
        (fused, FAST_MM, [MM, ADD, RELU]),
        (fused, FAST_ADDMM, [ADDMM, RELU]),
        (fused, Times(9.3, 10.0, 1.5), [ADDMM, RELU]),
        (fused, Times(8.9, 10.0, 1.5), [MM, ADD, RELU]),
        (returned, Times(8.9, 10.0, 1.5), [ADDMM]),  # nothing follows that the addition could be part of
        (returned, FAST_MM, [MM, ADD]),
    ],
)
def test_the_faster_form_is_taken(build: Build, times: Times, expected: list[str], timed: Any) -> None:
    timed(times)
    gm, found = module_of(build), Products(None)
    before = names(gm)
    found.choose(gm)
    assert names(gm) == expected
    assert bool(found.notes) == (before != expected)
    values = torch.randn(16), torch.randn(8, 32), torch.randn(32, 16)
    again = [value.clone() for value in values]
    torch.testing.assert_close(gm(*values), module_of(build)(*again))


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (used_twice, {}),
        (doubled, {}),
        (split, {"dtype": torch.float16}),
        (split, {"device": "cpu"}),
        (split, {"m": 1 << 22}),
        (split, {"m": 0}),
    ],
)
def test_others_are_neither_timed_nor_changed(build: Build, facts: dict[str, Any], timed: Any) -> None:
    asked = timed(FAST_ADDMM)
    gm = module_of(build, **facts)
    before = names(gm)
    Products(None).choose(gm)
    assert (names(gm), asked) == (before, [])


def test_where_inductor_tunes_or_ranks_take_part_or_torch_lacks_the_means_nothing_is_timed(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = timed(FAST_ADDMM)
    with compat.inductor_config.patch(max_autotune_gemm=True):
        Products(None).choose(module_of(split))
    with monkeypatch.context() as patch:
        patch.setattr(products, "_several_ranks", lambda: True)
        Products(None).choose(module_of(split))
    monkeypatch.setattr(compat, "absent", lambda symbol: symbol is compat.cuda_sleep)
    Products(None).choose(module_of(split))
    assert asked == []


def test_times_are_kept_for_later_processes_by_size_and_precision(
    timed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(m: int = 8) -> tuple[list[str], int]:
        asked = timed(FAST_ADDMM)  # as in a new process
        gm = module_of(split, m)
        Products(str(tmp_path)).choose(gm)
        return names(gm), len(asked)

    assert again() == ([ADDMM, RELU], 1)
    assert again() == ([ADDMM, RELU], 0)
    assert again(m=9) == ([ADDMM, RELU], 1)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert again() == ([ADDMM, RELU], 1)
    for path in (tmp_path / "products").iterdir():
        path.write_text('{"mm": 1}')
    assert again() == ([ADDMM, RELU], 1)


def test_one_size_is_timed_once(timed: Any) -> None:
    asked = timed(FAST_ADDMM)
    gm = module_of(lambda call, bias, x, w: (split(call, bias, x, w), split(call, bias, x, w)))
    Products(None).choose(gm)
    assert names(gm) == [ADDMM, RELU, ADDMM, RELU]
    assert len(asked) == 1


def test_where_nothing_can_be_measured_the_form_stays(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*operands: torch.Tensor) -> Times:
        raise RuntimeError("out of memory")

    timed(FAST_ADDMM)
    monkeypatch.setattr(products, "measure", fails)
    gm = module_of(split)
    Products(None).choose(gm)
    assert names(gm) == [MM, ADD, RELU]


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([31.0, 30.5], 30.5),
        ([2900.0, 31.0, 45.0, 30.0], 30.0),  # another process had the device
        ([None, None, 31.0, 31.0], 31.0),  # the host was late
        ([None] * 99, None),
        ([2.0**number for number in range(99, 0, -1)], None),
    ],
)
def test_a_time_counts_once_two_rounds_agree(
    rounds: list[float | None], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, sleeps = iter(rounds), list[int]()
    monkeypatch.setattr(products, "_round", lambda form, asleep: sleeps.append(asleep) or next(left))
    if expected is None:
        with pytest.raises(RuntimeError, match="too busy"):
            products._least(lambda: None)
    else:
        assert products._least(lambda: None) == expected
    late = [took is None for took in rounds[: len(sleeps)]]
    assert sleeps == [min(products._ASLEEP << sum(late[:number]), products._LONGEST) for number in range(len(sleeps))]


@pytest.mark.usefixtures("fresh")
def test_what_is_rewritten_after_inductors_passes_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: Products, gm: torch.fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(aten.cos.default, node.args)
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            self.notes.append("a cosine")

    monkeypatch.setattr(Products, "choose", choose)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="pygraph", options={"strict": True})
    x = torch.randn(8)
    with compat.inductor_config.patch(force_disable_caches=True):  # nobody else shall get this program
        for _ in range(3):
            torch.testing.assert_close(compiled(x), x.cos() * 2)
    report = pygraph.reports()[-1]
    assert "a cosine" in report.notes
    assert pygraph.counters()["replays"] == 1
