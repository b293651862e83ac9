"""The lint's rules about numbers: a minimal program that each finds, and its nearest neighbour that it leaves alone."""

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


def one(operation: Any) -> Any:
    """A build of a single operation on `x`."""
    return lambda values: [operation(values["x"])]


def norm(exponent: float) -> Any:
    def build(values: Any) -> list[Any]:
        x = values["x"]
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        return [mb.mul(x=x, y=mb.pow(x=mb.add(x=mean, y=HALF(1e-5)), y=HALF(exponent)))]

    return build


def sliced(begin: list[int], **masks: Any) -> Any:
    return one(lambda x: mb.slice_by_index(x=x, begin=begin, end=[1, 2, 8, 4], **masks))


def masked(value: float, shape: tuple[int, ...] = (1, 1, 8, 4)) -> np.ndarray:
    mask = np.zeros(shape, HALF)
    mask[..., -1] = value
    return mask


def bordered(values: Any) -> list[Any]:
    """fp32 outside, fp16 inside."""
    return [mb.cast(x=mb.exp(x=mb.cast(x=values["x"], dtype="fp16")), dtype="fp32")]


def turned(*dtypes: str, before: Any = None, operation: Any = mb.cos) -> Any:
    """The cosine of positions times frequencies: positions in the first type, angles in the last."""

    def build(values: Any) -> list[Any]:
        positions = mb.cast(x=before(values["positions"]) if before else values["positions"], dtype=dtypes[0])
        frequencies = np.array([[1.0, 0.1, 0.01]], np.float32 if dtypes[0] == "fp32" else HALF)
        angles = mb.matmul(x=mb.expand_dims(x=positions, axes=[1]), y=frequencies)
        for dtype in dtypes[1:]:
            angles = mb.cast(x=angles, dtype=dtype)
        return [mb.cast(x=operation(x=mb.concat(values=[angles, angles], axis=1)), dtype="fp16")]

    return build


def looked_up(values: Any) -> list[Any]:
    rows = mb.gather(x=np.linspace(0, 3, 24).reshape(8, 3).astype(HALF), indices=values["positions"], axis=0)
    return [mb.cos(x=rows)]


POSITIONS = ("int32", (4,))
FP32 = ("fp32", X)
INFINITY = -np.inf

FIRES = {
    "fp32-operation": [Fires(program(one(lambda x: mb.exp(x=x)), x=FP32), 1, ["exp_0 (exp) fp32[1, 2, 8, 4]"])],
    "fp32-constant": [
        Fires(program(one(lambda x: mb.add(x=x, y=np.float32(2))), x=FP32), 1, ["add_0 (add) takes fp32[]"]),
        Fires(
            program(one(lambda x: mb.cast(x=mb.add(x=mb.cast(x=x, dtype="fp32"), y=np.float32(2)), dtype="fp16")), x=X),
            1,
        ),
    ],
    "infinite-mask": [
        Fires(
            program(one(lambda x: mb.add(x=x, y=masked(INFINITY))), x=X), 1, ["add_0 (add) fp16[1, 2, 8, 4] takes -inf"]
        ),
        Fires(program(one(lambda x: mb.add(x=x, y=masked(-65504))), x=X), 1, ["takes -65504"]),
        Fires(program(one(lambda x: mb.select(cond=mb.greater(x=x, y=HALF(0)), a=x, b=HALF(INFINITY))), x=X), 1),
        Fires(program(one(lambda x: mb.add(x=x, y=mb.fill(shape=[8, 4], value=HALF(INFINITY)))), x=X), 1, ["fill_0"]),
        Fires(program(one(lambda x: mb.mul(x=x, y=HALF(-65504))), x=X), 1),
        # Large enough to lie in the weight file.
        Fires(program(one(lambda x: mb.add(x=x, y=masked(INFINITY, (1, 1, 64, 64)))), x=(1, 2, 64, 64)), 1),
    ],
    "pow-in-norm": [
        Fires(program(one(lambda x: mb.pow(x=x, y=HALF(2))), x=X), 1, ["pow_0 (pow) fp16[1, 2, 8, 4], exponent 2"]),
        Fires(program(norm(-0.5), x=X), 1, ["exponent -0.5"]),
        Fires(program(norm(0.5), x=X), 1, ["exponent 0.5"]),
    ],
    "angles-in-fp16": [
        Fires(program(turned("fp16"), positions=POSITIONS), 1, ["cos_0 (cos) fp16[4, 6] of positions int32[4]"]),
        Fires(program(turned("fp16", operation=mb.sin), positions=POSITIONS), 1, ["sin_0 (sin)"]),
        Fires(program(turned("fp16", before=lambda p: mb.add(x=p, y=np.int32(1))), positions=POSITIONS), 1, ["add_0"]),
        # The angle is rounded last, or the position first.
        Fires(program(turned("fp32", "fp16"), positions=POSITIONS), 1),
        Fires(program(turned("fp16", "fp32"), positions=POSITIONS), 1),
    ],
    "offset-slice-on-last-axis": [
        Fires(program(sliced([0, 0, 0, 2]), x=X), 1, ["slice_by_index_0 (slice_by_index) of fp16[1, 2, 8, 4] from 2"]),
        Fires(program(sliced([0, 0, 0, -1], end_mask=[True] * 4), x=X), 1, ["from -1"]),
        Fires(program(one(lambda x: mb.slice_by_size(x=x, begin=[0, 0, 0, 1], size=[1, 2, 8, 3])), x=X), 1, ["from 1"]),
    ],
}

