"""``pygraph explain`` under torchrun: rank 0 reports for all, ranks differ or end, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pygraph.report import ranks
from pygraph.report.facts import to_json
from pygraph.report.ranks import Ranks, compared
from pygraph.report.text import render_text
from pygraph.runtime.variants import State
from tests import forked
from tests.distributed.processes import ENVIRONMENT, ONE_THREAD
from tests.report.samples import failed_report, full_report

SECONDS = 240
"""Until a torchrun that waits for something is given up; less than rank 0 waits for the others."""

HEAD = """\
import multiprocessing, os, sys, time, torch
from torch import distributed

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def plain(x):
    return torch.relu(x) + 1

def reads(x):
    return torch.relu(x) * int(x.sum(0).argmax())

def run(fn, rows=2, calls=4):
    options = {"passes": "legality,placement,partitioning,indirection", "inductor": {"fallback_by_default": True}}
    options["cache_dir"] = None  # a rank that finds what another one has proven replays a call earlier
    ours = torch.compile(fn, backend="pygraph", options=options, dynamic=False)
    for _ in range(calls):
        ours(torch.ones(rows, 4))

"""


def launch(folder: Path, script: str, *options: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Two ranks of ``pygraph explain`` with ``options`` on HEAD and ``script``, under torchrun."""
    (folder / "net.py").write_text(HEAD + script)
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", "-m", "pygraph"]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", *run, "explain", "net.py", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


def forks(folder: Path, script: str, *options: str) -> list[tuple[int, str]]:
    """Status and output of the same two ranks, started as torchrun does, without its process and imports."""
    from torch.distributed import TCPStore

    (folder / "net.py").write_text(HEAD + script)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environ = {**os.environ, **ENVIRONMENT, **agent, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environ |= {"TORCHELASTIC_RESTART_COUNT": "0"}
    code = f"{ONE_THREAD}; import os, sys; os.chdir(sys.argv.pop(1)); {forked.module('pygraph')}"
    each = [
        forked.start(
            code,
            *(folder, "explain", "net.py", *options),
            env={**environ, "RANK": str(rank)},
            out=folder / f"out{rank}",
            err=folder / f"err{rank}",
        )
        for rank in range(2)
    ]
    return [(forked.ended(process, SECONDS), (folder / f"out{rank}").read_text()) for rank, process in enumerate(each)]


def told(output: str) -> str:
    """The section on ranks of the report on stdout, of which there is one."""
    before, *after = output.split("\nRanks\n")
    assert (len(after), before.count("  coverage ")) == (1, 1), output
    return " ".join(after[0].split())


@pytest.mark.sweep
def test_ranks_that_do_the_same_do_not_differ(tmp_path: Path) -> None:
    """Also when the script's process group is gone; a process that it forks is none of the ranks."""
    script = """
distributed.init_process_group("gloo")
run(plain)
distributed.all_reduce(torch.ones(2))
distributed.destroy_process_group()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
time.sleep(0.2)
child.terminate()
child.join()
print("child of", rank, child.exitcode)
"""
    result = launch(tmp_path, script, "--strict")
    assert result.returncode == 0, result.stderr
    assert re.search(r"─ 1 nothing$", told(result.stdout))
    assert "child of 0 -15\n" in result.stdout


def test_one_report_says_what_differs_in_every_format(tmp_path: Path) -> None:
    script = "run(plain, rows=2 + rank, calls=4 + rank)\ntorch._dynamo.config.capture_scalar_outputs = True\n"
    script += "if rank: run(reads)\n"
    (status, shown), other = forks(tmp_path, script, "--json", "all.json", "--html", "all.html", "--strict")
    size = r"graph0_inference: input %\S+ : f32\[3, 4\]@cpu, on rank 0 %\S+ : f32\[2, 4\]@cpu"
    calls = "graph0_inference: region 0: replays 3, on rank 0 2"
    document = json.loads((tmp_path / "all.json").read_text())
    first, second = document["ranks"]
    assert (first["rank"], first["differences"], first["graphs"]) == (0, [], document["graphs"])
    assert [each["name"] for each in second["graphs"]] == ["graph0_inference", "graph1_inference"]
    assert (second["rank"], second["error"], second["summary"]["graphs"]) == (1, None, 2)
    assert re.fullmatch(size, second["differences"][0])
    assert second["differences"][1:] == [calls, "compiled graph1_inference (reads at net.py:10); rank 0 did not"]
    assert (first["incomplete"], second["incomplete"]) == (False, True)
    assert calls in told(shown)
    page = (tmp_path / "all.html").read_text()
    assert "<h3>Ranks</h3>" in page
    assert calls in page
    assert (status, other) == (3, (0, ""))


@pytest.mark.sweep
def test_a_rank_that_fails_is_told_while_rank_0_waits_for_it(tmp_path: Path) -> None:
    script = """
distributed.init_process_group("gloo")
run(plain)
distributed.all_reduce(torch.ones(2))
if rank:
    raise ValueError("on one rank")
distributed.all_reduce(torch.ones(2))
"""
    result = launch(tmp_path, script)
    assert result.returncode == 1
    assert "1 failed: ValueError: on one rank" in told(result.stdout)
    assert result.stderr.count("\nValueError: on one rank\n") == 1
    assert re.search(r"^rank 0: (Traceback|net\.py: .* SIGTERM)", result.stderr, re.MULTILINE)


@pytest.mark.sweep
@pytest.mark.parametrize("more", ["", "time.sleep(120)"])
def test_a_rank_that_dies_is_told_at_once(tmp_path: Path, more: str) -> None:
    """Rank 0 has ended, or is in the middle of its script."""
    script = f"""
run(plain)
if rank:
    while not os.path.exists("ran"):
        time.sleep(0.1)
    time.sleep(2)
    os._exit(7)
open("ran", "w").close()
{more}
"""
    result = launch(tmp_path, script)
    assert result.returncode == 1
    shown = told(result.stdout)
    assert shown.endswith("1 failed: sent no report before it ended")
    assert ("0 failed: net.py: the script exited with status SIGTERM" in shown) is bool(more)


@pytest.mark.sweep
def test_a_rank_may_compile_nothing_and_a_restart_begins_anew(tmp_path: Path) -> None:
    script = "if rank == 0: run(plain)\nelif attempt == 0: sys.exit(4)\n"
    result = launch(tmp_path, script, "--json", "all.json", restarts=1)
    assert result.returncode == 0, result.stderr
    _, other = json.loads((tmp_path / "all.json").read_text())["ranks"]
    assert (other["error"], other["graphs"]) == (None, [])
    assert other["differences"] == ["did not compile graph0_inference (plain at net.py:7)"]


def test_a_document_of_any_size_arrives_and_a_silent_rank_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    monkeypatch.setattr(ranks, "PATIENCE_S", 1.0)
    server = TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=10))
    each = [Ranks(rank, 3, "localhost", server.port, "0") for rank in range(3)]
    document = {"text": random.Random(0).randbytes(3 << 20).hex()}
    each[2].send(document)
    silent, sent = each[0].gather(lambda: False)
    assert sent == document
    assert (silent["error"], silent["summary"]) == ("sent no report within 1 s", None)


