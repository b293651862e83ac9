"""What the layers of one kind share in a call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ane_layers.layers import Context, KVCache, NoCache, fold_mask


@dataclass(frozen=True, kw_only=True)
class Step:
    """Position, mask, cache and rotation of one call, for all layers with the same kind of attention.

    Attributes:
        position: int32 `[1]`, slot of the first new token in this cache.
        mask: additive, lined up with the scores once `folded`.
        cache: of these layers.
        cos, sin: of the new tokens' positions.
        slots: of the cache that attention reads, from the first on; all of them if None.
    """

    position: Tensor
    mask: Tensor
    cache: KVCache | NoCache
    cos: Tensor
    sin: Tensor
    slots: int | None = None

    def extend(self, layer: int, key: Tensor, value: Tensor) -> Context:
        """A layer's new rows `[B, K, D, S]` into the cache, and what its attention reads out."""
        return self.cache.extend(layer, key, value, self.position, slots=self.slots)

    def folded(self, groups: int, *, fold_rows: bool = True, query_scale: float = 1.0) -> Step:
        """For attention in the folded layout: done once for all layers.

        Args:
            groups: G.
            fold_rows: whether the mask gets a row for every query of a group.
            query_scale: factor on the queries, which their rotation applies: it is linear, so this costs no operation in a layer.

        Shape:
            - mask: `[1, 1, G·S, T]`
            - cos, sin: `[1, 1, D, (G+1)·S]`, or `[1, 1, D, 1]` for one token without a scale
        """
        tables = [table.transpose(2, 3) for table in (self.cos, self.sin)]  # [1, 1, D, S]
        if query_scale != 1.0:
            tables = [torch.cat([table * query_scale] * groups + [table], dim=3) for table in tables]
        elif self.mask.shape[2] > 1:
            tables = [torch.cat([table] * (groups + 1), dim=3) for table in tables]
        mask = fold_mask(self.mask, groups) if fold_rows else self.mask
        return replace(self, mask=mask, cos=tables[0], sin=tables[1])
