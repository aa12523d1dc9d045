"""Regions of compiled programs: captured, compared with an uncaptured run, replayed at patched addresses.

``region`` is the entry point. ``host`` and ``cuda`` implement ``contract`` and make recordings. The IR is unknown here.
"""
