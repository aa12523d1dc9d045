"""Loads a native half of the runtime: the one that came with the wheel, or one compiled once per machine.

    looked for ─┬─ there ──────────────────► loaded, by the next call that captures
                └─ built meanwhile ─┬─ there ──┘
                                    └─ failed ─► looked for again after a while, or by ``pygraph.retry()``

A wheel carries libraries in ``PREBUILT``, each under a hash of all its dependences: the commit of torch, the Python,
the sources. ``tools/wheels.py`` builds them. For any other torch or Python, the library is compiled in the background.
It is stored in the cache folder, under a hash that also covers the compiler. Only a complete file written by this user
or root is loaded; anything else is built again. Processes that start together wait for one another. Files left by a
process that died while building are removed by the next build.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import math
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from weakref import WeakSet

import torch

from pygraph import cache
from pygraph.errors import CaptureError
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import BUILDING

_log = logging.getLogger("pygraph.runtime")

SHARED = Path(__file__).resolve().parent / "native"
"""Headers that every library may include: each library depends on all of them."""

PREBUILT = Path(__file__).resolve().parent / "prebuilt"
"""Libraries that a wheel carries. A checkout has none."""

_CXX_RUNTIME = "-l:libstdc++.so.6"
"""The C++ runtime that torch uses, by file name. If only the static one is installed for linking, an extension would
otherwise contain a second runtime, and crash as soon as it raises."""

_CPU_SECONDS = 300
"""CPU seconds that each compiler process may take; it needs about 20 s. The limit does not depend on other load."""

_VERSION_SECONDS = 10.0
"""Seconds that ``c++ --version`` may take. The first call that could capture waits for it."""

_LINE_SECONDS = 10.0
"""Seconds between two lines of the log while a library is being built."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0
"""Shortest and longest pause in seconds before a failed build is tried again: each one is twice the one before."""

_SCRATCH = f"{cache.TEMPORARY}build-"


# -- one library of a process ------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt to get a library. ``looked``: it is known whether one exists already. ``over``: there is an
    ``outcome``, the library and its file, or a refusal. ``again``: time from which another attempt may follow."""

    looked: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    outcome: tuple[NativeLibrary, Path] | Refusal | None = None
    again: float = math.inf


class Loader:
    """A library that is built in the background, and loaded once per process by a call of the loader. ``clock`` returns
    seconds."""

    def __init__(self, describe: Callable[[], NativeLibrary], clock: Callable[[], float] = time.monotonic) -> None:
        self._describe = describe
        self._clock = clock
        self._folder: str | None = None
        self._pause = _SHORTEST_PAUSE
        self._module: ModuleType | None = None
        self.after_fork()
        _loaders.add(self)

    def after_fork(self) -> None:
        """Start anew in a forked process, which has no thread that builds."""
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None

    def start(self, folder: str | None = None) -> None:
        """Begin in the background, unless an attempt has begun already, or failed a short while ago. ``folder``: cache
        folder for the build."""
        if self._module is None:
            self._begun(folder)

    def unready(self) -> Refusal | None:
        """Reason why there is no module yet; None once it is loaded. Waits for a look into the cache folder, but for a
        build only within ``waiting_for_builds``."""
        if self._module is not None:
            return None
        attempt = self._begun()
        attempt.looked.wait()
        if not _waiting and not attempt.over.is_set():
            return Refusal(BUILDING, "the native library is being built, and calls run uncaptured until it is there")
        made = self._loaded(attempt)
        return made if isinstance(made, Refusal) else None

    @property
    def is_building(self) -> bool:
        """True while an attempt is under way."""
        attempt = self._attempt
        return attempt is not None and not attempt.over.is_set()

    @property
    def is_compiling(self) -> bool:
        """True while an attempt is under way that has found no library."""
        attempt = self._attempt
        return attempt is not None and attempt.looked.is_set() and not attempt.over.is_set()

    def __call__(self) -> ModuleType:
        """The module, once it is built. Raises CaptureError (``native-unavailable``) if there is none."""
        made = self._module or self._loaded(self._begun())
        if isinstance(made, Refusal):
            raise CaptureError(made.reason, made.detail)
        return made

    def retry(self) -> None:
        """Begin again at once, if the last attempt failed."""
        attempt = self._attempt
        if attempt is not None and isinstance(attempt.outcome, Refusal):
            attempt.again, self._pause = -math.inf, _SHORTEST_PAUSE
            self._begun()

    def _begun(self, folder: str | None = None) -> _Attempt:
        with self._lock:
            self._folder = folder or self._folder
            attempt = self._attempt
            if attempt is not None and self._clock() < attempt.again:
                return attempt
            self._attempt = attempt = _Attempt()
        threading.Thread(target=self._build, args=(attempt,), name="pygraph-build", daemon=True).start()
        return attempt

    def _build(self, attempt: _Attempt) -> None:
        try:
            library = self._describe()
            path = library.find(self._folder)
            if path is None:
                attempt.looked.set()
                path = library.build(self._folder)
            attempt.outcome = library, path
        except BaseException as error:  # noqa: BLE001 - nobody may wait for ever
            self._fail(attempt, error)
        finally:
            attempt.looked.set()
            attempt.over.set()

    def _loaded(self, attempt: _Attempt) -> ModuleType | Refusal:
        """Outcome of an attempt, once it is over. Loads here, since the attempt's thread may end within native code."""
        attempt.over.wait()
        with self._lock:
            if self._module is None and isinstance(attempt.outcome, tuple):
                library, path = attempt.outcome
                try:
                    self._module = library.load(path)
                except CaptureError as error:
                    self._fail(attempt, error)
            if self._module is not None:
                return self._module
            assert isinstance(attempt.outcome, Refusal)
            return attempt.outcome

    def _fail(self, attempt: _Attempt, error: BaseException) -> None:
        detail = error.detail if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        attempt.outcome, attempt.again = Refusal("native-unavailable", detail), self._clock() + self._pause
        _log.warning(
            "nothing is captured without a native library: %s\nIt is built again in %d s, or by pygraph.retry()",
            *(detail, self._pause),
        )
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


