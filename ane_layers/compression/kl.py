"""How far a change moves a model's next-token distribution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ane_layers.compression.replay import Replay, replaced

# Positions whose distributions are held in fp64 at a time: 26 MB a tensor for a vocabulary of 102,400.
_CHUNK = 32


def divergence(original: Tensor, changed: Tensor, *, second_order: bool = False) -> Tensor:
    """Kullback-Leibler divergence of each position's distribution from the original's, in nats.

    With d the change of the logits less its mean under the original's distribution p, it is `log(1 + Σ p·(eᵈ - 1 - d))`: a sum of small
    positive terms, where the difference of two logarithms would lose a small divergence to rounding.

    Args:
        original: logits.
        changed: logits.
        second_order: whether `½·Σ p·d²`, the first term of its series, is wanted instead.

    Shape:
        - original, changed: `[b, S, V]`
        - output: fp64 `[b, S]`
    """
    rows = []
    for old, new in zip(original.flatten(0, 1).split(_CHUNK), changed.flatten(0, 1).split(_CHUNK), strict=True):
        z = old.double()
        p = z.softmax(-1)
        d = new.double() - z
        d -= (p * d).sum(-1, keepdim=True)
        rows.append(0.5 * (p * d * d).sum(-1) if second_order else torch.log1p((p * (torch.expm1(d) - d)).sum(-1)))
    return torch.cat(rows).view(original.shape[:2])


@torch.no_grad()
def changed_divergence(
    replay: Replay, weights: Mapping[str, Tensor], start: int, *, second_order: bool = False
) -> float:
    """Mean divergence over all positions when some weights have other values.

    Args:
        replay: of the original model.
        weights: the values, by parameter path.
        start: the first layer that they can change; the number of layers for the head.
        second_order: see `divergence`.
    """
    total = 0.0
    with replaced(replay.model, weights):
        for batch, original in enumerate(replay.logits):
            total += divergence(original, replay.run(batch, start), second_order=second_order).sum().item()
    return total / sum(batch.numel() for batch in replay.batches)
