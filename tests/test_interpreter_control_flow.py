"""Nested blocks, loops over lists, and the order of what they do to states."""

from __future__ import annotations

import shutil
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
from operation_checks import check, evaluate

from ane_layers.interpreter import MLProgram

mb = mil.Builder

# A program is a tree of steps. Values are numbered as they are made; those of a block end with it, but for its result.
Steps = list[tuple[Any, ...]]
STATES = ("s", "t")
SHAPE = (3, 2)


@st.composite
def programs(draw: Any, values: int = 0, depth: int = 2) -> tuple[Steps, int]:
    """Steps, and the number of the value that they result in; `values` of them are there before."""
    steps: Steps = [] if values else [("read", 0), ("read", 1)]
    count = values + len(steps)
    kinds = ["read", "write", "write", "update", "add", "view", *(["if", "if", "repeat"] if depth else [])]
    for _ in range(draw(st.integers(1, 7 if depth == 2 else 3))):
        kind = draw(st.sampled_from(kinds))
        one, other = draw(st.integers(max(0, count - 4), count - 1)), draw(st.integers(0, count - 1))
        if kind == "read":
            steps.append(("read", draw(st.integers(0, 1))))
        elif kind == "write":
            steps.append(("write", draw(st.integers(0, 1)), one))
        elif kind == "update":
            steps.append(("update", one, other, draw(st.integers(0, 2))))
        elif kind == "add":
            steps.append(("add", one, other))
        elif kind == "view":
            steps.append(("view", one))
        elif kind == "if":
            branches = draw(programs(count, depth - 1)), draw(programs(count, depth - 1))
            steps.append(("if", draw(st.integers(0, 2)), *branches))
        else:
            steps.append(("repeat", draw(st.integers(0, 2)), one, draw(programs(count + 1, depth - 1))))
        count += kind != "write"
    return steps, draw(st.integers(max(0, count - 3), count - 1))


def interpret(program: tuple[Steps, int], values: list[np.ndarray], states: list[np.ndarray], x: Any) -> np.ndarray:
    """The reference: every value is a copy of its own."""
    steps, result = program
    values = list(values)
    for kind, *rest in steps:
        if kind == "read":
            values.append(states[rest[0]].copy())
        elif kind == "write":
            states[rest[0]] = values[rest[1]].copy()
        elif kind == "update":
            values.append(values[rest[0]].copy())
            values[-1][rest[2]] = values[rest[1]][0] * np.float32(0.5)
        elif kind == "add":
            values.append((values[rest[0]] + values[rest[1]]) * np.float32(0.5))
        elif kind == "view":
            values.append(values[rest[0]])
        elif kind == "if":
            values.append(interpret(rest[1 if x[rest[0]] > 0 else 2], values, states, x))
        else:
            value = values[rest[1]]
            for _ in range(max(0, x[rest[0]])):
                value = interpret(rest[2], [*values, value], states, x)
            values.append(value)
    return values[result]


def written(program: tuple[Steps, int], values: list[Any], inputs: Any) -> Any:
    steps, result = program
    values = list(values)
    for kind, *rest in steps:
        if kind == "read":
            values.append(mb.read_state(input=inputs[STATES[rest[0]]]))
        elif kind == "write":
            mb.coreml_update_state(state=inputs[STATES[rest[0]]], value=values[rest[1]])
        elif kind == "update":
            row = mb.mul(x=mb.slice_by_index(x=values[rest[1]], begin=[0, 0], end=[1, 2]), y=np.float16(0.5))
            values.append(mb.slice_update(x=values[rest[0]], update=row, begin=[rest[2], 0], end=[rest[2] + 1, 2]))
        elif kind == "add":
            values.append(mb.mul(x=mb.add(x=values[rest[0]], y=values[rest[1]]), y=np.float16(0.5)))
        elif kind == "view":
            values.append(mb.transpose(x=mb.transpose(x=values[rest[0]], perm=[1, 0]), perm=[1, 0]))
        elif kind == "if":
            branches = [lambda branch=branch, known=list(values): written(branch, known, inputs) for branch in rest[1:]]
            pred = mb.greater(x=mb.gather(x=inputs["x"], indices=np.int32(rest[0]), axis=0), y=np.int32(0))
            values.append(mb.cond(pred=pred, _true_fn=branches[0], _false_fn=branches[1]))
        else:
            limit = mb.gather(x=inputs["x"], indices=np.int32(rest[0]), axis=0)

            def body(i: Any, value: Any, inner: Any = rest[2], known: Any = tuple(values)) -> tuple[Any, Any]:
                return mb.add(x=i, y=np.int32(1)), written(inner, [*known, value], inputs)

            _, value = mb.while_loop(
                _cond=lambda i, value, limit=limit: mb.less(x=i, y=limit),
                _body=body,
                loop_vars=(np.int32(0), values[rest[1]]),
            )
            values.append(value)
    return mb.identity(x=values[result])


