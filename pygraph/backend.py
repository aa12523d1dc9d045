"""The ``torch.compile`` entry, and the path of a compilation from top to bottom.

    torch.compile ─ Dynamo ─ pygraph() ─ AOTAutograd ─┬─ _Compiler: lift ─ passes ─ Inductor ─┬─ attach ─ report
                                                      └─ _Compiler.restore: from caches ──────┘

AOTAutograd calls ``_Compiler`` once for each graph that it makes: inference, or forward and backward. Every failure in
PyGraph is caught here, and plain Inductor then compiles the program. Imports for cold compilations only are local.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from pygraph import compat
from pygraph.dump import Boxed, dump_program, graph_dir, saving_inputs, trace_report
from pygraph.errors import CaptureError, OptionError, PassError
from pygraph.frontend.location import GraphOrigin, common_module, origin_of
from pygraph.inductor.emitted import program_record
from pygraph.inductor.entry import bind, entry_text
from pygraph.inductor.lineage import following
from pygraph.logs import configure, step
from pygraph.program.recording import is_functional_collective
from pygraph.report.model import GraphReport, RegionReport, open_report
from pygraph.runtime import live
from pygraph.runtime.contract import Driver, make_driver, start_build
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.runtime.region import Region, RegionOptions
from pygraph.settings import Settings
from pygraph.warm import Facts, Keeper, RegionFacts, cached_under, entry_tag, mark_cached, program_rows, restoring

if TYPE_CHECKING:
    from pygraph.inductor.decision import Decision
    from pygraph.inductor.emitted import EmittedProgram, ProgramRecord, Step
    from pygraph.ir import Graph
    from pygraph.passes.manager import PassManager, PipelineResult

_log = logging.getLogger("pygraph")


# -- torch.compile -----------------------------------------------------------------------------------------------------


def pygraph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` as Inductor does, with its launches captured in regions. For ``torch.compile(backend="pygraph")``.

    ``mode`` takes Inductor's modes; their CUDA graphs are replaced by PyGraph's. ``options`` are those of
    ``pygraph.settings.Settings``. Raises OptionError or ParseError for an unknown mode, option or pass;
    ``torch.compile`` has already checked them.
    """
    configure()
    compat.announce()
    compat.mend_late_reads()
    compat.mend_number_writes()
    compat.mend_patterns()
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    settings, patches = _settings(mode, options)
    if settings.disable:
        return cast("Callable[..., Any]", compat.compile_fx(gm, example_inputs, config_patches=patches))
    unusable = compat.missing_text(compat.UNUSABLE)
    if unusable and settings.strict:
        raise CaptureError("strict", unusable)
    start_build(devices, settings.cache_dir)  # in the background
    origin = origin_of(gm)
    tag = None if unusable else entry_tag(program_rows(gm, origin), settings)
    keeper = None if tag is None else Keeper(tag)
    compiler = _Compiler(settings, origin, compat.compiler_config.cache_key_tag, keeper, unusable)
    with cached_under(tag), restoring(keeper, compiler.restore), following():
        return cast(
            "Callable[..., Any]",
            compat.compile_fx(gm, example_inputs, inner_compile=cast("Any", compiler), config_patches=patches),
        )


def _settings(mode: str | None = None, options: Mapping[str, Any] | None = None) -> tuple[Settings, dict[str, Any]]:
    """The user's options, checked: settings of PyGraph, and patches to Inductor's configuration."""
    settings = Settings.make(options)
    settings.check_passes()
    return settings, _inductor_patches(mode, settings)


compat.check_options(pygraph, _settings)


def _inductor_patches(mode: str | None, settings: Settings) -> dict[str, Any]:
    """Patches to Inductor's configuration for this graph. Raises OptionError for an unknown mode or option."""
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
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise OptionError(f"Inductor has no option '{unknown[0]}'" + (f"; did you mean '{close[0]}'?" if close else ""))
    return {**chosen, "triton.cudagraphs": False}


_OTHERS = ["the wrapper that is set for Inductor's partitions is not called for this graph's, which PyGraph replays"]
"""Note for a report if another library has called ``set_customized_partition_wrappers``."""


