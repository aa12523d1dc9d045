"""Small files that outlive a process: where they lie, and that nobody sees half of one."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

from pygraph import cache


def test_the_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "a" / "b"))
    assert cache.cache_dir() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv(cache.VARIABLE, "")
    assert cache.cache_dir() is None


def test_without_it_the_platform_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    assert cache.cache_dir() == tmp_path / "pygraph"


def test_writing_replaces_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    cache.write_atomically(path, "[1]")
    cache.write_atomically(path, '["µs"]')
    assert cache.read_json(path) == ["µs"]
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    cache.write_atomically(path, "[1]")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        cache.write_atomically(path, "[2]")
    assert cache.read_json(path) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_nothing_to_warn_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.read_json(tmp_path / "none.json") is None
    assert not caplog.records
