"""Compiles the native half of the host driver once per machine, and loads it.

The library lies in the user's cache directory under a hash of all that it depends on. Processes that arrive together
wait for one another; a process that dies while it builds leaves nothing that others trip over.
"""

from __future__ import annotations

import fcntl
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import platformdirs
import torch

from pygraph.errors import CaptureError

__all__ = ["build", "library_path", "load"]

MODULE = "_pygraph_host"
SOURCES = ("native.cpp", "launches.h", "tensors.h")

_log = logging.getLogger("pygraph.host")


@functools.cache
def load() -> ModuleType:
    """The native module, built at first use. Raises CaptureError (``native-unavailable``) when it cannot be."""
    path = build()
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    if spec is None:
        raise CaptureError("native-unavailable", f"{path} is no Python extension")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise CaptureError("native-unavailable", str(error)) from error
    return module


def build(directory: Path | None = None) -> Path:
    """The compiled library, compiled into ``directory`` (the user's cache by default) unless it is there already."""
    path = library_path(directory)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / f"{MODULE}.lock"):
            if not path.exists():
                _compile(path)
    except OSError as error:
        raise CaptureError("native-unavailable", str(error)) from error
    return path


def library_path(directory: Path | None = None) -> Path:
    """Where the library for this interpreter, this torch, this compiler and these sources lies."""
    root = directory or Path(platformdirs.user_cache_dir("pygraph"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return root / "host" / _fingerprint() / f"{MODULE}{suffix}"


def _fingerprint() -> str:
    """A hash of everything that the compiled library depends on."""
    parts = [torch.__version__, sys.version, platform.machine(), _compiler_version(), *_command(Path("out"))]
    parts += [(_directory() / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _directory() -> Path:
    return Path(__file__).resolve().parent


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(chosen[0]) is None:
        raise CaptureError("native-unavailable", f"there is no C++ compiler {chosen[0]!r}; set CXX to one")
    return chosen


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=False).stdout


def _command(output: Path) -> list[str]:
    standard = "-std=c++20" if _torch_release() >= (2, 12) else "-std=c++17"
    flags = [standard, "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    root = Path(torch.__file__).resolve().parent
    headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    includes = [f"-isystem{path}" for path in headers]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    return [*_compiler(), *flags, *includes, str(_directory() / SOURCES[0]), "-o", str(output), *libraries]


def _torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _compile(path: Path) -> None:
    """Compile beside ``path``, then move into place: a half-written library is never seen."""
    _log.warning("pygraph: building the host driver, once for this machine (about half a minute)")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch) / path.name
        result = subprocess.run(_command(output), capture_output=True, text=True, check=False)
        if result.returncode:
            raise CaptureError("native-unavailable", f"the compiler failed:\n{result.stderr[-4000:]}")
        output.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, which the system drops if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
