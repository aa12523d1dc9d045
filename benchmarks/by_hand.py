"""``pygraph.graph`` against ``torch.cuda.graph`` by hand: time, host time, memory, and weights that are replaced.

    python benchmarks/by_hand.py [--device cuda] [--seconds 240] [--out FILE] [--only NAME …] [--tiny] [--rounds 15]

    decode … two-streams   eight callables: time of a call by hand over ours, its median over rounds of blocks
    held-300               a chain of linear layers, whose host time shows
    refused                a step that reads a number on the host, over eager
    pieces, pieces-small   pieces of a Llama of 16 layers between attention operators, by vLLM's interface of wrappers;
                           by hand as its ``CUDAGraphWrapper`` does: static buffers, one pool
    changes                µs that a call takes longer after weights, adapter or cache were replaced, and results
    forecast               memory of sizes of ten models, told by three others, and what is then taken
    sizes                  35 batch sizes of a decode step: seconds to capture them, and bytes that they take

Each side has a process of its own, and blocks of both take turns. By hand, arguments are copied into static buffers,
and results stay in one; ours takes and returns new tensors. On a CPU, the side by hand is eager: it shows that all
works. A row that fails says so, and the others are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pygraph
from benchmarks import llama, new_sizes
from benchmarks.callables import EIGHT, MIDDLE, SIZED, TIMED, layers
from benchmarks.capture_cost import assert_close, drain
from benchmarks.suite.inference import floating, made
from pygraph.compat import tree_leaves
from pygraph.runtime.native_build import waiting_for_builds

__all__ = ["OURS", "ROWS", "THEIRS", "Side", "measure"]

OURS, THEIRS = "ours", "by hand"
WARM = 24
"""Untimed calls, in which the last orders of launches are tried."""
BLOCK_S = 0.04
"""Approximate length of a block of calls, s."""
HOST = 16
"""Number of calls of a block whose host time counts: later ones may wait for the device."""
TOLERANCE = 1e-2
"""Tolerance, relative to the largest magnitude: half-precision and scatter sums may be in another order."""
KINDS = ("call", "host")
CHANGES = 200
LONGEST_S = 90.0
"""Time limit of a row, s."""

Row: TypeAlias = dict[str, Any]


class ByHand:
    """A callable that runs on a side stream three times, is captured, then replayed, as in torch's documentation."""

    def __init__(self, function: Callable[..., Any], pool: Any = None) -> None:
        self.function, self.pool, self.calls = function, pool, 0
        self.stream = torch.cuda.Stream()

    def __call__(self, *args: torch.Tensor) -> Any:
        """Call it. The next call overwrites the results."""
        self.calls += 1
        if self.calls <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = self.function(*args)
            torch.cuda.current_stream().wait_stream(self.stream)
            return result
        if self.calls == 4:
            self.static = [arg.clone() for arg in args]
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.pool):
                self.result = self.function(*self.static)
        for static, arg in zip(self.static, args, strict=True):
            static.copy_(arg)
        self.graph.replay()
        return self.result


# -- replaced memory, and many sizes -----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Layers with an adapter, and a cache of their results, which is in a plain object, not in a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = layers(width)
        self.adapter: nn.Module = self.lora(width)
        self.cache = torch.zeros(16, width)

    @staticmethod
    def lora(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x) + self.adapter(x)
        self.cache.index_copy_(0, at, y[:1])
        result: torch.Tensor = y + self.cache.sum(0)
        return result


def drawn(like: torch.Tensor) -> torch.Tensor:
    """Weights that preserve the magnitude of activations."""
    return torch.randn_like(like) / like.shape[-1] ** 0.5


