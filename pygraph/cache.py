"""Files that outlive a process: where they lie, how small ones are read and written whole; and locks on files.

What is in the files, and the keys they go by, belongs to whoever writes them. Imports nothing of PyGraph.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

__all__ = [
    "VARIABLE",
    "cache_dir",
    "locked",
    "read_json",
    "temporary",
    "usable",
    "user_dir",
    "warn_once",
    "write_atomically",
]

VARIABLE = "PYGRAPH_CACHE_DIR"
"""The environment variable that names the folder. Unset: the user's cache folder of the platform. Empty: none."""

_logger = logging.getLogger("pygraph.cache")
_warned: set[Path] = set()
_temporary: dict[int, Path] = {}


def cache_dir() -> Path | None:
    """The folder for PyGraph's files, made if need be; None where none is wanted, or it cannot be made."""
    chosen = os.environ.get(VARIABLE, user_dir())
    try:
        return _made(chosen) if chosen else None
    except OSError:
        return None


def user_dir() -> str:
    """The user's cache folder of the platform, whether or not there is one."""
    try:
        return platformdirs.user_cache_dir("pygraph")
    except RuntimeError:  # the user has no home
        return "~/.cache/pygraph"


def usable(chosen: str) -> Path:
    """``chosen``, made if need be. A folder that cannot be written is replaced by a temporary one, which is private
    and goes with this process: one warning says so, and what to do. Raises OSError if there is no temporary one."""
    try:
        folder = _made(chosen)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "it cannot be written"
    except OSError as error:
        why = error.strerror or str(error)
    return temporary(chosen, why)


def temporary(chosen: str | Path, why: str) -> Path:
    """The private folder that stands for ``chosen`` in this process. The first time, a warning says why, and what to
    do. Raises OSError."""
    process = os.getpid()  # a fork has a folder of its own
    if process not in _temporary:
        _temporary[process] = Path(tempfile.mkdtemp(prefix="pygraph-"))
        atexit.register(_remove, process, _temporary[process])
        _logger.warning(
            "the cache folder %s cannot be used (%s): what PyGraph builds and decides is kept for this process only, "
            "in %s. Set %s to a folder that you own and can write",
            *(chosen, why, _temporary[process], VARIABLE),
        )
    return _temporary[process]


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _made(chosen: str) -> Path:
    """Raises OSError, also for a user without a home."""
    try:
        folder = Path(chosen).expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
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
    """Hold an advisory lock, which the system drops if this process dies. What ``path`` holds is left as it is, and a
    symbolic link is not followed. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do: a process forked meanwhile has the file too
    finally:
        os.close(file)


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
