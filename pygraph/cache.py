"""Storage of PyGraph's files on disk: decisions, calibrations, facts of programs, native libraries.

    store   content + seal ─► temporary file ─► renamed into place; the least recently used are removed
    load    folders are trusted ─► open ─► the open file is trusted ─► its seal fits its content ─► content, or None

Two threats, and the protection against each:

- A disk, a killed process or an editor changes bytes. Each file ends with a *seal*, the SHA-256 of all bytes before it.
  It is no access control: whoever can write a file can seal it.
- Another user puts a file there. The file, its folder and all enclosing folders must belong to this user or root, and
  be writable by nobody else. There is no protection against this user and root.

Content is JSON, or a library. Only checked content is used: the bytes that were read, or the open file, which is not
opened a second time. This module imports nothing of PyGraph.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import grp
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

VARIABLE = "PYGRAPH_CACHE_DIR"
"""The environment variable that names the folder. Unset: the user's cache folder of the platform. Empty: none."""

SIZE = "PYGRAPH_CACHE_SIZE"
"""The environment variable that limits each kind of kept file, in MiB."""

_SIZE_MIB = 256.0

_IN_USE_SECONDS = 3600.0
"""Seconds after its last use in which a file is not removed: a process may be about to load it, or be writing it."""

TEMPORARY = ".pygraph-"
"""Prefix of the names of files and folders that are useless after the end of the process that made them."""

_STAND_IN = "pygraph-cache-"

_SEAL = b'\n"pygraph sha256 '
_SEALED = len(_SEAL) + 64 + len(b'"\n')

_logger = logging.getLogger("pygraph.cache")
_warned: set[Path] = set()
_temporary: dict[int, Path] = {}
_room: dict[Path, int] = {}
"""Bytes that this process may store in a folder before it measures the folder again."""


# -- where files lie ---------------------------------------------------------------------------------------------------


def cache_dir() -> Path | None:
    """The folder for PyGraph's files, which may not exist; None if none is wanted, or the user has no home."""
    chosen = os.environ.get(VARIABLE, user_dir())
    try:
        return Path(chosen).expanduser() if chosen else None
    except RuntimeError:
        return None


def user_dir() -> str:
    """The user's cache folder of the platform, which may not exist."""
    try:
        return platformdirs.user_cache_dir("pygraph")
    except RuntimeError:  # the user has no home
        return "~/.cache/pygraph"


def usable(chosen: str, inner: str | Path) -> Path:
    """The folder ``inner`` of ``chosen``, created if needed. If it is not writable, or other users can write in it, a
    temporary folder replaces it, which is removed with this process; one warning says so, and what to do. Raises
    OSError if there is no temporary folder."""
    try:
        folder = _made(Path(chosen).expanduser() / inner)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "it cannot be written"
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    except (RuntimeError, ValueError) as error:  # no home; no name of a folder
        why = str(error)
    return _made(_stand_in(chosen, why) / inner)


def _stand_in(chosen: str, why: str) -> Path:
    """The private folder that replaces ``chosen`` in this process. The first time, a warning says why."""
    process = os.getpid()  # a fork gets its own folder
    if process not in _temporary:
        for left in Path(tempfile.gettempdir()).glob(f"{_STAND_IN}*"):
            _remove_temporary(left)
        _temporary[process] = Path(tempfile.mkdtemp(prefix=_STAND_IN))
        atexit.register(_remove_own, process, _temporary[process])
        _logger.warning(
            "the cache folder %s cannot be used (%s): what PyGraph builds and decides is kept for this process only, "
            "in %s. Set %s to a folder that you own and can write",
            *(chosen, why, _temporary[process], VARIABLE),
        )
    return _temporary[process]


def _remove_own(process: int, folder: Path) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def kept_under(chosen: str | None, inner: str, key: object) -> Path | None:
    """The file for ``key``, identified by its ``repr``, in the folder ``inner`` of ``chosen``; None if nothing should
    or can be kept."""
    try:
        folder = None if chosen is None else usable(chosen, inner)
    except OSError:  # there is no temporary folder either
        return None
    return None if folder is None else folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:40]}.json"


