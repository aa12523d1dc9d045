"""Native libraries on disk: only whole ones of one's own are loaded, in the folder that was chosen, built once."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import pygraph
from pygraph import backend, cache
from pygraph.errors import CaptureError
from pygraph.runtime import native_build
from pygraph.runtime.host import build as host_build
from pygraph.runtime.native_build import SHARED, Loader, NativeLibrary

SOURCE = """
#include <Python.h>
#include <iostream>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pygraph_tiny", nullptr, 0, nullptr};
PyMODINIT_FUNC PyInit__pygraph_tiny() { return PyModule_Create(&definition); }
extern "C" void say() { std::cout << 1.5; }
"""


@pytest.fixture
def library(tmp_path: Path) -> NativeLibrary:
    source = tmp_path / "sources" / "tiny.cpp"
    source.parent.mkdir()
    source.write_text(SOURCE)
    return NativeLibrary("tiny", source, ("c10",))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a folder that cannot be used is made anew, and warned of."""
    monkeypatch.setattr(cache, "_temporary", {})


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the compiler one that does what a script says; ``$2`` is its output."""

    def stand_in(script: str) -> None:
        path = tmp_path / "cxx"
        path.write_text(
            '#!/bin/sh\nif [ "$1" = --version ]; then echo fake; exit 0; fi\n'
            f'while [ "$1" != -o ]; do shift; done\n{script}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return stand_in


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)


# -- what may be loaded ------------------------------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda path: os.truncate(path, 0),
    "other bytes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "open to others": lambda path: path.chmod(0o777),
    "of somebody else": lambda path: os.chown(path, 65534, 65534),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_library_that_is_not_whole_or_not_ones_own_is_built_again(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None], damage: str
) -> None:
    if damage == "of somebody else" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    calls = tmp_path / "calls"
    compiler(f'echo call >> {calls}; echo whole > "$2"')
    path = library.build(folder)
    assert library.build(folder) == path
    assert calls.read_text() == "call\n"
    DAMAGE[damage](path)
    assert library.build(folder) == path
    assert calls.read_text() == "call\ncall\n"
    assert cache.load(path) == b"whole\n"


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_in_which_others_can_put_their_own_is_not_used(
    library: NativeLibrary,
    folder: str,
    compiler: Callable[[str], None],
    above: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler('echo whole > "$2"')
    path = library.build(folder)
    path.parents[above].chmod(0o777)
    other = library.build(folder)
    assert not other.is_relative_to(folder)
    assert library.build(folder) == other
    assert caplog.text.count(f"Set {cache.VARIABLE}") == 1
    with pytest.raises(CaptureError, match="no longer what was built"):
        library.load(path)


def test_what_is_loaded_is_what_was_checked(
    library: NativeLibrary, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another process puts in its place between the two, or after it was built."""
    path, opened = library.build(folder), cache.opened

    def swapped(path: Path) -> int | None:
        descriptor = opened(path)
        path.rename(path.with_name("moved"))
        path.write_text("another")
        return descriptor

    with monkeypatch.context() as patches:
        patches.setattr(cache, "opened", swapped)
        module = library.load(path)
    assert (module.__name__, module.__file__) == ("_pygraph_tiny", str(path))
    held = {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
    assert str(path.with_name("moved")) in held, "the next library would get this name, and be taken for this one"
    path.chmod(0o600)
    with pytest.raises(CaptureError, match="no longer what was built"):
        library.load(path)


def test_a_library_is_replaced_as_a_whole(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    """A process that has the damaged one open keeps it; while the compiler writes, nobody sees the new one."""
    seen = tmp_path / "seen"
    compiler(f'printf half > "$2"; ls {folder}/native/*/ > {seen}; printf whole > "$2"')
    path = library.build(folder)
    assert cache.load(path) == b"whole"
    assert path.name not in seen.read_text().split()
    path.write_text("damaged")
    with path.open() as held:
        library.build(folder)
        assert held.read() == "damaged"
    assert cache.load(path) == b"whole"


def test_what_a_killed_build_left_is_removed(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    begun = tmp_path / "begun"
    compiler(f'echo half > "$2"; echo $$ > {begun}; sleep 60')
    process = multiprocessing.get_context("fork").Process(target=library.build, args=(folder,))
    process.start()
    wait_for(lambda: begun.exists() and begun.read_text())
    process.kill()
    process.join()
    os.killpg(int(begun.read_text()), signal.SIGKILL)
    left = set(Path(folder).rglob(f"{native_build._SCRATCH}*"))
    assert left
    compiler('echo whole > "$2"')
    path = library.build(folder)
    assert path.parent in {each.parent for each in left}
    names = [path.name, f"{cache.TEMPORARY}tiny.lock"]
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(names)


def test_a_lock_follows_no_link_and_empties_nothing(tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "x.lock"
    victim.write_text("precious")
    with cache.locked(victim):
        pass
    lock.symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic"), cache.locked(lock):
        pass
    assert victim.read_text() == "precious"


def test_a_lock_is_given_back_although_a_fork_has_the_file_too(tmp_path: Path) -> None:
    with cache.locked(tmp_path / "x.lock"):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with (tmp_path / "x.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_library_shares_the_runtime_that_torch_has(
    library: NativeLibrary, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the compiler would have linked a static one."""
    monkeypatch.setenv("CXX", "c++ -static-libstdc++")
    built, shared = ctypes.CDLL(str(library.build(folder))), ctypes.CDLL("libstdc++.so.6")
    streams = [ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout")) for library in (built, shared)]
    assert streams[0] == streams[1]


# -- what a library depends on -----------------------------------------------------------------------------------------


def test_a_library_is_named_by_all_that_it_depends_on(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(SHARED, shared)
    monkeypatch.setattr(native_build, "SHARED", shared)
    paths = [library.path(tmp_path)]
    assert library.path(tmp_path) == paths[0]
    for file in (library.source, library.source.with_name("own.h"), *shared.iterdir(), shared / "more.h"):
        with file.open("a") as opened:
            opened.write("// more\n")
        paths.append(library.path(tmp_path))
    (shared / "more.h").rename(shared / "other.h")
    paths.append(library.path(tmp_path))
    monkeypatch.setattr(native_build, "_compiler_version", lambda *_: "another")
    paths.append(library.path(tmp_path))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    paths.append(library.path(tmp_path))
    assert len(set(paths)) == len(paths)


# -- once per process, in the background, within a limit ---------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_a_refusal(
    library: NativeLibrary, folder: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(CaptureError) as caught:
        library.build(folder)
    assert caught.value.reason == "native-unavailable"
    assert not list(Path(folder).rglob("*.so"))


def test_a_compiler_that_takes_too_long_is_stopped(
    library: NativeLibrary,
    folder: str,
    tmp_path: Path,
    compiler: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what it started."""
    worker = tmp_path / "worker"
    compiler(f"sleep 3600 & echo $! > {worker}; wait")
    monkeypatch.setattr(native_build, "_LIMIT", 1.0)
    with pytest.raises(CaptureError, match=r"stopped after 1 s") as caught:
        library.build(folder)
    assert caught.value.reason == "native-unavailable"
    state = Path(f"/proc/{worker.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_processes_that_arrive_together_build_once(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    log = tmp_path / "calls"
    compiler(f'echo call >> {log}; sleep 1; echo library > "$2"')
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        assert len(set(processes.map(library.build, [folder, folder]))) == 1
    assert log.read_text().splitlines() == ["call"]


def test_a_build_begins_in_the_background_and_happens_once(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    calls, go = tmp_path / "calls", tmp_path / "go"
    compiler(f"echo call >> {calls}; while [ ! -e {go} ]; do sleep 0.05; done; exit 1")
    load = Loader(lambda: library)
    load.start(folder)
    load.start(folder)
    wait_for(calls.exists)
    go.touch()
    for _ in range(3):
        with pytest.raises(CaptureError, match="the compiler failed"):
            load()
    assert calls.read_text().split() == ["call"]


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not(library: NativeLibrary, folder: str) -> None:
    inside = threading.Event()
    outside = threading.Event()

    def describe() -> NativeLibrary:
        inside.set()
        outside.wait(20)
        return library

    load = Loader(describe)
    load.start(folder)
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        outside.set()
        os._exit(0 if load().__name__ == "_pygraph_tiny" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outside.set()
    assert load().__name__ == "_pygraph_tiny"
    assert load() is load()


@pytest.fixture
def driverless(fresh: None) -> Iterator[None]:
    """The host driver is made anew, and is gone afterwards."""
    backend.driver_for.cache_clear()
    yield
    backend.driver_for.cache_clear()


def test_without_a_native_half_regions_stay_uncaptured_and_the_compiler_runs_once(
    driverless: None,
    library: NativeLibrary,
    tmp_path: Path,
    compiler: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = tmp_path / "calls"
    compiler(f"echo call >> {calls}; exit 1")
    monkeypatch.setattr(host_build, "load", Loader(lambda: library))
    backend._warn_once.cache_clear()
    monkeypatch.setattr(native_build, "_compiler", lambda: [str(tmp_path / "cxx")])
    monkeypatch.delenv("CXX")  # Inductor's own
    for size in (3, 4, 5):
        function = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph", dynamic=False)
        x = torch.randn(size, size)
        assert torch.equal(function(x), torch.relu(x @ x) + 1)
    assert calls.read_text().split() == ["call"]
    for report in pygraph.reports():
        assert not report.error
        assert [region.reason.partition(":")[0] for region in report.regions] == ["native-unavailable"]
    warnings = [record for record in caplog.records if "nothing is captured" in record.getMessage()]
    assert len(warnings) == 1


# -- where they lie ----------------------------------------------------------------------------------------------------


def test_the_variable_and_the_option_move_the_library(
    driverless: None, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "variable"))
    assert library.build().is_relative_to(tmp_path / "variable")
    load = Loader(lambda: library)
    monkeypatch.setattr(host_build, "load", load)
    options = {"cache_dir": str(tmp_path / "option")}
    torch.compile(lambda x: x.sin() + 1, backend="pygraph", options=options)(torch.ones(3))
    assert load._built.result()[1].is_relative_to(tmp_path / "option")


def test_without_a_usable_home_all_is_kept_in_a_temporary_folder(tmp_path: Path, library: NativeLibrary) -> None:
    """One warning says what to do, and nothing is left behind."""
    code = """
import sys
from pathlib import Path
from pygraph.cache import usable, user_dir
from pygraph.runtime.native_build import NativeLibrary
library = NativeLibrary("tiny", Path(sys.argv[1]), ("c10",))
print(library.build())
print(library.build())
print(usable(user_dir(), "decisions"))
"""
    keep = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", cache.VARIABLE)}
    environ = {**keep, "TMPDIR": str(tmp_path), "HOME": "/proc/nohome"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(library.source)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, decisions = (Path(line) for line in done.stdout.splitlines())
    assert first == second
    assert first.is_relative_to(tmp_path)
    assert first.is_relative_to(decisions.parent)
    assert done.stderr.count("cannot be used") == 1
    assert f"Set {cache.VARIABLE}" in done.stderr
    assert not decisions.parent.exists()
