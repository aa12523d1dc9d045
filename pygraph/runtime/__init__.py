"""Regions of compiled programs: captured, compared with an uncaptured run, replayed at patched addresses.

``region`` is the way in, ``contract`` and ``recording`` what ``host`` and ``cuda`` answer. The IR is unknown here.
"""
