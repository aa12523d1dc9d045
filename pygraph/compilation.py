"""The cold road of one Dynamo graph: lift, passes, Inductor under the decision, regions, and what is kept of it.

A program that AOTAutograd's cache restores does not come here, nor does it import what this needs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraph import compat
from pygraph.dump import dump_program, graph_dir
from pygraph.errors import CaptureError
from pygraph.frontend import backward_static_inputs, held_inputs, lent_inputs
from pygraph.frontend.location import module_of
from pygraph.inductor.again import Original
from pygraph.inductor.attention import define_seeds, inputs_in_use, unwrap_idle
from pygraph.inductor.compile import compare, compile_steered, program_key
from pygraph.inductor.decision import Decision
from pygraph.inductor.direct import shortcut
from pygraph.inductor.failed import Failed
from pygraph.inductor.lines import line_origins
from pygraph.inductor.plan import Plan, judge_graph, plan
from pygraph.inductor.program import EmittedProgram, read_program
from pygraph.inductor.record import ProgramRecord, program_record
from pygraph.inductor.wrap import Boxed, boxed
from pygraph.inductor.write_back import write_back
from pygraph.ir import Graph
from pygraph.passes.manager import PassManager
from pygraph.recompile import Compiled, Recompilation
from pygraph.regions import attach
from pygraph.report.model import GraphReport, PassReport, RegionReport
from pygraph.settings import Settings
from pygraph.warm import Facts, Keeper, RegionFacts, forgetting, mark_cached

__all__ = ["GraphCompiler"]


@dataclass
class GraphCompiler:
    """Compiles the forward, and later the backward graph that come of one Dynamo graph."""

    settings: Settings
    user_tag: str
    keeper: Keeper | None
    forward: Graph | None = field(default=None, init=False)

    def compile(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any], report: GraphReport
    ) -> Boxed:
        """The program of ``gm``, for which Inductor's entry was called with ``kwargs``."""
        start = time.perf_counter()
        original = Original.take(gm, example_inputs, kwargs)  # Inductor rewrites the graph that it is given
        report.times_ms["copy"] = (time.perf_counter() - start) * 1e3
        write = functools.partial(dump_program, self.settings.dump_dir, report)
        again = Recompilation(original, report, functools.partial(self._compile, original), write)
        try:
            run = again.start()
            if again.current.kept:
                mark_cached(run, again.current.program)
        except Exception as error:  # whatever failed in here, the user's program must run
            if self.settings.strict:
                raise
            report.give_up(error)
            original.restore()
            run = boxed(compat.compile_fx_inner(gm, example_inputs, **kwargs))
            write()
        return run

    def _compile(
        self, original: Original, again: Recompilation, report: GraphReport, failed: Failed, before: Compiled | None
    ) -> Compiled | None:
        """A program of the graph without what failed, or None when that is decided as ``before``."""
        gm, kwargs = original.gm, original.kwargs
        report.notes += unwrap_idle(gm) + define_seeds(gm)
        planned = self._plan(gm, kwargs, report, failed)
        if before is not None and before.same(planned.decision):
            return None
        start = time.perf_counter()
        report.notes += write_back(gm, planned.graph, planned.lifted)
        modules = {node.name: module_of(node.meta) for node in gm.graph.nodes}
        report.times_ms["write_back"] = (time.perf_counter() - start) * 1e3
        start = time.perf_counter()
        judge = functools.partial(judge_graph, device=planned.decision.device, passes=planned.passes)
        inputs = inputs_in_use(gm, original.inputs)
        tag = f"{self.user_tag}|pygraph {program_key(planned.decision, planned.passes, failed.digest())}"
        program = compile_steered(gm, inputs, kwargs, planned.decision, judge, tag)
        report.times_ms["inductor"] = (time.perf_counter() - start) * 1e3
        facts = _facts(program, planned, report, tag, modules)
        path = None if self.keeper is None or before is not None else self.keeper.keep(program, facts, report)
        heard = None if report.record is None else again.listener(planned.decision, report.record)
        run, regions = attach(program, facts, report, self.settings, forgetting(path, heard))
        return Compiled(program, planned.decision, failed, run, regions, path is not None)

    def _plan(self, gm: torch.fx.GraphModule, kwargs: Mapping[str, Any], report: GraphReport, failed: Failed) -> Plan:
        manager = PassManager(self.settings.pipeline, dump_dir=graph_dir(self.settings.dump_dir, report))
        planned = plan(gm, report.kind, self._static_inputs(gm, kwargs), manager, failed)
        if report.kind == "forward":
            self.forward = planned.graph
        report.device = planned.decision.device
        report.graph, report.model, report.decision = planned.graph, planned.model, planned.decision
        report.pipeline = planned.decision.pipeline
        report.passes = tuple(PassReport(p.text, p.time_ms, p.modified, p.notes) for p in planned.result.passes)
        report.times_ms.update(lift=planned.lift_ms, passes=planned.passes_ms)
        if self.settings.strict:
            _raise_if_uncaptured(report)
        return planned

    def _static_inputs(self, gm: torch.fx.GraphModule, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        if not kwargs.get("is_backward"):
            return tuple(kwargs.get("static_input_idxs") or ())
        return backward_static_inputs(gm, self.forward) if self.forward is not None else ()


def _facts(program: Any, planned: Plan, report: GraphReport, tag: str, modules: Mapping[str, str]) -> Facts:
    """What is known of ``program`` before it runs, in ``report`` too."""
    record = program_record(program)
    if record is None:
        report.notes.append("Inductor did not partition this program: nothing is captured")
        return Facts(tag, report.kind, report.device, ())
    notes, forbidden = compare(planned.decision, record)
    report.notes += notes
    report.record, report.source = record, program.source_code
    report.emitted = emitted = read_program(program.source_code)
    report.regions = region_reports(planned.decision, record, emitted, forbidden, modules)
    lines = line_origins(program.source_code, emitted.regions, record.regions, planned.decision)
    held, lent = held_inputs(planned.graph), lent_inputs(planned.graph)
    regions = tuple(
        RegionFacts(one, origins, _positions(function.arguments, held), _positions(function.arguments, lent))
        for one, function, origins in zip(report.regions, emitted.regions, lines, strict=True)
    )
    text = shortcut(program.source_code) if len(regions) == 1 and regions[0].report.wrapped else None
    return Facts(tag, report.kind, report.device, regions, text)


def _positions(arguments: Sequence[str], names: frozenset[str]) -> tuple[int, ...]:
    """Where ``names`` are among the arguments of a region."""
    return tuple(position for position, name in enumerate(arguments) if name in names)


def region_reports(
    decision: Decision,
    record: ProgramRecord,
    emitted: EmittedProgram,
    forbidden: set[int],
    modules: Mapping[str, str],
) -> list[RegionReport]:
    """What is known of each emitted region before it ever runs, and whether it may be captured. ``modules`` has the
    user's module of each node."""
    found = []
    for region, steps in zip(emitted.regions, record.regions, strict=True):
        nodes = tuple(dict.fromkeys(name for step in steps for name in step.origins))
        regions = (decision.nodes[name].region for name in nodes if name in decision.nodes)
        planned = tuple(sorted({index for index in regions if index is not None}))
        reason = _unwrapped_reason(decision, planned, region.index in forbidden, bool(region.kernels))
        paths = [modules[name].replace(".", os.sep) for name in nodes if modules.get(name)]
        module = os.path.commonpath(paths).replace(os.sep, ".") if paths else ""
        found.append(RegionReport(region.index, planned, nodes, region.kernels, not reason, reason, module=module))
    return found


def _unwrapped_reason(decision: Decision, planned: tuple[int, ...], forbidden: bool, launches: bool) -> str:
    if forbidden:
        return "holds an operator judged not capturable"
    if not launches:
        return "launches nothing"
    if planned and not any(index in decision.selected for index in planned):
        return "not selected by the model"
    return ""


def _raise_if_uncaptured(report: GraphReport) -> None:
    left = [u for u in report.uncaptured() if u.reason != "max-regions"]
    if left:
        rows = "\n".join(f"  {u.op} at {u.loc or 'unknown line'}: {u.reason}: {u.detail}" for u in left)
        raise CaptureError("strict", f"{len(left)} operators cannot be captured\n{rows}")
