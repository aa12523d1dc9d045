"""Source lines: the innermost frame of the user's, with file, line, function and code."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch import Tensor

from pygraph.frontend.location import location_of, parse_stack_trace
from pygraph.ir import Location
from tests.frontend.capture import capture, lift_inference

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


def test_frames_of_torch_are_skipped() -> None:
    text = trace(
        ("/home/user/model.py", 12, "forward", "x = self.linear(x)"),
        (f"{TORCH}/nn/modules/linear.py", 134, "forward", "return F.linear(input, self.weight, self.bias)"),
    )
    assert parse_stack_trace(text, "/tmp") == Location("/home/user/model.py", 12, "forward", "x = self.linear(x)")


def test_a_trace_of_torch_alone_has_no_line() -> None:
    text = trace((f"{TORCH}/nn/modules/linear.py", 134, "forward", "code"), ("<string>", 1, "<module>", "code"))
    assert parse_stack_trace(text, "/tmp") is None


def test_markers_under_code_are_no_frames() -> None:
    text = trace(("/a/model.py", 3, "<lambda>", "return x + y")) + "           ^^^^^\n"
    assert parse_stack_trace(text, "/tmp") == Location("/a/model.py", 3, "<lambda>", "return x + y")


def test_a_frame_without_code_takes_none_from_the_next() -> None:
    text = '  File "/a/model.py", line 3, in f\n  File "<eval>", line 4, in g\n    code\n'
    assert parse_stack_trace(text, "/tmp") == Location("/a/model.py", 3, "f", "")


@pytest.mark.parametrize(
    ("directory", "file"),
    [("/home/user", "pkg/model.py"), ("/home/us", "/home/user/pkg/model.py"), ("/", "/home/user/pkg/model.py")],
)
def test_files_are_relative_to_the_directory_that_holds_them(directory: str, file: str) -> None:
    found = parse_stack_trace(trace(("/home/user/pkg/model.py", 1, "f", "pass")), directory)
    assert found is not None
    assert found.file == file


@pytest.mark.parametrize("meta", [{}, {"stack_trace": None}, {"stack_trace": ""}, {"stack_trace": "no frames"}])
def test_nodes_without_a_trace_have_no_line(meta: dict[str, object]) -> None:
    assert location_of(meta) is None
