"""A workload in the process of a side: what ``pygraph.bench.worker`` runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import sharing
from benchmarks.sides import cloning, compile_as, step_as
from benchmarks.workload import Workload
from pygraph.bench.process import Spec
from pygraph.bench.timing import CALLS_COMPARED, Program
from pygraph.bench.worker import Serving

__all__ = ["SUITE", "program_of", "run_workload", "workloads"]

SUITE = "benchmarks.suite"
_TURNS_COMPARED = 4
"""How often sizes that take turns come before comparing ends: run, captured, and replayed on every side."""


def workloads(suite: str = SUITE) -> dict[str, Workload]:
    """The workloads of a module with ``WORKLOADS``, by name. Raises ValueError where there are none."""
    try:
        found = importlib.import_module(suite).WORKLOADS
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"'{suite}' is no suite: {error}") from error
    listed: Sequence[Workload] = tuple(found.values()) if isinstance(found, Mapping) else tuple(found)
    return {workload.name: workload for workload in listed}


def program_of(workload: Workload, sides: Sequence[str], *, tiny: bool, calls: int | None, suite: str) -> Program:
    """``workload`` on those of ``sides`` that apply to it."""
    return Program(
        name=workload.name,
        runner="benchmarks.running:run_workload",
        path=workload.name,
        args=("--suite", suite, *(["--tiny"] if tiny else [])),
        sides=tuple(side for side in sides if workload.whole_step or side != "whole-step"),
        about={key: getattr(workload, key) for key in ("about", "kind", "domain", "why_tolerance")},
        calls=calls or workload.calls,
        tolerance=workload.tolerance,
        compared=max(CALLS_COMPARED, _TURNS_COMPARED * workload.turns),
        apart=workload.random,
        finite=False,
    )


def run_workload(spec: Spec, serving: Serving) -> Callable[[], None]:
    """What calls the step as often as the coordinator wants, with everything imported that it needs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(spec.args)
    workload = workloads(chosen.suite)[spec.program]
    for module in workload.imports:
        importlib.import_module(module)

    def compile(target: Any) -> Any:
        compiled = compile_as(spec.side, target)
        return cloning(compiled) if workload.feeds_back and spec.side == "reduce-overhead" else compiled

    def run() -> None:
        with sharing(Path(spec.result).parents[1] / "choices.json"):
            step = step_as(spec.side, (workload.tiny if chosen.tiny else workload.build)(compile, spec.device))
            serving.keep(step())
            for keep in serving.calls:
                if keep:
                    serving.keep(step())
                else:
                    step()  # dropped before the next call

    return run
