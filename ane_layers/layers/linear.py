"""Linear layers as 1×1 convolutions over `[B, C, 1, S]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`nn.Linear` written as a 1×1 convolution, the form Apple advises for the Neural Engine.

    The weight is kept as the convolution wants it, `[out, in, 1, 1]`; a state dict with `nn.Linear`'s `[out, in]` loads as it is.

    Args:
        in_features: channels of the input.
        out_features: channels of the output.
        bias: whether a bias is added.

    Shape:
        - input: `[B, in_features, 1, S]`
        - output: `[B, out_features, 1, S]`

    Source: Apple, "Deploying Transformers on the Apple Neural Engine".
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, 1, 1))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].ndim == 2:
            state_dict[name] = state_dict[name][:, :, None, None]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def fuse_linears(linears: Sequence[Linear]) -> Linear:
    """One `Linear` that computes several which read the same input; their outputs follow each other along the channels.

    A step of loading: three convolutions over the same input become one, and what follows them can be done once.

    Raises:
        ValueError: if there is nothing to fuse, the inputs differ in width, or only some have a bias.
    """
    if not linears:
        raise ValueError("fuse_linears needs at least one layer")
    widths = {linear.in_features for linear in linears}
    if len(widths) > 1:
        raise ValueError(f"fuse_linears: the layers read different widths: in_features {sorted(widths)}")
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        raise ValueError(f"fuse_linears: some layers have a bias and some do not: {[b is not None for b in biases]}")
    with torch.device("meta"):  # the weights are assigned below; nothing is allocated twice
        fused = Linear(widths.pop(), sum(linear.out_features for linear in linears), bias=biases[0] is not None)
    fused.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if biases[0] is not None:
        fused.bias = nn.Parameter(
            torch.cat([bias.detach() for bias in biases if bias is not None]), requires_grad=False
        )
    return fused


def reorder_rows(linear: Linear, rows: Tensor) -> Linear:
    """A `Linear` with its output channels in another order. A step of loading.

    Shape:
        - rows: int64 `[out_features]`, the old number of each new channel
    """
    reordered = fuse_linears([linear])
    reordered.weight = nn.Parameter(reordered.weight[rows], requires_grad=False)
    if reordered.bias is not None:
        reordered.bias = nn.Parameter(reordered.bias[rows], requires_grad=False)
    return reordered
