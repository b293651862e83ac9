"""Stateful key and value caches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KVCache(nn.Module):
    """Keys and values of all layers in two buffers, which Core ML keeps as states between calls.

    Two states for a whole model, rather than two a layer: runners and some engines want few. Each layer writes its new rows in place
    and attends to what it has just written together with everything before it.

    Args:
        num_layers: layers that share the cache.
        num_key_value_heads: K.
        head_dim: D.
        context_length: T, the slots of each layer.
        batch_size: B.

    Shape:
        - key, value (the buffers): `[layers, B·K, T, D]`, zero at first
        - update: key and value of the new tokens, `[B, K, S, D]`; position, int32 `[1]`, the slot of the first
        - output of update: key and value of the whole context, `[B, K, T, D]`

    The graph cannot refuse a position past the end; the host does (`position + S ≤ T`).
    """

    key: Tensor
    value: Tensor

    def __init__(
        self, *, num_layers: int, num_key_value_heads: int, head_dim: int, context_length: int, batch_size: int = 1
    ) -> None:
        super().__init__()
        sizes = {
            "num_layers": num_layers,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "context_length": context_length,
            "batch_size": batch_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"KVCache: {name} must be at least 1, got {size}")
        self.batch_size = batch_size
        shape = (num_layers, batch_size * num_key_value_heads, context_length, head_dim)
        self.register_buffer("key", torch.zeros(shape), persistent=False)
        self.register_buffer("value", torch.zeros(shape), persistent=False)

    @property
    def context_length(self) -> int:
        return self.key.shape[2]

    def reset(self) -> None:
        """Forgets everything, as a new Core ML state would."""
        self.key.zero_()
        self.value.zero_()

    def update(self, layer: int, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        if not 0 <= layer < self.key.shape[0]:
            raise ValueError(f"KVCache: layer must be within 0 … {self.key.shape[0] - 1}, got {layer}")
        if key.shape[0] != self.batch_size:
            raise ValueError(f"KVCache: key is of batch {key.shape[0]}, the cache of batch_size {self.batch_size}")
        return self._write(self.key, layer, key, position), self._write(self.value, layer, value, position)

    def _write(self, cache: Tensor, layer: int, new: Tensor, position: Tensor) -> Tensor:
        b, k, s, d = new.shape
        first = position[0]
        # Every axis is a slice: with an index in place of one, the converter loses the write without an error.
        cache[layer : layer + 1, :, first : first + s, :] = new.reshape(1, b * k, s, d)
        return cache[layer : layer + 1].reshape(b, k, cache.shape[2], d)
