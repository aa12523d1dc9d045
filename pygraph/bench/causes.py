"""``pygraph profile``: causes of the time of a script's calls, uncaptured and replayed, from torch.profiler's traces.

Each run has its own process, and one follows the other. In one process, each call would check the guards of both
programs, and training would continue from the state of the other run. Drift matters little, since shares are shown,
not ratios. Figures are medians over calls, so that a few disturbed calls do not matter.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from pygraph.bench.process import CALL, Outcome, Process, Spec
from pygraph.bench.sides import OURS, UNCAPTURED
from pygraph.bench.timing import CALLS_COMPARED, LEAD_CALLS
from pygraph.errors import PygraphError
from pygraph.report.facts import percent
from pygraph.report.html import template
from pygraph.version import __version__

SCHEMA_VERSION = 2
"""Version of the JSON schema, increased when a key is renamed or removed, or its meaning changes."""

REPLAYED = "replayed"
AUTOGRAD, OPTIMIZER, WAITING, OTHER = "autograd", "optimizer", "waiting", "Python and other"
_REPLAY = r"graph\d+_\w+\.region(\d+)|captured callable "
"""The range of a replay, with the region's number."""


class Cause(NamedTuple):
    """A cause of host time: a pattern of the names of its ranges, and a description."""

    ranges: str
    about: str


CAUSES = {
    "guards": Cause(r"TorchDynamo Cache Lookup|Pregraph bytecode", "Dynamo looks up the program for these arguments"),
    AUTOGRAD: Cause(
        r"autograd::|torch::autograd::|CompiledFunction|AOTDispatcher |Torch-Compiled Region",
        "the engine, and AOTAutograd's wrappers of compiled programs",
    ),
    OPTIMIZER: Cause(r"Optimizer\.(step|zero_grad)#", "torch.optim, with its operators"),
    WAITING: Cause(
        r"cuda\w*Synchronize|cu(Ctx|Stream|Event)Synchronize|cudaMemcpy$",
        "the host waits for the GPU: synchronisations, also those of .item() and of copies",
    ),
    "launches": Cause(
        rf"\w+::|## Call CompiledFxGraph|{_REPLAY}|cu(da)?[A-Z]",
        "operators, launches of kernels, replays; without a GPU, the kernels themselves",
    ),
    OTHER: Cause(r"(?!)", "the script and all that no range is known of"),
}
"""Causes by name. A range has the first cause whose pattern matches the beginning of its name, or else the cause of the
enclosing range; inside the optimizer, everything except waiting belongs to the optimizer."""

_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}
_ENGINE = "autograd::engine::evaluate_function"

_WAIT = 900.0
"""Seconds after which a process that does not answer counts as hung."""
_DRAWN, _WIDTH = 3, 1100
"""Number of calls in the picture, and its width in pixels."""


class Span(NamedTuple):
    """An interval in µs, its cause, and the region whose replay it belongs to."""

    start: float
    end: float
    what: str
    region: int | None = None


@dataclass(frozen=True)
class Profile:
    """Times of a trace, in µs from the entry of the first profiled call to the end of all work.

    ``host`` gives the cause of each moment, without gaps. ``device`` has the intervals in which the GPU was busy,
    without overlaps; None without a GPU. ``calls`` are the calls, ``replays`` is the total number of replays, and
    ``events`` has the trace's own events in that time.
    """

    calls: tuple[Span, ...]
    host: tuple[Span, ...]
    device: tuple[Span, ...] | None
    replays: int
    events: tuple[dict[str, Any], ...]

    @property
    def wall_us(self) -> float:
        """Time of a call, µs: the median over calls, as in the methods below."""
        return statistics.median(call.end - call.start for call in self.calls)

    def host_us(self) -> dict[str, float]:
        """Host time of a call by cause, µs. (Medians need not add up.)"""
        calls = self._in_calls(self.host)
        return {cause: statistics.median(call[cause] for call in calls) for cause in CAUSES}

    def gpu_us(self) -> dict[str, float] | None:
        """Time of a call in which the GPU was ``busy`` and ``idle``, µs; None without a GPU."""
        if self.device is None:
            return None
        busy = [sum(call.values()) for call in self._in_calls(self.device)]
        idle = [call.end - call.start - us for call, us in zip(self.calls, busy, strict=True)]
        return {"busy": statistics.median(busy), "idle": statistics.median(idle)}

    def _in_calls(self, spans: Iterable[Span]) -> list[dict[str, float]]:
        """Time of each call by cause, µs."""
        found: list[dict[str, float]] = [defaultdict(float) for _ in self.calls]
        starts = [call.start for call in self.calls]
        for span in spans:
            for index in range(bisect.bisect(starts, span.start) - 1, bisect.bisect_left(starts, span.end)):
                call = self.calls[index]
                found[index][span.what] += min(span.end, call.end) - max(span.start, call.start)
        return found


