"""The native half reads what is held by the words that tell of changes: as a reading from the root down would."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.backend import driver_for
from pygraph.graphs.held import Walk


class Box:
    def __init__(self, a: int) -> None:
        self.a = a


def _made() -> SimpleNamespace:
    linear = torch.nn.Linear(2, 2)
    linear.bias = linear.bias
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    model = torch.nn.ModuleDict({"a": linear, "b": block})
    model.register_buffer("table", torch.ones(2), persistent=False)
    return SimpleNamespace(
        model=model,
        tied=linear.weight,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        numbers=[1, 0.5, (2.5, "text")],
        tensors=[torch.ones(1), torch.ones(1)],
        ordered=OrderedDict(x=torch.ones(1), y=1.5),
        names={"p", "q"},
        kinds=frozenset({1, 2}),
        queue=deque([1, 2]),
        same=None,
        nested={"deep": [{"deeper": Box(1)}]},
        boxes=[Box(1)],
    )


def _replace(items: list[Any], place: int, make: Callable[[], Any]) -> None:
    """Often at the address of what goes."""
    items[place] = None
    items[place] = make()


CHANGES: dict[str, Callable[[SimpleNamespace], Any]] = {
    "parameter": lambda h: setattr(h.model["a"], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "parameter that is tied": lambda h: setattr(h, "tied", h.model["a"].weight),
    "bias": lambda h: setattr(h.model["b"][0], "bias", torch.nn.Parameter(torch.ones(2))),
    "module": lambda h: h.model["b"].__setitem__(0, torch.nn.Linear(2, 2)),
    "flag": lambda h: h.model.train(not h.model.training),
    "hook": lambda h: h.model["a"].register_forward_hook(print),
    "rate": lambda h: h.optimizer.param_groups[0].__setitem__("lr", random.choice([0.1, 1.0 / 10, 0.2])),
    "number": lambda h: _replace(h.numbers, 1, lambda: random.choice([0.5, 1.0 / 2, 0.25])),
    "tuple": lambda h: _replace(h.numbers, 2, lambda: (random.choice([2.5, 5.0 / 2, 3.5]), "text")),
    "list": lambda h: setattr(h, "numbers", [1, random.choice([0.5, 1.5]), (2.5, "text")]),
    "length": lambda h: h.numbers.append(1) if len(h.numbers) == 3 else h.numbers.pop(),
    "tensor in a list": lambda h: _replace(h.tensors, 0, lambda: torch.ones(1)),
    "one tensor twice": lambda h: h.tensors.__setitem__(1, h.tensors[random.choice([0, 1])]),
    "order": lambda h: h.ordered.move_to_end(random.choice(["x", "y"])),
    "ordered": lambda h: h.ordered.__setitem__("y", random.choice([1.5, 3.0 / 2, 2.5])),
    "set": lambda h: h.names.symmetric_difference_update({random.choice("pqr")}),
    "frozen set": lambda h: setattr(h, "kinds", frozenset({random.choice([1, 3]), 2})),
    "queue": lambda h: h.queue.rotate(random.choice([0, 1, 2])),
    "none": lambda h: setattr(h, "same", random.choice([None, h.nested, h.numbers])),
    "attributes": lambda h: setattr(h.boxes[0], "__dict__", {"a": random.choice([1, 2])}),
    "object": lambda h: _replace(h.nested["deep"], 0, lambda: {"deeper": Box(random.choice([1, 2]))}),
    "dictionary": lambda h: setattr(h, "nested", {"deep": [{"deeper": Box(1)}]}),
    "nothing": lambda h: None,
}


@pytest.mark.parametrize("seed", range(60))
def test_a_second_reading_is_as_a_first_one(seed: int) -> None:
    random.seed(seed)
    kind = driver_for("cpu").held()  # type: ignore[union-attr]
    held = _made()
    root = (held,)
    nodes = Walk(root).nodes
    used = kind(nodes)
    argument = torch.ones(1)
    accepted = 0
    for _ in range(120):
        for _ in range(random.choice([0, 1, 1, 1, 2])):
            random.choice(list(CHANGES.values()))(held)
        if random.random() < 0.1:
            root = (held,)
        wanted = random.random() < 0.5
        now, expected = used.read(root, [argument], wanted), kind(nodes).read(root, [argument], wanted)
        assert (now is None) == (expected is None)
        if now is not None:
            accepted += 1
            assert list(map(id, now[0])) == list(map(id, expected[0]))
            assert now[1:3] == expected[1:3]
            assert list(map(id, now[3])) == list(map(id, expected[3]))
        elif random.random() < 0.7:
            nodes = Walk(root).nodes
            used = kind(nodes)
    assert 20 < accepted < 120
