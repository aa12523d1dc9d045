"""What a coordinator knows of programs: how many calls are compared, and which script is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.bench.plan import CALLS_COMPARED, program_of_script, program_of_workload, scripts_in
from pygraph.bench.registry import workloads
from pygraph.bench.workload import Workload

OURS = [workload for workload in workloads().values() if not workload.packages]


def sizes_in(workload: Workload, steps: int) -> set[Any]:
    """The sizes of all tensors that what is compiled is called with, by call."""
    seen = set()

    def sizes(given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return tuple(given.shape)
        return tuple(map(sizes, given)) if isinstance(given, (list, tuple)) else None

    def compile(target: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.add((sizes(args), sizes(list(kwargs.values()))))
            return target(*args, **kwargs)

        return call

    step = workload.tiny(compile, "cpu")
    for _ in range(steps):
        step()
    return seen


@pytest.mark.parametrize("workload", OURS, ids=lambda workload: workload.name)
def test_results_are_compared_until_each_size_was_replayed(workload: Workload) -> None:
    """A size is run, captured when it comes again, and replayed from then on: there must be replays to compare."""
    count = len(sizes_in(workload, 5))
    assert workload.turns >= count
    assert program_of_workload(workload, ["eager"]).compared >= max(CALLS_COMPARED, 3 * count)


def test_a_script_is_told_from_others_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("1")
    made = [program_of_script(str(path), args, ["eager"]) for args in ([], ["--epochs", "1"])]
    first, second = scripts_in(made[:1]), scripts_in(made[1:])
    path.write_text("2")
    assert len({str(each) for each in (first, second, scripts_in(made[:1]))}) == 3
    assert scripts_in([program_of_workload(OURS[0], ["eager"])]) == []
