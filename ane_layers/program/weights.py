"""The weight file of a package: blob storage, version 2.

A 64-byte header (number of blobs, version) is followed by records. A blob is referred to by the offset of its
64-byte record, which holds a sentinel, an element type, a size and the offset of the data; both start at a multiple
of 64. Elements of less than a byte are packed from the lowest bit up, across byte borders, and the record says how
many bits at the end are padding.

The file is memory-mapped, for a weight file may exceed the memory of the machine that inspects it.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGNMENT = 64
SENTINEL = 0xDEADBEEF
VERSION = 2
_HEADER = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQQ")

# The file numbers its element types otherwise than the program does.
_ELEMENT_TYPES = {
    1: "fp16",
    2: "fp32",
    3: "uint8",
    4: "int8",
    5: "bf16",
    6: "int16",
    7: "uint16",
    8: "int4",
    9: "uint1",
    10: "uint2",
    11: "uint4",
    12: "uint3",
    13: "uint6",
    14: "int32",
    15: "uint32",
    16: "fp8e4m3fn",
    17: "fp8e5m2",
}


@dataclass(frozen=True)
class BlobRecord:
    """Where a blob's data is and what it holds."""

    dtype: str
    byte_count: int
    data_offset: int
    padding_bits: int


class WeightFile:
    """One weight file, opened for reading.

    Raises:
        ValueError: the file is missing, shorter than its header, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: weight file is missing")
        status = path.stat()
        self._size = status.st_size
        self._records: dict[int, BlobRecord] = {}
        # A package may be saved anew under the same name while its old weights are still in use.
        self.identity = (str(path.resolve()), status.st_ino, status.st_mtime_ns, status.st_size)
        if self._size < ALIGNMENT:
            raise ValueError(f"{path}: weight file has {self._size} bytes, less than its {ALIGNMENT}-byte header")
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        _, version = _HEADER.unpack(self._bytes[: _HEADER.size].tobytes())
        if version != VERSION:
            raise ValueError(f"{path}: field version of the header is {version}, expected {VERSION}")

    def record(self, offset: int) -> BlobRecord:
        """The checked record at `offset`.

        Raises:
            ValueError: the offset or the data lies outside the file, is not aligned, or no record is there.
        """
        where = f"{self.path}: blob at offset {offset}"
        if offset < ALIGNMENT or offset % ALIGNMENT or offset + ALIGNMENT > self._size:
            raise ValueError(
                f"{where}: not a multiple of {ALIGNMENT} with a whole record inside the {self._size} bytes of the file"
            )
        sentinel, code, byte_count, data_offset, padding_bits = _RECORD.unpack(
            self._bytes[offset : offset + _RECORD.size].tobytes()
        )
        if sentinel != SENTINEL:
            raise ValueError(f"{where}: field sentinel is {sentinel:#010x}, expected {SENTINEL:#010x}")
        if code not in _ELEMENT_TYPES:
            raise ValueError(f"{where}: field dtype is {code}, which is no known element type")
        if data_offset < offset + ALIGNMENT or data_offset % ALIGNMENT:
            raise ValueError(f"{where}: field offset is {data_offset}, not an aligned place behind the record")
        if data_offset + byte_count > self._size:
            raise ValueError(
                f"{where}: data ends at {data_offset + byte_count}, the file at {self._size}: it is truncated"
            )
        if padding_bits > 7:
            raise ValueError(f"{where}: field padding is {padding_bits} bits, more than 7")
        self._records[offset] = BlobRecord(_ELEMENT_TYPES[code], byte_count, data_offset, padding_bits)
        return self._records[offset]

    def check_layout(self) -> None:
        """Whether the data of no blob read so far runs over a record: data offsets that are wrong mostly do.

        Blobs may share data, as a tied embedding and output head do.

        Raises:
            ValueError: one does.
        """
        offsets = sorted(self._records)
        for offset, record in self._records.items():
            following = bisect.bisect_right(offsets, record.data_offset - ALIGNMENT)
            if following < len(offsets) and offsets[following] < record.data_offset + record.byte_count:
                raise ValueError(
                    f"{self.path}: blob at offset {offset}: its data runs over the record at {offsets[following]}"
                )

    def data(self, record: BlobRecord) -> np.ndarray:
        """The blob's bytes as they are stored, uint8, still mapped: nothing is read before it is touched."""
        return self._bytes[record.data_offset : record.data_offset + record.byte_count]
