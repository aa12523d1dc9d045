"""Calibrations on disk: round trip, what the key is made of, damage."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from pygraph import cache
from pygraph.calibration.records import HOST_CALL, Identity
from pygraph.calibration.store import identity_of, load, path_of, save, stored_model
from tests.calibration.samples import calibration, point


def test_what_is_saved_is_loaded() -> None:
    made = calibration()
    path = save(made)
    assert path is not None
    assert path.is_file()
    assert load(made.identity) == made
    assert [file.name for file in path.parent.iterdir()] == [path.name], "a temporary file was left"


def test_nothing_saved_is_no_model() -> None:
    assert load(calibration().identity) is None
    assert stored_model("cpu") is None


@pytest.mark.parametrize("part", [field.name for field in dataclasses.fields(Identity)])
def test_each_part_of_the_key_changes_the_file(part: str, tmp_path: Path) -> None:
    identity = calibration().identity
    other = dataclasses.replace(identity, **{part: "another"})
    save(calibration(identity))
    assert path_of(identity, tmp_path) != path_of(other, tmp_path)
    assert load(other) is None


def test_the_cpu_is_told_by_name_threads_and_versions() -> None:
    identity = identity_of("cpu")
    assert identity.kind == "cpu"
    assert identity.torch == torch.__version__
    assert identity.device.endswith("threads: 1")
    torch.set_num_threads(2)
    assert identity_of("cpu") != identity


def test_a_file_of_another_key_is_not_used() -> None:
    made = calibration()
    path = save(made)
    assert path is not None
    path.write_text(json.dumps(calibration(dataclasses.replace(made.identity, driver="1")).as_json()))
    assert load(made.identity) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "\x00\xff"], ids=repr)
def test_a_damaged_file_is_named_once_and_ignored(text: str, caplog: pytest.LogCaptureFixture) -> None:
    made = calibration()
    path = save(made)
    assert path is not None
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert load(made.identity) is None
        assert load(made.identity) is None
    named = [record for record in caplog.records if str(path) in record.getMessage()]
    assert len(named) == 1


def test_a_model_that_predicts_badly_is_not_used_even_if_it_was_kept(caplog: pytest.LogCaptureFixture) -> None:
    made = calibration()
    save(dataclasses.replace(made, points=(point(100.0, 1.0, HOST_CALL),)))
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert load(made.identity) is None
    assert "off by more than a factor of 3" in caplog.text


def test_the_model_is_read_once_and_anew_after_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calibration(identity_of("cpu"))
    save(made)
    assert stored_model("cpu") == made.model
    with monkeypatch.context() as patched:
        patched.setattr(cache, "read_json", lambda path: pytest.fail("read again"))
        assert stored_model("cpu") is stored_model("cpu")
    save(calibration(identity_of("cpu"), launch_us=7.0))
    again = stored_model("cpu")
    assert again is not None
    assert again.launch_us == 7.0


def test_a_device_that_is_not_there_has_no_model() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert stored_model("cuda") is None


def test_where_nothing_can_be_written_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(blocked / "folder"))
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert save(calibration()) is None
    assert "not kept" in caplog.text
    assert load(calibration().identity) is None
