"""Rules of the judge on real steps: ``python benchmarks/judging.py NAMES [--calls N] [--device cuda] [--out FILE]``.

NAMES are workloads of the suite. Each of their calls is compared (``verify="always"``). Where bits of results that vary
differ, all further runs are made, and the table counts what accepts the replay: the spread of the first three, that of
all twelve with their surprises, or nothing. The other columns are wrong outcomes, made of that of the replay, and how
many of them would have been accepted:

    lag    the results of the replay before (right, where a call has the arguments of the one before)
    swap   two results of one shape and type in each other's place
    scale  all results that vary, times 1.01
    zero   a quarter of the largest result that varies is not written
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["PYGRAPH_VERIFY"] = "always"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import pygraph
from benchmarks.running import built, workloads
from pygraph.runtime import compare
from pygraph.runtime.judge import ODD_REPLAY, RUNS, Outcome, Spread, judge
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.tensors import digest

Judge = Callable[..., Refusal | None]
STAGES = (0, RUNS[0], sum(RUNS))


class Watch:
    """Stands in for ``judge``, and counts what it says at each stage, of right and of wrong outcomes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._before: list[tuple[tuple[Any, ...], list[Any]]] = []
        self._accepted: int | None = None

    def __call__(
        self, expected: Outcome, actual: Outcome, varying: Sequence[bool], spread: Spread, *, tolerant: bool = False
    ) -> Refusal | None:
        ask = functools.partial(judge, expected, varying=varying, spread=spread)
        differing = any(varying[i] for i in expected.differing(actual))
        if not differing or not actual.results:
            self.counts["alike" if not differing else "no room"] += 1
            return ask(actual)
        if spread.runs == 0:
            self._accepted = None
        found = ask(actual)
        if found is None and self._accepted is None:
            self._accepted = spread.runs
        if spread.runs < STAGES[-1]:
            return Refusal(ODD_REPLAY, "more runs are wanted")
        self.counts["refused" if self._accepted is None else f"accepted after {self._accepted}"] += 1
        for name, wrong in self._wrong(actual, varying):
            self.counts[f"{name} made"] += 1
            self.counts[f"{name} accepted"] += ask(wrong) is None
        key = actual.structure, *(getattr(each, "shape", None) for each in actual.results)
        self._before = [(k, r) for k, r in self._before if k != key]
        self._before.append((key, [r.clone() if isinstance(r, torch.Tensor) else r for r in actual.results]))
        return None if self._accepted is not None else found

    def _wrong(self, actual: Outcome, varying: Sequence[bool]) -> Iterator[tuple[str, Outcome]]:
        results = list(actual.results)
        floats = [
            i for i, each in enumerate(results) if varying[i] and isinstance(each, torch.Tensor) and each.numel() > 1
        ]
        key = actual.structure, *(getattr(each, "shape", None) for each in results)
        before = next((kept for k, kept in self._before if k == key), None)
        if before is not None:
            yield "lag", _with(actual, {i: before[i] for i in floats})
        pairs = [
            (i, j)
            for i in floats
            for j in floats
            if i < j and results[i].dtype == results[j].dtype and results[i].shape == results[j].shape
        ]
        if pairs:
            i, j = pairs[0]
            yield "swap", _with(actual, {i: results[j], j: results[i]})
        yield "scale", _with(actual, {i: results[i] * 1.01 for i in floats if results[i].is_floating_point()})
        if floats:
            most = max(floats, key=lambda i: results[i].numel())
            changed = results[most].clone()
            flat = changed.view(-1) if changed.is_contiguous() else changed.reshape(-1)
            flat[: flat.numel() // 4] = 0
            yield "zero", _with(actual, {most: flat.view(changed.shape)})


def _with(actual: Outcome, changed: dict[int, torch.Tensor]) -> Outcome:
    contents, results = list(actual.contents), list(actual.results)
    for index, value in changed.items():
        contents[index], results[index] = digest(value), value
    return replace(actual, contents=tuple(contents), results=results)


def measure(name: str, calls: int, device: str, *, tiny: bool) -> dict[str, int]:
    """Counts of the comparisons of some calls of one workload."""
    pygraph.reset()
    torch._dynamo.reset()
    watch = Watch()
    compare.judge = watch
    step, _ = built(workloads()[name], "pygraph", device, tiny=tiny)
    try:
        for _ in range(calls):
            step()
    except pygraph.ReplayError as error:
        watch.counts["raised"] += 1
        print(f"{name}: {error}", flush=True)
    for report in pygraph.reports():
        for region in report.regions:
            for reason, refusal in () if region.record is None else region.record.refusals.items():
                watch.counts[f"refusal {reason}"] += 1
                print(f"{name}: {refusal}"[:300], flush=True)
    return dict(watch.counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = {}
    for name in options.names:
        rows[name] = measure(name, options.calls, options.device, tiny=options.tiny)
        print(name, json.dumps(rows[name]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
