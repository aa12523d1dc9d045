"""Decisions on disk: what is loaded is what was stored, and nothing that lies there does any harm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph import cache
from pygraph.runtime.selection import store as store_module
from pygraph.runtime.selection.records import TELLING, Decided, Sample
from pygraph.runtime.selection.store import Store, Stored, decode, encode

KEY = {"content": "c0ffee", "device": "some processor, 4 threads", "torch": "2.13.0"}

SOME = Decided(
    candidates=("patched", "copied", "uncaptured"),
    decision="uncaptured",
    reason="faster",
    detail="patched takes 20.0% longer than uncaptured, at least 3.0%",
    per_call={"patched": 1.2e-3, "uncaptured": 1e-3},
    samples={"patched": Sample(4, 1.2e-3), "uncaptured": Sample(0, None)},
    trials=2,
    pace=1.1e-3,
)

_times = st.floats(1e-12, 1e6)
_names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True)


@st.composite
def decisions(draw: st.DrawFn) -> Decided:
    """Any decision that a trial may come to."""
    names = draw(_names)
    return Decided(
        candidates=tuple(names),
        decision=draw(st.sampled_from(names)),
        reason=draw(st.sampled_from(TELLING)),
        detail=draw(st.text(max_size=40)),
        per_call=draw(st.dictionaries(st.sampled_from(names), _times)),
        samples=draw(
            st.dictionaries(st.sampled_from(names), st.builds(Sample, st.integers(0, 99), st.none() | _times))
        ),
        trials=draw(st.integers(1, 50)),
        pace=draw(st.none() | _times),
    )


@pytest.fixture(autouse=True)
def _warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is warned anew."""
    monkeypatch.setattr(store_module, "_warned", set())
    monkeypatch.setattr(cache, "_warned", set())


