"""Order between what fills and what reads a generator's seed and offset in device memory, across streams.

Captures share that memory in torch 2.11, and each capture and each replay refills it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.nodes import handles, kinds_of, read_nodes

__all__ = ["RandomOrder"]


class RandomOrder:
    """One per device. What fills or reads that memory does so in a turn, on one stream."""

    def __init__(self, native: ModuleType | None, device: int) -> None:
        self._native, self._device = native, device
        self._last: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """``stream`` waits for the last turn, and the next one for what it is given in this one.

        Raises CaptureError (``generator-busy``) while another turn goes on that may run Python code: to wait for that
        may be to wait for ever.
        """
        if self._native is None:
            with self._lock:
                if self._last is not None:
                    stream.wait_event(self._last)
                try:
                    yield
                finally:
                    self._last = stream.record_event()
            return
        with self._native.RandomTurn(self._device, stream.cuda_stream) as mine:
            if not mine:
                raise CaptureError("generator-busy", "another capture or replay fills the generator's memory")
            yield

    def memory(self, driver: ModuleType) -> tuple[int, ...]:
        """The addresses of seed and offset, where nothing native tells them: read from a capture made for that."""
        return _probe(driver, self._device)


@functools.cache
def _keeper(device: int) -> Any:
    """A capture that draws. It is kept, as the generator gives its memory up with the last capture."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream(device)
    target = torch.empty(1, device=torch.device("cuda", device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        target.uniform_()
        graph.capture_end()
    return graph, target


def _probe(driver: ModuleType, device: int) -> tuple[int, ...]:
    graph, target = _keeper(device)
    found = handles(driver, graph.raw_cuda_graph())
    _, launches = read_nodes(driver, found, kinds_of(driver, found))
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    words = {word for launch in launches for word in launch.words if word >= 1 << 32 and word != target.data_ptr()}
    return tuple(sorted(word for word in words if int(driver.cuPointerGetAttribute(kind, word)[0]) == 0))
