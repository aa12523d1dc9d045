"""Operators by name: the table that graphs are verified by without torch, and what torch adds where it is imported."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.errors import VerifyError
from pygraph.frontend.names import FrontendError, resolve_op, signature
from pygraph.frontend.types import TypeReader
from pygraph.ir import Graph, parse_graph, verify
from pygraph.ir.operators import Signature, listed
from tests.frontend.capture import lift_inference

_PARTS_OF_TORCH = ("hop.", "sym.", "pygraph.")


def test_the_table_is_what_torch_says() -> None:
    """The release that it was made from; the signatures of others differ in a few places."""
    made_with = (Path(__file__).parents[2] / "pygraph" / "ir" / "operators.txt").read_text(encoding="utf-8").split()[2]
    if torch.__version__.partition("+")[0] != made_with:
        pytest.skip(f"the table is that of torch {made_with}")
    for name, noted in listed().items():
        assert Signature.parse(str(noted)) == noted
        try:
            schema = getattr(resolve_op(name), "_schema", None)
        except FrontendError:  # what only some builds and modules of torch register
            continue
        if schema is not None and not name.startswith(_PARTS_OF_TORCH):
            assert str(signature(schema)) == str(noted).removesuffix(noted.kind).rstrip(), name


TEXT = "graph @main (%x : f32[4]@cpu) {{ %r = named.twice.default({}) : f32[4]@cpu  return (%r) }}"


def test_a_custom_operator_is_known_once_its_library_is() -> None:
    with pytest.raises(VerifyError, match=r"named\.twice\.default is no operator of torch's"):
        verify(parse_graph(TEXT.format("%x")))
    with torch.library._scoped_library("named", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: x * 2, "Meta")
        verify(parse_graph(TEXT.format("%x")))
        with pytest.raises(VerifyError, match=r"takes 1 arguments by position, and has 2: it is \(x\) -> 1"):
            verify(parse_graph(TEXT.format("%x, 2")))
        text = str(lift_inference(torch.ops.named.twice, torch.ones(4)))
    assert "operators = [named.twice.default]" in text
    script = (
        "import sys; from pygraph.ir import *; verify(parse_graph(sys.stdin.read())); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], input=text, text=True, check=True)


def test_a_text_that_is_read_and_printed_declares_what_it_did_before() -> None:
    """Whatever torch knows in this process beyond the table."""
    text = Path(__file__).parents[1].joinpath("ir", "sample.pgir").read_text(encoding="utf-8")
    assert "operators =" not in text.partition("\n")[0]
    assert str(parse_graph(text)) == text


def calls(schema: Any, tensors: list[torch.Tensor], most: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """At most so many calls of an operator, many of which it does not take."""
    numbers = {"number": [0, 2, 0.0, 1.5, 0j, 1j, True], "int": [0, 1], "float": [0.0, 1.5], "bool": [True, False]}
    choices = []
    for argument in schema.arguments:
        known = {"Tensor": tensors, **numbers}.get(str(argument.type))
        if known is None and not argument.has_default_value():
            return
        choices.append(known or [argument.default_value])
    every = list(itertools.islice(itertools.product(*choices), 3000))
    for values in random.Random(0).sample(every, min(len(every), most)):
        pairs = list(zip(schema.arguments, values, strict=True))
        yield [v for a, v in pairs if not a.kwarg_only], {a.name: v for a, v in pairs if a.kwarg_only}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("most", [3, pytest.param(8, marks=pytest.mark.sweep)])
def test_whatever_torch_returns_passes_the_verifier(most: int) -> None:
    """Elementwise operators, on tensors and numbers of all kinds."""
    dtypes = (torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)
    checked, reader = 0, TypeReader()
    with FakeTensorMode():
        tensors = [torch.empty(size, dtype=dtype) for dtype in dtypes for size in ((4, 3), (3,), (1, 3), ())]
        for name, noted in listed().items():
            target = resolve_op(name) if noted.kind not in ("", "any") else None
            for args, attrs in () if target is None else calls(target._schema, tensors, most):
                result = None
                with contextlib.suppress(Exception):
                    result = target(*args, **attrs)
                if isinstance(result, torch.Tensor):
                    graph = Graph()
                    given = [graph.add_input(reader.type_of(v)) if isinstance(v, torch.Tensor) else v for v in args]
                    known = {key: v for key, v in attrs.items() if isinstance(v, (int, float, complex))}
                    graph.add(name, given, [reader.type_of(result)], attrs=known)
                    found = violation(graph)
                    assert found is None or "rule operators" not in found, (name, args, attrs, found)
                    checked += 1
    assert checked > 60 * most


def violation(graph: Graph) -> str | None:
    """Violation of a graph, in words."""
    try:
        verify(graph)
    except VerifyError as error:
        return str(error)
    return None