@contextlib.contextmanager
def listening() -> Iterator[list[logging.LogRecord]]:
    """Collects what is warned of meanwhile."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger("pygraph").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("pygraph").removeHandler(handler)


@pytest.fixture
def warned() -> Iterator[list[logging.LogRecord]]:
    with listening() as heard:
        yield heard


@settings(deadline=None, max_examples=60)
@given(decisions(), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4), st.floats(0, 4e9))
def test_what_is_loaded_is_what_was_stored(decided: Decided, key: dict[str, str], made: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = Store(Path(folder)).save(key, decided, made)
        assert stored is not None
        assert Store(Path(folder)).load(key) == stored == Stored(decided, stored.path, made)
        assert os.listdir(folder) == [stored.path.name]


def test_nothing_is_known_of_other_keys(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.load(KEY) is None
    store.save(KEY, SOME)
    for name in KEY:
        assert store.load({**KEY, name: "another"}) is None
    assert store.load({name: text for name, text in KEY.items() if name != "torch"}) is None
    assert store.path(dict(reversed(KEY.items()))) == store.path(KEY)


def test_the_last_writer_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(KEY, SOME)
    store.save(KEY, dataclasses.replace(SOME, decision="patched"))
    found = store.load(KEY)
    assert found is not None
    assert found.decided.decision == "patched"


def test_the_age_counts_from_the_decision(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fresh = store.save(KEY, SOME)
    old = store.save({"an": "other"}, SOME, time.time() - 3600)
    future = store.save({"a": "third"}, SOME, time.time() + 3600)
    assert fresh is not None
    assert old is not None
    assert future is not None
    assert 0 <= fresh.age < 60
    assert 3600 <= old.age < 3660
    assert future.age == 0, "clocks of machines differ"


# -- what is no decision -----------------------------------------------------------------------------------------------


def assert_ignored(folder: Path, data: bytes, warned: list[logging.LogRecord]) -> None:
    """``data`` in the place of a decision is ignored with one warning that names the file, and replaced later."""
    store = Store(folder)
    path = store.path(KEY)
    path.write_bytes(data)
    assert store.load(KEY) is None
    assert store.load(KEY) is None
    (said,) = warned
    assert str(path) in said.getMessage()
    assert store.save(KEY, SOME) is not None
    found = store.load(KEY)
    assert found is not None
    assert found.decided == SOME


def written(**changes: Any) -> bytes:
    """A file in which some fields of the decision, or those above it, are others; ``...`` leaves one out."""
    fields = json.loads(encode(KEY, SOME, 1e9))
    for name, value in changes.items():
        within = fields if name in fields else fields["decided"]
        if value is ...:
            del within[name]
        else:
            within[name] = value
    return json.dumps(fields).encode()


def test_a_file_as_it_should_be_is_read() -> None:
    assert decode(written(), KEY) == (SOME, 1e9)
    assert decode(written(made=7, pace=2, more="than is known"), KEY) == (dataclasses.replace(SOME, pace=2.0), 7.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 300,
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b"{}",
        b"[" * 200_000,
        b"1" * 5000,
        b" " * (1 << 20) + b" {}",
        written(schema=2),
        written(schema="1"),
        written(schema=True),
        written(schema=...),
        written(key={}),
        written(key={**KEY, "torch": "2.11.0"}),
        written(made="yesterday"),
        written(made=float("nan")),
        written(decided=None),
        written(candidates=[]),
        written(candidates="patched"),
        written(candidates=["uncaptured", "uncaptured"]),
        written(candidates=["uncaptured", 3]),
        written(candidates=["patched"]),
        written(decision="faster"),
        written(decision=["uncaptured"]),
        written(decision=...),
        written(reason="closed"),
        written(reason=1),
        written(detail=None),
        written(detail="\ud800"),
        written(per_call={"patched": "1.0"}),
        written(per_call={"patched": -1.0}),
        written(per_call={"patched": 0}),
        written(per_call={"patched": float("inf")}),
        written(per_call={"patched": 10**400}),
        written(per_call={"patched": True}),
        written(per_call={"unheard of": 1.0}),
        written(per_call=[1.0]),
        written(samples={"patched": 3}),
        written(samples={"patched": {"blocks": 1.5, "median": None}}),
        written(samples={"patched": {"blocks": -1, "median": None}}),
        written(samples={"patched": {"median": None}}),
        written(samples={"patched": {"blocks": 1}}),
        written(trials=0),
        written(trials=10**12),
        written(trials=True),
        written(trials=...),
        written(pace=...),
        written(pace=-1),
        written(pace="slow"),
    ],
    ids=lambda data: data[:30].decode("latin-1") + f"… {len(data)}",
)
def test_what_is_damaged_is_ignored_with_one_warning(
    tmp_path: Path, data: bytes, warned: list[logging.LogRecord]
) -> None:
    assert_ignored(tmp_path, data, warned)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_ignored(tmp_path: Path, share: float, warned: list[logging.LogRecord]) -> None:
    whole = written()
    assert_ignored(tmp_path, whole[: int(len(whole) * share)], warned)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_bytes_raise_anything_but_the_error_that_is_warned_of(data: st.DataObject) -> None:
    """Random bytes; and a good file in which some bytes, or any value, is another one."""
    whole = written()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damaged = whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:]
    name = data.draw(st.sampled_from(["schema", "key", "made", *(field.name for field in dataclasses.fields(Decided))]))
    value: Any = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=5,
        )
    )
    for content in (data.draw(st.binary(max_size=200)), damaged, written(**{name: value})):
        try:
            decided, made = decode(content, KEY)
        except ValueError:
            continue
        assert decode(encode(KEY, decided, made).encode(), KEY) == (decided, made)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_any_other_file_is_ignored_with_one_warning(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, listening() as heard:
        assert_ignored(Path(folder), content, heard)


def test_figures_that_nobody_would_read_are_not_written(tmp_path: Path, warned: list[logging.LogRecord]) -> None:
    store = Store(tmp_path)
    for wrong in (0.0, float("inf"), float("nan")):
        assert store.save(KEY, dataclasses.replace(SOME, pace=wrong)) is None
        assert store.save(KEY, dataclasses.replace(SOME, per_call={"patched": wrong})) is None
    assert os.listdir(tmp_path) == []
    assert warned == []


# -- disks -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path: Path, warned: list[logging.LogRecord]) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "decisions")
    assert store.load(KEY) is None
    for number in range(3):
        assert store.save({"number": str(number)}, SOME) is None
        assert store.load({"number": str(number)}) is None
    (said,) = warned
    assert str(store.folder) in said.getMessage()


def test_a_folder_that_no_path_can_name_is_warned_of_once(tmp_path: Path, warned: list[logging.LogRecord]) -> None:
    store = Store(tmp_path / "a\0b")
    for _ in range(2):
        assert store.load(KEY) is None
        assert store.save(KEY, SOME) is None
    (said,) = warned
    assert "null" in said.getMessage()


def test_a_full_disk_leaves_nothing_behind_and_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[logging.LogRecord]
) -> None:
    store = Store(tmp_path)
    store.save(KEY, SOME)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert store.save(KEY, dataclasses.replace(SOME, decision="patched")) is None
    assert os.listdir(tmp_path) == [store.path(KEY).name]
    found = store.load(KEY)
    assert found is not None
    assert found.decided == SOME
    assert "No space left" in warned[0].getMessage()


def test_what_was_used_last_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, limit=8)
    for number in range(8):
        stored = store.save({"number": str(number)}, SOME)
        assert stored is not None
        os.utime(stored.path, (number, number))
    assert store.load({"number": "0"}) is not None, "which uses it"
    store.save({"number": "8"}, SOME)
    left = [number for number in range(9) if store.path({"number": str(number)}).exists()]
    assert left == [0, 3, 4, 5, 6, 7, 8]


def test_what_was_begun_and_left_goes_and_what_is_under_way_stays(tmp_path: Path) -> None:
    old, new, other = tmp_path / ".a.json.x.tmp", tmp_path / ".b.json.y.tmp", tmp_path / "notes.txt"
    for path in (old, new, other):
        path.write_text("")
    os.utime(old, (1e9, 1e9))
    os.utime(other, (1e9, 1e9))
    Store(tmp_path).save(KEY, SOME)
    assert not old.exists()
    assert new.exists()
    assert other.exists()


def test_files_that_go_while_others_are_pruned_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, limit=2)
    for number in range(2):
        store.save({"number": str(number)}, SOME)
    remove = os.unlink

    def twice(path: str) -> None:
        remove(path)
        remove(path)

    monkeypatch.setattr(os, "unlink", twice)
    assert store.save({"number": "2"}, SOME) is not None
    assert len(os.listdir(tmp_path)) == 1


WRITER = """
import sys
from pathlib import Path
from pygraph.runtime.selection.records import Decided, Sample
from pygraph.runtime.selection.store import Store