@dataclass
class _Compiler:
    """Inductor's ``inner_compile`` for one Dynamo graph, and the restoring of its program from AOTAutograd's cache.

    ``unusable`` says why PyGraph cannot work with this torch; empty if it can. Regions belong to ``owner``, taken where
    Dynamo compiles. ``forward`` is the forward graph, once it is lifted.
    """

    settings: Settings
    origin: GraphOrigin
    user_tag: str
    keeper: Keeper | None
    unusable: str
    owner: live.Owner = field(default_factory=live.owner, init=False)
    forward: Graph | None = field(default=None, init=False)

    # -- a cold compilation --------------------------------------------------------------------------------------------

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Boxed:
        report = open_report(_kind(kwargs), self.origin)
        step(f"compiling {report.name}: {self.origin.function} at {self.origin.start or 'an unknown line'}")
        if self.unusable:
            report.error = self.unusable
            return cast("Boxed", compat.compile_fx_inner(gm, example_inputs, **kwargs))
        with _timed(report, "copy"):
            original = {path: copy.deepcopy(module.graph) for path, module in _modules(gm)}
        try:
            with live.owned_by(self.owner):  # autograd compiles a backward graph on another thread
                run = self._compile(gm, example_inputs, kwargs, report)
        except Exception as error:  # whatever fails here, the user's program must run
            if self.settings.strict or (isinstance(error, PassError) and not error.built_in):
                raise
            report.give_up(error)
            _restore_graphs(gm, original)
            run = _boxed(compat.compile_fx_inner(gm, example_inputs, **kwargs), report)
        dump_program(self.settings.dump_dir, report)
        return run

    def _compile(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any], report: GraphReport
    ) -> Boxed:
        from pygraph.frontend.lift import lift
        from pygraph.inductor.compile import compile_under, pass_context, program_key
        from pygraph.inductor.decision import decide
        from pygraph.inductor.products import Products
        from pygraph.inductor.rewrites import (
            align_convolutions,
            compute_scalars_once,
            define_seeds,
            inputs_in_use,
            send_early,
            unwrap_idle,
        )
        from pygraph.inductor.write_back import fingerprint, write_back
        from pygraph.passes.manager import PassManager

        with _timed(report, "lift"):
            compute_scalars_once(gm)
            send_early(gm)
            layout = align_convolutions(gm)
            kwargs = kwargs if layout is None else {**kwargs, "layout_opt": layout}
            report.notes += unwrap_idle(gm) + define_seeds(gm)
            graph = lift(
                gm,
                kind=report.kind,
                static_inputs=self._static_inputs(gm, kwargs),
                origin=self.origin,
                frames=self.settings.frames,
            )
            lifted = fingerprint(graph)
        with _timed(report, "passes"):
            manager = PassManager(self.settings.pipeline, dump_dir=graph_dir(self.settings.dump_dir, report))
            context = pass_context(graph)
            ran = manager.run(graph, context)
            decision = decide(graph, context.device, manager.text, exact=ran.user_regions)
        if report.kind == "forward":
            self.forward = graph
        report.device, report.pipeline = decision.device, decision.pipeline
        report.graph, report.model = graph, context.model
        report.passes = ran.passes
        if self.settings.strict:
            _raise_if_uncaptured(report)
        with _timed(report, "write_back"), _blaming(ran, graph):
            report.notes += write_back(gm, graph, lifted)
        saved = self.settings.dump_inputs and graph_dir(self.settings.dump_dir, report)
        constants = _constants(gm) if saved else {}
        with _timed(report, "inductor"):
            tag = f"{self.user_tag}|pygraph {program_key(decision, manager.passes, gm)}"
            inputs = inputs_in_use(gm, example_inputs)
            products = Products(self.settings.cache_dir)
            program = compile_under(decision, manager.passes, gm, inputs, kwargs, tag, products.choose)
            report.notes += products.notes
        facts = _facts(program, graph, decision, report, tag, self.settings.strict)
        kept = self.keeper is not None and self.keeper.keep(program, facts, report)
        report.notes += _OTHERS if compat.others_partitions() else []
        run = attach(program, facts, report, self.settings)
        if kept:
            mark_cached(run, program)
        if not saved:
            return run
        return _boxed(saving_inputs(saved, [value.name for value in graph.inputs], constants, run), report)

    def _static_inputs(self, gm: torch.fx.GraphModule, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        from pygraph.frontend.lift import backward_static_inputs

        if not kwargs.get("is_backward"):
            return tuple(kwargs.get("static_input_idxs") or ())
        return backward_static_inputs(gm, self.forward) if self.forward is not None else ()

    # -- a warm one ----------------------------------------------------------------------------------------------------

    def restore(self, program: Any, facts: Facts, rest: str) -> Boxed:
        """Give ``program``, from AOTAutograd's cache, its regions and its report back."""
        report = open_report(facts.kind, self.origin)
        try:
            with _timed(report, "restore"), live.owned_by(self.owner):
                facts.fill(report, rest)
                report.record, report.source = program_record(program), program.source_code
                report.notes += _OTHERS if compat.others_partitions() else []
                run = attach(program, facts, report, self.settings)
        except Exception as error:  # the program itself is Inductor's, and still runs
            if self.settings.strict:
                raise
            report.give_up(error)
            return _boxed(program, report)
        trace_report(report)
        return run


def compile_module(
    gm: torch.fx.GraphModule,
    fakes: Sequence[Any],
    graph: Graph,
    passes: PassManager,
    settings: Settings,
    *,
    exact: bool,
) -> tuple[Boxed, GraphReport]:
    """Compile ``gm``, the module of a partitioned ``graph``, and attach its regions. Failures are raised.

    ``exact``: the program must have exactly the regions of ``graph``.
    """
    from pygraph.inductor.compile import compile_under, pass_context, program_key
    from pygraph.inductor.decision import decide

    report = open_report(graph.kind)
    context = pass_context(graph)
    decision = decide(graph, context.device, passes.text, exact=exact)
    report.device, report.pipeline, report.graph, report.model = decision.device, passes.text, graph, context.model
    static = tuple(position for position, value in enumerate(graph.inputs) if value.static)
    kwargs = {
        "static_input_idxs": static,
        "is_backward": graph.kind == "backward",
        "is_inference": graph.kind == "inference",
    }
    tag = f"{compat.compiler_config.cache_key_tag}|pygraph {program_key(decision, passes.passes, gm)}"
    program = compile_under(decision, passes.passes, gm, fakes, kwargs, tag)
    facts = _facts(program, graph, decision, report, tag, settings.strict)
    return attach(program, facts, report, settings), report


def _kind(kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


@contextlib.contextmanager
def _timed(report: GraphReport, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.times_ms[name] = (time.perf_counter() - start) * 1e3


@contextlib.contextmanager
def _blaming(ran: PipelineResult, graph: Graph) -> Iterator[None]:
    """Raise exceptions of the body as PassError of the user's passes that changed ``graph``, if any did."""
    try:
        yield
    except Exception as error:
        if not ran.user_changes:
            raise
        names, stage = tuple(record.name for record in ran.passes), graph.stage.value
        reason = f"the graph that it left cannot be compiled: {error}"
        raise PassError(reason, pass_name=", ".join(ran.user_changes), stage=stage, passes_run=names) from error


def _modules(gm: torch.fx.GraphModule) -> list[tuple[str, torch.fx.GraphModule]]:
    return [(path, m) for path, m in gm.named_modules() if isinstance(m, torch.fx.GraphModule)]


def _constants(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Tensors that ``gm`` itself holds as attributes, by target."""
    found = ((str(node.target), getattr(gm, str(node.target), None)) for node in gm.graph.find_nodes(op="get_attr"))
    return {target: value for target, value in found if isinstance(value, torch.Tensor)}


def _restore_graphs(gm: torch.fx.GraphModule, original: Mapping[str, torch.fx.Graph]) -> None:
    """Restore the graphs of a module and its subgraphs, which Inductor rewrites, and clear the output strides reported
    to AOTAutograd: Inductor accepts no second report."""
    for path, module in _modules(gm):
        if path in original:
            module.graph = original[path]
    context = compat.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()


def _raise_if_uncaptured(report: GraphReport) -> None:
    left = [u for u in report.uncaptured() if u.reason != "max-regions"]
    if left:
        rows = "\n".join(f"  {u.op} at {u.loc or 'unknown line'}: {u.reason}: {u.detail}" for u in left)
        raise CaptureError("strict", f"{len(left)} operators cannot be captured\n{rows}")


# -- facts of a program before it runs ---------------------------------------------------------------------------------


def _facts(program: Any, graph: Graph, decision: Decision, report: GraphReport, tag: str, strict: bool) -> Facts:
    """The facts of ``program`` before it runs, also written to ``report``. If ``strict``, raises CaptureError for a
    program that is not cut as decided."""
    from pygraph.frontend.lift import held_inputs, lent_inputs
    from pygraph.inductor.compile import compare
    from pygraph.inductor.emitted import line_origins, read_program

    record = program_record(program)
    if record is None:
        report.notes.append("Inductor did not partition this program: nothing is captured")
        return Facts(tag, report.kind, report.device, ())
    notes, forbidden = compare(decision, record)
    report.notes += notes
    if strict and record.differences:
        raise CaptureError("strict", "\n".join(("the program is not cut as was decided", *record.differences)))
    report.record, report.source = record, program.source_code
    report.emitted = emitted = read_program(program.source_code)
    report.regions = _region_reports(graph, decision, record, emitted, forbidden)
    lines = line_origins(program.source_code, emitted.regions, record.regions, decision)
    held, lent = held_inputs(graph), lent_inputs(graph)
    regions = tuple(
        RegionFacts(
            one,
            origins,
            _positions(function.arguments, held),
            _positions(function.arguments, lent),
            _called(steps, decision),
        )
        for one, function, origins, steps in zip(report.regions, emitted.regions, lines, record.regions, strict=True)
    )
    return Facts(tag, report.kind, report.device, regions)


def _called(steps: Sequence[Step], decision: Decision) -> tuple[str, ...]:
    """The operators that a region of these ``steps`` calls between segments."""
    placed = (decision.nodes.get(name) for step in steps for name in step.origins)
    named = [one.op for one in placed if one is not None and one.eager is not None]
    named += [one.op for step in steps for one in step.made if one.eager is not None]
    return tuple(dict.fromkeys(named))


def _positions(arguments: Sequence[str], names: frozenset[str]) -> tuple[int, ...]:
    """Positions of ``names`` among the arguments of a region."""
    return tuple(position for position, name in enumerate(arguments) if name in names)


def _region_reports(
    graph: Graph, decision: Decision, record: ProgramRecord, emitted: EmittedProgram, forbidden: Collection[int]
) -> list[RegionReport]:
    modules = {node.name: node.module for node in graph.nodes}
    found = []
    exact = [index for index in record.planned if index is not None]
    for region, steps in zip(emitted.regions, record.regions, strict=True):
        nodes = tuple(dict.fromkeys(name for step in steps for name in step.origins))
        regions = [decision.nodes[name].region for name in nodes if name in decision.nodes]
        if exact:
            regions = [exact[region.index]]
        planned = tuple(sorted({index for index in regions if index is not None}))
        reason = ""
        if region.index in forbidden:
            reason = "holds an operator judged not capturable"
        elif not region.kernels:
            reason = "launches nothing"
        elif planned and not decision.selected.intersection(planned):
            reason = "not selected by the model"
        module = common_module(modules[name] for name in nodes if modules.get(name))
        found.append(RegionReport(region.index, planned, nodes, region.kernels, not reason, reason, module=module))
    return found


# -- regions in place of partition functions ---------------------------------------------------------------------------


def attach(
    program: Any,
    facts: Facts,
    report: GraphReport,
    settings: Settings,
) -> Boxed:
    """Replace the partition functions of Inductor's ``program`` by regions. Returns the function to call: if the
    program is a single region, one that goes straight to the region's replay."""
    driver = _driver(facts, report, settings)
    if driver is None:
        return _boxed(program, report)
    folder = graph_dir(settings.dump_dir, report)
    made: list[tuple[Region, Boxed]] = []

    def wrap(known: RegionFacts, function: Boxed) -> Boxed:
        told = known.report
        if not told.wrapped:
            return function
        name = f"{report.name}.region{told.index}"
        first = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
        region = Region(
            function,
            driver,
            name=name,
            label=f"{name} {told.module}".rstrip(),
            options=RegionOptions(
                capture_after=settings.capture_after,
                memory_limit=settings.memory_limit,
                verify_every=settings.verify_every,
                ledger=settings.ledger,
                order=settings.order,
                launch_passes=settings.launches(folder and folder / f"region{told.index}"),
                collectives=settings.collectives,
                cache_dir=settings.cache_dir,
            ),
            held=known.held,
            lent=known.lent,
            origins={first + line: origin for line, origin in known.origins.items()},
            eager=known.eager,
        )
        told.record = region.record
        made.append((region, function))
        return functools.partial(_call_strictly, region) if settings.strict else region

    program.recursively_apply_fns([functools.partial(wrap, known) for known in facts.regions])
    entry = entry_text(program.source_code) if len(made) == len(facts.regions) == 1 else None
    if entry is None:
        return _boxed(program, report)
    region, function = made[0]
    return _boxed(bind(entry, getattr(function, "__globals__", {}), region, program), report, fresh=True)


def _boxed(program: Boxed, report: GraphReport, *, fresh: bool = False) -> Boxed:
    """A plain function around ``program``, or ``program`` itself if it is ours (``fresh``). It keeps ``report`` alive.

    Inductor's own object is not handed out, since it carries cache keys that would poison later plain compilations.
    """

    def run(args: list[Any]) -> Any:
        return program(args)

    chosen = program if fresh else run
    chosen._boxed_call, chosen._report = True, report  # type: ignore[attr-defined]
    return chosen


def _call_strictly(region: Region, args: list[Any]) -> Sequence[Any]:
    """Call ``region``. Raises CaptureError once the region, or an operator in it, turns out not to be capturable."""
    outputs = region(args)
    record = region.record
    if record.state == "uncaptured" and record.reason:
        raise CaptureError("strict", f"{record.name} cannot be captured: {record.reason}")
    for reason in record.eager_since.values():
        raise CaptureError("strict", f"{record.name} calls what cannot be captured: {reason}")
    return outputs


# -- drivers -----------------------------------------------------------------------------------------------------------


def _driver(facts: Facts, report: GraphReport, settings: Settings) -> Driver | None:
    """The driver of the regions to capture; None if nothing can be captured, with the reason in their reports."""
    wanted = [known.report for known in facts.regions if known.report.wrapped]
    if not wanted:
        return None
    start_build((torch.device(report.device).type,), settings.cache_dir)
    why = f"no driver captures on {report.device}"
    try:
        driver = driver_for(report.device)
    except CaptureError as error:
        if settings.strict:
            raise
        _warn_once(f"nothing is captured on {report.device}: {error}")
        driver, why = None, str(error)
    if driver is not None:
        waits = settings.strict or _votes(facts, driver, settings)
        with waiting_for_builds() if waits else contextlib.nullcontext():
            refusal = driver.unready()
        if refusal is not None and settings.strict:
            raise CaptureError(refusal.reason, refusal.detail)
    if driver is None:
        for region in wanted:
            region.wrapped, region.reason = False, why
    return driver


def _votes(facts: Facts, driver: Driver, settings: Settings) -> bool:
    """True if ranks may vote on captured collectives, which requires that all of them capture at the same call."""
    called = (name for known in facts.regions for name in known.eager)
    wanted = settings.collectives == "measured" and any(map(is_functional_collective, called))
    return wanted and driver.no_collectives() is None


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("pygraph: %s", text)


@functools.cache
def driver_for(device: str) -> Driver | None:
    """The driver that captures on a kind of device; None if there is none. Raises CaptureError if it cannot be made."""
    return make_driver(device.partition(":")[0])
