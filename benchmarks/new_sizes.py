"""Costs of new sizes: of a capture, of many that are prepared, and of sizes or positions that come in turn.

    python benchmarks/new_sizes.py [--device cpu] [--tiny] [--only bert,position] [--seconds 300] [--out FILE]

    bert, gpt2, llama-decode, resnet50
               host time of a call that captures another size, in uncaptured calls of it
    prepared   35 batch sizes of a decode step of 1 B parameters: prepared, and captured by hand after one call of each
    position   a decode step whose position is a Python int, 1 to 128 in turn: Inductor's default over ours, by pass
    graphs     200 sizes of a graph for a GCN, each seen three times, in random order: Inductor's default over ours

All is measured in one process, with PyGraph's caches across processes off. What is compiled for the sizes is compiled
before, and told apart. Both sides take turns, pass by pass, and their results are compared. Rows with two sides are
measured in rounds while there is time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pygraph
from benchmarks import capture_cost, llama
from benchmarks.capture_cost import Arguments, assert_close, drain
from benchmarks.suite.gnn import Gcn
from benchmarks.suite.inference import made
from pygraph.runtime.native_build import waiting_for_builds

__all__ = ["ROWS", "graphs", "position", "prepared"]

BATCHES = (1, 2, 4, *range(8, 257, 8))
TINY_BATCHES = (1, 2, 4, 6, 8)
HALF = 1e-2
"""Tolerance of results, relative to their largest magnitude: half-precision sums may be in another order."""
SCATTERED = 1e-3
"""Tolerance of results: float32 sums have no fixed order."""

SHOWN = 400
"""Number of characters of a row that are printed; the file has all."""

Row = dict[str, Any]


def fresh() -> None:
    """Forget all compiled code and captures."""
    torch._dynamo.reset()
    pygraph.reset()
    gc.collect()


def compiled_by(backend: str, model: nn.Module, dynamic: bool | None) -> Callable[..., Any]:
    options = {"cache_dir": None} if backend == "pygraph" else None
    return torch.compile(model, backend=backend, options=options, dynamic=dynamic)


# -- many sizes up front -----------------------------------------------------------------------------------------------


class ByHand:
    """A graph for each size, captured as in serving frameworks: largest first, after one call, in one memory pool, with
    views of the largest arguments. On a CPU, a size is called a second time instead."""

    def __init__(self, step: Callable[..., Any], tokens: torch.Tensor, at: torch.Tensor) -> None:
        self.step, self.tokens, self.at = step, tokens.clone(), at.clone()
        self.graphs: dict[int, tuple[Any, Any]] = {}

    def capture(self, batches: Sequence[int]) -> None:
        """Capture all sizes."""
        pool = torch.cuda.graph_pool_handle() if self.tokens.is_cuda else None
        for batch in sorted(batches, reverse=True):
            tokens = self.tokens[:batch]
            self.step(tokens, self.at)
            if pool is None:
                self.step(tokens, self.at)
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = self.step(tokens, self.at)
            self.graphs[batch] = graph, result

    def __call__(self, tokens: torch.Tensor, at: torch.Tensor) -> Any:
        """Call a size. The next call overwrites the results."""
        batch = tokens.shape[0]
        self.tokens[:batch].copy_(tokens)
        self.at.copy_(at)
        if batch not in self.graphs:
            return self.step(self.tokens[:batch], self.at)
        graph, result = self.graphs[batch]
        graph.replay()
        return result


class Prepared:
    """Sizes captured by ``pygraph.prepare``."""

    def __init__(self, step: Callable[..., Any], tokens: torch.Tensor, at: torch.Tensor) -> None:
        self.step, self.tokens, self.at = step, tokens, at
        self.left: dict[str, str] = {}

    def capture(self, batches: Sequence[int]) -> None:
        """Capture all sizes."""
        done = pygraph.prepare(self.step, {(0, 0): batches}, args=(self.tokens, self.at), progress=False)
        self.left = {str(size): why for size, why in done.refused.items()}

    def __call__(self, tokens: torch.Tensor, at: torch.Tensor) -> Any:
        return self.step(tokens, at)


def memory(device: str) -> dict[str, int]:
    """Bytes in torch's allocator, and outside of it, after idle memory is freed."""
    if device != "cuda":
        return {"reserved": 0, "outside": 0}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return taken()


