"""Wheels that carry native halves, and the source distribution."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from pygraph.runtime.host import build as host_build
from pygraph.runtime.native_build import Target
from tools.check_wheels import replayed
from tools.wheels import EPOCH, plain_wheel, python_of, run, source_archive, with_libraries


def test_an_installed_wheel_replays_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, which has torch from this one."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    source = source_archive(tmp_path)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "tests/test_wheel.py", "benchmarks/__main__.py", "tools/manylinux.h"} <= names
    assert not any(name.startswith("benchmarks/results/") for name in names)
    half, library = host_build.library(), tmp_path / host_build.library().prebuilt(Target.here())
    shutil.copy(half.build(), library)
    wheel = with_libraries(plain_wheel(source, tmp_path), [library], python_of(sys.executable), tmp_path)
    with zipfile.ZipFile(wheel) as opened:
        assert f"pygraph/runtime/prebuilt/{library.name}" in opened.namelist()
        assert b"Root-Is-Purelib: false" in opened.read("torch_pygraph-0.2.0.dist-info/WHEEL")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        wheel,
    )
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    assert replayed(python)
