"""Processes that answer as sides do, without torch: what they are told, and when, goes to a log.

A plan says, by side, what one does otherwise: die, hang or fail at a command, go on with its pipe closed after one,
compute something else, end early, or take longer (s).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph.bench.timing import Bench, Program

WORKER = """
import json, os, shutil, sys, time
folder, plans, spec = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
plan = plans.get(spec["program"] + " " + spec["side"], plans.get(spec["side"], {}))
def note(what):
    with open(folder + "/log", "a") as file:
        file.write(json.dumps([spec["program"], spec["side"], spec["check"], what, time.monotonic()]) + "\\n")
def say(row, failure=None, error=""):
    print(json.dumps({"facts": row, "failure": failure, "error": error}), flush=True)
made = 0
if plan.get("die") == "ready":
    sys.exit("no such module")
note("ready")
say({"ready": True})
for line in sys.stdin:
    command = json.loads(line)
    does = command.pop("do")
    note(does + " begins")
    if plan.get("die") == does:
        print("no such kernel", file=sys.stderr)
        sys.exit(3)
    if plan.get("hang") == does:
        time.sleep(600)
    if does in plan.get("fail", {}):
        say({"calls": 5}, plan["fail"][does], "cannot: " + plan["fail"][does])
        break
    time.sleep(plan.get("takes", {}).get(does, 0.01))
    row = {}
    if does == "warm":
        shutil.copy(folder + "/" + plan.get("result", "right") + ".pt", spec["result"])
        row = {"call_us": plan.get("call_us", 5000.0), "calls": command["calls"], "reserved_bytes": 2 * 2**20}
        row["caches"] = {k: v for k, v in os.environ.items() if k.endswith("CACHE_DIR")}
    if does == "block":
        made += 1
        if plan.get("blocks", 1000) < made:
            say({"calls": 5}, "ended", "the script ended")
            break
        row = {"wall_us": plan.get("wall", 2.0) * (1 + made / 10), "host_us": 1.0, "calls": command["calls"]}
        row["cores"] = sorted(os.sched_getaffinity(0))
    if does == "finish":
        row = {"coverage": {"share": 1.0}}
    note(does + " ends")
    say(row)
    if plan.get("linger") == does:
        os.close(1)
        time.sleep(600)
    if does == "finish":
        break
"""

Event = tuple[str, str, bool, str, float]


def bench(folder: Path, plans: Mapping[str, Mapping[str, Any]] | None = None, blocks: int = 4, seed: int = 0) -> Bench:
    """Measures with processes that follow ``plans``, by side or by program and side."""
    folder.mkdir(exist_ok=True)
    torch.save({1: [torch.ones(3)], 7: [torch.ones(3)]}, folder / "right.pt")
    torch.save({1: [torch.ones(3)], 7: [torch.full((3,), 1.5)]}, folder / "wrong.pt")
    torch.save({1: [torch.ones(3)], 7: [torch.ones(4)]}, folder / "longer.pt")
    command = (sys.executable, "-S", "-c", WORKER, str(folder), json.dumps(plans or {}))
    return Bench(folder / "work", "cpu", blocks=blocks, seed=seed, command=command)


def program(name: str = "first", sides: Sequence[str] = ("eager", "default", "pygraph"), **more: Any) -> Program:
    """A program with small blocks."""
    facts: dict[str, Any] = {"calls": 4, "apart": False, "finite": False, **more}
    return Program(name=name, runner="", path=name, sides=tuple(sides), **facts)


def events(folder: Path) -> list[Event]:
    """Everything that processes noted, in order of time: program, side, whether it is a check, what, when."""
    rows = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return sorted((tuple(row) for row in rows), key=lambda event: event[4])


def soon(seconds: float = 120.0) -> float:
    """A time that processes have until."""
    return time.monotonic() + seconds
