"""The CUDA driver: captures regions of Inductor's CUDA programs as graphs, and replays them with moved addresses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from pygraph.compat import clear_cublas_workspaces
from pygraph.errors import CaptureError
from pygraph.program.program import Program
from pygraph.program.recording import Recording
from pygraph.runtime.contract import Executable, NativeDriver, ScratchPool, Timer
from pygraph.runtime.cuda import bindings, build
from pygraph.runtime.cuda.capture import DeviceCapture, check_arguments, payload_of
from pygraph.runtime.cuda.executable import make_executable
from pygraph.runtime.cuda.nested import make_nested
from pygraph.runtime.cuda.spans import run_inside
from pygraph.runtime.provenance import Refusal

__all__ = ["CudaDriver"]

_REGISTER = "NCCL_GRAPH_REGISTER"
"""Unless this is 0, NCCL may give captured addresses to other ranks, where replays could not change them."""


class CudaDriver(NativeDriver):
    """``Driver`` for regions on CUDA devices. Raises CaptureError (``bindings-unavailable``, ``no-device``). Methods
    that need the native half wait for its build, and raise CaptureError (``native-unavailable``) if that fails."""

    parallel, build = True, build

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise CaptureError("no-device", "torch sees no CUDA device")
        self._driver: ModuleType = bindings.load()
        self._devices: dict[int, DeviceCapture] = {}

    def no_collectives(self) -> Refusal | None:
        if os.environ.get(_REGISTER) == "0":
            return None
        return Refusal("collective", f"to have them captured, set {_REGISTER}=0 before NCCL starts")

    def capture(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        eager: Collection[str] = (),
        *,
        collectives: bool = False,
    ) -> Recording:
        """Record ``fn``. The payload is a CudaCapture; dropping it releases the address space."""
        return self._device(check_arguments(args)).capture(fn, args, eager, collectives=collectives)

    def run_inside(self, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = run_inside(fn, args)
        return outputs

    def instantiate(self, program: Program) -> Executable:
        """Make ``program`` ready for replay, at most once for each recording. The executable outlives the recording."""
        payload = payload_of(program.recording)
        nested = any(launch.bodies for launch in program.recording.launches)
        make = make_nested if nested else make_executable
        return make(self._device(payload.device), program, payload)

    def generator(self, program: Program) -> torch.Generator | None:
        """The default generator of the region's device, if its capture advanced it, or eager calls may do so.
        Operators that draw from the CPU's generator are not captured."""
        payload = payload_of(program.recording)
        draws = payload.random or any(launch.random for launch in program.calls)
        return torch.cuda.default_generators[payload.device] if draws else None

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Exchange the state under the generator's own lock."""
        before: torch.Tensor = self._native.exchange_state(generator, to, expected)
        return before

    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def memory_limit(self, device: torch.device) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory) // 10

    def spare_bytes(self) -> int:
        """Half of the free memory, on the device and in torch's cache."""
        free, _ = torch.cuda.mem_get_info()
        return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) // 2

    def synchronise(self, device: torch.device | None) -> bool:
        """Waits only for the current stream: waiting for a whole device breaks captures of other threads."""
        stream = torch.cuda.current_stream(device)
        with torch.cuda.device(stream.device):
            if torch.cuda.is_current_stream_capturing():
                return False
        stream.synchronize()
        return True

    def timer(self, device: torch.device | None) -> Timer | None:
        stream = torch.cuda.current_stream(device)
        with torch.cuda.device(stream.device):
            return None if torch.cuda.is_current_stream_capturing() else _Timer(self._driver, stream)

    @contextlib.contextmanager
    def scratch_pool(self, args: Sequence[Any]) -> Iterator[ScratchPool]:
        """A private pool of torch's allocator; ordinary memory if the allocator in use has no such pools, or while the
        caller's own stream is being captured."""
        devices = [arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cuda"]
        device = devices[0] if devices else torch.cuda.current_device()
        if torch.cuda.is_current_stream_capturing():
            yield contextlib.nullcontext
            return
        pool = self._pool_on(device)
        try:
            yield contextlib.nullcontext if pool is None else (lambda: pool)
        finally:
            _give_back(pool, device)

    def _pool_on(self, device: int) -> Any:
        try:
            return self._native.ScratchPool(device)
        except RuntimeError:  # the allocator in use (asynchronous, or pluggable) has no private pools
            return None

    def _device(self, device: int) -> DeviceCapture:
        known = self._devices.get(device)  # if two threads make one at once, both use the first
        return known or self._devices.setdefault(device, DeviceCapture(self._driver, self._native, device))


class _Timer:
    """Two events on a stream."""

    def __init__(self, driver: ModuleType, stream: torch.cuda.Stream) -> None:
        self._driver, self._stream = driver, stream
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def seconds(self) -> float | None:
        with self._relaxed():
            return self._begin.elapsed_time(self._end) * 1e-3 if self._end.query() else None

    def since(self, earlier: _Timer) -> float:
        with self._relaxed():
            return float(earlier._begin.elapsed_time(self._begin)) * 1e-3

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Relaxed capture mode, in which queries do not break captures of other threads."""
        exchange, relaxed = self._driver.cuThreadExchangeStreamCaptureMode, self._driver.CUstreamCaptureMode
        before = bindings.call(exchange, relaxed.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            bindings.call(exchange, before)


def _give_back(pool: Any, device: int) -> None:
    """Clear the workspaces of libraries, and close ``pool``, if there is one, which empties the ordinary pool as well.

    Work that uses the workspaces may still be running: they were allocated on its stream, and torch gives their memory
    only to later work on that stream. Uncaptured calls make new ones; a program that consists of replays holds only
    the workspaces that its regions borrow.
    """
    clear_cublas_workspaces()
    if pool is not None:
        with torch.cuda.device(device):
            pool.close()
