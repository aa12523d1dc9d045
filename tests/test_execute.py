"""``pygraph run``: graphs as dumped and as edited by hand, on saved and random inputs; what is told of a difference."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pygraph
from tests.commands import run

pytestmark = pytest.mark.usefixtures("fresh")
Dump = Callable[..., Path]


class Net(nn.Module):
    """Two layers, a buffer that is written, a constant, and a number that the host reads between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x) + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        x = self.layers[1](x * x.sum().item())
        self.seen.copy_(x.sum(0))
        return x


@pytest.fixture
def dump(tmp_path: Path) -> Dump:
    """Compiles and calls a model with dumps; gives the folder of its last graph."""

    def make(
        model: Callable[..., torch.Tensor], *inputs: torch.Tensor, backward: bool = False, **options: object
    ) -> Path:
        options = {"dump_dir": str(tmp_path / "dumps"), "dump_inputs": True, **options}
        compiled = torch.compile(model, backend="pygraph", options=options)
        with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.set_grad_enabled(backward):
            result = compiled(*inputs)
        if backward:
            result.sum().backward()
        return tmp_path / "dumps" / pygraph.reports()[-1].name

    return make


def test_a_dump_runs_at_every_stage_on_the_inputs_that_were_saved(dump: Dump) -> None:
    """Regions are captured and replayed, and results are those of the operators, also in what is written."""
    folder = dump(Net(), torch.randn(4, 8))
    kept = torch.load(folder / "inputs.pt", weights_only=True)
    assert kept["inputs"]["seen"].abs().sum() == 0, "as it was before the call"
    assert [tuple(tensor.shape) for tensor in kept["constants"].values()] == [(8,)]
    for stage in ("00-lifted", "03-partitioning"):
        result = run("run", folder / f"{stage}.pgir", "--inputs", folder / "inputs.pt")
        assert result.exit_code == 0, result.stdout + result.stderr
        assert re.search(r"partition 0, region 0 of the graph: \d+ launches, replayed\n", result.stdout)
        assert result.stdout.endswith("5 calls, 3 of them replayed: as the operators run one by one\n")


def test_a_training_step_runs_forward_and_backward(dump: Dump) -> None:
    backward = dump(nn.Linear(8, 8), torch.randn(4, 8), backward=True)
    forward = next(backward.parent.glob("*_forward"))
    for folder in (forward, backward):
        assert run("run", folder / "05-selection.pgir", "--inputs", folder / "inputs.pt").exit_code == 0


def test_sizes_are_hints_or_given(dump: Dump) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1) + 1).view(x.shape) @ x.t()

    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    file = dump(resize, x) / "05-selection.pgir"
    symbol = re.search(r"%x : f32\[(\w+), 4\]", file.read_text(encoding="utf-8"))
    assert symbol is not None
    assert run("run", file).exit_code == 0
    assert run("run", file, "--size", f"{symbol[1]}=9", "--seed", "3").exit_code == 0
    assert run("run", file, "--size", "9").exit_code == 1
    assert "the graph has no symbol 'n'" in run("run", file, "--size", "n=9").stderr


TWO = """\
graph @main {stage = partitioned} (%x : f32[8, 8]@cpu, %w : f32[8, 8]@cpu) {
  %a = aten.mm.default(%x, %w) : f32[8, 8]@cpu {launches = 1, capturable = true, region = 0, in = "first"}
  %b = aten.relu.default(%a) : f32[8, 8]@cpu {launches = 1, capturable = true, region = 0}
  %c = aten.mm.default(%b, %w) : f32[8, 8]@cpu {capturable = true, region = 1, in = "second", loc = "n.py:7"}
  %d = aten.relu.default(%c) : f32[8, 8]@cpu {launches = 1, capturable = true, region = 1}
  return (%d)
} regions {
  0 ()
  1 ()
}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "graph.pgir"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_regions_are_those_of_the_file_or_of_the_pipeline(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    drawn = run("run", file)
    assert (drawn.exit_code, re.findall(r"partition (\d), region (\d).*, (\w+)", drawn.stdout)) == (
        0,
        [("0", "0", "replayed"), ("1", "1", "replayed")],
    )
    joined = run("run", file, "-p", "legality,placement,partitioning")
    assert re.findall(r"partition (\d), region (\d).*, (\w+)", joined.stdout) == [("0", "0", "replayed")]
    left = run("run", write(tmp_path, TWO.replace("  1 ()", '  1 {reason = "mine", selected = false} ()')))
    assert re.findall(r"partition (\d), region (\d).*launches?, (\w+)", left.stdout) == [
        ("0", "0", "replayed"),
        ("1", "1", "uncaptured"),
    ]


def test_names_are_free_also_where_fx_would_take_another(tmp_path: Path) -> None:
    """Numbers, words with hyphens, builtins, paths of inputs, and names that two of these become in FX."""
    result = run("run", write(tmp_path, NAMED))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("5 calls, 3 of them replayed: as the operators run one by one\n")


NAMED = """\
graph @main (%layers.0.weight : f32[8, 8]@cpu, %0 : f32[8, 8]@cpu, %_1 : f32[8, 8]@cpu) {
  %1:2 = aten.var_mean.correction(%layers.0.weight, [1], keepdim = true) : (f32[8, 1]@cpu, f32[8, 1]@cpu)
  %2 = pygraph.constant(target = "_tensor_constant0") : f32[8]@cpu
  %float = aten.lift_fresh_copy.default(%2) : f32[8]@cpu
  %sum = aten.mm.default(%0, %_1) : f32[8, 8]@cpu
  %layers_0_weight = aten.add.Tensor(%sum, %float) : f32[8, 8]@cpu
  %"a-b" = aten.add.Tensor(%layers_0_weight, %1.1) : f32[8, 8]@cpu
  return (%"a-b", %1.0, %sum)
}
"""


def test_an_operator_on_a_constant_is_told_to_take_a_copy(tmp_path: Path) -> None:
    text = NAMED.replace("(%sum, %float)", "(%sum, %2)")
    result = run("run", write(tmp_path, text))
    assert (result.exit_code, result.stdout) == (1, "")
    told = "at node layers_0_weight: Inductor takes a copy of the constant %_2: aten.lift_fresh_copy.default(%_2)"
    assert told in result.stderr


LIAR = """
import pygraph

