"""The replay in plain Python, with nodes that only note addresses: which address each argument is used at."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.runtime.cuda import replay as module
from pygraph.runtime.cuda.replay import PythonRegion

SIZE = 16
NBYTES = 4 * SIZE


class _Node:
    """Keeps the addresses that were written into it, by place."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.applied = 0

    def write(self, place: int, address: int) -> None:
        self.addresses[place] = address

    def apply(self, graph: Any) -> Any:
        self.applied += 1
        return (0,)


class _OnHost(PythonRegion):
    """Takes memory on the host, and launches nothing: it looks at what lies at each address."""

    def __init__(self) -> None:
        machine: Any = SimpleNamespace(driver=SimpleNamespace(CUgraphExec=lambda raw: raw))
        graph: Any = SimpleNamespace(raw_cuda_graph_exec=lambda: 0)
        super().__init__(machine, graph, device=0, random=False)
        self.add_segment(0, 0)
        self.add_piece(0, 0)
        self.node = _Node()
        self._nodes.append(self.node)
        self.read: list[list[float]] = []

    def add(self, *, written: bool = False, offset: int = -1) -> None:
        """The next argument, which the node uses at the place of its number."""
        place = len(self._arguments)
        source = self.add_tensor_argument(torch.empty(SIZE), written, offset, NBYTES, 16, 0)
        self.add_patch(0, place, source, 0)

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def _launch(self) -> None:
        found = [self.node.addresses[place] for place in sorted(self.node.addresses)]
        self.read = [list((ctypes.c_float * SIZE).from_address(address)) for address in found]

    def calls(self, *args: torch.Tensor) -> None:
        """A replay, which sees each argument's values."""
        assert self.replay(list(args)) == []
        assert self.read == [arg.tolist() for arg in args]

    def at(self, place: int) -> int:
        return self.node.addresses[place]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch on whose streams nothing captures; ``current`` is the current one."""
    state = SimpleNamespace(current="main", capturing=False)
    monkeypatch.setattr(module._Argument, "accepts", lambda *args: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: state.current)
    monkeypatch.setattr(module, "succeeded", lambda answer: answer[0] == 0)
    return state


@pytest.fixture
def region(stream: SimpleNamespace) -> _OnHost:
    """A region of two arguments that it reads."""
    made = _OnHost()
    made.add()
    made.add()
    return made


def inputs(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(SIZE) for _ in range(count)]


def test_addresses_that_stay_are_not_patched(region: _OnHost) -> None:
    x, y = inputs()
    region.calls(x, y)
    applied = region.node.applied
    for _ in range(3):
        x.add_(1)
        region.calls(x, y)
    assert region.node.applied == applied
    region.calls(x, torch.randn(SIZE))
    assert region.node.applied == applied + 1


def test_a_misaligned_input_is_copied(region: _OnHost) -> None:
    base, y = torch.randn(SIZE + 8), torch.randn(SIZE)
    for begin in range(5):
        region.calls(base[begin : begin + SIZE], y)
        assert region.at(0) % 16 == 0


@pytest.mark.parametrize("facts", [{"written": True}, {"offset": 0}])
def test_a_misaligned_input_that_no_copy_can_stand_for_is_turned_away(
    stream: SimpleNamespace, facts: dict[str, Any]
) -> None:
    region = _OnHost()
    region.add(**facts)
    base = torch.randn(SIZE + 8)
    aligned = -base.data_ptr() % 16 // 4
    assert region.replay([base[aligned + 1 : aligned + 1 + SIZE]]) is None
    region.calls(base[aligned : aligned + SIZE])