def taken() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {"reserved": reserved, "outside": total - free - reserved}


def prepared(device: str, tiny: bool, swapped: bool) -> Row:
    """Seconds, and bytes of memory once all sizes were served, of both sides; ratios of ours to those by hand.

    ``compile_s``: of the first calls of the two largest sizes and of 1, which compile. Both sides were compiled once
    before, which Inductor's caches keep. A pass of all sizes loads kernels of libraries, and makes the results that are
    expected.
    """
    batches = TINY_BATCHES if tiny else BATCHES
    model = made(lambda: llama.Llama(**(llama.TINY if tiny else llama.BILLION), batch=max(batches)), device)
    words = (llama.TINY if tiny else llama.BILLION)["words"]
    tokens, at = torch.randint(0, words, (max(batches),), device=device), torch.tensor([7], device=device)
    compiling = [*sorted(batches, reverse=True)[:2], *(batch for batch in batches if batch == 1)]
    expected: dict[int, Any] = {}
    found: Row = {"sizes": len(batches), "parameters": sum(each.numel() for each in model.parameters())}

    def compiled(backend: str) -> tuple[Callable[..., Any], float]:
        fresh()
        start = time.perf_counter()
        step = compiled_by(backend, model, dynamic=True)
        for batch in compiling:  # views would be a program of their own: Dynamo guards what they are views of
            step(tokens[:batch].clone(), at)
        drain(device)
        return step, time.perf_counter() - start

    with torch.no_grad():
        compiled("pygraph")
        step, _ = compiled("inductor")
        for batch in batches:
            expected[batch] = [result.cpu() for result in step(tokens[:batch], at)]
        sides = {"by hand": ("inductor", ByHand), "ours": ("pygraph", Prepared)}
        for side, (backend, make) in reversed(sides.items()) if swapped else sides.items():
            step, compile_s = compiled(backend)
            before = memory(device)
            start = time.perf_counter()
            serving = make(step, tokens, at)
            serving.capture(batches)
            drain(device)
            found[side] = {"seconds": time.perf_counter() - start, "compile_s": compile_s}
            memory(device)
            counts = counted()
            for batch in sorted(batches):
                assert_close([result.cpu() for result in serving(tokens[:batch], at)], expected[batch], HALF)
            drain(device)
            if device == "cuda":
                now = taken()
                found[side] |= {f"{part}_bytes": now[part] - before[part] for part in now}
                found[side]["bytes"] = sum(now.values()) - sum(before.values())
            if isinstance(serving, Prepared):
                replayed = counted()["replays"] - counts["replays"]
                found[side] |= {"captures": counts["captures"], "proven": counts["proven"], "replayed": replayed}
                found[side]["refused"] = serving.left
            del serving, step
    fresh()
    ours, theirs = found["ours"], found["by hand"]
    found["ratio"] = ours["seconds"] / theirs["seconds"]
    both = [side["seconds"] + side["compile_s"] for side in (ours, theirs)]
    found["ratio with compilation"] = both[0] / both[1]
    found["ratio of memory"] = ours["bytes"] / theirs["bytes"] if theirs.get("bytes") else None
    return found


# -- sizes and positions in turn ---------------------------------------------------------------------------------------


COUNTS = ("captures", "replays", "uncaptured", "evicted")
BLOCK = 16
"""Number of successive calls of one side."""


