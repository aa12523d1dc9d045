"""One launch of a CUDA program at a time, as far as that can be seen without a device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import stepping
from pygraph.runtime.cuda.capture import CudaCapture
from pygraph.runtime.cuda.nodes import EmptyNode, read_nodes
from pygraph.runtime.cuda.observation import Observer, Span
from pygraph.runtime.cuda.stepping import CudaStepper, payload_of
from pygraph.runtime.driver import Layout, Program
from pygraph.runtime.recording import Allocation, AllocationKind, Recording
from pygraph.runtime.stepping import Operand, Repeat
from tests.runtime.cuda.fake import OK, CUgraphNodeType, FakeDriver, kernel


class Device(FakeDriver):
    """Notes what is done to an instantiated graph."""

    CUgraphExec = CUgraphNode = CUstream = staticmethod(int)
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self, *nodes: Any, **facts: Any) -> None:
        super().__init__(*nodes, **facts)
        self.done: list[Any] = []

    def cuGraphKernelNodeGetParams(self, node: Any) -> tuple[Any, ...]:
        return super().cuGraphKernelNodeGetParams(self.nodes[int(node) - 100])

    def cuGraphExecKernelNodeSetParams(self, instance: int, node: int, params: Any) -> tuple[Any, ...]:
        pointers = ctypes.cast(params.kernelParams, ctypes.POINTER(ctypes.c_void_p))
        blob = ctypes.string_at(pointers[0], 16)
        self.done.append(("set", node - 100, [int.from_bytes(blob[i : i + 8], "little") for i in (0, 8)]))
        return OK

    def cuGraphNodeSetEnabled(self, instance: int, node: int, on: int) -> tuple[Any, ...]:
        self.done.append(("on" if on else "off", node - 100))
        return OK

    def cuGraphLaunch(self, instance: int, stream: int) -> tuple[Any, ...]:
        self.done.append("launch")
        return OK


def words(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def recorded(device: Device, random: int = 0x900) -> Recording:
    nodes, launches = read_nodes(device, device.nodes)  # type: ignore[arg-type]
    graph = SimpleNamespace(
        instantiate=lambda: None, raw_cuda_graph_exec=lambda: 1, replay=lambda: device.done.append("fill")
    )
    lease: Any = None
    payload = CudaCapture(graph, tuple(nodes), (), {}, 0, False, (), lease)  # type: ignore[arg-type]
    return Recording(tuple(launches), (Allocation(AllocationKind.CONSTANT, 0, random, 8),), (), payload)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def machine(device: Device) -> Any:
    return SimpleNamespace(driver=device, random_turn=lambda stream: contextlib.nullcontext())


def nodes(a: int) -> list[Any]:
    empty = SimpleNamespace(kind=CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY, params=None)
    return [kernel(words(a, 0x900), ctx=0), empty, kernel(words(a, a), ctx=0)]


LAYOUTS = {7: [(0, 16)]}


def program_of(recording: Recording) -> Program:
    return Program(recording, (), Layout(0, {}, ()), (0, 1, 2), {})


@pytest.mark.usefixtures("on_device")
def test_one_launch_is_switched_on_with_the_parameters_of_the_program() -> None:
    first, again = Device(*nodes(0x111), layouts=LAYOUTS), Device(*nodes(0x222), layouts=LAYOUTS)
    stepper = CudaStepper(machine(again), program_of(recorded(first)), recorded(again))
    assert again.done == [("off", 0), ("off", 2), "fill"]
    again.done.clear()
    stepper.run(2, {1: 0x5000})
    assert again.done == [("set", 2, [0x111, 0x5000]), ("on", 2), "launch", ("off", 2)]
    again.done.clear()
    stepper.run(1, {})
    assert again.done == []


@pytest.mark.usefixtures("on_device")
def test_seed_and_offset_are_where_the_new_capture_has_them() -> None:
    first, again = Device(*nodes(0x111), layouts=LAYOUTS), Device(*nodes(0x222), layouts=LAYOUTS)
    stepper = CudaStepper(machine(again), program_of(recorded(first)), recorded(again, random=0xA00))
    again.done.clear()
    stepper.run(0, {0: 0x5000})
    assert again.done[0] == ("set", 0, [0x5000, 0xA00])


@pytest.mark.usefixtures("on_device")
def test_a_region_that_does_not_do_the_same_again() -> None:
    first, again = Device(*nodes(0x111), layouts=LAYOUTS), Device(*nodes(0x222), layouts=LAYOUTS)
    recording = recorded(again)
    other = replace(recording.launches[2], name="other")
    for launches in (recording.launches[:2], (*recording.launches[:2], other)):
        with pytest.raises(CaptureError, match="unstable-launches"):
            CudaStepper(machine(again), program_of(recorded(first)), replace(recording, launches=launches))
    with pytest.raises(CaptureError, match="unstable-launches"):
        CudaStepper(machine(again), program_of(recorded(first)), replace(recording, phases=(0, 0, 1)))


def test_a_recording_of_another_driver() -> None:
    with pytest.raises(CaptureError, match="foreign-recording"):
        payload_of(Recording((), (), ()))
    assert EmptyNode(1).handle == 1


class Seen:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def before(self, begin: int, end: int, given: Sequence[Operand]) -> None:
        self.told.append(("before", begin, end, [(o.address, o.tensor.numel(), o.written) for o in given]))

    def after(
        self, begin: int, end: int, given: Sequence[Operand], returned: Sequence[Operand], repeat: Repeat
    ) -> None:
        assert [each.address for each in repeat()] == [each.address for each in returned]
        self.told.append(("after", begin, end, [(o.address, o.tensor.numel(), o.written) for o in returned]))


def test_calls_are_recognised_by_their_number() -> None:
    count = [0]
    capturing = Observer(nodes=lambda: count[0])
    x, y = torch.ones(4), torch.ones(3)

    def adds(number: int, result: Any) -> Any:
        count[0] += number
        return result

    capturing.call("view", [1], [], lambda: adds(0, x))
    capturing.call("mm", [x.data_ptr()], [y.data_ptr()], lambda: adds(2, (x, [y])))
    capturing.call("view", [1], [], lambda: adds(0, x))
    capturing.call("add", [], [x.data_ptr()], lambda: adds(1, None))
    assert [(s.number, s.begin, s.end) for s in capturing.spans] == [(1, 0, 2), (3, 2, 3)]
    assert capturing.spans[0].results == (x.data_ptr(), y.data_ptr())

    seen = Seen()
    calls = stepping._Calls(capturing.spans, seen)
    a, b = torch.zeros(4), torch.zeros(3)
    calls.call("view", [1], [], lambda: a)
    made = calls.call("mm", [a.data_ptr()], [b.data_ptr()], lambda: (a, [b]), given=[[a], b, a[:2]])
    assert made[0] is a
    calls.call("view", [1], [], lambda: a)
    calls.call("add", [], [a.data_ptr()], lambda: None, given=[a], foreign=True)
    calls.finish()
    assert seen.told == [
        ("before", 0, 2, [(x.data_ptr(), 4, False), (y.data_ptr(), 3, True)]),
        ("after", 0, 2, [(x.data_ptr(), 4, True), (y.data_ptr(), 3, True)]),
        ("before", 2, 3, [(x.data_ptr(), 4, True)]),
        ("after", 2, 3, []),
    ]


def test_other_calls_than_were_captured() -> None:
    spans = [Span(0, 1, "mm", (1,), (), number=0)]
    with pytest.raises(CaptureError, match="mm is add in an uncaptured run"):
        stepping._Calls(spans, Seen()).call("add", [1], [], lambda: None)
    with pytest.raises(CaptureError, match="an uncaptured run does not call mm"):
        stepping._Calls(spans, Seen()).finish()


def test_results_that_are_other_than_when_captured_are_left_out() -> None:
    seen = Seen()
    calls = stepping._Calls([Span(0, 1, "attention", (), (), number=0, results=(64, 128))], seen)
    calls.call("attention", [], [], lambda: torch.zeros(1))
    assert seen.told[1] == ("after", 0, 1, [])
