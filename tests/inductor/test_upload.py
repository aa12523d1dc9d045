"""The upload operator: values, layouts, own storages, fake results; staging is exercised on the CPU as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygraph.inductor import upload as module

module.make_compilable()


def sources() -> list[torch.Tensor]:
    return [
        torch.tensor(2.5),
        torch.arange(6).view(2, 3).t(),
        torch.randn(3, 4, dtype=torch.float64),
        torch.empty(0, 3),
    ]


def test_each_result_is_a_copy_of_its_own() -> None:
    xs = sources()
    results = torch.ops.pygraph.upload([*xs, xs[1]], torch.device("cpu"))
    for x, result in zip([*xs, xs[1]], results, strict=True):
        assert torch.equal(x, result)
        assert x.stride() == result.stride()
    pointers = [r.data_ptr() for r in [*xs, *results] if r.numel()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("transposed", [False, True])
def test_inductor_compiles_it_where_it_may_make_no_fallbacks_and_keeps_strides(
    transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        results = torch.ops.pygraph.upload([y.t() if transposed else y, y.sum()], torch.device("cpu"))
        return [results[0], results[0] + results[1]]

    x = torch.randn(3, 4)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    results = torch.compile(program, options={"implicit_fallbacks": False}, fullgraph=True)(x)
    torch.testing.assert_close(results, program(x))
    assert [r.stride() for r in results] == [r.stride() for r in program(x)]


def test_staging_packs_and_unpacks_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [x for x in sources() if x.numel()]
    results = [torch.empty_like(x) for x in xs]
    real = torch.empty

    def unpinned(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        return real(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", unpinned)  # pinned memory needs a device
    module._copy_staged(results, xs, torch.device("cpu"))
    assert all(torch.equal(x, result) for x, result in zip(xs, results, strict=True))


def test_what_a_caller_captures_holds_the_numbers() -> None:
    numbers = [2.5, -0.0, float("inf"), 7, -(2**62), True, 1 - 2j]
    tensors = [torch.tensor(number) for number in numbers] + [torch.tensor(1 / 3, dtype=torch.float64).half()]
    for x in tensors:
        result = module._captured(x, torch.device("cpu"))
        assert result.dtype is x.dtype
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
        if x.dtype.is_floating_point:
            assert torch.signbit(result) == torch.signbit(x)
    assert torch.equal(module._captured(torch.arange(3), torch.device("cpu")), torch.arange(3))
