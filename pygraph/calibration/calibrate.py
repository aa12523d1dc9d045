"""Measures a device model: everything is prepared first, then rounds go over all samples, and medians are taken.

A sample is the fastest of a few blocks of calls, since whatever else runs can only add to it; a round goes over all
samples, so that clocks and neighbours that change meet all alike.
"""

from __future__ import annotations

import datetime
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from pygraph import compat
from pygraph.calibration.store import identity_of
from pygraph.errors import CaptureError
from pygraph.ir import DeviceModel
from pygraph.runtime.contract import Driver, make_driver
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.runtime.region import Region

Sampler = Callable[[], float]
"""One measurement, µs per call."""
Function = Callable[[list[Any]], Sequence[Any]]
"""With the convention of regions: the list of arguments is emptied."""

COUNTS = (8, 32, 128)
"""Launches of the programs whose calls are timed."""
_ROUNDS, _BLOCKS, _BLOCK_S, _MOST_CALLS = 9, 3, 0.001, 2000
"""Rounds of all samples, blocks of each sample, and how long a block is in seconds and calls."""
_ELEMENTS = 16
_SLOW_US = 250.0
"""Matrices grow until a product takes as long."""
_QUEUE = 512
"""Launches in a row that a CUDA queue holds without making the host wait. A replay counts as 16 at least."""
_GRAPH_US, _MOST_COPIES = 1000.0, 128
"""Device time that a graph for timing holds, or that many operators: its launch is then no large part."""