def changes(side: Side) -> Row:
    """PyGraph only: µs of a call after each kind of change, and without a change; wrong results, and captures."""
    width = 16 if side.tiny else 1024
    model: Any = made(lambda: Adapted(width), side.device)
    model.cache = side.random(16, width)
    adapters = [made(lambda: Adapted.lora(width), side.device) for _ in range(2)]
    states = [{name: drawn(each) for name, each in model.state_dict().items()} for _ in range(2)]
    step = pygraph.graph(model, held=model)
    args = side.random(8, width), torch.tensor([3], device=side.device)

    def parameter(turn: int) -> None:
        layer = model.layers[2 * (turn % 8)]
        layer.weight = nn.Parameter(drawn(layer.weight))

    def data(turn: int) -> None:
        for each in model.parameters():
            each.data = drawn(each)

    def swap(turn: int) -> None:
        for each in model.parameters():
            torch.utils.swap_tensors(each, nn.Parameter(drawn(each)))

    kinds: dict[str, Callable[[int], Any]] = {
        "parameter": parameter,
        "data": data,
        "load_state_dict": lambda turn: model.load_state_dict(states[turn % 2], strict=False),
        "assign": lambda turn: model.load_state_dict(states[turn % 2], strict=False, assign=True),
        "swap_tensors": swap,
        "adapter": lambda turn: setattr(model, "adapter", adapters[turn % 2]),
        "cache": lambda turn: setattr(model, "cache", torch.zeros_like(model.cache)),
    }

    def timed() -> float:
        expected = model(*args)
        drain(side.device)
        start = time.perf_counter()
        result = step(*args)
        drain(side.device)
        took = (time.perf_counter() - start) * 1e6
        assert_close(result, expected, TOLERANCE)
        return took

    for _ in range(WARM):
        step(*args)
    found: Row = {}
    for name, change in kinds.items():
        captures, replays, wrong = step.record.captures, step.record.replays, 0
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(10 if side.tiny else CHANGES):
            change(turn)
            for changed in (True, False):
                try:
                    times[changed].append(timed())
                except AssertionError:
                    wrong += 1
        medians = {changed: statistics.median(each) if each else math.nan for changed, each in times.items()}
        found[name] = {
            "added us": medians[True] - medians[False],
            "us": medians[False],
            "wrong": wrong,
            "captures": step.record.captures - captures,
            "replayed": (step.record.replays - replays) / sum(map(len, times.values())),
            "reason": step.record.reason,
        }
    return found


def forecast(side: Side) -> Row:
    """PyGraph only: predicted and actual bytes of each size, and the largest relative error of predictions."""
    few, more = ((2, 8, 32), (4, 20)) if side.tiny else ((2, 16, 64), (4, 8, 24, 48))
    found: Row = {}
    for name, make in SIZED.items():
        model, place, args = make(side)
        step = pygraph.graph(model, held=model)
        known = pygraph.prepare(step, {place: few}, args=args, progress=False)
        told = {number: known.forecast(number) for number in more}
        then = pygraph.prepare(step, {place: more}, args=args, progress=False).memory
        pairs = [[each.instances + each.workspace for each in (told[size], then[size,])] for size in more]
        found[name] = {"off": max(abs(one / other - 1) for one, other in pairs), "bytes": pairs}
        pygraph.release()
    return {"off": max(each["off"] for each in found.values()), **found}


def sizes(side: Side) -> Row:
    """Seconds of the captures, and bytes once all sizes were served three times."""
    batches = new_sizes.TINY_BATCHES if side.tiny else new_sizes.BATCHES
    of = llama.TINY if side.tiny else MIDDLE | {"layers": 8}
    model = made(lambda: llama.Llama(**of, batch=max(batches)), side.device)
    tokens = torch.randint(0, of["words"], (max(batches),), device=side.device)
    at = torch.tensor([7], device=side.device)
    expected = {batch: [each.cpu() for each in model(tokens[:batch], at)] for batch in batches}
    before, start = new_sizes.memory(side.device), time.perf_counter()
    serving: Any
    if side.is_ours:
        serving = new_sizes.Prepared(pygraph.graph(model, held=model), tokens, at)
    else:
        serving = new_sizes.ByHand(model, tokens, at)
    serving.capture(batches)
    drain(side.device)
    found: Row = {"sizes": len(batches), "seconds": time.perf_counter() - start}
    new_sizes.memory(side.device)
    for batch in (*sorted(batches), *batches, *batches):
        assert_close([each.cpu() for each in serving(tokens[:batch], at)], expected[batch], TOLERANCE)
    if side.device == "cuda":
        now = new_sizes.taken()
        found |= {f"{part} bytes": now[part] - before[part] for part in now}
        found["bytes"] = sum(now.values()) - sum(before.values())
    if isinstance(serving, new_sizes.Prepared):
        record = serving.step.record  # type: ignore[attr-defined]
        found |= {"captures": record.captures, "refused": serving.left, "reason": record.reason}
    return found


