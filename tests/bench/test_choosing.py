"""Inductor takes what was chosen before, for every kernel that does the same, and is alone on the GPU when it times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.bench.choices import Choices, QuietGpu
from pygraph.bench.choosing import Chooser, kernel_key
from pygraph.compat import inductor_timing
from tests.bench.fakes import free

SOURCE = "def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n    tl.store(out_ptr0, xnumel)\n"
BLOCKS = (8, 16, 32)


class Timed:
    """A kernel as Inductor has it before its first launch; timing it gives ``times``, and is counted."""

    def __init__(self, *times: float, name: str = "triton_poi_fused_add_0", source: str = SOURCE, hint: int = 64):
        made = inductor_timing().autotuner
        self.autotuner: Any = object.__new__(made)
        facts = {
            "fn": SimpleNamespace(src=source.replace("{name}", name), __name__=name),
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
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[int], Chooser]]:
    """What kernels are launched as in a process of their own with the choices of ``tmp_path``."""

    def run(*kernels: Timed, fresh: bool = False) -> tuple[list[int], Chooser]:
        by_autotuner = {id(kernel.autotuner): kernel for kernel in kernels}
        monkeypatch.setattr(
            inductor_timing().autotuner,
            "benchmark_all_configs",
            lambda self, *args, **more: by_autotuner[id(self)].all(),
        )
        chooser = Chooser(Choices(tmp_path / "choices.json"), QuietGpu(tmp_path / "lock"), fresh=fresh)
        with chooser.installed():
            return [kernel.chosen() for kernel in kernels], chooser

    return run


def test_a_kernel_is_timed_once_and_runs_alike_everywhere(process: Any) -> None:
    first, other = Timed(3.0, 1.0, 2.0), Timed(1.0, 3.0, 2.0, name="triton_poi_fused_add_7")
    assert process(first)[0] == [16]
    blocks, chooser = process(other)
    assert blocks == [16]
    assert (first.count, other.count) == (1, 0)
    assert list(chooser.used().values()) == ["XBLOCK=16 num_warps=4 num_stages=1"]


def test_what_a_process_chose_before_it_failed_is_known(process: Any, tmp_path: Path) -> None:
    def fails() -> dict[Any, float]:
        raise RuntimeError("out of memory")

    broken = Timed(1.0, 2.0, 3.0, hint=128)
    broken.all = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        process(Timed(3.0, 1.0, 2.0), broken)
    assert len(json.loads((tmp_path / "choices.json").read_text())) == 1
    assert process(Timed(1.0, 2.0, 3.0), Timed(1.0, 2.0, 3.0, hint=128))[0] == [16, 8]


def test_a_kernel_of_its_own_is_chosen_by_the_side_that_has_it_and_goes_for_the_next(process: Any) -> None:
    process(Timed(3.0, 1.0, 2.0))
    assert process(Timed(1.0, 2.0, 3.0), Timed(2.0, 3.0, 1.0, hint=128))[0] == [16, 32]
    assert process(Timed(1.0, 2.0, 3.0, hint=128))[0] == [32]


def test_where_compiling_is_measured_each_side_times_and_the_first_stands(process: Any) -> None:
    kernels = Timed(3.0, 1.0, 2.0), Timed(1.0, 2.0, 3.0)
    assert [process(kernel, fresh=True)[0] for kernel in kernels] == [[16], [8]]
    assert [kernel.count for kernel in kernels] == [1, 1]
    assert process(Timed(2.0, 3.0, 1.0))[0] == [16]


def test_a_key_is_of_what_a_kernel_does_and_may_be_not_of_its_name() -> None:
    def key(**more: Any) -> str:
        return kernel_key(Timed(**more).autotuner)

    assert key() == key(name="triton_poi_fused_add_12")
    assert key() != key(source=SOURCE.replace("out_ptr0", "out_ptr1"))
    assert key() != key(source=SOURCE.replace("out_ptr0, xnumel)", "out_ptr0, 0)"))
    assert key() != key(hint=128)
    changed = Timed()
    changed.autotuner.launchers = changed.autotuner.launchers[:2]
    assert kernel_key(changed.autotuner) != key()
    other = Timed()
    other.autotuner.triton_meta["signature"] = {"in_ptr0": "*fp16"}
    assert kernel_key(other.autotuner) != key()


def test_it_is_alone_on_the_gpu_when_it_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, kernel, seen = inductor_timing(), Timed(1.0, 2.0, 3.0), []

    def look(*_: Any, **__: Any) -> Any:
        seen.append(free(tmp_path / "lock"))
        return times

    times = kernel.all()
    monkeypatch.setattr(timing.autotuner, "benchmark_all_configs", look)
    monkeypatch.setattr(timing.benchmarker, "benchmark_gpu", look)
    with Chooser(Choices(tmp_path / "choices.json"), QuietGpu(tmp_path / "lock")).installed():
        timing.benchmarker.benchmark_gpu(lambda: None)
        timing.benchmarker.benchmark(lambda: None, device="cuda")
        kernel.chosen()
    look()
    assert seen == [False, False, False, True]


def test_calls_that_have_the_gpu_leave_it_to_others_while_they_compile(tmp_path: Path, fresh: None) -> None:
    quiet, seen = QuietGpu(tmp_path / "lock"), []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(free(tmp_path / "lock"))

        def call(*args: Any) -> Any:
            seen.append(free(tmp_path / "lock"))
            return module(*args)

        return call

    compiled = torch.compile(torch.sin, backend=backend)
    with Chooser(Choices(tmp_path / "choices.json"), quiet).installed(), quiet.held():
        compiled(torch.ones(3))
    assert seen == [True, False]
    torch.compile(torch.cos, backend=backend)(torch.ones(3))
    assert seen[2:] == [True, True]


def test_padding_of_products_is_decided_once(tmp_path: Path) -> None:
    padding, found = inductor_timing().padding, []
    for unpadded, padded in ((2.0, 1.0), (1.0, 2.0)):
        with Chooser(Choices(tmp_path / "choices.json"), QuietGpu(tmp_path / "lock")).installed():
            found.append(padding.is_padded_faster("mm 3 5", unpadded, padded))
            assert padding.get_cached_should_pad("mm 3 5") is True
            assert padding.get_cached_should_pad("mm 5 7") is None
    assert found == [True, True]


def test_kernels_keep_no_choices_of_inductors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs that lie in a cache would otherwise come with one configuration, chosen who knows when."""
    kernel = inductor_timing().kernel
    common = classmethod(lambda cls: {"autotune_local_cache": True, "autotune_remote_cache": None, "max_autotune": cls})
    monkeypatch.setattr(kernel, "inductor_meta_common", common)
    with Chooser(Choices(tmp_path / "choices.json"), QuietGpu(tmp_path / "lock")).installed():
        meta = kernel.inductor_meta_common()
    assert meta == {"autotune_local_cache": False, "autotune_remote_cache": False, "max_autotune": kernel}
    assert kernel.inductor_meta_common()["autotune_local_cache"] is True
