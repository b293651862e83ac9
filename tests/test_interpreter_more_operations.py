"""Quantized values, random numbers, detection, classification and fused attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from mil_programs import quiet, save_program
from operation_checks import check, evaluate, run
from torch.nn import functional as F

from ane_layers.analysis import inspect
from ane_layers.interpreter import MLProgram
from ane_layers.program import Package

mb = mil.Builder


@settings(max_examples=8, deadline=None)
@given(unsigned=st.booleans(), axis=st.sampled_from([None, 0, 1, -1]), shifted=st.booleans(), seed=st.integers(0, 99))
def test_quantize_and_dequantize_match_coremltools(
    unsigned: bool, axis: int | None, shifted: bool, seed: int, tmp_path_factory: Any
) -> None:
    rng = np.random.default_rng(seed)
    x = np.float32(rng.integers(-90, 90, (2, 3, 4)) * 0.5)  # halves are rounded, and some leave the range
    kind = np.uint8 if unsigned else np.int8
    size = None if axis is None else x.shape[axis]
    parameters: dict[str, Any] = {"scale": np.float32(rng.choice([0.125, 0.5, 1.0], size))}
    if axis is not None:
        parameters["axis"] = axis
    if shifted:
        parameters["zero_point"] = kind(rng.integers(0, 20, size))

    def quantized(x: Any) -> Any:
        return mb.quantize(input=x, output_dtype="uint8" if unsigned else "int8", **parameters)

    def make(x: Any) -> list[Any]:
        return [mb.cast(x=quantized(x), dtype="int32"), mb.dequantize(input=quantized(x), **parameters)]

    expected = evaluate(quantized, x)[0]

    def spread(values: Any) -> Any:
        """One value for each place on the axis, over all of x."""
        values = np.asarray(values, np.float32)
        return (
            values if axis is None else np.moveaxis(np.broadcast_to(values, np.moveaxis(x, axis, -1).shape), -1, axis)
        )

    zero = spread(parameters["zero_point"]) if shifted else 0
    dequantized = spread(parameters["scale"]) * (expected.astype(np.float32) - zero)
    check(tmp_path_factory.mktemp("q"), make, x, reference=[expected, dequantized])


def save_random(path: Path, seed: int) -> Path:
    def build(values: Any) -> list[Any]:
        shape = values["shape"]
        return [
            mb.random_uniform(shape=shape, low=-2.0, high=3.0, seed=seed),
            mb.random_normal(shape=shape, mean=1.0, stddev=0.5, seed=seed),
            mb.random_bernoulli(shape=shape, prob=0.3, seed=seed),
            mb.random_categorical(x=values["x"], mode="logits", size=4000, seed=seed),
            mb.random_categorical(x=mb.softmax(x=values["x"]), mode="probs", size=2, seed=seed),
        ]

    return save_program(path, {"shape": ((2,), np.int32), "x": ((2, 1, 3), np.float32)}, build)


def test_random_numbers_are_of_their_distribution(tmp_path: Path) -> None:
    path = save_random(tmp_path / "r.mlpackage", 5)
    data = {"shape": np.array([50, 400], np.int32), "x": np.log(np.float32([[[0.2, 0.5, 0.3]], [[0.7, 0.2, 0.1]]]))}
    program = MLProgram(path)
    first, second = (list(program.predict(data).values()) for _ in range(2))
    again = list(MLProgram(path).predict(data).values())
    for one, other, same in zip(first, second, again, strict=True):
        np.testing.assert_array_equal(one, same)  # a seed begins anew with the program
        assert (one != other).any()  # and goes on from call to call
    uniform, normal, bernoulli, categorical, few = first
    assert uniform.shape == normal.shape == bernoulli.shape == (50, 400)
    assert -2 <= uniform.min() < -1.9 < 2.9 < uniform.max() < 3
    np.testing.assert_allclose([uniform.mean(), uniform.std()], [0.5, 5 / 12**0.5], atol=0.05)
    np.testing.assert_allclose([normal.mean(), normal.std()], [1, 0.5], atol=0.02)
    assert set(np.unique(bernoulli)) == {0, 1}
    np.testing.assert_allclose(bernoulli.mean(), 0.3, atol=0.02)
    assert few.shape == (2, 1, 2)
    shares = np.stack([(categorical == number).mean((1, 2)) for number in range(3)], -1)
    np.testing.assert_allclose(shares, np.exp(data["x"][:, 0]), atol=0.04)


def test_random_numbers_without_a_seed_differ(tmp_path: Path) -> None:
    path = save_random(tmp_path / "r.mlpackage", -1)
    data = {"shape": np.array([3, 4], np.int32), "x": np.zeros((2, 1, 3), np.float32)}
    one, other = (next(iter(MLProgram(path).predict(data).values())) for _ in range(2))
    assert (one != other).any()


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    sides = np.minimum(one[:2] + one[2:] / 2, other[:2] + other[2:] / 2) - np.maximum(
        one[:2] - one[2:] / 2, other[:2] - other[2:] / 2
    )
    common = np.prod(np.maximum(sides, 0))
    return float(common / (one[2] * one[3] + other[2] * other[3] - common))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 999),
    per_class=st.booleans(),
    least=st.sampled_from([-5.0, 0.4, 5.0]),
    limit=st.sampled_from([0.1, 0.4, 0.8]),
)
def test_suppression_matches_a_plain_search(
    seed: int, per_class: bool, least: float, limit: float, tmp_path_factory: Any
) -> None:
    rng = np.random.default_rng(seed)
    boxes = np.concatenate([rng.uniform(0, 10, (2, 12, 2)), rng.uniform(1, 6, (2, 12, 2))], -1).astype(np.float32)
    scores = rng.standard_normal((2, 12, 3)).astype(np.float32)
    count = 7
    expected = [np.zeros((2, count, 4)), np.zeros((2, count, 3)), np.full((2, count), -1), np.zeros(2)]
    later = [np.zeros((2, count, 4)), np.zeros((2, count, 3)), np.full((2, count), -1), np.zeros(2)]
    for results, threshold in ((expected, least), (later, -np.inf)):
        for b in range(2):
            best = scores[b].max(-1)
            kept: list[int] = []
            for n in np.argsort(-best, kind="stable"):
                rivals = [k for k in kept if not per_class or scores[b, k].argmax() == scores[b, n].argmax()]
                if best[n] >= threshold and all(overlap(boxes[b, n], boxes[b, k]) <= limit for k in rivals):
                    kept.append(int(n))
            kept = (kept or [int(best.argmax())])[:count]
            for result, values in zip(results, (boxes[b, kept], scores[b, kept], kept), strict=False):
                result[b, : len(kept)] = values
            results[3][b] = len(kept)
    folder = tmp_path_factory.mktemp("n")
    options = {"iou_threshold": np.float32(limit), "max_boxes": count, "per_class_suppression": per_class}

    def old(boxes: Any, scores: Any) -> list[Any]:
        return list(
            mb.non_maximum_suppression(boxes=boxes, scores=scores, score_threshold=np.float32(least), **options)
        )

    def new(boxes: Any, scores: Any) -> list[Any]:
        return list(mb.non_maximum_suppression(boxes=boxes, scores=scores, **options))

    check(folder / "old", old, boxes, scores, reference=expected, target=ct.target.iOS16)
    turned = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in (boxes, scores)]
    reference = [later[0].swapaxes(1, 2), later[1].swapaxes(1, 2), later[2]]
    check(folder / "new", new, *turned, reference=reference)


@pytest.mark.parametrize("labels", [["cat", "dog", "owl"], [7, 3, 2**40]])
def test_classifier_gives_label_and_probabilities(labels: list[Any], tmp_path: Path) -> None:
    model = torch.jit.trace(torch.nn.Softmax(-1), torch.zeros(1, 3))
    with quiet():
        ct.convert(
            model,
            inputs=[ct.TensorType("x", (1, 3))],
            classifier_config=ct.ClassifierConfig(labels),
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        ).save(str(tmp_path / "c.mlpackage"))
    x = np.float32([[1, 3, 2]])
    outputs = inspect(Package.open(tmp_path / "c.mlpackage"))["functions"]["main"]["outputs"]
    assert {"dtype": "dictionary", "shape": []} in outputs.values()
    label, probabilities = MLProgram(tmp_path / "c.mlpackage").predict({"x": x}).values()
    assert label == labels[1]
    assert list(probabilities) == labels
    np.testing.assert_allclose(list(probabilities.values()), torch.tensor(x[0]).softmax(-1), rtol=1e-6)


@settings(max_examples=6, deadline=None)
@given(
    heads=st.sampled_from([(), (2,), (2, 3)]), mask=st.sampled_from(["none", "bool", "float"]), seed=st.integers(0, 99)
)
def test_fused_attention_matches_torch(heads: Any, mask: str, seed: int, tmp_path_factory: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, *heads, length, 8, generator=generator) for length in (3, 5, 5))
    scores = torch.randn(3, 5, generator=generator)
    scores[:, 0] = 1  # a row that hides everything has no softmax

    def make(query: Any, key: Any, value: Any, scores: Any) -> Any:
        masks = {"none": None, "float": scores, "bool": mb.greater(x=scores, y=0.0)}
        given_mask = {} if mask == "none" else {"attn_mask": masks[mask]}
        return [mb.scaled_dot_product_attention(query=query, key=key, value=value, **given_mask), mb.identity(x=scores)]

    hidden = {"none": None, "float": scores, "bool": scores > 0}[mask]
    reference = [F.scaled_dot_product_attention(query, key, value, hidden), scores]
    arrays = [tensor.numpy() for tensor in (query, key, value, scores)]
    check(tmp_path_factory.mktemp("a"), make, *arrays, reference=reference, rtol=1e-4)


@settings(max_examples=6, deadline=None)
@given(size=st.integers(1, 5), alpha=st.floats(0.01, 1), beta=st.floats(0.2, 1), k=st.floats(0.5, 2))
def test_local_response_norm_matches_torch(
    size: int, alpha: float, beta: float, k: float, tmp_path_factory: Any
) -> None:
    x = torch.randn(2, 6, 3, 2, generator=torch.Generator().manual_seed(size))
    make = lambda x: mb.local_response_norm(x=x, size=size, alpha=alpha, beta=beta, k=k)  # noqa: E731
    reference = F.local_response_norm(x, size, alpha, beta, k)
    check(tmp_path_factory.mktemp("n"), make, x.numpy(), reference=reference, rtol=1e-4)


def test_torch_einsum_converts_to_the_same(tmp_path: Path) -> None:
    equations = ["bhid,bhjd->bhij", "bij,bjk->bik", "bij,jk->bik", "bhij,bhjd->bhid"]
    shapes = [[(2, 2, 3, 4), (2, 2, 5, 4)], [(2, 3, 4), (2, 4, 5)], [(2, 3, 4), (4, 5)], [(2, 2, 3, 5), (2, 2, 5, 4)]]
    others = [torch.randn(pair[1]) for pair in shapes]

    class Products(torch.nn.Module):
        def forward(self, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.einsum(e, a, b) for e, a, b in zip(equations, x, others, strict=True))

    given = [torch.randn(pair[0]) for pair in shapes]
    with quiet():
        ct.convert(
            torch.jit.trace(Products(), given),
            inputs=[ct.TensorType(f"x{i}", tuple(x.shape)) for i, x in enumerate(given)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        ).save(str(tmp_path / "e.mlpackage"))
    own = MLProgram(tmp_path / "e.mlpackage").predict({f"x{i}": x.numpy() for i, x in enumerate(given)})
    for one, other in zip(own.values(), Products()(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_range_that_is_turned_is_refused(tmp_path: Path) -> None:
    make = lambda x: mb.add(x=mb.random_uniform(shape=[2], low=1.0, high=0.0), y=x)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(random_uniform\): low is 1, above high 0"):
        run(tmp_path, make, np.zeros(2, np.float32))


@settings(max_examples=4, deadline=None)
@given(axis=st.integers(-2, 1), per_channel=st.booleans(), seed=st.integers(0, 99))
def test_constants_of_the_first_generation_match_coremltools(
    axis: int, per_channel: bool, seed: int, tmp_path_factory: Any
) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(-128, 127, (3, 4)).astype(np.int8)
    size = data.shape[axis] if per_channel else None
    scale, zero = rng.random(size), rng.integers(-9, 9, size)
    expected: list[np.ndarray] = []

    def make(x: Any) -> list[Any]:
        constants = [
            mb.constexpr_affine_dequantize(
                quantized_data=data, zero_point=np.int8(zero), scale=np.float32(scale), axis=axis
            ),
            mb.constexpr_cast(source_val=data.astype(np.float16) / np.float16(7), output_dtype="fp32"),
        ]
        expected[:] = [constant.op.materialized_val_inference() for constant in constants]
        return [mb.add(x=constant, y=x) for constant in constants]

    own = run(tmp_path_factory.mktemp("k"), make, np.zeros(1, np.float32), target=ct.target.iOS16)
    for one, other in zip(own, expected, strict=True):
        np.testing.assert_array_equal(one, other)
