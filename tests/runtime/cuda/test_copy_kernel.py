"""The kernel that small copies become: every byte is written once, and none beside, whatever the alignment and size."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import copies
from pygraph.runtime.cuda.copies import _blocks
from tests.runtime.cuda.ptx import Memory, run

PTX = Path(copies.__file__).with_name("copy.ptx")
TO, FROM, ROOM = 0x7F00_0000_0000, 0x7E00_0000_0000, 64


def copied(to: int, source: int, nbytes: int, blocks: int, threads: int) -> None:
    """Run the kernel for two places that begin ``to`` and ``source`` bytes behind where memory does, and check it."""
    data = bytes((7 * i + 1) % 251 for i in range(ROOM + nbytes))
    before = bytes(ROOM + nbytes)
    # What is read ends with the operand; around what is written there is memory, so that stray bytes show.
    memory = Memory(source=(FROM + source, data[source : source + nbytes]), target=(TO, before))
    run(PTX.read_text(), memory, blocks, threads, to=TO + to, **{"from": FROM + source}, nbytes=nbytes)
    wrong = {at - TO: times for at, times in memory.written.items() if not to <= at - TO < to + nbytes or times > 1}
    assert not wrong, f"written beside, or more than once: {wrong}"
    found = bytes(memory.bytes[TO + i] for i in range(len(before)))
    expected = before[:to] + data[source : source + nbytes] + before[to + nbytes :]
    assert found == expected
    assert len(memory.written) == nbytes


@settings(deadline=None, max_examples=60)
@given(
    to=st.integers(0, 17),
    source=st.integers(0, 17),
    nbytes=st.integers(0, 200),
    blocks=st.integers(1, 3),
    threads=st.integers(1, 40),
)
def test_each_byte_is_copied_once(to: int, source: int, nbytes: int, blocks: int, threads: int) -> None:
    copied(to, source, nbytes, blocks, threads)


@pytest.mark.parametrize("shift", [0, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [1, 3, 4, 15, 16, 17, 31, 32, 33, 100, 1000])
def test_places_that_are_aligned_alike(shift: int, nbytes: int) -> None:
    copied(shift, 16 - shift, nbytes, 1, 8)
    copied(shift, shift, nbytes, 2, 3)


@pytest.mark.parametrize(
    ("to", "source", "unit"), [(0, 0, 16), (16, 48, 16), (4, 16, 4), (8, 8, 4), (0, 2, 1), (3, 3, 1)]
)
@pytest.mark.parametrize("nbytes", [1, 16, 100, 4096, 4097, 65535, 65536])
def test_there_are_threads_for_every_unit(to: int, source: int, unit: int, nbytes: int) -> None:
    """So that each thread copies once, and none is idle in more than one block."""
    blocks = _blocks(TO + to, FROM + source, nbytes)
    assert (blocks - 1) * 256 * unit < nbytes <= blocks * 256 * unit
    if nbytes <= 100:
        copied(to, source, nbytes, blocks, 256)


def test_a_whole_block_of_wide_copies() -> None:
    copied(0, 0, 4096 + 5, _blocks(TO, FROM, 4096 + 5), 256)


def test_it_comes_with_the_package() -> None:
    settings_of_project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (listed,) = [line for line in settings_of_project.splitlines() if line.startswith("pygraph = [")]
    assert '"**/*.ptx"' in listed


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
def test_it_assembles(architecture: str, tmp_path: Path) -> None:
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("there is no ptxas")
    made = subprocess.run([assembler, f"-arch={architecture}", PTX, "-o", tmp_path / "copy.cubin"], capture_output=True)
    assert made.returncode == 0, made.stderr.decode()
