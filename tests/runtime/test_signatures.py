"""Signatures tell calls apart: of a reader that knows earlier calls as of one that knows none."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pygraph import compat
from pygraph.runtime import variants
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import Signatures


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, 4))


def resized(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = torch.zeros(3, 4)
    return tensor


def turned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = torch.zeros(4, 4).t()
    return tensor


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = torch.zeros(4, 4, dtype=torch.float64)
    return tensor


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "sizes": resized,
    "strides": turned,
    "dtype": doubled,
    "meta": lambda _: torch.zeros(4, 4, device="meta"),
    "None": lambda _: None,
    "int": lambda _: 4,
    "dimensions": lambda _: torch.zeros(4, 4, 1),
    "one element": lambda _: torch.zeros(1, 4).expand(4, 4),
}
REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "conjugated": lambda _: torch.zeros(4, 4, dtype=torch.complex64).conj(),
    "negated": lambda _: torch._neg_view(torch.zeros(4, 4)),
    "sparse": lambda _: torch.zeros(4, 4).to_sparse(),
    "subclass": lambda t: t.detach().as_subclass(type("Mine", (torch.Tensor,), {})),
    "text": lambda _: "4",
}


def learnt(args: list[Any]) -> Signatures:
    """A reader that has met three calls like ``args``."""
    reader = Signatures()
    for _ in range(3):
        reader.of(args, ())
    return reader


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("at", [0, 2])
def test_an_argument_that_was_the_same_in_many_calls_is_told_apart_once_it_is_not(
    at: int, change: Callable[[torch.Tensor], object]
) -> None:
    args: list[Any] = [parameter(), parameter(), parameter(), 7]
    reader = learnt(args)
    before = reader.of(args, ())
    args[at] = change(args[at])
    after = reader.of(args, ())
    assert after != before
    assert after == Signatures().of(args, ()) == reader.of(args, ())
    args[at] = parameter()
    assert reader.of(args, ()) == before


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_an_argument_that_no_capture_is_made_for_is_refused_after_any_call(
    change: Callable[[torch.Tensor], object],
) -> None:
    plain = [parameter(), torch.zeros(4, 4)]
    reader = learnt(plain)
    for at in (0, 1):
        args = list(plain)
        args[at] = change(args[at])  # type: ignore[call-overload]
        found = reader.of(args, ())
        assert isinstance(found, Refusal)
        assert found.reason == "argument-type"
        assert f"argument {at} is" in found.detail
    assert reader.of(plain, ()) == Signatures().of(plain, ())


@pytest.mark.parametrize("missing", [False, True])
def test_signatures_are_those_of_a_reader_that_knows_no_call(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has no check of many tensors; and of lists of other lengths, and storage offsets."""
    if missing:
        monkeypatch.setattr(compat, "_TensorGuards", compat._Absent("TensorGuards", (), {"path": "TensorGuards"}))
    drawn = random.Random(0)
    pool = [parameter(), torch.zeros(4, 4), torch.zeros(5, 4)[1:], torch.zeros(4, 4).t(), torch.zeros(2)]
    scalars = [1, True, 1.0, 0.0, -0.0, float("nan"), None, 2**70]
    for _ in range(30):
        reader = Signatures()
        steady = [drawn.choice(pool) for _ in range(drawn.randrange(5))]
        for _ in range(12):
            args = [*steady, drawn.choice(pool), drawn.choice(scalars), *drawn.choices(pool, k=drawn.randrange(2))]
            sensitive = frozenset(i for i in range(len(args)) if drawn.random() < 0.2)
            with torch.inference_mode(drawn.random() < 0.2):
                assert reader.of(args, sensitive) == Signatures().of(args, sensitive)


def test_tensors_that_do_not_change_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost of a call that was never seen: no count of calls tells, so the function that reads an argument does."""
    parameters = [parameter() for _ in range(50)]
    reader = Signatures()
    for size in range(3, 6):
        reader.of([*parameters, torch.zeros(size), size], ())
    read = Mock(side_effect=variants._facts)
    monkeypatch.setattr(variants, "_facts", read)
    assert reader.of([*parameters, torch.zeros(9), 9], ()) is not None
    assert read.call_count == 2


def test_a_tensor_that_comes_twice_is_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of many tensors takes none twice."""
    one, other = parameter(), parameter()
    reader = learnt([one, one, other])
    read = Mock(side_effect=variants._facts)
    monkeypatch.setattr(variants, "_facts", read)
    reader.of([one, one, other], ())
    assert read.call_count == 1


@pytest.mark.parametrize("at", [0, 1])
def test_storage_offsets_tell_calls_apart_where_they_count(at: int) -> None:
    args = [torch.zeros(4), torch.zeros(4)]
    moved = list(args)
    moved[at] = torch.zeros(5)[1:]
    reader = learnt(args)
    for sensitive in (frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1})):
        assert (reader.of(args, sensitive) == reader.of(moved, sensitive)) == (at not in sensitive)