SILENT = {
    "fp32-operation": [program(bordered, x=FP32), program(one(lambda x: mb.exp(x=x)), x=X)],
    "fp32-constant": [
        program(one(lambda x: mb.add(x=x, y=HALF(2))), x=X),
        # Settings, though of fp32: what coremltools writes beside fp16 values.
        program(one(lambda x: mb.rsqrt(x=x, epsilon=np.float32(1e-12))), x=FP32),
        program(one(lambda x: mb.inverse(x=x, epsilon=np.float32(1e-4))), x=FP32),
        program(one(lambda x: mb.upsample_nearest_neighbor(x=x, scale_factor_height=np.float32(2.0))), x=X),
        program(bordered, x=FP32),
    ],
    "infinite-mask": [
        program(one(lambda x: mb.add(x=x, y=masked(-4e4))), x=X),
        program(one(lambda x: mb.select(cond=mb.greater(x=x, y=HALF(0)), a=x, b=HALF(-65504))), x=X),
        program(one(lambda x: mb.pad(x=x, pad=[1, 1], mode="constant", constant_val=HALF(INFINITY))), x=X),
        program(lambda v: [mb.add(x=v["x"], y=v["mask"])], x=X, mask=X),
    ],
    "pow-in-norm": [
        program(one(lambda x: mb.pow(x=x, y=HALF(3))), x=X),
        program(one(lambda x: mb.pow(x=x, y=HALF(0.5))), x=X),
        program(one(lambda x: mb.mul(x=x, y=x)), x=X),
    ],
    "angles-in-fp16": [
        program(turned("fp32"), positions=POSITIONS),
        program(looked_up, positions=POSITIONS),
        program(one(lambda x: mb.cos(x=x)), x=X),
        program(lambda v: [mb.mul(x=v["x"], y=mb.cos(x=np.ones(X, HALF)))], x=X),
    ],
    "offset-slice-on-last-axis": [
        program(sliced([0, 1, 4, 0]), x=X),
        program(sliced([0, 0, 0, 2], begin_mask=[False, False, False, True]), x=X),
        program(one(lambda x: mb.slice_by_index(x=x, begin=[2], end=[4])), x=("int32", (5,))),
    ],
}


@pytest.mark.parametrize(("rule", "case"), flat(FIRES))
def test_fires_with_the_right_count(tmp_path: Path, rule: str, case: Fires) -> None:
    check_fires(tmp_path, rule, case)


@pytest.mark.parametrize(("rule", "make"), flat(SILENT))
def test_near_miss_is_left_alone(tmp_path: Path, rule: str, make: Make) -> None:
    check_silent(tmp_path, rule, make)
