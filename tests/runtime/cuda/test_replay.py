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
        self.full = False

    def add(self, *, written: bool = False, offset: int = -1) -> None:
        """The next argument, which the node uses at the place of its number."""
        place = len(self._arguments)
        source = self.add_tensor_argument(torch.empty(SIZE), written, offset, NBYTES, 16, 0)
        self.add_patch(0, place, source, 0)

    def _bytes(self, nbytes: int) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError
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


def test_a_copied_input_is_patched_once(region: _OnHost) -> None:
    alive = [inputs() for _ in range(6)]
    region.calls(*alive[0])
    assert region.stage([0]) == NBYTES + 16
    region.calls(*alive[1])
    place, moves = region.at(0), region.moves()
    assert place != alive[1][0].data_ptr()
    for args in alive[2:4]:
        region.calls(*args)
        assert (region.at(0), region.at(1)) == (place, args[1].data_ptr())
    assert region.moves() == [moves[0], moves[1] + 2]
    region.calls(*alive[3])
    assert region.moves() == [moves[0], moves[1] + 2]
    assert region.stage([]) == 0
    for args in alive[4:]:
        region.calls(*args)
        assert region.at(0) == args[0].data_ptr()
    assert region.moves()[0] == moves[0] + 2


def test_nothing_is_patched_where_nothing_moves(region: _OnHost) -> None:
    x, y = inputs()
    region.stage([0, 1])
    region.calls(x, y)
    applied = region.node.applied
    for _ in range(3):
        x.add_(1)
        region.calls(x, torch.randn(SIZE))
    assert region.node.applied == applied


def test_on_another_stream_inputs_are_used_where_they_lie(region: _OnHost, stream: SimpleNamespace) -> None:
    x, y = inputs()
    region.stage([0])
    region.calls(x, y)
    copied = region.at(0)
    stream.current = "side"
    region.calls(x, y)
    assert region.at(0) == x.data_ptr()
    stream.current = "main"
    region.calls(x, y)
    assert region.at(0) == copied


def test_an_input_that_shares_memory_with_a_written_one_is_used_where_it_lies(stream: SimpleNamespace) -> None:
    region = _OnHost()
    region.add(written=True)
    region.add()
    base = torch.randn(8 * SIZE)
    region.stage([1])
    for begin in (0, 4, SIZE, 4 * SIZE):
        region.calls(base[:SIZE], base[begin : begin + SIZE])
        assert region.at(1) == base[begin:].data_ptr()
    region.calls(base[:SIZE], torch.randn(SIZE))
    copied = region.at(1)
    region.calls(base[:SIZE], torch.randn(SIZE))
    assert region.at(1) == copied


def test_a_misaligned_input_is_copied_either_way(region: _OnHost) -> None:
    base, y = torch.randn(SIZE + 8), torch.randn(SIZE)
    for staged in ([0], [], [0]):
        region.stage(staged)
        for begin in range(5):
            region.calls(base[begin : begin + SIZE], y)
            assert region.at(0) % 16 == 0


@pytest.mark.parametrize("within", [True, False])
def test_copies_serve_replays_inside_and_outside_of_inference_mode(region: _OnHost, within: bool) -> None:
    x, y = inputs()
    with torch.inference_mode(within):
        assert region.stage([0]) == NBYTES + 16
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            region.calls(x, y)
            assert region.at(0) != x.data_ptr()


def test_a_switch_is_refused_where_it_cannot_be(region: _OnHost, stream: SimpleNamespace) -> None:
    stream.capturing = True
    assert region.stage([0]) is None
    stream.capturing = False
    region.full = True
    assert region.stage([0]) is None
    region.full = False
    with region._busy:
        assert region.stage([0]) is None
    x, y = inputs()
    region.calls(x, y)
    assert region.at(0) == x.data_ptr()
    region.close()
    assert region.stage([0]) is None


@pytest.mark.parametrize("facts", [{"written": True}, {"offset": 0}])
def test_what_must_not_be_copied_is_refused(stream: SimpleNamespace, facts: dict[str, Any]) -> None:
    region = _OnHost()
    region.add(**facts)
    with pytest.raises(RuntimeError, match="no copy can stand"):
        region.stage([0])
    assert not region._busy.locked()