def calibrate(kind: str, step: Callable[[str], None] = lambda _: None) -> DeviceModel:
    """Measure the CPU (``cpu``) or the current CUDA device (``cuda``) in seconds; nothing else should run meanwhile.

    ``step`` is told what is under way. Raises CaptureError where the device cannot be captured on, and ValueError where
    the times make no sense, as on a busy machine.
    """
    step("getting ready")
    with torch.no_grad(), ExitStack() as stack:
        samplers = dict(_calls(kind, stack))
        nbytes = 1 << 26 if kind == "cpu" else min(1 << 28, torch.cuda.mem_get_info()[1] // 64)
        for name, size in (("small kernel", 4 * _ELEMENTS), ("large kernel", nbytes)):
            source = torch.ones(size // 4, device=kind)
            samplers[name] = _device(partial(torch.neg, source, out=torch.empty_like(source)), kind)
        flops: dict[str, float] = {}
        before = torch.get_float32_matmul_precision()
        stack.callback(torch.set_float32_matmul_precision, before)
        for name, dtype, precision in _products(kind):
            torch.set_float32_matmul_precision(precision)
            flops[name], samplers[name] = _product(kind, dtype)
        torch.set_float32_matmul_precision(before)
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for number in range(_ROUNDS):
            step(f"round {number + 1} of {_ROUNDS}")
            for name, sampler in samplers.items():
                samples[name].append(min(sampler() for _ in range(_BLOCKS)))
    if kind == "cuda":
        torch.cuda.empty_cache()
    return _model(kind, samples, flops, nbytes)


def _model(kind: str, samples: dict[str, list[float]], flops: dict[str, float], nbytes: int) -> DeviceModel:
    """The medians over rounds. Lines are fitted within each round, since machines are busier in some than in others."""
    uncaptured, replayed, moved = (
        [
            statistics.linear_regression(COUNTS, times)
            for times in zip(*(samples[f"{what} {count}"] for count in COUNTS), strict=True)
        ]
        for what in ("uncaptured", "replayed", "moved")
    )
    launch_us = statistics.median(line.slope for line in uncaptured)
    us = {name: statistics.median(times) for name, times in samples.items()}
    kernel = us["small kernel"]
    peaks = {name: work / (us[name] - kernel) / 1e3 for name, work in flops.items() if us[name] > kernel}
    traffic_us = us["large kernel"] - kernel
    if launch_us <= 0.0 or traffic_us <= 0.0 or len(peaks) < len(flops):
        raise ValueError("large programs take no longer than small ones")
    return DeviceModel(
        name=identity_of(kind).device,
        bandwidth_gbs=2 * nbytes / traffic_us / 1e3,
        peak_gflops=next(iter(peaks.values())),
        launch_us=launch_us,
        replay_us=max(statistics.median(line.intercept for line in replayed), 0.0),
        node_us=max(statistics.median(line.slope for line in replayed), 0.0),
        patch_us=max(statistics.median(m.slope - r.slope for m, r in zip(moved, replayed, strict=True)), 0.0),
        kernel_us=kernel,
        peaks=peaks,
        source=f"calibrated {datetime.date.today().isoformat()}",
    )


# -- calls -------------------------------------------------------------------------------------------------------------


def _calls(kind: str, stack: ExitStack) -> Iterator[tuple[str, Sampler]]:
    """Host time of calls: uncaptured, replayed where they were, and replayed with every argument moved."""
    fn, driver = (_emitted(stack) if kind == "cpu" else _negations), make_driver(kind)
    if driver is None:
        raise CaptureError("no-device", f"nothing can be captured on {kind.upper()} here")
    for count in COUNTS:
        args, others = ([torch.ones(_ELEMENTS, device=kind) for _ in range(count)] for _ in range(2))
        region = _captured(fn, args, driver, stack)
        yield f"uncaptured {count}", _host(partial(_call, fn, args), kind, count)
        yield f"replayed {count}", _host(partial(_call, region, args), kind, 16)
        yield f"moved {count}", _host(partial(_call, region, args, others), kind, 32, per=2)


def _captured(fn: Function, args: Sequence[Any], driver: Driver, stack: ExitStack) -> Region:
    """A region that replays ``fn``. Raises CaptureError with the reason where it does not."""
    region = Region(fn, driver, name="calibration")
    stack.callback(region.close)
    with waiting_for_builds():
        for _ in range(3):
            region(list(args))
    if region.record.state != "replay":
        raise CaptureError(region.record.reason or "calibration", "the small programs cannot be captured")
    return region


def _call(fn: Function, *each: Sequence[Any]) -> None:
    for args in each:
        fn(list(args))


def _negations(args: list[Any]) -> tuple[Any, ...]:
    """A kernel for each argument, its result allocated as in a compiled program; the last result is kept."""
    values = list(args)
    args.clear()
    for value in values:
        result = torch.neg(value)
    return (result,)


_EMITTED = f'''
from torch import float32
from pygraph.compat import AsyncCompile, dynamo_guards
empty_strided_cpu = dynamo_guards._empty_strided_cpu
async_compile = AsyncCompile()
negate = async_compile.cpp_pybinding(["const float*", "float*"], """
extern "C" void kernel(const float* in, float* out) {{ for (int i = 0; i < {_ELEMENTS}; ++i) out[i] = -in[i]; }}
""")
async_compile.wait(globals())

def negations(args):
    values = list(args)
    args.clear()
    for value in values:
        result = empty_strided_cpu(({_ELEMENTS},), (1,), float32)
        negate(value, result)
    return (result,)
'''


def _emitted(stack: ExitStack) -> Function:
    """The same for a CPU, as Inductor emits programs there: the host driver reads the kernel's parameters from it."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pygraph-calibration-"))) / "program.py"
    path.write_text(_EMITTED, encoding="utf-8")
    with compat.inductor_config.patch(compile_threads=1):  # a pool of compiling processes takes longer to start
        return cast(Function, runpy.run_path(str(path), run_name="pygraph_calibration")["negations"])


# -- memory and arithmetic ---------------------------------------------------------------------------------------------


def _products(kind: str) -> Sequence[tuple[str, torch.dtype, str]]:
    """Kinds of matrix products: name of the peak, element type, precision of float32. The general one first."""
    half, full = ("f16", torch.float16, "highest"), ("f32", torch.float32, "highest")
    bf16 = ("bf16", torch.bfloat16, "highest")
    if kind == "cpu":
        return full, bf16, half
    general = [bf16] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    tf32 = [("tf32", torch.float32, "high")] if torch.cuda.get_device_capability() >= (8, 0) else []
    return [*general, half, full, *tf32]


def _product(kind: str, dtype: torch.dtype) -> tuple[float, Sampler]:
    """Operations of a large square product, and its time. Operands differ from element to element: a GPU multiplies
    equal ones some ten percent faster."""
    side = 64
    while True:
        left, right = ((torch.rand(side, side, device=kind) - 0.5).to(dtype) for _ in range(2))
        sampler = _device(partial(torch.mm, left, right, out=torch.empty_like(left)), kind)
        if min(sampler() for _ in range(3)) > _SLOW_US or side >= 8192:
            return 2.0 * side**3, sampler
        side *= 2


# -- clocks ------------------------------------------------------------------------------------------------------------


def _host(call: Callable[[], object], kind: str, launches: int, per: int = 1) -> Sampler:
    """Time until calls return, ``per`` of them in each; so few in a row that no queue makes them wait."""

    def seconds(calls: int) -> float:
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    seconds(1)
    calls = _fill(seconds(1), _QUEUE // launches if kind == "cuda" else _MOST_CALLS)
    return lambda: seconds(calls) / (calls * per) * 1e6


def _device(operator: Callable[[], object], kind: str) -> Sampler:
    """Device time of ``operator``: on CUDA, between two events around replays of a graph that holds it many times."""
    if kind == "cpu":
        return _host(operator, kind, 1)
    for _ in range(2):
        operator()
    copies = max(2, min(_MOST_COPIES, round(_GRAPH_US / max(1.0, _between(operator, 1)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            operator()
    replays = _fill(_between(graph.replay, 1) * 1e-6, 32)

    def sample(holding: Callable[[], object] = operator) -> float:  # noqa: ARG001 - the graph reads its tensors
        return _between(graph.replay, replays) / (copies * replays)

    return sample


def _fill(one: float, most: int) -> int:
    """How many calls of ``one`` second each fill a block: at least one."""
    return max(1, min(most, round(_BLOCK_S / max(one, 1e-7))))


def _between(work: Callable[[], object], times: int) -> float:
    """Device time of what ``times`` calls of ``work`` launch, µs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
