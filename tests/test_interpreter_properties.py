"""Families of operations over shapes, values and options that hypothesis chooses; one program holds a whole family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from operation_checks import check, evaluate
from torch.nn import functional as F

mb = mil.Builder

ANYWHERE = [
    "abs", "atan", "ceil", "cos", "erf", "floor", "identity", "relu", "relu6", "round", "sign", "sigmoid", "sin", "softplus",
    "softsign", "square", "tanh",
]  # fmt: skip
POSITIVE = ["exp", "exp2", "cosh", "inverse", "log", "rsqrt", "sinh", "sqrt", "tan"]
INSIDE = ["acos", "asin", "atanh"]


def floats(low: float, high: float) -> Any:
    return hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=4), elements=st.floats(low, high, width=32))


@settings(max_examples=6, deadline=None)
@given(anywhere=floats(-60, 60), positive=floats(0.0625, 4), inside=floats(-0.875, 0.875))
def test_unary_match_coremltools(anywhere: Any, positive: Any, inside: Any, tmp_path_factory: Any) -> None:
    def make(*values: Any) -> list[Any]:
        return [
            getattr(mb, name)(x=x)
            for names, x in zip((ANYWHERE, POSITIVE, INSIDE), values, strict=True)
            for name in names
        ]

    check(tmp_path_factory.mktemp("u"), make, anywhere, positive, inside, rtol=1e-4)


BINARY = ["add", "sub", "mul", "maximum", "minimum"]
DIVIDING = ["floor_div", "mod", "real_div"]
COMPARING = ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"]


@settings(max_examples=6, deadline=None)
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=4, max_side=3),
    integers=st.booleans(),
    seed=st.integers(0, 99),
)
def test_binary_match_coremltools(shapes: Any, integers: bool, seed: int, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng(seed)
    kind = np.int32 if integers else np.float32
    x, y = (rng.integers(-6, 7, shape).astype(kind) for shape in shapes.input_shapes)
    if not integers:
        x, y = x / np.float32(2), y / np.float32(4)
    divisor = np.where(y == 0, kind(3), y)

    def make(x: Any, y: Any, divisor: Any) -> list[Any]:
        plain = [getattr(mb, name)(x=x, y=y) for name in BINARY + COMPARING]
        # Integers divide to integers, and how is for the device to say.
        divided = [getattr(mb, name)(x=x, y=divisor) for name in DIVIDING if not (integers and name == "real_div")]
        flags = mb.greater(x=x, y=y), mb.less(x=x, y=divisor)
        logical = [getattr(mb, f"logical_{name}")(x=flags[0], y=flags[1]) for name in ("and", "or", "xor")]
        return [*plain, *divided, *logical, mb.select(cond=flags[0], a=mb.add(x=x, y=y), b=mb.sub(x=x, y=y))]

    check(tmp_path_factory.mktemp("b"), make, x, y, divisor, rtol=1e-4)


ACTIVATIONS: list[tuple[Callable[[Any, float, float], Any], Callable[[torch.Tensor, float, float], torch.Tensor]]] = [
    (lambda x, a, b: mb.silu(x=x), lambda x, a, b: F.silu(x)),
    (lambda x, a, b: mb.gelu(x=x), lambda x, a, b: F.gelu(x)),
    (lambda x, a, b: mb.gelu(x=x, mode="TANH_APPROXIMATION"), lambda x, a, b: F.gelu(x, approximate="tanh")),
    (lambda x, a, b: mb.clamped_relu(x=x, alpha=a, beta=b), lambda x, a, b: F.leaky_relu(x, a).clamp(max=b)),
    (lambda x, a, b: mb.elu(x=x, alpha=a), lambda x, a, b: F.elu(x, a)),
    (lambda x, a, b: mb.leaky_relu(x=x, alpha=a), lambda x, a, b: F.leaky_relu(x, a)),
    (lambda x, a, b: mb.linear_activation(x=x, alpha=a, beta=b), lambda x, a, b: a * x + b),
    (lambda x, a, b: mb.scaled_tanh(x=x, alpha=a, beta=b), lambda x, a, b: a * torch.tanh(b * x)),
    (lambda x, a, b: mb.sigmoid_hard(x=x, alpha=a, beta=b), lambda x, a, b: (a * x + b).clamp(0, 1)),
    (lambda x, a, b: mb.thresholded_relu(x=x, alpha=a), lambda x, a, b: torch.where(x >= a, x, 0.0)),
    (lambda x, a, b: mb.clip(x=x, alpha=-a, beta=b), lambda x, a, b: x.clamp(-a, b)),
    (lambda x, a, b: mb.threshold(x=x, alpha=a), lambda x, a, b: x.clamp(min=a)),
]


@settings(max_examples=4, deadline=None)
@given(x=floats(-30, 30), alpha=st.floats(0.125, 2, width=32), beta=st.floats(0.125, 2, width=32))
def test_activations_match_torch(x: Any, alpha: float, beta: float, tmp_path_factory: Any) -> None:
    alpha, beta = float(np.float32(alpha)), float(np.float32(beta))
    reference = [activate(torch.tensor(x), alpha, beta) for _, activate in ACTIVATIONS]
    make = lambda x: [build(x, np.float32(alpha), np.float32(beta)) for build, _ in ACTIVATIONS]  # noqa: E731
    check(tmp_path_factory.mktemp("a"), make, x, reference=reference, rtol=1e-4)


CONVOLVE = {1: (F.conv1d, F.conv_transpose1d), 2: (F.conv2d, F.conv_transpose2d), 3: (F.conv3d, F.conv_transpose3d)}


@st.composite
def convolutions(draw: Any) -> dict[str, Any]:
    axes = draw(st.integers(1, 3))
    per_axis = lambda low, high: [draw(st.integers(low, high)) for _ in range(axes)]  # noqa: E731
    return {
        "size": per_axis(5, 8), "kernel": per_axis(1, 3), "strides": per_axis(1, 3), "dilations": per_axis(1, 2),
        "pad": per_axis(0, 2) + per_axis(0, 2), "groups": draw(st.sampled_from([1, 2, 4])), "bias": draw(st.booleans()),
        "pad_type": draw(st.sampled_from(["valid", "same", "same_lower", "custom"])),
    }  # fmt: skip


def amounts(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Padding before and after each axis."""
    if case["pad_type"] == "custom":
        return list(zip(case["pad"][0::2], case["pad"][1::2], strict=True))
    pairs = []
    for n, k, s, d in zip(case["size"], case["kernel"], case["strides"], case["dilations"], strict=True):
        total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) if case["pad_type"] != "valid" else 0
        pairs.append(
            (total // 2, total - total // 2) if case["pad_type"] == "same" else (total - total // 2, total // 2)
        )
    return pairs


@settings(max_examples=10, deadline=None)
@given(case=convolutions())
def test_convolutions_match_torch(case: dict[str, Any], tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    groups, axes = case["groups"], len(case["size"])
    x, weight = torch.randn(2, 4, *case["size"]), torch.randn(8, 4 // groups, *case["kernel"])
    bias = torch.randn(8) if case["bias"] else None
    flat = [amount for pair in reversed(amounts(case)) for amount in pair]
    reference = CONVOLVE[axes][0](F.pad(x, flat), weight, bias, case["strides"], 0, case["dilations"], groups)
    options = {name: case[name] for name in ("strides", "dilations", "groups", "pad_type")}
    if case["pad_type"] == "custom":
        options["pad"] = case["pad"]
    if bias is not None:
        options["bias"] = bias.numpy()
    make = lambda x: mb.conv(x=x, weight=weight.numpy(), **options)  # noqa: E731
    check(tmp_path_factory.mktemp("c"), make, x.numpy(), reference=reference, rtol=1e-3)


@settings(max_examples=8, deadline=None)
@given(case=convolutions(), data=st.data())
def test_transposed_convolutions_match_torch(case: dict[str, Any], data: st.DataObject, tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    groups, axes, strides = case["groups"], len(case["size"]), case["strides"]
    x, weight = torch.randn(2, 4, *case["size"]), torch.randn(4, 6 // min(groups, 2), *case["kernel"])
    groups = min(groups, 2)
    bias = torch.randn(6) if case["bias"] else None
    # torch pads alike on both sides and makes up for it behind; there it may not add a whole stride.
    pad = [data.draw(st.integers(0, (k - 1) * d)) for k, d in zip(case["kernel"], case["dilations"], strict=True)]
    more = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(strides, case["dilations"], strict=True)]
    reference = CONVOLVE[axes][1](x, weight, bias, strides, pad, more, groups, case["dilations"])
    options: dict[str, Any] = {
        "strides": strides, "dilations": case["dilations"], "groups": groups, "pad_type": "custom",
        "pad": [amount for amount in pad for _ in range(2)], "output_shape": list(reference.shape),
    }  # fmt: skip
    if bias is not None:
        options["bias"] = bias.numpy()
    make = lambda x: mb.conv_transpose(x=x, weight=weight.numpy(), **options)  # noqa: E731
    check(tmp_path_factory.mktemp("t"), make, x.numpy(), reference=reference, rtol=1e-3)


@settings(max_examples=5, deadline=None)
@given(
    shape=hnp.array_shapes(min_dims=3, max_dims=4, min_side=2, max_side=4), last=st.integers(1, 2), affine=st.booleans(),
    epsilon=st.sampled_from([1e-5, 1e-2]),
)  # fmt: skip
def test_norms_match_torch(shape: Any, last: int, affine: bool, epsilon: float, tmp_path_factory: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * 3 + 1
    own, mean, variance = (torch.rand(2, *shape[-last:]), torch.randn(shape[1]), torch.rand(shape[1]) + 0.5)
    scale, shift = torch.rand(2, shape[1]) if affine else (None, None)
    epsilon = float(np.float32(epsilon))

    def numpy_of(**tensors: Any) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}

    def make(x: Any) -> list[Any]:
        axes = list(range(-last, 0))
        both = numpy_of(gamma=own[0], beta=own[1]) if affine else {}
        channel = numpy_of(gamma=scale, beta=shift)
        return [
            mb.layer_norm(x=x, axes=axes, epsilon=np.float32(epsilon), **both),
            mb.batch_norm(x=x, epsilon=np.float32(epsilon), **numpy_of(mean=mean, variance=variance), **channel),
            mb.instance_norm(x=x, epsilon=np.float32(epsilon), **channel),
            mb.l2_norm(x=x, epsilon=np.float32(epsilon)),
            mb.softmax(x=x, axis=-last),
        ]

    weights = own if affine else (None, None)
    reference = [
        F.layer_norm(x, shape[-last:], *weights, epsilon),
        F.batch_norm(x, mean, variance, scale, shift, eps=epsilon),
        F.instance_norm(x, weight=scale, bias=shift, eps=epsilon),
        x / (x.square().sum((-3, -2, -1), keepdim=True) + epsilon).sqrt(),
        x.softmax(-last),
    ]
    check(tmp_path_factory.mktemp("n"), make, x.numpy(), reference=reference, rtol=1e-3)


@settings(max_examples=6, deadline=None)
@given(data=st.data(), integers=st.booleans())
def test_shaping_matches_numpy(data: st.DataObject, integers: bool, tmp_path_factory: Any) -> None:
    rank = data.draw(st.integers(2, 4))
    shape = tuple(data.draw(st.integers(2, 4)) for _ in range(rank))
    x = np.arange(np.prod(shape)).reshape(shape).astype(np.int32 if integers else np.float32)
    axis, perm = data.draw(st.integers(-rank, rank - 1)), data.draw(st.permutations(range(rank)))
    reps = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    begin = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - b)) for n, b in zip(shape, begin, strict=True)]
    new = data.draw(st.integers(-rank - 1, rank))

    def make(x: Any) -> list[Any]:
        return [
            mb.transpose(x=x, perm=perm),
            mb.concat(values=[x, x, x], axis=axis),
            mb.stack(values=[x, x], axis=new),
            mb.tile(x=x, reps=reps),
            mb.expand_dims(x=x, axes=[new]),
            mb.squeeze(x=mb.expand_dims(x=x, axes=[new]), axes=[new]),
            mb.slice_by_size(x=x, begin=begin, size=size),
            mb.reverse(x=x, axes=[axis]),
            mb.reshape(x=x, shape=[-1, shape[-1]]),
            mb.flatten2d(x=x, axis=axis % rank),
            mb.cumsum(x=x, axis=axis % rank, reverse=True, exclusive=True),
            mb.argsort(x=x, axis=axis, ascending=True),
            *mb.split(x=x, split_sizes=[1, shape[axis] - 1], axis=axis),
            *mb.split(x=x, num_splits=shape[axis], axis=axis),
        ]

    part = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
    behind = np.flip(np.cumsum(np.flip(x, axis), axis), axis) - x
    parts = [*np.split(x, [1], axis), *np.split(x, shape[axis], axis)]
    reference = [
        x.transpose(perm), np.concatenate([x] * 3, axis), np.stack([x, x], new), np.tile(x, reps), np.expand_dims(x, new), x,
        x[part], np.flip(x, axis), x.reshape(-1, shape[-1]), x.reshape(int(np.prod(shape[: axis % rank])), -1), behind,
        np.argsort(x, axis, kind="stable"), *parts,
    ]  # fmt: skip
    check(tmp_path_factory.mktemp("s"), make, x, reference=reference)


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_gathers_match_coremltools_and_numpy(data: st.DataObject, tmp_path_factory: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=3, max_dims=3, min_side=2, max_side=4))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    axis = data.draw(st.integers(0, 2))
    rows = data.draw(hnp.arrays(np.int32, (2, 2), elements=st.integers(0, shape[axis] - 1)))
    along_shape = [2 if place == axis else n for place, n in enumerate(shape)]
    along = data.draw(hnp.arrays(np.int32, along_shape, elements=st.integers(0, shape[axis] - 1)))
    points = data.draw(hnp.arrays(np.int32, (3, 2), elements=st.integers(0, min(shape) - 1)))
    batched = data.draw(hnp.arrays(np.int32, (shape[0], 2), elements=st.integers(0, shape[1] - 1)))

    def make(x: Any, rows: Any, along: Any) -> list[Any]:
        return [mb.gather(x=x, indices=rows, axis=axis), mb.gather_along_axis(x=x, indices=along, axis=axis)]

    def more(x: Any, points: Any, batched: Any) -> list[Any]:
        return [
            mb.gather_nd(x=x, indices=points),
            mb.gather_nd(x=x, indices=mb.expand_dims(x=batched, axes=[-1]), batch_dims=1),
            mb.gather(x=x, indices=batched, axis=1, batch_dims=1),
        ]

    folder = tmp_path_factory.mktemp("g")
    check(folder / "one", make, x, rows, along, reference=evaluate(make, x, rows, along))
    by_batch = np.stack([part[row] for part, row in zip(x, batched, strict=True)])
    check(folder / "more", more, x, points, batched, reference=[x[points[:, 0], points[:, 1]], by_batch, by_batch])


@settings(max_examples=5, deadline=None)
@given(
    pads=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    value=st.floats(-2, 2, width=16),
    band=st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
)
def test_pads_and_bands_match_numpy(
    pads: list[int], value: float, band: tuple[int, int], tmp_path_factory: Any
) -> None:
    x = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)

    def make(x: Any) -> list[Any]:
        return [
            mb.pad(x=x, pad=pads, mode="constant", constant_val=np.float32(value)),
            mb.pad(x=x, pad=pads, mode="reflect"),
            mb.pad(x=x, pad=pads, mode="replicate"),
            mb.band_part(x=x, lower=band[0], upper=band[1]),
        ]

    pairs = ((0, 0), pads[:2], pads[2:])
    rows, columns = np.indices((3, 4))
    kept = ((rows - columns <= band[0]) | (band[0] < 0)) & ((columns - rows <= band[1]) | (band[1] < 0))
    reference = [
        np.pad(x, pairs, constant_values=value),
        np.pad(x, pairs, "reflect"),
        np.pad(x, pairs, "edge"),
        x * kept,
    ]
    check(tmp_path_factory.mktemp("p"), make, x, reference=reference)