_loaders: WeakSet[Loader] = WeakSet()
_waiting: list[None] = []
"""An element for each ``waiting_for_builds`` that is open."""


def is_building() -> bool:
    """True while a native library is being built."""
    return any(loader.is_building for loader in list(_loaders))


@atexit.register
def _tell_of_the_end() -> None:
    """Warn that a build ends with its process: the next process has to begin it anew."""
    if any(loader.is_compiling for loader in list(_loaders)):
        _log.warning(
            "this process ends before a native library is built that captures need: `pygraph explain SCRIPT` waits for "
            "it, once for this machine"
        )


def retry_failed() -> None:
    """Try again to build each library that could not be built."""
    for loader in list(_loaders):
        loader.retry()


@contextlib.contextmanager
def waiting_for_builds() -> Iterator[None]:
    """While open, calls on any thread that could capture wait for a native library that is being built."""
    _waiting.append(None)
    try:
        yield
    finally:
        _waiting.pop()


# -- a library on disk -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The torch and the Python that a library is compiled for.

    Args:
        torch: torch's folder, which has ``include`` and ``lib``.
        version: torch's version, as ``2.13.0+cu130``.
        commit: torch's commit. Builds of one commit have the same headers, for any Python and with or without CUDA.
        cuda: version of the CUDA that torch was built with; None without.
        cxx11_abi: torch was built with the C++11 ABI of libstdc++.
        distributed: torch has ``torch.distributed``.
        python: folder of Python's headers.
        suffix: end of the names of Python's extensions, as ``.cpython-311-x86_64-linux-gnu.so``.
    """

    torch: Path
    version: str
    commit: str
    cuda: str | None
    cxx11_abi: bool
    distributed: bool
    python: str
    suffix: str

    @classmethod
    def here(cls) -> Target:
        """The torch and the Python of this process."""
        return cls(
            torch=Path(torch.__file__).resolve().parent,
            version=torch.__version__,
            commit=torch.version.git_version or "",
            cuda=torch.version.cuda,
            cxx11_abi=torch.compiled_with_cxx11_abi(),
            distributed=torch.distributed.is_available(),
            python=sysconfig.get_paths()["include"],
            suffix=sysconfig.get_config_var("EXT_SUFFIX") or ".so",
        )


@dataclass(frozen=True)
class NativeLibrary:
    """The Python extension ``_pygraph_NAME`` made of ``source``, which may include headers beside it and in ``SHARED``.

    ``libraries``: torch's libraries with which it is linked. ``includes``: finds directories of headers other than
    torch's and Python's; raises CaptureError (``native-unavailable``) if there are none.
    """

    name: str
    source: Path
    libraries: tuple[str, ...]
    includes: Callable[[], tuple[Path, ...]] = tuple

    @property
    def module(self) -> str:
        """The name of the extension."""
        return f"_pygraph_{self.name}"

    def load(self, path: Path) -> ModuleType:
        """The module in ``path``. Raises CaptureError (``native-unavailable``) if it cannot be loaded: ``find`` then
        does not return it again if it came with the wheel."""
        if path.parent == PREBUILT:  # whoever wrote it wrote this module as well
            name = str(path)
        else:
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
            _unusable.add(path)
            raise CaptureError("native-unavailable", str(error)) from error
        if not getattr(sys, "_is_gil_enabled", lambda: True)():  # a free-threaded Python enables it for the module
            raise CaptureError("native-unavailable", "the library needs the GIL, which PYTHON_GIL=0 keeps off")
        module.__file__ = str(path)
        return module

    def find(self, folder: str | None = None) -> Path | None:
        """The library, if the wheel or ``folder`` (as for ``build``) has it already. Raises CaptureError
        (``native-unavailable``) if the compiler does not answer, so that the path is not known."""
        prebuilt = PREBUILT / self.prebuilt(Target.here())
        if prebuilt not in _unusable and prebuilt.is_file():
            return prebuilt
        path = self.path(_root(folder))
        return None if cache.load(path) is None else path

    def build(self, folder: str | None = None) -> Path:
        """The library, compiled unless ``find`` has it already. ``folder``: by default, that of ``cache.VARIABLE``, or
        the user's cache. Raises CaptureError (``native-unavailable``)."""
        try:
            found = self.find(folder)
            if found is not None:
                return found
            root = _root(folder)
            inner = self.path(root).relative_to(root)
            path = cache.usable(str(root), inner.parent) / inner.name
            with _telling(self.name), cache.locked(path.parent / f"{cache.TEMPORARY}{self.name}.lock"):
                if cache.load(path) is None:
                    self._compile(path)
        except OSError as error:
            raise CaptureError("native-unavailable", str(error)) from error
        return path

    def path(self, root: Path) -> Path:
        """Path in ``root`` of the library for this interpreter, this torch, this compiler and these sources,
        independent of the sources' folder."""
        compiler, target = _compiler(), Target.here()
        parts = [torch.__version__, sys.version, platform.machine(), _compiler_version(*compiler)]
        parts += [*compiler, *self._flags(target), *self._search(target), *self._links(target)]
        return root / "native" / f"{self.name}-{self._fingerprint(parts)}" / f"{self.module}{target.suffix}"

    def prebuilt(self, target: Target) -> str:
        """The name in ``PREBUILT`` of the library of these sources for ``target``. Only a library that includes CUDA's
        headers depends on the CUDA with which torch was built."""
        cuda = target.cuda if "c10_cuda" in self.libraries else None
        parts = [target.commit, str(cuda), *self._flags(target), *self.libraries]
        release = target.version.partition("+")[0]
        return f"{self.name}-torch{release}-{self._fingerprint(parts)}{target.suffix}"

    def command(self, output: Path, target: Target | None = None) -> list[str]:
        """The compiler's command line for ``output``. ``target``: by default, this process's."""
        target = target or Target.here()
        flags = [*self._flags(target), *self._search(target)]
        return [*_compiler(), *flags, str(self.source), "-o", str(output), *self._links(target)]

    def _fingerprint(self, parts: list[str]) -> str:
        """A hash of ``parts`` and of the sources."""
        for file in (self.source, *sorted(self.source.parent.glob("*.h")), *sorted(SHARED.glob("*.h"))):
            parts += [file.name, file.read_text(encoding="utf-8")]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def _flags(self, target: Target) -> list[str]:
        release = tuple(int(part) for part in target.version.split(".")[:2])
        standard = "-std=c++20" if release >= (2, 12) else "-std=c++17"
        # As torch itself is built. Without NDEBUG, pybind11 checks who holds the GIL at each change of a count.
        flags = [standard, "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"]
        flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(target.cxx11_abi)}")
        return [*flags, "-DPYGRAPH_DISTRIBUTED"] if target.distributed else flags

    def _search(self, target: Target) -> list[str]:
        include = target.torch / "include"
        folders = (include, include / "torch/csrc/api/include", target.python, *self.includes())
        return [f"-isystem{folder}" for folder in folders]

    def _links(self, target: Target) -> list[str]:
        return [_CXX_RUNTIME, f"-L{target.torch / 'lib'}", *(f"-l{name}" for name in self.libraries)]

    def _compile(self, path: Path) -> None:
        """Compile in the folder of ``path``, then store it as a whole. Called under the lock."""
        for left in path.parent.glob(f"{_SCRATCH}*"):  # of a process that was killed: nobody else builds now
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent, ignore_cleanup_errors=True) as scratch:
            output = Path(scratch) / path.name
            _log.warning("building the native library of the %s driver, once for this machine", self.name)
            _run(self.command(output))
            cache.store(path, output.read_bytes(), within=path.parent.parent)


