"""States after coremltools' own passes, and between programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from mil_programs import quiet, save_program
from test_interpreter import INPUT, RULES, interpret, written

from ane_layers.interpreter import MLProgram
from ane_layers.program import Package

mb = mil.Builder


class Accumulating(torch.nn.Module):
    """Updates a state in place and uses it before, between and after: what `prefer_state_in_downstream` merges."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 4, dtype=torch.float16))
        self.register_buffer("other", torch.zeros(2, 4, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.total * 3
        self.total.add_(x)
        between = self.total * 2
        self.other.mul_(0.5).add_(self.total)
        self.total[:, 0:2] = x[:, 2:4]
        return before, between, self.total + self.other, self.other - before


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("merged") / "m.mlpackage"
    with quiet():
        ct.convert(
            torch.jit.trace(Accumulating().eval(), torch.zeros(2, 4, dtype=torch.float16)),
            inputs=[ct.TensorType("x", (2, 4), np.float16)],
            outputs=[ct.TensorType(name, dtype=np.float16) for name in ("before", "between", "after", "difference")],
            states=[ct.StateType(ct.TensorType(shape=(2, 4), dtype=np.float16), name=n) for n in ("total", "other")],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        ).save(str(path))
    return path


@pytest.mark.parametrize("mode", ["fp32", "fp16", "fp16_pessimistic"])
def test_merged_reads_and_writes_match_torch(merged: Path, mode: Any) -> None:
    types = [operation.type for operation in Package.open(merged).function().block.walk()]
    assert types.count("write_state") >= 3
    module, program = Accumulating().eval(), MLProgram(merged, mode=mode)
    state = program.make_state()
    rng = np.random.default_rng(0)
    for _ in range(3):
        # Multiples of 1/8 below 64: every sum and product here is exact in fp16.
        x = (rng.integers(-16, 16, (2, 4)) / 8).astype(np.float16)
        reference = module(torch.from_numpy(x).clone())
        own = program.predict({"x": x}, state)
        for name, expected in zip(("before", "between", "after", "difference"), reference, strict=True):
            np.testing.assert_array_equal(own[name], expected.numpy(), err_msg=name)
        np.testing.assert_array_equal(state.read_state("total"), module.total.numpy())
        np.testing.assert_array_equal(state.read_state("other"), module.other.numpy())


@pytest.mark.parametrize("rule", RULES)
def test_order_survives_coremltools_passes(rule: str, tmp_path: Path) -> None:
    steps = RULES[rule]
    shapes = {name: ((3, 2), np.float16) for name in ("s", "t")}
    inputs = {"x": ((3, 2), np.float16)}
    # Not canonicalize_inplace_pattern: that one moves a write in front of a read which came before it.
    passes = ct.PassPipeline(["common::prefer_state_in_downstream"], "states")
    path = save_program(tmp_path / "p.mlpackage", inputs, lambda v: written(steps, v), shapes, passes=passes)
    program = MLProgram(path)
    state = program.make_state()
    held = {value.name for value in program.function.states}
    own = [np.arange(6, dtype=np.float32).reshape(3, 2), -np.arange(1, 7, dtype=np.float32).reshape(3, 2)]
    for name, value in zip("st", own, strict=True):
        if name in held:
            state.write_state(name, value)
    data = {value.name: INPUT.astype(np.float32) for value in program.function.inputs}
    for _ in range(2):
        outputs = list(program.predict(data, state).values())
        for output, reference in zip(outputs, interpret(steps, own), strict=True):
            np.testing.assert_array_equal(output, reference)
        for name, value in zip("st", own, strict=True):
            if name in held:
                np.testing.assert_array_equal(state.read_state(name), value)


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two functions over one state: one adds to it, one doubles it."""
    folder = tmp_path_factory.mktemp("functions")

    def program(name: str, change: Any) -> Path:
        def build(values: Any) -> list[Any]:
            new = mb.coreml_update_state(state=values["s"], value=change(mb.read_state(input=values["s"]), values["x"]))
            return [mb.add(x=new, y=values["x"])]

        states = {"s": ((3,), np.float16)}
        return save_program(folder / f"{name}.mlpackage", {"x": ((3,), np.float16)}, build, states)

    descriptor = ct.utils.MultiFunctionDescriptor()
    descriptor.add_function(str(program("a", lambda s, x: mb.add(x=s, y=x))), "main", "add")
    descriptor.add_function(str(program("b", lambda s, x: mb.mul(x=s, y=np.float16(2)))), "main", "double")
    descriptor.default_function_name = "add"
    with quiet():
        ct.utils.save_multifunction(descriptor, str(folder / "both.mlpackage"))
    return folder / "both.mlpackage"


def test_interleaved_states_of_several_functions_never_mix(functions: Path) -> None:
    programs = {name: MLProgram(functions, name) for name in ("add", "double")}
    states = [programs["add"].make_state(), programs["double"].make_state(), programs["add"].make_state()]
    own = [np.zeros(3, np.float32) for _ in states]
    rng = np.random.default_rng(1)
    for _ in range(30):
        number, name = int(rng.integers(3)), ("add", "double")[int(rng.integers(2))]
        x = rng.integers(-4, 5, 3).astype(np.float32)
        result = next(iter(programs[name].predict({"x": x}, states[number]).values()))
        own[number] = own[number] + x if name == "add" else own[number] * 2
        np.testing.assert_array_equal(result, own[number] + x)
        for state, value in zip(states, own, strict=True):
            np.testing.assert_array_equal(state.read_state("s"), value)


def test_state_written_by_a_caller_is_seen_once_and_by_one(functions: Path) -> None:
    add = MLProgram(functions, "add")
    one, other = add.make_state(), add.make_state()
    value = np.ones(3, np.float32)
    one.write_state("s", value)
    other.write_state("s", value)
    add.predict({"x": value}, one)
    np.testing.assert_array_equal(one.read_state("s"), 2 * value)
    np.testing.assert_array_equal(other.read_state("s"), value)
    np.testing.assert_array_equal(value, np.ones(3))


def test_state_too_large_for_the_machine_is_refused(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        return [mb.reduce_max(x=mb.read_state(input=values["s"]), axes=[0])]

    path = save_program(tmp_path / "h.mlpackage", {}, build, {"s": ((10**12,), np.float16)})
    with pytest.raises(
        ValueError, match=r"^state 's': a value of type fp16\[1000000000000\] takes 4000000000000 bytes"
    ):
        MLProgram(path)
