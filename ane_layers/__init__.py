"""Transformer layers for Apple's Neural Engine, and what is needed to port a model with them.

`ane_layers.layers` are mechanics for any port; `ane_layers.models` are families over them; `ane_layers.conversion` writes Core ML
packages; `ane_layers.program`, `ane_layers.analysis` and `ane_layers.interpreter` read, count and run them on any machine.
"""

from ane_layers.bundled import bundled_checkpoint
from ane_layers.layers import (
    MASKED,
    Embedding,
    FusedGatedFeedForward,
    GatedFeedForward,
    GroupedQueryAttention,
    HeadSharing,
    KVCache,
    Linear,
    OutputHead,
    RMSNorm,
    RotaryEmbedding,
    ane_softmax,
    causal_mask,
    contiguous_heads,
    fold_mask,
    fuse_linears,
    merge_heads,
    rotary_frequencies,
    rotate,
    split_heads,
)

__version__ = "0.1.0"

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
    "__version__",
    "ane_softmax",
    "bundled_checkpoint",
    "causal_mask",
    "contiguous_heads",
    "fold_mask",
    "fuse_linears",
    "merge_heads",
    "rotary_frequencies",
    "rotate",
    "split_heads",
]
