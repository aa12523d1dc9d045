"""``torch.compile(backend="pygraph")`` from the outside: results, and the life of what it holds."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.report.text import head
from tests.small import CALLS, Mlp, Scaled, compiled, living_regions, replays

pytestmark = pytest.mark.usefixtures("fresh")


def test_inference_equals_inductor_bit_for_bit_and_replays() -> None:
    model = Mlp().eval()
    plain, ours = compiled(model, "inductor"), compiled(model)
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            expected = plain(x)
            assert torch.equal(ours(x), expected)
            torch.testing.assert_close(expected, model(x))
    assert replays() >= CALLS - 2
    (report,) = pygraph.reports()
    assert report.kind == "inference"
    assert report.coverage == 1.0
    assert [region.state for region in report.regions] == ["replay"]


@pytest.mark.parametrize("kept", [False, True], ids=["cold", "restored"])
def test_a_wrapper_that_another_library_sets_for_partitions_is_not_called_and_stays_set(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = torch._inductor.utils._unstable_customized_partition_wrapper
    monkeypatch.setattr(holder, "wrapper", None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def foreign(function: Any, _metadata: Any) -> Any:
        raise AssertionError("the partition is PyGraph's")

    model, x = Mlp().eval(), torch.randn(8, 16)
    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=True):
        if kept:
            compiled(model)(x)
            torch._dynamo.reset()
            pygraph.reset()
        torch._inductor.utils.set_customized_partition_wrappers(foreign)
        ours = compiled(model)
        for _ in range(CALLS):
            torch.testing.assert_close(ours(x), model(x))
    assert holder.wrapper is foreign
    assert replays() >= CALLS - 2
    (report,) = pygraph.reports()
    assert ("restore" in report.times_ms) == kept
    assert [note for note in report.notes if "the wrapper that is set for Inductor's partitions" in note]


def test_training_equals_inductor_bit_for_bit() -> None:
    def run(backend: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = Mlp(dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = compiled(model, backend)
        losses = []
        for _ in range(CALLS):
            optimizer.zero_grad()
            loss = step(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    expected, actual = run("inductor"), run("pygraph")
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert [r.kind for r in pygraph.reports()] == ["forward", "backward"]
    assert all(region.state == "replay" for r in pygraph.reports() for region in r.regions)


def test_a_host_read_is_cut_and_reported_with_its_line() -> None:
    model = Scaled()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        ours = compiled(model)
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    (report,) = pygraph.reports()
    reads = [u for u in report.uncaptured() if "_local_scalar_dense" in u.op]
    assert len(reads) == 1
    assert "hidden.sum().long().item()" in reads[0].code
    assert len(report.regions) == 2
    assert report.regions[0].state == "replay"


def test_batch_norm_statistics_are_mutated_as_in_eager() -> None:
    torch.manual_seed(1)
    ours_model, eager = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    ours = compiled(ours_model)
    for _ in range(CALLS):
        x = torch.randn(32, 16)
        torch.testing.assert_close(ours(x), eager(x))
    torch.testing.assert_close(ours_model.running_mean, eager.running_mean)
    torch.testing.assert_close(ours_model.running_var, eager.running_var)
    assert ours_model.num_batches_tracked == CALLS


def test_outputs_of_earlier_calls_never_change() -> None:
    model = compiled(Mlp().eval())
    with torch.no_grad():
        results = [model(torch.randn(8, 16)) for _ in range(6)]
        copies = [r.clone() for r in results]
        for _ in range(3):
            model(torch.randn(8, 16))
    assert all(torch.equal(r, c) for r, c in zip(results, copies, strict=True))
    assert len({r.data_ptr() for r in results}) == len(results)


def test_dynamic_sizes_each_get_their_capture() -> None:
    model = Mlp().eval()
    ours = torch.compile(model, backend="pygraph", dynamic=True)
    with torch.no_grad():
        for size in [3, 5, 3, 5, 3, 5, 7, 3]:
            x = torch.randn(size, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert pygraph.counters()["captures"] == 2
    assert replays() == 4


def test_graph_breaks_and_several_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x @ x.t() @ x
        torch._dynamo.graph_break()
        return y @ y.t() @ y

    ours = compiled(broken)
    for _ in range(CALLS):
        x = torch.randn(8, 16)
        torch.testing.assert_close(ours(x), broken(x))
    assert len(pygraph.reports()) == 2
    assert replays() >= 2 * (CALLS - 2)


def test_every_graph_break_is_reported_once_also_without_a_graph_between() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        print("first")
        y = x @ x
        print("second")
        print("third")
        z = y @ y
        print("fourth")
        print("fifth")
        return z

    def other(x: torch.Tensor) -> torch.Tensor:
        print("other")
        return x @ x

    ours = compiled(broken)
    for _ in range(2):
        ours(torch.randn(8, 8))
        torch.compile(other, backend="eager")(torch.randn(8, 8))
    first, second = pygraph.reports()
    assert [line.code for line in first.origin.breaks] == ['print("first")', 'print("second")']
    assert [line.code for line in second.origin.breaks] == ['print("third")', 'print("fourth")', 'print("fifth")']
    assert sum(key == "graph break" for key, _ in head(second)) == 3
    assert first.origin.start is not None
    assert second.origin.start is not None
    assert second.origin.start.line == first.origin.start.line + 3, "the rest behind the breaks"


def test_a_graph_break_is_reported_where_another_function_was_compiled_meanwhile() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        print("inner")
        return x @ x

    def outer(x: torch.Tensor) -> torch.Tensor:
        print("outer")
        return inner(x) @ x

    compiled(outer)(torch.randn(8, 8))
    codes = {report.origin.function: [line.code for line in report.origin.breaks] for report in pygraph.reports()}
    assert codes["inner"] == ['print("inner")']
    assert codes["outer"] == ['print("outer")', 'print("inner")'], "Dynamo tries to inline it first"


def test_threads_share_a_compiled_model() -> None:
    model = Mlp().eval()
    ours = compiled(model)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(8, 16, generator=generator)
            with torch.no_grad():
                if not torch.allclose(ours(x), model(x), atol=1e-5):
                    failures.append(f"thread {seed}")

    with torch.no_grad():
        ours(torch.randn(8, 16))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert replays() > 0


def test_reset_frees_everything() -> None:
    model = Mlp().eval()
    before = {id(region) for region in living_regions()}
    ours = compiled(model)
    with torch.no_grad():
        for _ in range(CALLS):
            ours(torch.randn(8, 16))
    alive = [weakref.ref(region) for region in living_regions() if id(region) not in before]
    assert alive
    del ours
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []
