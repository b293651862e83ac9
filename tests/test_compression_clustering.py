"""Clustering against coremltools' exact one, against a dynamic program written here, and its promises as properties."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from coremltools._deps import _kmeans1d
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from ane_layers.bundled import bundled_checkpoint
from ane_layers.compression import Setting, compress_weight
from ane_layers.compression.clustering import BITS, Clustering, cluster
from ane_layers.compression.histogram import histogram, nearest_entries

LARGEST = float(np.finfo(np.float16).max)
# The promise is 0.2 % over the smallest error.
WITHIN = 1.002

DISTRIBUTIONS = {
    "gaussian": lambda r, n: 0.02 * r.standard_normal(n),
    "student t 3": lambda r, n: 0.02 * r.standard_t(3, n),
    "uniform": lambda r, n: r.uniform(-0.05, 0.05, n),
    "laplace": lambda r, n: r.laplace(scale=0.02, size=n),
    "bimodal": lambda r, n: np.where(r.random(n) < 0.3, -0.1, 0.08) + 0.01 * r.standard_normal(n),
    "few outliers": lambda r, n: 0.02 * r.standard_normal(n) * np.where(r.random(n) < 3e-4, r.uniform(20, 500, n), 1),
    "far outliers": lambda r, n: np.where(r.random(n) < 1e-3, r.uniform(-6e4, 6e4, n), 1e-5 * r.standard_normal(n)),
    "bfloat16": lambda r, n: torch.from_numpy(0.02 * r.standard_normal(n)).bfloat16().double().numpy(),
    "one side": lambda r, n: 0.01 * np.exp(2 * r.standard_normal(n)),
    "clumps": lambda r, n: r.choice(r.standard_normal(40), n) + 1e-3 * r.standard_normal(n),
}


def draw(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    flat = DISTRIBUTIONS[name](np.random.default_rng(seed), int(np.prod(shape)))
    return np.clip(flat, -LARGEST, LARGEST).astype(np.float16).reshape(shape)


def dense(found: Clustering) -> np.ndarray:
    return np.take_along_axis(found.table, found.indices.astype(np.intp), axis=1)


def errors(values: np.ndarray, found: Clustering, importance: np.ndarray | None = None) -> np.ndarray:
    """Weighted squared error of each group."""
    weights = np.ones(values.shape[1]) if importance is None else np.resize(importance, values.shape[1])
    return ((values.astype(np.float64) - dense(found).astype(np.float64)) ** 2) @ weights


def coremltools_error(group: np.ndarray, bits: int) -> float:
    """As `_get_kmeans_lookup_table_and_weight` calls it for 10,000 values and more; the table is cast to fp16 as in the palettizer."""
    distinct, counts = np.unique(group, return_counts=True)
    result = _kmeans1d.cluster(distinct, min(len(distinct), 1 << bits), weights=counts)
    entries = np.array(result.centroids).astype(np.float16).astype(np.float64)[np.array(result.clusters)]
    return float(counts @ (distinct.astype(np.float64) - entries) ** 2)


def exact_error(values: np.ndarray, weights: np.ndarray, size: int) -> float:
    """The smallest error of any table of fp16 entries: every place for every border is tried.

    Args:
        values: float64 [n], ascending.
        weights: float64 [n].
    """
    count = len(values)
    one = np.full((count + 1, count + 1), np.inf)  # error of one entry for values[i:j]
    for i in range(count):
        weight = np.cumsum(weights[i:])
        mean = np.cumsum(weights[i:] * (values[i:] - values[i])) / np.maximum(weight, 1e-300) + values[i]
        entry = mean.astype(np.float16).astype(np.float64)
        offset = np.cumsum(weights[i:] * (values[i:] - values[i]))
        square = np.cumsum(weights[i:] * (values[i:] - values[i]) ** 2)
        shift = entry - values[i]
        one[i, i + 1 :] = np.maximum(square - 2 * shift * offset + shift * shift * weight, 0)
    best = one[0]
    for _ in range(size - 1):
        best = np.minimum(best, (best[:, None] + one).min(axis=0))
    return float(best[count])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tensor_error_matches_coremltools(name: str, bits: int) -> None:
    values = draw(name, (1, 96 * 331))
    stock = coremltools_error(values[0], bits)
    assert stock > 0
    assert errors(values, cluster(values, bits))[0] <= WITHIN * stock


@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("name", ["gaussian", "student t 3", "few outliers"])
def test_group_errors_match_coremltools(name: str, group_size: int) -> None:
    values = draw(name, (64, 331)).reshape(64 // group_size, -1)
    for bits in BITS:
        found = errors(values, cluster(values, bits))
        stock = np.array([coremltools_error(group, bits) for group in values])
        assert (found <= WITHIN * stock).all(), (bits, found / stock)


@pytest.mark.parametrize("group_size", [None, 8, 16, 32])
def test_trained_weight_errors_match_coremltools(group_size: int | None) -> None:
    tensors = load_file(bundled_checkpoint() / "model.safetensors")
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        weight = tensors[name].half().numpy()
        values = weight.reshape(weight.shape[0] // (group_size or weight.shape[0]), -1)
        for bits in BITS:
            found = errors(values, cluster(values, bits))
            stock = np.array([coremltools_error(group, bits) for group in values])
            assert (found <= WITHIN * stock).all(), (name, bits, found / stock)


def importances(kind: str, channels: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "wide":
        return np.exp(2 * generator.standard_normal(channels))
    if kind == "few channels":
        return np.where(generator.random(channels) < 0.05, 1.0, 1e-4)
    return generator.random(channels) * (generator.random(channels) < 0.5)


@pytest.mark.parametrize("kind", ["wide", "few channels", "with zeros"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_weighted_error_matches_exact_dynamic_program(name: str, kind: str) -> None:
    values = draw(name, (1, 9 * 97), seed=1)
    importance = importances(kind, 97, seed=2)
    distinct, inverse = np.unique(values[0].astype(np.float64), return_inverse=True)
    weights = np.bincount(inverse, np.tile(importance, 9))
    for bits in BITS:
        smallest = exact_error(distinct[weights > 0], weights[weights > 0], 1 << bits)
        found = errors(values, cluster(values, bits, importance=importance), importance)[0]
        # In neither direction: a smaller error would mean that the dynamic program here is wrong.
        assert smallest * (1 - 1e-7) - 1e-30 <= found <= WITHIN * smallest + 1e-30, (bits, found / smallest)


@pytest.mark.parametrize("seed", range(6))
def test_error_matches_brute_force_over_all_partitions(seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = np.sort(generator.standard_t(2, 12)).astype(np.float16)
    weights = np.exp(3 * generator.standard_normal(12))
    for bits in (1, 2):
        smallest = np.inf
        for borders in itertools.combinations(range(1, 12), (1 << bits) - 1):
            total = 0.0
            for part in np.split(np.arange(12), borders):
                x, w = values[part].astype(np.float64), weights[part]
                total += w @ (x - float(np.float16(np.average(x, weights=w)))) ** 2
            smallest = min(smallest, total)
        order = generator.permutation(12)
        shuffled = values[order][None]
        found = errors(shuffled, cluster(shuffled, bits, importance=weights[order]), weights[order])[0]
        assert found == pytest.approx(smallest, rel=2e-3)
        assert found >= smallest * (1 - 1e-9)


def quantile_lloyd_error(values: np.ndarray, weights: np.ndarray, size: int) -> float:
    """What clustering has to be better than: Lloyd's algorithm from evenly spaced quantiles."""
    x = values.astype(np.float64)
    table = np.quantile(x, (np.arange(size) + 0.5) / size)
    for _ in range(30):
        label = np.abs(x[:, None] - table).argmin(axis=1)
        mass = np.bincount(label, weights, size)
        moment = np.bincount(label, weights * x, size)
        table = np.sort(np.where(mass > 0, moment / np.maximum(mass, 1e-300), table))
    table = table.astype(np.float16).astype(np.float64)
    return float(weights @ ((x[:, None] - table) ** 2).min(axis=1))


