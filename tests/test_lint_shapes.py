"""The lint's rules about shapes: a minimal program that each finds, and its nearest neighbour that it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.converters.mil.mil import types
from lint_checks import Fires, Make, check_fires, check_silent, flat, operations, program
from mil_programs import quiet

from ane_layers.program import Package

mb = mil.Builder


def flexible(shape: Any) -> Make:
    """A program that takes one of several shapes."""

    def make(folder: Path) -> Package:
        with quiet():
            ct.convert(
                torch.jit.trace(torch.nn.ReLU().eval(), torch.zeros(2, 4)),
                inputs=[ct.TensorType("x", shape, np.float16)],
                outputs=[ct.TensorType("out", dtype=np.float16)],
                minimum_deployment_target=ct.target.iOS18,
                skip_model_load=True,
            ).save(str(folder / "model.mlpackage"))
        return Package.open(folder / "model.mlpackage")

    return make


def sixth_axis(model: Any) -> None:
    """coremltools refuses to save a result of six axes."""
    tensor = next(operation for operation in operations(model) if operation.type == "exp").outputs[0].type.tensorType
    tensor.rank = 6
    tensor.dimensions.add().constant.size = 1


def table_of_six_axes(values: Any) -> list[Any]:
    indices = np.zeros((8, 4, 1, 1), types.np_uint4_dtype)
    table = mb.constexpr_lut_to_dense(indices=indices, lut=np.zeros((1, 1, 1, 1, 16, 1), np.float16))
    return [mb.conv(x=values["x"], weight=table)]


def exp(values: Any) -> list[Any]:
    return [mb.exp(x=values["x"])]


def square(values: Any) -> list[Any]:
    return [mb.matmul(x=values["x"], y=values["x"], transpose_y=True)]


def swapped(rank: int) -> Any:
    return lambda values: [mb.transpose(x=values["x"], perm=[*range(rank - 2), rank - 1, rank - 2])]


def softmax(values: Any) -> list[Any]:
    scores = values["x"]
    exponentials = mb.exp(x=mb.sub(x=scores, y=mb.reduce_max(x=scores, axes=[-1], keep_dims=True)))
    total = mb.reduce_sum(x=exponentials, axes=[-1], keep_dims=True)
    return [mb.mul(x=exponentials, y=mb.inverse(x=total, epsilon=np.float16(0)))]


def mixed(values: Any) -> list[Any]:
    return [mb.add(x=mb.reduce_max(x=values["x"], axes=[-1], keep_dims=True), y=values["column"])]


def last_position(values: Any) -> list[Any]:
    last = mb.slice_by_index(
        x=values["x"], begin=[0, 0, 0, -1], end=[1, 6, 1, 5], end_mask=[True, True, True, True], begin_mask=[False] * 4
    )
    weight = np.ones((9, 6, 1, 1), np.float16)
    return [mb.reshape(x=mb.conv(x=last, weight=weight), shape=[1, 1, 9])]


def token(values: Any) -> list[Any]:
    rows = mb.gather(x=np.ones((7, 6), np.float16), indices=values["ids"], axis=0)
    return [mb.exp(x=mb.reshape(x=rows, shape=[1, 6, 1, -1]))]


def layer_of_one(shape: tuple[int, ...], axis: int) -> Any:
    """Hidden states of others' layout, turned for a convolution behind a norm."""

    def build(values: Any) -> list[Any]:
        x = values["x"]
        total = mb.reduce_sum(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True)
        x = mb.reshape(x=mb.mul(x=x, y=mb.rsqrt(x=total, epsilon=np.float16(0))), shape=[shape[0], -1, 1, 1])
        return [mb.conv(x=x, weight=np.ones((9, 24, 1, 1), np.float16))]

    return build


