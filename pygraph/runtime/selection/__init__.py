"""Measured selection in place: a region's real calls try its candidates, and the fastest is used from then on.

``selector`` is the way in. Nothing here knows torch, regions or drivers: time and the device come as callables.
"""
