"""What a saved program costs, read from its own files."""

from ane_layers.analysis.counts import inspect

__all__ = ["inspect"]
