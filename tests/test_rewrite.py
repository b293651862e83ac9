"""Folding saved programs: every form of repetition that is recognised, against PyTorch, and every one that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_programs import (
    FORMS,
    Sizes,
    attention,
    expand_reshape,
    expected,
    gather,
    numbers,
    softmax,
    softmax_in_parts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mil_programs import mb, output_names, save_program

from ane_layers.interpreter import MLProgram
from ane_layers.program import Package
from ane_layers.rewrite import FoldedPackage, equality, fold_package, plan

N = Sizes()


def folded(source: Path) -> FoldedPackage:
    """Folds one attention completely: no repetition of keys and values is left."""
    result = fold_package(source, source.with_name("folded.mlpackage"))
    (function,) = result.report.functions
    assert len(function.folded) == 1
    assert not function.refused
    assert function.after.tiles == 0
    # Rows of a mask are the one repetition that may be left, and for one token not even they.
    assert function.after.repetitions <= (function.folded[0].rows > 1)
    assert max(value.tensor_type.rank for op in result.package.function().block.operations for value in op.outputs) == 4
    return result


def run(package: Any, data: dict[str, np.ndarray]) -> np.ndarray:
    return next(iter(MLProgram(package).predict(data).values()))


def refusal(source: Path) -> str:
    """The reason for leaving all repetitions alone; `fold_package` says it too."""
    found = plan(Package.open(source).function())
    assert not found.operations
    assert not found.folded
    with pytest.raises(ValueError, match="nothing to fold"):
        fold_package(source, source.with_name("folded.mlpackage"))
    assert not source.with_name("folded.mlpackage").exists()
    return "; ".join(refused.reason for refused in found.refused)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_repetition_matches_torch(tmp_path: Path, form: str, tokens: int) -> None:
    n = Sizes(s=tokens)
    source = attention(tmp_path / "m.mlpackage", n, key=FORMS[form], value=FORMS[form])
    data = numbers(n)
    np.testing.assert_allclose(run(folded(source).package, data), expected(data), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["expand_reshape", "rank_4", "repeat_interleave", "tokens_first", "gather"])
def test_batches_match_torch(tmp_path: Path, form: str) -> None:
    n = Sizes(b=3, s=2)
    source = attention(tmp_path / "m.mlpackage", n, key=FORMS[form], value=FORMS[form])
    data = numbers(n)
    np.testing.assert_allclose(run(folded(source).package, data), expected(data), rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.builds(
        Sizes,
        b=st.integers(1, 2),
        k=st.integers(1, 3),
        g=st.integers(2, 5),
        s=st.integers(1, 4),
        t=st.integers(1, 6),
        d=st.integers(1, 5),
    ),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(sorted(FORMS)),
)
def test_odd_sizes_match_torch(tmp_path_factory: pytest.TempPathFactory, n: Sizes, key: str, value: str) -> None:
    source = attention(tmp_path_factory.mktemp("m") / "m.mlpackage", n, key=FORMS[key], value=FORMS[value])
    data = numbers(n)
    result = fold_package(source, source.with_name("folded.mlpackage"))
    assert result.report.folded == 1
    np.testing.assert_allclose(run(result.package, data), expected(data), rtol=1e-5, atol=1e-5)


def softcap(scores: Any, given: dict[str, Any]) -> Any:
    return mb.add(x=mb.mul(x=mb.tanh(x=mb.mul(x=scores, y=np.float32(0.1))), y=np.float32(10)), y=given["mask"])


def select(scores: Any, given: dict[str, Any]) -> Any:
    return mb.select(cond=mb.greater(x=given["mask"], y=np.float32(0)), a=scores, b=np.float32(-1e4))


def by_head_and_row(scores: Any, given: dict[str, Any]) -> Any:
    return mb.add(x=scores, y=given["bias"])


def sink(scores: Any, given: dict[str, Any]) -> Any:
    """A column more, of which the weights are thrown away."""
    return mb.concat(values=[mb.add(x=scores, y=given["mask"]), given["sink"]], axis=3)


BETWEEN: dict[str, dict[str, Any]] = {
    "softmax in parts": {"weights": softmax_in_parts},
    "softcap": {"change": softcap},
    "selected mask": {"change": select},
    "no mask": {"change": lambda scores, _: scores},
    "constant mask": {"change": lambda scores, given: mb.add(x=scores, y=numbers(N)["mask"])},
    "bias by head and row": {"change": by_head_and_row, "extra": {"bias": ((1, 6, 5, 7), np.float32)}},
    "weights are an output": {"outputs": lambda out, weights, **_: [out, weights]},
    "sink": {
        "change": sink,
        "weights": lambda scores: mb.slice_by_index(
            x=softmax(scores), begin=[0, 0, 0, 0], end=[1, 6, 5, 7], end_mask=[True, False, True, False]
        ),
        "extra": {"sink": ((1, 6, 5, 1), np.float32)},
    },
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_stands_between_the_products_stays(tmp_path: Path, what: str) -> None:
    source = attention(tmp_path / "m.mlpackage", N, **BETWEEN[what])
    result = folded(source)
    assert result.equality is not None
    assert result.equality.least > 120
    assert output_names(result.package.path) == output_names(source)


def test_scores_in_two_parts(tmp_path: Path) -> None:
    """A cache and the new tokens, joined for the softmax and parted again, as a cache that is written late needs."""
    n = Sizes(t=7)
    new = Sizes(t=2)

    def build(given: Any) -> list[Any]:
        keys = [expand_reshape(given["key"], n), expand_reshape(given["new_key"], new)]
        values = [expand_reshape(given["value"], n), expand_reshape(given["new_value"], new)]
        scores = [mb.matmul(x=given["query"], y=key, transpose_y=True) for key in keys]
        weights = mb.softmax(x=mb.add(x=mb.concat(values=scores, axis=-1), y=given["mask"]), axis=-1)
        old, late = mb.split(x=weights, split_sizes=[7, 2], axis=3)
        return [mb.add(x=mb.matmul(x=old, y=values[0]), y=mb.matmul(x=late, y=values[1]))]

    shapes = {"query": (1, 6, 5, 4), "mask": (1, 1, 5, 9)}
    shapes |= {"key": (1, 2, 7, 4), "value": (1, 2, 7, 4), "new_key": (1, 2, 2, 4), "new_value": (1, 2, 2, 4)}
    source = save_program(
        tmp_path / "m.mlpackage", {name: (shape, np.float32) for name, shape in shapes.items()}, build
    )
    result = folded(source)
    assert result.report.functions[0].folded[0].values == ("matmul_2", "matmul_3")
    generator = np.random.default_rng(0)
    data = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    joined = {name: np.concatenate([data[name], data[f"new_{name}"]], 2) for name in ("key", "value")}
    reference = expected({**joined, "query": data["query"] * 4**0.5, "mask": data["mask"]})
    np.testing.assert_allclose(run(result.package, data), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_fused_operation_matches_torch(tmp_path: Path, tokens: int) -> None:
    n = Sizes(s=tokens)

    def build(given: Any) -> list[Any]:
        return [
            mb.scaled_dot_product_attention(
                query=given["query"],
                key=expand_reshape(given["key"], n),
                value=gather(given["value"], n),
                attn_mask=given["mask"],
            )
        ]

    data = numbers(n)
    source = save_program(tmp_path / "m.mlpackage", {name: (x.shape, np.float32) for name, x in data.items()}, build)
    np.testing.assert_allclose(run(folded(source).package, data), expected(data), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5])
def test_products_at_rank_5_and_transposed_operands(tmp_path: Path, tokens: int) -> None:
    """Repeated and left at `[B, K, G, T, D]`; the query is transposed, and the values stand on the left."""
    n = Sizes(s=tokens)

    def build(given: Any) -> list[Any]:
        def tiled(x: Any) -> Any:
            return mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, n.g, 1, 1])

        query = mb.reshape(x=given["query"], shape=[1, n.k, n.g, n.s, n.d])
        query = mb.transpose(x=mb.mul(x=query, y=np.float32(n.d**-0.5)), perm=[0, 1, 2, 4, 3])
        keys = mb.transpose(x=tiled(given["key"]), perm=[0, 1, 2, 4, 3])
        scores = mb.matmul(x=query, y=keys, transpose_x=True)
        weights = mb.softmax(x=mb.add(x=scores, y=given["mask"]), axis=4)
        out = mb.matmul(x=tiled(given["value"]), y=weights, transpose_x=True, transpose_y=True)
        return [mb.reshape(x=mb.transpose(x=out, perm=[0, 1, 2, 4, 3]), shape=[1, n.h, n.s, n.d])]

    data = numbers(n)
    source = save_program(tmp_path / "m.mlpackage", {name: (x.shape, np.float32) for name, x in data.items()}, build)
    result = fold_package(source, tmp_path / "folded.mlpackage")
    assert result.report.functions[0].after.tiles == 0
    np.testing.assert_allclose(run(result.package, data), expected(data), rtol=1e-5, atol=1e-5)


def test_one_mask_is_lined_up_for_all_layers(tmp_path: Path) -> None:
    def build(given: Any) -> list[Any]:
        out = given["query"]
        for _ in range(3):
            keys, values = expand_reshape(given["key"], N), expand_reshape(given["value"], N)
            scores = mb.add(x=mb.matmul(x=out, y=keys, transpose_y=True), y=given["mask"])
            out = mb.matmul(x=softmax(scores), y=values)
        return [out]

    inputs = {name: (x.shape, np.float32) for name, x in numbers(N).items()}
    source = save_program(tmp_path / "m.mlpackage", inputs, build)
    result = fold_package(source, tmp_path / "folded.mlpackage")
    (function,) = result.report.functions
    assert len(function.folded) == 3
    assert (function.before.tiles, function.after.tiles) == (6, 0)
    assert function.after.repetition_bytes == 3 * 5 * 7 * 4
    assert result.equality is not None
    assert result.equality.least > 120


# What is refused.


def interleaved(x: Any, n: Sizes) -> Any:
    """Query head h reads KV head h % K."""
    return mb.tile(x=x, reps=[1, n.g, 1, 1])


def test_interleaved_heads_are_refused(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.mlpackage", N, key=interleaved, value=interleaved)
    assert "heads are interleaved" in refusal(source)


@pytest.mark.parametrize("part", ["key", "value"])
def test_one_interleaved_operand_is_enough_to_refuse(tmp_path: Path, part: str) -> None:
    source = attention(tmp_path / "m.mlpackage", N, **{part: interleaved})
    assert "heads are interleaved" in refusal(source)


def test_uneven_shares_are_refused(tmp_path: Path) -> None:
    def uneven(x: Any, n: Sizes) -> Any:
        return mb.gather(x=x, indices=np.array([0, 0, 1, 1, 1, 1], np.int32), axis=1)

    source = attention(tmp_path / "m.mlpackage", N, key=uneven, value=uneven)
    assert "another axis than that of heads" in refusal(source)


def test_repeated_keys_that_are_an_output_are_refused(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.mlpackage", N, outputs=lambda out, keys, **_: [out, keys])
    assert "is an output as well" in refusal(source)


def test_repeated_keys_with_another_use_are_refused(tmp_path: Path) -> None:
    source = attention(
        tmp_path / "m.mlpackage", N, outputs=lambda out, keys, **_: [out, mb.reduce_sum(x=keys, axes=[1, 2, 3])]
    )
    assert "which is no product of attention" in refusal(source)


def test_a_repeated_token_axis_is_refused(tmp_path: Path) -> None:
    def along_tokens(x: Any, n: Sizes) -> Any:
        whole = expand_reshape(x, n)
        first = mb.slice_by_index(x=whole, begin=[0, 0, 0, 0], end=[n.b, n.h, 1, n.d])
        return mb.tile(x=first, reps=[1, 1, n.t, 1])

    source = attention(tmp_path / "m.mlpackage", N, key=along_tokens, value=along_tokens)
    assert "another axis than that of heads" in refusal(source)


def test_groups_that_differ_between_keys_and_values_are_refused(tmp_path: Path) -> None:
    def build(given: Any) -> list[Any]:
        keys, values = gather(given["key"], Sizes(k=4, g=2)), gather(given["value"], Sizes(k=2, g=4))
        return [mb.matmul(x=softmax(mb.matmul(x=given["query"], y=keys, transpose_y=True)), y=values)]

    shapes = {"query": (1, 8, 3, 4), "key": (1, 4, 7, 4), "value": (1, 2, 7, 4)}
    source = save_program(
        tmp_path / "m.mlpackage", {name: (shape, np.float32) for name, shape in shapes.items()}, build
    )
    assert "groups or rows differ" in refusal(source)


def test_operations_across_heads_are_refused(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.mlpackage", N, weights=lambda scores: mb.softmax(x=scores, axis=1))
    assert "does not work along the last axis" in refusal(source)


def test_a_bias_by_head_alone_is_refused_for_many_tokens(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.mlpackage", N, change=by_head_and_row, extra={"bias": ((1, 6, 1, 7), np.float32)})
    assert "differs by query head" in refusal(source)


def test_a_reversed_order_of_heads_is_refused(tmp_path: Path) -> None:
    def reversed_heads(scores: Any, given: dict[str, Any]) -> Any:
        whole = [True] * 4
        return mb.slice_by_index(
            x=scores, begin=[0] * 4, end=[0] * 4, stride=[1, -1, 1, 1], begin_mask=whole, end_mask=whole
        )

    source = attention(tmp_path / "m.mlpackage", N, change=reversed_heads)
    assert "does not keep all rows in their order" in refusal(source)


def test_products_without_scores_are_refused(tmp_path: Path) -> None:
    def build(given: Any) -> list[Any]:
        return [mb.matmul(x=given["query"], y=expand_reshape(given["key"], N), transpose_y=True)]

    data = numbers(N)
    inputs = {name: (data[name].shape, np.float32) for name in ("query", "key")}
    assert "no other product of the same attention" in refusal(save_program(tmp_path / "m.mlpackage", inputs, build))


def test_attention_that_repeats_nothing_has_nothing_to_fold(tmp_path: Path) -> None:
    n = Sizes(g=1)
    source = attention(tmp_path / "m.mlpackage", n, key=lambda x, _: x, value=lambda x, _: x)
    assert refusal(source) == ""


def test_what_is_refused_does_not_keep_the_rest_from_folding(tmp_path: Path) -> None:
    def build(given: Any) -> list[Any]:
        out = given["query"]
        for repeat in (expand_reshape, interleaved, gather):
            keys, values = repeat(given["key"], N), repeat(given["value"], N)
            out = mb.matmul(x=softmax(mb.matmul(x=out, y=keys, transpose_y=True)), y=values)
        return [out]

    inputs = {name: (numbers(N)[name].shape, np.float32) for name in ("query", "key", "value")}
    source = save_program(tmp_path / "m.mlpackage", inputs, build)
    result = fold_package(source, tmp_path / "folded.mlpackage")
    (function,) = result.report.functions
    assert (len(function.folded), len(function.refused), function.after.tiles) == (2, 2, 2)
    assert result.equality is not None
    assert result.equality.least > 120


# The package on disk.


def test_the_weight_file_and_the_source_are_left_alone(tmp_path: Path) -> None:
    def build(given: Any) -> list[Any]:
        scores = mb.matmul(x=given["query"], y=expand_reshape(given["key"], N), transpose_y=True)
        bias = np.random.default_rng(0).standard_normal((1, 6, 5, 7)).astype(np.float32)
        return [mb.matmul(x=softmax(mb.add(x=scores, y=bias)), y=expand_reshape(given["value"], N))]

    inputs = {name: (numbers(N)[name].shape, np.float32) for name in ("query", "key", "value")}
    source = save_program(tmp_path / "m.mlpackage", inputs, build)
    before = {file.relative_to(source): file.read_bytes() for file in source.rglob("*") if file.is_file()}
    result = folded(source)
    weights = Path("Data/com.apple.CoreML/weights/weight.bin")
    assert (result.package.path / weights).read_bytes() == before[weights]
    assert {file.relative_to(source): file.read_bytes() for file in source.rglob("*") if file.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folded.mlpackage", "m.mlpackage"]


def test_a_wrong_folding_is_found_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the mapping of heads not checked, the comparison would still catch it."""
    from ane_layers.rewrite import repetition

    def unchecked(origin: np.ndarray, elements: int) -> tuple[np.ndarray, int]:
        groups = origin.size // elements
        return origin[:, : origin.shape[1] // groups], groups

    monkeypatch.setattr(repetition, "_every_head_once", unchecked)
    source = attention(tmp_path / "m.mlpackage", N, key=interleaved, value=interleaved)
    with pytest.raises(ValueError, match="agrees with the original to"):
        fold_package(source, tmp_path / "folded.mlpackage")
    assert [path.name for path in tmp_path.iterdir()] == ["m.mlpackage"]


def test_targets_that_cannot_be_written_are_refused_first(tmp_path: Path) -> None:
    source = attention(tmp_path / "m.mlpackage", N)
    with pytest.raises(ValueError, match="is the package that is read"):
        fold_package(source, source)
    with pytest.raises(ValueError, match=r"must end in \.mlpackage"):
        fold_package(source, tmp_path / "folded")


def test_equality_sees_a_difference(tmp_path: Path) -> None:
    first = attention(tmp_path / "a.mlpackage", N)
    second = attention(tmp_path / "b.mlpackage", N, key=interleaved, value=interleaved)
    assert equality(first, first).least == float("inf")
    assert equality(first, second).least < 20
