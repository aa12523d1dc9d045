"""Runs a workload in the process of a side, for ``pygraph.bench.worker``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kernels import sharing
from benchmarks.sides import GRAPH, STEP, STEP_IN_ORDER, WHOLE_STEP, cloning, compile_as, step_as
from benchmarks.workload import Step, Training, Workload
from pygraph.bench.process import Spec
from pygraph.bench.timing import CALLS_COMPARED, Program
from pygraph.bench.worker import Serving

__all__ = ["SUITE", "built", "program_of", "run_workload", "workloads"]

SUITE = "benchmarks.suite"
_TURNS_COMPARED = 4
"""Compared calls of each size, if sizes alternate: by then, each is run, captured, and replayed on every side."""


def workloads(suite: str = SUITE) -> dict[str, Workload]:
    """The workloads of a module with ``WORKLOADS``, by name. Raises ValueError if there are none."""
    try:
        found = importlib.import_module(suite).WORKLOADS
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"'{suite}' is no suite: {error}") from error
    listed: Sequence[Workload] = tuple(found.values()) if isinstance(found, Mapping) else tuple(found)
    return {workload.name: workload for workload in listed}


def program_of(workload: Workload, sides: Sequence[str], *, tiny: bool, calls: int | None, suite: str) -> Program:
    """``workload`` as a program, on the applicable ones of ``sides``."""
    applies = {WHOLE_STEP: workload.whole_step, GRAPH: workload.whole_step}
    applies |= dict.fromkeys((STEP_IN_ORDER, STEP), workload.kind == "training")
    return Program(
        name=workload.name,
        runner="benchmarks.running:run_workload",
        path=workload.name,
        args=("--suite", suite, *(["--tiny"] if tiny else [])),
        sides=tuple(side for side in sides if applies.get(side, True)),
        about={key: getattr(workload, key) for key in ("about", "kind", "domain", "why_tolerance")},
        calls=calls or workload.calls,
        tolerance=workload.tolerance,
        compared=max(CALLS_COMPARED, _TURNS_COMPARED * workload.turns),
        apart=workload.random,
        finite=False,
    )


def built(workload: Workload, side: str, device: str, *, tiny: bool) -> tuple[Step, Step]:
    """The step of ``workload`` as ``side`` runs it, and that step with all state that has to be equal."""

    def compile(target: Any) -> Any:
        compiled = compile_as(side, target)
        return cloning(compiled) if workload.feeds_back and side == "reduce-overhead" else compiled

    made = (workload.tiny if tiny else workload.build)(compile, device)
    if isinstance(made, Training):
        step = step_as(side, made.step)
        return step, replace(made, step=step)
    step = step_as(side, made)
    return step, step


def run_workload(spec: Spec, serving: Serving) -> Callable[[], None]:
    """Import the modules of a workload; return a function that runs the steps that the coordinator requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(spec.args)
    workload = workloads(chosen.suite)[spec.program]
    for module in workload.imports:
        importlib.import_module(module)

    def run() -> None:
        with sharing(Path(spec.result).parents[1] / "choices.json"):
            step, compared = built(workload, spec.side, spec.device, tiny=chosen.tiny)
            serving.keep(compared())
            for keep in serving.calls:
                if keep:
                    serving.keep(compared())
                else:
                    step()  # dropped before the next call

    return run