def scores(values: Any) -> list[Any]:
    """A query against the cache, and against the one new key."""
    query, key = mb.exp(x=values["query"]), mb.exp(x=values["key"])
    rows = mb.gather(x=np.ones((7, 6), np.float16), indices=values["ids"], axis=0)
    parts = [mb.matmul(x=query, y=part, transpose_y=True) for part in (mb.read_state(input=values["cache"]), key)]
    return [mb.softmax(x=mb.concat(values=[parts[0], mb.mul(x=parts[1], y=np.float16(2))], axis=3), axis=3), rows]


def joined(arithmetic: bool, pieces: int, size: int) -> Any:
    """A head in pieces, whose results are put next to each other at the end."""

    def build(values: Any) -> list[Any]:
        weight = np.ones((size, 1, 1, 1), np.float16)
        whole = mb.concat(values=[mb.conv(x=values["x"], weight=weight) for _ in range(pieces)], axis=1)
        whole = mb.transpose(x=mb.squeeze(x=whole, axes=[2]), perm=[0, 2, 1])
        return [mb.exp(x=whole) if arithmetic else whole]

    return build


FIRES = {
    "rank-above-5": [
        Fires(program(exp, change=sixth_axis, x=(1, 2, 1, 2, 3)), 1, ["exp_0 (exp) fp16[1, 2, 1, 2, 3, 1]"])
    ],
    "rank-above-4": [Fires(program(exp, x=(1, 2, 1, 2, 3)), 3, ["x (input) fp16[1, 2, 1, 2, 3]"])],
    "matmul-above-rank-4": [
        Fires(program(square, x=(1, 2, 1, 2, 3)), 1, ["matmul_0 (matmul) fp16[1, 2, 1, 2, 3]"]),
        Fires(program(swapped(5), x=(1, 2, 1, 2, 3)), 1, ["transpose_0 (transpose)"]),
    ],
    "singleton-last-axis": [
        # 24 elements of 2 bytes in lines of 64: 24 · 62 bytes too many.
        Fires(program(exp, x=(1, 2, 12, 1)), 2, ["exp_0 (exp) fp16[1, 2, 12, 1], 1,488 bytes of padding"]),
        Fires(program(softmax, x=(1, 2, 12, 8)), 3, expected="a reduction over the last axis"),
        Fires(program(last_position, x=(1, 6, 1, 5)), 2, expected="single position"),
        Fires(program(token, ids=("int32", (1, 1))), 3, expected="one token a call (ids int32[1, 1])"),
        Fires(program(exp, x=(1, 24, 1, 1)), 2, expected="one position a call (x fp16[1, 24, 1, 1])"),
        # Others' layouts of one token, and the reverse: as many as a block has.
        Fires(program(layer_of_one((1, 1, 24), 2), x=(1, 1, 24)), 5, expected="one position a call (x fp16[1, 1, 24])"),
        Fires(program(layer_of_one((1, 24), 1), x=(1, 24)), 5, expected="one position a call (x fp16[1, 24])"),
        Fires(program(layer_of_one((5, 24), 1), x=(5, 24)), 3),
        Fires(
            program(scores, {"cache": (1, 2, 8, 6)}, ids=("int32", (1, 1)), query=(1, 2, 4, 6), key=(1, 2, 1, 6)),
            2,
            ["matmul_1 (matmul) fp16[1, 2, 4, 1]", "mul_0 (mul)"],
            expected="one score against the one new key",
        ),
        # Five tokens' scores against one key: of what, does not show.
        Fires(program(scores, {"cache": (1, 2, 8, 6)}, ids=("int32", (1, 5)), query=(1, 2, 4, 6), key=(1, 2, 1, 6)), 2),
        # The rows of a product, not of a reduction; a column of 2 × 12 that no single token explains.
        Fires(program(lambda v: [mb.matmul(x=v["x"], y=v["y"])], x=(1, 2, 12, 8), y=(1, 2, 8, 1)), 2),
        Fires(program(lambda v: [mb.exp(x=v["keys"])], ids=("int32", (1, 1)), keys=(1, 2, 12, 1)), 2),
        # Three tokens.
        Fires(program(exp, ids=("int32", (1, 3)), x=(1, 24, 1, 1)), 2),
        # A column that a reduction explains, and one that nothing does.
        Fires(
            program(mixed, x=(1, 2, 12, 8), column=(1, 2, 12, 1)),
            2,
            ["add_0 (add)", "Not counted because expected: 1 (a reduction"],
        ),
    ],
    "axis-above-16384": [
        Fires(program(exp, x=(1, 1, 1, 16_385)), 3, ["x (input) fp16[1, 1, 1, 16385]"]),
        Fires(program(exp, x=(1, 16_385, 8)), 3),
        Fires(program(joined(False, 3, 6_000), x=(1, 1, 1, 2)), 3, expected="only joins"),
        Fires(program(joined(True, 3, 6_000), x=(1, 1, 1, 2)), 4, ["(exp)"]),
    ],
    "axis-above-65536": [
        Fires(program(exp, x=(1, 65_537, 1, 1)), 3, ["x (input) fp16[1, 65537, 1, 1]"]),
        Fires(program(exp, x=(1, 1, 65_537)), 3),
        Fires(program(joined(False, 11, 6_000), x=(1, 1, 1, 2)), 4, ["concat_0"], expected="only joins"),
        Fires(program(joined(True, 11, 6_000), x=(1, 1, 1, 2)), 5, ["concat_0"]),
    ],
    "flexible-shape": [
        Fires(flexible((ct.RangeDim(1, 8, default=2), 4)), 1, ["x (input): [1 … 8, 4]"]),
        Fires(flexible(ct.EnumeratedShapes([(1, 4), (2, 4)], default=(2, 4))), 1, ["x (input): one of [2, 4], [1, 4]"]),
    ],
    "open-dimension": [
        Fires(program(lambda v: [mb.cast(x=mb.non_zero(x=v["x"]), dtype="fp16")], x=(3, 4)), 3, ["fp16[?, 2]"]),
    ],
}

