"""Compiles a graph once more, without the operators that a capture of it failed for, and puts the new program in place.

That happens at the next call after the failure, on its thread. Which operators those are is found by the runtime and
judged by legality; how a graph is compiled is ``compilation``'s.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from pygraph import compat
from pygraph.inductor.again import Original
from pygraph.inductor.decision import Decision
from pygraph.inductor.failed import Failed
from pygraph.inductor.record import ProgramRecord
from pygraph.inductor.wrap import Boxed, RegionFunction, switch, wrap_regions
from pygraph.passes.operators import is_custom
from pygraph.regions import Wrapped
from pygraph.report.model import GraphReport
from pygraph.runtime.provenance import Refusal

__all__ = ["LIMIT", "Compiled", "Recompilation"]

_log = logging.getLogger("pygraph")

LIMIT = 4
"""How often one graph is compiled again, at most."""


@dataclass(frozen=True)
class Compiled:
    """A program: what Inductor made (``program``), the decision behind it, and its regions, each with the function
    that it took the place of (None where that stayed). ``run`` is what is called: ``program``, or a shortcut to its
    only region. ``kept`` says whether AOTAutograd's cache may restore it in a later process."""

    program: Any
    decision: Decision
    failed: Failed
    run: Boxed
    regions: Wrapped = ()
    kept: bool = False

    def same(self, decision: Decision) -> bool:
        """Whether a program under ``decision`` would be cut like this one."""
        return decision.digest() == self.decision.digest()

    def promises(self) -> tuple[object, ...]:
        """What callers were told of the results: AOTAutograd has compiled the backward for these strides."""
        found = [getattr(self.program, name, None) for name in ("output_strides", "mutated_input_idxs")]
        return (found[0], sorted(found[1] or ()))

    def retire(self) -> None:
        """Give back all that was captured. Whoever still runs the program goes on with uncaptured functions."""
        plain = [None if entry is None else _constantly(entry[1]) for entry in self.regions]
        wrap_regions(self.program, plain)
        for entry in self.regions:
            if entry is not None:
                entry[0].close()


Compile = Callable[["Recompilation", GraphReport, Failed, Compiled | None], Compiled | None]
"""Compiles the graph without what failed, into a report; None when that is decided as before."""


