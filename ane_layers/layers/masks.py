"""Additive attention masks: 0 keeps a cache slot, a large negative value hides it."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -4e4
"""Hides a slot. Not -inf, which turns a fully masked row into NaN; small enough that fp16 (-65504) still holds it plus a score.

Source: Apple's coreai-models authoring rules.
"""


def causal_mask(
    position: int, length: int, context_length: int, *, two_parts: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The mask of `length` new tokens, the first of them in cache slot `position`: token i sees slots 0 … position + i.

    Args:
        position: cache slot of the first new token.
        length: S.
        context_length: T, the slots that the attention reads.
        two_parts: for a cache that does not hold the new tokens yet: they are S columns of their own, last, and the cache's slots
            from `position` on are hidden.
        dtype: of the result.

    Shape:
        - output: `[1, 1, S, T]`, or `[1, 1, S, T + S]` in two parts

    Raises:
        ValueError: if the tokens do not fit: `position < 0`, `length < 1` or `position + length > context_length`.
    """
    if position < 0 or length < 1 or position + length > context_length:
        raise ValueError(
            f"causal_mask: {length} tokens at position {position} do not fit a context_length of {context_length}"
        )
    queries = torch.arange(position, position + length)
    slots = torch.arange(context_length)
    if not two_parts:
        return _mask(slots[None, :] > queries[:, None], dtype)
    old = (slots >= position).expand(length, context_length)
    return _mask(torch.cat([old, queries[None, :] > queries[:, None]], dim=1), dtype)


def sliding_mask(
    position: int,
    length: int,
    *,
    window: int,
    slots: int,
    two_parts: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The mask of `length` new tokens over a rolling cache, in which the token at position p lies in slot p % slots.

    A token sees itself and the window − 1 before it. What a slot holds follows from the position alone: the last token that belongs
    there. See `rolling_slots` for how many slots there must be.

    Args:
        position: of the first new token.
        length: S.
        window: tokens that a query sees, itself included.
        slots: W′, of the cache.
        two_parts: as for `causal_mask`.
        dtype: of the result.

    Shape:
        - output: `[1, 1, S, W′]`, or `[1, 1, S, W′ + S]` in two parts

    Raises:
        ValueError: if the cache has too few slots for the window and the block, or the tokens would lie on both sides of its end.
    """
    if position < 0 or length < 1 or window < 1:
        raise ValueError(f"sliding_mask: {length} tokens at position {position} with window {window} make no mask")
    if slots < window + length - 1:
        raise ValueError(
            f"sliding_mask: {slots} slots are too few for window {window} and {length} tokens at once: the block would overwrite what its "
            f"own first token sees; {window + length - 1} are needed"
        )
    if position % slots + length > slots:
        raise ValueError(
            f"sliding_mask: {length} tokens at position {position} would straddle the end of {slots} slots"
        )
    queries = torch.arange(position, position + length)[:, None]
    newest = position - 1 if two_parts else position + length - 1
    held = newest - (newest - torch.arange(slots)) % slots  # the position whose token each slot holds; below 0 for none
    hidden = (held < 0) | (held > queries) | (held <= queries - window)
    if two_parts:
        new = queries.reshape(1, -1)
        hidden = torch.cat([hidden, (new > queries) | (new <= queries - window)], dim=1)
    return _mask(hidden, dtype)


def rolling_slots(window: int, block: int) -> int:
    """Slots of a rolling cache: window + block − 1, rounded up to a multiple of 32.

    A block that is written before it is attended to, or whose padding is written, must not reach what its own tokens or the next
    ones see.
    """
    return -(-(window + block - 1) // 32) * 32


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, 1, *hidden.shape, dtype=dtype).masked_fill_(hidden, MASKED)


def fold_mask(mask: Tensor, groups: int) -> Tensor:
    """Lines a mask up with folded queries, whose rows are G groups of S tokens. Done once a call, for all layers.

    One token needs nothing: its mask row broadcasts over the groups. For more, the rows are written G times: the one repetition that is
    left in a prefill program, G·S·T values once instead of a reshape of the scores, H·S·T values, twice a layer.

    Args:
        mask: additive mask.
        groups: G, query heads per KV head.

    Shape:
        - mask: `[B, 1, S, T]`
        - output: `[B, 1, G·S, T]`, or the mask as it is if S = 1 or G = 1
    """
    if mask.shape[2] == 1 or groups == 1:
        return mask
    return torch.cat([mask] * groups, dim=2)
