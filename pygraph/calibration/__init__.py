"""Measures a device's model on the machine it runs on, keeps it on disk, and says how far its predictions are off.

``run.calibrate`` measures; ``store.stored_model`` is all that compilations use. The model is ``pygraph.ir.cost``'s.
"""
