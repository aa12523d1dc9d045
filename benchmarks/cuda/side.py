"""The process of one side: ``python -m benchmarks.cuda.side NAME MODE PHASE RESULT``, PHASE being compile or time.

Imports everything, waits for a line on its standard input before it touches the GPU, and prints its row as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.cuda.measure import measure, precompile
from benchmarks.cuda.workloads import WORKLOADS


def main() -> None:
    """Do what the arguments say once told to go; without a line to say so, nothing."""
    name, mode, phase, result = sys.argv[1:]
    workload = WORKLOADS[name]
    for module in workload.imports:
        __import__(module)
    if not sys.stdin.readline():
        return
    row = precompile(workload, mode) if phase == "compile" else measure(workload, mode, Path(result))
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
