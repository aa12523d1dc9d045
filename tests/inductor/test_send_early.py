"""Gradients that ranks average are sent as soon as they are known; all else keeps its order."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given

from pygraph.inductor.rewrites import SENT_EARLY, send_early

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Backward:
    """A graph as of a backward pass: a chain of layers, each with a gradient; then buckets, then waits."""

    def __init__(self, layers: int, shared: int) -> None:
        self.graph = torch.fx.Graph()
        x = self.graph.placeholder("x")
        x.meta["val"] = torch.empty(4, 4)
        self.gradients = []
        for _ in range(layers):
            x = self.add(aten.sin.default, x)
            self.gradients += [x] * shared  # several parameters may have one node's result for their gradient

    def add(self, target: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        values = torch.fx.map_arg(args, lambda each: each.meta["val"])
        same = target in (c10d.all_reduce.default, c10d.wait_tensor.default)
        node.meta["val"] = values[0].clone() if same else target(*values)
        return node

    def finish(self, bounds: list[tuple[int, int]]) -> torch.fx.GraphModule:
        sent = []
        for begin, end in bounds:
            rows = [
                self.add(aten.view.default, self.add(aten.mul.Tensor, g, 0.5), [-1]) for g in self.gradients[begin:end]
            ]
            flat = self.add(aten.cat.default, rows) if len(rows) > 1 else rows[0]
            sent.append(self.add(c10d.all_reduce.default, flat, "sum", "0"))
        self.graph.output([self.add(c10d.wait_tensor.default, each) for each in sent])
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)


@given(layers=st.integers(1, 6), shared=st.integers(1, 3), data=st.data())
def test_each_bucket_is_sent_behind_its_last_gradient(layers: int, shared: int, data: st.DataObject) -> None:
    made = Backward(layers, shared)
    count = len(made.gradients)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)) if count > 1 else st.just(set())))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    gm = made.finish(bounds)
    send_early(gm)
    gm.graph.lint()
    names = [node.target for node in gm.graph.nodes]
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    sends = [node for node in gm.graph.nodes if node.target is c10d.all_reduce.default]
    assert all(node.meta[SENT_EARLY] for node in sends)
    for node, (_, end) in zip(sends, bounds, strict=True):
        following = [each for each in made.gradients if place[each] > place[made.gradients[end - 1]]]
        assert all(place[node] < place[each] for each in following), names
    waits = [number for number, target in enumerate(names) if target is c10d.wait_tensor.default]
    assert min(waits) > max(map(place.__getitem__, sends))


def test_what_a_user_sends_stays_where_it_is() -> None:
    """A tensor of any other form, even where it is scaled first."""
    made = Backward(2, 1)
    scaled = made.add(aten.mul.Tensor, made.gradients[0], 3.0)
    sent = made.add(c10d.all_reduce.default, scaled, "sum", "0")
    made.graph.output([made.add(c10d.wait_tensor.default, sent)])
    gm = torch.fx.GraphModule(torch.nn.Module(), made.graph)
    before = [node.name for node in gm.graph.nodes]
    send_early(gm)
    assert [node.name for node in gm.graph.nodes] == before
    assert all(SENT_EARLY not in node.meta for node in gm.graph.nodes)
