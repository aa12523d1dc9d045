"""The version of PyGraph and hashes of its source. Imports no other module of PyGraph."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.2.0"

PACKAGE = Path(__file__).parent
_SHAPING_NOTHING = ("bench", "cli", "report", "testing")


@functools.cache
def package_digest(package: Path) -> str:
    """Hash of the files that may shape a program, by path and content."""
    files = (path for path in package.rglob("*") if path.suffix == ".py")
    names = {path.relative_to(package).as_posix(): path for path in files}
    rows = [f"{n} {digest(names[n])}" for n in sorted(names) if n.partition("/")[0] not in _SHAPING_NOTHING]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def digest(path: Path) -> str:
    """Hash of the content of a file. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
