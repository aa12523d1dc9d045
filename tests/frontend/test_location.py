"""Source lines: the innermost frame of the user's. Modules of operators, and the user's names of inputs."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from pygraph.frontend.location import UNKNOWN, GraphOrigin, location_of
from pygraph.ir import Graph, Location, ScalarType, sources, symbol
from tests.frontend.capture import capture, capture_inference, lift_inference

TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def helper(x: Tensor) -> Tensor:
    return x.sin()  # the line of sin


def step(x: Tensor) -> Tensor:
    y = helper(x) * 2  # the line of mul
    return torch.nn.functional.layer_norm(y, (4,))  # the line of var_mean


def line_of(fn: object, marker: str) -> int:
    """The number of the line in ``fn`` that carries a comment."""
    lines, first = inspect.getsourcelines(fn)  # type: ignore[arg-type]
    return first + next(i for i, line in enumerate(lines) if marker in line)


@pytest.mark.parametrize(
    ("node", "fn", "marker"),
    [("sin", helper, "line of sin"), ("mul", step, "line of mul"), ("var_mean", step, "line of var_mean")],
)
def test_each_operator_knows_its_line(node: str, fn: object, marker: str) -> None:
    loc = lift_inference(step, torch.randn(4)).node(node).loc
    assert loc is not None
    assert loc.file.endswith(os.path.join("frontend", "test_location.py"))
    assert loc.line == line_of(fn, marker)
    assert loc.function == fn.__name__  # type: ignore[attr-defined]
    assert marker in loc.code or loc.code == inspect.getsource(fn).splitlines()[-1].split("#")[0].strip()  # type: ignore[arg-type]


def test_backward_operators_know_the_forward_line() -> None:
    _, backward = capture(step, torch.randn(4, requires_grad=True), backward=True)
    lines = {node.loc.line for node in backward.lift().nodes if node.loc is not None}
    expected = {line_of(helper, "line of sin"), line_of(step, "line of mul"), line_of(step, "line of var_mean")}
    assert expected <= lines


def trace(*frames: tuple[str, int, str, str]) -> str:
    return "".join(f'  File "{file}", line {line}, in {name}\n    {code}\n' for file, line, name, code in frames)


OURS = ("/home/user/model.py", 12, "forward", "x = self.linear(x)")
TORCHS = (f"{TORCH}/nn/modules/linear.py", 134, "forward", "return F.linear(input, self.weight, self.bias)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (trace(OURS, TORCHS), Location(*OURS)),
        (trace(TORCHS, ("<string>", 1, "<module>", "code")), None),
        (
            trace(("/a/model.py", 3, "<lambda>", "x + y")) + "       ^^^^^\n",
            Location("/a/model.py", 3, "<lambda>", "x + y"),
        ),
        (
            '  File "/a/model.py", line 3, in f\n  File "<eval>", line 4, in g\n    code\n',
            Location("/a/model.py", 3, "f", ""),
        ),
        (trace(("/a/model.py", 3, "torch_dynamo_resume_in_f_at_2", "x")), Location("/a/model.py", 3, "f", "x")),
        ("no frames", None),
        (None, None),
    ],
    ids=["skips-torch", "torch-alone", "markers", "no-code", "resumed", "no-frames", "none"],
)
def test_the_innermost_frame_of_the_users_counts(text: str | None, expected: Location | None) -> None:
    assert location_of({"stack_trace": text}) == expected


@pytest.mark.parametrize(
    ("directory", "file"),
    [("pkg", "model.py"), ("pk", "{}/pkg/model.py"), (".", "pkg/model.py"), ("/", "{}/pkg/model.py")],
)
def test_files_are_relative_to_the_working_directory_that_holds_them(
    directory: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("pkg", "pk"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / directory)
    found = location_of({"stack_trace": trace((f"{tmp_path}/pkg/model.py", 1, "f", "pass"))})
    assert found is not None
    assert found.file == file.format(tmp_path)


# -- modules and names of inputs ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.query(x)) * self.mask


class Model(nn.Module):
    """Blocks of a list, a module that is called twice, a key that is no word, and what has the name of a node."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), nn.ReLU()) for _ in range(2))
        self.twice = nn.Linear(4, 4)
        self.gains = nn.ParameterDict({"k-1": torch.ones(4)})
        self.add = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.add
        return self.twice(self.twice(x)) * self.gains["k-1"]


def inputs(graph: Graph) -> dict[str, str]:
    return {repr(value): value.placeholder for value in graph.inputs}


def modules(graph: Graph) -> list[str]:
    return list(dict.fromkeys(node.module for node in graph.nodes))


