"""The functions beside ``torch.compile``: explain a model, read reports and counters, forget them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.frontend.location import noting_all_breaks
from pygraph.logs import working
from pygraph.report import model as kept
from pygraph.report.facts import plural, summarize, to_json
from pygraph.report.html import framed, render_html
from pygraph.report.model import GraphReport
from pygraph.report.text import render_text, summary_lines
from pygraph.runtime import events, live
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.settings import Settings


@dataclass(frozen=True, repr=False)
class Explanation:
    """The reports of one explained model. Prints as text; notebooks show the page.

    Args:
        reports: those of its graphs, oldest first
    """

    reports: Sequence[GraphReport]

    def __repr__(self) -> str:
        facts = "; ".join(summary_lines(summarize(self.reports)))
        return f"<Explanation of {plural(len(self.reports), 'graph')}: {facts}>"

    def __str__(self) -> str:
        return render_text(self.reports)

    def _repr_html_(self) -> str:
        return framed(self.reports)

    def html(self) -> str:
        """A self-contained page with a picture of each graph."""
        return render_html(self.reports)

    def json(self) -> dict[str, Any]:
        """The reports as data; the schema is versioned."""
        return to_json(self.reports)


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Compile ``model``, call it until its regions are replayed, and say what was captured and what was not, and why.

    The model is called ``capture_after + 1`` times with the same arguments: what it mutates is mutated as often. The
    state of the random generators is put back. Calls wait for a native library that is being built. Only graphs that
    are compiled meanwhile are explained: none of a model that runs compiled already (``reports`` has those). Raises
    what the model raises.

    Args:
        model: a module or a function
        *args: its arguments
        options: those of the backend
        **kwargs: its arguments by keyword
    """
    settings = Settings.make(options)
    known = {id(report) for report in kept.reports()}
    compiled = torch.compile(model, backend="pygraph", options=dict(options or {}))
    with torch.random.fork_rng(), noting_all_breaks(), waiting_for_builds(), working("explaining") as progress:
        for call in range(settings.capture_after + 1):
            progress(f"call {call + 1} of {settings.capture_after + 1}")
            compiled(*args, **kwargs)
    return Explanation([report for report in kept.reports() if id(report) not in known])


def reports() -> list[GraphReport]:
    """The reports of the last 256 graphs, and of all whose programs are alive, oldest first."""
    return kept.reports()


def counters() -> dict[str, int]:
    """Counts of the runtime in this process so far: captures, replays, uncaptured calls, and each other kind of event
    (see ``Event``), in all and by reason."""
    return dict(sorted(dict(events.counts).items()))  # a copy first: other threads may count meanwhile


def region_counters() -> dict[str, dict[str, int]]:
    """The counters of each region that is alive, by its name: since it was made, whatever ``reset`` has forgotten."""
    return live.counters_of(live.regions())


def reset() -> None:
    """Forget reports and counts. Compiled programs go on; ``torch._dynamo.reset()`` frees those."""
    kept.clear()
    events.forget()
