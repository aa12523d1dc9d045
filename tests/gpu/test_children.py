"""Graphs that a region launches, and adds to its own where it is captured: child graphs, whose nodes are patched like
all others."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call, load
from pygraph.runtime.cuda.nodes import handles, kinds_of
from pygraph.runtime.cuda.stepping import payload_of
from pygraph.runtime.discover import capture
from pygraph.runtime.driver import Driver
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import LaunchKind
from pygraph.runtime.region import Region, RegionOptions
from tests.gpu.replays import Function, assert_replays

COUNT = 1000
"""Floats in each tensor here."""

WIDTH = 4
ONE_AND_A_HALF = 0x3FC00000
CALLS = 5
_executables: list[Any] = []


@pytest.fixture(autouse=True)
def _destroyed() -> Iterator[None]:
    """What regions launched lives for as long as their test."""
    yield
    torch.cuda.synchronize()
    while _executables:
        call(load().cuGraphExecDestroy, _executables.pop())


@functools.cache
def side() -> torch.cuda.Stream:
    """A stream that nobody else has: one of torch's own might be that of a capture."""
    torch.empty(1, device="cuda")  # the context, for this thread
    driver = load()
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    return torch.cuda.ExternalStream(int(call(driver.cuStreamCreate, flags)))


class Graph:
    """A graph that is built by hand. Operands are addresses, ``after`` the nodes that a new one depends on."""

    def __init__(self) -> None:
        self.driver = load()
        self.raw = call(self.driver.cuGraphCreate, 0)
        self._context = call(self.driver.cuCtxGetCurrent)

    def copy(self, to: int, source: int, nbytes: int, *after: Any) -> Any:
        driver, params = self.driver, self.driver.CUDA_MEMCPY3D()
        params.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcDevice, params.dstDevice = driver.CUdeviceptr(source), driver.CUdeviceptr(to)
        params.srcPitch = params.dstPitch = params.WidthInBytes = nbytes
        params.srcHeight = params.dstHeight = params.Height = params.Depth = 1
        return call(driver.cuGraphAddMemcpyNode, self.raw, list(after), len(after), params, self._context)

    def fill(self, to: int, value: int, count: int, *after: Any) -> Any:
        params = self.driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value = self.driver.CUdeviceptr(to), value
        params.elementSize, params.width, params.height, params.pitch = WIDTH, count, 1, 0
        return call(self.driver.cuGraphAddMemsetNode, self.raw, list(after), len(after), params, self._context)

    def empty(self, *after: Any) -> Any:
        return call(self.driver.cuGraphAddEmptyNode, self.raw, list(after), len(after))

    def host(self, *after: Any) -> Any:
        """A call of ``getpid`` on the host."""
        params = self.driver.CUDA_HOST_NODE_PARAMS()
        function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
        params.fn = self.driver.CUhostFn(function)
        return call(self.driver.cuGraphAddHostNode, self.raw, list(after), len(after), params)

    def child(self, graph: Graph, *after: Any) -> Any:
        return call(self.driver.cuGraphAddChildGraphNode, self.raw, list(after), len(after), graph.raw)


def launch(raw: Any, executable: Any = None) -> None:
    """Launch a graph, by an instance of it if there is one, on the current stream; where that is captured, which the
    driver does not allow (``CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED``), make it a child of what is captured."""
    driver = load()
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    if torch.cuda.is_current_stream_capturing():
        add_child(driver, stream, raw)
        return
    if executable is None:
        executable = call(driver.cuGraphInstantiate, raw, 0)
        _executables.append(executable)
    call(driver.cuGraphLaunch, executable, stream)


