"""Headers that the native half is built from, warnings of methods that it does not know, and errors without headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda import build

INCLUDE = Path(torch.__file__).resolve().parent / "include"
"""Torch's headers."""


def headers(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA toolkit that has the headers which are looked for."""
    headers(tmp_path / "include", "cuda.h", "cuda_runtime_api.h", "crt/host_config.h")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    return tmp_path


def test_the_headers_are_those_of_the_toolkit(toolkit: Path) -> None:
    assert build.library().includes() == (toolkit / "include",)
    assert f"-isystem{toolkit / 'include'}" in build.library().command(Path("out"))


def test_every_method_of_the_installed_torchs_allocator_is_handed_on() -> None:
    assert build.unknown_methods(INCLUDE) == []


def test_a_method_that_a_newer_torch_adds_is_named_once(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for header, name in build._INTERFACE.items():
        text = (INCLUDE / header).read_text()
        start = text.index("virtual", text.index(f"{name} : "))
        copy = tmp_path / "torch/include" / header
        copy.parent.mkdir(parents=True)
        copy.write_text(f"{text[:start]}virtual std::vector<int> of{name}(int* /*x*/) {{}}\n  {text[start:]}")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    build._warn_of_methods.cache_clear()
    for _ in range(2):
        build.library()
    build._warn_of_methods.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "pygraph: torch 2.11.0+cu130's allocator has methods that a capture does not hand on: "
        "ofCUDAAllocator, ofDeviceAllocator"
    ]


@pytest.mark.parametrize(("version", "place"), [("13.0", "cu13"), ("12.8", "cuda_runtime")])
def test_without_a_toolkit_the_headers_are_those_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, place: str
) -> None:
    """The runtime's lack ``crt``, which Triton's bring."""
    site = tmp_path / "site"
    runtime, triton = site / "nvidia" / place / "include", site / "triton" / "backends" / "nvidia" / "include"
    headers(runtime, "cuda_runtime_api.h")
    monkeypatch.setattr(build, "_toolkits", lambda: iter([tmp_path / "none"]))
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(build, "_packages", lambda name: [site / name])
    with pytest.raises(CaptureError, match="Triton"):
        build._headers()
    headers(triton, "cuda.h", "cuda_runtime_api.h", "crt/host_config.h")
    found = build._headers()
    assert [folder for folder in found if folder.exists()] == [runtime, triton]


def test_without_headers_it_says_what_to_set(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_toolkits", lambda: iter([toolkit / "nowhere"]))
    monkeypatch.setattr(build, "_wheels", lambda: iter(()))
    with pytest.raises(CaptureError, match="set CUDA_HOME") as caught:
        build.library().command(Path("out"))
    assert caught.value.reason == "native-unavailable"
