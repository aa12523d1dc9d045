"""Passes: what they are (``base``), how they are named, parsed and run, and the built-in ones."""

from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.instruments import Instrument, Step
from pygraph.passes.manager import DEFAULT_PIPELINE, PassManager, PassRecord, PipelineResult, bisect
from pygraph.passes.options import print_pipeline
from pygraph.passes.registry import PassInfo, Registry, default_registry, parse, register

__all__ = [
    "DEFAULT_PIPELINE",
    "Instrument",
    "Pass",
    "PassContext",
    "PassInfo",
    "PassManager",
    "PassRecord",
    "PassResult",
    "PipelineResult",
    "Registry",
    "Step",
    "bisect",
    "default_registry",
    "parse",
    "print_pipeline",
    "register",
]
