"""Pooling, resizing, sampling and the moves between space, channels and batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from mil_programs import quiet
from operation_checks import check, run
from torch.nn import functional as F

from ane_layers.interpreter import MLProgram

mb = mil.Builder

RNG = np.random.default_rng(0)


def windows(x: np.ndarray, kernel: Any, strides: Any, before: Any, counts: Any) -> Any:
    """For each place of a pool, the elements that its window covers and the size of the window inside the padding."""
    for place in np.ndindex(*counts):
        begin = [p * s - b for p, s, b in zip(place, strides, before, strict=True)]
        inside = tuple(slice(max(b, 0), max(b + k, 0)) for b, k in zip(begin, kernel, strict=True))
        yield place, x[(slice(None), slice(None), *inside)].reshape(*x.shape[:2], -1), begin


@settings(max_examples=10, deadline=None)
@given(
    axes=st.integers(1, 3), pad_type=st.sampled_from(["valid", "same", "same_lower", "custom"]), ceil=st.booleans(), data=st.data()
)  # fmt: skip
def test_pools_match_their_windows(
    axes: int, pad_type: str, ceil: bool, data: st.DataObject, tmp_path_factory: Any
) -> None:
    draw = lambda least, most: tuple(data.draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes)))  # noqa: E731
    sizes, kernel, strides = draw(5, 7), draw(2, 4), draw(1, 3)
    ceil = ceil and axes < 3 and pad_type in ("valid", "custom")
    before, after = (0,) * axes, (0,) * axes
    if pad_type == "custom":
        before = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
        after = before if ceil else tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    elif pad_type != "valid":
        total = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, strides, strict=True)]
        before, after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (after, before) if pad_type == "same_lower" else (before, after)
    counts = []
    for n, k, s, b, a in zip(sizes, kernel, strides, before, after, strict=True):
        count = (n + b + a - k + (s - 1 if ceil else 0)) // s + 1
        counts.append(count - (ceil and b + a > 0 and (count - 1) * s >= n + b))
        if (counts[-1] - 1) * s >= n + b:
            return  # refused, see below
    x = RNG.standard_normal((2, 3, *sizes)).astype(np.float32)
    highest, kept, whole, length = (np.zeros((2, 3, *counts)) for _ in range(4))
    for place, elements, begin in windows(x, kernel, strides, before, counts):
        at = (slice(None), slice(None), *place)
        highest[at], kept[at], length[at] = elements.max(-1), elements.mean(-1), np.sqrt((elements**2).sum(-1))
        ends = [n + a for n, a in zip(sizes, after, strict=True)]
        share = np.prod([min(g + k, e) - g for g, k, e in zip(begin, kernel, ends, strict=True)])
        whole[at] = elements.sum(-1) / share
    options: dict[str, Any] = {"kernel_sizes": kernel, "strides": strides, "pad_type": pad_type, "ceil_mode": ceil}
    if pad_type == "custom":
        options["pad"] = [amount for pair in zip(before, after, strict=True) for amount in pair]

    def make(x: Any) -> list[Any]:
        pools = [
            mb.max_pool(x=x, **options),
            mb.avg_pool(x=x, **options),
            mb.avg_pool(x=x, exclude_padding_from_average=True, **options),
        ]
        return pools + ([mb.l2_pool(x=x, **options)] if axes < 3 else [])

    reference = [highest, whole, kept, *([length] if axes < 3 else [])]
    check(tmp_path_factory.mktemp("p"), make, x, reference=reference, rtol=1e-4)


def test_pools_match_torch(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 9, 8)

    class Pools(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
                F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True),
                F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
                F.adaptive_avg_pool2d(x, 1),
                F.max_pool1d(x[0], 2),
            )

    check_conversion(Pools(), x, tmp_path)


def check_conversion(module: torch.nn.Module, x: torch.Tensor, folder: Path) -> None:
    """Module and program have the same results."""
    module = module.eval()
    with quiet():
        model = ct.convert(
            torch.jit.trace(module, x),
            inputs=[ct.TensorType("x", tuple(x.shape))],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        model.save(str(folder / "m.mlpackage"))
    own = MLProgram(folder / "m.mlpackage").predict({"x": x.numpy()}).values()
    reference = module(x)
    for one, other in zip(own, reference if isinstance(reference, tuple) else (reference,), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_window_without_elements_is_refused(tmp_path: Path) -> None:
    make = lambda x: mb.max_pool(x=x, kernel_sizes=[1], strides=[4], pad_type="valid", ceil_mode=True)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(max_pool\): the last window on axis 2 holds no element"):
        run(tmp_path, make, np.ones((1, 1, 4), np.float32))


MODES = ["DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS", "UNALIGN_CORNERS"]


def grid(size: float, count: int, mode: str) -> np.ndarray:
    """The formulas of coremltools' documentation, as they stand there."""
    spacing = {
        "STRICT_ALIGN_CORNERS": lambda: (size - 1) / (count - 1) if count > 1 else 0,
        "ALIGN_CORNERS": lambda: (size - 1) / (count - 1) if count > 1 else 0,
        "DEFAULT": lambda: (size - size / count) / (count - 1) if count > 1 else 0,
        "OFFSET_CORNERS": lambda: max(1, size - 1) / count,
        "UNALIGN_CORNERS": lambda: size / count,
    }[mode]()
    start = {"OFFSET_CORNERS": 0.5 * spacing, "UNALIGN_CORNERS": 0.5 * spacing - 0.5}.get(mode, 0.0)
    if mode == "ALIGN_CORNERS" and count == 1:
        start = (size - 1) / 2
    return np.array([min(size - 1, max(0, start + i * spacing)) for i in range(count)])