SILENT = {
    "rank-above-5": [program(exp, x=(1, 2, 1, 2, 3)), program(table_of_six_axes, x=(1, 4, 1, 5))],
    "rank-above-4": [program(exp, x=(1, 2, 2, 3)), program(table_of_six_axes, x=(1, 4, 1, 5))],
    "matmul-above-rank-4": [
        program(square, x=(1, 2, 2, 3)),
        program(swapped(4), x=(1, 2, 2, 3)),
        program(exp, x=(1, 2, 1, 2, 3)),
    ],
    "singleton-last-axis": [
        program(exp, x=(1, 2, 12, 2)),
        program(exp, x=(1,)),
        program(lambda v: [mb.add(x=v["x"], y=np.int32(1))], x=("int32", (2, 1))),
    ],
    "axis-above-16384": [
        program(exp, x=(1, 1, 1, 16_384)),
        program(exp, x=(1, 65_536, 1, 1)),
        program(exp, x=(1, 1, 1, 65_537)),
        program(lambda v: [mb.add(x=v["x"], y=np.int32(1))], x=("int32", (1, 1, 1, 16_385))),
    ],
    "axis-above-65536": [program(exp, x=(1, 65_536, 1, 1)), program(exp, x=(1, 1, 1, 65_536))],
    "flexible-shape": [flexible((2, 4))],
    "open-dimension": [program(lambda v: [mb.shape(x=v["x"])], x=(3, 4))],
}


@pytest.mark.parametrize(("rule", "case"), flat(FIRES))
def test_fires_with_the_right_count(tmp_path: Path, rule: str, case: Fires) -> None:
    check_fires(tmp_path, rule, case)


@pytest.mark.parametrize(("rule", "make"), flat(SILENT))
def test_near_miss_is_left_alone(tmp_path: Path, rule: str, make: Make) -> None:
    check_silent(tmp_path, rule, make)
