"""``.pgir`` text: every graph prints to it deterministically, and it parses back to an equal graph.

    Graph ── print.py ──► text ── parse.py ──► Graph

Names are quoted, and tokens read, as in every other text of PyGraph's (``pygraph.text``).

Symbolic expressions are written and read by ``pygraph.ir.dims``. Nothing in a text is ever evaluated as Python.
"""