finite = st.floats(-LARGEST, LARGEST, width=16)
groups_of_values = st.one_of(
    hnp.arrays(np.float16, hnp.array_shapes(min_dims=2, max_dims=2, max_side=60), elements=finite),
    hnp.arrays(np.float16, (1, 300), elements=st.floats(-1, 1, width=16)),
    hnp.arrays(np.float16, (2, 200), elements=st.sampled_from([0.0, -0.0, 6e-8, -6e-8, 1.0, 1.001, 2.0, 6e4, -6e4])),
    st.builds(
        lambda seed, name: draw(name, (2, 700), seed), st.integers(0, 1 << 30), st.sampled_from(sorted(DISTRIBUTIONS))
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(groups_of_values, st.sampled_from(BITS), st.one_of(st.none(), st.integers(0, 1 << 30)))
@example(np.zeros((1, 1), np.float16), 1, None)
@example(np.array([[0.0, -0.0, 1.0]], np.float16), 1, 5)
def test_invariants(values: np.ndarray, bits: int, seed: int | None) -> None:
    count = values.shape[1]
    importance = None if seed is None else importances("with zeros", count, seed)
    found = cluster(values, bits, importance=importance)
    assert found.table.dtype == np.float16
    assert found.table.shape == (len(values), 1 << bits)
    assert found.indices.dtype == np.uint8
    assert found.indices.shape == values.shape
    again = cluster(values.copy(), bits, importance=importance)
    assert np.array_equal(found.table, again.table)
    assert np.array_equal(found.indices, again.indices)
    weights = np.ones(count) if importance is None or not importance.any() else importance
    for row, table, indices in zip(
        values.astype(np.float64), found.table.astype(np.float64), found.indices, strict=True
    ):
        steps = np.diff(table)
        used = 1 + int((steps > 0).sum())
        # Strictly ascending as far as it is used, then the last entry again and again; no index points there.
        assert (steps[: used - 1] > 0).all()
        assert (steps[used - 1 :] == 0).all()
        assert indices.max() < used
        distance = np.abs(row[:, None] - table)
        assert np.array_equal(distance[np.arange(count), indices], distance.min(axis=1))
        if len(np.unique(row)) <= 1 << bits:
            assert np.array_equal(table[indices], row)
        mine = float(weights @ (row - table[indices]) ** 2)
        rounding = 1e-12 * float(weights @ row**2)
        assert mine <= WITHIN * quantile_lloyd_error(row, weights, 1 << bits) + rounding
    repeated = cluster(dense(found), bits, importance=importance)
    assert np.array_equal(dense(repeated), dense(found))
    assert np.array_equal(repeated.indices, found.indices)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1e-6, 6e-8, -3.5, LARGEST])
