"""The lint's rules about operations: a minimal program that each finds, and its nearest neighbour that it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters import mil
from lint_checks import Fires, Make, check_fires, check_silent, flat, program

mb = mil.Builder

HALF = np.float16
X = (1, 2, 8, 4)
WIDE = (1, 2, 64, 32)


def one(operation: Any) -> Any:
    """A build of a single operation on `x`."""
    return lambda values: [operation(values["x"])]


def attention(number: int) -> Any:
    def build(values: Any) -> list[Any]:
        x = values["x"]
        for _ in range(number):
            x = mb.scaled_dot_product_attention(query=x, key=x, value=x)
        return [x]

    return build


def lined_up(values: Any) -> list[Any]:
    """A mask written out for every group of queries, once a call."""
    mask = mb.concat(values=[values["mask"]] * 3, axis=2)
    return [mb.add(x=values["x"], y=mask), mb.mul(x=values["x"], y=mask)]


def only_cache(values: Any) -> list[Any]:
    """The only layer's cache, written out for every query head."""
    return [mb.matmul(x=values["x"], y=mb.concat(values=[values["cache"]] * 3, axis=1), transpose_y=True)]


def lined_up_in_each_layer(values: Any) -> list[Any]:
    return [mb.add(x=values["x"], y=mb.concat(values=[values["mask"]] * 3, axis=2)) for _ in range(2)]


def cache_in_each_layer(values: Any) -> list[Any]:
    """Caches that come as inputs, each written out for every query head."""
    whole = [mb.concat(values=[values[name]] * 3, axis=1) for name in ("x", "mask")]
    return [mb.add(x=cache, y=mb.exp(x=cache)) for cache in whole]


def tiled_input(values: Any) -> list[Any]:
    return [mb.tile(x=values["x"], reps=[1, 3, 1, 1])]


def projections(values: Any) -> list[Any]:
    linear = mb.linear(x=values["x"], weight=np.ones((6, 4), HALF))
    product = mb.matmul(x=linear, y=np.ones((6, 5), HALF))
    return [mb.matmul(x=np.ones((1, 2, 3, 8), HALF), y=product)]


def head(rows: int, arithmetic: bool = False) -> Any:
    def build(values: Any) -> list[Any]:
        logits = mb.conv(x=values["x"], weight=np.ones((rows, 4, 1, 1), HALF))
        logits = mb.reshape(x=logits, shape=[1, 1, rows])
        return [mb.reduce_max(x=logits, axes=[-1]) if arithmetic else logits]

    return build


def looked_up(rows: int, dtype: str | None, then: str | None = None) -> Any:
    """Rows of a table by the input `ids`, cast to `dtype` and `then` to another type."""

    def build(values: Any) -> list[Any]:
        ids = values["ids"]
        for target in (dtype, then):
            ids = mb.cast(x=ids, dtype=target) if target else ids
        return [mb.gather(x=np.zeros((rows, 2), HALF), indices=ids, axis=0)]

    return build


def looked_up_by_result(values: Any) -> list[Any]:
    """A lookup that waits for what the layers work out, as of an argmax."""
    best = mb.reduce_argmax(x=values["x"], axis=-1, keep_dims=False)
    return [mb.gather(x=np.zeros((9, 2), HALF), indices=mb.cast(x=best, dtype="int16"), axis=0)]


def of_computed(values: Any) -> list[Any]:
    """A lookup in something that is no constant, along its second axis."""
    ids = mb.cast(x=values["ids"], dtype="int16")
    return [mb.gather(x=mb.exp(x=values["x"]), indices=ids, axis=1)]


def of_shape(values: Any) -> list[Any]:
    size = mb.gather(x=mb.shape(x=values["x"]), indices=values["ids"], axis=0)
    return [mb.cast(x=size, dtype="fp16")]


def chosen(values: Any) -> list[Any]:
    """One of several indices, which a constant of 16 bits chooses."""
    ids = mb.gather(x=values["ids"], indices=np.array([1], np.uint16), axis=1)
    return [mb.gather(x=np.zeros((102_400, 2), HALF), indices=ids, axis=0)]


def wrapped(rows: int) -> Any:
    """Negative indices made positive the way coremltools does it, by way of 16 bits."""

    def build(values: Any) -> list[Any]:
        ids = mb.cast(x=mb.cast(x=values["ids"], dtype="int16"), dtype="int32")
        ids = mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=mb.add(x=ids, y=np.int32(rows)))
        return [mb.gather(x=np.zeros((rows, 2), HALF), indices=ids, axis=0)]

    return build


IDS = ("int32", (1, 3))