@dataclass(frozen=True)
class Run:
    """A profile, and the time of a call without the profiler, µs, from calls before it."""

    profile: Profile
    unprofiled_us: float


# -- traces ------------------------------------------------------------------------------------------------------------


def read(trace: Mapping[str, Any], gpu: bool) -> Profile:
    """The profile of a chrome trace by torch.profiler, in which ranges called CALL mark the calls, end to end.

    When the calling thread is in no range, the ranges of autograd's threads count: a backward on a GPU runs there, and
    the caller waits. A gap between two nodes of autograd's engine counts as autograd. Raises PygraphError if no call is
    marked.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted((event for event in events if event["name"] == CALL), key=lambda event: event["ts"])
    marks = [mark for mark in marks if mark.get("cat") == "user_annotation"]  # and not its shadow on a GPU
    if not marks:
        raise PygraphError("torch.profiler's trace has none of the calls")
    first, end = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"] - marks[0]["ts"]
    threads: dict[Any, list[tuple[Span, str]]] = defaultdict(list)
    device, replays, kept = [], 0, []
    for event in events:
        start, kind, name = event["ts"] - first, event.get("cat"), event["name"]
        span = Span(max(start, 0.0), min(start + event["dur"], end), _DEVICE.get(kind, ""))
        if span.start >= span.end or name == CALL:
            continue
        if kind in _DEVICE or kind in _HOST:
            kept.append({**event, "ts": start})
        if kind in _DEVICE:
            device.append(span)
        elif kind in _HOST:
            threads[event["pid"], event["tid"]].append((span, name))
            replays += start >= 0 and re.match(_REPLAY, name) is not None
    own = threads.pop((marks[0]["pid"], marks[0]["tid"]), [])
    engines = [ranges for ranges in threads.values() if any(name.startswith(_ENGINE) for _, name in ranges)]
    nodes = [span for ranges in (own, *engines) for span, name in ranges if name.startswith(_ENGINE)]
    starts, ends = {span.start for span in nodes}, {span.end for span in nodes}
    host = [
        span._replace(what=AUTOGRAD) if span.what == OTHER and span.start in ends and span.end in starts else span
        for span in _first_known([list(_by_cause(ranges, end)) for ranges in (own, *engines)])
    ]
    calls = [mark["ts"] - first for mark in marks]
    return Profile(
        tuple(Span(start, until, CALL) for start, until in zip(calls, [*calls[1:], end], strict=True)),
        tuple(host),
        tuple(_disjoint(device)) if gpu else None,
        replays,
        tuple(kept),
    )


def _by_cause(ranges: Iterable[tuple[Span, str]], end: float) -> Iterator[Span]:
    """The time of one thread from 0 to ``end``; the innermost of its ``ranges`` decides each moment."""
    at, nest = 0.0, [Span(0.0, end, OTHER)]
    for span, name in [*sorted(ranges, key=lambda each: (each[0].start, -each[0].end)), (Span(end, end, ""), "")]:
        while len(nest) > 1 and nest[-1].end <= span.start:
            inner = nest.pop()
            if inner.end > at:
                yield inner._replace(start=at)
                at = inner.end
        outer = nest[-1]
        if span.start > at:
            yield outer._replace(start=at, end=span.start)
            at = span.start
        replay = re.match(_REPLAY, name)
        region = int(replay[1]) if replay is not None and replay[1] else outer.region
        nest.append(Span(span.start, span.end, _cause(name, outer.what), region))


@functools.cache
def _cause(name: str, outer: str) -> str:
    found = next((cause for cause, (ranges, _) in CAUSES.items() if re.match(ranges, name)), outer)
    return outer if outer == OPTIMIZER and found != WAITING else found


def _disjoint(spans: Iterable[Span]) -> Iterator[Span]:
    """Union of ``spans``, in order; time in several spans counts for the first."""
    at = 0.0
    for span in sorted(spans):
        if span.end > at:
            yield Span(max(span.start, at), span.end, span.what)
            at = span.end


def _first_known(threads: Sequence[Sequence[Span]]) -> Iterator[Span]:
    """Spans that take each moment from the first thread with a known cause then."""
    starts = [[span.start for span in spans] for spans in threads]
    for at, until in itertools.pairwise([*sorted(set(itertools.chain(*starts))), threads[0][-1].end]):
        found = [spans[bisect.bisect(begin, at) - 1] for spans, begin in zip(threads, starts, strict=True)]
        first = next((span for span in found if span.what != OTHER), found[0])
        yield first._replace(start=at, end=until)


# -- runs --------------------------------------------------------------------------------------------------------------


def measure(script: str, args: Sequence[str], calls: int, step: Callable[[str], None]) -> dict[str, Run]:
    """Run ``script`` with ``args`` twice, and profile ``calls`` of its calls once they are warm.

    PyGraph compiles it both times; the first time, no region is captured. ``step`` is called with the current activity.
    Raises PygraphError, with the line of the script if the script raised.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = {
        name: Spec("pygraph.bench.script:run_script", script, args, side, device, result="")
        for name, side in ((UNCAPTURED, UNCAPTURED), (REPLAYED, OURS))
    }
    with tempfile.TemporaryDirectory() as folder:
        return {name: _run(name, spec, calls, Path(folder), step) for name, spec in runs.items()}


