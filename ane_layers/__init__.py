"""Transformer layers for Apple's Neural Engine, and what is needed to port a model with them."""

__version__ = "0.1.0"
