"""Adapters for packages with their own interfaces for compilation or graph capture. Each module needs its package."""
