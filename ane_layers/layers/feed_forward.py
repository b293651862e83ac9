"""Gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ane_layers.layers.linear import Linear, fuse_linears

Activation = Callable[[Tensor], Tensor]


class GatedFeedForward(nn.Module):
    """`down_proj(activation(gate_proj(x)) · up_proj(x))`.

    Args:
        hidden_size: C.
        intermediate_size: channels in between.
        bias: whether the three projections add a bias.
        activation: of the gate, element by element.

    Shape:
        - input: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: Activation = F.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class FusedGatedFeedForward(nn.Module):
    """`GatedFeedForward` with gate and up in one convolution. Takes the plain layer's weights; made when a model is loaded.

    Shape:
        - input: `[B, C, 1, S]`
        - output: `[B, C, 1, S]`
    """

    def __init__(self, plain: GatedFeedForward) -> None:
        super().__init__()
        self.activation = plain.activation
        self.gate_up_proj = fuse_linears([plain.gate_proj, plain.up_proj])
        self.down_proj = plain.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=1)
        return self.down_proj(self.activation(gate) * up)
