"""From torch to the IR: ``lift`` makes a graph of the FX graph that AOTAutograd hands over.

Each operator (``names``) becomes a node with the types of its operands and results (``types``), its effects
(``effects``; ``hops`` for higher-order operators), its cost (``costs``), and the user's source line (``location``).
"""