def test_constant_tensor_is_exact(value: float, bits: int) -> None:
    values = np.full((3, 50), value, np.float16)
    found = cluster(values, bits)
    assert np.array_equal(dense(found), values)
    assert (found.table == np.float16(value)).all()
    assert not found.indices.any()


@pytest.mark.parametrize("scale", [1e-6, 3e-7, 6e-8])
def test_tiny_channels_match_coremltools(scale: float) -> None:
    values = (scale * np.random.default_rng(0).standard_normal((2, 3000))).astype(np.float16)
    values[1, ::3] = 0
    for bits in BITS:
        found = errors(values, cluster(values, bits))
        stock = np.array([coremltools_error(group, bits) for group in values])
        assert (found <= WITHIN * stock).all(), (bits, found, stock)


def test_zeros_of_both_signs_share_an_entry() -> None:
    values = np.array([[0.0, -0.0, 1.0, -1.0, 0.5]], np.float16)
    found = cluster(values, 2)
    assert found.table.tolist() == [[-1.0, 0.0, 0.5, 1.0]]
    assert not np.signbit(found.table[0, 1])
    assert found.indices.tolist() == [[1, 1, 3, 0, 2]]


def test_of_two_nearest_entries_the_lower_is_taken() -> None:
    row = np.array([-5.0, -2.0, -1.0, 0.0, 1.5, 3.0, 2.998, 3.002, 9.0], np.float16)
    indices = np.empty(len(row), np.uint8)
    nearest_entries(row, np.array([-3.0, 1.0, 2.0, 4.0]), indices)
    assert indices.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_fewer_values_than_entries() -> None:
    found = cluster(np.array([[3.0, 1.0], [2.0, 2.0]], np.float16), 3)
    assert found.table.tolist() == [[1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], [2.0] * 8]
    assert found.indices.tolist() == [[1, 0], [0, 0]]


