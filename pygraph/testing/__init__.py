"""Tools for testing passes of PyGraph and of users.

- ``filecheck``: tests that are ``.pgir`` files with expectations in comments
- ``strategies``: hypothesis strategies for graphs with views, mutation, random numbers, collectives and barriers; needs
  hypothesis, which PyGraph itself does not need
"""

from pygraph.testing.filecheck import CheckFailure, check_file, check_text

__all__ = ["CheckFailure", "check_file", "check_text"]
