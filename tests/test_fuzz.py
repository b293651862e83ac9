"""Damaged packages: an error in bounded time and memory, never a crash, never the right to a wrong answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters import mil
from coremltools.converters.mil.mil import types
from fuzzing import KINDS, outcome
from mil_programs import save_program

mb = mil.Builder

# Damage that leaves a sound program with other numbers in it: a flipped bit may be one of a constant.
OTHER_PROGRAMS = {"flipped bits", "renamed use", "huge number", "shuffled", "unknown operation", "huge shape"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of everything: plain and compressed weights, a state, a branch, shapes that are constants."""
    rng = np.random.default_rng(0)

    def build(values: Any) -> list[Any]:
        plain = rng.standard_normal((16, 16)).astype(np.float16)
        indices = rng.integers(0, 8, (16, 16)).astype(types.nptype_from_builtin(types.uint3))
        table = rng.standard_normal((4, 1, 8, 1)).astype(np.float16)
        quantized = rng.integers(-8, 8, (16, 16)).astype(types.nptype_from_builtin(types.int4))
        scale = rng.uniform(0.1, 1, (16, 2)).astype(np.float16)
        x = mb.matmul(x=values["x"], y=mb.add(x=plain, y=mb.constexpr_lut_to_dense(indices=indices, lut=table)))
        x = mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-3))
        x = mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=quantized, scale=scale))
        stored = mb.slice_update(x=mb.read_state(input=values["cache"]), update=x, begin=[0, 0], end=[2, 16])
        stored = mb.coreml_update_state(state=values["cache"], value=stored)
        filled = mb.tile(x=mb.fill(shape=[1, 16], value=np.float16(0.25)), reps=[2, 1])
        flag = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=np.float16(0))
        branch = mb.cond(pred=flag, _true_fn=lambda: mb.sin(x=x), _false_fn=lambda: mb.cos(x=x))
        picture = mb.reshape(x=branch, shape=[1, 2, 4, 4])
        kernel = rng.standard_normal((3, 2, 3, 3)).astype(np.float16)
        picture = mb.conv(
            x=picture, weight=kernel, strides=[1, 1], pad_type="custom", pad=[1, 1, 1, 1], dilations=[1, 1]
        )
        return [mb.add(x=branch, y=filled), mb.softmax(x=stored, axis=-1), mb.reduce_max(x=picture, axes=[2, 3])]

    return save_program(
        tmp_path_factory.mktemp("fuzz") / "p.mlpackage",
        {"x": ((2, 16), np.float16)},
        build,
        {"cache": ((4, 16), np.float16)},
    )


COUNT = 40


@pytest.fixture(scope="module")
def lines(package: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of `COUNT` damaged copies of each kind."""
    script = Path(__file__).with_name("fuzzing.py")
    result = subprocess.run(
        [sys.executable, script, package, tmp_path_factory.mktemp("cases"), str(COUNT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    where = result.stdout.splitlines()[-1][:300] if result.stdout else ""
    assert result.returncode == 0, f"exit status {result.returncode} after {where}: {result.stderr[-800:]}"
    return [line for line in map(json.loads, result.stdout.splitlines()) if "seconds" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_gives_an_error_or_a_program_of_its_own(package: Path, lines: list[dict[str, Any]], kind: str) -> None:
    own = [line for line in lines if line["kind"] == kind]
    assert len(own) == COUNT
    for line in own:
        assert line.get("error", "ValueError") == "ValueError", line
        assert "\n" not in line.get("message", ""), line
        assert line["seconds"] < 20, line
    answers = [line["result"] for line in own if "result" in line]
    assert len(answers) < COUNT, "nothing was damaged"
    if kind not in OTHER_PROGRAMS:
        sound = outcome(package)["result"]
        assert all(answer == sound for answer in answers)