def test_importance_of_channels_is_tiled() -> None:
    values = draw("student t 3", (2, 12 * 61))
    importance = importances("wide", 61, seed=3)
    short = cluster(values, 4, importance=importance)
    long = cluster(values, 4, importance=np.tile(importance, 12))
    assert np.array_equal(short.table, long.table)
    assert not np.array_equal(short.table, cluster(values, 4).table)


def test_importance_lowers_the_weighted_error() -> None:
    values = draw("gaussian", (1, 40 * 128))
    importance = importances("few channels", 128, seed=4)
    weighted = errors(values, cluster(values, 3, importance=importance), importance)[0]
    assert weighted < 0.9 * errors(values, cluster(values, 3), importance)[0]


@pytest.mark.parametrize("importance", [np.zeros(50), np.full(50, 1e-300), np.full(50, 7.0), np.ones(50, np.int32)])
def test_importance_that_tells_nothing_apart_changes_nothing(importance: np.ndarray) -> None:
    values = draw("laplace", (2, 400))
    found, plain = cluster(values, 3, importance=importance), cluster(values, 3)
    assert np.array_equal(found.table, plain.table)
    assert np.array_equal(found.indices, plain.indices)


@pytest.mark.parametrize("scale", [2.0**1023, 2.0**-1000])
def test_scale_of_importance_changes_nothing(scale: float) -> None:
    values = draw("student t 3", (1, 40 * 61))
    importance = importances("with zeros", 61, seed=8)
    found = cluster(values, 4, importance=scale * importance)
    assert np.array_equal(found.table, cluster(values, 4, importance=importance).table)


def test_values_without_importance_get_the_nearest_entry() -> None:
    values = np.array([[-8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 2.75, 100.0]], np.float16)
    importance = np.array([0, 1, 1, 1, 1, 0, 0, 0.0])
    found = cluster(values, 2, importance=importance)
    assert found.table.tolist() == [[1.0, 2.0, 3.0, 4.0]]
    assert found.indices.tolist() == [[0, 0, 1, 2, 3, 3, 2, 3]]


def test_values_without_importance_are_exact_where_there_is_room() -> None:
    values = np.array([[1.0, 2.0, 3.0, 9.0]], np.float16)
    found = cluster(values, 2, importance=np.array([1.0, 0.0, 2.0, 0.0]))
    assert np.array_equal(dense(found), values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("importance", [None, np.array([0.0, 1.0, 1.0, 1.0, 1.0])])
def test_non_finite_values_are_refused(bad: float, importance: np.ndarray | None) -> None:
    values = draw("gaussian", (3, 60))
    values[1, 5] = bad
    with pytest.raises(ValueError, match="values: group 1 holds NaN or an infinity"):
        cluster(values, 4, importance=importance)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.array([1.0, -0.5]), "negative number, -0.5"),
        (np.array([1.0, np.nan]), "NaN or an infinity"),
        (np.array([np.inf, 1.0]), "NaN or an infinity"),
        (np.ones(3), r"dividing 20, got \[3\]"),
        (np.ones((2, 10)), r"got \[2, 10\]"),
        (np.ones(0), r"got \[0\]"),
    ],
)
def test_importance_is_checked(importance: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"importance: .*{message}"):
        cluster(draw("gaussian", (2, 20)), 4, importance=importance)


