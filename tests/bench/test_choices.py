"""Decisions that stand for all processes, the right to be alone on the GPU, and how sides compare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pygraph.bench.choices import Choices, QuietGpu, choice_notes, counted
from tests.bench.fakes import free

PROCESS = """
import sys, time
from pathlib import Path
from pygraph.bench.choices import QuietGpu
folder, name = Path(sys.argv[1]), sys.argv[2]
quiet = QuietGpu(folder / "lock")
(folder / f"{name}.ready").touch()
while len(list(folder.glob("*.ready"))) < 2:
    time.sleep(0.01)
for _ in range(3):
    with quiet.held(), quiet.held():
        with open(folder / "log", "a") as log:
            print(name, "in", file=log)
        time.sleep(0.1)
        with open(folder / "log", "a") as log:
            print(name, "out", file=log)
"""


def started(text: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", text, *args])


def test_what_was_decided_first_stands_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "program" / "choices.json"
    one, other = Choices(path), Choices(path)
    assert one.get("kernel") is None
    assert one.put("kernel", "XBLOCK=8") == "XBLOCK=8"
    assert other.put("kernel", "XBLOCK=16") == "XBLOCK=8"
    assert other.get("kernel") == "XBLOCK=8"
    assert json.loads(path.read_text()) == {"kernel": "XBLOCK=8"}


def test_a_process_that_is_killed_leaves_what_it_had_decided(tmp_path: Path) -> None:
    text = """
import os, signal, sys
from pathlib import Path
from pygraph.bench.choices import Choices
choices = Choices(Path(sys.argv[1]))
choices.put("first", 1)
choices.put("second", 2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert started(text, str(tmp_path / "choices.json")).wait(120) == -signal.SIGKILL
    choices = Choices(tmp_path / "choices.json")
    assert (choices.get("first"), choices.get("second")) == (1, 2)
    assert choices.put("third", 3) == 3


def test_many_deciding_at_once_lose_nothing(tmp_path: Path) -> None:
    choices = [Choices(tmp_path / "choices.json") for _ in range(4)]

    def decide(number: int) -> None:
        for key in range(20):
            choices[number].put(f"{number} {key}", key)

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(json.loads((tmp_path / "choices.json").read_text())) == 80


def test_two_processes_are_never_alone_together(tmp_path: Path) -> None:
    processes = [started(PROCESS, str(tmp_path), name) for name in ("a", "b")]
    assert [process.wait(120) for process in processes] == [0, 0]
    log = (tmp_path / "log").read_text().splitlines()
    assert len(log) == 12
    for entered, left in zip(log[::2], log[1::2], strict=True):
        assert entered.split() == [left.split()[0], "in"]


def test_the_lock_goes_with_the_process_that_held_it(tmp_path: Path) -> None:
    text = """
import sys, time
from pathlib import Path
from pygraph.bench.choices import QuietGpu
with QuietGpu(Path(sys.argv[1])).held():
    Path(sys.argv[1] + ".held").touch()
    time.sleep(600)
"""
    process = started(text, str(tmp_path / "lock"))
    while not (tmp_path / "lock.held").exists():
        assert process.poll() is None
        time.sleep(0.02)
    assert not free(tmp_path / "lock")
    process.kill()
    process.wait()
    with QuietGpu(tmp_path / "lock").held():
        assert not free(tmp_path / "lock")
    assert free(tmp_path / "lock")


def test_another_thread_of_the_process_may_enter(tmp_path: Path) -> None:
    """As that of a backward, for which the call that holds the lock waits."""
    quiet, entered = QuietGpu(tmp_path / "lock"), threading.Event()

    def backward() -> None:
        with quiet.held():
            entered.set()

    with quiet.held():
        threading.Thread(target=backward, daemon=True).start()
        assert entered.wait(30)
        assert not free(tmp_path / "lock")
    assert free(tmp_path / "lock")


def test_in_a_pause_others_may_have_it_unless_it_is_held_within(tmp_path: Path) -> None:
    quiet, found = QuietGpu(tmp_path / "lock"), []
    with quiet.held():
        quiet.pause()
        found.append(free(tmp_path / "lock"))
        with quiet.held():
            found.append(free(tmp_path / "lock"))
        found.append(free(tmp_path / "lock"))
        quiet.resume()
        found.append(free(tmp_path / "lock"))
    assert found == [True, False, True, False]
    quiet.pause()
    quiet.resume()
    assert free(tmp_path / "lock")


def test_a_process_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    with QuietGpu(tmp_path / "lock").held():
        child = os.fork()
        if not child:
            time.sleep(600)
    try:
        assert free(tmp_path / "lock")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("other", "counts", "note"),
    [
        ({"a": "8", "b": "4"}, {"shared": 2, "own": 0}, None),
        ({"a": "8"}, {"shared": 1, "own": 0}, None),
        (
            {"a": "8", "c": "2"},
            {"shared": 1, "own": 1},
            "pygraph: 1 of 2 configurations of kernels are not default's, which has no such kernels",
        ),
        (
            {"a": "16", "c": "2"},
            {"shared": 0, "own": 2},
            "pygraph: 2 of 2 configurations of kernels are not default's: 1 of the same kernels",
        ),
    ],
)
def test_sides_are_compared_with_the_first_one(other: dict[str, str], counts: object, note: str | None) -> None:
    chosen = {"default": {"a": "8", "b": "4"}, "pygraph": other}
    assert counted(chosen) == {"default": {"shared": 2, "own": 0}, "pygraph": counts}
    assert choice_notes(chosen) == ([] if note is None else [note])
    assert counted({}) == {}
    assert choice_notes({}) == []
