"""The user's source line of an FX node: the innermost frame of its stack trace that is not torch's own.

Files under the working directory are given relative to it, so that dumps of one program agree across checkouts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from pygraph.ir import Location

__all__ = ["location_of", "parse_stack_trace"]

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>[^\n]*)\n?(?P<code>[^\n]*)', re.MULTILINE
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def location_of(meta: Mapping[str, Any]) -> Location | None:
    """The user's line of a node with that ``meta``, or None when it has no frame of the user's."""
    trace = meta.get("stack_trace")
    return parse_stack_trace(trace, os.getcwd()) if isinstance(trace, str) else None


@lru_cache(maxsize=8192)
def parse_stack_trace(trace: str, directory: str) -> Location | None:
    """The innermost user frame in a Python traceback text; files inside ``directory`` become relative to it."""
    for frame in reversed(list(_FRAME.finditer(trace))):
        if _is_user_file(frame["file"]):
            code = frame["code"].strip()
            code = "" if code.startswith('File "') else code
            return Location(_shorten(frame["file"], directory), int(frame["line"]), frame["function"].strip(), code)
    return None


def _is_user_file(file: str) -> bool:
    return not file.startswith("<") and not file.startswith(_TORCH)


def _shorten(file: str, directory: str) -> str:
    if directory == os.path.abspath(os.sep) or not file.startswith(directory + os.sep):
        return file
    return file[len(directory) + 1 :]
