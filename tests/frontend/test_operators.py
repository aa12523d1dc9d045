"""Operators by name: the table that graphs are verified by without torch, and what torch adds where it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pygraph.errors import VerifyError
from pygraph.frontend.names import FrontendError, resolve_op
from pygraph.frontend.operators import signature
from pygraph.ir import parse_graph, verify
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
