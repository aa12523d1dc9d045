"""``torch.compile(backend="pygraph")`` from the outside: results, options, failures, life of what it holds."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import PygraphError
from pygraph.ir import Graph
from pygraph.passes.base import Pass, PassContext, PassResult

pytestmark = pytest.mark.usefixtures("fresh")

CALLS = 4
"""Enough calls for a region to run uncaptured, be captured, and be replayed."""


class Mlp(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 32), nn.ReLU(), nn.Dropout(dropout), nn.LayerNorm(32), nn.Linear(32, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Scaled(nn.Module):
    """Reads a scalar on the host in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        scale = hidden.sum().long().item()
        return self.second(hidden) * scale


def compiled(model: Callable[..., Any], backend: str = "pygraph", **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, options=options or None)


def replays() -> int:
    return pygraph.counters().get("replays", 0)


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


def test_two_replays_with_dropout_differ() -> None:
    model = compiled(nn.Dropout(0.5).train())
    x = torch.ones(64)
    with torch.no_grad():
        results = [model(x) for _ in range(CALLS)]
    assert replays() >= 2
    assert not torch.equal(results[-1], results[-2])


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


def test_a_cache_handed_in_is_written_in_place() -> None:
    def write(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, at, x)
        return cache.sum(0)

    ours = compiled(write)
    for i in range(CALLS):
        cache, x, at = torch.zeros(6, 4), torch.randn(2, 4), torch.tensor([i, i + 1])
        expected = cache.clone()
        expected.index_copy_(0, at, x)
        torch.testing.assert_close(ours(cache, x, at), expected.sum(0))
        assert torch.equal(cache, expected)
    assert replays() >= 1


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
    assert replays() == 3


def test_graph_breaks_and_several_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) @ x.t()
        torch._dynamo.graph_break()
        return (y + 1).cos()

    ours = compiled(broken)
    for _ in range(CALLS):
        x = torch.randn(8, 16)
        torch.testing.assert_close(ours(x), broken(x))
    assert len(pygraph.reports()) == 2
    assert replays() >= 2 * (CALLS - 2)


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


def test_marking_a_step_is_harmless() -> None:
    ours = compiled(Mlp().eval())
    with torch.no_grad():
        kept = []
        for _ in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            kept.append(ours(torch.ones(8, 16)))
    assert all(torch.equal(kept[0], k) for k in kept)


def living_regions() -> list[Any]:
    return [o for o in gc.get_objects() if type(o).__name__ == "Region" and "runtime" in type(o).__module__]


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


# -- options -------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_rejected_with_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'dump_dir'"):
        compiled(Mlp(), dumpdir="x")(torch.randn(8, 16))


def test_an_unknown_inductor_option_is_rejected() -> None:
    with pytest.raises(Exception, match="Inductor has no option 'max_autotun'"):
        compiled(Mlp(), inductor={"max_autotun": True})(torch.randn(8, 16))


def test_bad_pipeline_text_is_the_callers_mistake() -> None:
    with pytest.raises(Exception, match="legalty"):
        compiled(Mlp(), passes="legalty")(torch.randn(8, 16))


def test_inductor_options_reach_inductor() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    ours = compiled(model, inductor={"fallback_random": True})
    x = torch.ones(256)
    with torch.no_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            actual = ours(x)
            torch.manual_seed(seed)
            assert torch.equal(actual, model(x))
    assert replays() >= 1


def test_a_mode_of_inductor_is_taken() -> None:
    model = Mlp().eval()
    ours = torch.compile(model, backend="pygraph", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert replays() >= 1


def test_disable_compiles_with_plain_inductor() -> None:
    model = Mlp().eval()
    with torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model, disable=True)(x), model(x))
    assert pygraph.reports() == []


def test_strict_raises_for_what_cannot_be_captured() -> None:
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
    with scalars, torch.no_grad(), pytest.raises(Exception, match="host-read"):
        compiled(Scaled(), strict=True)(torch.randn(8, 16))


def test_strict_accepts_what_is_captured() -> None:
    ours = compiled(Mlp().eval(), strict=True)
    with torch.no_grad():
        for _ in range(CALLS):
            ours(torch.randn(8, 16))
    assert replays() >= 1


