"""A kernel is timed once for all sides of a program, and configured alike wherever it is compiled again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernels import sharing
from pygraph.compat import inductor_timing

SOURCE = "def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n    tl.store(out_ptr0, xnumel)\n"
BLOCKS = (8, 16, 32)


class Timed:
    """A kernel as Inductor has it before its first launch; timing it gives ``times``, and is counted."""

    def __init__(self, *times: float, name: str = "triton_poi_fused_add_0", hint: int = 64):
        made = inductor_timing().autotuner
        self.autotuner: Any = object.__new__(made)
        facts = {
            "fn": SimpleNamespace(src=SOURCE.replace("{name}", name), __name__=name),
            "launchers": [launcher(block) for block in BLOCKS],
            "compile_results": [],
            "size_hints": {"x": hint},
            "triton_meta": {"signature": {"in_ptr0": "*fp32"}, "constants": {}, "configs": [{}]},
            "inductor_meta": {"kernel_name": name, "grid_type": "Grid1D"},
            "benchmark_failure_reasons": {},
            "precompile_time_taken_ns": 0,
            "save_cache_hook": None,
        }
        self.autotuner.__dict__.update(facts)
        self.times, self.count = times, 0

    def all(self) -> dict[Any, float]:
        self.count += 1
        return dict(zip(self.autotuner.launchers, self.times, strict=True))

    def chosen(self) -> int:
        """The block that is launched from now on, by Inductor's own way of choosing."""
        self.autotuner.autotune_to_one_config()
        (left,) = self.autotuner.launchers
        return int(left.config.kwargs["XBLOCK"])


def launcher(block: int) -> Any:
    config = SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1)

    def launch() -> None:
        """A function, so that it can be a key."""

    facts = {"config": config, "n_regs": 1, "n_spills": 0, "shared": 0, "cache_hash": str(block)}
    for name, value in facts.items():
        setattr(launch, name, value)
    return launch


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """What kernels are launched as in a process of their own with the choices of ``tmp_path``."""

    def run(*kernels: Timed) -> list[int]:
        by_autotuner = {id(kernel.autotuner): kernel for kernel in kernels}
        made = inductor_timing().autotuner
        monkeypatch.setattr(made, "benchmark_all_configs", lambda self, *_, **__: by_autotuner[id(self)].all())
        with sharing(tmp_path / "choices.json"):
            return [kernel.chosen() for kernel in kernels]

    return run


def test_a_kernel_is_timed_once_and_runs_alike_everywhere(process: Any) -> None:
    first, other = Timed(3.0, 1.0, 2.0), Timed(1.0, 3.0, 2.0, name="triton_poi_fused_add_7")
    assert process(first) == [16]
    assert process(other, Timed(2.0, 3.0, 1.0, hint=128)) == [16, 32]
    assert process(Timed(1.0, 2.0, 3.0, hint=128)) == [32]
    assert (first.count, other.count) == (1, 0)


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
