"""The sizes of a decoder, and what a token moves by arithmetic: to hold packages against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecoderGeometry:
    """Sizes of a decoder with grouped-query attention, a gated feed-forward part, and a head over the vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def attention_weights(self) -> int:
        """Weights of the four projections of one layer."""
        rows = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return rows * self.head_dim * self.hidden_size

    @property
    def feed_forward_weights(self) -> int:
        """Weights of gate, up and down of one layer."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_weights(self) -> int:
        """Weights of one layer, norms left out."""
        return self.attention_weights + self.feed_forward_weights

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    def cache_bytes(self, context_length: int) -> int:
        """K and V of all layers in fp16."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * context_length * self.head_dim * 2

    def repeated_bytes(self, context_length: int) -> int:
        """K and V of all layers in fp16, written out for every query head."""
        return self.cache_bytes(context_length) * self.num_attention_heads // self.num_key_value_heads

    def decode_bytes(
        self, context_length: int, *, bits: int, head_bits: int, promoted: tuple[int, int, int] = (0, 0, 0)
    ) -> int:
        """What one decoded token reads: the weights of all layers, the head, and the cache.

        Args:
            context_length: slots of the cache.
            bits: of a layer's weight.
            head_bits: of the head's.
            promoted: how many layers have how many weights at how many bits instead.
        """
        layers, weights, promoted_bits = promoted
        total = self.num_hidden_layers * self.layer_weights * bits + self.head_weights * head_bits
        total += layers * weights * (promoted_bits - bits)
        return total // 8 + self.cache_bytes(context_length)


EXAONE4_1B = DecoderGeometry(
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=30,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=102_400,
)
"""EXAONE 4.0 1.2B, the article's model; its config.json has these."""
