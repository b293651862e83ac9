"""A model in parts: which layers a part has, and where a model is best cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive layers of a model, with what stands before or behind them.

    Attributes:
        first, last: the layers `first … last - 1`; none if they are equal.
        embedding: whether it begins with the token table; without, hidden states come in.
        head: whether it ends with the final norm and the output head; without, hidden states go out.
        number: of this part, from 0 on.
        count: of all parts.
    """

    first: int
    last: int
    embedding: bool = True
    head: bool = True
    number: int = 0
    count: int = 1

    @property
    def layers(self) -> range:
        return range(self.first, self.last)

    @property
    def whole(self) -> bool:
        return self.count == 1

    def __str__(self) -> str:
        names = [f"layers {self.first} … {self.last - 1}"] if self.layers else []
        names += [name for name, there in (("embedding", self.embedding), ("head", self.head)) if there]
        return ", ".join(names)


@dataclass(frozen=True)
class PartSizes:
    """Bytes of weights: of the embedding, of each layer, of norm and head."""

    embedding: int
    layers: Sequence[int]
    head: int


def cut(sizes: PartSizes, chunks: int, *, head_apart: bool = False) -> list[Part]:
    """Cuts a model into parts whose largest is as small as it can be.

    Args:
        sizes: of what cannot be divided.
        chunks: how many parts have layers. The embedding goes with the first layers, the head with the last ones.
        head_apart: whether the head is a further part of its own.

    Raises:
        ValueError: if there are fewer layers than chunks.
    """
    count = len(sizes.layers)
    if not 1 <= chunks <= count:
        raise ValueError(f"chunks must be within 1 … {count}, the number of layers, got {chunks}")
    items = list(sizes.layers)
    items[0] += sizes.embedding
    if not head_apart:
        items[-1] += sizes.head
    ends = _balanced(items, chunks)
    total = chunks + head_apart
    parts = [
        Part(
            first=first,
            last=last,
            embedding=first == 0,
            head=last == count and not head_apart,
            number=number,
            count=total,
        )
        for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    if head_apart:
        parts.append(Part(first=count, last=count, embedding=False, head=True, number=chunks, count=total))
    return parts


def cut_to(sizes: PartSizes, limit: int, *, head_apart: bool | None = None) -> list[Part]:
    """Cuts a model into as few parts as keep each within a number of bytes.

    Args:
        sizes: of what cannot be divided.
        limit: bytes of weights that a part may have.
        head_apart: whether the head is a part of its own; by default where it takes no further part.

    Raises:
        ValueError: if one layer, the embedding with a layer, or the head is larger than that.
    """
    for chunks in range(1, len(sizes.layers) + 1):
        for apart in (False, True) if head_apart is None else (head_apart,):
            if chunks - apart < 1:
                continue
            parts = cut(sizes, chunks - apart, head_apart=apart)
            if all(part_bytes(part, sizes) <= limit for part in parts):
                return parts
    parts = cut(sizes, len(sizes.layers), head_apart=head_apart is not False)
    largest = max(parts, key=lambda part: part_bytes(part, sizes))
    raise ValueError(
        f"no cut keeps every package within {limit / 1e6:,.0f} MB: {largest} alone has "
        f"{part_bytes(largest, sizes) / 1e6:,.0f} MB; allow more, or compress further"
    )


def part_bytes(part: Part, sizes: PartSizes) -> int:
    """Bytes of a part's weights."""
    layers = sum(sizes.layers[part.first : part.last])
    return layers + part.embedding * sizes.embedding + part.head * sizes.head


def _balanced(items: Sequence[int], groups: int) -> list[int]:
    """Ends of consecutive, non-empty groups whose largest sum is as small as it can be."""
    sums = [0]
    for item in items:
        sums.append(sums[-1] + item)
    # best[end]: the least largest sum of the groups so far over items[:end], and where the last of them begins.
    best = {end: (sums[end], 0) for end in range(1, len(items) + 1)}
    begins = [best]
    for group in range(1, groups):
        best = {
            end: min((max(begins[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(group, end))
            for end in range(group + 1, len(items) + 1)
        }
        begins.append(best)
    ends = [len(items)]
    for level in reversed(begins[1:]):
        ends.append(level[ends[-1]][1])
    return ends[::-1]
