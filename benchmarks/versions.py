"""Two versions of PyGraph side by side: ``python benchmarks/versions.py OLD NEW NAMES --out FILE``.

OLD and NEW are folders that hold a package ``pygraph``; NAMES are workloads of the suite. Each version has processes of
its own, and both are alive at once. They share a cache of kernels, so that both get the same configurations: NEW
compiles first. ``--together 6`` has six workloads compile at once; whatever is timed has the machine for itself. The
two versions take turns, on the same cores: calls that capture, calls until measured selection is over, and blocks of
calls, drained at both ends, in a random order in each round. ``NAME:3`` does all of it in three processes of each
version: where the host is the limit, two processes of one version differ more than the versions do.

Above 1, NEW takes less. First results are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLD, NEW = "old", "new"
CAPTURING, FIRST = 12, 5
"""Calls after the first one that are timed one by one, and how many of them are drained: only these, since measured
selection must see the same loop as the later timing."""
SETTLING, MOST_SECONDS = 1200, 4.0
"""Number of calls, and maximum seconds, before blocks are timed, for one size."""
RETURNS = 48
"""Number of calls of each of several sizes before that, in at most three times as long."""
BLOCK_SECONDS, CORES = 0.03, 4
TOLERANCE = 0.01


# -- the process of one version ----------------------------------------------------------------------------------------


class Worker:
    """Executes commands one by one: compile, capture, settle, block, finish."""

    def __init__(self, name: str, device: str) -> None:
        import torch

        from benchmarks.suite import WORKLOADS
        from pygraph.backend import pygraph as backend

        self._torch, self._backend, self._device = torch, backend, device
        self._workload = WORKLOADS[name]
        for module in self._workload.imports:
            importlib.import_module(module)
        package = importlib.import_module(f"pygraph.runtime.{'cuda' if device == 'cuda' else 'host'}")
        package.build.load()  # in either version: nothing is captured before it is built
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False

    def compile(self) -> dict[str, Any]:
        """Make the first call, and return sums of its results."""
        random.seed(0)
        self._torch.manual_seed(0)
        build = self._workload.build if self._device == "cuda" else self._workload.tiny
        self._step = build(self._compiled, self._device)
        return {"result": self._sums(self._step())}

    def _compiled(self, target: Any) -> Any:
        return self._torch.compile(target, backend=self._backend, options={"cache_dir": None})

    def capture(self) -> dict[str, Any]:
        """Make calls of which one captures. Returns the time of the longest, s, and the peak of memory over all."""
        self._tidy()
        times = []
        for call in range(CAPTURING):
            start = time.perf_counter()
            self._step()
            if call < FIRST:
                self._drain()
            times.append(time.perf_counter() - start)
        return {"capturing_s": max(times), "capturing_peak_bytes": self._peak()}

    def settle(self, cores: list[int], most: float) -> dict[str, Any]:
        """Calls until nothing is measured any more, on ``cores``; then seconds and the peak of memory of a few."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)
        turns = self._workload.turns
        end, calls = time.perf_counter() + (most if turns == 1 else 3 * most), 0
        while calls < max(SETTLING, RETURNS * turns) and time.perf_counter() < end:
            self._step()
            calls += 1
        self._tidy()
        start = time.perf_counter()
        for _ in range(FIRST):
            self._step()
        self._drain()
        return {"call_s": (time.perf_counter() - start) / FIRST, "peak_bytes": self._peak()}

    def block(self, calls: int) -> dict[str, Any]:
        """µs per call: until the calls returned, and until the device finished them."""
        self._step()
        self._drain()
        start = time.perf_counter()
        for _ in range(calls):
            self._step()
        issued = time.perf_counter()
        self._drain()
        return {"host_us": (issued - start) / calls * 1e6, "wall_us": (time.perf_counter() - start) / calls * 1e6}

    def finish(self) -> dict[str, Any]:
        """The states of all regions, and the package in use."""
        import pygraph

        states = [str(region.state) for report in pygraph.reports() for region in report.regions]
        return {"regions": states, "package": "/".join(Path(pygraph.__file__).parts[-3:-1])}

    def _sums(self, result: Any) -> list[tuple[float, float]]:
        leaves = result if isinstance(result, (tuple, list)) else [result]
        tensors = [leaf.double() for leaf in leaves if isinstance(leaf, self._torch.Tensor)]
        return [(float(tensor.sum()), float(tensor.abs().sum())) for tensor in tensors]

    def _drain(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _tidy(self) -> None:
        gc.collect()
        self._drain()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()
            self._torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> int:
        return self._torch.cuda.max_memory_allocated() if self._device == "cuda" else 0


def work(name: str, device: str) -> None:
    """Serve commands from stdin; output of the program goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.append(str(ROOT))
    worker = Worker(name, device)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        does, arguments = json.loads(line)
        print(json.dumps(getattr(worker, does)(**arguments)), file=answers, flush=True)


# -- both versions -----------------------------------------------------------------------------------------------------


class Side:
    """A process of one version. Methods raise RuntimeError if it has ended."""

    def __init__(self, package: Path, name: str, device: str, cache: str) -> None:
        path = os.pathsep.join([str(package.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", device, name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=tempfile.gettempdir()
        )
        self._waiting = True

    def do(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Execute a command, and return the answer."""
        assert self._process.stdin is not None
        self.wait()
        print(json.dumps([command, arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def wait(self) -> None:
        """Wait until everything is imported."""
        if self._waiting:
            self._waiting = False
            self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def compiled(sides: dict[str, Side]) -> dict[str, Any]:
    """The first results of one workload in both versions. Raises RuntimeError if they differ."""
    found = {which: sides[which].do("compile") for which in (NEW, OLD)}
    for (a, _), (b, size) in zip(found[NEW]["result"], found[OLD]["result"], strict=True):
        if abs(a - b) > TOLERANCE * max(size, 1e-9):
            raise RuntimeError(f"first results differ: {a} and {b}, of {size}")
    return found


def compare(sides: dict[str, Side], found: dict[str, Any], rounds: int, settling: float, seed: int) -> dict[str, Any]:
    """Compare a compiled workload in one process of each version."""
    order, shuffle = list(sides), random.Random(seed).shuffle
    shuffle(order)
    cores = sorted(os.sched_getaffinity(0))
    for name in order:
        found[name] |= sides[name].do("capture")
    for name in order:
        found[name] |= sides[name].do("settle", cores=cores[2 : 2 + CORES] or cores, most=settling)
    slower = max(found[name]["call_s"] for name in order)
    calls = min(200, max(5, int(BLOCK_SECONDS / slower)))
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            blocks[name].append(sides[name].do("block", calls=calls))
    for name in order:
        found[name] |= {"blocks": blocks[name], **sides[name].do("finish")}
    ratios = sorted(a["wall_us"] / b["wall_us"] for a, b in zip(blocks[OLD], blocks[NEW], strict=True))
    return {**found, "ratio": statistics.median(ratios), "ratios": ratios}


def summary(results: dict[str, list[dict[str, Any]]]) -> str:
    """Old over new: each workload's median over processes, and geometric means of everything."""
    rows = [f"{'workload':24}{'wall':>8}  of each process"]
    medians = {name: statistics.median(run["ratio"] for run in runs) for name, runs in results.items()}
    for name, runs in results.items():
        each = ", ".join(f"{run['ratio']:.3f}" for run in runs)
        rows.append(f"{name:24}{medians[name]:8.3f}  {each}")
    rows.append(f"geometric mean of {len(medians)}: {statistics.geometric_mean(medians.values()):.3f}")
    for figure in ("capturing_s", "capturing_peak_bytes", "peak_bytes"):
        every = [run[OLD][figure] / run[NEW][figure] for runs in results.values() for run in runs if run[NEW][figure]]
        if every:
            rows.append(f"{figure}: {statistics.geometric_mean(every):.3f}, least {min(every):.3f}")
    return "\n".join(rows)


def main() -> None:
    """Measure, print a summary, and write everything to a file."""
    parser = argparse.ArgumentParser(description="Two versions of PyGraph side by side, on workloads of the suite.")
    parser.add_argument("old", type=Path, help="a folder that holds the earlier package")
    parser.add_argument("new", type=Path, help="a folder that holds the other one")
    parser.add_argument("names", nargs="+", metavar="name[:processes]", help="a workload, and how often it is measured")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--together", type=int, default=1, help="workloads that compile at the same time")
    parser.add_argument("--settling", type=float, default=MOST_SECONDS, help="most seconds of calls before blocks")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what has not begun by then is left out")
    chosen = parser.parse_args()
    jobs = [(name, int(often or 1)) for name, _, often in (each.partition(":") for each in chosen.names)]
    end, results = time.monotonic() + chosen.seconds, {}
    with tempfile.TemporaryDirectory() as cache:

        def started(name: str) -> dict[str, Side]:
            folders = {OLD: chosen.old, NEW: chosen.new}
            return {which: Side(folder, name, chosen.device, cache) for which, folder in folders.items()}

        queue = [name for name, often in jobs for _ in range(often)]
        for first in range(0, len(queue), chosen.together):
            if first and time.monotonic() > end:
                break
            names = queue[first : first + chosen.together]
            batch = [started(name) for name in names]
            with ThreadPoolExecutor(len(batch)) as pool:
                found = [pool.submit(compiled, sides) for sides in batch]
            for number, (name, sides) in enumerate(zip(names, batch, strict=True), first):
                try:
                    run = compare(sides, found[number - first].result(), chosen.rounds, chosen.settling, number)
                    results.setdefault(name, []).append(run)
                    print(f"{name}: {run['ratio']:.3f}", flush=True)
                except RuntimeError as error:
                    print(f"{name}: {error}", flush=True)
                for side in sides.values():
                    side.kill()
                chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    print(summary({name: runs for name, runs in results.items() if runs}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[3], sys.argv[2])
    else:
        main()
