"""One launch of a CUDA program at a time, and the uncaptured program with its operators and Triton kernels observed.

Stepping takes a graph of its own: that of the executable may have been cut, and is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pygraph.compat import without_dispatch_modes
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call, succeeded
from pygraph.runtime.cuda.capture import CudaCapture, Machine
from pygraph.runtime.cuda.executable import anchor_copies
from pygraph.runtime.cuda.nodes import EmptyNode
from pygraph.runtime.cuda.observation import Observer, Span, observing, tensors_in
from pygraph.runtime.cuda.patching import patchable
from pygraph.runtime.digest import extent
from pygraph.runtime.driver import Program
from pygraph.runtime.recording import AllocationKind, Recording
from pygraph.runtime.stepping import Operand, Watcher

__all__ = ["CudaStepper", "payload_of", "trace"]


def payload_of(recording: Recording) -> CudaCapture:
    """The payload of a CUDA recording. Raises CaptureError (``foreign-recording``) for any other."""
    payload = recording.payload
    if not isinstance(payload, CudaCapture):
        raise CaptureError("foreign-recording", f"a payload of type {type(payload).__name__}")
    return payload


class CudaStepper:
    """Runs the launches of ``program`` on the current stream. ``again`` is one more capture of the same region: its
    graph is what is launched, with every node but one switched off, and the parameters of ``program``."""

    def __init__(self, machine: Machine, program: Program, again: Recording) -> None:
        _check_same(program.recording, again)
        self._driver, self._nodes = machine.driver, payload_of(program.recording).nodes
        self._launches = program.recording.launches
        self._moved = {a: b for a, b in zip(_fixed(program.recording), _fixed(again), strict=True) if a != b}
        fresh = payload_of(again)
        self.device = torch.device("cuda", fresh.device)
        graph, fresh.graph = fresh.graph, None
        if graph is None:
            raise CaptureError("already-instantiated", "a capture makes one executable")
        anchor_copies(machine.driver, program, fresh.nodes)
        graph.instantiate()
        self._graph, self._again = graph, again  # the capture's address space stays leased meanwhile
        self._instance = machine.driver.CUgraphExec(graph.raw_cuda_graph_exec())
        self._handles = [machine.driver.CUgraphNode(node.handle) for node in fresh.nodes]
        for launch in range(len(self._nodes)):
            self._switch(launch, on=False)
        with machine.random_turn(torch.cuda.current_stream(self.device)):
            graph.replay()  # runs no launch, but fills in seed and offset

    def run(self, launch: int, words: Mapping[int, int]) -> None:
        """As ``Stepper.run`` says. Waits for the launch, so that what it raises is its own."""
        node = self._nodes[launch]
        if isinstance(node, EmptyNode):
            return
        patched = patchable(self._driver, node, int(self._handles[launch]))
        moved = {i: self._moved[word] for i, word in enumerate(self._launches[launch].words) if word in self._moved}
        for word, address in {**moved, **words}.items():
            patched.write(node.place(word), address)
        if not succeeded(patched.apply(self._instance)):
            raise CaptureError("driver-error", "the launch refuses its addresses")
        self._switch(launch, on=True)
        stream = torch.cuda.current_stream(self.device)
        call(self._driver.cuGraphLaunch, self._instance, self._driver.CUstream(stream.cuda_stream))
        stream.synchronize()
        self._switch(launch, on=False)

    def _switch(self, launch: int, *, on: bool) -> None:
        if not isinstance(self._nodes[launch], EmptyNode):
            call(self._driver.cuGraphNodeSetEnabled, self._instance, self._handles[launch], int(on))


def _check_same(first: Recording, again: Recording) -> None:
    """Raise CaptureError unless two captures did the same."""
    for a, b in zip(first.launches, again.launches, strict=False):
        if (a.kind, a.name, a.signature) != (b.kind, b.name, b.signature):
            raise CaptureError(
                "unstable-launches", f"launch {a.index} was {a.name}, and is {b.name} when captured again"
            )
    counts = [(len(each.launches), len(_fixed(each)), each.phases) for each in (first, again)]
    if counts[0] != counts[1]:
        raise CaptureError("unstable-launches", "the region is another one when captured again")


def _fixed(recording: Recording) -> list[int]:
    """Where constants are, and the generator's seed and offset, which may be elsewhere in each capture."""
    return [a.address for a in recording.allocations if a.kind is AllocationKind.CONSTANT]


# -- the uncaptured program ---------------------------------------------------------------------------------------


def trace(
    program: Program, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any], watcher: Watcher
) -> Sequence[Any]:
    """As ``Steps.trace`` says."""
    calls = _Calls(payload_of(program.recording).spans, watcher)
    with torch.no_grad(), observing(calls, fn) as run:
        returned: Sequence[Any] = run(args)
    calls.finish()
    return returned


class _Calls(Observer):
    """Tells of the calls that added launches when captured, recognised by their number among all calls."""

    def __init__(self, spans: Sequence[Span], watcher: Watcher) -> None:
        super().__init__(nodes=lambda: 0)
        self._expected = {span.number: span for span in spans}
        self._watcher = watcher
        self._made = 0

    def call(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        run: Callable[[], Any],
        *,
        foreign: bool = False,  # noqa: ARG002
        nondeterministic: Callable[[], bool] = bool,  # noqa: ARG002
        given: Any = (),
    ) -> Any:
        """Run one call, which was ``given`` the tensors at ``reads`` and ``writes``."""
        span = self._expected.pop(self._made, None)
        self._made += 1
        if span is None:
            return run()
        if (span.name, len(span.reads), len(span.writes)) != (name, len(reads), len(writes)):
            raise CaptureError("unstable-launches", f"{span.name} is {name} in an uncaptured run")
        places = _by_address(given)
        operands = [*_operands(span.reads, reads, places, False), *_operands(span.writes, writes, places, True)]
        with without_dispatch_modes():
            self._watcher.before(span.begin, span.end, operands)
        result = run()
        returned = _returned(span, result)
        with without_dispatch_modes():
            self._watcher.after(span.begin, span.end, operands, returned, lambda: _returned(span, run()))
        return result

    def finish(self) -> None:
        """Raise CaptureError if calls are left over."""
        for span in self._expected.values():
            raise CaptureError("unstable-launches", f"an uncaptured run does not call {span.name}")


def _returned(span: Span, result: Any) -> list[Operand]:
    """The tensors that a call returned, at the addresses that they had when captured."""
    made = list(tensors_in(result))
    if len(made) != len(span.results):
        return []
    return [Operand(a, t, True) for a, t in zip(span.results, made, strict=True) if a]


def _by_address(given: Any) -> dict[int, torch.Tensor]:
    """The tensors among what a call is given by their address: of several, the one that reaches furthest."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(given):
        if tensor.layout is not torch.strided:
            continue
        known = found.setdefault(tensor.data_ptr(), tensor)
        if extent(tensor) > extent(known):
            found[tensor.data_ptr()] = tensor
    return found


def _operands(
    captured: Sequence[int], now: Sequence[int], places: Mapping[int, torch.Tensor], written: bool
) -> list[Operand]:
    pairs = zip(captured, now, strict=True)
    return [Operand(then, places[address], written) for then, address in pairs if then and address in places]
