"""Passes: what they are, pipelines of them as text, the manager that runs them, and the built-in ones.

    pipeline text ──► Pass, Pass, … ──► PassManager.run(graph, context) ──► the graph, verified after each pass

A pass is a frozen dataclass whose fields are its options (``base``), or a plain function. ``pipeline`` parses and
prints pipelines and knows passes by name; ``manager`` checks contracts, times, dumps, bisects, writes reproducers.
"""

from pygraph.passes.base import Pass, PassContext, PassResult, as_pass
from pygraph.passes.manager import DEFAULT_PIPELINE, PassManager, PassRecord, PipelineResult, Step, bisect, read_header
from pygraph.passes.pipeline import Registry, default_registry, parse, print_pass, print_pipeline, register

__all__ = [
    "DEFAULT_PIPELINE",
    "Pass",
    "PassContext",
    "PassManager",
    "PassRecord",
    "PassResult",
    "PipelineResult",
    "Registry",
    "Step",
    "as_pass",
    "bisect",
    "default_registry",
    "parse",
    "print_pass",
    "print_pipeline",
    "read_header",
    "register",
]
