"""Each operation against coremltools' own evaluation of it, numpy or torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mil_programs import save_program
from operation_checks import Make, check, run
from torch.nn import functional as F

from ane_layers.interpreter import MLProgram

mb = mil.Builder

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
POSITIVE = RNG.uniform(0.1, 2, (2, 3, 4, 5)).astype(np.float32)
UNIT = RNG.uniform(-0.9, 0.9, (2, 3, 4, 5)).astype(np.float32)
INTEGERS = RNG.integers(-7, 8, (2, 3, 4, 5)).astype(np.int32)
VECTOR = RNG.uniform(0.1, 2, 3).astype(np.float32)

UNARY = {
    **dict.fromkeys(["acos", "asin", "atanh"], UNIT),
    **dict.fromkeys(["sqrt", "log", "rsqrt", "inverse"], POSITIVE),
    **dict.fromkeys(
        ["abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "round", "sign", "sin", "sinh", "square",
         "tan", "tanh", "relu", "relu6", "sigmoid", "softplus", "softsign", "identity"], NORMAL * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_matches_coremltools(name: str, tmp_path: Path) -> None:
    check(tmp_path, lambda x: getattr(mb, name)(x=x), UNARY[name])


def test_round_halves_go_to_even(tmp_path: Path) -> None:
    check(tmp_path, lambda x: mb.round(x=x), np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]))


def test_epsilon_of_log_inverse_and_rsqrt(tmp_path: Path) -> None:
    x = np.float32([0, 1e-3, 2])
    for name in ("log", "inverse", "rsqrt"):
        check(tmp_path, lambda x, name=name: getattr(mb, name)(x=x, epsilon=0.01), x)


BINARY = ["add", "sub", "mul", "maximum", "minimum", "floor_div", "mod"]
COMPARE = ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"]


@pytest.mark.parametrize("name", [*BINARY, "real_div", "pow", *COMPARE])
def test_binary_broadcasts_like_coremltools(name: str, tmp_path: Path) -> None:
    x, y = (POSITIVE, POSITIVE[:1, :, :1]) if name == "pow" else (NORMAL, POSITIVE[:1, :, :1])
    check(tmp_path, lambda x, y: getattr(mb, name)(x=x, y=y), x, y, rtol=1e-4)


@pytest.mark.parametrize("name", [*BINARY, *COMPARE])
def test_binary_of_integers_matches_coremltools(name: str, tmp_path: Path) -> None:
    divisor = np.where(INTEGERS == 0, 3, INTEGERS)[::-1]
    check(tmp_path, lambda x, y: getattr(mb, name)(x=x, y=y), INTEGERS, np.ascontiguousarray(divisor))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logical_matches_coremltools(name: str, tmp_path: Path) -> None:
    def make(x: Any, y: Any) -> Any:
        both = getattr(mb, name)(x=mb.greater(x=x, y=0), y=mb.greater(x=y, y=2))
        return [both, mb.logical_not(x=both)]

    check(tmp_path, make, INTEGERS, np.ascontiguousarray(INTEGERS[::-1]))


ACTIVATIONS: dict[str, tuple[Make, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (lambda x: mb.silu(x=x), F.silu),
    "gelu": (lambda x: mb.gelu(x=x), F.gelu),
    "gelu tanh": (lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"), lambda x: F.gelu(x, approximate="tanh")),
    "gelu sigmoid": (lambda x: mb.gelu(x=x, mode="SIGMOID_APPROXIMATION"), lambda x: x * torch.sigmoid(1.702 * x)),
    "clamped_relu": (lambda x: mb.clamped_relu(x=x, alpha=0.3, beta=0.5), lambda x: F.leaky_relu(x, 0.3).clamp(max=0.5)),
    "elu": (lambda x: mb.elu(x=x, alpha=0.7), lambda x: F.elu(x, 0.7)),
    "leaky_relu": (lambda x: mb.leaky_relu(x=x, alpha=0.3), lambda x: F.leaky_relu(x, 0.3)),
    "linear_activation": (lambda x: mb.linear_activation(x=x, alpha=0.3, beta=0.5), lambda x: 0.3 * x + 0.5),
    "prelu": (lambda x: mb.prelu(x=x, alpha=VECTOR), lambda x: F.prelu(x, torch.tensor(VECTOR))),
    "scaled_tanh": (lambda x: mb.scaled_tanh(x=x, alpha=2.0, beta=0.5), lambda x: 2 * torch.tanh(0.5 * x)),
    "sigmoid_hard": (lambda x: mb.sigmoid_hard(x=x, alpha=0.2, beta=0.5), lambda x: (0.2 * x + 0.5).clamp(0, 1)),
    "thresholded_relu": (lambda x: mb.thresholded_relu(x=x, alpha=0.5), lambda x: torch.where(x >= 0.5, x, 0.0)),
    "clip": (lambda x: mb.clip(x=x, alpha=-0.5, beta=0.4), lambda x: x.clamp(-0.5, 0.4)),
    "threshold": (lambda x: mb.threshold(x=x, alpha=0.4), lambda x: x.clamp(min=0.4)),
    "softmax": (lambda x: mb.softmax(x=x, axis=1), lambda x: x.softmax(1)),
    "softplus_parametric": (
        lambda x: mb.softplus_parametric(x=x, alpha=VECTOR, beta=2 * VECTOR),
        lambda x: torch.tensor(VECTOR)[:, None, None] * F.softplus(2 * torch.tensor(VECTOR)[:, None, None] * x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_matches_torch(name: str, tmp_path: Path) -> None:
    make, reference = ACTIVATIONS[name]
    check(tmp_path, make, NORMAL, reference=reference(torch.tensor(NORMAL)))


REDUCTIONS: dict[str, Callable[[np.ndarray, tuple[int, ...], bool], np.ndarray]] = {
    "reduce_sum": lambda x, a, k: x.sum(a, keepdims=k),
    "reduce_mean": lambda x, a, k: x.mean(a, keepdims=k),
    "reduce_max": lambda x, a, k: x.max(a, keepdims=k),
    "reduce_min": lambda x, a, k: x.min(a, keepdims=k),
    "reduce_prod": lambda x, a, k: x.prod(a, keepdims=k),
    "reduce_l1_norm": lambda x, a, k: np.abs(x).sum(a, keepdims=k),
    "reduce_l2_norm": lambda x, a, k: np.sqrt((x * x).sum(a, keepdims=k)),
    "reduce_sum_square": lambda x, a, k: (x * x).sum(a, keepdims=k),
    "reduce_log_sum": lambda x, a, k: np.log(x.sum(a, keepdims=k)),
    "reduce_log_sum_exp": lambda x, a, k: np.log(np.exp(x).sum(a, keepdims=k)),
}


@settings(max_examples=10, deadline=None)
@given(axes=st.sets(st.integers(-4, -1), min_size=1), keep=st.booleans(), positive=st.booleans(), data=st.data())
def test_reductions_match_numpy(
    axes: set[int], keep: bool, positive: bool, data: st.DataObject, tmp_path_factory: Any
) -> None:
    chosen = tuple(axis if positive else axis + 4 for axis in sorted(axes))
    x = data.draw(hnp.arrays(np.float32, (2, 3, 1, 4), elements=st.floats(0.125, 4, width=16)))
    reference = [reduce(x.astype(np.float64), chosen, keep) for reduce in REDUCTIONS.values()]

    def make(x: Any) -> list[Any]:
        return [getattr(mb, name)(x=x, axes=list(chosen), keep_dims=keep) for name in REDUCTIONS]

    check(tmp_path_factory.mktemp("r"), make, x, reference=reference)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_arg_reduction_matches_numpy(axis: int, tmp_path: Path) -> None:
    def make(x: Any) -> list[Any]:
        return [
            mb.reduce_argmax(x=x, axis=axis),
            mb.reduce_argmin(x=x, axis=axis, keep_dims=True),
            mb.reduce_argmax(x=x, axis=axis, output_dtype="uint16"),
        ]

    largest = NORMAL.argmax(axis)
    check(tmp_path, make, NORMAL, reference=[largest, NORMAL.argmin(axis, keepdims=True), largest])


@st.composite
def slices(draw: Any) -> dict[str, list[Any]]:
    """Bounds that lie on the axes and leave something over, steps of both signs, and all three masks."""
    found: dict[str, list[Any]] = {
        "begin": [],
        "end": [],
        "stride": [],
        "begin_mask": [],
        "end_mask": [],
        "squeeze_mask": [],
    }
    for size in (4, 5, 6):
        step = draw(st.sampled_from([-2, -1, 1, 2, 3]))
        first = draw(st.integers(0, size - 1))
        last = draw(st.integers(first + 1, size)) if step > 0 else draw(st.integers(0, first))
        if step < 0 and last == first:
            last = first - 1 if first else 0
        begin_mask, end_mask = draw(st.booleans()), draw(st.booleans())
        if step < 0 and last >= first:
            end_mask = True
        negative = draw(st.booleans())
        found["begin"].append(first - size if negative else first)
        found["end"].append(last)
        found["stride"].append(step)
        found["begin_mask"].append(begin_mask)
        found["end_mask"].append(end_mask)
        found["squeeze_mask"].append(draw(st.booleans()) and not begin_mask and len(found["squeeze_mask"]) < 2)
    return found


def numpy_slice(x: np.ndarray, given_slice: dict[str, list[Any]]) -> tuple[Any, ...]:
    places: list[Any] = []
    for axis in range(x.ndim):
        if given_slice["squeeze_mask"][axis]:
            places.append(given_slice["begin"][axis])
            continue
        first = None if given_slice["begin_mask"][axis] else given_slice["begin"][axis]
        last = None if given_slice["end_mask"][axis] else given_slice["end"][axis]
        places.append(slice(first, last, given_slice["stride"][axis]))
    return tuple(places)


CUBE = np.arange(120, dtype=np.float32).reshape(4, 5, 6)


@settings(max_examples=10, deadline=None)
@given(chosen=slices())
def test_slices_match_numpy(chosen: dict[str, list[Any]], tmp_path_factory: Any) -> None:
    places = numpy_slice(CUBE, chosen)
    part = CUBE[places]
    if part.size == 0:
        return
    update = np.ascontiguousarray(-part - 1)
    updated = CUBE.copy()
    updated[places] = update

    def make(x: Any, values: Any) -> list[Any]:
        return [mb.slice_by_index(x=x, **chosen), mb.slice_update(x=x, update=values, **chosen)]

    if update.ndim:
        check(tmp_path_factory.mktemp("s"), make, CUBE, update, reference=[part, updated])


def test_slice_with_computed_bounds(tmp_path: Path) -> None:
    def make(x: Any, begin: Any, end: Any) -> Any:
        return mb.slice_by_index(x=x, begin=begin, end=end, begin_mask=[True, False, False])

    inputs = {"x": ((4, 5, 6), np.float32), "begin": ((3,), np.int32), "end": ((3,), np.int32)}
    path = save_program(tmp_path / "s.mlpackage", inputs, lambda v: [make(v["x"], v["begin"], v["end"])])
    program = MLProgram(path)

    def predict(begin: list[int], end: list[int]) -> np.ndarray:
        data = {"x": CUBE, "begin": np.array(begin, np.int32), "end": np.array(end, np.int32)}
        return next(iter(program.predict(data).values()))

    np.testing.assert_array_equal(predict([9, 1, 2], [3, 4, 6]), CUBE[:3, 1:4, 2:6])
    np.testing.assert_array_equal(predict([0, -2, 0], [4, 5, -1]), CUBE[:, 3:5, :5])
    with pytest.raises(
        ValueError, match=r"operation 'slice_by_index_\d+' \(slice_by_index\): end is 6 on axis 1 of size 5"
    ):
        predict([0, 1, 2], [3, 6, 6])
    with pytest.raises(ValueError, match=r"\(slice_by_index\): begin is -7 on axis 2 of size 6"):
        predict([0, 1, -7], [3, 4, 6])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_shaping_matches_coremltools(dtype: type, tmp_path: Path) -> None:
    def make(x: Any) -> list[Any]:
        return [
            mb.reshape(x=x, shape=[3, -1]),
            mb.reshape(x=x, shape=[1, 0, -1, 0]),
            mb.transpose(x=x, perm=[2, 0, -1, 1]),
            mb.expand_dims(x=x, axes=[0]),
            mb.squeeze(x=mb.expand_dims(x=x, axes=[-1]), axes=[-1]),
            mb.concat(values=[x, x], axis=-2),
            mb.stack(values=[x, x], axis=1),
            mb.tile(x=x, reps=[1, 2, 1, 3]),
            mb.slice_by_size(x=x, begin=[0, 1, 0, 2], size=[2, 1, -1, 2]),
            mb.reverse(x=x, axes=[1, -1]),
            mb.flatten2d(x=x, axis=2),
            mb.shape(x=x),
            *mb.split(x=x, num_splits=2, axis=2),
            *mb.split(x=x, split_sizes=[2, 3], axis=-1),
        ]

    x = NORMAL if dtype is np.float32 else INTEGERS
    reference: list[Any] = [
        x.reshape(3, -1), x.reshape(1, 3, 8, 5), x.transpose(2, 0, 3, 1), x[None], x, np.concatenate([x, x], -2),
        np.stack([x, x], 1), np.tile(x, (1, 2, 1, 3)), x[:, 1:2, :, 2:4], x[:, ::-1, :, ::-1], x.reshape(6, 20), np.array(x.shape),
        *np.split(x, 2, 2), *np.split(x, [2], -1),
    ]  # fmt: skip
    check(tmp_path, make, x, reference=reference)


def test_interleaved_concat_band_and_windows(tmp_path: Path) -> None:
    def make(x: Any) -> list[Any]:
        return [
            mb.concat(values=[x, mb.square(x=x)], axis=1, interleave=True),
            mb.band_part(x=x, lower=1, upper=0),
            mb.band_part(x=x, lower=-1, upper=2),
            mb.sliding_windows(x=x, axis=2, size=2, stride=2),
            mb.cumsum(x=x, axis=1),
            mb.cumsum(x=x, axis=-1, exclusive=True),
            mb.cumsum(x=x, axis=-1, exclusive=True, reverse=True),
        ]

    x = NORMAL
    interleaved = np.empty((2, 6, 4, 5), np.float32)
    interleaved[:, 0::2], interleaved[:, 1::2] = x, x * x
    before = np.cumsum(x, -1) - x
    behind = np.cumsum(x[..., ::-1], -1)[..., ::-1] - x
    windows = np.stack([x[:, :, 0:2], x[:, :, 2:4]], 2)
    reference = [
        interleaved,
        np.tril(x) * np.triu(np.ones((4, 5)), -1),
        np.tril(x, 2),
        windows,
        x.cumsum(1),
        before,
        behind,
    ]
    check(tmp_path, make, x, reference=reference)


def test_channel_and_space_match_torch(tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 8, 4, 6)).astype(np.float32)
    deep = mb.depth_to_space

    def make(x: Any) -> list[Any]:
        return [
            mb.pixel_shuffle(x=x, upscale_factor=2),
            mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)),
            mb.space_to_depth(x=deep(x=x, block_size=2), block_size=2),
            deep(x=x, block_size=2),
        ]

    t = torch.tensor(x)
    # Of the channels the block's place is the outer part, in pixel_shuffle the inner one.
    expected = F.pixel_shuffle(t.reshape(2, 4, 2, 4, 6).transpose(1, 2).reshape(2, 8, 4, 6), 2)
    check(tmp_path, make, x, reference=[F.pixel_shuffle(t, 2), F.pixel_unshuffle(t, 2), t, expected])


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_pad_matches_numpy(mode: str, tmp_path: Path) -> None:
    name = {"replicate": "edge"}.get(mode, mode)
    reference = np.pad(
        NORMAL, ((0, 0), (0, 0), (2, 1), (0, 3)), name, **({"constant_values": 0.5} if mode == "constant" else {})
    )
    check(tmp_path, lambda x: mb.pad(x=x, pad=[2, 1, 0, 3], mode=mode, constant_val=0.5), NORMAL, reference=reference)


def test_creation_matches_numpy(tmp_path: Path) -> None:
    def make(size: Any, x: Any) -> list[Any]:
        return [
            mb.fill(shape=mb.concat(values=[size, [3]], axis=0), value=2.5),
            mb.range_1d(start=2, end=mb.squeeze(x=size, axes=[0]), step=3),
            mb.fill_like(ref_tensor=x, value=7),
            mb.one_hot(indices=x, one_hot_vector_size=4, axis=1, on_value=5, off_value=-1),
        ]

    size, x = np.array([12], np.int32), np.array([[0, 3, 1], [2, 2, 0]], np.int32)
    hot = np.where(np.arange(4)[None, :, None] == x[:, None, :], 5, -1)
    check(tmp_path, make, size, x, reference=[np.full((12, 3), 2.5), np.arange(2, 12, 3), np.full((2, 3), 7), hot])


def test_gathers_match_numpy(tmp_path: Path) -> None:
    x = NORMAL
    rows = np.array([[2, 0], [1, 1]], np.int32)
    along = RNG.integers(0, 4, (2, 3, 2, 5)).astype(np.int32)
    points = np.array([[0, 2, 3], [1, 0, 1]], np.int32)
    batched = np.array([[[2, 3], [0, 1]], [[1, 0], [2, 2]]], np.int32)

    def make(x: Any, rows: Any, along: Any, points: Any, batched: Any) -> list[Any]:
        return [
            mb.gather(x=x, indices=rows, axis=1),
            mb.gather(x=x, indices=rows, axis=2, batch_dims=1),
            mb.gather_along_axis(x=x, indices=along, axis=2),
            mb.gather_nd(x=x, indices=points),
            mb.gather_nd(x=x, indices=batched, batch_dims=1),
        ]

    reference = [
        x[:, rows],
        np.stack([x[i][:, rows[i]] for i in range(2)]),
        np.take_along_axis(x, along, 2),
        x[points[:, 0], points[:, 1], points[:, 2]],
        np.stack([x[i][batched[i][:, 0], batched[i][:, 1]] for i in range(2)]),
    ]
    check(tmp_path, make, x, rows, along, points, batched, reference=reference)


@pytest.mark.parametrize("index", [-1, 5])
@pytest.mark.parametrize("name", ["gather", "gather_along_axis", "gather_nd"])
def test_index_outside_is_refused(name: str, index: int, tmp_path: Path) -> None:
    indices = np.array([[index]], np.int32) if name == "gather_nd" else np.array([index], np.int32)
    with pytest.raises(ValueError, match=rf"\({name}\): .*index"):
        run(tmp_path, lambda x, i: getattr(mb, name)(x=x, indices=i), np.arange(5, dtype=np.float32), indices)


def test_rows_beyond_16_bits(tmp_path: Path) -> None:
    table = np.arange(102400, dtype=np.float32)[:, None]
    ids = np.array([65535, 65536, 102399], np.int32)
    check(tmp_path, lambda i: mb.gather(x=table, indices=i, axis=0), ids, reference=table[ids])


@settings(max_examples=6, deadline=None)
@given(
    transpose_x=st.booleans(),
    transpose_y=st.booleans(),
    batch=st.sampled_from([((2, 3), (2, 3)), ((2, 1), (3,)), ((), (2,))]),
)
def test_matmul_matches_numpy(transpose_x: bool, transpose_y: bool, batch: Any, tmp_path_factory: Any) -> None:
    x = RNG.standard_normal((*batch[0], 4, 5)).astype(np.float32)
    y = RNG.standard_normal((*batch[1], 5, 6)).astype(np.float32)
    reference = x @ y
    x = np.ascontiguousarray(x.swapaxes(-1, -2)) if transpose_x else x
    y = np.ascontiguousarray(y.swapaxes(-1, -2)) if transpose_y else y
    make = lambda x, y: mb.matmul(x=x, y=y, transpose_x=transpose_x, transpose_y=transpose_y)  # noqa: E731
    check(tmp_path_factory.mktemp("m"), make, x, y, reference=reference)


def test_linear_einsum_and_attention_match_torch(tmp_path: Path) -> None:
    weight, bias = RNG.standard_normal((6, 5)).astype(np.float32), RNG.standard_normal(6).astype(np.float32)
    key = RNG.standard_normal((2, 3, 7, 5)).astype(np.float32)
    mask = RNG.standard_normal((4, 7)).astype(np.float32)
    other = RNG.standard_normal((2, 5, 4, 6)).astype(np.float32)

    def make(x: Any, key: Any, mask: Any) -> list[Any]:
        return [
            mb.linear(x=x, weight=weight, bias=bias),
            mb.einsum(values=(x, other), equation="nchw,nwhu->nchu"),
            mb.scaled_dot_product_attention(query=x, key=key, value=key, attn_mask=mask),
            mb.scaled_dot_product_attention(query=x, key=key, value=key, attn_mask=mb.greater(x=mask, y=-1.0)),
        ]

    t, k, m = torch.tensor(NORMAL), torch.tensor(key), torch.tensor(mask)
    attend = F.scaled_dot_product_attention
    reference = [
        F.linear(t, torch.tensor(weight), torch.tensor(bias)),
        np.einsum("nchw,nwhu->nchu", NORMAL, other),
        attend(t, k, k, m),
        attend(t, k, k, m > -1),
    ]
    check(tmp_path, make, NORMAL, key, mask, reference=reference)


@pytest.mark.parametrize(
    ("pad_type", "pad", "strides", "dilations", "groups"),
    [
        ("valid", None, (1, 1), (1, 1), 1),
        ("custom", (2, 1, 0, 3), (2, 1), (1, 2), 1),
        ("same", None, (2, 3), (1, 1), 2),
        ("same_lower", None, (1, 1), (1, 1), 4),
    ],
)
def test_conv_matches_torch(pad_type: str, pad: Any, strides: Any, dilations: Any, groups: int, tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 4, 9, 8)).astype(np.float32)
    weight = RNG.standard_normal((8, 4 // groups, 2, 4)).astype(np.float32)
    bias = RNG.standard_normal(8).astype(np.float32)
    options = {"pad_type": pad_type, "strides": strides, "dilations": dilations, "groups": groups}
    if pad:
        options["pad"] = pad
    # "same": ⌈size / stride⌉ positions; the odd one of the padding goes behind, with same_lower before.
    amounts = {"valid": (0, 0, 0, 0), "custom": (0, 3, 2, 1), "same": (0, 2, 0, 1), "same_lower": (2, 1, 1, 0)}[
        pad_type
    ]
    if pad_type == "same":
        amounts = (1, 1, 0, 1)  # widths 4 by 3 over 8: 2 in all; heights 2 by 2 over 9: 1
    padded = F.pad(torch.tensor(x), amounts)
    reference = F.conv2d(padded, torch.tensor(weight), torch.tensor(bias), strides, 0, dilations, groups)
    check(tmp_path, lambda x: mb.conv(x=x, weight=weight, bias=bias, **options), x, reference=reference)


@pytest.mark.parametrize("pad", [None, (1, 0, 2, 1)])
def test_conv_transpose_matches_torch(pad: Any, tmp_path: Path) -> None:
    x = RNG.standard_normal((2, 4, 5, 6)).astype(np.float32)
    weight = RNG.standard_normal((4, 3, 3, 4)).astype(np.float32)
    full = F.conv_transpose2d(torch.tensor(x), torch.tensor(weight), stride=(2, 1), groups=2)
    options = {"strides": (2, 1), "groups": 2} | ({"pad": pad, "pad_type": "custom"} if pad else {})
    reference = full[:, :, 1:, 2:-1] if pad else full
    check(tmp_path, lambda x: mb.conv_transpose(x=x, weight=weight, **options), x, reference=reference)


def test_normalizations_match_torch(tmp_path: Path) -> None:
    gamma, beta = RNG.standard_normal((4, 5)).astype(np.float32), RNG.standard_normal((4, 5)).astype(np.float32)
    mean, variance = RNG.standard_normal((2, 3)).astype(np.float32), VECTOR

    def make(x: Any) -> list[Any]:
        return [
            mb.layer_norm(x=x, axes=[2, -1], gamma=gamma, beta=beta, epsilon=1e-3),
            mb.batch_norm(x=x, mean=mean[0], variance=variance, gamma=mean[1], beta=VECTOR, epsilon=1e-3),
            mb.instance_norm(x=x, gamma=mean[0], beta=mean[1], epsilon=1e-3),
            mb.l2_norm(x=x, epsilon=1e-3),
            mb.local_response_norm(x=x, size=3, alpha=0.1, beta=0.7, k=1.5),
        ]

    t = torch.tensor(NORMAL)
    mean_t, v = torch.tensor(mean), torch.tensor(VECTOR)
    reference = [
        F.layer_norm(t, (4, 5), torch.tensor(gamma), torch.tensor(beta), 1e-3),
        F.batch_norm(t, mean_t[0], v, mean_t[1], v, eps=1e-3),
        F.instance_norm(t, weight=mean_t[0], bias=mean_t[1], eps=1e-3),
        t / (t.square().sum((1, 2, 3), keepdim=True) + 1e-3).sqrt(),
        F.local_response_norm(t, 3, 0.1, 0.7, 1.5),
    ]
    check(tmp_path, make, NORMAL, reference=reference)


def test_sorting_matches_numpy(tmp_path: Path) -> None:
    def make(x: Any) -> list[Any]:
        return [
            mb.argsort(x=x, axis=1, ascending=True),
            mb.argsort(x=x),
            *mb.topk(x=x, k=3, axis=-1),
            *mb.topk(x=x, k=2, axis=2, ascending=True, output_indices_dtype="uint16"),
        ]

    down, up = np.argsort(-NORMAL, -1)[..., :3], np.argsort(NORMAL, 2)[:, :, :2]
    reference = [
        np.argsort(NORMAL, 1), np.argsort(-NORMAL, -1),
        np.take_along_axis(NORMAL, down, -1), down, np.take_along_axis(NORMAL, up, 2), up,
    ]  # fmt: skip
    check(tmp_path, make, NORMAL, reference=reference)


def test_select_and_casts_match_numpy(tmp_path: Path) -> None:
    def make(x: Any, y: Any) -> list[Any]:
        return [
            mb.select(cond=mb.greater(x=x, y=0.0), a=x, b=y),
            mb.cast(x=x, dtype="int32"),
            mb.cast(x=mb.cast(x=y, dtype="int32"), dtype="uint8"),
            mb.cast(x=x, dtype="bool"),
        ]

    y = np.ascontiguousarray(NORMAL[::-1]) * 400
    reference = [np.where(NORMAL > 0, NORMAL, y), np.trunc(NORMAL), y.astype(np.int32).astype(np.uint8), NORMAL != 0]
    check(tmp_path, make, NORMAL, y, reference=reference)