def _run(name: str, spec: Spec, calls: int, folder: Path, step: Callable[[str], None]) -> Run:
    log, trace = folder / f"{name}.log", folder / f"{name}.json"
    # replay even where that does not pay, and always in the program's order
    environ = {**os.environ, "PYGRAPH_LEDGER": "0", "PYGRAPH_ORDER": "program"}
    command = [sys.executable, "-m", "pygraph.bench.worker", json.dumps(dataclasses.asdict(spec))]
    process = Process(command, environ, log)
    facts: dict[str, Any] = {}
    try:
        for does, more in (
            ("ready", {}),
            ("compile", {}),
            ("warm", {"calls": CALLS_COMPARED, "seconds": 0.0}),
            ("block", {"calls": calls, "lead": LEAD_CALLS}),
            ("profile", {"calls": calls, "lead": LEAD_CALLS, "path": str(trace)}),
        ):
            step(f"{name}: {does}")
            if does != "ready":
                process.tell(does, **more)
            answer = process.answer(time.monotonic() + _WAIT)
            if answer.failure is not None:
                raise PygraphError(_told(spec.program, answer, calls, log.read_text(errors="replace")))
            facts.update(answer.facts)
    finally:
        process.end(time.monotonic())
    step(f"{name}: reading the trace")
    with open(trace, encoding="utf-8") as file:
        return Run(read(json.load(file), spec.device == "cuda"), facts["wall_us"])


def _told(script: str, answer: Outcome, calls: int, log: str) -> str:
    """The error, with the line of the script if the script raised it."""
    lines = re.findall(rf'^  File "{re.escape(script)}", line (\d+)', log, re.MULTILINE)
    place = f"{script}:{lines[-1]}" if answer.failure == "failed" and lines else script
    wanted = f"; --calls {calls} takes about {20 + 2 * calls}" if answer.failure == "ended" else ""
    return f"{place}: {answer.error}{wanted}"


# -- output ------------------------------------------------------------------------------------------------------------


def document(script: str, args: Sequence[str], runs: Mapping[str, Run]) -> dict[str, Any]:
    """``{schema, pygraph, torch, script, args, calls, runs}``. A run is ``{wall_us, unprofiled_us, host_us, gpu_us,
    replays}`` per call: ``host_us`` by cause; ``gpu_us`` is ``{busy, idle}``, or null without a GPU. Times are medians
    over calls, except ``unprofiled_us``, which is the mean of a block of calls."""
    return {
        "schema": SCHEMA_VERSION,
        "pygraph": __version__,
        "torch": torch.__version__,
        "script": script,
        "args": list(args),
        "calls": max(len(run.profile.calls) for run in runs.values()),
        "runs": {
            name: {
                "wall_us": run.profile.wall_us,
                "unprofiled_us": run.unprofiled_us,
                "host_us": run.profile.host_us(),
                "gpu_us": run.profile.gpu_us(),
                "replays": run.profile.replays / len(run.profile.calls),
            }
            for name, run in runs.items()
        },
    }


