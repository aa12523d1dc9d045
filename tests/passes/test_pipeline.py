"""Pipelines: their text, what is refused and where, and passes by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pygraph.errors import OptionError, ParseError
from pygraph.ir import Graph
from pygraph.passes import Pass, PassContext, PassResult, Registry, default_registry, pipeline, print_pipeline
from pygraph.passes.pipeline import BUILT_IN, GROUP, option_texts, path_of


@dataclass(frozen=True)
class Plain(Pass):
    name: ClassVar[str] = "plain"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class Rich(Plain):
    """Every kind of option."""

    name: ClassVar[str] = "rich"

    max_regions: int | None = None
    scale: float = 1.0
    on: bool = False
    label: str = "plain-word"
    policy: Literal["auto", "all", 3] = "auto"
    sizes: tuple[int, ...] = ()
    pair: tuple[str, float] = ("a", 0.5)
    nested: tuple[tuple[int, ...], ...] = field(default_factory=tuple)
    maybe: str | float | None = None


@dataclass(frozen=True)
class Demanding(Plain):
    name: ClassVar[str] = "demanding"

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size cannot be negative")


REGISTRY = Registry(points=())
for _cls in (Plain, Rich, Demanding):
    REGISTRY.register(_cls)


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    return pipeline.parse_pipeline(text, registry=REGISTRY)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", ()),
        ("rich{max-regions=4},plain", (Rich(max_regions=4), Plain())),
        ("rich{scale=1e-05}", (Rich(scale=1e-05),)),
        ("rich{on=true,label=other-word}", (Rich(on=True, label="other-word"),)),
        ('rich{label="not a word, {x=1}"}', (Rich(label="not a word, {x=1}"),)),
        ('rich{label="none"}', (Rich(label="none"),)),
        ("rich{policy=all}", (Rich(policy="all"),)),
        ("rich{sizes=[1,-2,3]}", (Rich(sizes=(1, -2, 3)),)),
        ("rich{nested=[[1,2],[]]}", (Rich(nested=((1, 2), ())),)),
        ('rich{maybe="2.0"}', (Rich(maybe="2.0"),)),
    ],
)
def test_canonical_text_parses_and_prints_back(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse_pipeline(text) == passes
    assert print_pipeline(passes) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" plain ,\n rich { } ", "plain,rich"),
        ("rich{ scale = 2 , on = true }", "rich{scale=2.0,on=true}"),
        ("rich{on=true,max-regions=4}", "rich{max-regions=4,on=true}"),
        ("rich{max-regions=none,scale=1.0,label=plain-word}", "rich"),
        ('rich{label="kebab-word"}', "rich{label=kebab-word}"),
        ("rich{label=snake_word}", 'rich{label="snake_word"}'),
        ("rich{pair=[b,2]}", "rich{pair=[b,2.0]}"),
        ("demanding{size=+3}", "demanding{size=3}"),
    ],
)
def test_other_spellings_become_canonical(text: str, canonical: str) -> None:
    assert print_pipeline(parse_pipeline(text)) == canonical


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("plain,", "1:7", "the text ends too early: expected a name"),
        ("plain rich", "1:7", "unexpected 'rich'"),
        ("rich{on=true", "1:13", "the text ends"),
        ("rich{sizes=[1,,2]}", "1:15", "unexpected ','"),
        ("plain,\nrich{scale=4x}", "2:13", "unexpected 'x'"),
        ("plain;rich", "1:6", "unexpected character ';'"),
        ('rich{label="open}', "1:12", "this string has an unknown escape, or no end"),
        ('rich{label="\\q"}', "1:12", "this string has an unknown escape"),
        ("plian", "1:1", "no pass is called 'plian'; did you mean 'plain'?"),
        ("plain,zzz", "1:7", "no pass is called 'zzz'; known: legality, "),
        ("rich{max-region=4}", "1:6", "pass 'rich' has no option 'max-region'; did you mean 'max-regions'?"),
        ("plain{on=true}", "1:7", "pass 'plain' has no option 'on'; it has no options"),
        ("rich{on=true,on=true}", "1:14", "option 'on' of pass 'rich' is set twice"),
        ("rich{max-regions=4.0}", "1:18", "must be int or none, not 4.0"),
        ("rich{max-regions=true}", "1:18", "must be int or none, not true"),
        ("rich{scale=true}", "1:12", "must be float, not true"),
        ("rich{on=1}", "1:9", "must be bool, not 1"),
        ("rich{label=none}", "1:12", "must be string, not none"),
        ("rich{policy=some}", "1:13", "must be auto or all or 3, not some"),
        ("rich{sizes=1}", "1:12", "must be a list of int, not 1"),
        ("rich{sizes=[1,x]}", "1:12", "must be a list of int, not a list"),
        ("rich{pair=[a]}", "1:11", "must be [string, float], not a list"),
        ("demanding", "1:1", "missing 1 required positional argument: 'size'"),
        ("demanding{size=-1}", "1:1", "size cannot be negative"),
    ],
)
def test_what_cannot_be_read_is_placed_and_underlined(text: str, place: str, reason: str) -> None:
    with pytest.raises((ParseError, OptionError)) as caught:
        parse_pipeline(text)
    assert str(caught.value).startswith(f"<pipeline>:{place}: ")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("^")


FLOATS = st.floats(allow_nan=False)
RICH = st.builds(
    Rich,
    max_regions=st.none() | st.integers(),
    scale=FLOATS,
    on=st.booleans(),
    label=st.text() | st.sampled_from(["true", "none", "inf", "-inf", "nan", "4", "a-b", "a--b", ""]),
    policy=st.sampled_from(["auto", "all", 3]),
    sizes=st.lists(st.integers()).map(tuple),
    pair=st.tuples(st.text(), FLOATS),
    nested=st.lists(st.lists(st.integers(), max_size=3).map(tuple), max_size=3).map(tuple),
    maybe=st.none() | FLOATS | st.text() | st.sampled_from(["none", "inf", "nan"]),
)


@given(st.lists(RICH | st.just(Plain()) | st.builds(Demanding, st.integers(min_value=0)), max_size=4).map(tuple))
def test_parse_undoes_print(passes: tuple[Pass, ...]) -> None:
    text = print_pipeline(passes)
    assert parse_pipeline(text) == passes
    assert print_pipeline(parse_pipeline(text)) == text


@given(st.text(alphabet='rich{}[]=,"\\ \n4.-_:on', max_size=30) | st.text(max_size=30))
@example("rich{maybe=nan}")
@example('rich{label="\u2028"}')
@example("rich{scale=" + "9" * 400 + "}")
def test_any_text_parses_or_is_refused_with_a_place(text: str) -> None:
    try:
        canonical = print_pipeline(parse_pipeline(text))
    except (ParseError, OptionError) as error:
        place = re.match(r"<pipeline>:(\d+):(\d+): ", str(error))
        found = (int(place[1]), int(place[2])) if place else (0, 0)
        assert 1 <= found[0] <= text.count("\n") + 1
        assert 1 <= found[1] <= len(text) + 1
    else:
        assert print_pipeline(parse_pipeline(canonical)) == canonical


# -- names -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OtherPlain(Plain):
    """Goes by the name of another pass."""


def point(name: str, attribute: str, module: str = __name__) -> EntryPoint:
    return EntryPoint(name, f"{module}:{attribute}", GROUP)


def test_built_in_passes_are_found() -> None:
    assert Registry(points=()).names() == tuple(BUILT_IN)
    assert [default_registry.lookup(name).name for name in BUILT_IN] == list(BUILT_IN)


def test_an_installed_pass_is_found_and_described() -> None:
    registry = Registry([point("rich", "Rich")])
    assert registry.lookup("rich") is Rich
    assert registry.names() == (*BUILT_IN, "rich")
    assert path_of(Rich) == f"{__name__}:Rich"
    texts = list(option_texts(Rich))
    assert texts[0] == ("max-regions", "int or none", "none")
    assert texts[5:7] == [("sizes", "a list of int", "[]"), ("pair", "[string, float]", "[a,0.5]")]
    assert list(option_texts(Demanding)) == [("size", "int", None)]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (point("broken", "X", "no_such_module_here"), "ModuleNotFoundError"),
        (point("broken", "Missing"), "AttributeError"),
        (point("broken", "REGISTRY"), "is no subclass of pygraph.passes.Pass"),
        (point("broken", "Rich"), "calls itself 'rich'"),
    ],
)
def test_a_broken_installed_pass_is_reported_and_breaks_no_other(broken: EntryPoint, reason: str) -> None:
    registry = Registry([broken, point("rich", "Rich")])
    with pytest.raises(OptionError, match=f"pass 'broken'.*{re.escape(reason)}"):
        registry.lookup("broken")
    assert registry.lookup("rich") is Rich


def test_two_passes_of_one_name_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    points = [point("plain", "Plain"), point("plain", "OtherPlain"), point("partitioning", "Plain")]
    registry = Registry(points)
    with pytest.raises(OptionError, match=f"several passes are called 'plain': {__name__}:Plain, {__name__}:Other"):
        registry.lookup("plain")
    assert registry.lookup("partitioning") is not Plain
    assert "entry point partitioning" in caplog.text
    assert "is ignored: the pass is built in" in caplog.text
    with pytest.raises(OptionError, match="the name 'plain' is taken by"):
        REGISTRY.register(OtherPlain)
    with pytest.raises(OptionError, match="the name 'partitioning' is taken by"):
        REGISTRY.register(dataclass(frozen=True)(type("Mine", (Plain,), {"name": "partitioning"})))


def test_a_class_that_is_defined_again_takes_the_place_of_the_first() -> None:
    def cell() -> type[Pass]:
        return dataclass(frozen=True)(type("Mine", (Plain,), {"name": "mine", "__module__": __name__}))

    registry = Registry(points=())
    first, second = registry.register(cell()), registry.register(cell())
    assert first is not second
    assert registry.lookup("mine") is second


@pytest.mark.parametrize("name", ["Upper", "snake_case", "", "a--b", None])
def test_names_are_kebab_case(name: str | None) -> None:
    odd = dataclass(frozen=True)(type("Odd", (Plain,), {"name": name}))
    with pytest.raises(OptionError, match="needs a kebab-case 'name'"):
        Registry(points=()).register(odd)


def test_classes_that_are_no_passes_are_refused() -> None:
    with pytest.raises(OptionError, match="Undecorated is no frozen dataclass"):
        REGISTRY.register(type("Undecorated", (Plain,), {"name": "undecorated"}))

    @dataclass(frozen=True)
    class Odd(Plain):
        name: ClassVar[str] = "odd"
        table: dict[str, int] | None = None

    with pytest.raises(OptionError, match=r"option 'table' of .*Odd: a dict.* cannot be written in a pipeline"):
        REGISTRY.register(Odd)
