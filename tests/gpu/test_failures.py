"""Operators that cannot be captured, found only when it is tried: the call is answered, the stream stays usable, the
operator and the user's line are named, and each replay calls it. On a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.report.model import GraphReport
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.bindings import load as load_driver
from pygraph.runtime.region import Region

pytestmark = pytest.mark.usefixtures("fresh")

CALLS = 4
"""Enough to run uncaptured, be captured or fail to be, and be replayed."""

HERE = Path(__file__)


def _define(name: str, run: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A custom operator, fine by its schema, that doubles ``x``; its gradient is made by a twin of the same kind."""
    op = torch.library.custom_op(f"pygraphgpu::{name}", run, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    back = torch.library.custom_op(f"pygraphgpu::{name}_back", run, mutates_args=(), schema="(Tensor x) -> Tensor")
    back.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, g: back(g.contiguous()))
    return op


def _waits(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.cuda.synchronize()
    return y


def _waits_unseen(x: torch.Tensor) -> torch.Tensor:
    """Breaks the capture, and raises nothing: the error code is ignored."""
    driver = load_driver()
    y = x * 2
    driver.cuStreamSynchronize(driver.CUstream(torch.cuda.current_stream().cuda_stream))
    return y


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Launches on the legacy default stream, whatever stream is current."""
    current = torch.cuda.current_stream()
    if not torch.cuda.is_current_stream_capturing():
        current.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream()):
        y = x * 2
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.default_stream().synchronize()
    return y


def _reads(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.sum().item() < 1e30 else 3.0)


def _copies(x: torch.Tensor) -> torch.Tensor:
    return x * torch.full((1,), 2.0).to("cuda")


def _fetches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 0 * x.cpu().cuda()


OPERATORS = {
    "synchronise": _define("synchronise", _waits),
    "broken_unseen": _define("broken_unseen", _waits_unseen),
    "default_stream": _define("default_stream", _elsewhere),
    "item": _define("item", _reads),
    "pageable_copy": _define("pageable_copy", _copies),
    "copy_to_host": _define("copy_to_host", _fetches),
}


def program(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ w)
        middle = op(hidden)  # the line of the operator
        return torch.relu(middle @ w).sum(0)

    return call


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu((torch.relu(x @ w) * 2) @ w).sum(0)


def line() -> str:
    """The line of the operator, as reports write it."""
    (number,) = [
        i for i, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith("# the line of the operator")
    ]
    return f"{HERE.name}:{number}"


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).cuda()


def weight() -> torch.Tensor:
    return (torch.randn(64, 64, generator=torch.Generator().manual_seed(99)) / 8).cuda()


def report_of(name: str) -> GraphReport:
    """That of the program with the operator ``name``, compiled anew, after calls that are held against the reference.
    Afterwards another region is captured, compared and replayed on the same stream."""
    again()
    other = torch.compile(lambda x, w: torch.tanh(x @ w).sum(1), backend="pygraph")
    ours, w = torch.compile(program(OPERATORS[name]), backend="pygraph"), weight()
    for compiled, plain in ((ours, reference), (other, lambda x, w: torch.tanh(x @ w).sum(1))):
        for seed in range(CALLS):
            x = inputs(seed)
            torch.testing.assert_close(compiled(x, w), plain(x, w), msg=lambda text, seed=seed: f"call {seed}: {text}")
    found, usable = pygraph.reports()
    assert [state for state, _ in states(usable)] == ["replay"], f"the stream was left unusable: {states(usable)}"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch.empty(64 << 20, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved, "torch takes the broken capture to be under way"
    return found


def again() -> None:
    """Forget all compilations: the next program is compiled anew."""
    torch._dynamo.reset()
    pygraph.reset()


def states(report: GraphReport) -> list[tuple[str, str]]:
    """State and reason of each region, for messages."""
    return [(region.state, region.why) for region in report.regions]


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operator_and_line_are_named_and_each_replay_calls_it(name: str) -> None:
    report = report_of(name)
    (region,) = report.regions
    assert region.state == "replay", f"{name}: {states(report)}"
    assert region.record is not None
    assert (region.record.replays, region.record.segments) == (CALLS - 2, 2), region.record
    named = [r for r in region.record.refusals.values() if r.launch == f"pygraphgpu.{name}.default"]
    assert named, f"nobody named the operator: {region.record.refusals}"
    assert named[0].loc is not None, f"no line: {named[0]}"
    assert named[0].loc.endswith(line()), f"another line than {line()}: {named[0]}"
    (called,) = region.record.eager
    assert (called.operator, called.count) == (f"pygraphgpu.{name}.default", 1)


@pytest.mark.parametrize("name", ["synchronise", "broken_unseen", "item"])
def test_training_calls_it_in_both_directions(name: str) -> None:
    again()
    ours = torch.compile(program(OPERATORS[name]), backend="pygraph")
    w, plain = weight().requires_grad_(), weight().requires_grad_()
    with torch.enable_grad():
        for seed in range(CALLS):
            x = inputs(seed)
            w.grad = plain.grad = None
            ours(x, w).square().mean().backward()
            reference(x, plain).square().mean().backward()
            torch.testing.assert_close(w.grad, plain.grad, msg=lambda text, seed=seed: f"call {seed}: {text}")
    for report in pygraph.reports()[:2]:
        assert {state for state, _ in states(report)} == {"replay"}, f"{report.name}: {states(report)}; {report.notes}"
        calls = [call.operator for region in report.regions if region.record for call in region.record.eager]
        assert len(calls) == 1, f"{report.name}: {calls}"


# -- graphs that a region adds to the one that is captured ------------------------------------------------------------


def _launch(graph: torch.cuda.CUDAGraph) -> None:
    """Launch ``graph`` on the current stream; where that is captured, make it a child of what is captured."""
    if not torch.cuda.is_current_stream_capturing():
        graph.replay()
        return
    driver = load_driver()
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    _, _, parent, earlier, *_ = call(driver.cuStreamGetCaptureInfo, stream)
    child = driver.CUgraph(graph.raw_cuda_graph())
    node = call(driver.cuGraphAddChildGraphNode, parent, list(earlier), len(earlier), child)
    flags = int(driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    call(driver.cuStreamUpdateCaptureDependencies, stream, [node], None, 1, flags)


def test_a_child_graph_is_refused_by_name_and_calls_are_answered(driver: Driver) -> None:
    static = torch.zeros(64, device="cuda")
    static.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        static.add_(1)
    graph.instantiate()

    def fn(args: list[Any]) -> tuple[torch.Tensor, ...]:
        y = args[0] * 2
        _launch(graph)
        return (y + 1,)

    region = Region(fn, driver, name="child")
    for seed in range(CALLS):
        x = inputs(seed)
        (output,) = region([x])
        assert torch.equal(output, x * 2 + 1), f"call {seed}: {region.record}"
    assert region.record.replays == 0, region.record
    assert "unsupported-node" in region.record.refusals, region.record
    assert static.tolist() == [1 + CALLS] * 64, "each call launches the graph once"
    region.close()