def rows(told: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of a document: a name, then for each run the time of a call in µs, and its share of the whole call."""
    runs = told["runs"].values()

    def row(name: str, values: Iterable[float]) -> tuple[str, ...]:
        shares = ((us, us / run["wall_us"]) for us, run in zip(values, runs, strict=True))
        return (name, *(text for us, share in shares for text in (f"{us:.1f}", percent(share))))

    for cause in CAUSES:
        yield row(cause, [run["host_us"][cause] for run in runs])
    yield row("all", [run["wall_us"] for run in runs])
    for state in ("busy", "idle"):
        if all(run["gpu_us"] is not None for run in runs):
            yield row(f"GPU {state}", [run["gpu_us"][state] for run in runs])


def notes(told: Mapping[str, Any]) -> Iterator[str]:
    """Remarks on a document."""
    runs = told["runs"]
    plain = ", ".join(f"{name} {run['unprofiled_us']:.1f}" for name, run in runs.items())
    yield f"µs of a call without the profiler, whose own time counts above: {plain}"
    if any(run["gpu_us"] is None for run in runs.values()):
        yield "torch finds no GPU: there are no busy and idle times of one"
    replays = runs[REPLAYED]["replays"]
    yield f"{replays:g} replays in a call" if replays else "nothing was replayed: 'pygraph explain' says why"


def table(told: Mapping[str, Any]) -> Table:
    """Table of the rows of a document, for a terminal."""
    shown = Table("host time, median µs of a call", box=None, padding=(0, 2, 0, 0))
    for name in told["runs"]:
        shown.add_column(name, justify="right")
        shown.add_column("", justify="right", style="dim")
    for row in rows(told):
        shown.add_row(*row)
    return shown


def page(told: Mapping[str, Any], runs: Mapping[str, Run]) -> str:
    """Self-contained page: the rows of a document, and a few calls of each run at the same scale."""
    drawn = {}
    for name, run in runs.items():
        calls = run.profile.calls
        first = max((len(calls) - _DRAWN) // 2, 0)
        drawn[name] = calls[first : first + _DRAWN]
    scale = _WIDTH / max(calls[-1].end - calls[0].start for calls in drawn.values())
    pictures: list[dict[str, Any]] = []
    for name, calls in drawn.items():
        profile, begin = runs[name].profile, calls[0].start
        lanes = [("host", _lane(profile.host, calls, scale))]
        if profile.device is not None:
            lanes.append(("GPU", _lane(profile.device, calls, scale)))
        ends = [round((call.end - begin) * scale, 1) for call in calls]
        pictures.append({"name": name, "lanes": lanes, "ends": ends, "us": calls[-1].end - begin})
    colours = {cause: f"c{number}" for number, cause in enumerate(CAUSES)}
    colours |= {OTHER: "input", "kernels": colours["launches"], "copies": colours[AUTOGRAD]}
    boxes = (box for picture in pictures for _, lane in picture["lanes"] for box in lane)
    return template("profile.html.jinja").render(
        told=told,
        rows=list(rows(told)),
        notes=list(notes(told)),
        causes=CAUSES,
        pictures=pictures,
        width=_WIDTH,
        colours=colours,
        regions=sorted({region for *_, region in boxes if region is not None}),
    )


def _lane(spans: Sequence[Span], calls: Sequence[Span], scale: float) -> list[tuple[int, int, str, int | None]]:
    """The x and width in pixels, cause and region of each box. The span at its middle decides the box of a pixel."""
    starts = [span.start for span in spans]

    def what(x: int) -> tuple[str, int | None]:
        at = calls[0].start + (x + 0.5) / scale
        found = bisect.bisect_right(starts, at) - 1
        return spans[found][2:] if found >= 0 and at < spans[found].end else ("", None)

    pixels = range(int((calls[-1].end - calls[0].start) * scale))
    boxes = [(key, list(columns)) for key, columns in itertools.groupby(pixels, what)]
    return [(columns[0], len(columns), *key) for key, columns in boxes if key[0]]


_OWN_THREADS = ("calls", "causes", "GPU")


def timeline(runs: Mapping[str, Run]) -> dict[str, Any]:
    """A trace for Perfetto or chrome://tracing, with a process for each run; all begin at the same time. It has the
    calls, the causes, the GPU's busy times, and all ranges, kernels and copies of torch.profiler's traces."""
    return {"traceEvents": [event for pid, item in enumerate(runs.items(), 1) for event in _events(pid, *item)]}


def _events(pid: int, name: str, run: Run) -> Iterator[dict[str, Any]]:
    profile = run.profile
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, spans in enumerate((profile.calls, profile.host, profile.device or ())):
        for span in spans:
            event = {"ph": "X", "pid": pid, "tid": tid, "ts": span.start, "dur": span.end - span.start}
            yield {**event, "name": span.what, "args": {} if span.region is None else {"region": span.region}}
    threads = dict.fromkeys((event["pid"], event["tid"], event["cat"] in _DEVICE) for event in profile.events)
    tids = {key: tid for tid, key in enumerate(threads, len(_OWN_THREADS))}
    names = [f"{'stream' if device else 'thread'} {thread}" for _, thread, device in threads]
    for tid, thread in enumerate((*_OWN_THREADS, *names)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for event in profile.events:
        yield {**event, "pid": pid, "tid": tids[event["pid"], event["tid"], event["cat"] in _DEVICE]}
