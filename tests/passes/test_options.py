"""Pipeline text: what parses, what is refused and where, and that printing is canonical."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pygraph.errors import OptionError, ParseError
from pygraph.ir import Graph
from pygraph.passes import pipeline
from pygraph.passes.base import Pass, PassContext, PassResult
from pygraph.passes.pipeline import Registry, print_pass, print_pipeline


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


def parse(text: str) -> tuple[Pass, ...]:
    return pipeline.parse(text, registry=REGISTRY)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", ()),
        ("plain", (Plain(),)),
        ("plain,rich", (Plain(), Rich())),
        ("rich{max-regions=4},plain", (Rich(max_regions=4), Plain())),
        ("rich{scale=2.0}", (Rich(scale=2.0),)),
        ("rich{scale=1e-05}", (Rich(scale=1e-05),)),
        ("rich{scale=inf}", (Rich(scale=float("inf")),)),
        ("rich{scale=-inf}", (Rich(scale=-float("inf")),)),
        ("rich{on=true,label=other-word}", (Rich(on=True, label="other-word"),)),
        ('rich{label="not a word, {x=1}"}', (Rich(label="not a word, {x=1}"),)),
        ('rich{label="none"}', (Rich(label="none"),)),
        ('rich{label="cuda:0"}', (Rich(label="cuda:0"),)),
        ("rich{policy=all}", (Rich(policy="all"),)),
        ("rich{policy=3}", (Rich(policy=3),)),
        ("rich{sizes=[1,-2,3]}", (Rich(sizes=(1, -2, 3)),)),
        ("rich{pair=[b,2.0]}", (Rich(pair=("b", 2.0)),)),
        ("rich{nested=[[1,2],[]]}", (Rich(nested=((1, 2), ())),)),
        ("rich{maybe=2.0}", (Rich(maybe=2.0),)),
        ("rich{maybe=word}", (Rich(maybe="word"),)),
        ('rich{maybe="2.0"}', (Rich(maybe="2.0"),)),
        ("demanding{size=3}", (Demanding(3),)),
    ],
)
def test_canonical_text_parses_and_prints_back(text: str, passes: tuple[Pass, ...]) -> None:
    assert parse(text) == passes
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
    assert print_pipeline(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("plain,", (1, 7), "the text ends where a name is expected"),
        (",plain", (1, 1), "expected"),
        ("plain rich", (1, 7), "found 'rich'"),
        ("rich{on=true", (1, 13), "the text ends"),
        ("rich{on=}", (1, 9), "found '}'"),
        ("rich{on}", (1, 8), "expected '='"),
        ("rich{sizes=[1,,2]}", (1, 15), "found ','"),
        ("plain,\nrich{scale=4x}", (2, 13), "found 'x'"),
        ("plain;rich", (1, 6), "unexpected character ';'"),
        ('rich{label="open}', (1, 12), "unexpected character"),
        ('rich{label="\\q"}', (1, 12), "malformed string"),
        ("rich}", (1, 5), "found '}'"),
        ("4", (1, 1), "found '4'"),
    ],
)
def test_malformed_text_is_placed_and_underlined(text: str, place: tuple[int, int], reason: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert (caught.value.span.line, caught.value.span.column) == place
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"<pipeline>:{place[0]}:{place[1]}: ")
    assert str(caught.value).endswith("^")


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("plian", "1:1", "no pass is called 'plian'; did you mean 'plain'?"),
        ("plain,zzz", "1:7", "no pass is called 'zzz'; known: legality, "),
        ("rich{max-region=4}", "1:6", "pass 'rich' has no option 'max-region'; did you mean 'max-regions'?"),
        ("rich{max_regions=4}", "1:6", "has no option 'max_regions'; did you mean 'max-regions'?"),
        ("plain{on=true}", "1:7", "pass 'plain' has no option 'on'; it has no options"),
        ("rich{on=true,on=true}", "1:14", "option 'on' of pass 'rich' is set twice"),
        ("rich{max-regions=many}", "1:18", "must be int or none, not many"),
        ("rich{max-regions=4.0}", "1:18", "must be int or none, not 4.0"),
        ("rich{max-regions=true}", "1:18", "must be int or none, not true"),
        ("rich{scale=true}", "1:12", "must be float, not true"),
        ("rich{on=1}", "1:9", "must be bool, not 1"),
        ("rich{label=3}", "1:12", "must be string, not 3"),
        ("rich{label=none}", "1:12", "must be string, not none"),
        ("rich{policy=some}", "1:13", "must be auto or all or 3, not some"),
        ("rich{sizes=1}", "1:12", "must be a list of int, not 1"),
        ("rich{sizes=[1,x]}", "1:13", "must be a list of int, not a list"),
        ("rich{pair=[a]}", "1:12", "must be [string, float], not a list"),
        ("demanding", "1:1", "missing 1 required positional argument: 'size'"),
        ("demanding{size=-1}", "1:1", "size cannot be negative"),
    ],
)
def test_wrong_names_and_values_are_refused(text: str, place: str, reason: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"<pipeline>:{place}: ")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("^")


def test_a_value_without_text_is_refused() -> None:
    with pytest.raises(OptionError, match="option 'label' of pass 'rich': a set has no text"):
        print_pass(Rich(label={1}))  # type: ignore[arg-type]


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
    assert parse(text) == passes
    assert print_pipeline(parse(text)) == text


@given(st.text(alphabet='rich{}[]=,"\\ \n4.-_:on', max_size=30) | st.text(max_size=30))
@example("rich{maybe=nan}")
@example('rich{label="\u2028"}')
def test_any_text_parses_or_is_refused_with_a_place(text: str) -> None:
    try:
        canonical = print_pipeline(parse(text))
    except (ParseError, OptionError) as error:
        place = re.match(r"<pipeline>:(\d+):(\d+): ", str(error))
        found = (int(place[1]), int(place[2])) if place else (0, 0)
    else:
        assert print_pipeline(parse(canonical)) == canonical
        return
    assert 1 <= found[0] <= text.count("\n") + 1
    assert 1 <= found[1] <= len(text) + 1
