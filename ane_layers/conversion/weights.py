"""Writes the weight file of a package: MIL blob storage, version 2 (`ane_layers.program.weights` describes and reads it)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ane_layers.program.weights import ALIGNMENT, SENTINEL, VERSION

_CODES = {"fp16": 1, "fp32": 2, "uint8": 3, "int8": 4, "bf16": 5, "int16": 6, "uint16": 7, "int4": 8}
_CODES |= {"uint1": 9, "uint2": 10, "uint4": 11, "uint3": 12, "uint6": 13, "int32": 14, "uint32": 15}


class WeightWriter:
    """Appends blobs and returns the offsets by which a program refers to them. Equal blobs are stored once.

    Used as a context manager; the header is written on leaving.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[tuple[str, bytes], int] = {}
        self._count = 0
        self._end = ALIGNMENT

    def __enter__(self) -> WeightWriter:
        self._file: BinaryIO = self._path.open("wb")
        self._file.write(bytes(ALIGNMENT))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._file.write(struct.pack("<II", self._count, VERSION))
        self._file.close()

    @property
    def bytes_written(self) -> int:
        return self._end

    def add(self, dtype: str, data: np.ndarray, *, padding_bits: int = 0) -> int:
        """Stores one blob.

        Args:
            dtype: MIL's name of the element type.
            data: its bytes, as a contiguous array of any type.

        Returns:
            The offset of the blob's record.
        """
        return self.add_with_parts(dtype, data, [], padding_bits=padding_bits)[0]

    def add_with_parts(
        self, dtype: str, data: np.ndarray, parts: Sequence[tuple[int, int]], *, padding_bits: int = 0
    ) -> list[int]:
        """Stores one blob and records for parts of it, which share its bytes: an embedding and the pieces of a head tied to it.

        The records stand before the data, since a reader may expect data behind its record.

        Args:
            dtype: MIL's name of the element type.
            data: the whole blob.
            parts: byte offset and byte count of each part; offsets are multiples of 64.

        Returns:
            The record's offset of the whole, then of each part.
        """
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        wholes = [(0, raw.nbytes), *parts]
        for start, size in wholes:
            if start % ALIGNMENT or start + size > raw.nbytes:
                raise ValueError(f"part {start} + {size} of a blob of {raw.nbytes} bytes is not aligned or not inside")
        key = (f"{dtype} {wholes}", hashlib.sha256(raw.data).digest())
        if key not in self._offsets:
            self._offsets[key] = self._write(dtype, raw, wholes, padding_bits)
        first = self._offsets[key]
        return [first + ALIGNMENT * i for i in range(len(wholes))]

    def _write(self, dtype: str, raw: np.ndarray, records: Sequence[tuple[int, int]], padding_bits: int) -> int:
        first = self._end
        begin = first + ALIGNMENT * len(records)
        for number, (start, size) in enumerate(records):
            # A part ends on a whole byte; only the whole may not.
            padding = padding_bits if number == 0 else 0
            self._file.write(struct.pack("<IIQQQ32x", SENTINEL, _CODES[dtype], size, begin + start, padding))
        self._file.write(raw.data)
        self._end = begin + raw.nbytes
        padding = -self._end % ALIGNMENT
        self._file.write(bytes(padding))
        self._end += padding
        self._count += len(records)
        return first
