"""Warm starts: programs that AOTAutograd's cache restores in a later process get their regions and reports back.

AOTAutograd stores, under a key of Dynamo's graph, the keys of Inductor's programs. A hit skips ``inner_compile``: no
tracing, lifting, passes or Inductor. So a program's facts (report, origins of lines, roles of inputs) are stored in a
file next to Inductor's caches, and restored when AOTAutograd loads the program:

    cold:  Dynamo ─ AOTAutograd ─ lift ─ passes ─ Inductor ─ keep facts ─ wrap regions
    warm:  Dynamo ─ key ─ load program and facts ─ wrap regions                 (no facts, or another program's: a miss)

The key also covers everything else on which passes and report depend. So a program is never shared with plain Inductor,
other options, another source of this package, or other source lines. Facts are data; code is in Inductor's own entry.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pygraph import cache, compat
from pygraph.frontend.location import GraphOrigin
from pygraph.program.recording import Origin
from pygraph.report.model import GraphReport, RegionReport
from pygraph.settings import Settings
from pygraph.version import PACKAGE, package_digest


@dataclass(frozen=True)
class RegionFacts:
    """Facts of a region before it runs: its report, the origins of its function's lines (the first line is 0), the
    arguments that outlive the call in any case (``held``) or may do so (``lent``), and the operators that its replays
    call (``eager``)."""

    report: RegionReport
    origins: Mapping[int, Origin]
    held: tuple[int, ...]
    lent: tuple[int, ...]
    eager: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The facts from which Inductor's program gets its regions. ``tag`` is the cache key tag under which its kernels
    were made."""

    tag: str
    kind: str
    device: str
    regions: tuple[RegionFacts, ...]

    def fill(self, report: GraphReport, rest: str) -> None:
        """Fill ``report`` with the report of the program's compilation; most of it only when it is read."""
        report.device, report.regions = self.device, [region.report for region in self.regions]
        report.unread = functools.partial(_complete, rest)

    @staticmethod
    def from_json(data: Any) -> Facts:
        """Facts from ``data``, the JSON value of their ``asdict``."""
        return Facts(**{**data, "regions": tuple(map(_region_facts, data["regions"]))})


def _region_facts(data: Any) -> RegionFacts:
    report = RegionReport(**_with_tuples(data["report"]))
    origins = {int(line): Origin(**_with_tuples(one)) for line, one in data["origins"].items()}
    return RegionFacts(**{**_with_tuples(data), "report": report, "origins": origins})


def _with_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with the tuples that JSON has turned into lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _rest_of(report: GraphReport) -> str:
    """The rest of ``report`` that is valid in any process, as JSON. (Inductor's own entry has the record.)"""
    assert report.model is not None
    passes = [{**asdict(one), "stage": one.stage and one.stage.value} for one in report.passes]
    kept = {"model": asdict(report.model), "pipeline": report.pipeline, "passes": passes, "notes": report.notes}
    return json.dumps({**kept, "graph": str(report.graph)})


def _complete(rest: str, report: GraphReport) -> None:
    from pygraph.inductor.emitted import read_program  # imported only if the report is read
    from pygraph.ir import DeviceModel, Stage, parse_graph
    from pygraph.passes.manager import PassRecord

    kept = json.loads(rest)
    report.model, report.pipeline = DeviceModel.from_json(kept["model"]), kept["pipeline"]
    report.passes = tuple(PassRecord(**{**_with_tuples(one), "stage": Stage(one["stage"])}) for one in kept["passes"])
    report.emitted = None if report.record is None else read_program(report.source)
    report.notes = kept["notes"] + report.notes
    report.graph = parse_graph(kept["graph"])


# -- keys ----------------------------------------------------------------------------------------------------------


