"""Stateful key and value caches, and when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

KvMode = Literal["in_place", "deferred", "read_only"]


@dataclass(frozen=True)
class Context:
    """What a layer's attention reads: the cache, and in a part of their own new tokens that are not in it.

    Shape:
        - key, value: `[B, K, T, D]`
        - new_key, new_value: `[B, K, D, S]`, or None if the cache holds the new tokens already
    """

    key: Tensor
    value: Tensor
    new_key: Tensor | None = None
    new_value: Tensor | None = None

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys and values in one part, the new tokens last, for attention that takes one. Copies the cache if there are two.

        Shape:
            - output: `[B, K, T, D]` or `[B, K, T + S, D]`, twice
        """
        if self.new_key is None or self.new_value is None:
            return self.key, self.value
        key = torch.cat([self.key, self.new_key.transpose(2, 3)], dim=2)
        return key, torch.cat([self.value, self.new_value.transpose(2, 3)], dim=2)


class KVCache(nn.Module):
    """Keys and values of all layers in two buffers, which Core ML keeps as states between calls.

    Two states for a whole model, rather than two a layer: runners and some engines want few. Three ways to write them, with the same
    results:

    - `"in_place"`: each layer writes its new rows and attends to the cache, which then holds them: two writes a layer.
    - `"deferred"`: each layer attends to the cache and to the new tokens in two parts; `finish` writes the rows of all layers at once:
      two writes a call.
    - `"read_only"`: as deferred, but nothing is written: the cache comes in from outside, and `finish` gives the new rows out.

    Args:
        num_layers: layers that share the cache.
        num_key_value_heads: K.
        head_dim: D.
        context_length: T, the slots of each layer.
        batch_size: B.
        kv: when the cache is written.

    Shape:
        - key, value (the buffers): `[layers, B·K, T, D]`, zero at first
        - position: int32 `[1]`, the slot of the first new token

    The graph cannot refuse a position past the end; the host does (`position + S ≤ T`).
    """

    key: Tensor
    value: Tensor

    def __init__(
        self,
        *,
        num_layers: int,
        num_key_value_heads: int,
        head_dim: int,
        context_length: int,
        batch_size: int = 1,
        kv: KvMode = "in_place",
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
        if kv not in get_args(KvMode):
            raise ValueError(f"KVCache: kv must be one of {get_args(KvMode)}, got {kv!r}")
        self.batch_size = batch_size
        self.kv = kv
        self._waiting: list[tuple[Tensor, Tensor]] = []
        shape = (num_layers, batch_size * num_key_value_heads, context_length, head_dim)
        self.register_buffer("key", torch.zeros(shape), persistent=False)
        self.register_buffer("value", torch.zeros(shape), persistent=False)

    @property
    def context_length(self) -> int:
        return self.key.shape[2]

    @property
    def two_parts(self) -> bool:
        """Whether attention gets the new tokens in a part of their own."""
        return self.kv != "in_place"

    def reset(self) -> None:
        """Forgets everything, as a new Core ML state would."""
        self._waiting.clear()
        self.key.zero_()
        self.value.zero_()

    def update(self, layer: int, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a layer's new rows in place and returns its whole context.

        Shape:
            - key, value: of the new tokens, `[B, K, S, D]`
            - output: key and value, `[B, K, T, D]`
        """
        self._check(layer, key)
        return self._write(self.key, layer, key, position), self._write(self.value, layer, value, position)

    def extend(self, layer: int, key: Tensor, value: Tensor, position: Tensor, *, slots: int | None = None) -> Context:
        """Takes a layer's new rows, and gives what its attention reads.

        Args:
            layer: which.
            key, value: of the new tokens, in the folded layout.
            position: slot of the first.
            slots: read only so many of the first slots; all by default.

        Shape:
            - key, value: `[B, K, D, S]`
        """
        self._check(layer, key)
        slots = self.context_length if slots is None else slots
        if self.two_parts:
            if layer != len(self._waiting):
                raise ValueError(f"KVCache: layer {layer} follows {len(self._waiting)} layers; finish ends a call")
            self._waiting.append((key, value))
            return Context(*self._read(layer, key.shape[0], slots), key, value)
        for store, new in ((self.key, key), (self.value, value)):
            self._put(store, layer, _rows(new), position)
        return Context(*self._read(layer, key.shape[0], slots))

    def finish(self, position: Tensor) -> tuple[Tensor, ...]:
        """Ends a call, after its last layer: a deferred cache is written now, a read-only one gives its new rows out.

        Shape:
            - output: nothing; or, read-only, keys and values, `[layers, B·K, S, D]`
        """
        if not self.two_parts:
            return ()
        keys, values = zip(*self._waiting, strict=True)
        self._waiting.clear()
        rows = tuple(_rows(self._together(parts)) for parts in (keys, values))
        if self.kv == "read_only":
            return rows
        first = position[0]
        for store, new in zip((self.key, self.value), rows, strict=True):
            store[:, :, first : first + new.shape[2], :] = new
        return ()

    def store(self, key: Tensor, value: Tensor, position: int) -> None:
        """Writes new rows of all layers: what a host does with those of a read-only cache.

        Shape:
            - key, value: `[layers, B·K, S, D]`, as `finish` gives them
        """
        self.key[:, :, position : position + key.shape[2]] = key
        self.value[:, :, position : position + value.shape[2]] = value

    def _together(self, parts: tuple[Tensor, ...]) -> Tensor:
        """`[B, K, D, S]` of every layer as `[layers, B·K, D, S]`."""
        if self.batch_size == 1:
            return torch.cat(parts)
        return torch.stack(parts).flatten(1, 2)

    def _check(self, layer: int, key: Tensor) -> None:
        if not 0 <= layer < self.key.shape[0]:
            raise ValueError(f"KVCache: layer must be within 0 … {self.key.shape[0] - 1}, got {layer}")
        if key.shape[0] != self.batch_size:
            raise ValueError(f"KVCache: key is of batch {key.shape[0]}, the cache of batch_size {self.batch_size}")

    def _write(self, cache: Tensor, layer: int, new: Tensor, position: Tensor) -> Tensor:
        b, k, _, d = new.shape
        self._put(cache, layer, new, position)
        return cache[layer : layer + 1].reshape(b, k, cache.shape[2], d)

    @staticmethod
    def _put(cache: Tensor, layer: int, new: Tensor, position: Tensor) -> None:
        b, k, s, d = new.shape
        first = position[0]
        # Every axis is a slice: with an index in place of one, the converter loses the write without an error.
        cache[layer : layer + 1, :, first : first + s, :] = new.reshape(1, b * k, s, d)

    def _read(self, layer: int, batch: int, slots: int) -> tuple[Tensor, Tensor]:
        shape = (batch, self.key.shape[1] // batch, slots, self.key.shape[3])
        return (
            self.key[layer : layer + 1, :, :slots].reshape(shape),
            self.value[layer : layer + 1, :, :slots].reshape(shape),
        )


class NoCache:
    """In place of a cache, for whole sequences that begin at position 0: attention reads the tokens themselves.

    Several sequences may run at once, and nothing is written that a gradient still needs.

    Shape:
        - key, value of extend: `[B, K, D, S]`
        - output of extend: a `Context` of `[B, K, S, D]`
    """

    two_parts = False

    def extend(self, layer: int, key: Tensor, value: Tensor, position: Tensor, *, slots: int | None = None) -> Context:
        """As `KVCache.extend`, keeping nothing."""
        return Context(_rows(key), _rows(value))

    def finish(self, position: Tensor) -> tuple[Tensor, ...]:
        """As `KVCache.finish`."""
        return ()


def _rows(new: Tensor) -> Tensor:
    """`[…, D, S] → […, S, D]`."""
    if new.shape[-1] == 1:
        # One token: the axes are only renamed.
        return new.reshape(*new.shape[:-2], 1, new.shape[-2])
    return new.transpose(-1, -2)
