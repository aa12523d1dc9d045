"""transformers: ``generate`` with a decoding step that is captured, once, whatever the prompt.

    model.generate(**inputs, **pygraph.integrations.transformers.generation(max_cache_len=2048))

Interface: ``generate``, ``CompileConfig`` and ``max_cache_len`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import CompileConfig

__all__ = ["generation"]


def generation(max_cache_len: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keywords for ``generate``, or for a ``GenerationConfig``: a static cache of ``max_cache_len`` tokens, and
    decoding steps compiled with ``backend="pygraph"``, on any device. Equal ones share their program.

    The pass over the prompt runs as it is. Longer texts get a longer cache, with another program and capture.

    Args:
        max_cache_len: tokens of the longest text, with its prompt
        options: those of the backend
    """
    config: Any = CompileConfig(backend="pygraph", mode=cast("Any", None), options=dict(options or {}))
    config._compile_all_devices = True  # a CPU, too
    return {"cache_implementation": "static", "max_cache_len": max_cache_len, "compile_config": config}