def passes(
    make: Callable[[], nn.Module],
    warm: Sequence[Arguments],
    each: Sequence[Sequence[Arguments]],
    device: str,
    *,
    dynamic: bool | None,
    tolerance: float,
    swapped: bool,
) -> Row:
    """Time of each pass, the calls with ``each`` of some arguments: of Inductor's default over ours.

    Blocks of calls take turns, and so does which side goes first: whichever meets a size first pays for what a process
    does once for it, such as memory that the allocator takes from the device.
    Calls with ``warm`` arguments compile, in turns: Dynamo's knowledge of what varies is of the code, not of a side.
    """
    fresh()
    steps = {backend: compiled_by(backend, make(), dynamic) for backend in ("inductor", "pygraph")}
    compile_s = dict.fromkeys(steps, 0.0)
    rows: list[Row] = []
    with torch.no_grad():
        for given in warm:
            for backend, step in steps.items():
                start = time.perf_counter()
                step(*given)
                compile_s[backend] += time.perf_counter() - start
        programs = len(pygraph.reports())
        for number, calls in enumerate(each):
            results: dict[str, list[Any]] = {backend: [] for backend in steps}
            seconds = dict.fromkeys(steps, 0.0)
            before = counted()
            for block, begin in enumerate(range(0, len(calls), BLOCK)):
                for backend in sorted(steps, reverse=((number + block) % 2 == 0) != swapped):
                    drain(device)
                    start = time.perf_counter()
                    results[backend] += [steps[backend](*given) for given in calls[begin : begin + BLOCK]]
                    drain(device)
                    seconds[backend] += time.perf_counter() - start
            assert_close(results["pygraph"], results["inductor"], tolerance)
            counts = {kind: now - before[kind] for kind, now in counted().items()}
            rows.append({"over default": seconds["inductor"] / seconds["pygraph"], **seconds, **counts})
    found: Row = {
        "calls": len(each[0]),
        "first pass": rows[0]["over default"],
        "third pass": rows[2]["over default"],
        "last pass": rows[-1]["over default"],
        "all": sum(row["inductor"] for row in rows) / sum(row["pygraph"] for row in rows),
        "compile_s": compile_s,
        "compiled later": len(pygraph.reports()) - programs,
        "passes": rows,
    }
    del steps, step
    fresh()
    return found


def counted() -> dict[str, int]:
    """Counters of this process, and the number of captures of proven kernels."""
    records = [region.record for report in pygraph.reports() for region in report.regions]
    proven = sum(record.proven for record in records if record is not None)
    return {**{kind: pygraph.counters().get(kind, 0) for kind in COUNTS}, "proven": proven}


def position(device: str, tiny: bool, swapped: bool) -> Row:
    """Four passes over positions 1 to 128 of 32 sequences, with attention over the written part of the cache."""
    sizes, batch, last = (llama.TINY, 2, 12) if tiny else (llama.SMALL, 32, 128)
    torch.manual_seed(1)
    tokens = torch.randint(0, sizes["words"], (last, batch), device=device)

    def at(number: int) -> Arguments:
        return tokens[number % last], number

    return passes(
        lambda: made(lambda: llama.Llama(**sizes, batch=batch), device),
        [at(1), at(last + 1), at(last + 2)],
        [[at(number) for number in range(1, last + 1)]] * 4,
        device,
        dynamic=None,
        tolerance=HALF,
        swapped=swapped,
    )


