"""The process of one side: ``python -m pygraph.bench.worker SPEC``, commands on stdin, answers on stdout.

It imports its modules, opens the GPU, and answers that it is ready; it does nothing more before the command to compile.
Output of the program goes to stderr. The program advances ``Serving.calls`` before each call, and waits there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

import pygraph
import pygraph.backend  # on every side alike
from pygraph.bench.compare import save, tensors_of
from pygraph.bench.process import CALL, Spec
from pygraph.report.facts import summarize
from pygraph.runtime.native_build import waiting_for_builds

_PARENT_SECONDS = 0.5
"""Seconds between checks that the coordinator is still alive, in a thread that otherwise sleeps."""
_SETTLING_SECONDS, _BETWEEN_LOOKS = 15.0, 10
"""Further seconds of warm-up while orders of launches are undecided, and number of calls between checks of that."""
_ROOM = 64 * 2**20
"""Bytes of results after which only those of the last compared call are kept."""
_MEMORY_CALLS = 3
"""Number of calls over which peak memory is measured."""

Steps = Generator[bool, None, dict[str, Any]]


class Serving:
    """Answers commands read from ``commands`` on ``answers``. The program advances ``calls`` before each of its calls.

    ``calls`` yields true if the program must keep the result of the call (``keep``), waits in ``next`` while other
    sides run, and ends when the process must end.
    """

    def __init__(self, commands: IO[str], answers: IO[str], spec: Spec) -> None:
        self.made = 0
        self._commands, self._answers, self._result = commands, answers, spec.result
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._gpu = spec.device == "cuda"
        self._settles = not spec.check
        self.calls: Iterator[bool] = self._serve()

    def keep(self, result: Any) -> None:
        """Keep a copy of the result of the latest call, on the CPU."""
        self._kept[self.made] = [tensor.detach().cpu().clone() for tensor in tensors_of(result)]

    def save(self) -> None:
        """Write the results kept since the last time, if any."""
        if self._kept and self._result:
            save(Path(self._result), self._kept)
            self._kept = {}

    def answer(self, facts: dict[str, Any], failure: str | None = None, error: str = "") -> None:
        """Answer the last command; after a ``failure``, the process does nothing more."""
        self._answers.write(json.dumps({"facts": facts, "failure": failure, "error": error}) + "\n")
        self._answers.flush()

    def _serve(self) -> Iterator[bool]:
        served: dict[str, Any] = {"compile": self._compile, "warm": self._warm}
        served |= {"block": self._block, "profile": self._profile}
        while line := self._commands.readline():
            command = json.loads(line)
            does = command.pop("do")
            if does == "finish":
                self.answer(what_was_captured())
                return
            self.answer((yield from served[does](**command)))

    def _call(self, keep: bool = False) -> Iterator[bool]:
        self.made += 1
        yield keep

    def _compile(self) -> Steps:
        """Make the first call."""
        yield from self._call(True)
        self._drain()
        return {}

    def _warm(self, calls: int, seconds: float) -> Steps:
        """Make ``calls`` in all, and more until ``seconds`` have passed and orders are decided; then measure memory."""
        self._tidy()
        while self.made < calls:
            room = sum(tensor.nbytes for kept in self._kept.values() for tensor in kept) < _ROOM
            yield from self._call(room or self.made + 1 == calls)
        self._drain()
        self.save()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end + (_SETTLING_SECONDS if self._settles and settling() else 0.0):
            for _ in range(_BETWEEN_LOOKS):  # not drained, which would disturb a running measurement
                yield from self._call()
        capturing_peak = torch.cuda.max_memory_allocated() if self._gpu else 0
        self._tidy()
        start = time.perf_counter()
        for _ in range(_MEMORY_CALLS):
            yield from self._call()
        self._drain()
        found = {"call_us": (time.perf_counter() - start) / _MEMORY_CALLS * 1e6, "calls": self.made}
        if self._gpu:
            found["capturing_peak_bytes"] = capturing_peak
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.memory_reserved()
        return found

    def _block(self, calls: int, lead: int) -> Steps:
        """Make ``lead`` untimed calls, then ``calls``, drained at both ends. Returns µs per call.

        ``host_us``: until the calls returned. ``wall_us``: until the device finished them.
        """
        for _ in range(lead):
            yield from self._call()
        self._drain()
        start = time.perf_counter()
        for _ in range(calls):
            yield False
        issued = time.perf_counter()
        self._drain()
        done = time.perf_counter()
        self.made += calls
        found = {"host_us": (issued - start) / calls * 1e6, "wall_us": (done - start) / calls * 1e6}
        return {name: float(f"{us:.6g}") for name, us in found.items()}

    def _profile(self, calls: int, lead: int, path: str) -> Steps:
        """Write a chrome trace of ``calls``, marked as CALL, after ``lead`` unmarked calls; the last one is drained."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(lead):
                yield from self._call()
            self._drain()
            for left in reversed(range(calls)):
                with torch.profiler.record_function(CALL):
                    yield from self._call()
                    if not left:
                        self._drain()
        profile.export_chrome_trace(path)
        return {}

    def _drain(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()

    def _tidy(self) -> None:
        """Free garbage of compilation and capture, so that it does not count in peak memory."""
        gc.collect()
        self._drain()
        if self._gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def settling() -> bool:
    """True while a captured region has not decided on the order of its launches."""
    records = [region.record for report in pygraph.reports() for region in report.regions if region.record is not None]
    return any(record.contests for record in records)


def what_was_captured() -> dict[str, Any]:
    """Coverage, regions with their measurements, and errors of graphs that were given up; empty if PyGraph compiled
    nothing."""
    reports = pygraph.reports()
    if not reports:
        return {}
    summary = summarize(reports)
    regions = []
    for region in (region for report in reports for region in report.regions):
        record = region.record
        orders = map(asdict, record.orders if record is not None else ())
        notes = list(record.notes if record is not None else ())
        regions.append({"state": region.state, "why": region.why, "orders": list(orders), "notes": notes})
    counts = {"launches": summary.launches, "captures": summary.captures, "replays": summary.replays}
    coverage = {"share": summary.coverage, **counts}
    return {"coverage": coverage, "regions": regions, "given_up": [r.error for r in reports if r.error is not None]}


def main() -> None:
    """Serve until the command to finish. An exception of the program is the answer, and the exit status is then 1."""
    spec = Spec(**json.loads(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:  # the program reads and prints elsewhere
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    status = serve(spec, commands, answers)
    sys.stderr.flush()
    os._exit(status)  # threads and exit handlers of a script are not measured


def _end_with_parent(parent: int) -> None:
    """End this process once the coordinator is gone: it would only disturb later measurements."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    if os.getpgrp() == os.getpid():  # with the compilers that were started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def serve(spec: Spec, commands: IO[str], answers: IO[str]) -> int:
    """Run the side of ``spec``. Returns the exit status."""
    serving = Serving(commands, answers, spec)
    try:
        module, _, function = spec.runner.partition(":")
        run = getattr(importlib.import_module(module), function)(spec, serving)
        if spec.check:
            from pygraph.compat import inductor_config

            inductor_config.fallback_random = True
        if spec.device == "cuda":
            torch.zeros(1, device="cuda")
        serving.answer({"ready": True})
        if next(serving.calls, None) is None:  # nobody wants it any more
            return 0
        random.seed(0)
        torch.manual_seed(0)
        with waiting_for_builds():
            run()
    except Exception as error:  # noqa: BLE001 - a side runs anybody's program: whatever it raises is the answer
        traceback.print_exc()
        told = "".join(traceback.format_exception_only(error)).strip()
        serving.answer({}, getattr(error, "failure", "failed"), told)
        return 1
    return 0


if __name__ == "__main__":
    main()