def document(*reports: Any, error: str | None = None) -> dict[str, Any]:
    return {**to_json(reports), "error": error, "incomplete": False}


def test_ranks_that_say_the_same_share_a_row_and_devices_have_no_number() -> None:
    """Measurements are no difference between ranks; the reason why a region is not replayed is one."""
    ours, same, other = full_report(), full_report(), full_report()
    assert same.graph is not None
    for report, device in ((ours, 0), (same, 1)):
        assert report.regions[0].record is not None
        report.regions[0].record.notes.append(f"a copy to cuda:{device}")
        report.regions[0].record.orders.clear()
    record = other.regions[0].record
    assert record is not None
    record.state, record.reason = State.UNCAPTURED, "host-read: x.item()"
    ranks = compared([document(each) for each in (ours, same, other, same, other)])
    assert [bool(each["differences"]) for each in ranks] == [False, False, True, False, True]
    assert ranks[2]["differences"] == [
        "graph0_inference: region 0: state uncaptured, on rank 0 replay",
        "graph0_inference: region 0: host-read: x.item()",
        "graph0_inference: region 0: on rank 0 only: a copy to cuda",
    ]
    shown = " ".join(render_text([ours], ranks=ranks).partition("Ranks\n")[2].split())
    assert "1, 3 nothing 2, 4 graph0_inference: region 0: state uncaptured" in shown


def test_graphs_correspond_by_their_origin() -> None:
    """A graph more in the middle makes no others differ."""
    first, given_up = full_report(), failed_report(2)
    _, other = compared([document(first), document(given_up, first)])
    assert other["differences"] == ["compiled graph2_backward (unknown function); rank 0 did not"]