def check_order(program: tuple[Steps, int], folder: Path) -> None:
    def build(inputs: Any) -> list[Any]:
        # The converter refuses a state or an input that nothing uses.
        for name in STATES:
            mb.read_state(input=inputs[name])
        mb.identity(x=inputs["x"])
        return [written(program, [], inputs)]

    shapes = {name: (SHAPE, np.float16) for name in STATES}
    runner = MLProgram(save_program(folder / "p.mlpackage", {"x": ((3,), np.int32)}, build, shapes))
    state = runner.make_state()
    own = [np.arange(6, dtype=np.float32).reshape(SHAPE), -np.arange(1, 7, dtype=np.float32).reshape(SHAPE)]
    for name, array in zip(STATES, own, strict=True):
        state.write_state(name, array)
    for x in ([1, 0, 2], [0, 3, 0], [2, 1, 1]):
        output = next(iter(runner.predict({"x": np.array(x, np.int32)}, state).values()))
        np.testing.assert_array_equal(output, interpret(program, [], own, x))
        for name, array in zip(STATES, own, strict=True):
            np.testing.assert_array_equal(state.read_state(name), array)


@settings(max_examples=20, deadline=None)
@given(program=programs())
def test_states_in_nested_blocks_match_copies(program: tuple[Steps, int], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("order")
    check_order(program, folder)
    shutil.rmtree(folder)


READ, UPDATE = ("read", 0), ("update", 1, 1, 1)
RULES: dict[str, tuple[Steps, int]] = {
    "a branch gives out the state it read, which is then changed": (
        [READ, ("if", 0, ([], 0), ([("add", 0, 0)], 1)), ("read", 0), ("update", 2, 2, 1), ("write", 0, 3), ("add", 1, 3)], 4,
    ),
    "a branch that is not taken leaves the old state to its readers": (
        [READ, ("if", 1, ([("write", 0, 0)], 0), ([], 0)), ("read", 0), ("update", 2, 2, 1), ("write", 0, 3), ("add", 0, 3)], 4,
    ),
    "what was read before a branch that writes is updated": (
        [READ, ("if", 0, ([("read", 1), ("write", 0, 1)], 1), ([], 0)), ("update", 0, 0, 1), ("write", 0, 2)], 2,
    ),
    "what the state holds already is written after a branch": (
        [READ, ("if", 1, ([("read", 1), ("write", 0, 1)], 1), ([], 0)), ("write", 0, 0), ("read", 0), ("update", 2, 2, 1),
         ("write", 0, 3), ("add", 0, 3)], 4,
    ),
    "a branch reads the state itself": (
        [READ, ("if", 0, ([("read", 0)], 1), ([("read", 1)], 1)), ("update", 0, 0, 1), ("write", 0, 2), ("add", 1, 2)], 3,
    ),
    "a loop in a loop names its values alike": (
        [READ, ("repeat", 2, 0, ([("repeat", 0, 0, ([("add", 0, 0), ("add", 2, 3)], 4)), ("add", 1, 2)], 3))], 1,
    ),
    "a loop reads what it wrote": (
        [READ, ("repeat", 2, 0, ([("read", 0), ("update", 2, 2, 1), ("write", 0, 3), ("add", 2, 3)], 4)), ("read", 0), ("add", 1, 2)], 3,
    ),
    "an update stands before a branch that reads the state": (
        [READ, ("update", 0, 0, 1), ("if", 0, ([("read", 0)], 2), ([], 0)), ("write", 0, 1), ("add", 1, 2)], 3,
    ),
    "one value becomes a state and is used in a branch later": (
        [READ, ("add", 0, 0), ("write", 0, 1), ("read", 0), ("update", 2, 2, 1), ("write", 0, 3),
         ("if", 0, ([("add", 1, 3)], 4), ([], 1))], 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_nested_blocks_match_copies(rule: str, tmp_path: Path) -> None:
    check_order(RULES[rule], tmp_path)


def test_failure_in_a_block_names_the_way_to_it_and_undoes_its_writes(tmp_path: Path) -> None:
    def build(inputs: Any) -> list[Any]:
        def body(i: Any) -> Any:
            mb.coreml_update_state(state=inputs["s"], value=mb.cast(x=mb.fill(shape=[2], value=7.0), dtype="fp16"))
            row = mb.gather(x=inputs["x"], indices=i, axis=0, name="row")
            return mb.add(x=row, y=np.int32(1))

        mb.read_state(input=inputs["s"])
        start = (np.int32(0),)
        return [mb.while_loop(_cond=lambda i: mb.less(x=i, y=np.int32(9)), _body=body, loop_vars=start, name="loop")]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((4,), np.int32)}, build, {"s": ((2,), np.float16)})
    program = MLProgram(path)
    state = program.make_state()
    with pytest.raises(ValueError, match=r"^operation 'loop\w*' \(while_loop\): operation 'row\w*' \(gather\): index"):
        program.predict({"x": np.array([0, 2, 3, 4], np.int32) + 1}, state)
    np.testing.assert_array_equal(state.read_state("s"), [0, 0])


def test_fp16_mode_rounds_in_every_round_of_a_loop(tmp_path: Path) -> None:
    def build(inputs: Any) -> list[Any]:
        def body(i: Any, value: Any) -> tuple[Any, Any]:
            return mb.add(x=i, y=np.int32(1)), mb.add(x=mb.mul(x=value, y=value), y=np.float16(0.1))

        start = (np.int32(0), inputs["x"])
        return [mb.while_loop(_cond=lambda i, _: mb.less(x=i, y=np.int32(5)), _body=body, loop_vars=start)[1]]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((4,), np.float16)}, build)
    x = value = np.array([0.3, 1.1, -0.99, 20], np.float16)
    with np.errstate(over="ignore"):
        for _ in range(5):
            value = (value.astype(np.float32) ** 2).astype(np.float16) + np.float16(0.1)
    assert np.isinf(value[-1])
    np.testing.assert_array_equal(next(iter(MLProgram(path, mode="fp16").predict({"x": x}).values())), value)


