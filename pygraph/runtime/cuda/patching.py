"""The nodes of an instantiated graph whose parameters are patched, in Python: each holds what it was last set to.

Which of their words are addresses, and of what, is the caller's to know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.bindings import call
from pygraph.runtime.cuda.nodes import CopyNode, FillNode, KernelNode, Node

__all__ = ["PatchedCopy", "PatchedFill", "PatchedKernel", "patchable"]


def patchable(driver: Any, node: Node, handle: int) -> PatchedKernel | PatchedCopy | PatchedFill:
    """Node ``handle`` with the parameters that were captured in ``node``, ready for addresses to be written into."""
    if isinstance(node, KernelNode):
        return PatchedKernel(driver, handle, node.blob, node.layout)
    if isinstance(node, CopyNode):
        return PatchedCopy(driver, handle)
    if isinstance(node, FillNode):
        return PatchedFill(driver, handle)
    raise CaptureError("invalid-program", "a node without parameters")


class PatchedKernel:
    """A kernel node and what it was last set to."""

    def __init__(self, driver: Any, handle: int, blob: bytes, layout: Sequence[tuple[int, int]]) -> None:
        self._driver, self._node = driver, driver.CUgraphNode(handle)
        self._blob = (ctypes.c_char * len(blob)).from_buffer_copy(blob)
        start = ctypes.addressof(self._blob)
        self._pointers = (ctypes.c_void_p * len(layout))(*(start + offset for offset, _ in layout))
        read = call(driver.cuGraphKernelNodeGetParams, self._node)
        self._params = driver.CUDA_KERNEL_NODE_PARAMS()
        for name in ("func", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ"):
            setattr(self._params, name, getattr(read, name))
        for name in ("sharedMemBytes", "kern", "ctx"):
            setattr(self._params, name, getattr(read, name))
        self._params.kernelParams = ctypes.addressof(self._pointers)

    def write(self, place: int, address: int) -> None:
        """Put ``address`` at byte ``place`` of the parameters."""
        ctypes.c_uint64.from_buffer(self._blob, place).value = address

    def apply(self, graph: Any) -> Any:
        """Hand the parameters to the instantiated graph."""
        return self._driver.cuGraphExecKernelNodeSetParams(graph, self._node, self._params)


class PatchedCopy:
    """A copy node and what it was last set to."""

    def __init__(self, driver: Any, handle: int) -> None:
        self._driver, self._node = driver, driver.CUgraphNode(handle)
        self._params = call(driver.cuGraphMemcpyNodeGetParams, self._node)
        self._context = call(driver.cuCtxGetCurrent)
        self.write(0, int(self._params.dstDevice) + int(self._params.dstXInBytes))
        self.write(1, int(self._params.srcDevice) + int(self._params.srcXInBytes))
        self._params.dstXInBytes = self._params.srcXInBytes = 0

    def write(self, place: int, address: int) -> None:
        """Operand 0 is the destination, 1 the source."""
        setattr(self._params, "srcDevice" if place else "dstDevice", self._driver.CUdeviceptr(address))

    def apply(self, graph: Any) -> Any:
        """Hand the operands to the instantiated graph."""
        return self._driver.cuGraphExecMemcpyNodeSetParams(graph, self._node, self._params, self._context)


class PatchedFill:
    """A fill node and what it was last set to."""

    def __init__(self, driver: Any, handle: int) -> None:
        self._driver, self._node = driver, driver.CUgraphNode(handle)
        self._params = call(driver.cuGraphMemsetNodeGetParams, self._node)
        self._context = call(driver.cuCtxGetCurrent)

    def write(self, place: int, address: int) -> None:  # noqa: ARG002
        """Set the destination."""
        self._params.dst = self._driver.CUdeviceptr(address)

    def apply(self, graph: Any) -> Any:
        """Hand the destination to the instantiated graph."""
        return self._driver.cuGraphExecMemsetNodeSetParams(graph, self._node, self._params, self._context)