_unusable: set[Path] = set()
"""Libraries that this process could not load. One that came with the wheel is compiled in the next attempt."""


def _root(folder: str | None) -> Path:
    """The cache folder."""
    return Path(os.path.expanduser(folder or os.environ.get(cache.VARIABLE) or cache.user_dir()))


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """Log a line at intervals while a library is being built, by this process or by another one."""
    over, start = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(_LINE_SECONDS):
            seconds = time.monotonic() - start
            _log.warning("the native library of the %s driver is being built, for %d s so far", name, seconds)

    threading.Thread(target=tell, name="pygraph-build-log", daemon=True).start()
    try:
        yield
    finally:
        over.set()


# -- the compiler ------------------------------------------------------------------------------------------------------


_GUARD = """
ulimit -c 0
ulimit -S -t "$1" 2>/dev/null
shift
exec 3<&0 </dev/null
{ read -r _ <&3; kill -9 0; } >/dev/null 2>&1 &
exec 3<&-
"$@"
status=$?
exec 2>/dev/null
kill -9 $!
wait
exit $status
"""
"""Runs a command with a limit on CPU time, in a process group that ends when the other end of its stdin is closed. The
system closes it when the process that holds it dies, however that happens."""

_guards: set[int] = set()
"""The ends of pipes whose closing ends the compilers."""


