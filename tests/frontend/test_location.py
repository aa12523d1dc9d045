"""Source lines: the innermost frame of the user's, with file, line, function and code."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pygraph.frontend.location import location_of
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
