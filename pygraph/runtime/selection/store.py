"""Decisions on disk: one small JSON file for each key, which processes read and replace without locks.

A file holds its key, so that it is used for nothing else; what a key is made of is the caller's business. Nothing here
raises for what is on disk, or for a disk that is full, slow to appear or read-only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph.cache import warn_once, write_atomically
from pygraph.runtime.selection.records import TELLING, Decided, Sample

__all__ = ["SCHEMA_VERSION", "Store", "Stored", "decode", "encode"]

_log = logging.getLogger("pygraph.selection")

SCHEMA_VERSION = 1
"""Raised when a field is renamed or removed, or its meaning changes: files of another version are not read."""

_LARGEST = 1 << 20
"""Bytes of a file that is read at all; a decision takes some 1,000."""
_STALE = 3600.0
"""Seconds after which a file that was begun and never put into place is nobody's."""
_MOST = 1 << 20
"""Blocks or trials that are counted."""

_warned: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Stored:
    """A decision, the file that it is kept in, and when it was made: seconds since the epoch, by somebody's clock."""

    decided: Decided
    path: Path
    made: float

    @property
    def age(self) -> float:
        """Seconds since it was made; never negative."""
        return max(0.0, time.time() - self.made)


class Store:
    """Decisions by key, in ``folder``, of which about ``limit`` are kept: those that were used last.

    Safe for any number of threads and processes: a file is replaced as a whole, and the last writer wins. Whatever is
    damaged, of another schema or of another key is ignored with one warning, until somebody replaces it. Where nothing
    can be written, one warning says so, and nothing outlives the process.
    """

    def __init__(self, folder: Path, limit: int = 4096) -> None:
        self.folder = folder
        self._limit = limit

    def path(self, key: Mapping[str, str]) -> Path:
        """The file of ``key``, whether there is one or not. The order of the parts of a key does not matter."""
        text = json.dumps(dict(key), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"

    def load(self, key: Mapping[str, str]) -> Stored | None:
        """What was decided for ``key``; None if nothing was, or if that cannot be read."""
        path = self.path(key)
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:  # a ValueError where the path can be no file's
            self._warn(error)
            return None
        try:
            decided, made = decode(data, key)
        except ValueError as error:
            warn_once(path, str(error))
            return None
        with contextlib.suppress(OSError):  # only the order in which files go
            os.utime(path)
        return Stored(decided, path, made)

    def save(self, key: Mapping[str, str], decided: Decided, made: float | None = None) -> Stored | None:
        """Keep ``decided`` for ``key``, made now unless ``made`` says when; None where that failed."""
        stored = Stored(decided, self.path(key), time.time() if made is None else made)
        try:
            text = encode(key, decided, stored.made)
            decode(text.encode(), key)
        except ValueError as error:  # figures that nobody would read: clocks that stood still
            _log.debug("a decision is not kept: %s", error)
            return None
        try:
            write_atomically(stored.path, text)
        except (OSError, ValueError) as error:
            self._warn(error)
            return None
        self._prune()
        return stored

    def _warn(self, error: OSError | ValueError) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            _log.warning("decisions are not kept across processes in %s: %s", self.folder, error)

    def _prune(self) -> None:
        """Remove what was begun and left, and, beyond the limit, what was not used for longest.

        Some more go than need to, so that not each new file looks at all others' ages. Others may prune at the same
        time: a file that is gone already is no mistake, and one that goes while somebody reads it was read or was not.
        """
        now = time.time()
        try:
            with os.scandir(self.folder) as entries:
                found = [entry for entry in entries if entry.name.endswith((".json", ".tmp"))]
        except OSError:
            return
        kept = [entry for entry in found if entry.name.endswith(".json")]
        begun = [entry for entry in found if entry.name.endswith(".tmp") and now - _used(entry) > _STALE]
        surplus: list[os.DirEntry[str]] = []
        if len(kept) > self._limit:
            surplus = sorted(kept, key=_used)[: len(kept) - self._limit * 7 // 8]
        for entry in (*begun, *surplus):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _used(entry: os.DirEntry[str]) -> float:
    """When a file was last read or written; one that is gone was never."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return math.inf


def encode(key: Mapping[str, str], decided: Decided, made: float) -> str:
    """The text of a file."""
    fields = {"schema": SCHEMA_VERSION, "key": dict(key), "made": made, "decided": dataclasses.asdict(decided)}
    return json.dumps(fields, indent=1, allow_nan=False) + "\n"


def decode(data: bytes, key: Mapping[str, str]) -> tuple[Decided, float]:
    """What ``encode`` was given. Raises ValueError, and nothing else, for what it did not write for ``key``."""
    if len(data) > _LARGEST:
        raise ValueError(f"more than {_LARGEST} bytes")
    try:
        found = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    fields = _Fields(found, "the file")
    schema = fields.value("schema")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise ValueError(f"schema {schema!r:.40} instead of {SCHEMA_VERSION}")
    if fields.value("key") != dict(key):
        raise ValueError("it is of another key")
    return _decided(_Fields(fields.value("decided"), "decided")), fields.number("made")


def _decided(fields: _Fields) -> Decided:
    candidates = fields.names("candidates")
    decision, reason = fields.text("decision"), fields.text("reason")
    if decision not in candidates:
        raise ValueError(f"the decision {decision!r:.40} is no candidate")
    if reason not in TELLING:
        raise ValueError(f"the reason {reason!r:.40} is none of a trial's end")
    per_call = _Fields(fields.value("per_call"), "per_call")
    samples = _Fields(fields.value("samples"), "samples")
    pace = fields.value("pace")
    return Decided(
        candidates,
        decision,
        reason,
        fields.text("detail"),
        {name: per_call.seconds(name) for name in per_call.among(candidates)},
        {name: _sample(_Fields(samples.value(name), name)) for name in samples.among(candidates)},
        fields.count("trials", 1),
        None if pace is None else fields.seconds("pace"),
    )


def _sample(fields: _Fields) -> Sample:
    median = fields.value("median")
    return Sample(fields.count("blocks", 0), None if median is None else fields.seconds("median"))


class _Fields:
    """An object of a file. Each look at one of its fields raises ValueError unless that is there, and of its type."""

    def __init__(self, value: Any, name: str) -> None:
        if type(value) is not dict:
            raise ValueError(f"{name} is no object")
        self._values = value

    def value(self, name: str) -> Any:
        if name not in self._values:
            raise ValueError(f"no field {name!r}")
        return self._values[name]

    def text(self, name: str) -> str:
        """A string that can be printed: escapes of JSON can write halves of characters."""
        return _text(self.value(name), name)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.value(name)
        if type(value) is not list or not value:
            raise ValueError(f"{name} is no list of names")
        names = tuple(_text(item, name) for item in value)
        if len(set(names)) < len(names):
            raise ValueError(f"{name} holds a name twice")
        return names

    def among(self, names: tuple[str, ...]) -> list[str]:
        """The fields, if all of them are ``names``."""
        if not self._values.keys() <= set(names):
            raise ValueError("a field of no candidate")
        return list(self._values)

    def number(self, name: str) -> float:
        value = self.value(name)
        if type(value) not in (int, float) or not abs(value) <= 1e300:  # excludes what is no number
            raise ValueError(f"{name} is no number")
        return float(value)

    def seconds(self, name: str) -> float:
        value = self.number(name)
        if value <= 0:
            raise ValueError(f"{name} is no time")
        return value

    def count(self, name: str, least: int) -> int:
        value = self.value(name)
        if type(value) is not int or not least <= value <= _MOST:
            raise ValueError(f"{name} is no count")
        return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{name} is no text")
    value.encode("utf-8")
    return value
