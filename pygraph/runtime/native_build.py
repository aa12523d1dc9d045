"""Compiles a native half of the runtime once per machine, and loads it.

The library lies in the cache folder, under a hash of all that it depends on: only what this user or root wrote, whole,
is loaded, and anything else is built again. Processes that arrive together wait for one another; what a process that
died while building left behind is removed by the next that builds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from pygraph import cache
from pygraph.errors import CaptureError

__all__ = ["Loader", "NativeLibrary"]

_log = logging.getLogger("pygraph.native")

SHARED = Path(__file__).resolve().parent / "native"
"""Headers that every library may include: each of them is part of what a library depends on."""

_CXX_RUNTIME = "-l:libstdc++.so.6"
"""The C++ runtime that torch uses, by its file. Where only the static one is installed for linking, an extension would
carry a second runtime, and die where the two meet: as soon as it raises."""

_LIMIT = 300.0
"""Seconds that the compiler may take. It took 130 s on two cores that eight processes shared."""

_SCRATCH = f"{cache.TEMPORARY}build-"


class Loader:
    """A library that is built and loaded once per process. A failure is final: nothing is tried a second time."""

    def __init__(self, describe: Callable[[], NativeLibrary]) -> None:
        self._describe = describe
        self._lock = threading.Lock()
        self._process = 0
        self._built: Future[tuple[NativeLibrary, Path]]
        self._module: ModuleType | None = None

    def start(self, folder: str | None = None) -> None:
        """Begin to build in the background, unless that began already. ``folder``: the cache folder to build in."""
        with self._lock:
            if self._process == os.getpid() or self._module is not None:
                return
            # The thread of a process that was forked meanwhile is not in this one.
            self._process, self._built = os.getpid(), Future()
        threading.Thread(target=self._build, args=(self._built, folder), name="pygraph-build", daemon=True).start()

    def __call__(self) -> ModuleType:
        """The module. Raises CaptureError (``native-unavailable``) when there is none, each time the same."""
        self.start()
        library, path = self._built.result()
        with self._lock:
            if self._module is None:
                self._module = library.load(path)
            return self._module

    def _build(self, built: Future[tuple[NativeLibrary, Path]], folder: str | None) -> None:
        try:
            library = self._describe()
            built.set_result((library, library.build(folder)))
        except BaseException as error:  # noqa: BLE001  it is raised where the module is wanted
            built.set_exception(error)


@dataclass(frozen=True)
class NativeLibrary:
    """The Python extension ``_pygraph_NAME`` made of ``source``, which may include headers beside it and of ``SHARED``.

    ``libraries`` are torch's that it is linked with, ``includes`` directories of headers besides torch's and Python's.
    """

    name: str
    source: Path
    libraries: tuple[str, ...]
    includes: tuple[Path, ...] = ()

    @property
    def module(self) -> str:
        """The name of the extension."""
        return f"_pygraph_{self.name}"

    def load(self, path: Path) -> ModuleType:
        """The module in ``path``. Raises CaptureError (``native-unavailable``) when it cannot be loaded."""
        descriptor = cache.opened(path)
        if descriptor is None:
            raise CaptureError("native-unavailable", f"{path} is no longer what was built")
        # It stays open: the loader would take another library of this name for the same one.
        name = f"/proc/self/fd/{descriptor}"
        loader = importlib.machinery.ExtensionFileLoader(self.module, name)
        spec = importlib.util.spec_from_file_location(self.module, name, loader=loader)
        assert spec is not None
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise CaptureError("native-unavailable", str(error)) from error
        module.__file__ = str(path)
        return module

    def build(self, folder: str | None = None) -> Path:
        """The library, compiled unless it is in ``folder`` already: where ``cache.VARIABLE`` says by default, or in the
        user's cache. Raises CaptureError (``native-unavailable``)."""
        chosen = folder or os.environ.get(cache.VARIABLE) or cache.user_dir()
        try:
            root = Path(os.path.expanduser(chosen))
            path = self.path(root)
            if cache.load(path) is not None:
                return path
            path = cache.usable(chosen, path.parent.relative_to(root)) / path.name
            with cache.locked(path.parent / f"{cache.TEMPORARY}{self.name}.lock"):
                if cache.load(path) is None:
                    self._compile(path)
        except OSError as error:
            raise CaptureError("native-unavailable", str(error)) from error
        return path

    def path(self, root: Path) -> Path:
        """Where in ``root`` the library for this interpreter, this torch, this compiler and these sources lies."""
        version = _compiler_version(*_compiler())
        parts = [torch.__version__, sys.version, platform.machine(), version, *self.command(Path("out"))]
        for file in (self.source, *sorted(self.source.parent.glob("*.h")), *sorted(SHARED.glob("*.h"))):
            parts += [file.name, file.read_text(encoding="utf-8")]
        fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
        return root / "native" / f"{self.name}-{fingerprint}" / f"{self.module}{suffix}"

    def command(self, output: Path) -> list[str]:
        """The compiler's command line for ``output``."""
        release = tuple(int(part) for part in torch.__version__.split(".")[:2])
        standard = "-std=c++20" if release >= (2, 12) else "-std=c++17"
        # As torch itself is built. Without NDEBUG, pybind11 asks who holds the GIL at each reference counted.
        flags = [standard, "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
        if torch.distributed.is_available():
            flags.append("-DPYGRAPH_DISTRIBUTED")
        root = Path(torch.__file__).resolve().parent
        headers = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
        includes = [f"-isystem{path}" for path in (*headers, *self.includes)]
        linked = [_CXX_RUNTIME, f"-L{root / 'lib'}", *(f"-l{name}" for name in self.libraries)]
        return [*_compiler(), *flags, *includes, str(self.source), "-o", str(output), *linked]

    def _compile(self, path: Path) -> None:
        """Compile beside ``path``, then store it whole. Called under the lock."""
        for left in path.parent.glob(f"{_SCRATCH}*"):  # of a process that was killed: nobody else builds now
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent, ignore_cleanup_errors=True) as scratch:
            output = Path(scratch) / path.name
            _log.warning(
                "pygraph: building the %s driver, once for this machine (some ten to twenty seconds)", self.name
            )
            _run(self.command(output))
            cache.store(path, output.read_bytes(), within=path.parent.parent)


def _run(command: list[str]) -> None:
    """Run the compiler, for ``_LIMIT`` seconds at most. Raises CaptureError, also for a compiler that was killed."""
    # In a session of its own, so that what the compiler starts ends with it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )

    def kill() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    atexit.register(kill)
    try:
        _, errors = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        raise CaptureError("native-unavailable", f"the compiler was stopped after {_LIMIT:.0f} s") from None
    finally:
        kill()
        process.communicate()
        atexit.unregister(kill)
    if process.returncode:
        text = errors.decode(errors="replace")[-4000:]
        raise CaptureError("native-unavailable", f"the compiler failed (exit status {process.returncode}):\n{text}")


# -- the compiler ------------------------------------------------------------------------------------------------------


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(chosen[0]) is None:
        raise CaptureError("native-unavailable", f"there is no C++ compiler {chosen[0]!r}; set CXX to one")
    return chosen


@functools.cache
def _compiler_version(*compiler: str) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