def test_verify_always_compares_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    import pygraph.runtime.region as region

    compared: list[object] = []
    real = region.verify

    def verify(*args: Any) -> Any:
        compared.append(args)
        return real(*args)

    monkeypatch.setattr(region, "verify", verify)
    model = Mlp().eval()
    ours = compiled(model, verify="always")
    with torch.no_grad():
        for _ in range(CALLS):
            x = torch.randn(8, 16)
            torch.testing.assert_close(ours(x), model(x))
    assert len(compared) == replays() >= 1


# -- passes of the user's, and failures ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(Pass):
    """Raises."""

    name: ClassVar[str] = "failing"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        raise ZeroDivisionError("on purpose")


@dataclass(frozen=True)
class ReluToTanh(Pass):
    """Rewrites the program, to show that the IR is what gets compiled."""

    name: ClassVar[str] = "relu-to-tanh"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        found = [node for node in graph.nodes if node.op == "aten.relu.default"]
        for node in found:
            new = graph.add(
                "aten.tanh.default", node.args, (node.output.type,), cost=node.cost, loc=node.loc, before=node
            )
            graph.replace_uses(node.output, new.output)
            graph.erase(node)
        return PassResult(bool(found), (f"{len(found)} rewritten",))


def test_a_pass_that_rewrites_the_program_is_compiled() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    ours = compiled(f, passes=[ReluToTanh(), "legality,placement,partitioning"])
    for _ in range(CALLS):
        x = torch.randn(8, 16)
        torch.testing.assert_close(ours(x), torch.tanh(x) + 1)
    assert replays() >= 1


def test_a_failing_pass_falls_back_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp().eval()
    with caplog.at_level(logging.WARNING, "pygraph"), torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model, passes=[Failing(), "legality"])(x), model(x))
    said = [r.message for r in caplog.records if "plain Inductor" in r.message]
    assert len(said) == 1
    assert "failing" in said[0]
    assert "on purpose" in said[0]
    (report,) = pygraph.reports()
    assert report.error is not None


def test_a_failing_pass_raises_under_strict() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="on purpose"):
        compiled(Mlp().eval(), passes=[Failing(), "legality"], strict=True)(torch.randn(8, 16))


def test_a_failure_in_the_backward_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import pygraph.backend as backend

    real = backend.plan

    def only_forward(gm: Any, kind: str, *rest: Any) -> Any:
        if kind == "backward":
            raise PygraphError("no backward")
        return real(gm, kind, *rest)

    monkeypatch.setattr(backend, "plan", only_forward)
    model = Mlp()
    x = torch.randn(8, 16)
    compiled(model)(x).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for expected, actual in zip((p.grad for p in model.parameters()), grads, strict=True):
        torch.testing.assert_close(actual, expected)


# -- dumps and explanations ----------------------------------------------------------------------------------------


def test_dumps_hold_each_pass_the_program_and_the_report(tmp_path: Path) -> None:
    from pygraph.ir import parse

    ours = compiled(Mlp().eval(), dump_dir=str(tmp_path))
    with torch.no_grad():
        for _ in range(CALLS):
            ours(torch.randn(8, 16))
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "00-lifted.pgir"
    assert [n.split("-", 1)[1] for n in names if n[0] == "0"][1:] == [
        "legality.pgir",
        "placement.pgir",
        "partitioning.pgir",
        "indirection.pgir",
        "selection.pgir",
    ]
    assert {"program.py", "report.txt", "report.json"} <= set(names)
    for path in folder.glob("*.pgir"):
        text = path.read_text()
        assert str(parse(text)) == text
    launches = parse((folder / "region0.launches.pgir").read_text())
    assert [node.op.split(".")[0] for node in launches.nodes] == ["operator", "kernel", "operator"]
    assert "# region 0: may be captured" in (folder / "program.py").read_text()


def test_an_unwritable_dump_directory_changes_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    model = Mlp().eval()
    with caplog.at_level(logging.WARNING, "pygraph"), torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model, dump_dir=str(blocked / "sub"))(x), model(x))
    assert "cannot write dumps" in caplog.text


def test_a_report_that_cannot_be_rendered_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ValueError("no such glyph")

    monkeypatch.setattr("pygraph.report.text.render_text", broken)
    model, x = Mlp().eval(), torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, dump_dir=str(tmp_path))(x), model(x))
    assert "no such glyph" in caplog.text


def test_explain_names_regions_reasons_and_lines() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        explanation = pygraph.explain(Scaled(), torch.randn(8, 16))
    text = str(explanation)
    assert "host-read" in text
    assert "test_backend.py" in text
    assert explanation.json()["graphs"]
    assert "<svg" in explanation.html()
