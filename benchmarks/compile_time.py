"""Compile time that PyGraph adds to Inductor's, of BERT-base or of a whole training step.

    python benchmarks/compile_time.py [--layers 12] [--train]
    python benchmarks/compile_time.py --step WORKLOAD [--device cuda] [--runs 3]

BERT-base: copying, lifting, passes and write-back. Caches are off, so that Inductor compiles. Prints a line per graph;
both sides are measured in the same run. A training step of the suite (small on a CPU): the time until its first call
has returned, less that of a later call, in a process for each with empty caches: ``pygraph.train_step`` over default's
forward, backward and optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import pygraph
from pygraph.runtime.native_build import waiting_for_builds

ROOT = Path(__file__).resolve().parents[1]
BASE, STEP = "default", "step"
CALLS = 6
"""Calls of a process. The first one compiles; if later calls compile, capture or compare, their times show it."""


def one(name: str, side: str, device: str) -> list[float]:
    """Seconds that each of the first calls of a workload takes in this process."""
    from benchmarks.running import built, workloads

    step, _ = built(workloads()[name], side, device, tiny=device == "cpu")
    drain = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(CALLS):
        drain()
        start = time.perf_counter()
        step()
        drain()
        times.append(time.perf_counter() - start)
    return times


def measure(name: str, device: str, runs: int) -> dict[str, Any]:
    """Measure both sides of a workload alternately, ``runs`` times: medians in seconds, and their ratio."""
    found: dict[str, list[list[float]]] = {BASE: [], STEP: []}
    for _ in range(runs):
        for side, calls in found.items():
            with tempfile.TemporaryDirectory() as folder:
                caches = {key: str(Path(folder) / key) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
                path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
                command = [sys.executable, __file__, "--step", name, "--device", device, "--one", side]
                environ = {**os.environ, **caches, "PYTHONPATH": path}
                done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
                calls.append(json.loads(done.stdout.splitlines()[-1]))
    compiling = {side: statistics.median(times[0] - times[-1] for times in calls) for side, calls in found.items()}
    return {
        "workload": name,
        **{side: round(seconds, 2) for side, seconds in compiling.items()},
        "ratio": round(compiling[STEP] / compiling[BASE], 3),
        "calls_s": {side: [[round(s, 3) for s in times] for times in calls] for side, calls in found.items()},
    }


def bert(layers: int, train: bool) -> None:
    """Compile once and print each graph's times in ms and PyGraph's share."""
    import transformers

    config = transformers.BertConfig(num_hidden_layers=layers)
    model = transformers.BertForMaskedLM(config).train(train)
    tokens = torch.randint(0, config.vocab_size, (1, 128))
    compiled = torch.compile(model, backend="pygraph", options={"inductor": {"fx_graph_cache": False}})
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        loss = compiled(input_ids=tokens, labels=tokens).loss
    if train:
        loss.backward()
    whole = time.perf_counter() - start
    for report in pygraph.reports():
        ours = sum(ms for name, ms in report.times_ms.items() if name != "inductor")
        row = {
            "graph": report.name,
            "nodes": len(report.graph.nodes) if report.graph else 0,
            **{name: round(ms, 1) for name, ms in report.times_ms.items()},
            "share": round(ours / report.times_ms["inductor"], 4),
        }
        print(json.dumps(row))
    print(json.dumps({"torch": torch.__version__, "first_call_s": round(whole, 1)}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--step", metavar="WORKLOAD")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(one(chosen.step, chosen.one, chosen.device)))
    elif chosen.step:
        print(json.dumps(measure(chosen.step, chosen.device, chosen.runs)))
    else:
        bert(chosen.layers, chosen.train)


if __name__ == "__main__":
    with waiting_for_builds():
        main()
