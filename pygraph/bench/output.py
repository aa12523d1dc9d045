"""Where results go: a folder that gets everything, or single files, JSON, Markdown and pictures by their endings.

What is in them is the business of ``results``, ``markdown`` and ``plots``.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph.bench.markdown import render_markdown
from pygraph.bench.results import Results
from pygraph.cache import write_atomically

__all__ = ["Outputs", "can_plot"]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Outputs:
    """Files to be written. ``plots`` are base names: each picture adds a word of its own to them."""

    json: tuple[Path, ...] = ()
    markdown: tuple[Path, ...] = ()
    plots: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()

    @staticmethod
    def of(paths: Sequence[str]) -> Outputs:
        """What ``--out`` names. Raises ValueError for an ending that is not known, or a place that is not writable."""
        chosen: dict[str, list[Path]] = {".json": [], ".md": [], ".png": [], "": []}
        for text in paths:
            path = Path(text)
            ending = "" if path.is_dir() else path.suffix
            if ending not in chosen:
                raise ValueError(f"{text}: a folder, or a file that ends in .json, .md or .png")
            _check(path, folder=not ending)
            chosen[ending].append(path)
        if chosen[".png"] and not can_plot():
            raise ValueError(f"{chosen['.png'][0]}: pictures need matplotlib: pip install 'pygraph[plot]'")
        return Outputs(*(tuple(chosen[key]) for key in (".json", ".md", ".png", "")))

    def save(self, results: Results) -> None:
        """Write the JSON files; cheap enough to be done after every workload. Raises OSError."""
        for path in (*self.json, *(folder / "results.json" for folder in self.folders)):
            results.write(path)

    def draw(self, document: Mapping[str, Any], *, again: bool = False) -> list[str]:
        """Write everything else (``again``: the JSON too); returns what there is to say. Raises OSError."""
        for path in (*self.markdown, *(folder / "results.md" for folder in self.folders)):
            write_atomically(path, render_markdown(document, pictures=self._pictures(path)))
        if again:
            for path in (*self.json, *(folder / "results.json" for folder in self.folders)):
                write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
        if self.folders and not can_plot():
            return ["matplotlib is not installed: no pictures; draw them later with --from results.json --out DIR"]
        if self.plots or self.folders:
            from pygraph.bench.plots import draw

            for base in (*self.plots, *(folder / "results.png" for folder in self.folders)):
                draw(document, base)
        return []

    def _pictures(self, page: Path) -> str | None:
        """The base name of pictures that lie beside ``page``, None where there are none."""
        if page.parent in self.folders and can_plot():
            return "results"
        beside = [plot for plot in self.plots if plot.parent == page.parent]
        return beside[0].stem if beside else None


def _check(path: Path, folder: bool) -> None:
    """A long run must not end in a file that cannot be written."""
    if folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{path}: cannot be made: {error.strerror}") from error
    target = path if path.exists() else path.parent
    if (path.is_dir() and not folder) or not os.access(target, os.W_OK):
        raise ValueError(f"{path}: cannot be written")