# -- trust in folders --------------------------------------------------------------------------------------------------


def _made(folder: Path) -> Path:
    """``folder`` as by ``_trusted``. It and its parents are created if needed, without access for other users."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    return _trusted(folder)


def _trusted(folder: Path) -> Path:
    """``folder`` without symbolic links. Raises OSError unless it and all its parents are trusted.

    Folders are checked from the root down: in each checked folder, nobody else can replace the next one.
    """
    real = Path(os.path.realpath(folder, strict=True))
    for place in (*reversed(real.parents), real):
        found = os.lstat(place)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        writable = stat.S_IWOTH | stat.S_IWGRP
        if found.st_mode & stat.S_IWGRP and found.st_gid == _own_group(os.geteuid()):
            writable = stat.S_IWOTH
        if found.st_mode & stat.S_ISVTX and place != real:  # such as /tmp: each user's own entries are safe there
            writable = 0
        _refuse_others(found, place, writable)
    return real


def _refuse_others(found: os.stat_result, place: Path, writable: int) -> None:
    """Raise PermissionError for a place of another user, or with one of the mode bits ``writable``."""
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"it belongs to another user ({found.st_uid})", str(place))
    if found.st_mode & writable:
        raise PermissionError(errno.EPERM, "other users can write in it", str(place))


@functools.cache
def _own_group(user: int) -> int | None:
    """The private group of ``user``, or None: many systems give each user such a group, with write permission."""
    try:
        known = pwd.getpwuid(user)
        group = grp.getgrgid(known.pw_gid)
    except KeyError:
        return None
    alone = user != 0 and group.gr_name == known.pw_name and {known.pw_name}.issuperset(group.gr_mem)
    return group.gr_gid if alone else None


# -- load --------------------------------------------------------------------------------------------------------------


def load(path: Path) -> bytes | None:
    """The content stored in ``path``; None, without a warning, if there is none. None, with one warning for each file
    or folder, if somebody else may have written it, or it is damaged."""
    found = _checked(path)
    if found is None:
        return None
    os.close(found[0])
    return found[1]


def opened(path: Path) -> int | None:
    """A descriptor of ``path``, for content that can only be loaded from a file; None where ``load`` returns None."""
    found = _checked(path)
    return None if found is None else found[0]


def load_json(path: Path) -> Any | None:
    """The value that ``store_json`` stored; None where ``load`` returns None, or for content that is not JSON."""
    content = load(path)
    try:
        return None if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        warn_once(path, f"it is not JSON: {error}")
        return None


def _checked(path: Path) -> tuple[int, bytes] | None:
    """A descriptor of ``path`` and the content read from it."""
    try:
        real = _trusted(path.parent) / path.name
        # Neither follows a link, nor waits for somebody to write to a named pipe.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = _read(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        where = getattr(error, "filename", None) or path
        warn_once(Path(where), getattr(error, "strerror", None) or str(error))
        return None
    with contextlib.suppress(OSError):  # the file is root's, or the disk is read-only
        os.utime(descriptor)
    return descriptor, content


def _read(descriptor: int, path: Path) -> bytes:
    """The content of an open file. Raises OSError for an untrusted file, ValueError for a damaged one."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    _refuse_others(found, path, stat.S_IWOTH | stat.S_IWGRP)
    with open(descriptor, "rb", closefd=False) as file:
        data = file.read()
    content, seal = data[:-_SEALED], data[-_SEALED:]
    if seal != _seal(content):
        raise ValueError("it is damaged")
    return content


def _seal(content: bytes) -> bytes:
    """The end of a stored file. It is a JSON value, so that readers of consecutive JSON values can read the file."""
    return _SEAL + hashlib.sha256(content).hexdigest().encode() + b'"\n'


def warn_once(path: Path, why: str) -> None:
    """Log once per process that the file or folder ``path`` is not used, and why."""
    if path in _warned:
        return
    _warned.add(path)
    _logger.warning("%s is not used: %s", path, why)


