"""Graphs evaluated operator by operator: equal to the FX graphs that they were lifted from, bit for bit."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph.frontend.interpret import Evaluation, draw_inputs, evaluate, returned
from pygraph.frontend.names import FrontendError
from pygraph.ir import Graph, parse_graph
from tests.frontend.capture import Captured, capture


def _branches(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def _sizes(x: torch.Tensor) -> Any:
    return x.view(-1)[2 : x.size(0) + 1].sin(), x.size(0) * 2, torch.full((x.size(0) // 2,), 1.5)


def _writes(x: torch.Tensor) -> Any:
    y = x.t()
    x.add_(1)
    return y.clone(), x.view(-1).split(5)


def _constant(x: torch.Tensor) -> Any:
    return torch.var_mean(x.double()[:, torch.tensor([0, 2])], 0)


_TRAINED = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.BatchNorm1d(8), torch.nn.GELU())
_CASES = (_branches, _sizes, _writes, _constant, _TRAINED)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", _CASES, ids=lambda fn: getattr(fn, "__name__", "training"))
def test_operators_one_by_one_give_what_the_fx_graph_gives(fn: Callable[..., Any], dynamic: bool | None) -> None:
    graphs: list[Graph] = []

    def both(captured: Captured, values: list[Any]) -> Any:
        graph = captured.lift()
        graphs.append(graph)
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        held = Evaluation(constant=lambda node: operator.attrgetter(str(node.attrs["target"]))(captured.gm))
        state = torch.get_rng_state()
        results = evaluate(graph, copies, held)
        torch.set_rng_state(state)
        expected = captured.gm(*values)
        for one, other in zip((*expected, *values), (*returned(graph, results), *copies), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        values.clear()
        return expected

    capture(fn, torch.randn(6, 4), backward=fn is _TRAINED, dynamic=dynamic, around=both)
    assert len(graphs) == 1 + (fn is _TRAINED)


def test_draws_of_one_seed_are_equal_and_torchs_own_are_left_alone() -> None:
    graph = parse_graph("""
    graph @main {hints = {s0 = 5}} (%x : f16[s0, 3]{1, s0}@cuda:0, %i : i64[s0]@cuda:0, %n : int(s0)) {
      %r = aten.rand_like.default(%x) : f16[s0, 3]{1, s0}@cuda:0 !reads[] !rng("cuda:0")
      %s = aten.rand.default([$(s0 + 1)], device = @cuda:0) : f32[s0 + 1]@cuda:0 !rng("cuda:0")
      %c = pygraph.constant(target = "held") : f32[2]@cuda:0
      return (%r, %s, %c, %i)
    }
    """)
    how = Evaluation(seed=1, device="cpu")
    state = torch.get_rng_state()
    runs = [returned(graph, evaluate(graph, draw_inputs(graph, how), how)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, *runs))
    assert (runs[0][0].stride(), runs[0][1].shape, runs[0][2].unique().numel()) == ((1, 5), (6,), 2)
    assert not torch.equal(runs[0][0], draw_inputs(graph, how)[0])
    other = Evaluation(sizes={"s0": 7}, device="cpu", seed=2)
    assert [tuple(x.shape) for x in draw_inputs(graph, other)[:2]] == [(7, 3), (7,)]


def test_a_move_is_a_copy_where_all_runs_on_one_device() -> None:
    graph = parse_graph("""
    graph @main (%x : f32[4]@cpu) {
      %d = prims.device_put.default(%x, @cuda:0) : f32[4]@cuda:0
      %v = aten.view.default(%d, [2, 2]) : f32[2, 2]@cuda:0 !reads[] !aliases[0:0]
      %w = aten.add_.Tensor(%x, 1) : f32[4]@cpu !writes[0] !aliases[0:0]
      return (%d, %w, %x, %v)
    }
    """)
    moved, written, x, view = returned(graph, evaluate(graph, [torch.zeros(4)], Evaluation(device="cpu")))
    assert (moved.sum(), written.sum(), x.sum()) == (0, 4, 4)
    assert view.data_ptr() == moved.data_ptr()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "takes 2 inputs, not 0"),
        ([torch.ones(3), 3], "%x is f32[s0, s0]@cpu, not f32[3]@cpu"),
        ([torch.ones(3, 4), 3], "%x is f32[s0, s0]@cpu, not f32[3, 4]@cpu"),
        ([torch.ones(3, 3).double(), 3], "not f64[3, 3]@cpu"),
        ([torch.ones(3, 3), 1.5], "%n is int(s0), not float"),
    ],
)
def test_inputs_of_other_types_are_refused(given: list[Any], reason: str) -> None:
    graph = parse_graph("graph @main (%x : f32[s0, s0]@cpu, %n : int(s0)) { return (%x, %n) }")
    with pytest.raises(FrontendError, match=re.escape(reason)):
        evaluate(graph, given)