def program_rows(gm: torch.fx.GraphModule, origin: GraphOrigin) -> list[str]:
    """Lines that distinguish Dynamo's graph from others, apart from sizes: its operators, the user's lines and modules,
    the names of its inputs, and the declarations of operators from outside of torch."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    rows = [_row(node) for graph in graphs for node in graph.nodes if node.op != "placeholder"]
    return [*rows, f"{origin.inputs} {origin.several}"]


def _row(node: torch.fx.Node) -> str:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return f"{node.name} {compat.declaration(node.target)} {node.meta.get('stack_trace')} {modules}"


def entry_tag(rows: Iterable[str], settings: Settings) -> str | None:
    """The cache key tag for AOTAutograd's entry of a graph; None if the cache must stay off.

    It covers everything that programs, regions and reports depend on and torch does not hash: this package, the
    pipeline, the calibrated models, and ``rows``, which identify the user's program. The cache stays off with passes
    from elsewhere (their helpers are unknown), with dumps, and if torch is configured for other forms of entries.
    """
    config, dynamo = compat.functorch_config, compat.dynamo_config
    if not compat.WARM_STARTS or settings.dump_dir is not None:
        return None
    if not (config.enable_autograd_cache or config.enable_remote_autograd_cache):
        return None
    others = (config, "bundled_autograd_cache"), (config, "strict_autograd_cache"), (dynamo, "caching_precompile")
    if any(getattr(where, name, False) for where, name in others):
        return None
    passes = _passes(settings)
    if passes is None:
        return None
    sources = (package_digest(PACKAGE), package_digest(PACKAGE / "report"))
    options = f"{settings.strict} {settings.frames}"
    parts = (*sources, passes, options, _calibrations(), os.getcwd(), *rows)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{compat.compiler_config.cache_key_tag}|pygraph {digest}"


def _passes(settings: Settings) -> str | None:
    """The pipeline as text; None if it has passes from outside of this package."""
    if settings.passes is None:
        return ""
    from pygraph.passes.manager import PassManager

    manager = PassManager(settings.passes)
    ours = all(type(one).__module__.startswith("pygraph.") for one in manager.passes)
    return manager.text if ours else None


def _calibrations() -> str:
    """Hash of the content of all calibrations, on which decisions of passes depend."""
    folder = cache.cache_dir()
    files = sorted((folder / "calibration").glob("*.json")) if folder is not None else ()
    return hashlib.sha256(b"\0".join(cache.load(file) or b"" for file in files)).hexdigest()


@contextlib.contextmanager
def cached_under(tag: str | None) -> Iterator[None]:
    """Have AOTAutograd key its entries by ``tag`` in the block; if None, it neither looks up nor stores any."""
    if tag is None:
        with compat.functorch_config.patch(enable_autograd_cache=False):
            yield
        return
    with compat.compiler_config.patch(cache_key_tag=tag):
        yield


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keeper:
    """Stores the facts of programs under one entry tag, by the key and the guards of Inductor's own entry."""

    tag: str

    def path(self, key: str, guards: str | None) -> Path:
        """The file of one program."""
        digest = hashlib.sha256(f"{self.tag}\n{key}\n{guards}".encode()).hexdigest()
        return Path(compat.inductor_cache_dir()) / "pygraph" / digest

    def keep(self, program: Any, facts: Facts, report: GraphReport) -> bool:
        """Store ``facts`` of ``program``, and ``report``. Returns True if they were stored; not for a program that
        Inductor does not store."""
        key = getattr(program, "_fx_graph_cache_key", None)
        if key is None:
            return False
        path, lines = self.path(key, program.guards_expr), [_digest(program), json.dumps(asdict(facts))]
        try:
            cache.store(path, "\n".join([*lines, _rest_of(report)]).encode())
        except OSError as error:
            cache.warn_once(path.parent, f"nothing is kept for warm starts: {error}")
            return False
        return True

    def load(self, key: str, guards: str | None) -> tuple[Facts, str, str] | None:
        """Facts of a program, the rest of its report, and the hash of its text; None if nothing is stored."""
        content = cache.load(self.path(key, guards))
        if content is None:
            return None
        program, facts, rest = content.decode().split("\n")
        return Facts.from_json(json.loads(facts)), rest, program


def _digest(program: Any) -> str:
    return hashlib.sha256(program.source_code.encode()).hexdigest()


def mark_cached(run: Any, program: Any) -> None:
    """Have AOTAutograd store an entry for ``run``, which wraps ``program``: give it the attributes that it reads."""
    for name in ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr", "_time_taken_ns"):
        setattr(run, name, getattr(program, name, None))


# -- AOTAutograd loads a program -----------------------------------------------------------------------------------

Restore = Callable[[Any, Facts, str], Any]
"""Takes a loaded program of Inductor, its facts and the rest of its report; returns the function to call instead."""

_active = threading.local()


@contextlib.contextmanager
def restoring(keeper: Keeper | None, restore: Restore) -> Iterator[None]:
    """In the block, pass programs that AOTAutograd loads on this thread to ``restore``, with their facts."""
    if keeper is None:
        yield
        return
    _install()
    previous = getattr(_active, "listener", None)
    _active.listener = (keeper, restore)
    try:
        yield
    finally:
        _active.listener = previous


@functools.cache
def _install() -> None:
    """Hook into the loading of programs, once per process. Nothing changes for other backends."""
    entry: Any = compat.FxGraphCacheLoadable
    plain_load, plain_finish = entry.load, entry.post_compile

    def load(self: Any, example_inputs: Sequence[Any]) -> Any:
        listener = getattr(_active, "listener", None)
        if listener is None:
            return plain_load(self, example_inputs)
        found = listener[0].load(self.fx_graph_cache_info[0], self.fx_graph_guard_expr)
        if found is None:
            raise compat.FXGraphCacheMiss
        facts, rest, program = found
        with compat.compiler_config.patch(cache_key_tag=facts.tag):  # autotuned kernels are kept by the tag, too
            loaded = plain_load(self, example_inputs)
        if _digest(loaded) != program:  # processes that compiled one graph at the same time may have made two programs
            raise compat.FXGraphCacheMiss
        self._pygraph_found = facts, rest
        return loaded

    def post_compile(self: Any, result: Any, fx_config: Any) -> Any:
        listener = getattr(_active, "listener", None)
        found = self.__dict__.pop("_pygraph_found", None)
        if listener is None or found is None:
            return plain_finish(self, result, fx_config)
        with compat.own_partitions():
            made = plain_finish(self, result, fx_config)
        return listener[1](made, *found)

    entry.load, entry.post_compile = load, post_compile