# -- sides -------------------------------------------------------------------------------------------------------------

ONCE: dict[str, Callable[[Side], Row]] = {"changes": changes, "forecast": forecast, "sizes": sizes}
ROWS = (*TIMED, *ONCE)


class Side:
    """Runs the callables of one side, each in turn, on a device."""

    def __init__(self, name: str, device: str, tiny: bool) -> None:
        self.is_ours, self.device, self.tiny = name == OURS, device, tiny
        self.graphs: list[Any] = []

    def wrap(self, function: Callable[..., Any], held: Any) -> Callable[..., Any]:
        """The callable in this side's form."""
        if self.is_ours:
            graph: Callable[..., Any] = pygraph.graph(function, held=held)
            self.graphs.append(graph)
            return graph
        return ByHand(function) if self.device == "cuda" else function

    def random(self, *size: int) -> torch.Tensor:
        """Random numbers of the element type of models on the device."""
        return torch.randn(size, device=self.device, dtype=floating(self.device))

    def begin(self, row: str) -> Row:
        """Make a callable and warm it up. Returns its last results, and its number of captures."""
        self.end()
        torch.manual_seed(0)
        start = time.perf_counter()
        self.run, arguments, state = TIMED[row](self)
        self.turns = itertools.cycle(arguments)
        for given in itertools.islice(self.turns, WARM):
            result = self.run(*given)
        leaves = [*tree_leaves(result), *(each.double().norm() for each in state)]
        results = [leaf.detach().double().cpu().numpy() for leaf in leaves]
        return {"seconds": time.perf_counter() - start, "results": results, **self.counts()}

    def block(self, calls: int) -> tuple[float, float]:
        """Time of a call, and its host time only, µs."""
        times = []
        drain(self.device)
        start = time.perf_counter()
        for given in itertools.islice(self.turns, calls):
            begin = time.perf_counter()
            self.run(*given)
            times.append(time.perf_counter() - begin)
        drain(self.device)
        return (time.perf_counter() - start) / calls * 1e6, statistics.median(times[:HOST]) * 1e6

    def counts(self) -> Row:
        """Captures and replays since the row began, and the reason why a call was not a replay."""
        found = pygraph.counters()
        counts = {kind: found.get(kind, 0) - self.before.get(kind, 0) for kind in ("captures", "replays")}
        return counts | {"reason": next((graph.record.reason for graph in self.graphs if graph.record.reason), None)}

    def once(self, row: str) -> Row:
        """Measure a row in which sides do not alternate."""
        self.end()
        torch.manual_seed(0)
        return ONCE[row](self)

    def start(self) -> None:
        """Load libraries, and build those of PyGraph's runtime."""
        self.end()
        layer = nn.Linear(8, 8, device=self.device)
        run = self.wrap(layer, layer)
        for _ in range(WARM):
            run(torch.ones(8, 8, device=self.device))
        drain(self.device)

    def end(self) -> None:
        """Forget everything."""
        self.run = self.turns = None  # type: ignore[assignment]
        self.graphs.clear()
        if self.is_ours:
            pygraph.reset()
        self.before = dict(pygraph.counters())
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def serve(pipe: Any, *args: Any) -> None:
    """Serve a side in this process: answers one method call after another."""
    side = Side(*args)
    if side.device == "cpu":
        torch.set_num_threads(1)  # threads of both sides would wait for each other
    with torch.no_grad(), waiting_for_builds(), contextlib.suppress(EOFError):
        while True:
            method, given = pipe.recv()
            try:
                pipe.send((True, getattr(side, method)(*given)))
            except Exception as error:  # noqa: BLE001 - it ends only one row
                traceback.print_exc()
                pipe.send((False, f"{type(error).__name__}: {str(error)[:2000]}"))


