"""Output head, split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ane_layers.layers.linear import Linear
from ane_layers.layers.softmax import soft_cap

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
        scale: factor on the logits, applied to the C values that they are made of.
        softcap: if given, logits are `softcap · tanh(logits / softcap)`.

    Shape:
        - input: `[B, C, 1, S]`
        - output: `[B, S, vocab_size]`

    Raises:
        ValueError: if `pieces` is not within 1 … vocab_size, or would leave the last piece empty.

    Source: Anemll advises 16 pieces; CoreML-LLM measured a small loss by splitting a vocabulary of 262k. Hence a setting.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        pieces: int | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.softcap = softcap
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
        logits = torch.cat(self._logits(x), dim=1)  # [B, V, 1, S]
        return _tokens_first(self._capped(logits))

    def _logits(self, x: Tensor) -> list[Tensor]:
        """Of each piece, `[B, size, 1, S]`, not capped: a cap keeps their order."""
        if self.scale != 1.0:
            x = x * self.scale
        return [piece(x) for piece in self.pieces]

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else soft_cap(logits, self.softcap)

    def argmax(self, x: Tensor) -> Tensor:
        """The most likely token of every position, the first one of several: found in each piece, then among the pieces' largest.

        Shape:
            - x: `[B, C, 1, S]`
            - output: int32 `[B, S]`
        """
        logits = [_tokens_first(part) for part in self._logits(x)]  # [B, S, size] each
        largest = torch.cat([part.amax(dim=2, keepdim=True) for part in logits], dim=2)  # [B, S, pieces]
        numbers = [
            part.argmax(dim=2, keepdim=True).to(torch.int32) + first
            for part, first in zip(logits, self._firsts(), strict=True)
        ]
        if len(numbers) == 1:
            return numbers[0].squeeze(2)
        winner = largest.argmax(dim=2, keepdim=True)
        return torch.cat(numbers, dim=2).gather(2, winner).squeeze(2)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most likely tokens of every position and their logits, the largest first: of each piece, then among those.

        Shape:
            - x: `[B, C, 1, S]`
            - output: int32 `[B, S, k]` and logits `[B, S, k]`

        Raises:
            ValueError: if k is not within 1 … vocab_size.
        """
        if not 1 <= k <= self.vocab_size:
            raise ValueError(f"OutputHead: top_k must be within 1 … {self.vocab_size}, got {k}")
        found = [
            _tokens_first(part).topk(min(k, size), dim=2)
            for part, size in zip(self._logits(x), self.sizes, strict=True)
        ]
        values = torch.cat([part.values for part in found], dim=2)  # [B, S, pieces·k]
        numbers = [part.indices.to(torch.int32) + first for part, first in zip(found, self._firsts(), strict=True)]
        if len(numbers) == 1:
            return numbers[0], self._capped(values)
        best = values.topk(k, dim=2)
        return torch.cat(numbers, dim=2).gather(2, best.indices), self._capped(best.values)

    def _firsts(self) -> list[int]:
        """The number of the first token of each piece."""
        return [self.sizes[0] * i for i in range(len(self.sizes))]

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


def _tokens_first(logits: Tensor) -> Tensor:
    """`[B, V, 1, S] → [B, S, V]`."""
    if logits.shape[3] == 1:
        return logits.reshape(logits.shape[0], 1, logits.shape[1])
    return logits.squeeze(2).transpose(1, 2)
