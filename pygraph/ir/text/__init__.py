"""``.pgir`` text: every graph prints to it deterministically, and the text parses back to an equal graph.

    Graph ── print.py ──► text ── parse.py ──► Graph

Names are quoted, and tokens read, as in all other texts of PyGraph (``pygraph.text``).

Symbolic expressions are written and read by ``pygraph.ir.dims``. Nothing in a text is ever evaluated as Python.
"""
