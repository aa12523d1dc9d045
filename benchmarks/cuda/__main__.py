"""Runs the CUDA benchmark: each side of each workload in a process of its own, one after the other on one GPU.

    python -m benchmarks.cuda [NAME …] [--out FILE] [--seconds N]

Sides do not share a process, because the memory pools that one of them keeps would count against the others. Prints
a row per workload and writes everything as JSON: versions, GPU, date, every side's figures, ratios.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda.measure import MODES, difference, measure
from benchmarks.cuda.workloads import WORKLOADS

RATIOS = ("wall_us", "host_us", "compile_s", "peak_mb", "reserved_mb")


def main() -> None:
    """Run the chosen workloads until the time is up."""
    parser = argparse.ArgumentParser(description="CUDA benchmark")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        mode, result = chosen.side
        row = measure(WORKLOADS[chosen.names[0]], mode, Path(result))
        print(json.dumps({**row, "regions": _regions()}))
        return
    end = time.monotonic() + chosen.seconds
    results: dict[str, Any] = {"machine": _machine(), "workloads": {}}
    for name in chosen.names or WORKLOADS:
        if end - time.monotonic() < 20:
            break
        results["workloads"][name] = row = _workload(name, end)
        print(name, json.dumps({key: row[key] for key in ("ratios", "errors") if row[key]}), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(results, indent=1))


def _workload(name: str, end: float) -> dict[str, Any]:
    """Every side's figures, and the other sides' over PyGraph's (above 1, PyGraph takes less), where results agree."""
    sides: dict[str, Any] = {}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            row = _side(name, mode, Path(folder) / mode, end - time.monotonic())
            (errors if isinstance(row, str) else sides)[mode] = row  # type: ignore[assignment]
        reference = next(iter(sides), None)
        for mode in list(sides):
            apart = difference(torch.load(Path(folder) / str(reference)), torch.load(Path(folder) / mode))
            sides[mode]["difference"] = apart
            if not apart <= WORKLOADS[name].tolerance:
                errors[mode] = f"results differ from {reference}'s by {apart} of their magnitude"
    ours = sides.get("pygraph", {}) if "pygraph" not in errors else {}
    others = [mode for mode in sides if ours and mode != "pygraph" and mode not in errors]
    ratios = {f"{key} {mode}": round(sides[mode][key] / ours[key], 3) for mode in others for key in RATIOS}
    return {"ratios": ratios, "errors": errors, "sides": sides}


def _side(name: str, mode: str, result: Path, seconds: float) -> dict[str, Any] | str:
    """One side's figures, or what went wrong."""
    command = [sys.executable, "-m", "benchmarks.cuda", name, "--side", mode, str(result)]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{result}-inductor", "TRITON_CACHE_DIR": f"{result}-triton"}
    environ = {**os.environ, **caches}  # each side compiles from nothing
    limit = max(seconds, 1.0)
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    if done.returncode != 0:
        return done.stderr[-800:]
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _regions() -> list[dict[str, Any]]:
    import pygraph

    return [
        {"graph": report.name, "region": region.index, "state": region.state, "why": region.why}
        for report in pygraph.reports()
        for region in report.regions
    ]


def _machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