def graphs(device: str, tiny: bool, swapped: bool) -> Row:
    """Three passes over graphs with different numbers of nodes and edges, as from a loader of batches."""
    count, width, most = (8, 16, 40) if tiny else (200, 128, 3000)
    torch.manual_seed(1)
    drawn = random.Random(1)
    numbers = drawn.sample(range(most // 3, most), count + 3)
    given = [graph(nodes, drawn.randrange(4 * nodes, 8 * nodes), width, device) for nodes in numbers]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Gcn(width, 3, 16).to(device).eval()

    each = [drawn.sample(given[3:], count) for _ in range(3)]
    return passes(model, given[:3], each, device, dynamic=True, tolerance=SCATTERED, swapped=swapped)


def graph(nodes: int, edges: int, width: int, device: str) -> Arguments:
    """Features, edges and their weights."""
    both = torch.randint(0, nodes, (2, edges), device=device)
    degrees = torch.bincount(both.flatten(), minlength=nodes)
    return (
        torch.randn(nodes, width, device=device),
        both,
        (degrees[both[0]] * degrees[both[1]]).rsqrt(),
    )


# -- the table ---------------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[str, bool, bool], Row]] = {"prepared": prepared, "position": position, "graphs": graphs}
ROWS = (*SIDES, *capture_cost.PROGRAMS)
TABLE = (
    *((name, "host", "a call that captures another size, in uncaptured calls", 3.0) for name in capture_cost.PROGRAMS),
    ("prepared", "ratio", "35 sizes prepared, of the time to capture them by hand", 0.5),
    ("prepared", "ratio of memory", "memory of these, of that by hand", 0.5),
    ("position", "first pass", "position as a Python int, first pass, over default", 0.95),
    ("position", "third pass", "third pass", 1.5),
    ("graphs", "all", "200 sizes of a graph, each seen three times, over default", 1.0),
)
"""Row, figure, description, and target."""


def measure(only: Sequence[str], device: str, seconds: float, out: Path | None, *, tiny: bool) -> dict[str, list[Row]]:
    """Rounds of each row: all once, then rows with two sides again, while a further round fits in ``seconds``."""
    began = time.perf_counter()
    found: dict[str, list[Row]] = {}
    took: dict[str, float] = {}

    def add(name: str, measured: Callable[[], Row]) -> None:
        start = time.perf_counter()
        try:
            row = measured()
        except Exception as error:  # noqa: BLE001 - the other rows are still measured
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        took[name] = time.perf_counter() - start
        found.setdefault(name, []).append(row)
        print(f"{took[name]:6.1f} s  {name}: {json.dumps(row, default=str)[:SHOWN]}", flush=True)
        if out is not None:
            about = {"torch": torch.__version__, "device": name_of(device), "tiny": tiny}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n", encoding="utf-8")

    for name in [name for name in ROWS if name in only]:
        if name in SIDES:
            add(name, lambda name=name: SIDES[name](device, tiny, False))
        else:
            add(name, lambda name=name: capture_cost.cost_of(capture_cost.PROGRAMS[name], device, tiny=tiny))
    again = [name for name in SIDES if name in only and "error" not in found[name][0]]
    while again:
        again = [name for name in again if time.perf_counter() - began + took[name] < seconds]
        for name in again:
            if time.perf_counter() - began + took[name] < seconds:
                add(name, lambda name=name: SIDES[name](device, tiny, len(found[name]) % 2 == 1))
    return found


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def table(found: dict[str, list[Row]]) -> list[str]:
    """Medians of the rounds, their ranges, and the targets."""
    lines = [f"{'row':14} {'median':>8} {'range':>15} {'aim':>5}  "]
    for name, key, about, aim in TABLE:
        if name not in found:
            continue
        rounds = found[name]
        figures = [each[key] for each in rounds if each.get(key) is not None]
        if not figures:
            lines.append(f"{name:14} {rounds[0].get('error', 'not measured')}: {about}")
            continue
        spread = f"{min(figures):.2f}–{max(figures):.2f}"
        more = f" ({rounds[0]['proven']} proven, {rounds[0]['compared']} compared)" if "proven" in rounds[0] else ""
        lines.append(f"{name:14} {statistics.median(figures):8.2f} {spread:>15} {aim:5.2f}  {about}{more}")
    return lines


def main() -> None:
    """Measure, print a table, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same programs, so small that a CPU runs them")
    parser.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    parser.add_argument("--seconds", type=float, default=300, help="no further round is begun that ends later")
    parser.add_argument("--out", type=Path, help="write all figures as JSON, after each row")
    chosen = parser.parse_args()
    only = chosen.only.split(",")
    if unknown := set(only) - set(ROWS):
        parser.error(f"no such rows: {', '.join(sorted(unknown))}")
    with waiting_for_builds():
        found = measure(only, chosen.device, chosen.seconds, chosen.out, tiny=chosen.tiny)
    print("\n".join(table(found)))
    if any("error" in row for rounds in found.values() for row in rounds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
