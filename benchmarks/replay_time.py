"""GPU time of a replay, against a graph whose addresses were never replaced, and against other orders of launches.

    python benchmarks/replay_time.py [--out FILE]

Each row is the ratio of two graphs of the same launches, measured in turns in this process; the smallest of the rounds
counts on both sides.

    patched       a chain of small kernels replayed by PyGraph / torch's own graph of it    about 1
    branches      branches on four streams replayed by PyGraph / torch's own graph of them  about 1
    side by side  independent chains ordered by dependence / in the program's order         well below 1
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda import CudaDriver
from pygraph.runtime.discover import Captured, capture

__all__ = ["measure"]

ROUNDS, CALLS = 15, 20
CHAINS, STEPS = 4, 40
SLEEP = 2_000_000
"""Cycles of a kernel that takes about a millisecond."""

Function = Callable[[list[Any]], Sequence[torch.Tensor]]


def chain(args: list[Any]) -> Sequence[torch.Tensor]:
    x = args[0]
    for _ in range(300):
        x = x.sin()
    return (x,)


def chains(args: list[Any]) -> Sequence[torch.Tensor]:
    made = []
    for number in range(CHAINS):
        y = args[0] * (number + 1)
        for _ in range(STEPS):
            y = y.sin()
        made.append(y)
    return (torch.cat(made),)


def branches(args: list[Any]) -> Sequence[torch.Tensor]:
    x, made = args[0], []
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(CHAINS)]
    for stream in streams:
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            made.append(x + 1)
    for stream in streams:
        main.wait_stream(stream)
    return (torch.cat(made),)


def replayed(driver: Driver, fn: Function, args: list[Any], order: str = "program") -> Callable[[], object]:
    """A call that replays ``fn``, captured in the same way as a region."""
    made = capture(fn, driver, list(args), order=order)
    assert isinstance(made, Captured), made
    return lambda: made.executable.replay(list(args))


def plain(fn: Function, args: list[Any]) -> Callable[[], object]:
    """A call that replays torch's own graph of ``fn``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = fn(list(args))
    return lambda: (graph.replay(), kept)


def microseconds(call: Callable[[], object]) -> float:
    """GPU time of one call, µs, as the mean of a block of calls."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS * 1e3


def measure() -> dict[str, dict[str, float]]:
    """For each row, the time of a call of both graphs, µs, and their ratio."""
    driver, args = CudaDriver(), [torch.randn(64, 64, device="cuda")]
    for fn in (chain, chains, branches):
        fn(list(args))
    torch.cuda.synchronize()
    pairs = {
        "patched": (replayed(driver, chain, args), plain(chain, args)),
        "side by side": (replayed(driver, chains, args, "dependences"), replayed(driver, chains, args)),
        "branches": (replayed(driver, branches, args), plain(branches, args)),
    }  # the last one forks onto streams: that makes later kernels of a process slower
    rows = {}
    for name, pair in pairs.items():
        rounds = [[microseconds(call) for call in pair] for _ in range(ROUNDS)]
        ours, theirs = (min(times) for times in zip(*rounds, strict=True))
        rows[name] = {"us": round(ours, 1), "against_us": round(theirs, 1), "ratio": round(ours / theirs, 3)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    text = json.dumps(measure(), indent=1)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
