"""What the native half is built from, and what is said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import build


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA toolkit that has the headers which are looked for."""
    for name in ("cuda.h", "crt/host_config.h"):
        (tmp_path / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "include" / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    return tmp_path


def test_every_source_is_part_of_the_fingerprint(toolkit: Path) -> None:
    directory = Path(build.__file__).parent
    written = {path.name for path in directory.iterdir() if path.suffix in (".cpp", ".h")}
    assert set(build.library().sources) == written


def test_the_headers_are_those_of_the_toolkit(toolkit: Path) -> None:
    assert build.library().includes == (toolkit / "include",)
    assert f"-isystem{toolkit / 'include'}" in build.library().command(Path("out"))


def test_another_torch_is_refused(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(CaptureError, match=r"not written for torch 2\.99\.0") as caught:
        build.library()
    assert caught.value.reason == "native-unavailable"


def test_without_headers_it_says_what_to_set(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_candidates", lambda: iter([toolkit / "nowhere"]))
    with pytest.raises(CaptureError, match="set CUDA_HOME") as caught:
        build.library()
    assert caught.value.reason == "native-unavailable"
