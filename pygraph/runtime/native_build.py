"""Compiles a native half of the runtime once per machine, and loads it.

The library lies in the user's cache directory under a hash of all that it depends on. Processes that arrive together
wait for one another; a process that dies while it builds leaves nothing that others trip over.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import platformdirs
import torch

from pygraph.cache import locked
from pygraph.errors import CaptureError

__all__ = ["NativeLibrary"]

_log = logging.getLogger("pygraph.native")

SHARED = Path(__file__).resolve().parent / "native"
"""Headers that every library may include: each of them is part of what a library depends on."""

_CXX_RUNTIME = "-l:libstdc++.so.6"
"""The C++ runtime that torch uses, by its file. Where only the static one is installed for linking, an extension would
carry a second runtime, and die where the two meet: as soon as it raises."""

_REPORT_EVERY = 10.0
"""Seconds between two lines that say that the compiler is still at work."""


@dataclass(frozen=True)
class NativeLibrary:
    """A Python extension ``module`` made of the first of ``sources``, which includes the others, all in ``directory``,
    and headers of ``SHARED``.

    ``label`` names it to the user and in the cache; ``libraries`` are torch's that it is linked with, ``includes``
    directories of headers besides torch's and Python's.
    """

    module: str
    label: str
    directory: Path
    sources: tuple[str, ...]
    libraries: tuple[str, ...]
    includes: tuple[Path, ...] = ()

    def load(self) -> ModuleType:
        """The module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
        path = self.build()
        loader = importlib.machinery.ExtensionFileLoader(self.module, str(path))
        spec = importlib.util.spec_from_file_location(self.module, path, loader=loader)
        if spec is None:
            raise CaptureError("native-unavailable", f"{path} is no Python extension")
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise CaptureError("native-unavailable", str(error)) from error
        return module

    def build(self, cache: Path | None = None) -> Path:
        """The library, compiled into ``cache`` (the user's cache by default) unless it is there already."""
        path = self.path(cache)
        if path.exists():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent / f"{self.module}.lock"):
                if not path.exists():
                    self._compile(path)
        except OSError as error:
            raise CaptureError("native-unavailable", str(error)) from error
        return path

    def path(self, cache: Path | None = None) -> Path:
        """Where the library for this interpreter, this torch, this compiler and these sources lies."""
        root = cache or Path(platformdirs.user_cache_dir("pygraph"))
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
        return root / self.label / self._fingerprint() / f"{self.module}{suffix}"

    def _fingerprint(self) -> str:
        """A hash of everything that the compiled library depends on."""
        parts = [torch.__version__, sys.version, platform.machine(), _compiler_version(), *self.command(Path("out"))]
        files = [*(self.directory / name for name in self.sources), *sorted(SHARED.glob("*.h"))]
        parts += [text for file in files for text in (file.name, file.read_text(encoding="utf-8"))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def command(self, output: Path) -> list[str]:
        """The compiler's command line for ``output``."""
        standard = "-std=c++20" if _torch_release() >= (2, 12) else "-std=c++17"
        # As torch itself is built. Without NDEBUG, pybind11 asks who holds the GIL at each reference counted.
        flags = [standard, "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
        root = Path(torch.__file__).resolve().parent
        headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
        includes = [f"-isystem{path}" for path in (*headers, *self.includes)]
        linked = [_CXX_RUNTIME, f"-L{root / 'lib'}", *(f"-l{name}" for name in self.libraries)]
        return [*_compiler(), *flags, *includes, str(self.directory / self.sources[0]), "-o", str(output), *linked]

    def _compile(self, path: Path) -> None:
        """Compile beside ``path``, then move into place: a half-written library is never seen."""
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            output = Path(scratch) / path.name
            with _progress(self.label):
                result = subprocess.run(self.command(output), capture_output=True, text=True, check=False)
            if result.returncode:
                raise CaptureError("native-unavailable", f"the compiler failed:\n{result.stderr[-4000:]}")
            output.replace(path)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(chosen[0]) is None:
        raise CaptureError("native-unavailable", f"there is no C++ compiler {chosen[0]!r}; set CXX to one")
    return chosen


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=False).stdout


def _torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def _progress(label: str) -> Iterator[None]:
    """Say that something is being built, and every few seconds that it still is."""
    _log.warning("pygraph: building the %s driver, once for this machine (about half a minute)", label)
    done = threading.Event()
    started = time.monotonic()

    def report() -> None:
        while not done.wait(_REPORT_EVERY):
            _log.warning("pygraph: still building the %s driver (%.0f s)", label, time.monotonic() - started)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
