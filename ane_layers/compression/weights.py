"""A compressed weight: what is stored, and the exact values that it stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ane_layers.compression.clustering import cluster
from ane_layers.compression.packing import pack
from ane_layers.compression.setting import Setting
from ane_layers.program.constants import unpack

# Smallest positive number of fp16. A scale below it would be zero, and what it scales with it.
_SMALLEST = 2.0**-24


@dataclass(frozen=True, eq=False)
class LookupTables:
    """Indices into tables, one table for each group of output channels: MIL's `constexpr_lut_to_dense`.

    Shape:
        - shape: `[out, in, …]` of the weight
        - packed: uint8, the indices from the lowest bit up
        - table: fp16 `[groups, 2**bits]`

    Attributes:
        error: squared error over the squares of the weight that it was made of.
    """

    shape: tuple[int, ...]
    bits: int
    packed: np.ndarray
    table: np.ndarray
    error: float

    @property
    def stored_bytes(self) -> int:
        return int(self.packed.nbytes + self.table.nbytes)

    @property
    def padding_bits(self) -> int:
        return int(8 * self.packed.nbytes - self.bits * math.prod(self.shape))

    def dense(self) -> np.ndarray:
        """The weight, fp16, as `constexpr_lut_to_dense` gives it."""
        indices = unpack(self.packed, self.bits, math.prod(self.shape)).reshape(len(self.table), -1)
        dense = np.empty(indices.shape, np.float16)
        for group, table in enumerate(self.table):
            np.take(table, indices[group], out=dense[group])
        return dense.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class ScaledIntegers:
    """Signed integers times a scale for each output channel and block of input channels: MIL's `constexpr_blockwise_shift_scale`.

    Shape:
        - shape: `[out, in, …]` of the weight
        - packed: uint8, the integers in two's complement from the lowest bit up
        - scale: fp16 `[out, blocks]`

    Attributes:
        error: squared error over the squares of the weight that it was made of.
    """

    shape: tuple[int, ...]
    bits: int
    packed: np.ndarray
    scale: np.ndarray
    error: float

    @property
    def stored_bytes(self) -> int:
        return int(self.packed.nbytes + self.scale.nbytes)

    @property
    def padding_bits(self) -> int:
        return int(8 * self.packed.nbytes - self.bits * math.prod(self.shape))

    def dense(self) -> np.ndarray:
        """The weight, fp16: the product in fp32, where it is exact, rounded once."""
        integers = unpack(self.packed, self.bits, math.prod(self.shape), signed=True)
        return _scaled(integers.reshape(*self.scale.shape, -1), self.scale).reshape(self.shape)


CompressedWeight: TypeAlias = LookupTables | ScaledIntegers


def compress_weight(
    name: str, weight: np.ndarray, setting: Setting, *, importance: np.ndarray | None = None
) -> CompressedWeight:
    """Compresses one weight.

    Args:
        name: for errors.
        weight: fp16 `[out, in, …]`, finite.
        setting: other than fp16; a group or block that does not divide is fitted (see `Setting.fitted`).
        importance: `[in]`, how much an error in each input channel weighs when tables are chosen: the channel's mean square.

    Raises:
        ValueError: naming the weight, if it is not fp16 or not finite, or the setting does not fit it.
    """
    if weight.dtype != np.float16 or weight.ndim < 2:
        raise ValueError(f"{name}: compression takes fp16 [out, in, …], got {weight.dtype} {list(weight.shape)}")
    if not np.isfinite(weight).all():
        raise ValueError(f"{name}: holds NaN or an infinity")
    if setting.scheme == "fp16":
        raise ValueError(f"{name}: setting fp16 is no compression")
    setting = setting.fitted(name, weight.shape)
    if setting.scheme == "linear":
        return _scaled_integers(weight, setting)
    groups = 1 if setting.group_size is None else weight.shape[0] // setting.group_size
    if importance is not None:
        if importance.shape != (weight.shape[1],):
            raise ValueError(
                f"{name}: importance has shape {list(importance.shape)}, expected [{weight.shape[1]}], the inputs"
            )
        importance = np.repeat(importance, math.prod(weight.shape[2:]))
    found = cluster(weight.reshape(groups, -1), setting.bits, importance=importance)
    packed = pack(found.indices, setting.bits)
    return LookupTables(tuple(weight.shape), setting.bits, packed, found.table, found.error)


def _scaled_integers(weight: np.ndarray, setting: Setting) -> ScaledIntegers:
    """Symmetric: the largest magnitude of a block becomes the largest integer."""
    blocks = 1 if setting.block_size is None else weight.shape[1] // setting.block_size
    values = weight.reshape(weight.shape[0], blocks, -1).astype(np.float32)
    largest = (1 << (setting.bits - 1)) - 1
    # Never zero, not even for a block of zeros or of numbers too small for fp16 to hold their scale: 0 / 0 is NaN.
    scale = np.maximum(np.abs(values).max(axis=2) / largest, _SMALLEST).astype(np.float16)
    # Rounded to nearest, so that the scale's own rounding is made up for where it can be.
    integers = np.rint(values / scale[:, :, None].astype(np.float32)).clip(-largest, largest).astype(np.int8)
    noise, signal = _squares(weight, _scaled(integers, scale))
    error = noise / signal if signal else float(noise > 0)
    return ScaledIntegers(tuple(weight.shape), setting.bits, pack(integers, setting.bits), scale, error)


def _scaled(integers: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`[out, blocks, n]` int8 and `[out, blocks]` fp16 → fp16 `[out, blocks, n]`."""
    return (integers.astype(np.float32) * scale[:, :, None].astype(np.float32)).astype(np.float16)


def _squares(weight: np.ndarray, dense: np.ndarray) -> tuple[float, float]:
    """Σ (weight − dense)² and Σ weight², in pieces: a widened copy of an embedding would be a gigabyte."""
    noise = signal = 0.0
    flat, other = weight.reshape(-1), dense.reshape(-1)
    for start in range(0, flat.size, 1 << 22):
        part = flat[start : start + (1 << 22)].astype(np.float64)
        signal += float(part @ part)
        part -= other[start : start + (1 << 22)]
        noise += float(part @ part)
    return noise, signal
