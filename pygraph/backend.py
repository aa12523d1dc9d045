"""The ``torch.compile`` entry: takes what Dynamo and AOTAutograd hand over through lifting, passes, Inductor, regions.

Everything that can fail in PyGraph itself is caught here once: the user's program then gets plain Inductor.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from pygraph import compat
from pygraph.dump import dump_program, graph_dir, trace_report
from pygraph.errors import CaptureError, OptionError
from pygraph.frontend import backward_static_inputs, held_inputs, lent_inputs
from pygraph.frontend.location import GraphOrigin, module_of, origin_of
from pygraph.ir import Graph
from pygraph.logs import configure
from pygraph.lowering.again import Original
from pygraph.lowering.attention import define_seeds, inputs_in_use, unwrap_idle
from pygraph.lowering.compile import compare, compile_steered, program_key, program_record
from pygraph.lowering.direct import shortcut
from pygraph.lowering.failed import Failed
from pygraph.lowering.lineage import following
from pygraph.lowering.lines import line_origins
from pygraph.lowering.plan import Plan, judge_graph, plan
from pygraph.lowering.program import read_program
from pygraph.lowering.wrap import wrap_regions
from pygraph.lowering.write_back import write_back
from pygraph.passes.manager import PassManager
from pygraph.recompile import Boxed, Compiled, Recompilation, Wrapped, boxed
from pygraph.regions import Wrapping, prepare, region_reports, region_wrapper
from pygraph.report.collect import open_report
from pygraph.report.model import GraphReport, PassReport
from pygraph.runtime.refusal import Refusal
from pygraph.settings import Settings
from pygraph.warm import Facts, Keeper, cached_under, entry_tag, forget, mark_cached, restoring

__all__ = ["pygraph"]

_log = logging.getLogger("pygraph")


def pygraph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` as Inductor does, with its launches captured in regions. For ``torch.compile(backend="pygraph")``.

    ``mode`` takes Inductor's modes; their CUDA graphs are replaced by PyGraph's. ``options`` are those of
    ``pygraph.settings.Settings``. Raises OptionError or ParseError for an unknown mode, option or pass.
    """
    configure()
    compat.announce()
    settings = Settings.make(options)
    patches = _inductor_patches(mode, settings)
    if settings.disable:
        return cast("Callable[..., Any]", compat.compile_fx(gm, example_inputs, config_patches=patches))
    unusable = compat.missing_text(compat.UNUSABLE)
    if unusable and settings.strict:
        raise CaptureError("strict", unusable)
    prepare({value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}, settings)
    PassManager(settings.passes)  # a pipeline that does not parse is the caller's mistake, not a failure in here
    tag = None if unusable else entry_tag(gm, settings)
    keeper = None if tag is None else Keeper(tag)
    origin = origin_of(gm)
    ours = _Compiler(settings, origin, compat.compiler_config.cache_key_tag, keeper)
    with cached_under(tag), restoring(keeper, ours.restore), following():
        inner: Any = functools.partial(_leave, unusable, origin) if unusable else ours
        return cast(
            "Callable[..., Any]",
            compat.compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches),
        )


def _inductor_patches(mode: str | None, settings: Settings) -> dict[str, Any]:
    try:
        chosen = dict(compat.list_mode_options(mode)) if mode else {}
    except RuntimeError as error:
        raise OptionError(str(error)) from error
    if settings.inductor.get("triton.cudagraphs"):
        raise OptionError("inductor option 'triton.cudagraphs' cannot be combined with PyGraph, which takes its place")
    chosen.update(settings.inductor)
    known = compat.inductor_config.get_config_copy()
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise OptionError(f"Inductor has no option '{unknown[0]}'")
    return {**chosen, "triton.cudagraphs": False}


