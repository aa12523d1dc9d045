"""Tools to test passes with, those of PyGraph and your own.

- ``filecheck``: a ``.pgir`` file with its expectations in comments is a test
- ``strategies``: hypothesis strategies for graphs with views, mutation, random numbers, collectives and barriers; needs
  hypothesis, which PyGraph itself does not
"""

from pygraph.testing.filecheck import CheckFailure, check_file, check_text

__all__ = ["CheckFailure", "check_file", "check_text"]
