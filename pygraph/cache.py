"""Small JSON files that outlive a process: where they lie, how they are read and written whole; and locks on files.

What is in the files, and the keys they go by, belongs to whoever writes them. Imports nothing of PyGraph.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

__all__ = ["VARIABLE", "cache_dir", "locked", "read_json", "warn_once", "write_atomically"]

VARIABLE = "PYGRAPH_CACHE_DIR"
"""The environment variable that names the folder. Unset: the user's cache folder of the platform. Empty: none."""

_logger = logging.getLogger("pygraph.cache")
_warned: set[Path] = set()


def cache_dir() -> Path | None:
    """The folder for PyGraph's files, made if need be; None where none is wanted, or it cannot be made."""
    chosen = os.environ.get(VARIABLE, platformdirs.user_cache_dir("pygraph"))
    if not chosen:
        return None
    try:
        folder = Path(chosen).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a RuntimeError when the user has no home
        return None
    return folder


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` (text in UTF-8), so that a reader sees the old content or the new, never a part.

    Its folder is made if need be. Of writers at the same time, the last one wins. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, which the system drops if this process dies. Raises OSError."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do: a process forked meanwhile has the file too


def read_json(path: Path) -> Any | None:
    """The content of ``path``; None without a word if it is not there, with one warning per file if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn_once(path, str(error))
        return None


def warn_once(path: Path, why: str) -> None:
    """Log once per process and file that ``path`` is not used, and why."""
    if path in _warned:
        return
    _warned.add(path)
    _logger.warning("ignoring the damaged file %s: %s", path, why)