@dataclass
class _Compiler:
    """Inductor's ``inner_compile`` for one Dynamo graph: called for the forward, and later for the backward graph."""

    settings: Settings
    origin: GraphOrigin
    user_tag: str
    keeper: Keeper | None
    forward: Graph | None = field(default=None, init=False)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Boxed:
        report = open_report(_kind(kwargs), self.origin)
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
            _give_up(report, error)
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
        path = None if self.keeper is None or before is not None else self.keeper.keep(program, facts)
        heard = None if report.record is None else again.listener(planned.decision, report.record)
        regions = self._wrap(program, facts, report, _forgetting(path, heard))
        return Compiled(program, planned.decision, failed, _entry(program, regions), regions, path is not None)

    def _plan(self, gm: torch.fx.GraphModule, kwargs: Mapping[str, Any], report: GraphReport, failed: Failed) -> Plan:
        manager = PassManager(self.settings.passes, dump_dir=graph_dir(self.settings.dump_dir, report))
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

    def restore(self, program: Any, facts: Facts, path: Path) -> Boxed:
        """What AOTAutograd's cache had kept: ``program`` gets its regions back, and the report says the same of it.

        What fails for an operator in a capture cannot be cut, as the graph is gone: a later process compiles it again.
        """
        start = time.perf_counter()
        report = open_report(facts.report["kind"], self.origin)
        try:
            facts.fill(report)
            report.record, report.source = program_record(program), program.source_code
            run = boxed(_entry(program, self._wrap(program, facts, report, _forgetting(path))))
        except Exception as error:  # the program itself is Inductor's, and whole
            if self.settings.strict:
                raise
            _give_up(report, error)
            return boxed(program)
        report.times_ms["restore"] = (time.perf_counter() - start) * 1e3
        trace_report(report)
        return run

    def _wrap(self, program: Any, facts: Facts, report: GraphReport, heard: Callable[[Refusal], None]) -> Wrapped:
        wrapping = Wrapping(
            report, self.settings, facts.held, facts.lent, heard=None if self.settings.strict else heard
        )
        pairs = zip(report.regions, facts.origins, strict=True)
        wrap_regions(program, [region_wrapper(region, wrapping, origins) for region, origins in pairs])
        return tuple(wrapping.made.get(region.index) for region in report.regions)


def _facts(program: Any, planned: Plan, report: GraphReport, tag: str, modules: Mapping[str, str]) -> Facts:
    """What is known of ``program`` before it runs, in ``report`` too."""
    held, lent = held_inputs(planned.graph), lent_inputs(planned.graph)
    record = program_record(program)
    if record is None:
        report.notes.append("Inductor did not partition this program: nothing is captured")
        return Facts.of(report, (), held, lent, tag)
    notes, forbidden = compare(planned.decision, record)
    report.notes += notes
    report.record, report.source = record, program.source_code
    report.emitted = read_program(program.source_code)
    report.regions = region_reports(planned.decision, record, report.emitted, forbidden, modules)
    lines = line_origins(program.source_code, report.emitted.regions, record.regions, planned.decision)
    return Facts.of(report, lines, held, lent, tag)


def _forgetting(path: Path | None, heard: Callable[[Refusal], None] | None = None) -> Callable[[Refusal], None]:
    """Takes refusals that name operators: what was kept for warm starts at ``path`` goes, then ``heard`` is told."""

    def listen(refusal: Refusal) -> None:
        if path is not None:
            forget(path)
        if heard is not None:
            heard(refusal)

    return listen


def _entry(program: Any, regions: Wrapped) -> Boxed:
    """What a call of the program enters by: its only region's replay, where it has but one and does nothing else."""
    only = regions[0] if len(regions) == 1 else None
    if only is None:
        return cast("Boxed", program)
    region, function = only
    names = getattr(function, "__globals__", {})
    direct = shortcut(program.source_code, names, region.expects_replay, region.try_replay, program)
    return direct or cast("Boxed", program)


def _kind(kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def _raise_if_uncaptured(report: GraphReport) -> None:
    left = [u for u in report.uncaptured() if u.reason != "max-regions"]
    if left:
        rows = "\n".join(f"  {u.op} at {u.loc or 'unknown line'}: {u.reason}: {u.detail}" for u in left)
        raise CaptureError("strict", f"{len(left)} operators cannot be captured\n{rows}")


def _leave(
    reason: str, origin: GraphOrigin, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    """Inductor's ``inner_compile`` on a torch that PyGraph cannot work with: its report says so."""
    open_report(_kind(kwargs), origin).error = reason
    return compat.compile_fx_inner(gm, example_inputs, **kwargs)


def _give_up(report: GraphReport, error: Exception) -> None:
    report.give_up(error)
    _log.warning("PyGraph left %s to plain Inductor: %s", report.name, report.error)
    _log.debug("where it failed", exc_info=error)
