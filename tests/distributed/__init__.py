"""Several processes that run compiled programs together, on the host driver and ``gloo``."""
