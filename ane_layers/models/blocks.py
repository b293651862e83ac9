"""Decoder layers, by where their norms stand."""

from __future__ import annotations

from torch import Tensor, nn

from ane_layers.layers import FusedGatedFeedForward, GatedFeedForward
from ane_layers.models.attention import Attention, FoldedSelfAttention, Norm
from ane_layers.models.step import Step


class DecoderLayer(nn.Module):
    """Self-attention and feed-forward; a subclass adds the norms, under the names that most checkpoints have.

    Args:
        kind: of its attention, `"full_attention"` or `"sliding_attention"`.
        self_attn: with the checkpoint's names.
        mlp: likewise.

    Shape:
        - x: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, kind: str, self_attn: Attention, mlp: GatedFeedForward) -> None:
        super().__init__()
        self.kind = kind
        self.self_attn: Attention | FoldedSelfAttention = self_attn
        self.mlp: GatedFeedForward | FusedGatedFeedForward = mlp

    def fuse(self) -> None:
        """Joins projections that read the same input; a second time changes nothing, and without it the layer computes the same."""
        if isinstance(self.self_attn, Attention):
            self.self_attn = self.self_attn.folded()
        if isinstance(self.mlp, GatedFeedForward):
            self.mlp = FusedGatedFeedForward(self.mlp)


class PreNormLayer(DecoderLayer):
    """What attention and feed-forward read is normed.

    Args:
        residual: factor on what they return, before it is added.
    """

    def __init__(
        self, kind: str, self_attn: Attention, mlp: GatedFeedForward, *, norm: Norm, residual: float = 1.0
    ) -> None:
        super().__init__(kind, self_attn, mlp)
        self.residual = residual
        size = self_attn.o_proj.out_features
        self.input_layernorm = norm(size, dim=1)
        self.post_attention_layernorm = norm(size, dim=1)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), step, layer))
        return x + self._scaled(self.mlp(self.post_attention_layernorm(x)))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual == 1.0 else x * self.residual


class PostNormLayer(DecoderLayer):
    """What attention and feed-forward return is normed, then added."""

    def __init__(self, kind: str, self_attn: Attention, mlp: GatedFeedForward, *, norm: Norm) -> None:
        super().__init__(kind, self_attn, mlp)
        size = self_attn.o_proj.out_features
        self.post_attention_layernorm = norm(size, dim=1)
        self.post_feedforward_layernorm = norm(size, dim=1)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, step, layer))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class SandwichLayer(DecoderLayer):
    """What attention and feed-forward read is normed, and what they return as well: four norms."""

    def __init__(self, kind: str, self_attn: Attention, mlp: GatedFeedForward, *, norm: Norm) -> None:
        super().__init__(kind, self_attn, mlp)
        size = self_attn.o_proj.out_features
        self.input_layernorm = norm(size, dim=1)
        self.post_attention_layernorm = norm(size, dim=1)
        self.pre_feedforward_layernorm = norm(size, dim=1)
        self.post_feedforward_layernorm = norm(size, dim=1)

    def forward(self, x: Tensor, step: Step, layer: int) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step, layer))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
