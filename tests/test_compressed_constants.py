"""Every form in which a weight is stored compressed, bit for bit against coremltools' own decompression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.converters.mil.mil import types
from coremltools.optimize import coreml
from mil_programs import quiet, save_program

from ane_layers.program import Package
from ane_layers.program.constexpr import compressed

mb = mil.Builder

# 7 × 6 = 42 elements: a whole number of bytes for no width below 8 bits but 4, and not of three bytes for 3 and 6 bits either.
ODD = (7, 6)


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random elements of a type, its lowest and highest among them."""
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = rng.integers(low, high + 1, shape)
    values.reshape(-1)[[0, -1]] = low, high
    return values.astype(types.nptype_from_builtin(getattr(types, dtype)))


def check(folder: Path, makes: list[Callable[[], Any]]) -> None:
    """The constants that `makes` build, once as coremltools materializes them and once as read from the saved file."""
    references = []

    def build(values: Any) -> list[Any]:
        results = []
        for make in makes:
            constant = make()
            references.append(constant.op.materialized_val_inference())
            results.append(mb.mul(x=constant, y=mb.cast(x=values["x"], dtype=types.builtin_to_string(constant.dtype))))
        return results

    path = save_program(folder / "c.mlpackage", {"x": ((1,), np.float32)}, build)
    own = constants(path)
    products = [o for o in Package.open(path).function().block.operations if o.type == "mul"]
    for product, reference in zip(products, references, strict=True):
        assert_equal_bits(own[product.inputs["x"][0].name], reference)


def constants(path: Path, function: str | None = None) -> dict[str, np.ndarray]:
    """Every plain and compressed constant of a package, by name."""
    known: dict[str, Any] = {}
    for operation in Package.open(path).function(function).block.operations:
        if operation.type == "const":
            known[operation.outputs[0].name] = operation.attributes["val"]
        elif operation.type.startswith("constexpr_"):
            known.update(compressed(operation, known))
    return {name: c.array() for name, c in known.items() if hasattr(c.type, "shape")}


def assert_equal_bits(own: np.ndarray, reference: np.ndarray) -> None:
    assert own.dtype == reference.dtype
    assert own.shape == reference.shape
    np.testing.assert_array_equal(own.view(np.uint8), np.ascontiguousarray(reference).view(np.uint8))


