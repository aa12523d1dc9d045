"""Files that outlive a process: whole, of this user or root alone, within a limit, and never half written."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
import pytest

from pygraph import cache, warm
from pygraph.calibration import store as calibrations
from pygraph.inductor import products
from pygraph.ir import HOST, Graph, parse_graph
from pygraph.program.recording import Origin
from pygraph.report.model import GraphReport, RegionReport
from pygraph.runtime import contest

IDENTITY = calibrations.Identity("cpu", "some device", "1.2", "2.13.0", "0.1.0")
MODEL = dataclasses.replace(HOST, name="some device", peaks={"f32": 60.0}, source="calibrated 2026-01-02")
DECISION = contest.Decision("dependences", 2.5, 1.25, 80)
TIMES = products.Times(31.0, 2.8, 1.5)
REGION = RegionReport(0, (0, 1), ("mm", "relu"), ("cpp_fused_0",), True, "", module="layers.0")
LINES = {3: Origin(("mm",), ("net.py:7",))}
FACTS = warm.Facts("tag", "inference", "cpu", (warm.RegionFacts(REGION, LINES, (1,), (), ("aten.item",)),))
PROGRAM = SimpleNamespace(_fx_graph_cache_key="key", guards_expr="s0 > 1", source_code="def call(args): ...")


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a new process, with folders that are empty."""
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_room", {})
    monkeypatch.setattr(cache, "_temporary", {})
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def graph() -> Graph:
    text = "%0 = aten.sum.default(%x) : f32[]@cpu {launches = 1} return (%0)"
    return parse_graph(f"graph @main (%x : f32[8, 8]@cpu) {{ {text} }}")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def facts(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    keeper, report = warm.Keeper("tag"), GraphReport(0, "inference", "cpu", graph(), HOST, "legality", notes=["a note"])
    return lambda: keeper.keep(PROGRAM, FACTS, report), lambda: keeper.load("key", "s0 > 1")


KINDS: dict[str, Callable[[Path], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "decision": lambda path: (lambda: contest._write(path, DECISION), lambda: contest.read(path)),
    "times": lambda path: (lambda: cache.store_json(path, TIMES._asdict()), lambda: products._read(path)),
    "calibration": lambda path: (lambda: calibrations.save(IDENTITY, MODEL), lambda: calibrations.load(IDENTITY)),
    "facts": facts,
    "library": lambda path: (lambda: cache.store(path, b"\x7fELF library"), lambda: cache.load(path)),
}
"""Of each kind of kept file, how it is written and read. (What a file comes to be written by is tested elsewhere.)"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_any_byte_changed_added_or_cut_off_is_refused(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep, read = KINDS[kind](tmp_path / "folder" / "file")
    assert read() is None
    assert not caplog.records
    keep()
    expected = read()
    assert expected is not None
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for i, change in itertools.product(range(len(whole)), (0x01, 0x04, 0x20, 0x80, 0xFF)):
            os.pwrite(file.fileno(), bytes([whole[i] ^ change]), i)
            assert read() is None, (i, change)
            os.pwrite(file.fileno(), whole[i : i + 1], i)
        assert read() == expected
        for more in (b"\0", b"\n", whole):
            os.pwrite(file.fileno(), more, len(whole))
            assert read() is None, more
            file.truncate(len(whole))
        assert read() == expected
        for length in reversed(range(len(whole))):
            file.truncate(length)
            assert read() is None, length
    assert [record.getMessage() for record in caplog.records] == [f"{path} is not used: it is damaged"]


def test_facts_come_back_as_they_were() -> None:
    keep, read = facts(Path())
    keep()
    restored, rest, _ = read()
    assert restored == FACTS
    report = GraphReport(1, "inference", "")
    restored.fill(report, rest)
    report.complete()
    assert (report.model, report.pipeline, report.notes) == (HOST, "legality", ["a note"])
    assert str(report.graph) == str(graph())


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_harmless(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, read = KINDS[kind](tmp_path / "folder" / "file")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    if kind in ("times", "library"):  # who writes these goes on without
        with pytest.raises(OSError, match="no space"):
            keep()
    else:
        assert not keep()
    assert read() is None
    assert not files(tmp_path)


# -- who can have written it -------------------------------------------------------------------------------------------


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being root."""
    owned = os.stat(path)

    def changed(plain: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def other(*args: Any, **kwargs: Any) -> os.stat_result:
            found = plain(*args, **kwargs)
            if not os.path.samestat(found, owned):
                return found
            return os.stat_result([*found[:4], os.geteuid() + 7, *found[5:]])

        return other

    for name in ("lstat", "fstat", "stat"):
        monkeypatch.setattr(os, name, changed(getattr(os, name)))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "another user's": belongs_to_another,
    "writable for a group": lambda path, _: path.chmod(0o620),
    "writable for all": lambda path, _: path.chmod(0o602),
    "a symbolic link": lambda path, _: linked(path),
    "a named pipe": lambda path, _: piped(path),
    "a folder": lambda path, _: replaced_by_a_folder(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FILES)
def test_a_file_that_others_can_have_written_is_refused(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep, read = KINDS[kind](tmp_path / "folder" / "file")
    keep()
    (path,) = files(tmp_path)
    FILES[what](path, monkeypatch)
    assert (read(), read()) == (None, None)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


FOLDERS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "another user's": belongs_to_another,
    "writable for a group": lambda path, _: path.chmod(0o770),
    "writable for all": lambda path, _: path.chmod(0o707),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize("what", FOLDERS)
def test_nothing_is_read_or_written_below_a_folder_in_which_others_can_put_their_own(
    kind: str,
    what: str,
    above: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "a" / "b"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(cache, "_own_group", lambda user: None)
    keep, read = KINDS[kind](tmp_path / "a" / "b" / "calibration" / "file")
    keep()
    (path,) = files(tmp_path)
    whole, folder = path.read_bytes(), path.parents[above]
    FOLDERS[what](folder, monkeypatch)
    assert read() is None
    assert str(folder) in caplog.text
    path.unlink()
    if kind in ("times", "library"):
        with pytest.raises(PermissionError):
            keep()
    else:
        assert not keep()
    assert not files(tmp_path)
    path.write_bytes(whole)
    path.chmod(0o600)
    if what != "another user's":
        folder.chmod(0o700)
        assert read() is not None


def test_a_folder_for_all_in_which_each_has_ones_own_may_lie_above(tmp_path: Path) -> None:
    """Such as /tmp."""
    path = tmp_path / "own" / "file"
    cache.store(path, b"content")
    tmp_path.chmod(0o1777)
    assert cache.load(path) == b"content"
    path.parent.chmod(0o1777)
    assert cache.load(path) is None, "others can put files of this name there"


def test_folders_are_closed_when_they_are_made_and_files_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache.store(tmp_path / "a" / "b" / "file", b"")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("a", "a/b", "a/b/file")]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize(
    ("user", "group", "members", "trusted"),
    [
        (70001, "jane", [], True),
        (70002, "jane", ["jane"], True),
        (70003, "jane", ["joe"], False),
        (70004, "staff", [], False),
        (0, "jane", [], False),
    ],
)
def test_a_group_that_is_the_users_alone_may_write_in_folders(
    user: int, group: str, members: list[str], trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where users have such groups, folders are made writable for them."""
    path = tmp_path / "folder" / "file"
    cache.store(path, b"content")
    path.parent.chmod(0o770)
    known = SimpleNamespace(pw_name="jane", pw_gid=path.parent.stat().st_gid)
    monkeypatch.setattr(cache.pwd, "getpwuid", {user: known}.__getitem__)
    monkeypatch.setattr(cache.grp, "getgrgid", lambda gid: SimpleNamespace(gr_gid=gid, gr_name=group, gr_mem=members))
    monkeypatch.setattr(cache, "_own_group", cache._own_group.__wrapped__)
    monkeypatch.setattr(cache, "_refuse_others", relaxed(cache._refuse_others))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert (cache.load(path) == b"content") is trusted


def relaxed(refuse: Callable[..., None]) -> Callable[..., None]:
    """Whose something is makes no difference."""
    return lambda found, place, writable: refuse(os.stat_result([*found[:4], 0, *found[5:]]), place, writable)


def test_a_link_that_stands_for_a_folder_is_followed_to_one_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = tmp_path / "link" / "file"
    cache.store(path, b"content")
    assert cache.load(path) == b"content"
    resolve = os.path.realpath

    def led_elsewhere(path: Path, **kwargs: Any) -> str:
        """By whom the link belongs to, meanwhile."""
        found = resolve(path, **kwargs)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        return found

    cache.store(tmp_path / "elsewhere" / "file", b"another")
    monkeypatch.setattr(os.path, "realpath", led_elsewhere)
    assert cache.load(path) == b"content"
    belongs_to_another(tmp_path / "elsewhere", monkeypatch)
    assert cache.load(path) is None


def test_what_is_loaded_is_what_was_checked_whatever_is_put_there_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "file"
    cache.store(path, b"content")
    descriptor = cache.opened(path)
    assert descriptor is not None
    cache.store(path, b"another")
    assert Path(f"/proc/self/fd/{descriptor}").read_bytes().startswith(b"content\n")
    os.close(descriptor)


def test_writing_over_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("precious")
    path.symlink_to(victim)
    cache.store(path, b"content")
    assert cache.load(path) == b"content"
    assert victim.read_text() == "precious"


# -- the limit ---------------------------------------------------------------------------------------------------------

LARGE = bytes(300 << 10)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files of LARGE fit."""
    monkeypatch.setenv(cache.SIZE, "1")


def age(path: Path, hours: float) -> Path:
    os.utime(path, (time.time() - 3600 * hours,) * 2)
    return path


def kept(folder: Path, **hours: float) -> None:
    """Files that were last used so many hours ago."""
    for name, since in hours.items():
        cache.store(folder / name, LARGE)
        age(folder / name, since)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.usefixtures("limited")
def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    kept(tmp_path, old=4, older=5, oldest=6)
    assert names(tmp_path) == ["old", "older", "oldest"]
    assert cache.load(tmp_path / "oldest") == LARGE  # which counts as a use
    cache.store(tmp_path / "new", LARGE)
    assert names(tmp_path) == ["new", "old", "oldest"]


@pytest.mark.usefixtures("limited")
def test_what_may_be_in_use_stays_and_an_open_file_can_be_read_on(tmp_path: Path) -> None:
    kept(tmp_path, a=0.5, b=0.5, c=0.5, d=2)
    descriptor = cache.opened(tmp_path / "d")
    assert descriptor is not None
    age(tmp_path / "d", 2)
    cache.store(tmp_path / "new", LARGE)
    assert names(tmp_path) == ["a", "b", "c", "new"]
    assert os.pread(descriptor, len(LARGE), 0) == LARGE
    os.close(descriptor)


@pytest.mark.usefixtures("limited")
def test_nothing_is_removed_that_is_not_pygraphs(tmp_path: Path) -> None:
    """A user may have named any folder."""
    outside = tmp_path / "outside"
    kept(outside, file=9)
    folder = tmp_path / "native"
    folder.mkdir()
    for name in ("thesis.tex", "Cargo.lock", ".build-x"):
        (folder / name).write_bytes(LARGE)
        age(folder / name, 9)
    (folder / "link").symlink_to(outside)
    cache.store(folder / "new", LARGE)
    cache.store(folder / "newer", LARGE)
    assert names(folder) == [".build-x", "Cargo.lock", "link", "new", "newer", "thesis.tex"]
    assert names(outside) == ["file"]


@pytest.mark.usefixtures("limited")
def test_what_killed_processes_left_goes_and_what_others_are_at_stays(tmp_path: Path) -> None:
    for name, hours in (("dead", 2.0), ("living", 0.1)):
        (tmp_path / f"{cache.TEMPORARY}{name}.tmp").write_bytes(LARGE)
        (tmp_path / f"{cache.TEMPORARY}build-{name}").mkdir()
        (tmp_path / f"{cache.TEMPORARY}build-{name}" / "half").write_bytes(LARGE)
        for path in tmp_path.glob(f"{cache.TEMPORARY}*{name}*"):
            age(path, hours)
    cache.store(tmp_path / "new", b"")
    assert names(tmp_path) == [".pygraph-build-living", ".pygraph-build-living/half", ".pygraph-living.tmp", "new"]


@pytest.mark.usefixtures("limited")
def test_libraries_go_with_their_folders(tmp_path: Path) -> None:
    for name, hours in (("a", 3), ("b", 2), ("c", 1.5), ("d", 0)):
        path = tmp_path / name / "library.so"
        with cache.locked(path.with_name(f"{cache.TEMPORARY}lock")):
            cache.store(path, LARGE, within=tmp_path)
        age(path, hours)
        age(path.with_name(f"{cache.TEMPORARY}lock"), hours)
    assert names(tmp_path) == ["b", "b/library.so", "c", "c/library.so", "d", "d/.pygraph-lock", "d/library.so"]


def test_a_lock_that_was_removed_while_somebody_waited_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would hold what only one may."""
    path, plain, calls = tmp_path / "folder" / f"{cache.TEMPORARY}lock", fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        plain(file, operation)
        calls.append(operation)
        if len(calls) == 1:
            path.unlink()
            path.parent.rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.locked(path), path.open() as other, pytest.raises(BlockingIOError):
        plain(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert calls == [fcntl.LOCK_EX, fcntl.LOCK_EX, fcntl.LOCK_UN]
    age(path, 2)
    with cache.locked(path):
        cache.store(path.with_name("file"), b"")
        assert path.exists(), "it is in use"


@pytest.mark.parametrize(("text", "left"), [("0", ["new"]), ("", ["new", "old"]), ("many", ["new", "old"])])
def test_the_limit_is_a_number_of_mib(
    text: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(cache.SIZE, text)
    kept(tmp_path, old=2)
    monkeypatch.setattr(cache, "_room", {})
    cache.store(tmp_path / "new", b"")
    assert names(tmp_path) == left
    assert caplog.text.count(cache.SIZE) == (text == "many")


# -- several at once ---------------------------------------------------------------------------------------------------


def test_of_writers_at_the_same_time_one_wins_whole(tmp_path: Path) -> None:
    path, contents, found, over = tmp_path / "file", [bytes([i]) * 100_000 for i in range(3)], set(), threading.Event()
    cache.store(path, contents[0])

    def read() -> None:
        while not over.is_set():
            found.add(cache.load(path))

    threads = [threading.Thread(target=lambda c=c: [cache.store(path, c) for _ in range(30)]) for c in contents]
    reader = threading.Thread(target=read)
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    reader.join()
    assert found <= set(contents)
    assert names(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    cache.store(path, b"content")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        cache.store(path, b"another")
    assert cache.load(path) == b"content"
    assert names(tmp_path) == ["file"]


# -- where they lie ----------------------------------------------------------------------------------------------------


def test_the_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "a" / "b"))
    assert cache.cache_dir() == tmp_path / "a" / "b"
    monkeypatch.setenv(cache.VARIABLE, "")
    assert cache.cache_dir() is None


def test_without_it_the_platform_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    assert cache.cache_dir() == tmp_path / "pygraph"


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "~nobodyatall/cache")
    assert cache.cache_dir() is None
    assert calibrations.load(IDENTITY) is None


@pytest.mark.parametrize("what", ["no folder", "of another user", "read-only", "no home", "no name"])
def test_a_private_folder_stands_for_one_that_cannot_be_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, lives = age_of_stand_ins(tmp_path)
    folder = tmp_path / "chosen"
    folder.mkdir()
    chosen = {"no folder": "/proc/none", "no home": "~nobodyatall", "no name": "\0"}.get(what, str(folder))
    if what == "of another user":
        belongs_to_another(folder, monkeypatch)
    if what == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    decisions = cache.usable(chosen, "decisions")
    assert decisions.is_relative_to(tmp_path)
    assert not decisions.is_relative_to(folder)
    assert cache.usable(chosen, "native").parent == decisions.parent
    (warning,) = [record.getMessage() for record in caplog.records]
    assert cache.VARIABLE in warning
    cache.store(decisions / "file", b"content")
    assert cache.load(decisions / "file") == b"content"
    assert (left.exists(), lives.exists()) == (False, True)


def age_of_stand_ins(folder: Path) -> tuple[Path, Path]:
    """Such folders of a process that was killed long ago, and of one that may live."""
    made = Path(tempfile.mkdtemp(prefix=cache._STAND_IN, dir=folder)), Path(tempfile.mkdtemp(prefix=cache._STAND_IN))
    return age(made[0], 2), made[1]


def test_a_decision_of_one_program_is_json_for_people(tmp_path: Path) -> None:
    contest._write(tmp_path / "file.json", DECISION)
    first, seal = (tmp_path / "file.json").read_text().rsplit("\n", 2)[:2]
    assert json.loads(first) == dataclasses.asdict(DECISION)
    assert json.loads(seal).startswith("pygraph sha256 ")
