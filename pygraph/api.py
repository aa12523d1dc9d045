"""Functions next to ``torch.compile``: explain a model, read reports and counters, clear them."""

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
    """Reports of one explained model. Prints as text; notebooks show the HTML page.

    Args:
        reports: reports of the model's graphs, oldest first
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
        """Self-contained HTML page with a picture of each graph."""
        return render_html(self.reports)

    def json(self) -> dict[str, Any]:
        """Reports as JSON values, in a versioned schema (see ``pygraph.report.facts``)."""
        return to_json(self.reports)


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Compile ``model``, call it until its regions are replayed, and report what was captured, what was not, and why.

    The model is called ``capture_after + 1`` times with the same arguments; each call may mutate state. The state
    of torch's random generators is restored. Calls wait for a native library that is being built. The result covers
    only graphs that these calls compile; ``reports`` has earlier ones. Raises OptionError or ParseError for an
    invalid option, and any exception of the model.

    Args:
        model: module or function
        *args: positional arguments of each call
        options: options of the backend (see ``Settings``); default: none
        **kwargs: keyword arguments of each call
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
    """Reports of the last 256 graphs and of all live programs, oldest first."""
    return kept.reports()


def counters() -> dict[str, int]:
    """Counters of this process: captures, replays, uncaptured calls, and each other kind of event (see ``Event``), in
    total and by reason, such as ``refused`` and ``refused.host-read``."""
    return dict(sorted(dict(events.counts).items()))  # a copy first: other threads may count meanwhile


def region_counters() -> dict[str, dict[str, int]]:
    """Counters of each live region since its creation, by region name. ``reset`` does not clear them."""
    return live.counters_of(live.regions())


def reset() -> None:
    """Clear reports and the counters of this process. Compiled programs stay; ``torch._dynamo.reset()`` frees them."""
    kept.clear()
    events.forget()
