"""Native libraries on disk: only whole ones of one's own are loaded, in the folder that was chosen, built once."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pygraph
from pygraph import backend, cache
from pygraph.errors import CaptureError
from pygraph.runtime import native_build
from pygraph.runtime.host import build as host_build
from pygraph.runtime.native_build import Loader, NativeLibrary

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, 0, nullptr};
PyMODINIT_FUNC PyInit_tiny() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    return folder


@pytest.fixture
def library(sources: Path) -> NativeLibrary:
    return NativeLibrary("tiny", "tiny", sources, ("tiny.cpp",), ("c10",))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a folder that cannot be used is made anew, and warned of."""
    monkeypatch.setattr(cache, "_temporary", {})


def stand_in(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does what ``script`` says; ``$2`` is its output."""
    path.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo fake; exit 0; fi\n'
        f'while [ "$1" != -o ]; do shift; done\n{script}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


# -- what may be loaded ------------------------------------------------------------------------------------------------


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.chmod(0o666)
    path.with_name(f"{path.name}.sha256").unlink()


@pytest.mark.parametrize(
    "damage", [cut(0), cut(100), cut(4096), hole, foreign], ids=["0", "100", "4096", "hole", "sum"]
)
def test_a_damaged_library_is_built_again(library: NativeLibrary, folder: str, damage: Callable[[Path], None]) -> None:
    path = library.build(folder)
    whole = path.read_bytes()
    damage(path)
    again = library.build(folder)
    assert again == path
    assert again.read_bytes() == whole
    assert library.load(again).__name__ == "tiny"


@pytest.mark.parametrize("change", ["mode", "owner"])
def test_what_others_can_write_is_built_again(library: NativeLibrary, folder: str, change: str) -> None:
    path = library.build(folder)
    first = path.stat().st_ino, path.stat().st_mtime_ns
    if change == "mode":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("only root gives files away")
    assert library.build(folder) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) != first
    assert path.stat().st_uid == os.geteuid()
    assert path.stat().st_mode & 0o022 == 0


def test_a_folder_that_is_open_to_others_is_closed(library: NativeLibrary, folder: str) -> None:
    path = library.build(folder)
    path.parent.chmod(0o777)
    assert library.build(folder) == path
    assert path.parent.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_somebody_else_is_not_used(
    library: NativeLibrary, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = library.build(folder)
    os.chown(path.parent, 65534, 65534)
    caplog.clear()
    other = library.build(folder)
    assert not other.is_relative_to(folder)
    assert library.build(folder) == other
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "pygraph.cache"]
    assert cache.VARIABLE in warning


def test_a_library_is_replaced_as_a_whole(
    library: NativeLibrary, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has the damaged one open keeps it; while the compiler writes, nobody sees the new one."""
    seen = tmp_path / "seen"
    script = f'printf half > "$2"; ls {folder}/native/*/ > {seen}; printf whole > "$2"'
    stand_in(tmp_path / "cxx", script, monkeypatch)
    path = library.build(folder)
    assert path.read_text() == "whole"
    assert path.name not in seen.read_text().split()
    path.write_text("damaged")
    with path.open() as held:
        library.build(folder)
        assert held.read() == "damaged"
    assert path.read_text() == "whole"


def test_what_a_killed_build_left_is_removed(
    library: NativeLibrary, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    stand_in(tmp_path / "cxx", f'echo half > "$2"; echo $$ > {begun}; sleep 60', monkeypatch)
    code = (
        "import sys; from pathlib import Path; from pygraph.runtime.native_build import NativeLibrary\n"
        "NativeLibrary('tiny', 'tiny', Path(sys.argv[1]), ('tiny.cpp',), ('c10',)).build(sys.argv[2])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(library.directory), folder])
    deadline = time.monotonic() + 60
    while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    os.killpg(int(begun.read_text()), signal.SIGKILL)
    left = set(Path(folder).rglob(f"{native_build._SCRATCH}*"))
    assert left
    stand_in(tmp_path / "cxx", 'echo whole > "$2"', monkeypatch)
    path = library.build(folder)
    assert path.parent in {each.parent for each in left}
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(
        [path.name, f"{path.name}.sha256", "tiny.lock"]
    )


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
    reading, writing = os.pipe()
    with cache.locked(tmp_path / "x.lock"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    os.close(reading)
    taken = threading.Event()

    def take() -> None:
        with cache.locked(tmp_path / "x.lock"):
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        assert taken.wait(20)
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        thread.join()


# -- once per process, in the background, within a limit ---------------------------------------------------------------


def test_a_compiler_that_takes_too_long_is_stopped(
    library: NativeLibrary, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it started."""
    worker = tmp_path / "worker"
    stand_in(tmp_path / "cxx", f"sleep 60 & echo $! > {worker}; wait", monkeypatch)
    monkeypatch.setattr(native_build, "_LIMIT", 1.0)
    start = time.monotonic()
    with pytest.raises(CaptureError, match=r"stopped after 1 s") as caught:
        library.build(folder)
    assert caught.value.reason == "native-unavailable"
    assert time.monotonic() - start < 30
    state = Path(f"/proc/{worker.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_a_build_begins_in_the_background_and_happens_once(
    library: NativeLibrary, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, go = tmp_path / "calls", tmp_path / "go"
    script = f'echo call >> {calls}; while [ ! -e {go} ]; do sleep 0.05; done; "{sys.executable}" --version; exit 1'
    stand_in(tmp_path / "cxx", script, monkeypatch)
    load = Loader(lambda: library)
    load.start(folder)
    load.start(folder)
    deadline = time.monotonic() + 60
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
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
        os._exit(0 if load().__name__ == "tiny" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outside.set()
    assert load().__name__ == "tiny"
    assert load() is load()


def test_without_a_native_half_regions_stay_uncaptured_and_the_compiler_runs_once(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = tmp_path / "calls"
    stand_in(tmp_path / "cxx", f"echo call >> {calls}; exit 1", monkeypatch)
    (tmp_path / "tiny.cpp").touch()
    broken = NativeLibrary("tiny", "tiny", tmp_path, ("tiny.cpp",), ("c10",))
    monkeypatch.setattr(host_build, "load", Loader(lambda: broken))
    backend.driver_for.cache_clear()
    backend._warn_once.cache_clear()
    monkeypatch.setattr(native_build, "_compiler", lambda: [str(tmp_path / "cxx")])
    monkeypatch.delenv("CXX")  # Inductor's own
    try:
        for size in (3, 4, 5):
            function = torch.compile(lambda x: torch.relu(x @ x) + 1, backend="pygraph", dynamic=False)
            x = torch.randn(size, size)
            assert torch.equal(function(x), torch.relu(x @ x) + 1)
    finally:
        backend.driver_for.cache_clear()
    assert calls.read_text().split() == ["call"]
    for report in pygraph.reports():
        assert not report.error
        assert [region.reason.partition(":")[0] for region in report.regions] == ["native-unavailable"]
    warnings = [record for record in caplog.records if "nothing is captured" in record.getMessage()]
    assert len(warnings) == 1


# -- where they lie ----------------------------------------------------------------------------------------------------


def test_the_variable_and_the_option_move_the_library(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "variable"))
    assert library.build().is_relative_to(tmp_path / "variable")
    assert library.build(str(tmp_path / "option")).is_relative_to(tmp_path / "option")


def test_the_option_reaches_the_build(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str | None] = []

    class Watching(Loader):
        def start(self, folder: str | None = None) -> None:
            folders.append(folder)
            super().start()

    monkeypatch.setattr(host_build, "load", Watching(host_build.library))
    options = {"cache_dir": str(tmp_path / "option")}
    torch.compile(lambda x: x.sin() + 1, backend="pygraph", options=options)(torch.ones(3))
    assert folders
    assert folders[0] == str(tmp_path / "option")


@pytest.mark.parametrize("home", ["/proc/nohome", None])
def test_without_a_usable_home_all_is_kept_in_a_temporary_folder(
    home: str | None, tmp_path: Path, library: NativeLibrary
) -> None:
    """One warning says what to do, and nothing is left behind."""
    code = """
import sys
from pathlib import Path
from pygraph.cache import usable, user_dir
from pygraph.runtime.native_build import NativeLibrary
library = NativeLibrary("tiny", "tiny", Path(sys.argv[1]), ("tiny.cpp",), ("c10",))
print(library.build())
print(library.build())
print(usable(user_dir()) / "decisions")
assert library.load(library.build()).__name__ == "tiny"
"""
    keep = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", cache.VARIABLE)}
    environ = {**keep, "TMPDIR": str(tmp_path), "HOME": home or "/dev/null"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(library.directory)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, decisions = (Path(line) for line in done.stdout.splitlines())
    assert first == second
    assert first.is_relative_to(tmp_path)
    assert first.is_relative_to(decisions.parent)
    assert done.stderr.count("cannot be used") == 1
    assert f"Set {cache.VARIABLE}" in done.stderr
    assert not decisions.parent.exists()


def test_decisions_without_a_usable_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.touch()
    with caplog.at_level(logging.WARNING):
        first, second = cache.usable(str(file)), cache.usable(str(file / "under"))
    assert first == second
    assert first.stat().st_mode & 0o077 == 0
    assert len(caplog.records) == 1
    assert cache.VARIABLE in caplog.text
