"""Constants that are moved when a program is compiled: real memory, also under the fake mode that compiles."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pygraph.inductor.constants import moved_constant


def held() -> torch.fx.GraphModule:
    root = torch.nn.Module()
    root.register_buffer("held", torch.tensor([1.0, 2.0]))
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("held"))
    return torch.fx.GraphModule(root, graph)


def test_a_moved_constant_is_real_memory_and_is_made_once() -> None:
    gm = held()
    (constant,) = gm.graph.find_nodes(op="get_attr", target="held")
    with FakeTensorMode() as mode:
        constant.meta["val"] = mode.from_tensor(gm.held)
        first = moved_constant(gm, constant, torch.device("cpu"))
        again = moved_constant(gm, constant, torch.device("cpu"))
    assert first is again
    moved = getattr(gm, str(first.target))
    assert not isinstance(moved, FakeTensor)
    assert torch.equal(moved, gm.held)
    assert isinstance(first.meta["val"], FakeTensor)
