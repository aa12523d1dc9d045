"""Time of one call: Inductor's own wrapper against a replay by the host driver, for small perceptrons.

Run ``python benchmarks/host_replay.py``. Prints µs per call (median over blocks that alternate) and the ratio; a ratio
above 1 means that the replay is faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable
from tests.runtime.regions import compile_regions

BLOCKS = 40
CALLS = 200


def perceptron(layers: int, width: int) -> torch.nn.Module:
    """``layers`` linear layers with a rectifier and a normalisation after each."""
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*parts)


def block(call: Callable[[], Any]) -> float:
    """µs per call over one block."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def compare(layers: int, width: int, batch: int) -> tuple[float, float]:
    """Median µs per call of the wrapper and of the replay."""
    compiled = compile_regions(perceptron(layers, width))
    compiled.call(torch.randn(batch, width))
    (region,) = compiled.regions
    executable, _ = make_executable(HostDriver(), region)
    args = region.args
    pairs = [(block(lambda: region.fn(list(args))), block(lambda: executable.replay(args))) for _ in range(BLOCKS)]
    wrapper, replay = zip(*pairs, strict=True)
    return statistics.median(wrapper), statistics.median(replay)


def main() -> None:
    """Print one line for each size."""
    torch.set_num_threads(1)
    print(f"{'layers':>6} {'width':>6} {'batch':>6} {'wrapper µs':>11} {'replay µs':>10} {'ratio':>6}")
    for layers, width, batch in [(1, 16, 4), (2, 32, 8), (4, 32, 8), (4, 128, 16), (8, 256, 32)]:
        wrapper, replay = compare(layers, width, batch)
        print(f"{layers:>6} {width:>6} {batch:>6} {wrapper:>11.1f} {replay:>10.1f} {wrapper / replay:>6.2f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
