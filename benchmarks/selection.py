"""Whether trials of measured selection pick right, and what they lose: held against a truth that was measured apart.

    python benchmarks/selection.py [--device cpu] [--seeds N] [--seconds S] [--out FILE]

A scenario is a program and its caller (``scenarios``); no compiler is involved. Nothing is compared with other tools.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.scenarios import CALLERS, PROGRAMS, SCENARIOS, After, settle, wait
from benchmarks.truth import WITHIN, Subject, as_fast, rounds, summary, sure
from pygraph.regions import driver_for
from pygraph.runtime import measuring
from pygraph.runtime.selection.queue import TrialQueue

__all__ = ["FIRST", "run_all", "run_scenario", "trial"]

FIRST = 1000
"""Calls that the budget is a fraction of the time of."""
_MORE, _CHUNK = 4000, 48
"""Calls in which a trial may still end after the first ones, and how many are made at a time."""
_ROUNDS = 3
"""Rounds of the truth before the trials of a scenario, and as many after them."""
_SECONDS = 80.0

Tell = Callable[[str], None]


def trial(subject: Subject, after: After, seed: int, calls: int = FIRST) -> dict[str, Any]:
    """A trial of a region that has just been captured, over ``calls`` calls that are timed, and as many more as it
    takes to end, but 4000 at most; one that goes on even then is closed, which leaves what was decided so far.

    It shares nothing with earlier ones: neither the queue of regions nor the budget. Times are in µs.
    """
    subject.warm()
    random = Random(seed)
    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.object(measuring, "TRIALS", TrialQueue()))
        region = held.enter_context(contextlib.closing(subject.region(f"{subject.program.name} {seed}", measure=True)))
        step, record = subject.calling(region), region.record
        start = time.perf_counter()
        for call in range(calls):
            step()
            after(call, random)
        wait(subject.device)
        took = time.perf_counter() - start
        made = calls
        while not record.trials and made < calls + _MORE:
            for call in range(made, made + _CHUNK):
                step()
                after(call, random)
            made += _CHUNK
        ended = bool(record.trials)
    return {**_plain(record.trials[0]), "seed": seed, "ended": ended, "timed_calls": calls, "took_us": took * 1e6}


def _plain(report: dict[str, Any]) -> dict[str, Any]:
    """What a trial reports of itself."""
    lost, budget, overhead = report["lost"], report["budget"], report["overhead"]
    found = {key: report[key] for key in ("decision", "reason", "detail", "calls", "candidates", "dropped")}
    per_call = {name: seconds * 1e6 for name, seconds in report["per_call"].items()}
    share = lost / budget if budget else 0.0
    figures = {"lost_us": lost * 1e6, "overhead_us": overhead * 1e6, "budget_us": budget * 1e6, "lost_of_budget": share}
    return {**found, "per_call_us": per_call, **figures, "blocks": [_block(each) for each in report["blocks"]]}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """A block of a trial. Times are in µs."""
    times = ("seconds", "waited", "lead", "tail")
    rest = {key: value for key, value in block.items() if key not in times}
    return {**rest, **{"us" if key == "seconds" else f"{key}_us": block[key] * 1e6 for key in times}}


def run_scenario(subject: Subject, caller: str, seeds: int, end: float) -> dict[str, Any]:
    """The truth about a program under ``caller``, and its trials, of which none begins after ``end`` (by the monotonic
    clock). The truth is measured in parts before and after them.

    What was lost as seen from outside is what the first calls took beyond as many of the fastest candidate's. A wrong
    decision is part of it, and so is every error of the truth, a thousandfold: it is noisy.
    """
    after = CALLERS[caller](subject.device)
    rows = rounds(subject, after, range(_ROUNDS))
    trials: list[dict[str, Any]] = []
    while len(trials) < seeds and time.monotonic() < end:
        trials.append(trial(subject, after, len(trials)))
    rows += rounds(subject, after, range(_ROUNDS, 2 * _ROUNDS))
    truth = summary(rows)
    for each in trials:
        each["right"], each["sure"] = as_fast(truth, each["decision"]), sure(truth, each["decision"])
        fastest = min(one["us"] for one in truth.values())
        each["lost_from_outside_noisy_us"] = each["took_us"] - each["timed_calls"] * fastest
    handicap = {"where": subject.program.slowed, "us": subject.delay.seconds * 1e6} if subject.program.slowed else None
    return {
        "program": subject.program.name,
        "caller": caller,
        "handicap": handicap,
        "truth": truth,
        "rounds_us": [{name: seconds * 1e6 for name, seconds in row.items()} for row in rows],
        "trials": trials,
    }


def run_all(
    scenarios: Sequence[tuple[str, str]], device: str, seeds: int, seconds: float, tell: Tell = print
) -> dict[str, Any]:
    """Every scenario that there is time for, and the names of what was left out, with the reason."""
    end = time.monotonic() + seconds
    found: list[dict[str, Any]] = []
    left_out: list[str] = []
    subjects: dict[str, Subject] = {}
    with torch.no_grad():
        for program, caller in scenarios:
            row = _attempt(subjects, program, caller, device, seeds, end)
            if isinstance(row, str):
                left_out.append(f"{program}, {caller}: {row}")
                continue
            found.append(row)
            tell(line(row))
            if len(row["trials"]) < seeds:
                left_out.append(f"{program}, {caller}: {seeds - len(row['trials'])} of {seeds} trials, time was up")
    for subject in subjects.values():
        subject.close()
    return {"scenarios": found, "left_out": left_out}


def _attempt(
    subjects: dict[str, Subject], program: str, caller: str, device: str, seeds: int, end: float
) -> dict[str, Any] | str:
    """A scenario, or why there is none. ``subjects`` are those made so far."""
    if caller == "other stream" and device != "cuda":
        return "needs a GPU"
    if time.monotonic() >= end:
        return "time was up"
    try:
        if program not in subjects:
            subjects[program] = Subject(PROGRAMS[program], device)
        return run_scenario(subjects[program], caller, seeds, end)
    except RuntimeError as error:  # what others showed is worth having
        return f"failed, {error}"


def line(row: dict[str, Any]) -> str:
    """A scenario: trials that were right (``?``: rounds of the truth disagree on that), the part of its budget that the
    middle trial lost, and the worst; µs per call of each candidate, and its ratio to the fastest one."""
    times = []
    for name, one in sorted(row["truth"].items(), key=lambda item: item[1]["ratio"]):
        slower = "" if one["ratio"] == 1 else f" (×{one['ratio']:.2f}, {one['least']:.2f} to {one['largest']:.2f})"
        times.append(f"{name} {one['us']:.1f}{slower}")
    lost = [each["lost_of_budget"] for each in row["trials"]] or [0.0]
    right = sum(each["right"] for each in row["trials"])
    doubt = "" if all(each["sure"] for each in row["trials"]) else "?"
    judged = f"right {right}/{len(row['trials'])}{doubt}, lost {statistics.median(lost):.2f}, worst {max(lost):.2f}"
    handicap = "; {us:.1f} µs added to replays on the {where}".format(**row["handicap"]) if row["handicap"] else ""
    return f"{row['program']:<21} {row['caller']:<16} {judged}; {', '.join(times)}{handicap}"


def totals(found: dict[str, Any]) -> str:
    """All scenarios in one line, and a line for each that was left out."""
    trials = [each for row in found["scenarios"] for each in row["trials"]]
    right = sum(each["right"] for each in trials)
    worst = max((each["lost_of_budget"] for each in trials), default=0.0)
    over = sum(each["lost_of_budget"] > 1 for each in trials)
    certain = [each["right"] for each in trials if each["sure"]]
    text = f"right: {right} of {len(trials)} trials, {sum(certain)} of the {len(certain)} whose truth is certain"
    text += f"; lost at most {worst:.2f} of the budget, more than it in {over}"
    return "\n".join([text, *(f"left out: {each}" for each in found["left_out"])])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each scenario; ``--out`` gets everything. Building the driver is not in the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seeds", type=int, default=5, help="trials of each scenario")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="begin nothing new after so many")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    chosen = parser.parse_args(arguments)
    if driver_for(chosen.device) is None:
        parser.error(f"no driver captures on {chosen.device}")
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    settle(chosen.device)
    gc.collect()
    gc.freeze()
    print(f"µs per call; right: at most {WITHIN:.0%} slower than the fastest; lost: as a part of the budget")
    try:
        found = run_all(SCENARIOS, chosen.device, chosen.seeds, chosen.seconds)
    finally:
        gc.unfreeze()
    print(totals(found))
    if chosen.out is not None:
        facts = {"torch": torch.__version__, "device": _device(chosen.device), "within": WITHIN, "seeds": chosen.seeds}
        chosen.out.write_text(json.dumps({**facts, "seconds": chosen.seconds, **found}, indent=1))


def _device(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else kind


if __name__ == "__main__":
    main()
