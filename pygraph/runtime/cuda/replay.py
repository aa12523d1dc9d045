"""A captured region replayed in plain Python, where no compiler makes the native one. Same interface, same rules.

It checks and patches argument by argument, which costs more host time than the native region takes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from pygraph.compat import dispatch_mode_depth, functorch_level
from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import succeeded
from pygraph.runtime.cuda.patching import PatchedCopy, PatchedFill, PatchedKernel
from pygraph.runtime.digest import bits

if TYPE_CHECKING:
    from pygraph.runtime.cuda.capture import Machine

__all__ = ["PythonRegion"]

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _OutputKind(Enum):
    ARGUMENT = "argument"
    VIEW = "view"
    FRESH = "fresh"
    OBJECT = "object"
    SAME = "same"


@dataclass
class _Argument:
    """What one argument has to be; ``captured`` is a stand-in or a Python value."""

    captured: Any
    written: bool = False
    offset: int = -1
    nbytes: int = 0
    alignment: int = 1
    residue: int = 0

    def accepts(self, value: Any, device: int) -> bool:
        captured = self.captured
        if not isinstance(captured, torch.Tensor):
            return value is captured or bits(value) == bits(captured)
        return (
            type(value) in _TENSORS
            and value.device.type == "cuda"
            and value.device.index == device
            and value.layout is torch.strided
            and not (value.is_conj() or value.is_neg())
            and value.dtype is captured.dtype
            and value.size() == captured.size()
            and value.stride() == captured.stride()
            and self.offset in (-1, value.storage_offset())
            and value.storage_offset() * value.element_size() + self.nbytes <= value.untyped_storage().nbytes()
        )

    def misaligned(self, address: int) -> bool:
        return bool(self.nbytes) and address % self.alignment != self.residue


@dataclass
class _Source:
    """A provider of one address, and every place (node, place, delta) that it was baked into."""

    address: int | None = None
    patches: list[tuple[int, int, int]] = field(default_factory=list)


class PythonRegion:
    """Made by ``instantiate``; ``replay`` and ``close`` are those of an Executable."""

    OutputKind = _OutputKind

    def __init__(self, machine: Machine, graph: torch.cuda.CUDAGraph, device: int, random: bool) -> None:
        self._machine, self._graph, self._device = machine, graph, device
        self._exec = machine.driver.CUgraphExec(graph.raw_cuda_graph_exec())
        self._workspace, self._random = 0, random
        self._sources: list[_Source] = []
        self._arguments: list[_Argument] = []
        self._fresh: list[int] = []
        self._nodes: list[Any] = []
        self._outputs: list[tuple[Any, ...]] = []
        self._origins: dict[int, tuple[int, int]] = {}
        self._busy = threading.Lock()
        self._closed = False

    # -- building, as the native region is built ---------------------------------------------------------------------

    def add_segment(self, graph: int, instance: int) -> None:  # noqa: ARG002
        """There is one segment only here, and it is torch's graph."""
        if self._sources:
            raise CaptureError("invalid-program", "a region in Python is one segment")

    def add_piece(self, nbytes: int, segment: int) -> int:  # noqa: ARG002
        """The number of the source of the workspace, which is in one piece."""
        if self._sources:
            raise CaptureError("invalid-program", "a workspace in Python is one piece")
        self._workspace = nbytes
        self._sources.append(_Source())
        return 0

    def add_tensor_argument(
        self, captured: torch.Tensor, written: bool, offset: int, nbytes: int, alignment: int, address: int
    ) -> int:
        """The number of the argument's source."""
        return self._add(_Argument(captured, written, offset, nbytes, alignment, address % alignment))

    def add_value_argument(self, value: Any) -> int:
        """The number of the argument's source (it has no address)."""
        return self._add(_Argument(value))

    def _add(self, argument: _Argument) -> int:
        self._arguments.append(argument)
        self._sources.append(_Source())
        return len(self._sources) - 1

    def add_fresh(self, nbytes: int, segment: int) -> int:  # noqa: ARG002
        """The number of the source of an allocation that outlives the replay."""
        self._fresh.append(nbytes)
        self._sources.append(_Source())
        return len(self._sources) - 1

    def add_kernel(self, handle: int, blob: bytes, layout: Sequence[tuple[int, int]], segment: int) -> int:  # noqa: ARG002
        """The number of a kernel node that is patched."""
        self._nodes.append(PatchedKernel(self._machine.driver, handle, blob, layout))
        return len(self._nodes) - 1

    def add_copy(self, handle: int, segment: int) -> int:  # noqa: ARG002
        """The number of a copy node that is patched."""
        self._nodes.append(PatchedCopy(self._machine.driver, handle))
        return len(self._nodes) - 1

    def add_fill(self, handle: int, segment: int) -> int:  # noqa: ARG002
        """The number of a fill node that is patched."""
        self._nodes.append(PatchedFill(self._machine.driver, handle))
        return len(self._nodes) - 1

    def add_patch(self, node: int, place: int, source: int, delta: int) -> None:
        """``delta`` bytes behind where ``source`` begins go to ``place`` of ``node``."""
        self._sources[source].patches.append((node, place, delta))

    def add_output(self, *output: Any) -> None:
        """Kind, index, offset, size, stride, dtype and object of the next output."""
        self._outputs.append(output)

    def add_origin(self, output: int, start: int, nbytes: int) -> None:
        """Output ``output`` is copied out of its allocation, of which it owns ``nbytes`` from ``start`` only."""
        self._origins[output] = (start, nbytes)

    # -- replaying ----------------------------------------------------------------------------------------------------

    def consume(self, args: list[Any]) -> list[Any] | None:
        """As ``CudaExecutable.consume`` says."""
        outputs = self.replay(args)
        if outputs is not None:
            args.clear()
        return outputs

    def replay(self, args: list[Any]) -> list[Any] | None:
        """As ``Executable.replay`` says."""
        if self._closed or type(args) is not list or dispatch_mode_depth() or functorch_level() is not None:
            return None
        if not self._busy.acquire(blocking=False):
            return None
        try:
            with torch.cuda.device(self._device):
                return self._replay(list(args))
        finally:
            self._busy.release()

    def _replay(self, args: list[Any]) -> list[Any] | None:
        if len(args) != len(self._arguments) or torch.cuda.is_current_stream_capturing():
            return None
        if not all(a.accepts(value, self._device) for a, value in zip(self._arguments, args, strict=True)):
            return None
        addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in args]
        misaligned = [i for i, a in enumerate(self._arguments) if a.misaligned(addresses[i])]
        if not all(self._copyable(i, args) for i in misaligned):
            return None
        copies = {i: self._bytes(self._arguments[i].nbytes + self._arguments[i].alignment) for i in misaligned}
        for i, copy in copies.items():
            addresses[i] = self._aligned_copy(i, args[i], copy)
        workspace = self._bytes(self._workspace)
        fresh = [self._bytes(nbytes) for nbytes in self._fresh]
        if not self._patch([workspace.data_ptr(), *addresses, *(memory.data_ptr() for memory in fresh)]):
            return None
        self._launch()
        return self._results(args, fresh)

    def _copyable(self, index: int, args: Sequence[Any]) -> bool:
        """Whether a copy may stand for an argument: nothing writes to the original, nor looks around it."""
        if self._arguments[index].written or self._arguments[index].offset >= 0:
            return False
        mine = _reach(args[index])
        others = (_reach(v) for i, v in enumerate(args) if i != index and self._arguments[i].written)
        return not any(mine[0] < other[1] and other[0] < mine[1] for other in others)

    def _aligned_copy(self, index: int, value: torch.Tensor, buffer: torch.Tensor) -> int:
        """Where in ``buffer`` the copy of an argument begins."""
        argument = self._arguments[index]
        shift = (argument.residue - buffer.data_ptr()) % argument.alignment
        source = torch.empty(0, dtype=torch.uint8, device=value.device)
        source.set_(value.untyped_storage(), value.storage_offset() * value.element_size(), (argument.nbytes,), (1,))
        buffer[shift : shift + argument.nbytes].copy_(source)
        return buffer.data_ptr() + shift

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._device))

    def _patch(self, addresses: Sequence[int]) -> bool:
        """Hand what changed to the graph. A node that refuses an address (a copy, of memory of another kind) would
        do so again: the region is then never replayed any more."""
        dirty: dict[int, None] = {}
        for source, address in zip(self._sources, addresses, strict=True):
            if source.address == address:
                continue
            for node, place, delta in source.patches:
                self._nodes[node].write(place, address + delta)
                dirty[node] = None
            source.address = address
        self._closed = self._closed or not all(succeeded(self._nodes[node].apply(self._exec)) for node in dirty)
        return not self._closed

    def _launch(self) -> None:
        if not self._random:
            self._graph.replay()
            return
        with self._machine.order.turn(torch.cuda.current_stream(self._device)):
            self._graph.replay()

    def _results(self, args: Sequence[Any], fresh: Sequence[torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        owned: dict[tuple[int, int], torch.Tensor] = {}
        for position, (kind, index, offset, size, stride, dtype, value) in enumerate(self._outputs):
            if kind is _OutputKind.ARGUMENT:
                results.append(args[index])
            elif kind is _OutputKind.SAME:
                results.append(results[index])
            elif kind is _OutputKind.OBJECT:
                results.append(value)
            else:
                made = torch.empty(0, dtype=dtype, device=torch.device("cuda", self._device))
                if kind is _OutputKind.VIEW:
                    storage = args[index].untyped_storage()
                    front = args[index].storage_offset() * args[index].element_size()
                else:
                    storage, front = self._owned(position, index, fresh[index], owned)
                results.append(made.set_(storage, front // made.element_size() + offset, size, stride))
        return results

    def _owned(
        self, position: int, index: int, memory: torch.Tensor, owned: dict[tuple[int, int], torch.Tensor]
    ) -> tuple[torch.UntypedStorage, int]:
        """The storage of a fresh output, and the byte of it at which its allocation would begin."""
        if position not in self._origins:
            return memory.untyped_storage(), 0
        start, nbytes = self._origins[position]
        if (index, start) not in owned:
            owned[index, start] = self._bytes(nbytes).copy_(memory[start : start + nbytes])
        return owned[index, start].untyped_storage(), -start

    def close(self) -> None:
        """Give back everything; while a replay is under way, it goes with the last reference."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            self._sources, self._nodes, self._outputs, self._arguments = [], [], [], []
            del self._graph
            self._busy.release()


def _reach(value: torch.Tensor) -> tuple[int, int]:
    """All that a tensor's storage spans."""
    start = value.untyped_storage().data_ptr()
    return start, start + value.untyped_storage().nbytes()
