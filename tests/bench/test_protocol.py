"""What is said between the ends of a benchmark."""

from __future__ import annotations

import pytest

from pygraph.bench.protocol import gist

CUDA = """AcceleratorError: CUDA error: operation failed due to a previous error during capture
CUDA kernel errors might be reported later.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CUDA, CUDA.splitlines()[0]),
        ("ValueError: no\n", "ValueError: no"),
        ("it ended with signal 11: loading\nSegmentation fault", "Segmentation fault"),
        ("it ended with status 3", "it ended with status 3"),
        ("it closed its pipe: a\nb", "b"),
        ("", ""),
    ],
)
def test_the_gist_of_an_error(error: str, line: str) -> None:
    assert gist(error) == line
