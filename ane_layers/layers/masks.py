"""Additive attention masks: 0 keeps a cache slot, a large negative value hides it."""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -4e4
"""Hides a slot. Not -inf, which turns a fully masked row into NaN; small enough that fp16 (-65504) still holds it plus a score.

Source: Apple's coreai-models authoring rules.
"""


def causal_mask(position: int, length: int, context_length: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask of `length` new tokens, the first of them in cache slot `position`: token i sees slots 0 … position + i.

    Args:
        position: cache slot of the first new token.
        length: S.
        context_length: T, the slots that the attention reads.
        dtype: of the result.

    Shape:
        - output: `[1, 1, S, T]`

    Raises:
        ValueError: if the tokens do not fit: `position < 0`, `length < 1` or `position + length > context_length`.
    """
    if position < 0 or length < 1 or position + length > context_length:
        raise ValueError(
            f"causal_mask: {length} tokens at position {position} do not fit a context_length of {context_length}"
        )
    hidden = torch.arange(context_length)[None, :] > torch.arange(position, position + length)[:, None]  # [S, T]
    return torch.zeros(1, 1, length, context_length, dtype=dtype).masked_fill_(hidden, MASKED)


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
