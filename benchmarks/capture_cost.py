"""What the call that captures costs, against an uncaptured call and a replay of the same size: for dynamic shapes.

    python benchmarks/capture_cost.py [--device cpu] [--out FILE]

Everything is measured in one process, which PyGraph compiles; a new size is captured once where the slots of the
first one explain it. Nothing here is compared with other compilers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import pygraph
from pygraph.backend import driver_for
from pygraph.backend import pygraph as backend
from pygraph.runtime import life
from pygraph.runtime.native_build import waiting_for_builds

__all__ = ["PROGRAMS", "SIZES", "Meter", "cost_of"]

DEVICE = "cuda"
SIZES = tuple(range(16, 656, 16))
OPTIONS = {"capture_after": 3}
CALLS_OF_A_SIZE = 5
"""Two that run uncaptured, one that captures, two that are replayed."""

Sized = Callable[[int], Any]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def perceptron() -> Sized:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return _sized(nn.Sequential(*layers), lambda size: (size, 512), dim=0)


def transformer() -> Sized:
    return _sized(nn.Sequential(Block(256, 4), Block(256, 4)), lambda size: (4, size, 256), dim=1)


def _sized(model: nn.Module, shape: Callable[[int], tuple[int, ...]], dim: int) -> Sized:
    dtype = torch.float32 if DEVICE == "cpu" else torch.float16
    model = model.to(DEVICE, dtype).eval()
    step = torch.compile(model, backend=backend, options=OPTIONS)

    def run(size: int) -> Any:
        x = torch.ones(shape(size), device=DEVICE, dtype=dtype)
        torch._dynamo.mark_dynamic(x, dim)
        with torch.no_grad():
            return step(x)

    return run


PROGRAMS: dict[str, Callable[[], Sized]] = {"mlp-4": perceptron, "transformer-2": transformer}


@dataclass
class Meter:
    """Seconds spent in, and calls of, the parts of a capture since it was last emptied."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def empty(self) -> None:
        """Start anew."""
        self.seconds.clear()
        self.calls.clear()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
                self.calls[part] = self.calls.get(part, 0) + 1

        return run


@contextlib.contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Have ``meter`` time captures, instantiations and comparisons (which hold the uncaptured run of the call)."""
    driver = driver_for(DEVICE)
    if driver is None:
        raise RuntimeError(f"no driver captures on {DEVICE}")
    with (
        mock.patch.object(driver, "capture", meter.timed("capture", driver.capture)),
        mock.patch.object(driver, "instantiate", meter.timed("instantiate", driver.instantiate)),
        mock.patch.object(life, "compare", meter.timed("comparison", life.compare)),
    ):
        yield


def cost_of(build: Callable[[], Sized], sizes: Sequence[int]) -> dict[str, Any]:
    """Medians of host and wall time in µs per kind of call, of the parts of a capture, and ratios to uncaptured."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    pygraph.reset()
    step, meter = build(), Meter()
    step(sizes[0])
    _drain()
    rows: dict[str, list[dict[str, float]]] = {}
    with metered(meter):
        for size in sizes:
            for _ in range(CALLS_OF_A_SIZE):
                meter.empty()
                before = _counts()
                times = _timed(lambda size=size: step(size))
                rows.setdefault(_kind(before, _counts(), meter), []).append({**times, **_parts(meter)})
    return _summary(rows)


def _timed(call: Callable[[], Any]) -> dict[str, float]:
    _drain()
    start = time.perf_counter()
    call()
    issued = time.perf_counter()
    _drain()
    return {"host_us": (issued - start) * 1e6, "wall_us": (time.perf_counter() - start) * 1e6}


def _drain() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _counts() -> tuple[int, int]:
    """Captures and replays of all regions so far."""
    records = [region.record for report in pygraph.reports() for region in report.regions]
    known = [record for record in records if record is not None]
    return sum(record.captures for record in known), sum(record.replays for record in known)


def _kind(before: tuple[int, int], after: tuple[int, int], meter: Meter) -> str:
    captures, replays = (now - then for now, then in zip(after, before, strict=True))
    if captures:
        return "captured" if meter.calls.get("capture", 0) <= captures else "captured twice"
    if meter.calls.get("capture", 0):
        return "refused"
    return "replayed" if replays else "uncaptured"


def _parts(meter: Meter) -> dict[str, float]:
    return {f"{part}_us": seconds * 1e6 for part, seconds in meter.seconds.items()}


def _summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    medians: dict[str, dict[str, float]] = {}
    for kind, calls in rows.items():
        keys = dict.fromkeys(key for call in calls for key in call)
        medians[kind] = {key: round(statistics.median(call.get(key, 0.0) for call in calls), 2) for key in keys}
        medians[kind]["calls"] = len(calls)
    plain = medians.get("uncaptured", {})
    found: dict[str, Any] = {"medians": medians, "ratios": {}}
    for kind in ("captured", "captured twice", "replayed"):
        for key in ("host_us", "wall_us"):
            if kind in medians and plain.get(key):
                found["ratios"][f"{key} {kind}"] = round(medians[kind][key] / plain[key], 3)
        if medians.get(kind, {}).get("comparison_us"):
            share = medians[kind]["comparison_us"] / medians[kind]["wall_us"]
            found["ratios"][f"comparison of {kind}"] = round(share, 3)
    return found


def main() -> None:
    """Print, for each program, medians in µs by what became of the call, and their ratios to uncaptured calls."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--out", type=Path, help="write what is printed as JSON")
    chosen = parser.parse_args()
    DEVICE = chosen.device
    found = {name: cost_of(build, SIZES) for name, build in PROGRAMS.items()}
    for name, figures in found.items():
        print(name, json.dumps(figures, indent=1))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps({"torch": torch.__version__, "device": DEVICE, "programs": found}, indent=1))


if __name__ == "__main__":
    with waiting_for_builds():
        main()
