"""Attention over repeated keys and values in the forms that ports write it, as small Core ML programs, and what PyTorch makes of it.

Letters: B batch, S new tokens, T cache length, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mil_programs import mb, save_program


@dataclass(frozen=True)
class Sizes:
    b: int = 1
    k: int = 2
    g: int = 3
    s: int = 5
    t: int = 7
    d: int = 4

    @property
    def h(self) -> int:
        return self.k * self.g


Repeat = Callable[[Any, Sizes], Any]


def expand_reshape(x: Any, n: Sizes) -> Any:
    """transformers' `repeat_kv`."""
    tiled = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, n.g, 1, 1])
    return mb.reshape(x=tiled, shape=[n.b, n.h, n.t, n.d])


def rank_4(x: Any, n: Sizes) -> Any:
    """Without the batch axis, as Anemll does; with a batch its heads stand in front."""
    tiled = mb.tile(x=mb.reshape(x=x, shape=[n.b * n.k, 1, n.t, n.d]), reps=[1, n.g, 1, 1])
    return mb.reshape(x=tiled, shape=[n.b, n.h, n.t, n.d])


def repeat_interleave(x: Any, n: Sizes) -> Any:
    """coremltools' translation of `repeat_interleave(dim=1)`."""
    front = mb.transpose(x=x, perm=[1, 0, 2, 3])
    split = mb.reshape(x=mb.tile(x=front, reps=[n.g, 1, 1, 1]), shape=[n.g, n.k, n.b, n.t, n.d])
    joined = mb.reshape(x=mb.transpose(x=split, perm=[1, 0, 2, 3, 4]), shape=[n.h, n.b, n.t, n.d])
    return mb.transpose(x=joined, perm=[1, 0, 2, 3])


def concat(x: Any, n: Sizes) -> Any:
    parts = [mb.expand_dims(x=x, axes=[2]) for _ in range(n.g)]
    return mb.reshape(x=mb.concat(values=parts, axis=2), shape=[n.b, n.h, n.t, n.d])


def stack(x: Any, n: Sizes) -> Any:
    return mb.reshape(x=mb.stack(values=[x] * n.g, axis=2), shape=[n.b, n.h, n.t, n.d])


def gather(x: Any, n: Sizes) -> Any:
    return mb.gather(x=x, indices=np.repeat(np.arange(n.k), n.g).astype(np.int32), axis=1)


def product_with_ones(x: Any, n: Sizes) -> Any:
    ones = np.ones((n.b, n.k, n.g, n.t, n.d), np.float32)
    return mb.reshape(x=mb.mul(x=mb.expand_dims(x=x, axes=[2]), y=ones), shape=[n.b, n.h, n.t, n.d])


def tokens_first(x: Any, n: Sizes) -> Any:
    """Repeated as `[B, T, H, D]`, and only then brought into order."""
    tiled = mb.tile(x=mb.expand_dims(x=mb.transpose(x=x, perm=[0, 2, 1, 3]), axes=[3]), reps=[1, 1, 1, n.g, 1])
    return mb.transpose(x=mb.reshape(x=tiled, shape=[n.b, n.t, n.h, n.d]), perm=[0, 2, 1, 3])


def twice(x: Any, n: Sizes) -> Any:
    """In two steps: once, and then as often as is left."""
    first = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, 1, 1, 1])
    return mb.reshape(x=mb.tile(x=first, reps=[1, 1, n.g, 1, 1]), shape=[n.b, n.h, n.t, n.d])


FORMS: dict[str, Repeat] = {
    form.__name__: form
    for form in (
        *(expand_reshape, rank_4, repeat_interleave, concat, stack, gather, product_with_ones, tokens_first, twice),
    )
}


def softmax(scores: Any) -> Any:
    return mb.softmax(x=scores, axis=3)


def softmax_in_parts(scores: Any) -> Any:
    shifted = mb.exp(x=mb.sub(x=scores, y=mb.reduce_max(x=scores, axes=[-1], keep_dims=True)))
    return mb.real_div(x=shifted, y=mb.reduce_sum(x=shifted, axes=[3], keep_dims=True))


def attention(
    path: Path,
    n: Sizes,
    *,
    key: Repeat = expand_reshape,
    value: Repeat = expand_reshape,
    weights: Callable[[Any], Any] = softmax,
    change: Callable[[Any, dict[str, Any]], Any] = lambda scores, inputs: mb.add(x=scores, y=inputs["mask"]),
    extra: dict[str, tuple[tuple[int, ...], type]] | None = None,
    outputs: Callable[..., list[Any]] = lambda out, **_: [out],
) -> Path:
    """`softmax(Q·Kᵀ·scale + mask)·V` as a package; what is given in place of the defaults changes one thing each."""
    inputs = {
        "query": ((n.b, n.h, n.s, n.d), np.float32),
        "key": ((n.b, n.k, n.t, n.d), np.float32),
        "value": ((n.b, n.k, n.t, n.d), np.float32),
        "mask": ((1, 1, n.s, n.t), np.float32),
    } | (extra or {})

    def build(given: Any) -> list[Any]:
        keys, values = key(given["key"], n), value(given["value"], n)
        scores = mb.mul(x=mb.matmul(x=given["query"], y=keys, transpose_y=True), y=np.float32(n.d**-0.5))
        rates = weights(change(scores, dict(given)))
        return outputs(mb.matmul(x=rates, y=values), keys=keys, weights=rates)

    return save_program(path, inputs, build)


def numbers(n: Sizes, extra: dict[str, tuple[int, ...]] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    shapes = {
        "query": (n.b, n.h, n.s, n.d),
        "key": (n.b, n.k, n.t, n.d),
        "value": (n.b, n.k, n.t, n.d),
        "mask": (1, 1, n.s, n.t),
    } | (extra or {})
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected(data: dict[str, np.ndarray]) -> np.ndarray:
    """PyTorch's own grouped attention."""
    query, key, value, mask = (torch.from_numpy(data[name]) for name in ("query", "key", "value", "mask"))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).numpy()