@contextlib.contextmanager
def _guard() -> Iterator[int]:
    """Yields a stdin that stays open until the block is left, or this process ends."""
    read, write = os.pipe()
    _guards.add(write)
    try:
        yield read
    finally:
        _guards.discard(write)
        os.close(write)
        os.close(read)


def _run(command: list[str], seconds: float | None = None) -> str:
    """Run the compiler; returns its output. Raises CaptureError (``native-unavailable``) if it fails, or takes longer
    than ``seconds``. Processes that it started end with it, and with this process."""
    guarded, pipe = ["sh", "-c", _GUARD, "sh", str(_CPU_SECONDS), *command], subprocess.PIPE
    with (
        _guard() as stdin,
        subprocess.Popen(
            guarded, stdin=stdin, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process,
    ):
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise CaptureError("native-unavailable", f"{shlex.join(command)} took more than {seconds:g} s") from None
    if process.returncode == 128 + signal.SIGXCPU:
        raise CaptureError("native-unavailable", f"the compiler took more than {_CPU_SECONDS} s of CPU time")
    if process.returncode:
        text = f"the compiler failed (exit status {process.returncode}):\n{errors[-4000:]}"
        raise CaptureError("native-unavailable", text)
    return output


def _in_child() -> None:
    """Detach a forked process from the compilers of its parent."""
    for write in _guards:
        os.close(write)
    _guards.clear()
    for loader in list(_loaders):
        loader.after_fork()


os.register_at_fork(after_in_child=_in_child)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(chosen[0]) is None:
        raise CaptureError("native-unavailable", f"there is no C++ compiler {chosen[0]!r}; set CXX to one")
    return chosen


@functools.cache
def _compiler_version(*compiler: str) -> str:
    return _run([*compiler, "--version"], _VERSION_SECONDS)
