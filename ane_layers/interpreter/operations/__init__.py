"""The operations, grouped by what they do. Importing this package fills the table in `registry`."""

from ane_layers.interpreter.operations import (
    activations,
    convolution,
    elementwise,
    gathering,
    linear_algebra,
    normalization,
    reductions,
    shaping,
    slicing,
    sorting,
    states,
)

__all__ = [
    "activations",
    "convolution",
    "elementwise",
    "gathering",
    "linear_algebra",
    "normalization",
    "reductions",
    "shaping",
    "slicing",
    "sorting",
    "states",
]
