"""Which call broke a capture: the first one after which the stream is not captured any more; and code that calls no
operators. Without a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from pygraph.errors import CaptureError
from pygraph.program.recording import Allocation, AllocationKind, Origin
from pygraph.runtime.cuda import spans
from pygraph.runtime.cuda.capture import _recording
from pygraph.runtime.cuda.spans import EagerCalls, Observer, calls_operators, observing
from pygraph.runtime.provenance import Refusal, tracing


class Stream:
    """A capture that is told which nodes it has and whether it is intact. ``calls``: what it met, in order."""

    def __init__(self) -> None:
        self.nodes, self.whole, self.calls = 0, True, list[str]()
        self.observer = Observer(lambda: self.nodes if self.whole else None, lambda: self.calls.append("wipe"))

    def launch(
        self, name: str, nodes: int = 1, *, breaks: bool = False, foreign: bool = False, result: Any = None
    ) -> Any:
        def run() -> Any:
            self.calls.append(name)
            self.nodes += nodes
            self.whole = self.whole and not breaks
            return result

        inside: Any = SimpleNamespace(nondeterministic=False) if foreign else None
        return self.observer.call(name, (), run, inside=inside)


def region(stream: Stream) -> None:
    stream.launch("first")
    stream.launch("second", breaks=True)
    stream.launch("third")


START = region.__code__.co_firstlineno
ORIGINS = {START + i: Origin((f"node{i}",), (f"m.py:{i}",)) for i in range(4)}


def test_a_call_that_breaks_the_capture_without_raising_is_blamed() -> None:
    stream = Stream()
    with tracing(region, ORIGINS):
        with pytest.raises(CaptureError) as raised:
            region(stream)
        refusal = Refusal.of(raised.value)
    assert (refusal.launch, refusal.loc, refusal.nodes) == ("second", "m.py:2", ("node2",))
    assert [span.name for span in stream.observer.spans] == ["first"]
    assert stream.observer.failed == "second"
    assert stream.calls == ["wipe", "first", "wipe", "second"]


def test_code_between_two_calls_that_breaks_the_capture_is_not_blamed_on_the_next_one() -> None:
    stream = Stream()
    stream.launch("first")
    stream.whole = False
    with pytest.raises(CaptureError, match="code before second broke the capture"):
        stream.launch("second")
    assert stream.observer.failed is None
    assert stream.calls == ["wipe", "first"]


def test_a_doubt_about_a_node_blames_the_call_that_it_came_from() -> None:
    stream = Stream()
    with tracing(region, ORIGINS):
        stream.launch("first", 2)
        stream.launch("second", 2)
        stream.observer.fail_at(9)
        assert stream.observer.failed is None
        stream.observer.fail_at(3)
    assert stream.observer.failed == "second"


@pytest.mark.parametrize(
    ("nodes", "foreign", "result", "refused"),
    [
        (0, True, torch.ones(2), True),
        (0, True, [torch.ones(0), torch.ones(1)], True),
        (0, True, torch.ones(0), False),
        (0, True, None, False),
        (1, True, torch.ones(2), False),
        (0, False, torch.ones(2), False),
    ],
)
def test_work_that_is_not_captured_is_noticed(nodes: int, foreign: bool, result: Any, refused: bool) -> None:
    stream = Stream()
    if not refused:
        assert stream.launch("op", nodes, foreign=foreign, result=result) is result
        return
    with pytest.raises(CaptureError, match="op adds nothing to the capture") as raised:
        stream.launch("op", nodes, foreign=foreign, result=result)
    assert raised.value.reason == "uncaptured-work"


def item(args: list[Any]) -> Any:
    x = args[0]
    return x.sum().item()


@pytest.mark.parametrize(
    ("device", "reason", "launch"),
    [("meta", "host-read", "aten._local_scalar_dense.default"), ("cpu", "host-memory", "aten.sum.default")],
)
def test_operators_that_need_the_host_are_blamed_before_they_run(device: str, reason: str, launch: str) -> None:
    stream, x = Stream(), torch.ones(2, device=device)
    origins = {item.__code__.co_firstlineno + 2: Origin(("item",), ("m.py:9",))}
    with tracing(item, origins), observing(stream.observer, item) as run:
        with pytest.raises(CaptureError) as raised:
            run([x])
        found = Refusal.of(raised.value)
    assert (raised.value.reason, found.launch, found.nodes) == (reason, launch, ("item",))


# -- what custom operators do inside ---------------------------------------------------------------------------------

_library = torch.library.Library("pygraph_observed", "DEF")
_bodies: dict[str, Callable[..., torch.Tensor]] = {
    "plain": lambda x: torch.relu(x * 2),
    "adds": lambda x: torch.relu(x.index_add(0, torch.zeros(2, dtype=torch.int64, device=x.device), x)),
    "draws": lambda x: x + torch.rand(2),
}
for _name, _body in _bodies.items():
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _body, "CompositeExplicitAutograd")
_library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_bitwise,))
_library.impl("tagged", _bodies["plain"], "CompositeExplicitAutograd")
observed: Any = torch.ops.pygraph_observed


def calls(*names: str) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return [getattr(observed, name)(args[0]) for name in names]

    return run


def test_bodies_in_python_are_counted_and_named() -> None:
    stream, fn = Stream(), calls("plain", "plain", "tagged")
    stream.observer.nodes = iter(range(100)).__next__
    origins = {fn.__code__.co_firstlineno + 1: Origin(("node",), ("m.py:9",))}
    with tracing(fn, origins) as bodies, observing(stream.observer, fn) as run:
        run([torch.ones(2, device="meta")])
        assert bodies == {"pygraph_observed.plain.default": 2, "pygraph_observed.tagged.default": 1}
    assert [call.name.split(".")[1] for call in stream.observer.python] == ["plain", "plain", "tagged"]


@pytest.mark.parametrize(("name", "nondeterministic"), [("plain", False), ("adds", True), ("tagged", True)])
def test_an_operator_is_as_non_deterministic_as_what_it_calls(name: str, nondeterministic: bool) -> None:
    stream, fn = Stream(), calls(name)
    stream.observer.nodes = iter(range(100)).__next__
    with observing(stream.observer, fn) as run:
        run([torch.ones(2, device="meta")])
    found = {span.name: span.nondeterministic for span in stream.observer.spans}
    assert found[f"pygraph_observed.{name}.default"] == nondeterministic


def test_an_operator_that_draws_on_the_cpu_is_refused_before_it_draws() -> None:
    stream, fn, state = Stream(), calls("draws"), torch.get_rng_state()
    with observing(stream.observer, fn) as run, pytest.raises(CaptureError, match="draws from the CPU's") as raised:
        run([torch.ones(2, device="meta")])
    assert raised.value.reason == "host-random"
    assert stream.observer.failed == "pygraph_observed.draws.default"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _reduces(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    distributed.all_reduce(y)
    _reached.append("behind a collective")
    return y


def _carries_on(x: torch.Tensor) -> torch.Tensor:
    try:
        return _reduces(x)
    except CaptureError:
        return x


_reached: list[str] = []
for _name, _body in (("reduces", _reduces), ("carries_on", _carries_on)):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _body, "CompositeExplicitAutograd")


@pytest.mark.parametrize("name", ["reduces", "carries_on"])
def test_a_collective_in_a_custom_operator_is_refused_before_it_is_issued(name: str, process_group: None) -> None:
    stream, fn = Stream(), calls(name)
    origins = {fn.__code__.co_firstlineno + 1: Origin(("node",), ("m.py:9",))}
    with tracing(fn, origins), observing(stream.observer, fn) as run:
        with pytest.raises(CaptureError, match=f"pygraph_observed.{name}.default talks to other processes") as raised:
            run([torch.ones(2, device="meta")])
        found = Refusal.of(raised.value)
    assert raised.value.reason == "collective"
    assert found.launch == f"pygraph_observed.{name}.default"
    assert _reached == []


def test_a_collective_is_refused_before_it_is_issued(process_group: None) -> None:
    stream, name = Stream(), distributed.group.WORLD.group_name

    def fn(args: list[Any]) -> Any:
        return torch.ops._c10d_functional.all_reduce(args[0], "sum", name)

    with observing(stream.observer, fn) as run, pytest.raises(CaptureError) as raised:
        run([torch.ones(2, device="meta")])
    assert raised.value.reason == "collective"
    assert stream.observer.failed == "_c10d_functional.all_reduce.default"


def test_a_collective_is_captured_where_that_is_asked_for(process_group: None) -> None:
    """Torch may hold the collective's operands and results until the next one; nothing else."""
    name = distributed.group.WORLD.group_name
    stream = Stream()
    stream.observer.calls = EagerCalls(frozenset(), False, pytest.fail, lambda: 0)
    x = torch.ones(4)

    def fn(args: list[Any]) -> Any:
        stream.nodes += 1
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(args[0], "sum", name))

    with patch.object(spans, "_refuse_host", lambda *_: None), observing(stream.observer, fn) as run:
        assert run([x]) is x
    sent, waited = stream.observer.spans
    assert (sent.name, waited.name) == ("_c10d_functional.all_reduce_.default", "_c10d_functional.wait_tensor.default")
    assert sent.writes == (x.data_ptr(),)
    given, other = (Allocation(AllocationKind.POOL, 0, x.data_ptr() + start, 16, 9) for start in (0, 64))
    assert stream.observer.sent(given)
    assert not stream.observer.sent(other)
    assert stream.observer.sent(replace(other, born=1)), "made by it, perhaps"


