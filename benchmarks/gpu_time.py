"""GPU time of one step of a workload by kind of kernel, for several sides.

    python benchmarks/gpu_time.py gpt2-small-adamw-4 --sides reduce-overhead,step --out FILE

Each side has a process of its own; they compile at once, and are profiled one after the other. Times are those of
torch.profiler, in µs of a step; FILE gets every kernel.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
WARM, PROFILED = 12, 5
KINDS = {
    "triton": "Inductor",
    "flash": "attention",
    "fmha": "attention",
    "sdpa": "attention",
    "nvjet": "product",
    "gemm": "product",
    "gemv": "product",
    "cutlass": "product",
    "splitk": "product",
    "cudnn": "cuDNN",
    "implicit": "cuDNN",
    "convolve": "cuDNN",
    "memcpy": "copy",
    "memset": "fill",
    "multi_tensor": "foreach of torch",
    "at::native": "torch",
}


def kind_of(kernel: str) -> str:
    """Kind of a kernel, by parts of its name."""
    lower = kernel.lower()
    return next((kind for part, kind in KINDS.items() if part in lower), "other")


def profiled(name: str, side: str) -> dict[str, list[float]]:
    """Of each kernel, its time in a step (µs) and how often it runs. Waits for a line on stdin once it is warm."""
    from benchmarks.running import built, workloads

    step, _ = built(workloads()[name], side, "cuda", tiny=False)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    print(json.dumps("warm"), flush=True)
    sys.stdin.readline()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time / PROFILED
            found[event.name][1] += 1 / PROFILED
    return found


def main() -> None:
    """Profile, and print a line per side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--sides", default="default,reduce-overhead,step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(profiled(chosen.workload, chosen.one)), flush=True)
        return
    sides = {}
    for side in chosen.sides.split(","):
        command = [sys.executable, __file__, chosen.workload, "--one", side]
        pipe = subprocess.PIPE
        sides[side] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    for process in sides.values():
        answer(process)
    kernels = {}
    for side, process in sides.items():
        print(file=process.stdin, flush=True)
        kernels[side] = answer(process)
        process.wait()
        sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for kernel, (us, often) in kernels[side].items():
            for name in (kind_of(kernel), "all"):
                sums[name][0] += us
                sums[name][1] += often
        row = {name: f"{us:.0f} ({often:.0f})" for name, (us, often) in sorted(sums.items(), key=lambda i: -i[1][0])}
        print(f"{chosen.workload} {side}: {json.dumps(row)}", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(kernels, indent=1) + "\n")


def answer(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that it prints. Raises RuntimeError when it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(('"warm"', "{")):
            return json.loads(line)
    raise RuntimeError(f"a side ended with status {process.wait()}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
