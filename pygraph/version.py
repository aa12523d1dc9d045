"""The version of PyGraph, where every module can read it without importing the package's other names."""

__all__ = ["__version__"]

__version__ = "0.1.0"