FIRES = {
    "repeated-data": [
        Fires(program(tiled_input, x=WIDE), 1, ["tile_0 (tile) fp16[1, 6, 64, 32], 24,576 bytes"]),
        Fires(program(one(lambda x: mb.concat(values=[(y := mb.exp(x=x)), y], axis=1)), x=WIDE), 1, ["16,384 bytes"]),
        Fires(
            program(lined_up, x=(1, 1, 96, 32), mask=(1, 1, 32, 32)),
            1,
            ["6,144 bytes"],
            expected="the input mask is lined up once a call, as a mask for 2 operations",
        ),
        Fires(program(lined_up_in_each_layer, x=(1, 1, 96, 32), mask=(1, 1, 32, 32)), 2),
        Fires(program(cache_in_each_layer, x=WIDE, mask=WIDE), 2),
        Fires(program(only_cache, x=(1, 6, 3, 32), cache=WIDE), 1, ["24,576 bytes"]),
        # Little in each layer, but not in all.
        Fires(program(lined_up_in_each_layer, x=(1, 1, 96, 16), mask=(1, 1, 32, 16)), 2, ["3,072 bytes"]),
        Fires(program(one(lambda x: mb.tile(x=x, reps=[1, 2, 1, 1])), x=(1, 1, 32, 32)), 1, ["4,096 bytes"]),
    ],
    "little-repeated-data": [
        # The smallest that a converter of others repeats: cosines of one token.
        Fires(
            program(one(lambda x: mb.concat(values=[(y := mb.exp(x=x)), y], axis=3)), x=(1, 1, 1, 32)), 1, ["128 bytes"]
        ),
        Fires(program(one(lambda x: mb.tile(x=x, reps=[1, 2, 1, 1])), x=(1, 1, 31, 33)), 1, ["4,092 bytes"]),
        Fires(program(lined_up, x=(1, 1, 24, 4), mask=(1, 1, 8, 4)), 1, ["192 bytes"], expected="the input mask"),
    ],
    "linear-instead-of-conv": [
        Fires(program(projections, x=X), 3, ["linear_0 (linear) fp16[1, 2, 8, 6], weight [6, 4]"])
    ],
    "several-fused-attentions": [Fires(program(attention(2), x=X), 2), Fires(program(attention(3), x=X), 3)],
    "head-in-one-piece": [Fires(program(head(16_385), x=(1, 4, 1, 1)), 1, ["fp16[1, 16385, 1, 1]"])],
    "embedding-gather": [
        Fires(program(looked_up(9, "int16"), ids=IDS), 1, ["from a table fp16[9, 2]"], expected="integer arithmetic"),
        Fires(program(wrapped(9), ids=IDS), 1, expected="integer arithmetic"),
        Fires(program(looked_up_by_result, x=X), 1),
    ],
    "gather-with-32-bit-indices": [
        Fires(program(looked_up(32_767, None), ids=IDS), 1, ["an axis of 32,767"]),
        Fires(program(looked_up(32_768, None), ids=IDS), 1, ["an axis of 32,768"], expected="above 32,767"),
    ],
    "gather-index-overflow": [
        Fires(program(looked_up(32_769, "int16"), ids=IDS), 1, ["an axis of 32,769 by int16"]),
        Fires(program(looked_up(32_769, "int16", "int32"), ids=IDS), 1, ["by int16"]),
        Fires(program(looked_up(65_537, "uint16"), ids=IDS), 1, ["by uint16"]),
        Fires(program(wrapped(102_400), ids=IDS), 1, ["an axis of 102,400 by int16"]),
        Fires(program(of_computed, ids=IDS, x=(1, 40_000, 2)), 1, ["an axis of 40,000 by int16"]),
    ],
}

SILENT = {
    "repeated-data": [
        program(one(lambda x: mb.concat(values=[mb.exp(x=x), mb.log(x=x, epsilon=HALF(0))], axis=1)), x=WIDE),
        program(one(lambda x: mb.concat(values=[x, np.ones(WIDE, HALF)], axis=1)), x=WIDE),
        program(one(lambda x: mb.tile(x=x, reps=[1, 2, 1, 1])), x=(1, 1, 31, 33)),
    ],
    "little-repeated-data": [
        program(one(lambda x: mb.concat(values=[x, mb.exp(x=x)], axis=1)), x=X),
        program(one(lambda x: mb.tile(x=x, reps=[1, 2, 1, 1])), x=(1, 1, 32, 32)),
    ],
    "linear-instead-of-conv": [
        program(lambda v: [mb.matmul(x=v["x"], y=v["x"], transpose_y=True)], x=X),
        program(one(lambda x: mb.conv(x=x, weight=np.ones((3, 2, 1, 1), HALF))), x=X),
    ],
    "several-fused-attentions": [program(attention(1), x=X)],
    "head-in-one-piece": [
        program(head(16_384), x=(1, 4, 1, 1)),
        program(head(16_385, arithmetic=True), x=(1, 4, 1, 1)),
    ],
    "embedding-gather": [program(of_computed, ids=IDS, x=(1, 40, 2))],
    "gather-with-32-bit-indices": [
        program(looked_up(9, "int16"), ids=IDS),
        program(of_shape, ids=("int32", (2,)), x=X),
    ],
    "gather-index-overflow": [
        program(looked_up(32_768, "int16"), ids=IDS),
        program(looked_up(65_536, "uint16"), ids=IDS),
        program(looked_up(102_400, None), ids=IDS),
        program(wrapped(32_768), ids=IDS),
        program(chosen, ids=IDS),
        program(of_computed, ids=IDS, x=(40_000, 4, 2)),
    ],
}


@pytest.mark.parametrize(("rule", "case"), flat(FIRES))
def test_fires_with_the_right_count(tmp_path: Path, rule: str, case: Fires) -> None:
    check_fires(tmp_path, rule, case)


@pytest.mark.parametrize(("rule", "make"), flat(SILENT))
def test_near_miss_is_left_alone(tmp_path: Path, rule: str, make: Make) -> None:
    check_silent(tmp_path, rule, make)
