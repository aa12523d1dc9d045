"""Small products of float32 take the library that is faster at them."""

from __future__ import annotations

import pytest
import torch

import pygraph
from pygraph import compat
from pygraph.inductor import products
from pygraph.inductor.products import Times, measure


@pytest.mark.usefixtures("fresh")
def test_a_small_perceptron_takes_the_faster_form_and_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster by what was measured when it was compiled: beside other work, measured again, it may be the other."""
    found: list[Times | RuntimeError] = []

    def measured(*operands: torch.Tensor) -> Times:
        try:
            times = measure(*operands)
        except RuntimeError as error:
            found.append(error)
            raise
        found.append(times)
        return times

    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "measure", measured)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).cuda().requires_grad_(False)
    x = torch.randn(8, 256, device="cuda")
    compiled = torch.compile(model, backend="pygraph", options={"cache_dir": None, "strict": True})
    with compat.inductor_config.patch(force_disable_caches=True):  # a cached program has been measured
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert pygraph.counters()["replays"] > 0
    (times,) = found
    assert isinstance(times, Times), times
    (report,) = pygraph.reports()
    if times.addmm < 0.5 * times.mm:
        assert "extern_kernels.addmm" in report.source
        assert sum("is an addmm" in note for note in report.notes) == 3
    elif times.addmm > 2 * times.mm:
        assert "extern_kernels.addmm" not in report.source


def test_what_a_product_takes_is_what_the_device_takes() -> None:
    """A product of 1 GFLOP takes 15 µs at least, at the 67 TFLOP/s of an H100; one of 0.001 GFLOP is far from it."""
    small, large = (measure(*(torch.zeros(size, device="cuda") for size in ((n,), (n, n), (n, n)))) for n in (32, 800))
    assert large.mm > 2 * small.mm
    assert all(0.5 < time < 1000 for time in (*small, *large))
