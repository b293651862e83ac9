"""Output head, split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ane_layers.layers.linear import Linear

SMALLEST_AXIS_LIMIT = 16_384
"""The longest axis that every known engine takes (A15, M2 and before). Source: ANEForge's notes, of medium confidence."""


class OutputHead(nn.Module):
    """Logits by several 1×1 convolutions, each over a piece of the vocabulary.

    A vocabulary of 102,400 exceeds what one engine axis holds (16,384 to 65,536, by chip). Piece i has the rows `i·size … (i + 1)·size`
    of the table, `size = ceil(vocab_size / pieces)`, the last one fewer where the division is not even. A state dict's `weight`
    `[vocab_size, C]` loads as it is; loaded with `assign=True` the pieces are views of it, so that a head tied to the embedding needs no
    memory of its own.

    Args:
        hidden_size: C.
        vocab_size: rows of the table.
        pieces: into how many convolutions it is split; by default 1 up to a vocabulary of 16,384 and 16 beyond.

    Shape:
        - input: `[B, C, 1, S]`
        - output: `[B, S, vocab_size]`

    Raises:
        ValueError: if `pieces` is not within 1 … vocab_size, or would leave the last piece empty.

    Source: Anemll advises 16 pieces; CoreML-LLM measured a small loss by splitting a vocabulary of 262k. Hence a setting.
    """

    def __init__(self, hidden_size: int, vocab_size: int, *, pieces: int | None = None) -> None:
        super().__init__()
        if pieces is None:
            pieces = 1 if vocab_size <= SMALLEST_AXIS_LIMIT else 16
        if not 1 <= pieces <= vocab_size:
            raise ValueError(f"OutputHead: pieces must be within 1 … {vocab_size}, got {pieces}")
        size = -(-vocab_size // pieces)
        last = vocab_size - size * (pieces - 1)
        if last < 1:
            raise ValueError(
                f"OutputHead: {pieces} pieces of {size} rows leave none for the last; vocab_size is {vocab_size}"
            )
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.sizes = [size] * (pieces - 1) + [last]
        self.pieces = nn.ModuleList(Linear(hidden_size, size) for size in self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.cat([piece(x) for piece in self.pieces], dim=1)  # [B, V, 1, S]
        if logits.shape[3] == 1:
            return logits.reshape(logits.shape[0], 1, self.vocab_size)
        return logits.squeeze(2).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, pieces={len(self.sizes)}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        table = state_dict.pop(f"{prefix}weight", None)
        if table is not None:
            if tuple(table.shape[:2]) != (self.vocab_size, self.hidden_size):
                raise ValueError(
                    f"{prefix}weight has shape {list(table.shape)}, expected [{self.vocab_size}, {self.hidden_size}]"
                )
            for i, rows in enumerate(table.split(self.sizes)):
                state_dict[f"{prefix}pieces.{i}.weight"] = rows
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