def sampled(x: np.ndarray, samples: list[np.ndarray]) -> np.ndarray:
    for axis, points in zip(range(x.ndim - len(samples), x.ndim), samples, strict=True):
        rows = np.moveaxis(x.astype(np.float64), axis, -1)
        x = np.moveaxis(
            np.apply_along_axis(lambda row, p=points: np.interp(p, np.arange(row.size), row), -1, rows), -1, axis
        )
    return x


@settings(max_examples=8, deadline=None)
@given(
    mode=st.sampled_from(MODES), size=st.tuples(*[st.integers(1, 6)] * 2), target=st.tuples(*[st.integers(1, 9)] * 2)
)
def test_resizing_matches_the_documented_grids(mode: str, size: Any, target: Any, tmp_path_factory: Any) -> None:
    x = RNG.standard_normal((2, 1, *size)).astype(np.float32)

    def make(x: Any, shape: Any) -> list[Any]:
        height, width = (int(count) for count in target)
        return [
            mb.resize_bilinear(x=x, target_size_height=height, target_size_width=width, sampling_mode=mode),
            mb.resize(x=x, shape=[7, height, width], resized_dims=np.uint32(2), sampling_mode=mode),
            mb.resize(x=x, shape=shape, resized_dims=np.uint32(1), sampling_mode=mode),
            mb.resize_nearest_neighbor(x=x, target_size_height=height, target_size_width=width),
            mb.resize(x=x, shape=[height, 0], resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR"),
            mb.crop(x=x, crop_height=[0, size[0] - 1], crop_width=[size[1] - 1, 0]),
        ]

    grids = [grid(n, count, mode) for n, count in zip(size, target, strict=True)]
    rows, columns = ([i * n // count for i in range(count)] for n, count in zip(size, target, strict=True))
    reference = [
        sampled(x, grids), sampled(x, grids), sampled(x, grids[1:]), x[:, :, rows][..., columns], x[:, :, rows], x[:, :, :1, -1:],
    ]  # fmt: skip
    check(tmp_path_factory.mktemp("r"), make, x, np.array([0, target[1]], np.int32), reference=reference, rtol=1e-4)


def test_resizing_matches_torch(tmp_path: Path) -> None:
    class Resizing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                F.interpolate(x, scale_factor=2, mode="nearest"),
                F.interpolate(x, size=(10, 7), mode="bilinear", align_corners=True),
                F.interpolate(x, scale_factor=(2, 3), mode="bilinear", align_corners=False),
                F.interpolate(x, scale_factor=2.5, mode="bilinear", align_corners=False, recompute_scale_factor=True),
                F.pixel_shuffle(x, 2),
                F.pixel_unshuffle(x[:, :, :4], 2),
            )

    check_conversion(Resizing(), torch.randn(2, 4, 5, 6), tmp_path)


def test_upsampling_matches_the_documented_grids(tmp_path: Path) -> None:
    x = RNG.standard_normal((1, 2, 3, 4)).astype(np.float32)

    def make(x: Any) -> list[Any]:
        up = {"scale_factor_height": 2.5, "scale_factor_width": 1.5}
        return [
            mb.upsample_bilinear(x=x, **up),
            mb.upsample_bilinear(x=x, align_corners=False, **up),
            mb.upsample_bilinear(x=x, align_corners=False, half_pixel_centers=False, **up),
            mb.upsample_nearest_neighbor(x=x, **up),
        ]

    reference = [
        sampled(x, [grid(3, 7, mode), grid(4, 6, mode)])
        for mode in ("STRICT_ALIGN_CORNERS", "UNALIGN_CORNERS", "DEFAULT")
    ]
    reference.append(x[:, :, [0, 0, 0, 1, 1, 2, 2]][..., [0, 0, 1, 2, 2, 3]])
    check(tmp_path, make, x, reference=reference, rtol=1e-4)


@settings(max_examples=8, deadline=None)
@given(
    mode=st.sampled_from(["unnormalized", "normalized_minus_one_to_one", "normalized_zero_to_one"]),
    padding=st.sampled_from(["constant", "border", "reflection", "symmetric"]),
    align=st.booleans(),
    nearest=st.booleans(),
    seed=st.integers(0, 99),
)
def test_resample_matches_padded_images(
    mode: str, padding: str, align: bool, nearest: bool, seed: int, tmp_path_factory: Any
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    places = rng.uniform(-6, 9, (2, 3, 2, 2)).astype(np.float32)
    scales = np.float32([5, 4])
    if mode == "unnormalized":
        given_places = places
    else:
        share = places / (scales - 1) if align else (places + 0.5) / scales
        given_places = (share * 2 - 1 if mode == "normalized_minus_one_to_one" else share).astype(np.float32)
    name = {"constant": "constant", "border": "edge", "reflection": "reflect", "symmetric": "symmetric"}[padding]
    options = {"constant_values": 1.5} if padding == "constant" else {}
    padded = np.pad(x, ((0, 0), (0, 0), (20, 20), (20, 20)), name, **options)
    expected = np.zeros((2, 3, 3, 2))
    for b, i, j in itertools.product(range(2), range(3), range(2)):
        across, down = places[b, i, j] + 20
        if nearest:
            expected[b, :, i, j] = padded[b, :, round(float(down)), round(float(across))]
            continue
        top, left = int(down), int(across)
        part = padded[b, :, top : top + 2, left : left + 2].astype(np.float64)
        weights = np.outer([1 - (down - top), down - top], [1 - (across - left), across - left])
        expected[b, :, i, j] = (part * weights).sum((1, 2))

    def make(x: Any, places: Any) -> Any:
        return mb.resample(
            x=x, coordinates=places, sampling_mode="nearest" if nearest else "bilinear", padding_mode=padding,
            padding_value=np.float32(1.5), coordinates_mode=mode, align_corners=align,
        )  # fmt: skip

    check(tmp_path_factory.mktemp("s"), make, x, given_places, reference=expected.astype(np.float32), rtol=2e-3)


def test_affine_and_grid_sampling_match_torch(tmp_path: Path) -> None:
    x, matrix = torch.randn(2, 3, 4, 5), torch.tensor([[0.9, 0.2, 0.1, -0.3, 1.1, 0.05], [0.5, 0, 0, 0, 0.5, 0]])
    places = torch.rand(2, 3, 2, 2) * 3 - 1.5

    def make(x: Any, matrix: Any, places: Any) -> list[Any]:
        common = {"coordinates_mode": "normalized_minus_one_to_one", "padding_value": np.float32(0)}
        return [
            mb.affine(
                x=x, transform_matrix=matrix, output_height=6, output_width=3, sampling_mode="bilinear",
                padding_mode="constant", align_corners=True, **common,
            ),
            mb.resample(x=x, coordinates=places, sampling_mode="bilinear", padding_mode="border", align_corners=False, **common),
            mb.resample(x=x, coordinates=places, sampling_mode="bilinear", padding_mode="reflection", align_corners=True, **common),
            mb.resample(x=x, coordinates=places, sampling_mode="bilinear", padding_mode="symmetric", align_corners=False, **common),
        ]  # fmt: skip

    reference = [
        F.grid_sample(x, F.affine_grid(matrix.reshape(2, 2, 3), [2, 3, 6, 3], align_corners=True), align_corners=True),
        F.grid_sample(x, places, padding_mode="border", align_corners=False),
        F.grid_sample(x, places, padding_mode="reflection", align_corners=True),
        F.grid_sample(x, places, padding_mode="reflection", align_corners=False),
    ]
    check(tmp_path, make, x.numpy(), matrix.numpy(), places.numpy(), reference=reference, rtol=1e-3)


@settings(max_examples=6, deadline=None)
@given(
    mode=st.sampled_from(MODES[:4]),
    convention=st.sampled_from(["CORNERS_HEIGHT_FIRST", "CORNERS_WIDTH_FIRST", "CENTER_SIZE_HEIGHT_FIRST", "CENTER_SIZE_WIDTH_FIRST"]),
    normalized=st.booleans(),
    target=st.tuples(*[st.integers(1, 4)] * 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_crop_resize_matches_boxes_cut_out(
    mode: str, convention: str, normalized: bool, target: Any, seed: int, tmp_path_factory: Any
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, 5, 6)).astype(np.float32)
    low = rng.uniform(-1, 3, (3, 2))
    high = low + rng.uniform(0.5, 4, (3, 2))
    images = [1, 0, 1]
    expected = np.full((3, 3, *target), 7.0)
    for n, (begin, end) in enumerate(zip(low, high, strict=True)):
        axes = [b + grid(e - b + 1, count, mode) for b, e, count in zip(begin, end, target, strict=True)]
        for i, j in np.ndindex(*target):
            if 0 <= axes[0][i] <= 4 and 0 <= axes[1][j] <= 5:
                expected[n, :, i, j] = sampled(x[images[n]], [axes[0][[i]], axes[1][[j]]])[:, 0, 0]
    first, second = ((low + high) / 2, high - low) if convention.startswith("CENTER") else (low, high)
    scale = np.array([4, 5]) if normalized else 1
    pairs = [first / scale, second / scale]
    if convention.endswith("WIDTH_FIRST"):
        pairs = [pair[:, ::-1] for pair in pairs]
    boxes = (np.concatenate(pairs, 1) * 2).astype(np.float32)
    options = {
        "target_height": target[0], "target_width": target[1], "normalized_coordinates": normalized, "spatial_scale": 0.5,
        "box_coordinate_mode": convention, "sampling_mode": mode, "pad_value": np.float32(7),
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("c")

    def make(x: Any, boxes: Any) -> Any:
        return mb.crop_resize(x=x, boxes=boxes, box_indices=np.array(images, np.int32), **options)

    check(folder, make, x, boxes, reference=expected.astype(np.float32), rtol=1e-3)


def test_regions_up_to_ios16_match_coremltools_tests(tmp_path: Path) -> None:
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    boxes = np.float32([[0, 0.1, 0.3, 1.3, 1], [0, 0.5, 1.8, 1.0, 0.3], [0, 0.0, 0.4, 0.6, 0.7]]).reshape(3, 1, 5, 1, 1)
    turned = np.float32([2, 2, 1, 1]).reshape(1, 1, 4, 1, 1)

    def make(x: Any, boxes: Any, turned: Any) -> list[Any]:
        common = {"target_width": 2, "target_height": 2, "sampling_mode": "ALIGN_CORNERS"}
        return [
            mb.squeeze(
                x=mb.crop_resize(x=x, roi=boxes, normalized_coordinates=True, pad_value=np.float32(10), **common),
                axes=[1],
            ),
            mb.squeeze(x=mb.crop_resize(x=x, roi=turned, **common), axes=[1]),
        ]

    reference = [
        np.reshape([3.1, 5.2, 10, 10, 10, 7.9, 10, 13.9, 2.2, 3.1, 9.4, 10.3], (3, 1, 2, 2)),
        np.reshape([11, 10, 7, 6], (1, 1, 2, 2)),
    ]
    check(tmp_path, make, x, boxes, turned, reference=reference, target=ct.target.iOS16, rtol=1e-4)


def test_box_that_coremltools_does_not_define_is_refused(tmp_path: Path) -> None:
    x, boxes = np.zeros((1, 1, 4, 4), np.float32), np.float32([[2, 2, 1, 1]])
    for mode, message in (("UNALIGN_CORNERS", "does not define for boxes"), ("DEFAULT", "box runs from 2 to 1")):
        make = lambda x, b, mode=mode: mb.crop_resize(x=x, boxes=b, sampling_mode=mode)  # noqa: E731
        with pytest.raises(ValueError, match=message):
            run(tmp_path / mode, make, x, boxes)


@settings(max_examples=5, deadline=None)
@given(block=st.tuples(*[st.integers(1, 3)] * 2), pads=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_space_and_batch_match_slices(block: Any, pads: list[int], tmp_path_factory: Any) -> None:
    h, w = block
    pads[1] += -(6 + pads[0] + pads[1]) % h
    pads[3] += -(5 + pads[2] + pads[3]) % w
    x = RNG.standard_normal((2, 3, 6, 5)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[1]), (pads[2], pads[3])))
    expected = np.concatenate([padded[:, :, i::h, j::w] for i in range(h) for j in range(w)])

    def make(x: Any) -> list[Any]:
        pairs = np.array(pads, np.int32).reshape(2, 2)
        batch = mb.space_to_batch(x=x, block_shape=[h, w], paddings=pairs)
        return [batch, mb.batch_to_space(x=batch, block_shape=[h, w], crops=pairs)]

    check(tmp_path_factory.mktemp("b"), make, x, reference=[expected, x])


@settings(max_examples=4, deadline=None)
@given(block=st.integers(2, 3), size=st.tuples(*[st.integers(1, 3)] * 2))
def test_space_and_depth_match_slices(block: int, size: Any, tmp_path_factory: Any) -> None:
    x = RNG.standard_normal((2, 2, size[0] * block, size[1] * block)).astype(np.float32)
    expected = np.concatenate([x[:, :, i::block, j::block] for i in range(block) for j in range(block)], 1)

    def make(x: Any) -> list[Any]:
        deep = mb.space_to_depth(x=x, block_size=block)
        return [deep, mb.depth_to_space(x=deep, block_size=block)]

    check(tmp_path_factory.mktemp("d"), make, x, reference=[expected, x])
