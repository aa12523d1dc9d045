"""Inductor's first timing of a kernel or padding decides for all sides of a program; its own choices are not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.kernels import sharing
from pygraph.compat import inductor_timing


def kernel(name: str, hint: int) -> Any:
    """A stand-in for a kernel with three configurations, which holds the attributes read before its first launch."""
    configs = [Mock(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1) for block in (8, 16, 32)]
    facts = {"size_hints": {"x": hint}, "triton_meta": {}, "inductor_meta": {}}
    return Mock(fn=Mock(src=f"def {name}(x):\n    pass"), launchers=[Mock(config=each) for each in configs], **facts)


def test_a_kernel_is_timed_once_and_runs_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name: that differs from side to side."""
    autotuner, timed = inductor_timing().autotuner, []

    def measured(kernel: Any) -> dict[Any, float]:
        timed.append(kernel)
        return dict(zip(kernel.launchers, (3.0, 1.0, 2.0), strict=True))

    monkeypatch.setattr(autotuner, "benchmark_all_configs", measured)
    first, same, larger = kernel("add_0", 64), kernel("add_7", 64), kernel("add_0", 128)
    for each in (first, same, larger):
        with sharing(tmp_path / "choices.json"):
            times = autotuner.benchmark_all_configs(each)
        assert min(times, key=times.get) is each.launchers[1]
    assert timed == [first, larger]


def test_padding_of_products_is_decided_once(tmp_path: Path) -> None:
    padding, found = inductor_timing().padding, []
    for unpadded, padded in ((2.0, 1.0), (1.0, 2.0)):
        with sharing(tmp_path / "choices.json"):
            found.append(padding.is_padded_faster("mm 3 5", unpadded, padded))
            assert padding.get_cached_should_pad("mm 3 5") is True
    assert found == [True, True]


def test_kernels_keep_no_choices_of_inductors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs that lie in a cache would otherwise come with one configuration, chosen who knows when."""
    kernel = inductor_timing().kernel
    common = classmethod(lambda cls: {"autotune_local_cache": True, "autotune_remote_cache": None, "max_autotune": cls})
    monkeypatch.setattr(kernel, "inductor_meta_common", common)
    with sharing(tmp_path / "choices.json"):
        meta = kernel.inductor_meta_common()
    assert meta == {"autotune_local_cache": False, "autotune_remote_cache": False, "max_autotune": kernel}
    assert kernel.inductor_meta_common()["autotune_local_cache"] is True