name, folder, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
store = Store(folder, limit)
key = {"shared": "by all"}
for trials in range(1, 301):
    found = Decided((name, "other"), name, "faster", name * 500, {name: 1e-3}, {name: Sample(1, 1e-3)}, trials)
    assert store.save(key, found) is not None
    assert store.save({"of": name, "number": str(trials % 40)}, found) is not None
"""


@pytest.mark.parametrize("limit", [4096, 16], ids=["kept", "pruned"])
def test_writers_in_several_processes_never_leave_a_damaged_file(
    tmp_path: Path, limit: int, warned: list[logging.LogRecord]
) -> None:
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, name, str(tmp_path), str(limit)]) for name in ("a", "b", "c")]
    store, seen = Store(tmp_path), set()
    try:
        while any(writer.poll() is None for writer in writers):
            found = store.load({"shared": "by all"})
            if found is not None:
                seen.add(found.decided.decision)
                assert found.decided.detail == found.decided.decision * 500
    finally:
        ended = [writer.wait(timeout=120) for writer in writers]
    assert ended == [0, 0, 0]
    assert warned == []
    assert seen <= {"a", "b", "c"}
    assert len(seen) >= 1
    names = os.listdir(tmp_path)
    assert not [name for name in names if not name.endswith(".json")]
    assert len(names) <= min(limit, 121)
    assert store.load({"shared": "by all"}) is not None
