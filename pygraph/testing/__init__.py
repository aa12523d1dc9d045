"""Tools to test passes with, those of PyGraph and your own.

``filecheck``    a ``.pgir`` file with its expectations in comments is a test
``strategies``   hypothesis strategies for graphs with views, mutation, random numbers, collectives and barriers

    import pytest
    from hypothesis import given
    from pygraph.ir.interp import interpret
    from pygraph.passes import PassManager
    from pygraph.testing.filecheck import check_file
    from pygraph.testing.strategies import operator_graphs

    @given(operator_graphs())
    def test_my_pass_keeps_the_meaning(graph):
        before = graph.clone()
        PassManager([MyPass()], check="full").run(graph)
        assert interpret(graph) == interpret(before)

    def test_my_pass_as_text():
        check_file("tests/my_pass.pgir")

``strategies`` needs hypothesis, which PyGraph itself does not.
"""

from pygraph.testing.filecheck import CheckFailure, check_file, check_text

__all__ = ["CheckFailure", "check_file", "check_text"]
