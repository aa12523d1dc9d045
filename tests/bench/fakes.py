"""Processes that answer as sides do, without torch: what they are told, and when, goes to a log.

A plan says, by side, what one does otherwise: die, hang or fail at a command (once, or whenever it is told to), go on
without a pipe after one, compute something else (at once, or the next time), end early.
"""

from __future__ import annotations

import fcntl
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pygraph.bench.plan import Launcher, Program
from pygraph.bench.process import Home
from pygraph.bench.protocol import Spec

__all__ = ["Event", "events", "free", "launcher", "program"]

WORKER = """
import json, os, shutil, sys, time
spec, folder = json.loads(sys.argv[1]), sys.argv[2]
plans = json.loads(sys.argv[3])
plan = plans.get(spec["program"] + " " + spec["side"], plans.get(spec["side"], {}))
def note(what):
    with open(folder + "/log", "a") as file:
        file.write(json.dumps([spec["program"], spec["side"], spec["phase"], what, time.monotonic()]) + "\\n")
def say(row, **more):
    print(json.dumps({"row": row, **more}), flush=True)
made = 0
if plan.get("die") == "ready":
    sys.exit("no such module")
time.sleep(plan.get("importing", 0))
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
        kind, before = plan["fail"][does], folder + "/" + spec["side"] + "-failed"
        if kind != "memory once" or not os.path.exists(before):
            open(before, "w").close()
            say({"calls": 5}, failure=kind.split()[0], error="cannot: " + kind)
            break
    time.sleep(plan.get("takes", 0.01))
    row = {}
    if does == "compile":
        row = {"compile_s": 1.0, "caches": {k: v for k, v in os.environ.items() if k.endswith("CACHE_DIR")}}
        row.update({k: spec[k] for k in ("choices", "gpu_lock", "fresh")})
    if does == "warm":
        again = plan.get("then") if os.path.exists(folder + "/" + spec["side"] + "-warmed") else None
        open(folder + "/" + spec["side"] + "-warmed", "w").close()
        shutil.copy(folder + "/" + (again or plan.get("result", "right")) + ".pt", spec["result"])
        row = {"call_us": plan.get("call_us", 5000.0), "calls": command["calls"], "decisions": 0}
        row["reserved_bytes"] = 2 * 2**20
    if does == "block":
        made += 1
        if plan.get("blocks", 1000) < made:
            say({"calls": 5}, failure="ended", error="the script ended")
            break
        wall = plan.get("wall", 2.0) * (1 + made / 10)
        row = {"wall_us": wall, "host_us": 1.0, "calls": command["calls"]}
    if does == "finish":
        row = {"chosen": plan.get("chosen", {})}
    note(does + " ends")
    say(row)
    if plan.get("linger") == does:
        os.close(1)
        time.sleep(600)
    if does == "finish":
        break
"""

Event = tuple[str, str, str, str, float]


def launcher(folder: Path, plans: Mapping[str, Mapping[str, Any]] | None = None, **home: Any) -> Launcher:
    """Starts processes that follow ``plans``, by side or by program and side."""
    torch.save({1: [torch.ones(3)], 7: [torch.ones(3)]}, folder / "right.pt")
    torch.save({1: [torch.ones(3)], 7: [torch.full((3,), 1.5)]}, folder / "wrong.pt")

    def command(spec: Spec) -> Sequence[str]:
        return [sys.executable, "-S", "-c", WORKER, spec.text(), str(folder), json.dumps(plans or {})]

    return Launcher(Home(folder / "work", **home), "cpu", command=command)


def program(name: str = "first", sides: Sequence[str] = ("eager", "default", "pygraph"), **more: Any) -> Program:
    """A program with small blocks."""
    facts: dict[str, Any] = {"calls": 4, "tolerance": 1e-2, "why_tolerance": "", "apart": False, **more}
    return Program(name=name, about="", kind="inference", domain="none", sides=tuple(sides), **facts)


def events(folder: Path) -> list[Event]:
    """Everything that processes noted, in order of time: program, side, phase, what, when."""
    path = folder / "log"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted((tuple(row) for row in rows), key=lambda event: event[4])


def soon(seconds: float = 120.0) -> float:
    """A time that processes have until."""
    return time.monotonic() + seconds


def close_to(left: float, right: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(left, right, rel_tol=1e-5)


def free(path: Path) -> bool:
    """Whether nobody holds the lock on a file."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
