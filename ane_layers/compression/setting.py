"""How one weight is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Scheme: TypeAlias = Literal["fp16", "lut", "linear"]

LUT_BITS = (1, 2, 3, 4, 6, 8)
"""Index widths of Core ML's lookup tables."""

LINEAR_BITS = (4, 8)
"""Widths of Core ML's quantized integers."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a weight `[out, in, …]` is stored.

    Args:
        scheme: `"fp16"` as it is; `"lut"`, each weight an index into a table of `2**bits` fp16 values; `"linear"`, each weight a signed
            integer times a fp16 scale.
        bits: of an index (1, 2, 3, 4, 6 or 8) or integer (4 or 8); 16 for fp16.
        group_size: lut: output channels that share a table; None is one table for the whole weight.
        block_size: linear: input channels that share a scale; None is one scale per output channel.

    Raises:
        ValueError: for a combination that Core ML cannot hold.
    """

    scheme: Scheme = "lut"
    bits: int = 4
    group_size: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in get_args(Scheme):
            raise ValueError(f"scheme must be one of {', '.join(get_args(Scheme))}, got {self.scheme!r}")
        allowed = {"fp16": (16,), "lut": LUT_BITS, "linear": LINEAR_BITS}[self.scheme]
        if isinstance(self.bits, bool) or self.bits not in allowed:
            raise ValueError(
                f"bits must be {', '.join(map(str, allowed))} with scheme {self.scheme!r}, got {self.bits!r}"
            )
        for name, scheme in (("group_size", "lut"), ("block_size", "linear")):
            size = getattr(self, name)
            if size is None:
                continue
            if self.scheme != scheme:
                raise ValueError(f"{name} belongs to scheme {scheme!r}, got {size!r} with scheme {self.scheme!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")

    def fitted(self, name: str, shape: Sequence[int]) -> Setting:
        """The setting with a group or block that divides the channels: the largest divisor that is no larger, if it is at least half.

        Args:
            name: of the weight, for the error.
            shape: of the weight, `[out, in, …]`.

        Raises:
            ValueError: if there is none, as for a prime number of channels.
        """
        for field, axis, what in (("group_size", 0, "output"), ("block_size", 1, "input")):
            size = getattr(self, field)
            if size is None or shape[axis] % size == 0:
                continue
            channels = shape[axis]
            if size > channels:
                return Setting(scheme=self.scheme, bits=self.bits)  # one group holds everything
            divisor = max(part for part in range(1, size + 1) if channels % part == 0)
            if 2 * divisor < size:
                raise ValueError(
                    f"{name}: {field} {size} does not divide its {channels} {what} channels, and neither does a size from {-(-size // 2)} "
                    f"on; choose a divisor, or leave {field} out"
                )
            return Setting(scheme=self.scheme, bits=self.bits, **{field: divisor})
        return self

    def stored_bytes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Bytes of the indices or integers, and bytes of the tables or scales, of a fitted setting; alignment is not counted."""
        count = math.prod(shape)
        if self.scheme == "fp16":
            return 2 * count, 0
        data = -(-count * self.bits // 8)
        if self.scheme == "lut":
            groups = 1 if self.group_size is None else shape[0] // self.group_size
            return data, 2 * groups << self.bits
        blocks = 1 if self.block_size is None else shape[1] // self.block_size
        return data, 2 * shape[0] * blocks

    @property
    def key(self) -> str:
        """A short unique name: `fp16`, `lut4` (one table), `lut4g16` (groups of 16), `int8` (per channel), `int4b32` (blocks of 32)."""
        if self.scheme == "fp16":
            return "fp16"
        groups = f"g{self.group_size}" if self.group_size else f"b{self.block_size}" if self.block_size else ""
        return f"{'lut' if self.scheme == 'lut' else 'int'}{self.bits}{groups}"

    @classmethod
    def from_key(cls, key: str) -> Setting:
        """The setting of a `key`. Raises `ValueError` for anything else."""
        if key == "fp16":
            return FP16
        match = re.fullmatch(r"lut(\d+)(?:g(\d+))?|int(\d+)(?:b(\d+))?", key)
        if match is None:
            raise ValueError(f"{key!r} names no setting; examples are lut4, lut4g16, int8, int4b32")
        lut, group, integer, block = (int(part) if part else None for part in match.groups())
        if lut is not None:
            return cls(scheme="lut", bits=lut, group_size=group)
        assert integer is not None
        return cls(scheme="linear", bits=integer, block_size=block)

    def __str__(self) -> str:
        if self.scheme == "fp16":
            return "fp16"
        if self.scheme == "lut":
            return f"{self.bits}-bit table {f'per {self.group_size} channels' if self.group_size else 'per tensor'}"
        return f"{self.bits}-bit integers {f'per {self.block_size} inputs' if self.block_size else 'per channel'}"


FP16 = Setting(scheme="fp16", bits=16)
