"""Runs the CUDA benchmark: each workload in a process of its own, its sides interleaved within it.

    python -m benchmarks.cuda [NAME …] [--out FILE] [--seconds N]

Prints a row per workload and writes everything as JSON: versions, GPU, date, every side's figures, ratios.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.cuda.measure import MODES, measure
from benchmarks.cuda.workloads import WORKLOADS


def main() -> None:
    """Run the chosen workloads until the time is up."""
    parser = argparse.ArgumentParser(description="CUDA benchmark")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps({"sides": measure(WORKLOADS[chosen.one], chosen.modes), "regions": _regions()}))
        return
    end = time.monotonic() + chosen.seconds
    results: dict[str, Any] = {"machine": _machine(), "workloads": {}}
    for name in chosen.names or WORKLOADS:
        left = end - time.monotonic()
        if left < 20:
            break
        results["workloads"][name] = row = _run(name, left)
        print(name, json.dumps(row.get("ratios", row)), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(results, indent=1))


def _run(name: str, seconds: float) -> dict[str, Any]:
    if not WORKLOADS[name].alone:
        return _with_ratios(_in_a_process(name, list(MODES), seconds))
    rows = [_in_a_process(name, [mode], seconds / len(MODES)) for mode in MODES]
    sides = {mode: side for row in rows for mode, side in row.get("sides", {}).items()}
    errors = [row["error"] for row in rows if "error" in row]
    regions = [region for row in rows for region in row.get("regions", [])]
    return _with_ratios({"sides": sides, "regions": regions, **({"errors": errors} if errors else {})})


def _in_a_process(name: str, modes: list[str], seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cuda", "--one", name, "--modes", *modes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {seconds:.0f} s"}
    if done.returncode != 0:
        return {"error": done.stderr[-800:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """The row with each other side's figures over PyGraph's: above 1, PyGraph takes less."""
    sides = row.get("sides", {})
    ours = sides.get("pygraph", {"error": ""})
    ratios = {
        f"{key} {mode}": round(side[key] / ours[key], 3)
        for mode, side in sides.items()
        for key in ("wall_us", "host_us", "compile_s", "peak_mb")
        if mode != "pygraph" and "error" not in side and "error" not in ours
    }
    return {"ratios": ratios, **row} if ratios else row


def _regions() -> list[dict[str, Any]]:
    import pygraph

    return [
        {"graph": report.name, "region": region.index, "state": region.state, "why": region.why}
        for report in pygraph.reports()
        for region in report.regions
    ]


def _machine() -> dict[str, str]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
