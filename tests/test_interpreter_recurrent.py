"""Recurrent layers against torch's, and against their formulas where torch has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_checks import check, run

mb = mil.Builder

S, B, I, H = 4, 2, 3, 5  # noqa: E741 - steps, batch, inputs, hidden


def reordered(weight: torch.Tensor, order: list[int]) -> np.ndarray:
    """torch's gates in the order that Core ML wants them."""
    return torch.cat([weight.chunk(len(order))[i] for i in order]).detach().numpy()


def inputs(seed: int, states: int, directions: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(S, B, I), *[(B, directions * H)] * states]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


LSTM_ORDER = [0, 1, 3, 2]


@settings(max_examples=6, deadline=None)
@given(direction=st.sampled_from(["forward", "reverse", "bidirectional"]), whole=st.booleans(), bias=st.booleans())
def test_lstm_matches_torch(direction: str, whole: bool, bias: bool, tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    both = direction == "bidirectional"
    layer = torch.nn.LSTM(I, H, bias=bias, bidirectional=both)
    x, h, c = inputs(1, 2, 1 + both)
    given_x = torch.tensor(x[::-1].copy() if direction == "reverse" else x)
    states = tuple(torch.tensor(state).reshape(B, 1 + both, H).transpose(0, 1).contiguous() for state in (h, c))
    outputs, ends = layer(given_x, states)
    ends = [end.transpose(0, 1).reshape(B, -1) for end in ends]
    options: dict[str, Any] = {"direction": direction, "output_sequence": whole}
    for suffix, back in (("", ""), ("_reverse", "_back")) if both else (("", ""),):
        options[f"weight_ih{back}"] = reordered(getattr(layer, f"weight_ih_l0{suffix}"), LSTM_ORDER)
        options[f"weight_hh{back}"] = reordered(getattr(layer, f"weight_hh_l0{suffix}"), LSTM_ORDER)
        if bias:
            total = getattr(layer, f"bias_ih_l0{suffix}") + getattr(layer, f"bias_hh_l0{suffix}")
            options[f"bias{back}"] = reordered(total, LSTM_ORDER)
    reference = [outputs.detach() if whole else ends[0].detach()[None], *(end.detach() for end in ends)]
    make = lambda x, h, c: list(mb.lstm(x=x, initial_h=h, initial_c=c, **options))  # noqa: E731
    check(tmp_path_factory.mktemp("l"), make, x, h, c, reference=reference, rtol=1e-4)


ACTIVATIONS = {
    "tanh": np.tanh,
    "scaled_tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "relu": lambda x: np.maximum(x, 0),
    "linear": lambda x: x,
}


@settings(max_examples=6, deadline=None)
@given(
    names=st.tuples(*[st.sampled_from(sorted(ACTIVATIONS))] * 3), clip=st.sampled_from([None, 0.3]), seed=st.integers(0, 9)
)  # fmt: skip
def test_lstm_with_peepholes_matches_its_formula(
    names: Any, clip: float | None, seed: int, tmp_path_factory: Any
) -> None:
    x, h, c = inputs(seed, 2)
    rng = np.random.default_rng(seed)
    wx, wh, b, p = (
        rng.standard_normal(shape).astype(np.float32) * 0.5 for shape in ((4 * H, I), (4 * H, H), 4 * H, 3 * H)
    )
    gate, cell, activate = (ACTIVATIONS[name] for name in names)
    now, state = h.astype(np.float64), c.astype(np.float64)
    outputs = []
    for step in x:
        i, f, o, z = np.split(step @ wx.T + now @ wh.T + b, 4, -1)
        state = gate(f + p[H : 2 * H] * state) * state + gate(i + p[:H] * state) * cell(z)
        state = state if clip is None else np.clip(state, -clip, clip)
        now = gate(o + p[2 * H :] * state) * activate(state)
        outputs.append(now)
    options = {
        "weight_ih": wx, "weight_hh": wh, "bias": b, "peephole": p, "output_sequence": True,
        "recurrent_activation": names[0], "cell_activation": names[1], "activation": names[2],
    } | ({} if clip is None else {"clip": np.float32(clip)})  # fmt: skip
    make = lambda x, h, c: list(mb.lstm(x=x, initial_h=h, initial_c=c, **options))  # noqa: E731
    check(tmp_path_factory.mktemp("p"), make, x, h, c, reference=[np.stack(outputs), now, state], rtol=1e-4)


@settings(max_examples=4, deadline=None)
@given(reverse=st.booleans(), whole=st.booleans())
def test_gru_matches_torch_and_its_formula(reverse: bool, whole: bool, tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    layer = torch.nn.GRU(I, H)
    x, h = inputs(2, 1)
    ordered = x[::-1].copy() if reverse else x
    order = [0, 2, 1]  # torch has reset, update, output
    options = {
        "weight_ih": reordered(layer.weight_ih_l0, order), "weight_hh": reordered(layer.weight_hh_l0, order),
        "direction": "reverse" if reverse else "forward", "output_sequence": whole,
    }  # fmt: skip
    wx, wh = options["weight_ih"], options["weight_hh"]
    bias, given_bias = reordered(layer.bias_hh_l0, order), reordered(layer.bias_ih_l0, order)
    outputs, end = layer(torch.tensor(ordered), torch.tensor(h)[None])
    now = h
    before = []
    for step in ordered:
        # Up to iOS17 the reset gate meets h, and the biases are one.
        gates = 1 / (1 + np.exp(-(step @ wx.T + now @ wh.T + bias)))
        r, z = gates[:, :H], gates[:, 2 * H :]
        new = np.tanh(step @ wx[H : 2 * H].T + (r * now) @ wh[H : 2 * H].T + bias[H : 2 * H])
        now = (1 - z) * new + z * now
        before.append(now)

    def make(x: Any, h: Any) -> list[Any]:
        common = {"x": x, "initial_h": h, "bias": bias, **options}
        return [*mb.gru(reset_after=True, input_bias=given_bias, **common), *mb.gru(**common)]

    last = end[0].detach().numpy()
    reference = [outputs.detach().numpy() if whole else last[None], last, np.stack(before) if whole else now[None], now]
    check(tmp_path_factory.mktemp("g"), make, x, h, reference=reference, rtol=1e-4)


@settings(max_examples=4, deadline=None)
@given(activation=st.sampled_from(["tanh", "relu"]), reverse=st.booleans(), whole=st.booleans())
def test_rnn_matches_torch(activation: str, reverse: bool, whole: bool, tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    layer = torch.nn.RNN(I, H, nonlinearity=activation)
    x, h = inputs(3, 1)
    outputs, end = layer(torch.tensor(x[::-1].copy() if reverse else x), torch.tensor(h)[None])
    weights = {name: getattr(layer, f"{name}_l0").detach().numpy() for name in ("weight_ih", "weight_hh")}

    def make(x: Any, h: Any) -> list[Any]:
        bias = (layer.bias_ih_l0 + layer.bias_hh_l0).detach().numpy()
        direction = "reverse" if reverse else "forward"
        return list(
            mb.rnn(
                x=x,
                initial_h=h,
                bias=bias,
                direction=direction,
                output_sequence=whole,
                activation=activation,
                **weights,
            )
        )

    reference = [(outputs if whole else end).detach(), end[0].detach()]
    check(tmp_path_factory.mktemp("r"), make, x, h, reference=reference, rtol=1e-4)


def test_unknown_activation_is_refused(tmp_path: Path) -> None:
    x, h = inputs(0, 1)
    weights = {"weight_ih": np.zeros((H, I), np.float32), "weight_hh": np.zeros((H, H), np.float32)}
    with pytest.raises(ValueError, match=r"\(rnn\): activation is 'softmax', expected one of hard_sigmoid, "):
        run(tmp_path, lambda x, h: list(mb.rnn(x=x, initial_h=h, activation="softmax", **weights)), x, h)
