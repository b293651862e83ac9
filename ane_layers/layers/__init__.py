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
from ane_layers.layers.folding import (
    FoldedAttention,
    FoldedNorm,
    fold_output,
    fold_projections,
    folded_columns,
    folded_rows,
)
from ane_layers.layers.head import OutputHead
from ane_layers.layers.kv_cache import Context, KVCache, KvMode, NoCache
from ane_layers.layers.linear import Linear, fuse_linears, reorder_rows
from ane_layers.layers.masks import MASKED, causal_mask, fold_mask, rolling_slots, sliding_mask
from ane_layers.layers.norm import RMSNorm
from ane_layers.layers.rotary import RotaryEmbedding, rotate
from ane_layers.layers.rotary_scaling import rotary_factor, rotary_frequencies
from ane_layers.layers.softmax import ane_softmax, soft_cap

__all__ = [
    "MASKED",
    "Context",
    "Embedding",
    "FoldedAttention",
    "FoldedNorm",
    "FusedGatedFeedForward",
    "GatedFeedForward",
    "GroupedQueryAttention",
    "HeadSharing",
    "KVCache",
    "KvMode",
    "Linear",
    "NoCache",
    "OutputHead",
    "RMSNorm",
    "RotaryEmbedding",
    "ane_softmax",
    "causal_mask",
    "contiguous_heads",
    "fold_mask",
    "fold_output",
    "fold_projections",
    "folded_columns",
    "folded_rows",
    "fuse_linears",
    "merge_heads",
    "reorder_rows",
    "rolling_slots",
    "rotary_factor",
    "rotary_frequencies",
    "rotate",
    "sliding_mask",
    "soft_cap",
    "split_heads",
]
