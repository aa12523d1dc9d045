"""The origins of FX nodes that Inductor's passes make.

    before:  mm ─ add ─ relu        addmm ▸ mm, add
    after:   addmm ─ relu

The sources of a node that a pattern makes are all nodes that the pattern matched. Other passes are followed by their
changes to the graph: the sources of new nodes are all nodes that are replaced or erased next. If neither applies, the
sources of a node are unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.fx import GraphModule
from torch.fx import Node as FxNode

from pygraph import compat

T = TypeVar("T")


class Lineage:
    """The nodes that were made while this was active, and their sources.

    A new node also carries its sources in ``meta[FX_MADE_FROM]``, for the lifting of its graph, and takes the stack
    trace of a node that it replaces, unless it has one.
    """

    def __init__(
        self,
        rewrite: Callable[[GraphModule], None] | None = None,
        may_match: Callable[[Iterable[FxNode]], bool] | None = None,
    ) -> None:
        self._rewrite = rewrite
        self.may_match = may_match or (lambda _: True)
        self._sources: dict[FxNode, dict[FxNode, None]] = {}
        self._latest: list[FxNode] = []
        self._used = False
        self._matching = False

    def sources(self, node: FxNode) -> tuple[FxNode, ...] | None:
        """The original nodes from which ``node`` was made, empty if unknown; None if ``node`` was not made here."""
        found = self._sources.get(node)
        return None if found is None else tuple(found)

    @contextmanager
    def replacing(self, gm: Any, matched: Iterable[FxNode]) -> Iterator[None]:
        """Context in which a pattern that matched these nodes is replaced."""
        made: list[FxNode] = []
        self._latest, self._matching = [], True
        try:
            with _hooked(gm, create=made.append):
                yield
        finally:
            self._matching = False
        self._sources.update((node, {}) for node in made)
        self._trace(made, list(matched))

    @contextmanager
    def watching(self, gm: Any) -> Iterator[None]:
        """Context in which passes run on the graph of ``gm``; ``rewrite`` runs at its end."""
        with _hooked(gm, create=self._created, replace=lambda old, **_: self._removed(old), erase=self._removed):
            yield
            if self._rewrite is not None:
                self._rewrite(gm)

    def _created(self, node: FxNode) -> None:
        if self._matching:
            return
        if self._used:
            self._latest, self._used = [], False
        self._latest.append(node)
        self._sources[node] = {}

    def _removed(self, node: FxNode) -> None:
        if not self._matching and self._latest and node not in self._latest:
            self._used = True
            self._trace(self._latest, [node])

    def _trace(self, made: Iterable[FxNode], removed: list[FxNode]) -> None:
        # Takes a while to import, and a restored program runs no passes.
        from pygraph.frontend.lift import FX_MADE_FROM, made_from

        known = [source for node in removed for source in self._sources.get(node, (node,))]
        traces = [node.meta["stack_trace"] for node in reversed(removed) if node.meta.get("stack_trace")]
        texts = [text for node in removed for text in made_from(node)]
        for node in made:
            self._sources[node].update(dict.fromkeys(known))
            node.meta[FX_MADE_FROM] = tuple(dict.fromkeys((*node.meta.get(FX_MADE_FROM, ()), *texts)))
            if traces and not node.meta.get("stack_trace"):
                node.meta["stack_trace"] = traces[0]


_active: ContextVar[Lineage | None] = ContextVar("lineage", default=None)


@contextmanager
def following(
    rewrite: Callable[[GraphModule], None] | None = None, may_match: Callable[[Iterable[FxNode]], bool] | None = None
) -> Iterator[Lineage]:
    """Follow the passes that Inductor runs on this thread meanwhile, and run ``rewrite`` after them. Patterns leave
    nodes alone that ``may_match`` refuses."""
    _install()
    lineage = Lineage(rewrite, may_match)
    token = _active.set(lineage)
    try:
        yield lineage
    finally:
        _active.reset(token)


@contextmanager
def _hooked(gm: GraphModule | None, **functions: Callable[..., object]) -> Iterator[None]:
    """Call these ``functions`` for changes to the graph of ``gm``; without a module, nothing is called."""
    hooks = {} if gm is None else functions
    for event, function in hooks.items():
        getattr(gm, f"_register_{event}_node_hook")(function)
    try:
        yield
    finally:
        for event, function in hooks.items():
            getattr(gm, f"_unregister_{event}_node_hook")(function)


@functools.cache
def _install() -> None:
    """Hook into Inductor's patterns and passes, once per process. Without an active lineage, nothing changes."""
    for entry in compat.pattern_entries:
        entry.apply = _followed(
            entry.apply,
            lambda lineage, _, match, graph, node: lineage.replacing(graph.owning_module, [*match.nodes, node]),
        )
    compat.PatternEntry.extra_check = property(_check_of, _set_check)
    module = compat.compile_fx_module
    module.post_grad_passes = _followed(module.post_grad_passes, lambda lineage, gm, *_, **__: lineage.watching(gm))


def _set_check(entry: Any, check: Callable[[Any], Any]) -> None:
    vars(entry)["extra_check"] = check


def _check_of(entry: Any) -> Callable[[Any], Any]:
    """The check of a pattern on the nodes that it matched. Nodes that it must not take count as not matched: some
    passes repeat a pattern for as long as it matches."""

    def check(match: Any) -> Any:
        lineage = _active.get()
        return (lineage is None or lineage.may_match(match.nodes)) and vars(entry)["extra_check"](match)

    return check


def _followed(function: Callable[..., T], context: Callable[..., AbstractContextManager[None]]) -> Callable[..., T]:
    """``function``, called within the ``context`` of the lineage that is active on its thread, if any."""

    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> T:
        lineage = _active.get()
        if lineage is None:
            return function(*args, **kwargs)
        with context(lineage, *args, **kwargs):
            return function(*args, **kwargs)

    return followed
