"""Packs elements of less than a byte, as the weight file holds them."""

from __future__ import annotations

import numpy as np

_STEP = 3 << 20


def pack(elements: np.ndarray, bits: int) -> np.ndarray:
    """Elements packed from the lowest bit up, across byte borders; the reverse of `ane_layers.program.constants.unpack`.

    Args:
        elements: uint8 or int8 (two's complement) of any shape, each within `bits`.
        bits: 1, 2, 3, 4, 6 or 8.

    Shape:
        - output: uint8, `[ceil(count · bits / 8)]`
    """
    flat = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    if bits == 8:
        return flat
    flat = flat & np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        per_byte = 8 // bits
        padded = np.zeros(-(-flat.size // per_byte) * per_byte, np.uint8)
        padded[: flat.size] = flat
        packed = padded[0::per_byte].copy()
        for place in range(1, per_byte):
            packed |= padded[place::per_byte] << np.uint8(place * bits)
        return packed
    # 3 and 6 bits: three bytes hold 8 or 4 whole elements, put together as one number.
    per_three = 24 // bits
    size = -(-flat.size * bits // 8)
    packed = np.empty(-(-flat.size // per_three) * 3, np.uint8)
    for start in range(0, flat.size, _STEP // 3 * per_three):
        part = flat[start : start + _STEP // 3 * per_three]
        rows = np.zeros((-(-part.size // per_three), per_three), np.uint32)
        rows.reshape(-1)[: part.size] = part
        number = np.zeros(len(rows), np.uint32)
        for place in range(per_three):
            number |= rows[:, place] << np.uint32(place * bits)
        first = start // per_three * 3
        for byte in range(3):
            packed[first + byte : first + 3 * len(rows) : 3] = (number >> np.uint32(8 * byte)).astype(np.uint8)
    return packed[:size]