@pytest.mark.parametrize("bits", [0, 5, 7, 16, -1])
def test_bits_are_checked(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits: {bits} is none of 1, 2, 3, 4, 6, 8"):
        cluster(draw("gaussian", (2, 20)), bits)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2), np.float32), np.zeros(4, np.float16), np.zeros((2, 0), np.float16), [[1.0]]]
)
def test_values_are_checked(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"values: clustering takes fp16 \[groups, n\]"):
        cluster(values, 4)


def test_memory_layout_changes_nothing() -> None:
    values = draw("student t 3", (6, 502))
    importance = importances("with zeros", 251, seed=5)
    want = cluster(values, 4, importance=importance)
    wide = np.zeros((6, 1004), np.float16)
    wide[:, ::2] = values
    for same in (np.asfortranarray(values), wide[:, ::2], values[::-1].copy()[::-1]):
        found = cluster(same, 4, importance=importance)
        assert np.array_equal(found.table, want.table)
        assert np.array_equal(found.indices, want.indices)


@pytest.mark.parametrize("channels", [None, 1000, 300_000])
def test_histogram_of_many_chunks_matches_numpy_unique(channels: int | None) -> None:
    row = draw("gaussian", (600_000,))
    importance = None if channels is None else importances("with zeros", channels, seed=6)
    weights = np.ones(len(row)) if importance is None else np.tile(importance, len(row) // len(importance))
    distinct, inverse = np.unique(row, return_inverse=True)
    want = np.bincount(inverse, weights)
    values, totals = histogram(row, importance)
    assert np.array_equal(values, distinct[want > 0].astype(np.float64))
    np.testing.assert_allclose(totals, want[want > 0], rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("groups", [1, 64])
def test_memory_is_bounded(groups: int, weighted: bool) -> None:
    values = np.resize(draw("gaussian", (1 << 20,)), (groups, (1 << 24) // groups))
    importance = importances("wide", 2048, seed=7) if weighted else None
    cluster(values[:, :4096], 4)
    tracemalloc.start()
    cluster(values, 4, importance=importance)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.size + 30e6


def test_progress_is_told() -> None:
    lines: list[str] = []
    cluster(draw("gaussian", (40, 16)), 2, progress=lines.append)
    assert lines[0] == "clustering group 1 of 40"
    assert 10 <= len(lines) <= 40


@pytest.mark.parametrize("key", ["lut4", "lut2g3", "lut6g4", "lut8g2", "int8", "int4b5", "int4"])
@pytest.mark.parametrize("kind", ["gaussian", "few values", "zeros", "outlier"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_error_is_that_of_the_stored_values(key: str, kind: str, weighted: bool) -> None:
    random = np.random.default_rng(4)
    weight = random.standard_normal((12, 40)).astype(np.float16)
    if kind == "few values":
        weight = np.sign(weight)
    if kind == "zeros":
        weight = np.zeros_like(weight)
    if kind == "outlier":
        weight[3, 7] = 6e4
    importance = random.random(40) * (random.random(40) > 0.2) if weighted else None
    found = compress_weight("w", weight, Setting.from_key(key), importance=importance)
    exact = weight.astype(np.float64)
    squares = np.square(exact).sum()
    expected = np.square(found.dense().astype(np.float64) - exact).sum() / squares if squares else 0.0
    assert found.error == pytest.approx(expected, rel=1e-9, abs=0)
    if kind in ("few values", "zeros"):
        assert found.error == 0
