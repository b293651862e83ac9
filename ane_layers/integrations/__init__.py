"""This library's layers inside other libraries' models. Nothing of theirs is imported before it is asked for."""

from ane_layers.integrations.transformers_attention import replace_attention

__all__ = ["replace_attention"]
