"""Look-up of passes by name: built in, installed, registered, and what goes wrong with each."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from pygraph.errors import OptionError
from pygraph.ir import Graph, Stage
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.pipeline import BUILT_IN, GROUP, Registry, default_registry


@dataclass(frozen=True)
class Custom(Pass):
    """Do nothing at all.

    More text.
    """

    name: ClassVar[str] = "custom"
    requires: ClassVar[Stage] = Stage.JUDGED

    max_size: int | None = 3
    label: str = "x y"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class Other(Custom):
    name: ClassVar[str] = "custom"


@dataclass
class Thawed:
    name: ClassVar[str] = "thawed"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


HERE = __name__


def test_every_built_in_pass_is_found_under_its_name() -> None:
    registry = Registry(points=())
    assert registry.names() == tuple(BUILT_IN)
    for name in BUILT_IN:
        assert registry.lookup(name).name == name


def test_built_in_passes_are_entry_points_of_the_distribution() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == BUILT_IN


def test_an_installed_pass_is_found_and_described() -> None:
    registry = Registry([point("custom", f"{HERE}:Custom")])
    assert registry.lookup("custom") is Custom
    info = registry.describe()[-1]
    assert (info.name, info.origin, info.summary) == ("custom", f"{HERE}:Custom", "Do nothing at all.")
    assert info.options == (("max-size", "int or none", "3"), ("label", "string", '"x y"'))
    assert (info.requires, info.ensures, info.error) == (Stage.JUDGED, None, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module_here:X", "ModuleNotFoundError"),
        (f"{HERE}:Missing", "AttributeError"),
        (f"{HERE}:Thawed", "is no subclass of pygraph.passes.Pass"),
        (f"{HERE}:Custom", "calls itself 'custom'"),
    ],
)
def test_a_broken_installed_pass_is_reported_and_breaks_no_other(value: str, reason: str) -> None:
    registry = Registry([point("broken", value), point("custom", f"{HERE}:Custom")])
    with pytest.raises(OptionError, match="pass 'broken'") as caught:
        registry.lookup("broken")
    assert reason in str(caught.value)
    errors = {info.name: info.error for info in registry.describe()}
    assert reason in (errors["broken"] or "")
    assert errors["custom"] is None
    assert registry.lookup("custom") is Custom


def test_two_installed_passes_of_one_name_are_refused() -> None:
    registry = Registry([point("custom", f"{HERE}:Custom"), point("custom", f"{HERE}:Other")])
    with pytest.raises(OptionError, match=f"several passes are called 'custom': {HERE}:Custom, {HERE}:Other"):
        registry.lookup("custom")
    assert registry.lookup("partitioning").name == "partitioning"


def test_a_name_can_be_registered_once() -> None:
    registry = Registry(points=())
    registry.register(Custom)
    with pytest.raises(OptionError, match="the name 'custom' is taken by"):
        registry.register(Other)


def test_a_class_that_is_defined_again_takes_the_place_of_the_first() -> None:
    def cell() -> type[Custom]:
        @dataclass(frozen=True)
        class Mine(Custom):
            name: ClassVar[str] = "mine"

        return Mine

    registry = Registry(points=())
    first, second = registry.register(cell()), registry.register(cell())
    assert first is not second
    assert registry.lookup("mine") is second


def test_built_in_names_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Mine(Custom):
        name: ClassVar[str] = "partitioning"

    registry = Registry([point("partitioning", f"{HERE}:Custom")])
    with caplog.at_level(logging.WARNING, "pygraph"):
        assert registry.lookup("partitioning") is not Custom
        registry.names()
    with pytest.raises(OptionError, match="the name 'partitioning' is taken by"):
        registry.register(Mine)
    assert "is ignored: the pass is built in" in caplog.text


@pytest.mark.parametrize("name", ["Upper", "snake_case", "", "a--b", None])
def test_names_are_kebab_case(name: str | None) -> None:
    cls = type("Odd", (Custom,), {"name": name, "__dataclass_params__": Custom.__dataclass_params__})
    with pytest.raises(OptionError, match="needs a kebab-case 'name'"):
        Registry(points=()).register(cls)


def test_a_subclass_that_is_no_dataclass_itself_is_refused() -> None:
    class Undecorated(Custom):
        name: ClassVar[str] = "undecorated"

    with pytest.raises(OptionError, match="is no frozen dataclass"):
        Registry(points=()).register(Undecorated)


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(OptionError, match="did you mean 'partitioning'"):
        default_registry.lookup("partitoning")


def test_an_option_that_no_pipeline_can_write_is_refused() -> None:
    @dataclass(frozen=True)
    class Odd(Custom):
        name: ClassVar[str] = "odd"
        table: dict[str, int] | None = None

    with pytest.raises(OptionError, match=r"option 'table' of .*Odd is a dict.* or none, which pipelines cannot write"):
        Registry(points=()).register(Odd)
