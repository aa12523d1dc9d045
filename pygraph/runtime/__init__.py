"""Regions of compiled programs: captured, compared with an uncaptured run, replayed at patched addresses.

``region`` is the way in, ``driver`` and ``recording`` the contract with ``host`` and ``cuda``. The IR is unknown here.
"""
