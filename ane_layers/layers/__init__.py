"""Layers: mechanics that any port can use. No model family and no converter is known here.

Shapes in all docstrings: B batch, C channels, S new tokens, T cache length, H query heads, K KV heads, G = H / K query heads per KV head,
D head size.
"""

from ane_layers.layers.attention import (
    GroupedQueryAttention,
    HeadSharing,
    contiguous_heads,
    merge_heads,
    split_heads,
)
from ane_layers.layers.embedding import Embedding
from ane_layers.layers.feed_forward import FusedGatedFeedForward, GatedFeedForward
from ane_layers.layers.head import OutputHead
from ane_layers.layers.kv_cache import KVCache
from ane_layers.layers.linear import Linear, fuse_linears
from ane_layers.layers.masks import MASKED, causal_mask, fold_mask
from ane_layers.layers.norm import RMSNorm
from ane_layers.layers.rotary import RotaryEmbedding, rotary_frequencies, rotate
from ane_layers.layers.softmax import ane_softmax

__all__ = [
    "MASKED",
    "Embedding",
    "FusedGatedFeedForward",
    "GatedFeedForward",
    "GroupedQueryAttention",
    "HeadSharing",
    "KVCache",
    "Linear",
    "OutputHead",
    "RMSNorm",
    "RotaryEmbedding",
    "ane_softmax",
    "causal_mask",
    "contiguous_heads",
    "fold_mask",
    "fuse_linears",
    "merge_heads",
    "rotary_frequencies",
    "rotate",
    "split_heads",
]
