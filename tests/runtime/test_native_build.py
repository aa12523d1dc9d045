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
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore

import pygraph
from pygraph import backend, cache
from pygraph.errors import CaptureError
from pygraph.runtime import native_build
from pygraph.runtime.host import HostDriver
from pygraph.runtime.host import build as host_build
from pygraph.runtime.native_build import SHARED, Loader, NativeLibrary, Target
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import Region
from tests import forked
from tests.commands import run
from tests.runtime.fake import make

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pygraph_tiny", nullptr, 0, nullptr};
PyMODINIT_FUNC PyInit__pygraph_tiny() { return PyModule_Create(&definition); }
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
    """Stand-ins for folders that cannot be used are made anew, and warned of."""
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


def test_without_the_gil_no_library_is_used(
    library: NativeLibrary, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library.build(folder)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(CaptureError, match="needs the GIL"):
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
    compiler(f'echo half > "$2"; echo $$ > {begun}; sleep 600')
    process = multiprocessing.get_context("fork").Process(target=library.build, args=(folder,))
    process.start()
    wait_for(lambda: begun.exists() and begun.read_text())
    process.kill()
    process.join()
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


def test_a_fork_does_not_keep_the_lock_of_a_parent_that_died(tmp_path: Path) -> None:
    told = tmp_path / "told"
    parent = os.fork()
    if parent == 0:
        with cache.locked(tmp_path / "x.lock"):
            if os.fork() == 0:  # it tells: what a fork does first, it has done
                told.with_name("part").write_text(str(os.getpid()))
                told.with_name("part").rename(told)
            signal.pause()
    wait_for(told.exists)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with (tmp_path / "x.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)


def test_a_library_shares_the_runtime_that_torch_has(
    library: NativeLibrary, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the compiler would have linked a static one."""
    library.source.write_text('#include <iostream>\nextern "C" void say() { std::cout << 1.5; }\n')
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


def test_checkouts_with_the_same_sources_share_one_library(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    calls = tmp_path / "calls"
    compiler(f'echo call >> {calls}; echo whole > "$2"')
    other = tmp_path / "other" / library.source.name
    shutil.copytree(library.source.parent, other.parent)
    assert library.build(folder) == replace(library, source=other).build(folder)
    assert calls.read_text() == "call\n"


# -- libraries of the wheel --------------------------------------------------------------------------------------------


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the wheel's libraries."""
    folder = tmp_path / "wheel"
    folder.mkdir()
    monkeypatch.setattr(native_build, "PREBUILT", folder)
    return folder


def test_a_library_of_the_wheel_is_loaded_where_there_is_no_compiler(
    library: NativeLibrary, loader: Loader, carried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = carried / library.prebuilt(Target.here())
    subprocess.run(library.command(path), check=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    module = loader()
    assert (module.__name__, module.__file__) == ("_pygraph_tiny", str(path))


def test_a_library_of_the_wheel_that_cannot_be_loaded_is_built(
    library: NativeLibrary, loader: Loader, carried: Path, go: Path, hour: list[float], tmp_path: Path
) -> None:
    (carried / library.prebuilt(Target.here())).write_text("of another machine")
    with pytest.raises(CaptureError, match=r"wheel/tiny-torch.*too short"):
        loader()
    hour[0] += native_build._SHORTEST_PAUSE
    go.touch()
    assert Path(str(loader().__file__)).is_relative_to(tmp_path / "cache")


def test_a_library_of_the_wheel_is_named_by_all_that_it_depends_on(library: NativeLibrary) -> None:
    here = Target.here()
    others = [
        replace(here, commit="another"),
        replace(here, version="2.99.0"),
        replace(here, suffix=".cpython-399-x86_64-linux-gnu.so"),
        replace(here, distributed=not here.distributed),
        replace(here, cxx11_abi=not here.cxx11_abi),
    ]
    names = [library.prebuilt(target) for target in (here, *others)]
    with library.source.open("a") as opened:
        opened.write("// more\n")
    names.append(library.prebuilt(here))
    assert len(set(names)) == len(names)
    moved = replace(here, torch=Path("/elsewhere"), python="/elsewhere", version=f"{here.version}+local", cuda="13.9")
    assert library.prebuilt(moved) == library.prebuilt(here)
    cuda = replace(library, libraries=("c10", "c10_cuda"))
    assert cuda.prebuilt(moved) != cuda.prebuilt(here)


# -- the compiler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_a_refusal(
    library: NativeLibrary, folder: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(CaptureError) as caught:
        library.build(folder)
    assert caught.value.reason == "native-unavailable"
    assert not list(Path(folder).rglob("*.so"))


def is_over(process: str) -> bool:
    """True if the process whose id was read has ended."""
    state = Path(f"/proc/{process.strip()}/stat")
    try:
        return state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_the_limit_is_on_the_time_that_the_compiler_computes(
    library: NativeLibrary, folder: str, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the time that passes: on a busy machine, that is no measure of its work."""
    monkeypatch.setattr(native_build, "_CPU_SECONDS", 1)
    compiler("while :; do :; done")
    with pytest.raises(CaptureError, match=r"more than 1 s of CPU time") as caught:
        library.build(folder)
    assert caught.value.reason == "native-unavailable"
    compiler('sleep 1.2; echo whole > "$2"')
    assert cache.load(library.build(folder)) == b"whole\n"


def test_a_compiler_that_does_not_say_its_version_is_not_waited_for(
    library: NativeLibrary, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, with what it started."""
    hangs, worker = tmp_path / "hangs", tmp_path / "worker"
    hangs.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {worker}; wait\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CXX", str(hangs))
    monkeypatch.setattr(native_build, "_VERSION_SECONDS", 0.5)
    with pytest.raises(CaptureError, match=r"hangs --version took more than 0.5 s"):
        library.build(folder)
    wait_for(lambda: is_over(worker.read_text()))
    assert is_over(worker.read_text())


ENDS = """
import os, signal, sys, time
from pathlib import Path
from pygraph.runtime.native_build import Loader, NativeLibrary
source, begun, end = sys.argv[1:]
Loader(lambda: NativeLibrary("tiny", Path(source), ("c10",))).start()
while not Path(begun).exists():
    time.sleep(0.05)
if end == "with a fork alive":
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(600)
    print(child, flush=True)
if end != "normally":
    os.kill(os.getpid(), signal.SIGTERM if end == "terminated" else signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "end", ["normally", pytest.param("terminated", marks=pytest.mark.sweep), "killed", "with a fork alive"]
)
def test_a_compiler_ends_with_the_process_that_started_it(
    library: NativeLibrary, tmp_path: Path, compiler: Callable[[str], None], end: str
) -> None:
    worker, begun = tmp_path / "worker", tmp_path / "begun"
    compiler(f"echo $$ > {worker}; sleep 600 & echo $! >> {worker}; touch {begun}; wait")
    environ = {**os.environ, cache.VARIABLE: str(tmp_path / "cache")}
    done = forked.run(ENDS, library.source, begun, end, env=environ)
    wait_for(lambda: all(map(is_over, worker.read_text().split())))
    running = [process for process in worker.read_text().split() if not is_over(process)]
    for process in [*running, *done.stdout.split()]:
        os.kill(int(process), signal.SIGKILL)
    assert not running
    assert ("`pygraph explain SCRIPT` waits for it" in done.stderr) == (end == "normally")


def test_processes_that_arrive_together_build_once(
    library: NativeLibrary, folder: str, tmp_path: Path, compiler: Callable[[str], None]
) -> None:
    log = tmp_path / "calls"
    compiler(f'echo call >> {log}; sleep 0.3; echo library > "$2"')
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        assert len(set(processes.map(library.build, [folder, folder]))) == 1
    assert log.read_text().splitlines() == ["call"]


# -- in the background, once per process -------------------------------------------------------------------------------


@pytest.fixture
def hour() -> list[float]:
    """The time, in s, for a loader."""
    return [0.0]


@pytest.fixture
def loader(library: NativeLibrary, folder: str, hour: list[float], monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A loader of the library, which the host driver waits for from now on."""
    load = Loader(lambda: library, clock=lambda: hour[0])
    monkeypatch.setenv(cache.VARIABLE, folder)
    monkeypatch.setattr(host_build, "load", load)
    return load


@pytest.fixture
def go(tmp_path: Path, compiler: Callable[[str], None]) -> Path:
    """The compiler begins once this file is there. It writes a line to ``calls`` when it is called."""
    go = tmp_path / "go"
    wait = f"echo call >> {tmp_path}/calls; while [ ! -e {go} ]; do sleep 0.05; done"
    compiler(f'{wait}; exec c++ -shared -fPIC -I{sysconfig.get_paths()["include"]} {tmp_path}/sources/tiny.cpp -o "$2"')
    return go


def region_of() -> tuple[Region, Callable[[], bool]]:
    """A region, and a call of it: whether that was replayed."""
    region, driver = make()
    driver.random = False  # what draws needs a function of the library

    def call() -> bool:
        before = region.record.replays
        (result,) = region([torch.ones(3)])
        assert result.tolist() == [2.0, 2.0, 2.0]
        return region.record.replays > before

    return region, call


def test_calls_do_not_wait_for_the_compiler_and_use_what_it_built(loader: Loader, go: Path, tmp_path: Path) -> None:
    region, call = region_of()
    assert not any(call() for _ in range(5))
    assert region.record.state == "warm"
    assert region.record.reason is not None
    assert region.record.reason.startswith("native-building: the native library is being built")
    assert region.counters[1]["refused.native-building"] == 1
    go.touch()
    loader()
    assert [call(), call()] == [False, True]
    assert (region.record.state, region.record.reason) == ("replay", None)
    assert (tmp_path / "calls").read_text() == "call\n"


def test_what_is_kept_is_there_for_the_first_call(loader: Loader, library: NativeLibrary, go: Path) -> None:
    """Processes that build nothing capture at the same calls, each time."""
    go.touch()
    library.build()
    _, call = region_of()
    assert [call(), call(), call()] == [False, False, True]


def test_calls_wait_for_the_compiler_where_that_is_asked_for(loader: Loader, go: Path) -> None:
    region, call = region_of()
    call()
    loader.start()
    threading.Timer(0.2, go.touch).start()
    with native_build.waiting_for_builds():
        assert [call(), call()] == [False, True]
    assert "refused.native-building" not in region.counters[1]


def test_a_build_says_that_it_goes_on(
    loader: Loader, go: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "_LINE_SECONDS", 0.01)
    loader.start()

    def lines() -> list[str]:
        told = [each.getMessage() for each in caplog.records if each.name == "pygraph.runtime"]
        return [line for line in told if "tiny driver is being built, for " in line]

    wait_for(lambda: len(lines()) > 1)
    go.touch()
    loader()
    assert len(lines()) > 1


@pytest.mark.parametrize("again", ["retry", "time"])
def test_a_build_that_failed_is_tried_again(
    loader: Loader, go: Path, hour: list[float], tmp_path: Path, compiler: Callable[[str], None], again: str
) -> None:
    """By ``pygraph.retry()``, and after a while. Until then the reason has what the compiler said."""
    calls = tmp_path / "calls"
    mended = (tmp_path / "cxx").read_text()
    compiler(f"echo call >> {calls}; echo tiny.cpp:1: no such header >&2; exit 1")
    go.touch()
    region, call = region_of()
    with native_build.waiting_for_builds():
        assert not any(call() for _ in range(4))
    assert region.record.state == "uncaptured"
    assert region.record.reason is not None
    assert "native-unavailable" in region.record.reason
    assert "tiny.cpp:1: no such header" in region.record.reason
    hour[0] += 59
    call()
    assert calls.read_text() == "call\n"
    (tmp_path / "cxx").write_text(mended)
    if again == "retry":
        assert pygraph.retry() >= 1
    else:
        hour[0] += 1
    with native_build.waiting_for_builds():
        assert [call(), call()] == [False, True]
    assert calls.read_text() == "call\ncall\n"


def test_a_build_that_goes_on_failing_is_tried_less_and_less(
    loader: Loader, hour: list[float], tmp_path: Path, compiler: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    calls = tmp_path / "calls"
    compiler(f"echo call >> {calls}; exit 1")
    begun = []
    for second in range(0, 1000, 10):
        hour[0] = float(second)
        with pytest.raises(CaptureError, match="the compiler failed"):
            loader()
        if len(calls.read_text().split()) > len(begun):
            begun.append(second)
    assert begun == [0, 60, 180, 420, 900]
    warnings = [each for each in caplog.records if "nothing is captured" in each.getMessage()]
    assert len(warnings) == len(begun)


def test_a_build_begins_once(loader: Loader, go: Path, tmp_path: Path) -> None:
    loader.start()
    loader.start()
    go.touch()
    assert loader() is loader()
    assert (tmp_path / "calls").read_text() == "call\n"


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


# -- what users see ----------------------------------------------------------------------------------------------------


PROGRAM = """
import sys, time
from pathlib import Path
import torch
import pygraph
from pygraph.runtime import native_build
go, fake = Path(sys.argv[1]), sys.argv[2]
native_build._compiler = lambda: [fake]  # not Inductor's

@torch.compile(backend="pygraph", options={"ledger": False})
def model(x):
    return torch.relu(x @ x) + 1

def call():
    x = torch.randn(3, 3)
    assert torch.equal(model(x), torch.relu(x @ x) + 1)

for _ in range(4):
    call()
(region,) = pygraph.reports()[-1].regions
print(region.state, region.why)
go.touch()
while not pygraph.counters().get("replays"):
    time.sleep(0.01)
    call()
print(region.state, region.why)
"""


def test_a_program_runs_while_its_driver_is_built(go: Path, tmp_path: Path) -> None:
    kept, copy = host_build.load().__file__, tmp_path / "copies"
    copy.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ] && [ "$1" != --version ]; do shift; done\n[ "$1" = -o ] || exit 0\n'
        f'while [ ! -e {go} ]; do sleep 0.05; done; cp {kept} "$2"\n'
    )
    copy.chmod(0o755)
    environ = {**os.environ, cache.VARIABLE: str(tmp_path / "cache")}
    del environ["CXX"]
    done = forked.run(PROGRAM, go, copy, env=environ)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before.startswith("warm native-building: ")
    assert after.split() == ["replay"]
    assert "building the native library of the host driver" in done.stderr


@pytest.fixture
def driverless(fresh: None) -> Iterator[None]:
    """The host driver is made anew, and is gone afterwards."""
    backend.driver_for.cache_clear()
    yield
    backend.driver_for.cache_clear()


@pytest.fixture
def broken(
    driverless: None, loader: Loader, tmp_path: Path, compiler: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The compiler of native libraries fails, once this file is there."""
    go = tmp_path / "go"
    compiler(f"echo call >> {tmp_path}/calls; while [ ! -e {go} ]; do sleep 0.05; done; sleep 0.5; exit 1")
    monkeypatch.setattr(native_build, "_compiler", lambda: [str(tmp_path / "cxx")])
    monkeypatch.delenv("CXX")  # Inductor's own
    return go


def compiled(size: int, **options: Any) -> Callable[[], None]:
    """A call of a function of its own, which is right."""
    function = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph", dynamic=False, options=options)
    x = torch.randn(size, size)

    def call() -> None:
        assert torch.equal(function(x), torch.relu(x @ x) + 1)

    return call


def reasons() -> list[str]:
    return [region.why.partition(":")[0] for report in pygraph.reports() for region in report.regions]


def test_without_a_native_half_regions_stay_uncaptured_and_the_compiler_runs_once(
    broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken.touch()
    with native_build.waiting_for_builds():
        for size in (3, 4):
            call = compiled(size)
            call()
            call()
    assert (tmp_path / "calls").read_text().split() == ["call"]
    assert [report.error for report in pygraph.reports()] == [None] * 2
    assert reasons() == ["native-unavailable"] * 2
    assert caplog.text.count("nothing is captured") == 1


asked: list[bool] = []
"""Of each time that the driver was asked whether it is ready: whether it was to wait."""


@pytest.fixture
def late(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler goes on only once the driver is asked whether it is ready."""
    unready = HostDriver.unready

    def unready_after(driver: HostDriver) -> Any:
        asked.append(bool(native_build._waiting))
        broken.touch()
        return unready(driver)

    asked.clear()
    monkeypatch.setattr(HostDriver, "unready", unready_after)


def test_strict_waits_for_the_build(late: None) -> None:
    with pytest.raises(Exception, match="native-unavailable: the compiler failed"):
        compiled(3, strict=True)()


def test_ranks_that_capture_at_the_same_calls_wait_for_the_build(late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone: a program that has collectives, on a driver that may capture them."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        for may in (False, True):
            monkeypatch.setattr(HostDriver, "no_collectives", lambda _, may=may: None if may else Refusal("a", "b"))
            for sends in (False, True):
                torch._dynamo.reset()
                asked.clear()

                @torch.compile(backend="pygraph", options={"collectives": "measured"})
                def function(x: torch.Tensor, sends: bool = sends) -> torch.Tensor:
                    y = torch.relu(x @ x) + 1
                    return torch.relu(all_reduce(y, "sum", torch.distributed.group.WORLD)) if sends else y

                function(torch.randn(3, 3))
                assert asked[:1] == [may and sends], (may, sends)
    finally:
        torch.distributed.destroy_process_group()


def test_explain_waits_for_the_build(late: None) -> None:
    pygraph.explain(lambda x: torch.relu(x @ x) + 1, torch.randn(3, 3))
    assert reasons() == ["native-unavailable"]


def test_a_script_that_is_explained_waits_for_the_build(late: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.compile(lambda x: torch.relu(x @ x) + 1, backend='pygraph')\n"
        "for _ in range(3):\n"
        "    model(torch.ones(3, 3))\n"
    )
    shown = run("explain", script)
    assert shown.exit_code == 0, shown.output
    assert "native-unavailable" in shown.output


def test_a_graph_that_is_run_waits_for_the_build(late: None, broken: Path, tmp_path: Path) -> None:
    torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph", options={"dump_dir": str(tmp_path)})(
        torch.randn(3, 3)
    )
    with native_build.waiting_for_builds():
        HostDriver().unready()
    pygraph.reset()
    broken.unlink()
    pygraph.retry()
    run("run", next(tmp_path.rglob("05-selection.pgir")))
    assert reasons() == ["native-unavailable"]


# -- where they lie ----------------------------------------------------------------------------------------------------


def test_the_variable_and_the_option_move_the_library(
    driverless: None, library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "variable"))
    assert library.build().is_relative_to(tmp_path / "variable")
    load = Loader(lambda: library)
    monkeypatch.setattr(host_build, "load", load)
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "option")}
    torch.compile(lambda x: x.sin() + 1, backend="pygraph", options=options)(torch.ones(3))
    assert Path(str(load().__file__)).is_relative_to(tmp_path / "option")


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
    done = forked.run(code, library.source, env=environ)
    assert done.returncode == 0, done.stderr
    first, second, decisions = (Path(line) for line in done.stdout.splitlines())
    assert first == second
    assert first.is_relative_to(tmp_path)
    assert first.is_relative_to(decisions.parent)
    assert done.stderr.count("cannot be used") == 1
    assert f"Set {cache.VARIABLE}" in done.stderr
    assert not decisions.parent.exists()
