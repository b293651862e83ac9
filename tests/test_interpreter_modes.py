"""The pessimistic mode, and what a diagnosis finds."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters import mil
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mil_programs import save_program

from ane_layers import console
from ane_layers.interpreter import Finding, MLProgram, pessimism
from ane_layers.interpreter.registry import Ignored, implementations

mb = mil.Builder

Build = Callable[[Any], list[Any]]


def save(folder: Path, shape: tuple[int, ...], build: Build, dtype: type = np.float16) -> Path:
    return save_program(folder / "p.mlpackage", {"x": (shape, dtype)}, build)


def results(path: Path, mode: Any, x: np.ndarray) -> list[np.ndarray]:
    return list(MLProgram(path, mode=mode).predict({"x": x}).values())


def add_one_by_one(numbers: np.ndarray) -> np.float16:
    total = np.float16(0)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in numbers:
            total = np.float16(np.float32(total) + np.float32(number))
    return total


@settings(max_examples=50, deadline=None)
@given(
    x=hnp.arrays(np.float16, (3, 4, 5), elements=st.floats(-3e4, 3e4, width=16)),
    axes=st.sets(st.integers(-3, 2), min_size=1),
)
def test_running_sum_matches_a_loop(x: np.ndarray, axes: set[int]) -> None:
    chosen = sorted({axis % 3 for axis in axes})
    kept = [axis for axis in range(3) if axis not in chosen]
    rows = x.transpose(*kept, *chosen).reshape(int(np.prod([x.shape[axis] for axis in kept])), -1)
    reference = np.array([add_one_by_one(row) for row in rows])
    own = pessimism.total(torch.from_numpy(x).float(), tuple(axes), keep_dims=False)
    np.testing.assert_array_equal(own.numpy().reshape(-1), reference.astype(np.float32))
    assert list(own.shape) == [x.shape[axis] for axis in kept]


def test_every_narrow_operation_takes_the_inputs_of_its_wide_one() -> None:
    table = implementations()
    for name, function in pessimism.NARROW.items():
        wide = {parameter.name for parameter in table[name].parameters if parameter.kind is not Ignored}
        assert wide == set(function.__code__.co_varnames[: function.__code__.co_argcount]), name


def test_accumulation_in_fp16_stagnates_where_fp32_does_not(tmp_path: Path) -> None:
    # From 2048 on the next fp16 number is two away: one more changes nothing.
    def build(values: Any) -> list[Any]:
        sums = [mb.reduce_sum(x=values["x"], axes=[1]), mb.reduce_mean(x=values["x"], axes=[1])]
        return [*sums, mb.matmul(x=values["x"], y=np.ones((4096, 1), np.float16))]

    path = save(tmp_path, (1, 4096), build)
    x = np.ones((1, 4096), np.float16)
    assert [r.item() for r in results(path, "fp16", x)] == [4096, 1, 4096]
    assert [r.item() for r in results(path, "fp16_pessimistic", x)] == [2048, 0.5, 4096]


def test_squares_are_rounded_too(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        (1, 4),
        lambda v: [mb.reduce_l2_norm(x=v["x"], axes=[1]), mb.reduce_sum_square(x=mb.mul(x=v["x"], y=np.float16(0.01)), axes=[1])],
    )  # fmt: skip
    x = np.full((1, 4), 300, np.float16)
    norm, square = results(path, "fp16", x)
    assert norm.item() == 600
    assert square.item() == pytest.approx(36, rel=1e-2)
    norm, square = results(path, "fp16_pessimistic", x)
    assert np.isinf(norm.item())
    assert square.item() == pytest.approx(36, rel=1e-2)


def test_operations_whose_result_is_fp32_stay_wide(tmp_path: Path) -> None:
    path = save(tmp_path, (1, 4), lambda v: [mb.reduce_sum_square(x=v["x"], axes=[1])], np.float32)
    x = np.full((1, 4), 300, np.float32)
    assert results(path, "fp16_pessimistic", x)[0].item() == 4 * 300**2


def attend(x: Any, mask: np.ndarray) -> Any:
    return mb.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=mask)


NORMS: dict[str, Build] = {
    "softmax": lambda v: [mb.softmax(x=v["x"], axis=2)],
    "layer_norm": lambda v: [
        mb.layer_norm(x=v["x"], axes=[2, 3], gamma=np.full((4, 5), 1.5, np.float16), beta=np.full((4, 5), 0.25, np.float16))
    ],
    "instance_norm": lambda v: [mb.instance_norm(x=v["x"], gamma=np.float16([1, 2, 3]), beta=np.float16([0, 1, 2]))],
    "batch_norm": lambda v: [
        mb.batch_norm(x=v["x"], mean=np.float16([0, 1, 2]), variance=np.float16([1, 2, 3]), gamma=np.float16([1, 2, 3]))
    ],
    "l2_norm": lambda v: [mb.l2_norm(x=v["x"], epsilon=np.float16(1e-3))],
    "local_response_norm": lambda v: [mb.local_response_norm(x=v["x"], size=3, alpha=np.float16(1))],
    "reduce_log_sum_exp": lambda v: [mb.reduce_log_sum_exp(x=v["x"], axes=[1, 3])],
    "reduce_log_sum": lambda v: [mb.reduce_log_sum(x=mb.abs(x=v["x"]), axes=[3], keep_dims=True)],
    "reduce_l1_norm": lambda v: [mb.reduce_l1_norm(x=v["x"])],
    "reduce_prod": lambda v: [mb.reduce_prod(x=v["x"], axes=[3])],
    "attention": lambda v: [attend(v["x"], np.zeros((4, 4), np.float16))],
    "masked attention": lambda v: [attend(v["x"], np.tril(np.ones((4, 4), np.bool_)))],
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_pessimistic_results_match_fp32_within_fp16(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, (2, 3, 4, 5), NORMS[name])
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float16)
    exact, narrow = results(path, "fp32", x)[0], results(path, "fp16_pessimistic", x)[0]
    assert narrow.dtype == np.float16
    assert narrow.shape == exact.shape
    np.testing.assert_allclose(narrow, exact, rtol=2e-2, atol=4e-3)


def find(path: Path, mode: Any, *arrays: np.ndarray) -> dict[tuple[str, str], Finding]:
    program = MLProgram(path, mode=mode, diagnose=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in arrays:
            program.predict({"x": x})
    return {(finding.type, finding.kind): finding for finding in program.findings}


@pytest.mark.parametrize("mode", ["fp32", "fp16", "fp16_pessimistic"])
def test_first_overflow_is_reported_and_what_follows_is_not(tmp_path: Path, mode: Any) -> None:
    def build(values: Any) -> list[Any]:
        squared = mb.mul(x=values["x"], y=values["x"], name="squared")
        return [mb.exp(x=mb.sub(x=mb.add(x=squared, y=np.float16(1)), y=squared))]

    path = save(tmp_path, (2, 3), build)
    x = np.array([[1, 300, 2], [3, -400, 4]], np.float16)
    found = find(path, mode, np.ones((2, 3), np.float16), x, x)
    finding = found.pop(("mul", "overflow"))
    assert finding == Finding("main", "squared", "mul", "overflow", 4, 1, (0, 1))
    assert str(finding) == (
        "function 'main', operation 'squared' (mul): 4 elements infinite in fp16, first at [0, 1] in call 1"
    )
    # inf - inf is a new fault; where fp32 goes on with 90001, nothing is.
    assert set(found) == (set() if mode == "fp32" else {("sub", "nan")})


def test_mask_of_infinities_is_passed_on_without_a_finding(tmp_path: Path) -> None:
    mask = np.array([[0, -np.inf, -np.inf], [0, 0, -np.inf]], np.float16)

    def build(values: Any) -> list[Any]:
        masked = mb.add(x=values["x"], y=mask)
        chosen = mb.select(cond=mb.greater(x=values["x"], y=np.float16(5)), a=np.float16(-np.inf), b=values["x"])
        return [mb.softmax(x=masked, axis=-1), mb.reduce_max(x=masked, axes=[0]), mb.maximum(x=chosen, y=values["x"])]

    path = save(tmp_path, (2, 3), build)
    for mode in ("fp32", "fp16", "fp16_pessimistic"):
        assert find(path, mode, np.ones((2, 3), np.float16)) == {}
    # A new infinity beside masked places is told from theirs.
    found = find(path, "fp16", np.array([[1, 2, 3], [65504, 4, 5]], np.float16))
    assert found == {}
    found = find(path, "fp16", np.array([[1, 2, 3], [np.inf, 4, 5]], np.float16))
    assert set(found) == {("softmax", "nan")}  # inf - inf, which the input brought about


def test_overflow_beside_a_mask_is_found(tmp_path: Path) -> None:
    mask = np.array([0, -np.inf, -32768], np.float16)
    path = save(tmp_path, (3,), lambda v: [mb.add(x=v["x"], y=mask)])
    found = find(path, "fp16", np.array([1, 1, -40000], np.float16))
    assert found[("add", "overflow")].index == (2,)
    assert found[("add", "overflow")].count == 1


def test_fully_masked_row_is_reported_as_nan(tmp_path: Path) -> None:
    path = save(tmp_path, (2, 3), lambda v: [mb.softmax(x=v["x"], axis=-1)])
    found = find(path, "fp16", np.array([[-np.inf] * 3, [0, 1, 2]], np.float16))
    assert (found[("softmax", "nan")].count, found[("softmax", "nan")].index) == (3, (0, 0))


def test_subnormal_results_are_counted(tmp_path: Path) -> None:
    path = save(tmp_path, (4,), lambda v: [mb.mul(x=v["x"], y=np.float16(1e-3))])
    x = np.array([0, 1, 1e-2, 1e-5], np.float16)  # 0 stays, 1e-3 is normal, 1e-5 subnormal, 1e-8 vanishes
    finding = find(path, "fp16", x)[("mul", "subnormal")]
    assert (finding.count, finding.index) == (2, (2,))


def test_results_of_nested_blocks_are_looked_at(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        flag = mb.greater(x=mb.reduce_max(x=values["x"], axes=[0]), y=np.float16(0))
        return [mb.cond(pred=flag, _true_fn=lambda: mb.square(x=values["x"]), _false_fn=lambda: mb.sin(x=values["x"]))]

    path = save(tmp_path, (2,), build)
    assert set(find(path, "fp16", np.array([1, 300], np.float16))) == {("square", "overflow")}


def test_findings_are_in_the_order_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call each happened in; printed, infinities and NaN stand in front."""

    def build(values: Any) -> list[Any]:
        small = mb.mul(x=values["x"], y=np.float16(1e-3), name="small")
        early = mb.mul(x=values["x"], y=np.float16(10), name="early")
        late = mb.mul(x=early, y=np.float16(10), name="late")
        return [mb.add(x=small, y=mb.sub(x=late, y=early, name="difference"))]

    path = save(tmp_path, (2,), build)
    program = MLProgram(path, mode="fp16", diagnose=True)
    for value in (1000, 10000, 1e-2):  # late alone overflows; early does, and its difference is none; small vanishes
        program.predict({"x": np.array([value, 1], np.float16)})
    order = [("small", "subnormal", 2), ("early", "overflow", 1), ("late", "overflow", 0), ("difference", "nan", 1)]
    assert [(found.operation, found.kind, found.call) for found in program.findings] == order
    printed = io.StringIO()
    monkeypatch.setattr(console.err, "file", printed)
    console.print_findings(program.findings)
    lines = printed.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["overflow", "overflow", "nan", "subnormal"]
    assert [line.split("'")[3] for line in lines] == ["early", "late", "difference", "small"]


def test_nothing_is_collected_unless_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path, (2,), lambda v: [mb.mul(x=v["x"], y=v["x"])])
    program = MLProgram(path, mode="fp16")
    program.predict({"x": np.array([300, 1], np.float16)})
    assert program.findings == ()