class Recompilation:
    """The program of one graph, and its replacements.

    ``heard`` is told of captures that failed; the next call then compiles again, if that decides anything anew, and at
    most LIMIT times in all. A replacement that promises other results than the first program, or that assumes more of
    symbolic sizes, is not used.
    """

    def __init__(
        self, original: Original, report: GraphReport, compile: Compile, write: Callable[[], None] | None = None
    ) -> None:
        """``write`` is called whenever the report is another one, the first time too."""
        self._original, self._report, self._compile = original, report, compile
        self._write = write or _nothing
        self._current: Compiled | None = None
        self._failed = Failed()
        self._left = LIMIT
        self._compiling = threading.Lock()
        self._use: Callable[[Boxed], None] = _ignore

    def start(self) -> Boxed:
        """Compile for the first time. Returns the function that stands for the graph's program from now on, which keeps
        this object alive. Raises what passes and Inductor raise."""
        self._current = self._compile(self, self._report, self._failed, None)
        assert self._current is not None
        run, self._use = switch(self._current.run, self)
        self._write()
        return run

    @property
    def current(self) -> Compiled:
        """The program in use, once there is one."""
        assert self._current is not None
        return self._current

    def listener(self, decision: Decision, record: ProgramRecord) -> Callable[[Refusal], None]:
        """Takes refusals of regions of the program that came of ``decision``. Does not keep this object alive."""
        heard = weakref.WeakMethod(self.heard)

        def listen(refusal: Refusal) -> None:
            alive = heard()
            if alive is not None:
                alive(refusal, decision, record)

        return listen

    def heard(self, refusal: Refusal, decision: Decision, record: ProgramRecord) -> None:
        """Have the next call compile again without the operators that ``refusal`` names. Called by the one thread that
        has the turn to capture; no lock is taken, as what holds it could run a finaliser that captures."""
        met = f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason
        everywhere = refusal.launch if _fails_everywhere(refusal) else None
        failed = self._failed.with_nodes(refusal.nodes, met, decision, record, everywhere)
        if self._left and failed.digest() != self._failed.digest():
            self._failed = failed
            self._use(self._retry)

    # -- the next call -------------------------------------------------------------------------------------------------

    def _retry(self, args: list[Any]) -> Any:
        assert self._current is not None
        if _may_compile() and self._compiling.acquire(blocking=False):
            try:
                self._replace(self._current)
            finally:
                self._compiling.release()
        return self._current.run(args)

    def _replace(self, current: Compiled) -> None:
        """Compile again, unless another thread compiles something just now: then the call after this one does."""
        if not compat.compile_lock.acquire(blocking=False):
            return
        try:
            failed = self._failed
            made = self._attempt(current, failed) if failed.digest() != current.failed.digest() else None
        finally:
            compat.compile_lock.release()
        self._current = made or current
        self._use(self._current.run)
        if self._failed is not failed and self._left:  # more was heard meanwhile
            self._use(self._retry)
        if made is not None:
            current.retire()

    def _attempt(self, current: Compiled, failed: Failed) -> Compiled | None:
        """The replacement of ``current``; None, with a note in the report, when there is none that may be used."""
        self._left -= 1
        fresh = GraphReport(self._report.index, self._report.kind, device="", origin=self._report.origin)
        assumed = self._original.assumptions()
        try:
            with self._original.surroundings():
                self._original.restore()
                made = self._compile(self, fresh, failed, current)
        except Exception as error:  # noqa: BLE001 - passes and Inductor raise anything; the old program still runs
            self._keep(f"compiling again failed: {type(error).__name__}: {error}")
            return None
        why = self._objection(made, current, assumed)
        if made is None or why is not None:
            self._keep(why or "what captures failed for is in no region")
            return None
        self._adopt(fresh, failed, current)
        return made

    def _objection(self, made: Compiled | None, current: Compiled, assumed: tuple[object, ...]) -> str | None:
        """Why ``made`` may not take the place of ``current``.

        Assumptions cannot be taken back, and would count as known the next time: so there is none.
        """
        if self._original.assumptions() != assumed:
            self._left = 0
            return "compiled again, it would assume more of symbolic sizes than is checked"
        if made is not None and made.promises() != current.promises():
            return "compiled again, its results would have other strides than promised"
        return None

    def _keep(self, why: str) -> None:
        said = f"not cut where a capture failed: {why}"
        self._report.notes.append(said)
        _log.warning("%s: %s", self._report.name, said)

    def _adopt(self, fresh: GraphReport, failed: Failed, before: Compiled) -> None:
        """Put what ``fresh`` says into the report that is known by this graph's name."""
        notes = [note for note in self._report.notes if note.startswith(_NOTE)]
        notes += [_note(name, met, before.decision) for name, met in failed.nodes.items()]
        fresh.notes = list(dict.fromkeys([*fresh.notes, *notes]))
        for entry in fields(GraphReport):
            setattr(self._report, entry.name, getattr(fresh, entry.name))
        for note in notes:
            _log.info("%s: %s", self._report.name, note)
        self._write()


_OF_THE_CODE = frozenset(
    {"capture-failed", "host-memcpy", "host-memory", "host-random", "host-read", "uncaptured-work"}
)
"""Reasons that lie in what an operator does, and not in what one call of it is given."""


def _fails_everywhere(refusal: Refusal) -> bool:
    """Whether the operator that is to blame would fail in its other calls, too: a model may have one in each layer."""
    return refusal.launch is not None and (refusal.reason in _OF_THE_CODE or is_custom(refusal.launch))


_NOTE = "compiled again, cut at"


def _note(name: str, met: str, decision: Decision) -> str:
    placed = decision.nodes.get(name)
    where = f"{placed.op} at {placed.loc or 'unknown line'}" if placed else name
    return f"{_NOTE} {where}: {met}"


def _may_compile() -> bool:
    """Whether nothing around the call would see, or forbid, what a compilation does."""
    if compat.dispatch_mode_depth() or compat.functorch_level() is not None:
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _constantly(function: RegionFunction) -> Callable[[RegionFunction], RegionFunction]:
    return lambda _: function


def _ignore(_: Boxed) -> None:
    """Before the program is there, nothing can be switched."""


def _nothing() -> None:
    """Nothing is written."""