def test_parameters_have_the_names_that_the_model_gives_them_and_operators_their_modules() -> None:
    model = Model()
    graph = lift_inference(model, torch.randn(3, 4))
    assert [f"arg{i}_1" for i in range(11)] == list(inputs(graph).values())
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert {value.name for value in graph.inputs} == known - {"add"} | {"add_2", "x"}, "nodes are called add and add_1"
    assert {"%layers.0.0.query.weight", "%layers.1.0.mask", '%"gains.k-1"', "%x"} < inputs(graph).keys()
    of_layer = ["layers.1.0.query", "layers.1.0", "layers.1.1"]
    assert modules(graph) == ["layers.0.0.query", "layers.0.0", "layers.0.1", "", *of_layer, "twice"]
    assert sources(graph.node("tanh")) == (("aten.tanh.default", "forward", "layers.0.0"),)


def test_a_backward_operator_has_the_module_whose_gradient_it_computes() -> None:
    forward, backward = (captured.lift() for captured in capture(Model(), torch.randn(3, 4), backward=True))
    assert forward.value("twice.weight").placeholder.startswith("primals_")
    assert backward.value("twice.weight").placeholder == forward.value("twice.weight").placeholder
    assert backward.inputs[-1].name == "tangents_1"
    assert next(filter(None, modules(backward))) == "twice"
    assert {"layers.1.0", "layers.0.0.query"} < set(modules(backward))


def test_the_variable_that_holds_all_modules_is_left_out_and_several_are_kept() -> None:
    body, head, shift = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2), {"by": [torch.ones(4)]}
    graph = lift_inference(lambda x: body(x + shift["by"][0]), torch.randn(3, 4))
    assert (sorted(inputs(graph)), modules(graph)) == (['%"shift.by.0"', "%0.bias", "%0.weight", "%x"], ["", "0", "1"])
    graph = lift_inference(lambda x: head(body(x)), torch.randn(3, 4))
    names = ["%body.0.bias", "%body.0.weight", "%head.bias", "%head.weight", "%x"]
    assert (sorted(inputs(graph)), modules(graph)) == (names, ["body.0", "body.1", "head"])


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["x"])


WHOLE = torch.ones(4)


def scaled(*pair: Any, by: int = 2) -> Tensor:
    return pair[1].view(-1) * by


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda x, n: x.view(-1) * n, (torch.randn(3, 4), 7), {"x", "n"}),
        (Trainer().step, ({"x": torch.randn(3, 4)},), {"model.0.weight", "model.0.bias", "batch.x"}),
        (lambda x: scaled(1, x), (torch.randn(4),), {"x"}),
        (scaled, (1, torch.randn(4)), {"pair.1"}),
        (lambda a, b: (a.add_(1), b.mul_(2)), (WHOLE[:2], WHOLE[1:]), {"a._base"}),
        (
            parametrizations.weight_norm(nn.Linear(4, 4)),
            (torch.randn(3, 4),),
            {"parametrizations.weight.original0", "parametrizations.weight.original1", "bias", "args.0"},
        ),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=False), (torch.randn(4),), {"x"}),
        (lambda x: x * 2, (TwoTensor(torch.randn(4), torch.randn(4)),), {"x.a", "x.b"}),
    ],
    ids=["sizes", "object", "inlined", "tuple", "views", "parametrized", "checkpoint", "subclass"],
)
def test_what_is_taken_has_the_name_that_leads_to_it(function: Any, args: tuple[Any, ...], expected: set[str]) -> None:
    found = lift_inference(function, *args, dynamic="n" in expected or None).inputs
    sizes = [value for value in found if re.fullmatch(r"s\d+", value.name)]
    assert {value.name for value in found if value not in sizes} == expected
    assert [value.type for value in sizes] == [ScalarType("int", symbol(value.name)) for value in sizes]
    assert len(sizes) == 2 * ("n" in expected)


def test_without_a_known_origin_inputs_keep_the_names_of_placeholders() -> None:
    captured = capture_inference(Model(), torch.randn(3, 4))
    captured.origin = UNKNOWN
    assert all(value.name == value.placeholder for value in captured.lift().inputs)
    for node in captured.gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("desc")
    captured.origin = GraphOrigin(inputs={0: "known"})
    assert all(value.name == value.placeholder for value in captured.lift().inputs)


def test_inputs_of_a_subgraph_keep_theirs() -> None:
    linear = nn.Linear(4, 4)
    graph = lift_inference(lambda x: torch.cond(x.sum() > 0, linear, torch.sin, (x,)), torch.randn(4, 4))
    assert set(inputs(graph)) == {"%x", "%weight", "%bias"}
    for inner in graph.subgraphs.values():
        assert all(value.name == value.placeholder for value in inner.inputs)


def test_frames_are_the_users_calls_where_they_are_asked_for() -> None:
    captured = capture_inference(step, torch.randn(4))
    loc = captured.lift(frames=True).node("sin").loc
    assert loc is not None
    calls = (("step", line_of(step, "line of mul")), ("helper", line_of(helper, "line of sin")))
    assert loc.frames == tuple(f"{loc.file}:{line} {function}" for function, line in calls)
    plain = captured.lift().node("sin").loc
    assert plain is not None
    assert plain.frames == ()