@pygraph.register
def to_tanh(graph, ctx):
    graph.node("d").op = "aten.tanh.default"
    return True
"""


def test_a_pass_that_changes_what_is_computed_is_told_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "liar_of_mine.py").write_text(LIAR, encoding="utf-8")
    result = run("run", write(tmp_path, TWO), "--load", "liar_of_mine", "-p", "to-tanh")
    assert result.exit_code == 1
    assert "differs first in %d (the passes, before anything is compiled): is off by " in result.stdout


COUNTING = """
import torch

calls = torch.zeros(())

@torch.library.custom_op("mine::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    calls.add_(1)
    return x + (calls if calls > FROM else 0)

@counting.register_fake
def _(x):
    return torch.empty_like(x)
"""


@pytest.mark.parametrize(("first", "when"), [(1, "the operators one by one, run twice"), (4, "call 1, uncaptured")])
def test_an_operator_with_a_state_is_told_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, when: str
) -> None:
    """With operator, module and line: one that differs from run to run, and one that does in the compiled graph."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = COUNTING.replace("FROM", str(first)).replace("counting", f"counting{first}")
    (tmp_path / f"counting_of_mine{first}.py").write_text(text, encoding="utf-8")
    text = TWO.replace("%c = aten.mm.default(%b, %w)", f"%c = mine.counting{first}.default(%b)")
    result = run("run", write(tmp_path, text), "--load", f"counting_of_mine{first}")
    assert result.exit_code == 1
    told = rf"differs first in %c \({when}\): .*\n +mine.counting\d.default, in second, n.py:7\n"
    assert re.search(told, result.stdout), result.stdout


def test_a_branch_on_the_device_runs(dump: Dump) -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() @ x, lambda x: x.cos() @ x, (x,)).relu()

    folder = dump(branch, torch.randn(4, 4))
    result = run("run", folder / "05-selection.pgir", "--inputs", folder / "inputs.pt")
    assert result.exit_code == 0, result.stderr


def test_a_graph_of_a_gpu_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, TWO.replace("@cpu", "@cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cpu runs it on the CPU" in run("run", file).stderr
    assert run("run", file, "--device", "cpu").exit_code == 0


def test_random_numbers_are_not_compared(dump: Dump) -> None:
    def noisy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() @ x, torch.rand_like(x) + x

    result = run("run", dump(noisy, torch.randn(4, 4)) / "05-selection.pgir")
    assert result.exit_code == 0
    assert re.search("not compared, since it follows from random numbers: %add\\w*\n", result.stdout)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("aten.relu.default(%c)", "aten.rleu.default(%c)", r"graph\.pgir:5:3: .*aten\.rleu\.default.*\n.*\n  \^\^"),
        (
            "relu.default(%c) : f32[8, 8]",
            "relu.default(%c) : f32[8, 9]",
            r"graph\.pgir:5:3: .*f32\[8, 9\].*\n.*\n  \^\^",
        ),
        ("aten.mm.default(%b, %w)", "aten.mm.default(%b)", r"graph\.pgir:4:3: .*node c.*\n.*\n  \^\^"),
        ("f32[8, 8]@cpu, %w", "f32[s0, 8]@cpu, %w", r"the size s0 is not known"),
        ("return", "retrun", r"graph\.pgir:6:3: .*\n.*\n +\^"),
    ],
)
def test_an_error_in_the_file_is_shown_at_its_place(tmp_path: Path, old: str, new: str, told: str) -> None:
    result = run("run", write(tmp_path, TWO.replace(old, new)))
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(told, result.stderr), result.stderr


def test_files_of_inputs_are_no_programs(tmp_path: Path) -> None:
    file = write(tmp_path, TWO)
    for name, content in (
        ("text.pt", "no tensors"),
        ("class.pt", Path("x")),
        ("list.pt", [1]),
        ("other.pt", {"inputs": {"y": 1}}),
    ):
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            torch.save(content, path)
        result = run("run", file, "--inputs", path)
        assert (result.exit_code, result.stdout) == (1, ""), name
    wrong = tmp_path / "wrong.pt"
    torch.save({"inputs": {"x": torch.zeros(3, 8)}}, wrong)
    assert "is f32[8, 8]@cpu, not f32[3, 8]@cpu" in run("run", file, "--inputs", wrong).stderr
    assert "No such file" in run("run", file, "--inputs", tmp_path / "none.pt").stderr


def test_large_inputs_are_not_saved(
    dump: Dump, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pygraph.dump._INPUTS_LIMIT", 100)
    folder = dump(Net(), torch.randn(4, 8))
    assert not (folder / "inputs.pt").exists()
    assert "no more than 100 are saved" in caplog.text