# -- code that calls no operators -----------------------------------------------------------------------------------

POINTWISE = """
def partition_0(args):
    arg0_1, = args
    args.clear()
    assert_size_stride(arg0_1, (8, ), (1, ))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_0.run(arg0_1, buf0, 8, stream=stream0)
        {more}
        del arg0_1
    return (reinterpret_tensor(buf0, (2, 4), (4, 1), 0), )
"""
GLOBALS = ("inductor_ops", "torch", "assert_size_stride", "empty_strided_cuda", "get_raw_stream", "reinterpret_tensor")


def partition(more: str = "pass", *extra: str) -> Callable[..., Any]:
    """A function such as Inductor emits, of which nothing is called."""
    names: dict[str, Any] = dict.fromkeys((*GLOBALS, "triton_poi_fused_add_0", *extra))
    exec(POINTWISE.format(more=more), names)
    function: Callable[..., Any] = names["partition_0"]
    return function


def test_triton_kernels_alone_are_no_operators() -> None:
    assert not calls_operators(partition())
    assert not calls_operators(partition("triton_red_fused_sum_1.run(buf0)", "triton_red_fused_sum_1"))


@pytest.mark.parametrize(
    ("more", "extra"),
    [
        ("extern_kernels.mm(arg0_1, arg0_1, out=buf0)", "extern_kernels"),
        ("aten.mm.out(arg0_1, arg0_1, out=buf0)", "aten"),
        ("torch.ops.mylib.product.default(arg0_1)", "math"),
        ("my_kernel_0.run(arg0_1, stream=stream0)", "my_kernel_0"),
    ],
)
def test_anything_else_may_be(more: str, extra: str) -> None:
    assert calls_operators(partition(more, extra))


def test_of_code_that_is_not_inductors_nothing_is_known() -> None:
    assert calls_operators(lambda args: [args[0] + 1])
    assert calls_operators(torch.mm)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_broken_capture_is_ended_in_torchs_allocators_too(breaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Graph:
        def __init__(self, *, keep_graph: bool) -> None:
            said.append("repair" if keep_graph else "graph")

        def capture_begin(self, *pool: Any, capture_error_mode: str) -> None:
            said.append((*pool, capture_error_mode))

        def capture_end(self) -> None:
            if breaks and "repair" not in said:
                raise RuntimeError("the capture is broken")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    session: Any = SimpleNamespace(begin=lambda: None, end=lambda: None)
    native = SimpleNamespace(end_broken_capture=lambda device, pool: said.append(("ended", device, pool)))
    device: Any = SimpleNamespace(native=native, index=3)
    graph: Any = Graph(keep_graph=False)
    with pytest.raises(RuntimeError) if breaks else contextlib.nullcontext(), _recording(graph, session, device):
        pass
    begun = ["graph", ((0, 7), "thread_local")]
    assert said == begun + [("ended", 3, (0, 7)), "repair", ("thread_local",)] * breaks
