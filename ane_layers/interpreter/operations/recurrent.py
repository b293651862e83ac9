"""Recurrent layers. x is (S, B, I): steps, batch, inputs; a state is (B, H).

With direction `"reverse"` the steps are taken from the last to the first and the outputs come in the order they are made;
of a bidirectional LSTM both halves come in the order of x. These are the conventions of coremltools' own tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ane_layers.interpreter.registry import operation

# With the parameters that coremltools' tests take for the defaults: scaled_tanh scales by one.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "linear": lambda x: x,
    "relu": torch.relu,
    "scaled_tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "tanh": torch.tanh,
}


@operation("rnn")
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, ...]:
    activate = _activation(activation)
    h, outputs = initial_h, []
    for given in F.linear(_ordered(x, direction), weight_ih, bias):
        h = activate(given + F.linear(h, weight_hh))
        outputs.append(h)
    return _sequence(outputs, h, output_sequence), h


@operation("gru")
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The weights are in the order reset, output, update. `reset_after` resets the product, its bias included, not h."""
    gate, activate = _activation(recurrent_activation), _activation(activation)
    hidden_bias = torch.zeros(weight_hh.shape[0]) if bias is None else bias
    r_hidden, o_hidden, z_hidden = weight_hh.chunk(3)
    r_bias, o_bias, z_bias = hidden_bias.chunk(3)
    h, outputs = initial_h, []
    for given in F.linear(_ordered(x, direction), weight_ih, input_bias):
        r_given, o_given, z_given = given.chunk(3, -1)
        r = gate(r_given + F.linear(h, r_hidden, r_bias))
        z = gate(z_given + F.linear(h, z_hidden, z_bias))
        reset = r * F.linear(h, o_hidden, o_bias) if reset_after else F.linear(r * h, o_hidden, o_bias)
        h = (1 - z) * activate(o_given + reset) + z * h
        outputs.append(h)
    return _sequence(outputs, h, output_sequence), h


@operation("lstm")
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, ...]:
    """The weights are in the order input, forget, output, cell; the cell state is clipped to [-clip, clip]."""
    activations = _activation(recurrent_activation), _activation(cell_activation), _activation(activation)
    if direction != "bidirectional":
        ordered = _ordered(x, direction)
        outputs, h, c = _lstm(ordered, initial_h, initial_c, weight_ih, weight_hh, bias, peephole, activations, clip)
        return _sequence(outputs, h, output_sequence), h, c
    if weight_ih_back is None or weight_hh_back is None:
        raise ValueError("weight_ih_back or weight_hh_back is missing for direction 'bidirectional'")
    h, h_back = initial_h.chunk(2, -1)
    c, c_back = initial_c.chunk(2, -1)
    outputs, h, c = _lstm(x, h, c, weight_ih, weight_hh, bias, peephole, activations, clip)
    back, h_back, c_back = _lstm(
        x.flip(0), h_back, c_back, weight_ih_back, weight_hh_back, bias_back, peephole_back, activations, clip
    )
    both = [torch.cat(pair, -1) for pair in zip(outputs, reversed(back), strict=True)]
    h = torch.cat([h, h_back], -1)
    return _sequence(both, h, output_sequence), h, torch.cat([c, c_back], -1)


def _lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    peephole: Tensor | None,
    activations: tuple[Callable[[Tensor], Tensor], ...],
    clip: float | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    gate, cell, activate = activations
    # A gate's view of the cell state; without a peephole it sees none.
    i_sees, f_sees, o_sees = (torch.zeros(3, 1) if peephole is None else peephole).chunk(3)
    i_sees, f_sees, o_sees = i_sees.reshape(-1), f_sees.reshape(-1), o_sees.reshape(-1)
    outputs = []
    for given in F.linear(x, weight_ih, bias):
        i, f, o, z = (given + F.linear(h, weight_hh)).chunk(4, -1)
        c = gate(f + c * f_sees) * c + gate(i + c * i_sees) * cell(z)
        if clip is not None:
            c = c.clamp(-clip, clip)
        h = gate(o + c * o_sees) * activate(c)
        outputs.append(h)
    return outputs, h, c


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name.lower() not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name.lower()]


def _ordered(x: Tensor, direction: str) -> Tensor:
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction is {direction!r}, expected forward or reverse")
    return x.flip(0) if direction == "reverse" else x


def _sequence(outputs: list[Tensor], last: Tensor, whole: bool) -> Tensor:
    return torch.stack(outputs) if whole and outputs else last.unsqueeze(0)