class Apart:
    """A side in its own process, which is restarted if it does not answer."""

    def __init__(self, *args: Any) -> None:
        self.args, self.end_by = args, math.inf
        self._launch()

    def _launch(self) -> None:
        self.pipe, other = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(other, *self.args), daemon=True)
        self.process.start()
        other.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            try:
                self.pipe.send((method, given))
                left = self.end_by - time.perf_counter()
                if not self.pipe.poll(None if math.isinf(left) else max(left, 0.0)):
                    raise TimeoutError(f"{self.args[0]} took too long")
                succeeded, answer = self.pipe.recv()
            except (EOFError, OSError) as error:  # TimeoutError is one
                self.process.kill()
                self._launch()
                raise RuntimeError(f"{self.args[0]}: {error or 'its process died'}") from error
            if not succeeded:
                raise RuntimeError(f"{self.args[0]}: {answer}")
            return answer

        return call


# -- rows --------------------------------------------------------------------------------------------------------------


def timed(name: str, sides: Mapping[str, Any], rounds: int) -> Row:
    """Measure a row by alternating blocks of both sides."""
    found: Row = {side: each.begin(name) for side, each in sides.items()}
    results = {side: list(map(torch.from_numpy, found[side].pop("results"))) for side in sides}
    assert_close(results[OURS], results[THEIRS], TOLERANCE)
    calls = int(min(max(BLOCK_S / max(each.block(8)[0] for each in sides.values()) * 1e6, 8), 2000))
    blocks: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sorted(sides, reverse=turn % 2 == 1):
            blocks[side].append(sides[side].block(calls))
    ratios = [theirs[0] / ours[0] for theirs, ours in zip(blocks[THEIRS], blocks[OURS], strict=True)]
    for side, each in blocks.items():
        found[side] |= {f"{kind} us": statistics.median(block[at] for block in each) for at, kind in enumerate(KINDS)}
    found[OURS]["replays of a call"] = (sides[OURS].counts()["replays"] - found[OURS]["replays"]) / (rounds * calls + 8)
    return {"ratio": statistics.median(ratios), "range": (min(ratios), max(ratios)), "calls": calls, **found}


def once(name: str, sides: Mapping[str, Any]) -> Row:
    if name != "sizes":
        found: Row = sides[OURS].once(name)
        return found
    found = {side: sides[side].once(name) for side in (THEIRS, OURS)}
    for key in ("seconds", "bytes"):
        if key in found[OURS]:
            found[f"{key} over by hand"] = found[OURS][key] / found[THEIRS][key]
    return found


def measure(
    only: Sequence[str], sides: Mapping[str, Any], rounds: int, seconds: float, out: Path | None, about: Row
) -> dict[str, Row]:
    """All rows, while there is time. Each is printed, and written to ``out`` with the earlier ones."""
    began, found = time.perf_counter(), dict[str, Row]()
    for side in sides.values():
        side.start()
    for name in [name for name in ROWS if name in only]:
        start = time.perf_counter()
        for side in sides.values():
            side.end_by = min(start + LONGEST_S, began + seconds)
        try:
            if start - began > seconds:
                raise TimeoutError("no time was left")
            row = timed(name, sides, rounds) if name in TIMED else once(name, sides)
        except Exception as error:  # noqa: BLE001 - the other rows are still measured
            row = {"error": f"{type(error).__name__}: {error}"}
        row["took"] = time.perf_counter() - start
        found[name] = row
        print(f"{name}: {json.dumps(row)[:1500]}", flush=True)
        ratios = [found[each]["ratio"] for each in EIGHT if "ratio" in found.get(each, {})]
        mean = {"geomean": statistics.geometric_mean(ratios), "min": min(ratios)} if ratios else {}
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**about, **mean, "rows": found}, indent=1) + "\n", encoding="utf-8")
    if ratios:
        print(
            f"{len(ratios)} of {len(EIGHT)} callables: by hand over ours {mean['geomean']:.3f}, least {mean['min']:.3f}"
        )
    return found


def main() -> None:
    """Measure, print, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same callables, so small that a CPU runs them")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=240, help="no row is measured later")
    parser.add_argument("--out", type=Path, help="write all figures as JSON, after each row")
    chosen = parser.parse_args()
    tiny = chosen.tiny or chosen.device == "cpu"
    sides = {side: Apart(side, chosen.device, tiny) for side in (OURS, THEIRS)}
    about = {"torch": torch.__version__, "device": new_sizes.name_of(chosen.device), "tiny": tiny}
    found = measure(chosen.only, sides, chosen.rounds, chosen.seconds, chosen.out, about)
    if any("error" in row for row in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
