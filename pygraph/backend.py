"""The ``torch.compile`` entry: takes what Dynamo and AOTAutograd hand over through lifting, passes, Inductor, regions.

Everything that can fail in PyGraph itself is caught here once: the user's program then gets plain Inductor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pygraph import compat
from pygraph.dump import trace_report
from pygraph.errors import CaptureError, OptionError
from pygraph.frontend.location import GraphOrigin, origin_of
from pygraph.inductor.lineage import following
from pygraph.inductor.record import program_record
from pygraph.inductor.wrap import Boxed, boxed
from pygraph.logs import configure
from pygraph.regions import attach, prepare
from pygraph.report.model import GraphReport, open_report
from pygraph.runtime.provenance import Refusal
from pygraph.settings import Settings
from pygraph.warm import Facts, Keeper, cached_under, entry_tag, forgetting, restoring

if TYPE_CHECKING:
    from pygraph.compilation import GraphCompiler

__all__ = ["pygraph"]


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
    settings.check_passes()  # a pipeline that does not parse is the caller's mistake, not a failure in here
    tag = None if unusable else entry_tag(gm, settings)
    keeper = None if tag is None else Keeper(tag)
    inner: Any = _Compiler(settings, origin_of(gm), compat.compiler_config.cache_key_tag, keeper, unusable)
    with cached_under(tag), restoring(keeper, inner.restore), following():
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
    """Inductor's ``inner_compile`` for one Dynamo graph, and what restores a program of it that AOTAutograd kept.

    ``unusable`` says why this torch cannot be worked with, if so.
    """

    settings: Settings
    origin: GraphOrigin
    user_tag: str
    keeper: Keeper | None
    unusable: str

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        report = open_report(_kind(kwargs), self.origin)
        if self.unusable:
            report.error = self.unusable
            return compat.compile_fx_inner(gm, example_inputs, **kwargs)
        return self._cold.compile(gm, example_inputs, kwargs, report)

    @cached_property
    def _cold(self) -> GraphCompiler:
        from pygraph.compilation import GraphCompiler  # a program that is restored does without the compiler

        return GraphCompiler(self.settings, self.user_tag, self.keeper)

    def restore(self, program: Any, facts: Facts, told: bytes, path: Path) -> Boxed:
        """What AOTAutograd's cache had kept: ``program`` gets its regions back, and the report says the same of it.

        What fails for an operator in a capture cannot be cut, as the graph is gone: a later process compiles it again.
        """
        start = time.perf_counter()
        report = open_report(facts.kind, self.origin)
        try:
            facts.fill(report, told)
            report.record, report.source = program_record(program), program.source_code
            heard = forgetting(path, functools.partial(_not_cut, report))
            run = boxed(attach(program, facts, report, self.settings, heard)[0])
        except Exception as error:  # the program itself is Inductor's, and whole
            if self.settings.strict:
                raise
            report.give_up(error)
            return boxed(program)
        report.times_ms["restore"] = (time.perf_counter() - start) * 1e3
        trace_report(report)
        return run


def _kind(kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def _not_cut(report: GraphReport, refusal: Refusal) -> None:
    report.notes.append(f"not cut where a capture failed ({refusal.reason}): the next process compiles the graph again")
