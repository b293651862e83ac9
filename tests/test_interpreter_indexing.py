"""Scatters, indices below 0, orders of equal elements, and what has a shape known only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from operation_checks import check, evaluate, run

mb = mil.Builder

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "update": lambda _, new: new,
}


def scattered(data: np.ndarray, places: list[tuple[Any, ...]], updates: list[Any], mode: str) -> np.ndarray:
    """One update after the other."""
    result = data.copy()
    for place, update in zip(places, updates, strict=True):
        result[place] = COMBINE[mode](result[place], update)
    return result


@settings(max_examples=8, deadline=None)
@given(mode=st.sampled_from(sorted(COMBINE)), axis=st.integers(-3, 2), integers=st.booleans(), data=st.data())
def test_scatters_match_one_update_after_the_other(
    mode: str, axis: int, integers: bool, data: st.DataObject, tmp_path_factory: Any
) -> None:
    kind = np.int32 if integers and mode != "div" else np.float32
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.integers(-9, 9, (3, 4, 2)).astype(kind)
    picked = np.array(data.draw(st.lists(st.integers(0, x.shape[axis] - 1), min_size=1, max_size=5)), np.int32)
    shape = list(x.shape)
    shape[axis] = picked.size
    rows = rng.integers(1, 5, shape).astype(kind)
    along = rng.integers(0, x.shape[axis], shape).astype(np.int32)
    points = data.draw(hnp.arrays(np.int32, (2, 3, 2), elements=st.integers(0, 2)))
    parts = rng.integers(1, 5, (2, 3, 2)).astype(kind)

    def make(x: Any, picked: Any, rows: Any, along: Any, points: Any, parts: Any) -> list[Any]:
        return [
            mb.scatter(data=x, indices=picked, updates=rows, axis=axis, mode=mode),
            mb.scatter_along_axis(data=x, indices=along, updates=rows, axis=axis, mode=mode, validate_indices=True),
            mb.scatter_nd(data=x, indices=points, updates=parts, mode=mode),
        ]

    moved = np.moveaxis(rows, axis, 0)
    flat = [tuple(place) for place in np.ndindex(*shape)]
    own_axis = axis % 3
    reference = [
        np.moveaxis(scattered(np.moveaxis(x, axis, 0), [(i,) for i in picked], list(moved), mode), 0, axis),
        scattered(x, [(*p[:own_axis], along[p], *p[own_axis + 1 :]) for p in flat], [rows[p] for p in flat], mode),
        scattered(x, [tuple(p) for p in points.reshape(-1, 2)], list(parts.reshape(-1, 2)), mode),
    ]
    check(tmp_path_factory.mktemp("s"), make, x, picked, rows, along, points, parts, reference=reference)


def test_scatter_along_axis_matches_coremltools(tmp_path: Path) -> None:
    def make(x: Any, indices: Any, updates: Any) -> Any:
        return mb.scatter_along_axis(data=x, indices=indices, updates=updates, axis=1, mode="update")

    x, indices = np.zeros((2, 4), np.float32), np.array([[3, 1, 1], [0, 0, 2]], np.int32)
    check(tmp_path, make, x, indices, np.arange(1, 7, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("name", ["scatter", "scatter_along_axis", "scatter_nd"])
def test_scatter_outside_is_refused(name: str, index: int, tmp_path: Path) -> None:
    indices = np.array([[index]], np.int32) if name == "scatter_nd" else np.array([index], np.int32)

    def make(x: Any, indices: Any, updates: Any) -> Any:
        return getattr(mb, name)(data=x, indices=indices, updates=updates)

    with pytest.raises(ValueError, match=rf"\({name}\): index {index} is outside an axis of 3"):
        run(tmp_path, make, np.zeros(3, np.float32), indices, np.ones(1, np.float32))


@settings(max_examples=4, deadline=None)
@given(indices=hnp.arrays(np.int32, (2, 2), elements=st.integers(-3, 2)))
def test_indices_below_zero_count_from_the_end_up_to_ios16(indices: np.ndarray, tmp_path_factory: Any) -> None:
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    updates = np.float32([[1, 2, 3], [4, 5, 6]])

    def make(x: Any, indices: Any, updates: Any) -> list[Any]:
        first = mb.slice_by_index(x=indices, begin=[0, 0], end=[0, 2], squeeze_mask=[True, False])
        return [
            mb.gather(x=x, indices=indices, axis=1),
            mb.gather_nd(x=x, indices=indices),
            mb.gather_along_axis(x=mb.slice_by_size(x=x, begin=[1, 0], size=[2, 3]), indices=indices, axis=1),
            mb.scatter(data=x, indices=first, updates=updates, axis=0, mode="add"),
        ]

    reference = [
        x[:, indices],
        x[indices[:, 0], indices[:, 1]],
        np.take_along_axis(x[1:], indices, 1),
        scattered(x, [(i,) for i in indices[0]], list(updates), "add"),
    ]
    folder = tmp_path_factory.mktemp("n")
    check(folder, make, x, indices, updates, reference=reference, target=ct.target.iOS16)
    if (indices < 0).any():
        with pytest.raises(ValueError, match=r"\(gather\): "):
            run(folder / "later", make, x, indices, updates)


@settings(max_examples=6, deadline=None)
@given(x=hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([0.0, -0.0, 1.0, -2.5])))
def test_non_zero_matches_coremltools(x: np.ndarray, tmp_path_factory: Any) -> None:
    check(
        tmp_path_factory.mktemp("z"), lambda x: mb.non_zero(x=x), x, reference=evaluate(lambda x: mb.non_zero(x=x), x)
    )


@settings(max_examples=8, deadline=None)
@given(data=st.data(), axis=st.integers(-2, 1), ascending=st.booleans(), k=st.integers(1, 4))
def test_topk_of_equal_elements_keeps_their_order(
    data: st.DataObject, axis: int, ascending: bool, k: int, tmp_path_factory: Any
) -> None:
    # Few values over a long axis: the border runs through equal elements.
    x = data.draw(hnp.arrays(np.float32, (40, 36), elements=st.sampled_from([0.0, 1.0, 2.0, 3.0]), fill=st.just(1.0)))
    order = np.argsort(x if ascending else -x, axis, kind="stable")
    order = np.take(order, np.arange(k), axis)

    def make(x: Any) -> list[Any]:
        return [
            *mb.topk(x=x, k=k, axis=axis, ascending=ascending),
            mb.topk(x=x, k=k, axis=axis, ascending=ascending, return_indices=False),
        ]

    values = np.take_along_axis(x, order, axis)
    check(tmp_path_factory.mktemp("t"), make, x, reference=[values, order, values])


def test_topk_of_a_vocabulary(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 102400)).astype(np.float16).astype(np.float32)  # many are equal
    x[0, 5::9999] = np.inf
    order = np.argsort(-x, -1, kind="stable")[:, :40]
    check(tmp_path, lambda x: list(mb.topk(x=x, k=40)), x, reference=[np.take_along_axis(x, order, -1), order])
    x[0, 7] = np.nan
    own = run(tmp_path / "nan", lambda x: list(mb.topk(x=x, k=3)), x)
    np.testing.assert_array_equal(own[1], [[7, 5, 10004]])


@settings(max_examples=6, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=3, max_size=3), flipped=st.booleans())
def test_reverse_sequence_matches_numpy(lengths: list[int], flipped: bool, tmp_path_factory: Any) -> None:
    x = np.arange(60, dtype=np.float32).reshape((5, 2, 3, 2) if flipped else (3, 5, 2, 2))
    seq, batch = (0, 2) if flipped else (1, -4)
    expected = np.moveaxis(x.copy(), (batch, seq), (0, 1))
    for row, length in zip(expected, lengths, strict=True):
        row[:length] = row[:length][::-1].copy()
    reference = np.moveaxis(expected, (0, 1), (batch, seq))
    make = lambda x, n: mb.reverse_sequence(x=x, lengths=n, seq_axis=seq, batch_axis=batch)  # noqa: E731
    check(tmp_path_factory.mktemp("r"), make, x, np.array(lengths, np.int32), reference=reference)


@settings(max_examples=5, deadline=None)
@given(
    axis=st.integers(-3, 2),
    classes=st.integers(1, 5),
    indices=hnp.arrays(np.int32, (2, 3), elements=st.integers(-1, 5)),
)
def test_one_hot_matches_numpy(axis: int, classes: int, indices: np.ndarray, tmp_path_factory: Any) -> None:
    def make(x: Any) -> list[Any]:
        return [
            mb.one_hot(indices=x, one_hot_vector_size=classes, axis=axis, on_value=2.5, off_value=-1.0),
            mb.one_hot(indices=x, one_hot_vector_size=classes),
        ]

    hot = np.arange(classes) == indices[..., None]
    reference = [np.moveaxis(np.where(hot, 2.5, -1.0), -1, axis), hot.astype(np.int32)]
    check(tmp_path_factory.mktemp("h"), make, indices, reference=reference)


@settings(max_examples=6, deadline=None)
@given(axis=st.integers(-2, 1), size=st.integers(1, 4), stride=st.integers(1, 3))
def test_sliding_windows_match_numpy(axis: int, size: int, stride: int, tmp_path_factory: Any) -> None:
    x = np.arange(30, dtype=np.float32).reshape(5, 6)
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis)
    windows = np.moveaxis(windows, -1, axis % 2 + 1)[(slice(None),) * (axis % 2) + (slice(None, None, stride),)]
    make = lambda x: mb.sliding_windows(x=x, axis=axis, size=size, stride=stride)  # noqa: E731
    check(tmp_path_factory.mktemp("w"), make, x, reference=windows)


def test_einsum_matches_numpy(tmp_path: Path) -> None:
    # The builder takes these two forms only, under any letters; torch's others become products of matrices.
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), (4, 3, 5), (2, 5, 4, 6), (2, 6, 4, 3))
    ]

    def make(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
        return [mb.einsum(values=(a, b), equation="chw,whr->chr"), mb.einsum(values=(c, d), equation="bdlq,bqlk->bdlk")]

    reference = [np.einsum("chw,whr->chr", *arrays[:2]), np.einsum("bdlq,bqlk->bdlk", *arrays[2:])]
    check(tmp_path, make, *arrays, reference=reference, rtol=1e-4)


def test_reshape_like_takes_sizes_from_others(tmp_path: Path) -> None:
    def make(x: Any, one: Any, other: Any) -> Any:
        return mb.reshape_like(x=x, ref_tensors=(one, other), begins=(0, 1), ends=(2, 0), end_masks=(False, True))

    x, one, other = (
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in ((6, 30), (2, 3, 4), (1, 5, 6))
    )
    check(tmp_path, make, x, one, other, reference=x.reshape(2, 3, 5, 6))


@pytest.mark.parametrize("lengths", [[6, 1], [1, -1], [1]])
def test_reverse_sequence_refuses_lengths_that_do_not_fit(lengths: list[int], tmp_path: Path) -> None:
    make = lambda x, n: mb.reverse_sequence(x=x, lengths=n, seq_axis=1, batch_axis=0)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(reverse_sequence\): lengths "):
        run(tmp_path, make, np.zeros((2, 5), np.float32), np.array(lengths, np.int32))
