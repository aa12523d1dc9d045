"""Passes: base classes, pipelines as text, the manager that runs them, and the built-in passes.

    pipeline text ──► Pass, Pass, … ──► PassManager.run(graph, context) ──► the graph, verified after each pass

A pass is a frozen dataclass whose fields are its options (``base``), or a plain function. ``pipeline`` parses and
prints pipelines and finds passes by name; ``manager`` checks contracts, times, dumps, bisects, writes reproducers.
"""

from pygraph.passes import base, manager, patterns, pipeline
from pygraph.passes.base import *  # noqa: F403 - each of these files says itself which of its names are public
from pygraph.passes.manager import *  # noqa: F403
from pygraph.passes.patterns import *  # noqa: F403
from pygraph.passes.pipeline import *  # noqa: F403

__all__ = [*base.__all__, *manager.__all__, *patterns.__all__, *pipeline.__all__]