def add_child(driver: Any, stream: Any, raw: Any) -> None:
    """The next node of what ``stream`` captures is a child graph."""
    _, _, graph, earlier, *_ = call(driver.cuStreamGetCaptureInfo, stream)
    node = call(driver.cuGraphAddChildGraphNode, graph, list(earlier), len(earlier), raw)
    flags = int(driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    call(driver.cuStreamUpdateCaptureDependencies, stream, [node], None, 1, flags)


def like(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for _ in range(count)]


# -- regions that launch graphs -----------------------------------------------------------------------------------


def branches(args: list[Any]) -> tuple[torch.Tensor, ...]:
    """Two branches and a node by itself, on intermediates and arguments."""
    x, target = args
    y = x * 2
    z, w = like(y, 2)
    graph, half = Graph(), COUNT // 2 * WIDTH
    first = graph.copy(z.data_ptr(), y.data_ptr(), 2 * half)
    second = graph.copy(z.data_ptr(), x.data_ptr() + half, half, first)
    filled = graph.fill(w.data_ptr(), ONE_AND_A_HALF, COUNT)
    graph.empty(second, filled)
    graph.fill(target.data_ptr() + 64, ONE_AND_A_HALF, 100)
    launch(graph.raw)
    return (z + w - y,)


def nested(args: list[Any]) -> tuple[torch.Tensor, ...]:
    x, _ = args
    y = x * 2
    (z,) = like(y, 1)
    inner, outer = Graph(), Graph()
    inner.copy(z.data_ptr(), y.data_ptr(), 400)
    before = outer.fill(z.data_ptr(), ONE_AND_A_HALF, COUNT)
    copied = outer.child(inner, before)
    outer.fill(z.data_ptr() + 200, 0, 10, copied)
    launch(outer.raw)
    return (z + y,)


def twice(args: list[Any]) -> tuple[torch.Tensor, ...]:
    """One after the other, with nothing in between: the second one starts from what the first one made."""
    x, target = args
    y, (z, w) = x * 2, like(x, 2)
    for to, source in ((z, y), (w, z)):
        graph = Graph()
        graph.copy(to.data_ptr(), source.data_ptr(), COUNT * WIDTH)
        launch(graph.raw)
    return (w + 1, target * 2)


def on_two_streams(args: list[Any]) -> tuple[torch.Tensor, ...]:
    x, _ = args
    y, (z, w) = x * 2, like(x, 2)
    main = torch.cuda.current_stream()
    side().wait_stream(main)
    with torch.cuda.stream(side()):
        graph = Graph()
        graph.copy(z.data_ptr(), y.data_ptr(), COUNT * WIDTH)
        launch(graph.raw)
        made = torch.sin(z)
    graph = Graph()
    graph.copy(w.data_ptr(), x.data_ptr(), COUNT * WIDTH)
    launch(graph.raw)
    other = torch.cos(w)
    main.wait_stream(side())
    return (made + other,)


def kernel(args: list[Any]) -> tuple[torch.Tensor, ...]:
    """The graph comes from a capture of its own, on another stream."""
    x, target = args
    driver, y = load(), x * 2
    stream = driver.CUstream(side().cuda_stream)
    call(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    with torch.cuda.stream(side()):
        y.add_(1)
        target.mul_(y)
    launch(call(driver.cuStreamEndCapture, stream))
    return (y * 3,)


REGIONS: dict[str, tuple[Function, dict[LaunchKind, int], int]] = {
    "branches": (branches, {LaunchKind.KERNEL: 3, LaunchKind.MEMCPY: 2, LaunchKind.MEMSET: 2}, 1),
    "nested": (nested, {LaunchKind.KERNEL: 2, LaunchKind.MEMCPY: 1, LaunchKind.MEMSET: 2}, 1),
    "twice": (twice, {LaunchKind.KERNEL: 3, LaunchKind.MEMCPY: 2}, 2),
    "on two streams": (on_two_streams, {LaunchKind.KERNEL: 4, LaunchKind.MEMCPY: 2}, 2),
    "kernel": (kernel, {LaunchKind.KERNEL: 4}, 1),
}
"""Each with the launches that it comes to (those that do something), and how many of its nodes are child graphs."""


def arguments() -> list[Any]:
    return [torch.randn(COUNT, device="cuda"), torch.randn(COUNT, device="cuda")]


@pytest.mark.parametrize("name", REGIONS)
def test_replays_are_as_uncaptured(driver: Driver, name: str) -> None:
    assert_replays(driver, REGIONS[name][0], arguments())


@pytest.mark.parametrize("name", REGIONS)
def test_nodes_of_a_child_graph_are_launches_of_the_region(driver: Driver, name: str) -> None:
    fn, expected, children = REGIONS[name]
    fn(arguments())
    torch.cuda.synchronize()
    recording = driver.capture(fn, arguments())
    kinds = Counter(each.kind for each in recording.launches if each.kind is not LaunchKind.OPERATOR)
    assert kinds == expected, [each.name for each in recording.launches]
    payload = payload_of(recording)
    assert payload.graph is not None
    found = handles(load(), payload.graph.raw_cuda_graph())
    assert sorted(map(int, found)) == sorted(node.handle for node in payload.nodes)
    left = Counter(getattr(kind, "name", str(kind)) for kind in kinds_of(load(), found))
    assert "CU_GRAPH_NODE_TYPE_GRAPH" not in left, left
    assert len(payload.kept) == 1 + children, f"{len(payload.kept) - 1} child graphs were captured: {left}"


@pytest.mark.parametrize("name", REGIONS)
def test_every_call_of_such_a_region_is_verified(driver: Driver, name: str) -> None:
    fn = REGIONS[name][0]
    region = Region(fn, driver, name="children", options=RegionOptions(verify_always=True))
    for turn in range(CALLS):
        x, target = arguments()
        ours, theirs = [x.clone(), target.clone()], [x.clone(), target.clone()]
        outputs, expected = region(list(ours)), fn(list(theirs))
        torch.cuda.synchronize()
        pairs = [*zip(outputs, expected, strict=True), *zip(ours, theirs, strict=True)]
        assert all(torch.equal(a, b) for a, b in pairs), f"call {turn} of {name}: {region.record}"
    assert region.record.state == "replay", region.record
    region.close()


# -- regions whose graphs cannot be replayed ------------------------------------------------------------------------


def test_a_graph_of_fixed_memory_is_refused_and_calls_are_answered(driver: Driver) -> None:
    """A captured kernel of torch, on a tensor that nobody gave the region."""
    static = torch.zeros(64, device="cuda")
    static.add_(1)
    static.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        static.add_(1)
    graph.instantiate()
    warm = arguments()[0] * 2 + 1
    assert warm.isfinite().all()
    raw, calls = load(), 0

    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        y = args[0] * 2
        launch(raw.CUgraph(graph.raw_cuda_graph()), raw.CUgraphExec(graph.raw_cuda_graph_exec()))
        return (y + 1,)

    found = capture(fn, driver, arguments())
    assert isinstance(found, Refusal), f"captured, with slots {found.table.slots} and inert words {found.table.inert}"
    assert found.reason == "foreign-address", str(found)
    assert f"{static.data_ptr():#x}" in found.detail, str(found)
    region = Region(fn, driver, name="fixed")
    for calls in range(1, CALLS + 1):
        args = arguments()
        (output,) = region(list(args))
        assert torch.equal(output, args[0] * 2 + 1), f"call {calls}: {region.record}"
    assert region.record.replays == 0, region.record
    assert "foreign-address" in region.record.refusals, region.record
    assert static.tolist() == [calls] * 64, "each call launches the graph once"
    region.close()


def test_a_graph_that_calls_the_host_is_refused_by_name(driver: Driver) -> None:
    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        y = args[0] * 2
        graph = Graph()
        graph.fill(y.data_ptr(), ONE_AND_A_HALF, 10, graph.host())
        launch(graph.raw)
        return (y + 1,)

    fn(arguments())
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="launch 1 is a child graph with a node of kind host") as caught:
        driver.capture(fn, arguments())
    assert caught.value.reason == "unsupported-node"
    region = Region(fn, driver, name="host")
    for turn in range(CALLS):
        args = arguments()
        (output,) = region(list(args))
        expected = args[0] * 2
        expected[:10] = 1.5
        assert torch.equal(output, expected + 1), f"call {turn}: {region.record}"
    assert region.record.replays == 0, region.record
    assert "unsupported-node" in region.record.refusals, region.record
    region.close()