# -- store -------------------------------------------------------------------------------------------------------------


def store(path: Path, content: bytes, within: Path | None = None) -> None:
    """Store ``content`` in ``path``, for this user only. Files in ``within``, by default the folder of ``path``, share
    the limit of SIZE. Raises OSError, also if others could replace the file; ValueError if no such file can exist."""
    folder = _made(path.parent)
    sealed = content + _seal(content)
    _make_room(folder if within is None else within, len(sealed))
    write_atomically(folder / path.name, sealed)


def store_json(path: Path, value: Any) -> None:
    """Store ``value`` in ``path``. Raises as ``store`` does."""
    store(path, json.dumps(value, indent=1).encode())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content`` (text in UTF-8), so that a reader sees the old content or the new, never a part.

    Its folder is created if needed. Of concurrent writers, the last one wins. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _make_room(folder: Path, size: int) -> None:
    """Remove from ``folder`` temporary files of ended processes, and stored files, the least recently used first, until
    ``size`` more bytes fit. Open files stay usable. Files without a seal are not PyGraph's, and are not removed."""
    if size <= _room.get(folder, 0):
        _room[folder] -= size
        return
    limit, now = _limit(), time.time()
    _room[folder] = limit // 8
    kept: list[tuple[float, int, Path]] = []
    inner: list[Path] = []
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if name.startswith(TEMPORARY):
                _remove_temporary(Path(place, name))
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
        inner += [Path(place, name) for name in folders]
        for path in (Path(place, name) for name in files):
            with contextlib.suppress(OSError):
                found = path.lstat()
                kept.append((found.st_mtime, max(found.st_size, found.st_blocks * 512), path))
    size += sum(taken for _, taken, _ in kept)
    for used, taken, path in sorted(kept):
        if size <= limit or used > now - _IN_USE_SECONDS:
            break
        with contextlib.suppress(OSError):
            if _is_sealed(path):
                path.unlink()
                size -= taken
    for left in reversed(inner):
        with contextlib.suppress(OSError):  # it is not empty
            left.rmdir()


def _limit() -> int:
    """Maximum number of bytes of each kind of stored file."""
    text = os.environ.get(SIZE, "")
    try:
        mib = max(float(text), 0.0) if text else _SIZE_MIB
        return int(mib * (1 << 20))
    except (ValueError, OverflowError):
        _warn_of_limit(text)
        return int(_SIZE_MIB * (1 << 20))


@functools.cache
def _warn_of_limit(text: str) -> None:
    _logger.warning("%s is a number of MiB, not %r: it is taken for %.0f", SIZE, text, _SIZE_MIB)


def _is_sealed(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, len(_SEAL), os.fstat(descriptor).st_size - _SEALED) == _SEAL
    finally:
        os.close(descriptor)


def _remove_temporary(path: Path) -> None:
    """Remove a temporary file or folder of this user, unless its process may still be at work."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if found.st_uid != os.geteuid() or found.st_mtime > time.time() - _IN_USE_SECONDS:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# -- locks -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``, which the system releases if this process dies. The content of the file is not
    changed, and a symbolic link is not followed. Raises OSError."""
    file = _lock(path)
    try:
        yield
    finally:
        if file in _locks:  # not in a process that was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
            _locks.discard(file)
            os.close(file)


_locks: set[int] = set()
"""Descriptors that hold a lock of this process, or wait for one."""


def _drop_locks() -> None:
    """Close the descriptors in a forked process, which would otherwise keep the locks of a parent that dies."""
    for file in _locks:
        os.close(file)
    _locks.clear()


os.register_at_fork(after_in_child=_drop_locks)


def _lock(path: Path) -> int:
    """A descriptor of ``path`` that holds its lock."""
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        _locks.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.utime(file)
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                return file
        except FileNotFoundError:
            pass  # it was removed while this process waited for it
        except BaseException:
            _locks.discard(file)
            os.close(file)
            raise
        _locks.discard(file)
        os.close(file)
