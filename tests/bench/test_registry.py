"""Finding workloads: by name, domain or kind; what is not installed; suites that are none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pygraph.bench import suite
from pygraph.bench.registry import chosen, missing, workloads
from pygraph.bench.suite import WORKLOADS
from pygraph.bench.workload import Compile, Step, Workload


def build(compile: Compile, device: str) -> Step:
    return lambda: None


def workload(name: str, **more: object) -> Workload:
    return Workload(name, "inference", "none", "", build, build, **more)  # type: ignore[arg-type]


def test_every_workload_is_known_by_its_name_and_complete() -> None:
    assert workloads() == WORKLOADS
    assert len(WORKLOADS) == sum(len(module.WORKLOADS) for module in suite._MODULES), "two have one name"
    for name, each in WORKLOADS.items():
        assert name == each.name == name.lower().replace("_", "-")
        assert each.kind in ("inference", "training", "decode")
        assert each.about
        assert each.calls >= 1
        assert 0 < each.tolerance < 1
    assert {"addresses-fresh-300", "addresses-stable-300"} <= set(WORKLOADS)
    assert len(WORKLOADS) >= 25


def test_names_domains_and_kinds_choose() -> None:
    names = [each.name for each in chosen(["addresses", "addresses-fresh-300"], WORKLOADS)]
    assert names == ["addresses-stable-300", "addresses-fresh-300"]
    assert {each.kind for each in chosen(["decode"], WORKLOADS)} == {"decode"}
    assert chosen([], WORKLOADS) == list(WORKLOADS.values())


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(
        ValueError, match=r"no workload is called 'adresses-fresh-300'; did you mean 'addresses-fresh-300'"
    ):
        chosen(["adresses-fresh-300"], WORKLOADS)
    with pytest.raises(ValueError, match="'0'; there are "):
        chosen(["0"], WORKLOADS)


def test_packages_that_are_missing_are_named() -> None:
    assert missing(workload("a", packages=("torch", "no_such_package"))) == ["no_such_package"]
    assert missing(workload("a")) == []


def test_a_module_of_ones_own_is_a_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_suite")
    monkeypatch.setitem(sys.modules, "own_suite", module)
    with pytest.raises(ValueError, match="'own_suite' is no suite"):
        workloads("own_suite")
    module.WORKLOADS = (workload("a"), workload("b"))  # type: ignore[attr-defined]
    assert list(workloads("own_suite")) == ["a", "b"]
    module.WORKLOADS = (workload("a"), workload("a"))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="two workloads are called a"):
        workloads("own_suite")
    with pytest.raises(ValueError, match=r"'no\.such\.module' is no suite"):
        workloads("no.such.module")
