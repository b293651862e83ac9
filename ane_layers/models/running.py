"""Models run in PyTorch: through their caches, or over whole sequences without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ane_layers.layers import (
    KVCache,
    NoCache,
    causal_mask,
    sliding_mask,
)
from ane_layers.models.config import FULL, SLIDING
from ane_layers.models.graph import DecoderModel

if TYPE_CHECKING:
    pass


class RunnableModel(DecoderModel):
    """A model that makes its own masks and goes through its own caches."""

    @torch.no_grad()
    def extend(self, input_ids: Tensor, position: int = 0, *, last_only: bool = False) -> Tensor:
        """Runs further tokens through the cache in PyTorch and returns their logits.

        Args:
            input_ids: the S tokens that follow the `position` already in the cache.
            position: cache slot of the first.
            last_only: whether only the last position's logits are wanted.

        Shape:
            - input_ids: int `[1, S]`
            - output: `[1, S, V]`, or `[1, 1, V]` with `last_only`

        Raises:
            ValueError: for another shape, weights that are not fp32, or tokens that do not fit the context; the cache is left as it
                was.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"input_ids must be of shape [1, S], got {list(input_ids.shape)}")
        if self.stored is not None:
            raise ValueError(
                "the model was opened for conversion, its weights are in its folder; load it with from_pretrained"
            )
        types = {parameter.dtype for parameter in self.parameters()} - {torch.float32}
        if types:
            raise ValueError(
                f"dtype of the weights is {types.pop()}, kept for conversion; load with dtype=torch.float32 to run them"
            )
        pieces = []
        for first, length in self.blocks(position, input_ids.shape[1]):
            masks = self.masks(first, length)
            tokens = input_ids[:, first - position : first - position + length]
            pieces.append(self._call_in_torch(tokens, first, masks, last_only))
        return pieces[-1] if last_only else torch.cat(pieces, dim=1)

    def _call_in_torch(
        self, tokens: Tensor, position: int, masks: tuple[Tensor | None, Tensor | None], last_only: bool
    ) -> Tensor:
        results = self(tokens, torch.tensor([position], dtype=torch.int32), *masks, last_only=last_only)
        if self.kv != "read_only":
            return results
        logits, *rows = results
        for cache, keys, values in zip(self.caches(), rows[0::2], rows[1::2], strict=True):
            cache.store(keys, values, position % cache.context_length)
        return logits

    def caches(self) -> list[KVCache]:
        """The full-attention cache, then the rolling one; those that there are."""
        return [cache for cache in (self.cache, self.sliding_cache) if cache is not None]

    def blocks(self, position: int, length: int) -> list[tuple[int, int]]:
        """How tokens are run: position and number of each call. All at once, unless a rolling cache bounds how many and where they begin.

        Raises:
            ValueError: if they do not fit the context.
        """
        if position < 0 or length < 1 or position + length > self.context_length:
            raise ValueError(
                f"{length} tokens at position {position} do not fit a context_length of {self.context_length}"
            )
        found = []
        while length:
            count = length
            if SLIDING in self.kinds:
                count = min(length, self.block_size, self.sliding_slots - position % self.sliding_slots)
            found.append((position, count))
            position, length = position + count, length - count
        return found

    def masks(self, position: int, length: int, *, slots: int | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The masks of a call: causal and sliding; None for a kind of layer that there is not.

        Args:
            position: of the first new token.
            length: S.
            slots: of the full-attention cache that are read; all by default.
        """
        two_parts = self.kv != "in_place"
        full = None
        if FULL in self.kinds:
            full = causal_mask(position, length, slots or self.context_length, two_parts=two_parts)
        if SLIDING not in self.kinds:
            return full, None
        window, rolling = self.config.sliding_window, self.sliding_slots
        return full, sliding_mask(position, length, window=window, slots=rolling, two_parts=two_parts)

    @torch.no_grad()
    def whole(self, input_ids: Tensor) -> Tensor:
        """Logits of whole sequences from their beginning, without a cache.

        Shape:
            - input_ids: int `[B, S]`
            - output: `[B, S, V]`
        """
        with self.without_cache():
            return self(input_ids, torch.zeros(1, dtype=torch.int32), *self.whole_masks(input_ids.shape[1]))

    def whole_masks(self, length: int) -> tuple[Tensor | None, Tensor | None]:
        """The masks of a sequence that begins at position 0 and is its own context."""
        full = causal_mask(0, length, length) if FULL in self.kinds else None
        if SLIDING not in self.kinds:
            return full, None
        window = min(self.config.sliding_window, length)
        slots = length + window - 1  # none of them rolls
        return full, sliding_mask(0, length, window=window, slots=slots)[..., :length]

    @contextmanager
    def without_cache(self) -> Iterator[None]:
        """Attention reads the tokens of the call themselves, which must begin at position 0; several sequences may run at once."""
        caches = {name: getattr(self, name) for name in ("cache", "sliding_cache")}
        try:
            for name, cache in caches.items():
                if cache is not None:
                    del self._modules[name]
                    self.__dict__[name] = NoCache()
            yield
        finally:
            for name, cache in caches.items():
                self.__dict__.pop(name, None)
                setattr(self, name, cache)
