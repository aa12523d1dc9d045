"""Adapters for packages that cut graphs, or compile, by interfaces of their own. Each module needs its package."""
