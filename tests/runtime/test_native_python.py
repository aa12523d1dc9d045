"""What the native halves take from Python and give back: numbers in range, errors of their own, nothing leaked."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch

from pygraph.runtime.host import build


@pytest.fixture(scope="module")
def native() -> Any:
    return build.load()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((1, 2), TypeError),
        (("x",), TypeError),
        ((None,), TypeError),
        ((1.5,), TypeError),
        ((-1,), OverflowError),
        ((1 << 64,), OverflowError),
    ],
)
def test_an_argument_that_does_not_fit(native: Any, arguments: tuple[object, ...], error: type[Exception]) -> None:
    graph = native.HostGraph(0)
    with pytest.raises(error):
        graph.add_fresh(*arguments)
    with pytest.raises(error):
        native.HostGraph(*arguments)


def test_what_is_no_tensor_dtype_generator_or_operator(native: Any) -> None:
    with pytest.raises(TypeError, match="tensor"):
        native.storage_base(3)
    with pytest.raises(TypeError, match="dtype"):
        native.tensor_at(0, 8, [1], [1], "float32", 0)
    with pytest.raises(TypeError, match="generator"):
        native.exchange_state(None, torch.zeros(1), None)
    with pytest.raises(TypeError, match="another type"):
        native.HostGraph(0).add_operator(native.HostGraph(0), [], [])
    with pytest.raises(TypeError, match="names"):
        native.HostGraph(workspace=0)
    with pytest.raises(TypeError, match="sequence"):
        native.tensor_at(0, 8, 1, [1], torch.float32, 0)


def test_a_tensor_of_a_subclass_and_a_parameter_are_tensors(native: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert native.storage_base(parameter) == parameter.data_ptr()
    subclass = torch.zeros(3).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert native.storage_base(subclass) == subclass.data_ptr()


def test_kinds_have_names(native: Any) -> None:
    assert [kind.name for kind in native.OutputKind] == ["ARGUMENT", "VIEW", "FRESH", "OBJECT", "SAME"]


def test_a_bound_method_keeps_its_object_and_nothing_else_does(native: Any) -> None:
    graph = native.HostGraph(0)
    alive, replay = weakref.ref(graph), graph.replay
    del graph
    assert replay([]) is None or replay([]) == []
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


def test_references_are_given_back(native: Any) -> None:
    value, other = object(), object()
    before = sys.getrefcount(value), sys.getrefcount(other), sys.getrefcount(native.HostGraph), sys.getrefcount(None)
    for _ in range(200):
        graph = native.HostGraph(0)
        graph.add_value_argument(value)
        graph.add_output(native.OutputKind.ARGUMENT, 0, 0, [], [], None, None)
        graph.add_output(native.OutputKind.OBJECT, 0, 0, [], [], None, other)
        graph.set_order([], False)
        assert graph.replay([value]) == [value, other]
        assert graph.replay([other]) is None
        assert graph.replay([]) is None
        with pytest.raises(TypeError):
            graph.add_value_argument()
    del graph
    after = sys.getrefcount(value), sys.getrefcount(other), sys.getrefcount(native.HostGraph), sys.getrefcount(None)
    assert [b - a for a, b in zip(before[:3], after[:3], strict=True)] == [0, 0, 0]
    assert abs(after[3] - before[3]) < 100


def test_a_tensor_is_given_back(native: Any) -> None:
    tensor = torch.zeros(3)
    call = native.OperatorCall("aten::add", "Tensor", (tensor, tensor), {})
    (first, second) = call.tensors()
    assert first is tensor
    assert second is tensor
    held = weakref.ref(tensor)
    del tensor, call, first, second
    gc.collect()
    assert held() is None
