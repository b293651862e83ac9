"""What every family computes: layers over their caches, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ane_layers.layers import (
    Embedding,
    HeadSharing,
    KVCache,
    KvMode,
    OutputHead,
    RMSNorm,
    RotaryEmbedding,
    rolling_slots,
    rotary_factor,
    rotary_frequencies,
)
from ane_layers.models.config import FULL, SLIDING
from ane_layers.models.part import Part
from ane_layers.models.step import Step
from ane_layers.models.stored import StoredWeights
from ane_layers.models.weights import Names

Head = Literal["logits", "argmax", "top_k"]
"""What a model gives: logits, the most likely token, or the k most likely ones with their logits."""


class DecoderLayers(nn.ModuleList):
    """Layers that keep their numbers, and so their names, in a part of a model."""

    def __init__(self, layers: Iterable[nn.Module], *, first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm, named as in Hugging Face's checkpoints; or a part of them."""

    def __init__(self, config: Any, layers: Iterable[nn.Module], norm: RMSNorm, part: Part) -> None:
        super().__init__()
        if part.embedding:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale)
        self.layers = DecoderLayers(layers, first=part.first)
        if part.head:
            self.norm = norm


class DecoderModel(nn.Module):
    """A decoder with KV caches and a head: what is computed. `CausalLM` is what families derive from.

    A layer has `kind` (`"full_attention"` or `"sliding_attention"`), `self_attn` with `align(step)`, `fuse()` and
    `forward(x, step, number)`, where `number` counts the layers of its kind; see `ane_layers.models.blocks`.

    Args:
        config: the family's config.
        context_length: T, the slots of the cache; at most the config's `max_position_embeddings`.
        kv: when the cache is written; see `KVCache`.
        block_size: the most tokens that run at once, from which the slots of a rolling cache follow.
        head_sharing: see `GroupedQueryAttention`.
        head_pieces: convolutions that the output head is split into; see `OutputHead`.
        part: the layers that are built, of a model that is run in several parts; all by default.
        rope_length: positions that rotary frequencies are for, where a config has several sets of them (longrope); `context_length` by
            default.

    Shape:
        - input_ids: int `[B, S]`; for a part without embedding None, and instead
        - hidden_states: `[B, C, 1, S]`, which a part without head also gives in place of logits
        - position: int32 `[1]`, position of the first of the S tokens
        - causal_mask: `[1, 1, S, T]`, see `causal_mask`; `[1, 1, S, T + S]` unless `kv` is `"in_place"`. With fewer than all slots,
          attention reads only these, the first ones.
        - sliding_mask: `[1, 1, S, W']` or `[1, 1, S, W' + S]`, see `sliding_mask`; for models with sliding-window layers
        - output: logits `[B, S, V]`, or `[B, 1, V]` of the last position with `last_only`; with `head="argmax"` tokens `[B, S]`, with
          `head="top_k"` tokens and logits `[B, S, k]`; read-only, then new keys and values of each cache
    """

    config_class: Any
    stored_names: ClassVar[Names] = {}

    def __init__(
        self,
        config: Any,
        *,
        context_length: int,
        kv: KvMode = "in_place",
        block_size: int = 64,
        head_sharing: HeadSharing = "fold",
        head_pieces: int | None = None,
        part: Part | None = None,
        rope_length: int | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= context_length <= config.max_position_embeddings:
            raise ValueError(
                f"context_length must be within 1 … max_position_embeddings ({config.max_position_embeddings}), "
                f"got {context_length}"
            )
        self.config = config
        self.context_length = context_length
        self.rope_length = context_length if rope_length is None else rope_length
        self.kv: KvMode = kv
        self.block_size = block_size
        self.head_sharing = head_sharing
        self.head_pieces = head_pieces
        self.part = Part(first=0, last=config.num_hidden_layers) if part is None else part
        kinds = getattr(config, "layer_types", None) or (FULL,) * config.num_hidden_layers
        self.kinds: tuple[str, ...] = tuple(kinds[self.part.first : self.part.last])
        self.fused = False
        self.stored: StoredWeights | None = None
        layers = (self.decoder_layer(number, kind) for number, kind in enumerate(self.kinds, self.part.first))
        self.model = Decoder(config, layers, self.norm(config.hidden_size, dim=1), self.part)
        if self.part.head:
            self.lm_head = OutputHead(
                config.hidden_size,
                config.vocab_size,
                pieces=head_pieces,
                scale=config.logit_scale,
                softcap=config.logit_softcap,
            )
        self.allocate()

    def decoder_layer(self, number: int, kind: str) -> nn.Module:
        """A layer of the family, by its number and its kind of attention."""
        raise NotImplementedError

    def norm(self, size: int, *, dim: int) -> RMSNorm:
        """A norm of the family."""
        return RMSNorm(size, eps=self.config.rms_norm_eps, dim=dim)

    def allocate(self) -> None:
        """Builds caches and constant tables, which no checkpoint holds."""
        self.rotary = self._rotary(FULL)
        # One table, unless sliding-window layers have frequencies of their own.
        shared = self.config.rope(SLIDING) == self.config.rope(FULL)
        self.sliding_rotary = self.rotary if shared else self._rotary(SLIDING)
        self.cache = self._cache(FULL, self.context_length)
        self.sliding_cache = self._cache(SLIDING, self.sliding_slots)

    def _rotary(self, kind: str) -> RotaryEmbedding:
        theta, scaling = self.config.rope(kind)
        frequencies = rotary_frequencies(
            self.config.rotary_dim, rope_theta=theta, rope_scaling=scaling, context_length=self.rope_length
        )
        return RotaryEmbedding(
            frequencies,
            max_positions=self.context_length,
            head_dim=self.config.head_dim,
            factor=rotary_factor(scaling),
        )

    def _cache(self, kind: str, slots: int) -> KVCache | None:
        layers = self.kinds.count(kind)
        if not layers:
            return None
        config = self.config
        return KVCache(
            num_layers=layers,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            context_length=slots,
            kv=self.kv,
        )

    @property
    def sliding_slots(self) -> int:
        """W', the slots of the rolling cache; 0 without sliding-window layers."""
        return rolling_slots(self.config.sliding_window, self.block_size) if SLIDING in self.kinds else 0

    def forward(
        self,
        input_ids: Tensor | None = None,
        position: Tensor | None = None,
        causal_mask: Tensor | None = None,
        sliding_mask: Tensor | None = None,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        sliding_key_cache: Tensor | None = None,
        sliding_value_cache: Tensor | None = None,
        *,
        hidden_states: Tensor | None = None,
        last_only: bool = False,
        head: Head = "logits",
        top_k: int = 1,
    ) -> Any:
        for cache, key, value in (
            (self.cache, key_cache, value_cache),
            (self.sliding_cache, sliding_key_cache, sliding_value_cache),
        ):
            if cache is not None and key is not None and value is not None:
                cache.key, cache.value = key, value
        x = self.model.embed_tokens(input_ids) if self.part.embedding else hidden_states
        if x is None:
            raise ValueError(f"{type(self).__name__}: a part without embedding takes hidden_states")
        length = x.shape[3]
        steps = self._steps(position, length, {FULL: causal_mask, SLIDING: sliding_mask})
        numbers = dict.fromkeys(steps, 0)
        for layer in self.decoder_layers():
            x = layer(x, steps[layer.kind], numbers[layer.kind])
            numbers[layer.kind] += 1
        rows = [part for step in steps.values() for part in step.cache.finish(step.position)]
        if last_only and length > 1 and self.part.last == self.config.num_hidden_layers:
            # By a split, not a slice from the end: a slice that begins late on the last axis is said to lose large values on M1.
            x = x.split([length - 1, 1], dim=3)[1]
        given = self._results(self.model.norm(x), head, top_k) if self.part.head else (x,)
        results = (*given, *rows)
        return results if len(results) > 1 else results[0]

    def _results(self, x: Tensor, head: Head, top_k: int) -> tuple[Tensor, ...]:
        if head == "argmax":
            return (self.lm_head.argmax(x),)
        return self.lm_head.top_k(x, top_k) if head == "top_k" else (self.lm_head(x),)

    def _steps(self, position: Tensor | None, length: int, masks: Mapping[str, Tensor | None]) -> dict[str, Step]:
        """What the layers of each kind share, done once for all of them."""
        if not self.kinds:
            return {}
        if position is None:
            raise ValueError(f"{type(self).__name__} has layers and needs the position of the first token")
        steps = {}
        for kind, cache, rotary in (
            (FULL, self.cache, self.rotary),
            (SLIDING, self.sliding_cache, self.sliding_rotary),
        ):
            if cache is None:
                continue
            mask = masks[kind]
            if mask is None:
                raise ValueError(f"{type(self).__name__} has {kind} layers and needs their mask")
            slots = mask.shape[3] - (length if cache.two_parts else 0)
            slot = position if kind == FULL else position % self.sliding_slots
            cos, sin = rotary(position, length)
            step = Step(position=slot, mask=mask, cache=cache, cos=cos, sin=sin, slots=slots)
            first = next(layer for layer in self.decoder_layers() if layer.kind == kind)
            steps[kind] = first.self_attn.align(step)
        return steps

    def decoder_layers(self) -> list[Any]:
        return list(self.model.layers)

    def fuse(self) -> None:
        """Joins projections that read the same input. Changes the weights' layout, not the result: loading may leave it out."""
        for layer in self.decoder_layers():
            layer.fuse()
        self.fused = True
