"""From torch to the IR: ``lift`` makes a graph of the FX graph that AOTAutograd hands over.

Each operator (``names``) becomes a node with the types of its operands and results (``types``), what it does besides
computing (``effects``; ``hops`` for higher-order operators), what it costs (``costs``), and the user's line that wrote
it (``location``).
"""
