"""Upper bound on the gain of parallel launches: the longest path of dependences of a workload, in µs.

    python benchmarks/critical_path.py googlenet-1 [--out FILE]

The workload is replayed with its launches in a row, and each is timed by torch.profiler. Printed are their sum, the
longest path of dependences (all that there are, and those that are left within the budget of memory), and the longest
path if nothing waited for memory that no call names, such as a library's workspace. FILE gets every launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pygraph.bench.sides import PROGRAM_ORDER
from pygraph.program.default import ordered, renamed
from pygraph.program.dependences import order_of
from pygraph.program.order import Order
from pygraph.program.program import Program
from pygraph.runtime import region
from pygraph.runtime.discover import Captured
from pygraph.runtime.native_build import waiting_for_builds

WARM, PROFILED = 150, 10
"""Steps: before (calls of measured selection are among them), and those that are timed."""


def replayed(name: str) -> tuple[list[Program], list[float]]:
    """The programs of a workload's regions in the order of their captures, and how long each launch takes (µs)."""
    from benchmarks.running import built, workloads

    programs: list[Program] = []
    capture = region.capture

    def noted(*args: Any, **facts: Any) -> Any:
        made = capture(*args, **facts)
        if isinstance(made, Captured):
            programs.append(made.program)
        return made

    with mock.patch.object(region, "capture", noted):
        step, _ = built(workloads()[name], PROGRAM_ORDER, "cuda", tiny=False)
        for _ in range(WARM):
            step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times = [event.device_time for event in sorted(events, key=lambda event: event.time_range.start)]
    launches = sum(len(program.recording.launches) for program in programs)
    if len(times) != launches * PROFILED:
        raise SystemExit(f"{name}: {len(times)} launches in {PROFILED} steps, where {launches} were captured for each")
    return programs, [sum(times[i::launches]) / PROFILED for i in range(launches)]


def longest(order: Order, times: Sequence[float]) -> float:
    """The time of the longest path."""
    ends: list[float] = []
    for time, waited in zip(times, order.edges, strict=True):
        ends.append(time + max((ends[launch] for launch in waited), default=0.0))
    return max(ends, default=0.0)


def named_alone(program: Program) -> Order:
    """The dependences by what calls name and intermediates of theirs, without memory that several calls only share."""
    named = {access.key for launch in program.recording.launches for access in launch.operands or ()}
    calls: dict[Any, set[str | None]] = {}
    for slot in program.slots:
        calls.setdefault(slot.key, set()).add(program.recording.launches[slot.launch].call)
    shared = {key for key, users in calls.items() if key not in named and len(users) > 1}
    return order_of(program.recording, [slot for slot in program.slots if slot.key not in shared])


def main() -> None:
    """Time, and print a line per region."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    programs, times = replayed(chosen.workload)
    found: list[dict[str, Any]] = []
    for program in programs:
        launches = program.recording.launches
        own, times = times[: len(launches)], times[len(launches) :]
        program = renamed(program)[0]
        order, kept = order_of(program.recording, program.slots), ordered(program, "dependences")[0].order
        found.append(
            {
                "launches": len(launches),
                "path": order.longest_path(),
                "sum_us": round(sum(own), 1),
                "longest_us": round(longest(order, own), 1),
                "within_budget_us": round(longest(kept, own) if kept else sum(own), 1),
                "without_workspaces_us": round(longest(named_alone(program), own), 1),
            }
        )
        print(json.dumps({"workload": chosen.workload, **found[-1]}), flush=True)
        rows = zip(launches, own, order.edges, strict=True)
        found[-1]["rows"] = [(row.index, row.name, row.call, round(time, 2), edges) for row, time, edges in rows]
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with waiting_for_builds():
        main()