def test_cond_of_a_constant_matches_coremltools(tmp_path: Path) -> None:
    for flag in (True, False):
        folder = tmp_path / str(flag)

        def make(x: Any, flag: bool = flag) -> Any:
            return mb.cond(pred=flag, _true_fn=lambda: mb.mul(x=x, y=2.0), _false_fn=lambda: mb.add(x=x, y=1.0))

        x = np.float32([1, 5])
        check(folder, make, x, reference=evaluate(make, x))


@settings(max_examples=8, deadline=None)
@given(data=st.data(), rows=st.integers(1, 5))
def test_loop_over_lists_matches_numpy(data: st.DataObject, rows: int, tmp_path_factory: Any) -> None:
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    places = data.draw(st.lists(st.integers(0, rows + 2), min_size=2, max_size=2))
    x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)

    def make(x: Any, more: Any) -> list[Any]:
        started = mb.make_list(init_length=rows, dynamic_length=True, elem_shape=(3,), dtype="fp32")

        def body(i: Any, values: Any) -> tuple[Any, Any]:
            row = mb.mul(x=mb.gather(x=x, indices=i, axis=0), y=2.0)
            return mb.add(x=i, y=1), mb.list_write(ls=values, index=i, value=row)

        _, doubled = mb.while_loop(_cond=lambda i, _: mb.less(x=i, y=rows), _body=body, loop_vars=(0, started))
        grown = mb.list_scatter(ls=doubled, indices=places, value=more)
        return [
            mb.list_gather(ls=doubled, indices=order),
            mb.list_length(ls=grown),
            mb.list_read(ls=grown, index=places[1]),
            mb.list_gather(ls=grown, indices=list(range(rows))),
            mb.list_length(ls=doubled),
        ]

    more = np.float32([[1, 2, 3], [4, 5, 6]])
    scattered = {row: 2 * x[row] for row in range(rows)} | dict(zip(places, more, strict=True))
    reference = [
        2 * x[order], max(rows, *(place + 1 for place in places)), more[1], np.stack([scattered[row] for row in range(rows)]), rows,
    ]  # fmt: skip
    check(tmp_path_factory.mktemp("l"), make, x, more, reference=reference)


@pytest.mark.parametrize(
    ("index", "grows", "message"),
    [(2, False, r"\(list_write\): index is 2 in a list of 2"), (-1, True, r"\(list_write\): index is -1"),
     (0, True, r"\(list_read\): element 1 is read before anything is written to it")],
)  # fmt: skip
def test_list_refuses_what_it_does_not_hold(index: int, grows: bool, message: str, tmp_path: Path) -> None:
    def make(x: Any, index: Any) -> Any:
        values = mb.make_list(init_length=2, dynamic_length=grows, elem_shape=(2,), dtype="fp32")
        return mb.list_read(ls=mb.list_write(ls=values, index=mb.squeeze(x=index, axes=[0]), value=x), index=1)

    with pytest.raises(ValueError, match=message):
        check(tmp_path, make, np.float32([1, 2]), np.array([index], np.int32), reference=0)


@torch.jit.script
def branch(y: torch.Tensor) -> torch.Tensor:
    return y * 2 if y.sum() > 0 else y - 1


class Recurrent(torch.nn.Module):
    """A GRU, which coremltools writes as a loop, and a branch that tracing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return branch(self.gru(x)[0])


def test_converted_module_matches_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Recurrent().eval()
    x = torch.randn(5, 2, 3)
    with quiet():
        model = ct.convert(
            torch.jit.trace(module, x),
            inputs=[ct.TensorType("x", tuple(x.shape))],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )
        model.save(str(tmp_path / "g.mlpackage"))
    program = MLProgram(tmp_path / "g.mlpackage")
    assert {"cond", "while_loop"} <= {operation.type for operation in program.function.block.walk()}
    for sign in (1, -1):
        own = next(iter(program.predict({"x": (sign * x).numpy()}).values()))
        np.testing.assert_allclose(own, module(sign * x).detach().numpy(), rtol=1e-5, atol=1e-6)