FLOATS = [np.float16, np.float32]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_lookup_tables(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(bits)
    makes = []
    for shape, blocks in [(ODD, (1, 1)), (ODD, (7, 1)), (ODD, (1, 3)), ((3, 5, 1, 7), (1, 1, 1, 1))]:
        for dtype in FLOATS:
            table = rng.standard_normal((*blocks, 2**bits, 1)).astype(dtype)
            indices = numbers(rng, f"uint{bits}", shape)
            makes.append(lambda t=table, n=indices: mb.constexpr_lut_to_dense(indices=n, lut=t))
    check(tmp_path, makes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_grouped_lookup_tables(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(bits)
    makes = []
    for group in (8, 16, 32):
        for shape, blocks in (((64, 5), (64 // group, 1)), ((5, 64), (1, 64 // group))):
            table = rng.standard_normal((*blocks, 2**bits, 1)).astype(np.float16)
            indices = numbers(rng, f"uint{bits}", shape)
            makes.append(lambda t=table, n=indices: mb.constexpr_lut_to_dense(indices=n, lut=t))
    check(tmp_path, makes)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_vector_lookup_tables(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(bits)
    makes = []
    for vector in (2, 3, 4):
        for axis in (0, 1, -1):
            table = rng.standard_normal((7, 1, 2**bits, vector)).astype(np.float16)
            indices = numbers(rng, f"uint{bits}", ODD)
            makes.append(lambda t=table, n=indices, a=axis: mb.constexpr_lut_to_dense(indices=n, lut=t, vector_axis=a))
    check(tmp_path, makes)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("bits", [1, 2, 4, 6])
def test_lookup_tables_that_are_quantized_themselves(tmp_path: Path, bits: int, kind: str) -> None:
    rng = np.random.default_rng(bits)
    indices = numbers(rng, f"uint{bits}", (8, 7))
    quantized = numbers(rng, kind, (4, 1, 2**bits, 1))
    scale = rng.uniform(0.01, 1, (4, 1, 1, 1)).astype(np.float16)
    offset = {"offset": numbers(rng, kind, (4, 1, 1, 1))} if kind == "uint8" else {}

    def make() -> Any:
        table = mb.constexpr_blockwise_shift_scale(data=quantized, scale=scale, **offset)
        return mb.constexpr_lut_to_dense(indices=indices, lut=table)

    # coremltools materializes no constant of constants: the reference is its definition, in numpy.
    shapes = {"x": ((1,), np.float16)}
    own = constants(save_program(tmp_path / "c.mlpackage", shapes, lambda v: [mb.mul(x=make(), y=v["x"])]))
    shifted = quantized.astype(np.float32) - (offset["offset"].astype(np.float32) if offset else 0)
    table = (shifted * scale.astype(np.float32)).astype(np.float16)
    expected = np.stack([table[row // 2, 0, indices[row].astype(int), 0] for row in range(8)])
    (found,) = [value for value in own.values() if value.shape == (8, 7) and value.dtype == np.float16]
    assert_equal_bits(found, expected)


SCALES = {
    "tensor": (1, 1),
    "channel": (7, 1),
    "channel of axis 1": (1, 6),
    "block": (7, 2),
    "blocks on both axes": (1, 3),
}


@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8"])
def test_scales(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    makes = []
    for shape in ((1, 1), (7, 1), (1, 6), (7, 2), (1, 3)):  # a tensor, a channel of either axis, blocks
        for dtype in FLOATS:
            parts = {"data": numbers(rng, kind, ODD), "scale": rng.uniform(0.01, 1, shape).astype(dtype)}
            makes.append(lambda p=parts: mb.constexpr_blockwise_shift_scale(**p))
            shifted = {**parts, "offset": numbers(rng, kind, shape)}
            makes.append(lambda p=shifted: mb.constexpr_blockwise_shift_scale(**p))
    check(tmp_path, makes)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_sparse(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(1)
    mask = (rng.random(ODD) < share).astype(types.nptype_from_builtin(types.uint1))
    mask[0, 0] = 1
    count = int(mask.sum())
    both = [rng.standard_normal(count).astype(dtype) for dtype in FLOATS]
    check(tmp_path, [lambda v=v: mb.constexpr_sparse_to_dense(nonzero_data=v, mask=mask) for v in both])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_sparse_with_lookup_tables(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(bits)
    mask = (rng.random(ODD) < 0.4).astype(types.nptype_from_builtin(types.uint1))
    codes = rng.integers(0, 2**bits, int(mask.sum())).astype(types.nptype_from_builtin(getattr(types, f"uint{bits}")))
    makes = []
    for blocks in ((1, 1), (7, 1)):
        table = rng.standard_normal((*blocks, 2**bits, 1)).astype(np.float16)

        def make(table: np.ndarray = table) -> Any:
            found, values = mb.constexpr_lut_to_sparse(indices_mask=mask, indices_nonzero_data=codes, lut=table)
            return mb.constexpr_sparse_to_dense(nonzero_data=values, mask=found)

        makes.append(make)
    check(tmp_path, makes)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8"])
def test_sparse_with_scales(tmp_path: Path, kind: str, offset: bool) -> None:
    rng = np.random.default_rng(2)
    mask = (rng.random(ODD) < 0.4).astype(types.nptype_from_builtin(types.uint1))
    parts = {
        "nonzero_data": numbers(rng, kind, (int(mask.sum()),)),
        "scale": rng.uniform(0.01, 1, (7, 1)).astype(np.float16),
    }
    if offset:
        parts["offset"] = numbers(rng, kind, (7, 1))

    def make() -> Any:
        found, values = mb.constexpr_sparse_blockwise_shift_scale(data_mask=mask, **parts)
        return mb.constexpr_sparse_to_dense(nonzero_data=values, mask=found)

    check(tmp_path, [make])


def recipe(config: Any) -> Any:
    return coreml.OptimizationConfig(global_config=config)


def palettize(**options: Any) -> Any:
    return lambda m: coreml.palettize_weights(
        m, recipe(coreml.OpPalettizerConfig(mode="uniform", weight_threshold=8, **options))
    )


def quantize(**options: Any) -> Any:
    return lambda m: coreml.linear_quantize_weights(
        m, recipe(coreml.OpLinearQuantizerConfig(weight_threshold=8, **options))
    )


def prune(model: Any) -> Any:
    return coreml.prune_weights(model, recipe(coreml.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=8)))


RECIPES: dict[str, tuple[Any, Any]] = {
    **{f"lut {bits} iOS16": (ct.target.iOS16, palettize(nbits=bits)) for bits in (1, 2, 4, 6, 8)},
    **{f"lut {bits} iOS18": (ct.target.iOS18, palettize(nbits=bits)) for bits in (1, 2, 3, 4, 6, 8)},
    "lut 4 in groups": (ct.target.iOS18, palettize(nbits=4, granularity="per_grouped_channel", group_size=8)),
    "symmetric iOS16": (ct.target.iOS16, quantize(mode="linear_symmetric")),
    "zero points iOS16": (ct.target.iOS16, quantize(mode="linear")),
    "uint8 iOS16": (ct.target.iOS16, quantize(mode="linear", dtype="uint8")),
    "int8 tensor iOS16": (ct.target.iOS16, quantize(mode="linear", granularity="per_tensor")),
    "int4 blocks": (ct.target.iOS18, quantize(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=8)),
    "uint4 blocks": (ct.target.iOS18, quantize(mode="linear", dtype="uint4", granularity="per_block", block_size=8)),
    "int8 channel": (ct.target.iOS18, quantize(mode="linear")),
    "sparse iOS16": (ct.target.iOS16, prune),
    "sparse iOS18": (ct.target.iOS18, prune),
    "sparse, then lut iOS18": (ct.target.iOS18, lambda m: coreml.palettize_weights(
        prune(m), recipe(coreml.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=8)), joint_compression=True)),
    "lut, then int8 tables": (ct.target.iOS18, lambda m: coreml.linear_quantize_weights(
        palettize(nbits=4)(m), recipe(coreml.OpLinearQuantizerConfig(
            mode="linear_symmetric", granularity="per_tensor", weight_threshold=8)), joint_compression=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> Callable[[Any], Any]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 7)).eval()
    made: dict[Any, Any] = {}

    def model(target: Any) -> Any:
        if target not in made:
            with quiet():
                made[target] = ct.convert(
                    torch.jit.trace(module, torch.zeros(1, 24)),
                    inputs=[ct.TensorType("x", (1, 24))],
                    minimum_deployment_target=target,
                    skip_model_load=True,
                )
        return made[target]

    return model


@pytest.mark.parametrize("name", RECIPES)
def test_saved_recipes_match_decompress_weights(name: str, models: Callable[[Any], Any], tmp_path: Path) -> None:
    target, compress = RECIPES[name]
    with quiet():
        changed = compress(models(target))
        changed.save(str(tmp_path / "c.mlpackage"))
        plain = coreml.decompress_weights(changed)
        plain.save(str(tmp_path / "p.mlpackage"))
    types_used = [operation.type for operation in Package.open(tmp_path / "c.mlpackage").function().block.operations]
    assert any(type_.startswith("constexpr_") for type_ in types_used)
    own, reference = weights(tmp_path / "c.mlpackage"), weights(tmp_path / "p.mlpackage")
    assert len(own) == len(reference) == 2
    for mine, theirs in zip(own, reference, strict=True):
        assert_equal_bits(mine, theirs)


def weights(path: Path) -> list[np.ndarray]:
    """What the linear layers are given, in order."""
    values = constants(path)
    layers = [o for o in Package.open(path).function().block.operations if o.type == "linear"]
    return [values[layer.inputs["weight"][0].name] for layer in layers]
