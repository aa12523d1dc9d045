"""``.pgir`` text: every graph prints to it deterministically, and it parses back to an equal graph.

    Graph ── print.py ──► text ── parse.py ──► Graph
              words.py: which names are quoted, and how; reader.py: tokens, and errors that point at them

Symbolic expressions are written and read by ``pygraph.ir.dims``. Nothing in a text is ever evaluated as Python.
"""
