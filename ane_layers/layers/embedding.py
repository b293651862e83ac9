"""Token embedding into the Neural Engine's layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of token vectors, looked up straight into `[B, C, 1, S]`.

    Args:
        num_embeddings: rows of the table, the vocabulary.
        embedding_dim: C.
        scale: factor on the vectors. Not in the table, which a tied head reads without it.

    Shape:
        - input: int32 `[B, S]`
        - output: `[B, C, 1, S]`
        - weight: `[num_embeddings, C]`, as Hugging Face stores it
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.weight)  # [B, S, C]
        if self.scale != 1.0:
            x = x * self.scale
        if input_ids.shape[1] == 1:
            return x.reshape(x.shape[0], x.shape[2], 1, 1)
        return x.transpose(1, 2).unsqueeze(2)
