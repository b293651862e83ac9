"""Running saved packages: the interface, states, rounding, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters import mil
from coremltools.proto import Model_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from mil_programs import quiet, save_program

from ane_layers.interpreter import MLProgram
from ane_layers.program import Package

mb = mil.Builder

T, D = 8, 4


def predict(program: MLProgram, state: Any = None, **data: Any) -> np.ndarray:
    return next(iter(program.predict(data, state).values()))


def save_cache(path: Path, block: int) -> Path:
    """Writes `block` rows at `position` into two caches, and gives their product with what the first held before."""

    def build(values: Any) -> list[Any]:
        end = mb.add(x=values["position"], y=np.int32([block]))
        bounds = {
            "begin": mb.concat(values=[values["position"], np.int32([0])], axis=0),
            "end": mb.concat(values=[end, np.int32([D])], axis=0),
        }
        shifted = {"begin": mb.concat(values=[mb.add(x=values["position"], y=np.int32([1])), np.int32([0])], axis=0)}
        shifted["end"] = mb.concat(values=[mb.add(x=end, y=np.int32([1])), np.int32([D])], axis=0)
        keys = mb.slice_update(x=mb.read_state(input=values["keys"]), update=values["x"], **bounds)
        keys = mb.coreml_update_state(state=values["keys"], value=keys)
        # One slot further: at the last position this one leaves the cache when the other is written already.
        stored = mb.slice_update(x=mb.read_state(input=values["values"]), update=values["x"], **shifted)
        stored = mb.coreml_update_state(state=values["values"], value=stored)
        return [mb.matmul(x=keys, y=stored, transpose_y=True)]

    inputs = {"x": ((block, D), np.float16), "position": ((1,), np.int32)}
    states = {name: ((T, D), np.float16) for name in ("keys", "values")}
    return save_program(path, inputs, build, states)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    descriptor = ct.utils.MultiFunctionDescriptor()
    descriptor.add_function(str(save_cache(folder / "decode.mlpackage", 1)), "main", "decode")
    descriptor.add_function(str(save_cache(folder / "prefill.mlpackage", 3)), "main", "prefill")
    descriptor.default_function_name = "decode"
    with quiet():
        ct.utils.save_multifunction(descriptor, str(folder / "both.mlpackage"))
    return folder / "both.mlpackage"


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float16)


def at(position: int) -> np.ndarray:
    return np.array([position], np.int32)


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_functions_share_a_state(cache: Path, mode: Any) -> None:
    prefill, decode = MLProgram(cache, "prefill", mode=mode), MLProgram(cache, mode=mode)
    x = rows(4)
    state = prefill.make_state()
    np.testing.assert_array_equal(state.read_state("keys"), np.zeros((T, D)))
    predict(prefill, state, x=x[:3], position=at(1))
    product = predict(decode, state, x=x[3:], position=at(4))
    keys, values = np.zeros((2, T, D), np.float32)
    keys[1:5] = values[2:6] = x
    np.testing.assert_array_equal(state.read_state("keys"), keys)
    np.testing.assert_array_equal(state.read_state("values"), values)
    np.testing.assert_allclose(product, keys @ values.T, rtol=1e-3 if mode == "fp16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_failed_call_leaves_all_states_untouched(cache: Path, mode: Any) -> None:
    decode = MLProgram(cache, "decode", mode=mode)
    state = decode.make_state()
    predict(decode, state, x=rows(1), position=at(2))
    before = {name: state.read_state(name) for name in ("keys", "values")}
    for position in (T - 1, T, -1, 10**6):
        with pytest.raises(ValueError, match=r"^operation 'slice_update_\d+' \(slice_update\): (begin|end|update) "):
            predict(decode, state, x=rows(1, 1), position=at(position))
        for name, array in before.items():
            np.testing.assert_array_equal(state.read_state(name), array)
    predict(decode, state, x=rows(1, 1), position=at(3))


def test_state_interface(cache: Path) -> None:
    decode = MLProgram(cache, "decode", mode="fp16")
    state = decode.make_state()
    value = np.random.default_rng(0).standard_normal((T, D)).astype(np.float16)
    state.write_state("keys", value)
    kept = value.copy()
    value[:] = 0
    np.testing.assert_array_equal(state.read_state("keys"), kept)
    assert state.read_state("keys").dtype == np.float16
    state.read_state("keys")[:] = 0
    np.testing.assert_array_equal(state.read_state("keys"), kept)
    with pytest.raises(ValueError, match="no state 'cache'; there is keys, values"):
        state.read_state("cache")
    with pytest.raises(ValueError, match=r"state 'keys' has shape \[4, 8\], expected \[8, 4\]"):
        state.write_state("keys", kept.T)
    with pytest.raises(TypeError, match="state 'keys' has dtype float32, expected float16"):
        state.write_state("keys", kept.astype(np.float32))


def test_state_of_fp32_mode_is_not_rounded(cache: Path) -> None:
    decode = MLProgram(cache, "decode")
    state = decode.make_state()
    x = np.random.default_rng(0).standard_normal((1, D)).astype(np.float32)
    predict(decode, state, x=x, position=at(0))
    np.testing.assert_array_equal(state.read_state("keys")[0], x[0])


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "missing": ({"x": rows(1)}, ValueError, r"input 'position' is missing, a int32\[1\]"),
    "unknown": ({"x": rows(1), "position": at(0), "pos": at(0)}, ValueError, "input 'pos' is unknown; the inputs are x, position"),
    "shape": ({"x": rows(2), "position": at(0)}, ValueError, r"input 'x' has shape \[2, 4\], expected \[1, 4\]"),
    "rank": ({"x": rows(1), "position": np.array(0, np.int32)}, ValueError, r"input 'position' has shape \[\], expected \[1\]"),
    "dtype": ({"x": rows(1), "position": np.array([0])}, TypeError, "input 'position' has dtype int64, expected int32"),
    "no array": ({"x": [[0.0] * D], "position": at(0)}, TypeError, "input 'x' is a list, expected a numpy array"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused_in_one_line(cache: Path, case: str) -> None:
    data, kind, message = BAD_CALLS[case]
    decode = MLProgram(cache, "decode")
    with pytest.raises(kind, match=message) as error:
        decode.predict(data, decode.make_state())
    assert "\n" not in str(error.value)


def test_missing_and_foreign_states_are_refused(cache: Path, tmp_path: Path) -> None:
    decode = MLProgram(cache, "decode")
    data = {"x": rows(1), "position": at(0)}
    with pytest.raises(ValueError, match="state is missing; function 'decode' has keys, values"):
        decode.predict(data)
    with pytest.raises(ValueError, match="state is of mode 'fp16', the program of mode 'fp32'"):
        decode.predict(data, MLProgram(cache, "decode", mode="fp16").make_state())
    with pytest.raises(ValueError, match=r"no function 'main'; it has decode, prefill"):
        MLProgram(cache, "main")
    with pytest.raises(ValueError, match="mode is 'bf16'"):
        MLProgram(cache, "decode", mode="bf16")  # type: ignore[arg-type]

    def build(values: Any) -> list[Any]:
        read = mb.read_state(input=values["keys"])
        mb.coreml_update_state(state=values["keys"], value=read)
        return [mb.add(x=read, y=values["x"])]

    other = save_program(
        tmp_path / "o.mlpackage", {"x": ((1, 1), np.float16)}, build, {"keys": ((T, D + 1), np.float16)}
    )
    state = MLProgram(other).make_state()
    with pytest.raises(ValueError, match="no state 'values'; there is keys"):
        decode.predict(data, state)
    state._cells["values"] = decode.make_state().cell("values")
    with pytest.raises(ValueError, match=r"state 'keys' is fp16\[8, 5\], function 'decode' has fp16\[8, 4\]"):
        decode.predict(data, state)


def test_all_unsupported_operations_are_named_at_load(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        inside = {"_true_fn": lambda: mb.cos(x=values["x"]), "_false_fn": lambda: mb.exp(x=values["x"])}
        return [mb.tan(x=values["x"]), mb.cond(pred=mb.greater(x=mb.reduce_sum(x=values["x"]), y=0.0), **inside)]

    path = save_program(tmp_path / "u.mlpackage", {"x": ((2, 3), np.float32)}, build)
    file = path / "Data/com.apple.CoreML/model.mlmodel"
    model = Model_pb2.Model()
    model.ParseFromString(file.read_bytes())
    (block,) = model.mlProgram.functions["main"].block_specializations.values()
    for operation in block.operations:
        operation.type = {"tan": "telepathy"}.get(operation.type, operation.type)
        for nested in operation.blocks:
            for inner in nested.operations:
                inner.type = {"cos": "conv_quantized"}.get(inner.type, inner.type)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(
        ValueError, match=r"function 'main' uses operations that are not supported: conv_quantized, telepathy$"
    ):
        MLProgram(path)


@st.composite
def state_programs(draw: Any) -> list[tuple[str, ...]]:
    """Reads, views, updates, writes and uses of two states in any order; values are numbered as they are made."""
    steps: list[tuple[Any, ...]] = [("read", 0), ("read", 1)]
    for _ in range(draw(st.integers(3, 14))):
        values = len([step for step in steps if step[0] not in ("write", "out")])
        kind = draw(
            st.sampled_from(["read", "update", "update", "write", "write", "view", "add", "shift", "input", "constant"])
        )
        one = draw(st.integers(max(0, values - 3), values - 1))
        if kind == "read":
            steps.append(("read", draw(st.integers(0, 1))))
        elif kind == "update":
            steps.append(("update", one, draw(st.integers(0, values - 1)), draw(st.integers(0, 2))))
        elif kind == "write":
            steps.append(("write", draw(st.integers(0, 1)), one))
        elif kind in ("view", "shift"):
            steps.append((kind, one))
        elif kind in ("input", "constant"):
            steps.append((kind,))
        else:
            steps.append(("add", one, draw(st.integers(0, values - 1))))
    values = len([step for step in steps if step[0] != "write"])
    return [*steps, ("out", draw(st.integers(0, values - 1)))]


INPUT = np.array([[0.5, -3], [8, 0.25], [1, 2]], np.float16)
CONSTANT = np.arange(10, 16, dtype=np.float16).reshape(3, 2)

# For each rule by which a state may be changed in place or a value become a state, a program that breaks without it.
# Values are numbered as they are made; ("out", n) gives one out.
RULES: dict[str, list[tuple[Any, ...]]] = {
    "what is read again is the old state": [("read", 0), ("update", 0, 0, 1), ("read", 0), ("out", 2), ("write", 0, 1)],
    "an update that is never written changes nothing": [("read", 0), ("update", 0, 0, 1), ("out", 1)],
    "an update is written to another state": [("read", 0), ("update", 0, 0, 1), ("write", 1, 1), ("read", 0), ("out", 2)],
    "what was read before is used later": [("read", 0), ("update", 0, 0, 1), ("write", 0, 1), ("add", 0, 1), ("out", 2)],
    "what was read before is given out": [("read", 0), ("update", 0, 0, 1), ("write", 0, 1), ("out", 0)],
    "a view of what was read is used later": [
        ("read", 0), ("view", 0), ("update", 0, 0, 1), ("write", 0, 2), ("add", 1, 2), ("out", 3),
    ],
    "a part of the state updates it": [("read", 0), ("shift", 0), ("write", 0, 1), ("out", 1)],
    "one value becomes two states": [
        ("read", 0), ("add", 0, 0), ("write", 0, 1), ("write", 1, 1), ("read", 0), ("update", 2, 2, 1), ("write", 0, 3),
        ("read", 1), ("out", 4),
    ],
    "a view becomes the state": [
        ("read", 0), ("add", 0, 0), ("view", 1), ("write", 0, 2), ("read", 0), ("update", 3, 3, 1), ("write", 0, 4),
        ("add", 1, 4), ("out", 5),
    ],
    "an input becomes the state": [
        ("input",), ("write", 0, 0), ("read", 0), ("update", 1, 1, 1), ("write", 0, 2), ("input",), ("out", 3),
    ],
    "a constant becomes the state": [
        ("constant",), ("write", 0, 0), ("read", 0), ("update", 1, 1, 1), ("write", 0, 2), ("constant",), ("out", 3),
    ],
    "what became the state is used later": [
        ("read", 0), ("add", 0, 0), ("write", 0, 1), ("read", 0), ("update", 2, 2, 1), ("write", 0, 3), ("add", 1, 3), ("out", 4),
    ],
    "several updates before the write": [("read", 0), ("update", 0, 0, 1), ("update", 1, 1, 2), ("write", 0, 2), ("out", 2)],
    "an older value is updated when the state holds another": [
        ("read", 0), ("add", 0, 0), ("write", 0, 1), ("update", 0, 0, 1), ("write", 0, 2), ("out", 2),
    ],
    "one state becomes the other": [
        ("read", 0), ("write", 1, 0), ("read", 1), ("update", 1, 1, 2), ("write", 1, 2), ("read", 0), ("out", 3),
    ],
}  # fmt: skip


def interpret(steps: list[Any], states: list[np.ndarray]) -> list[np.ndarray]:
    """The reference: every value is a copy of its own."""
    values: list[np.ndarray] = []
    outputs: list[np.ndarray] = []
    for kind, *rest in steps:
        if kind == "out":
            outputs.append(values[rest[0]])
        elif kind == "read":
            values.append(states[rest[0]].copy())
        elif kind == "write":
            states[rest[0]] = values[rest[1]].copy()
        elif kind == "update":
            updated = values[rest[0]].copy()
            updated[rest[2]] = values[rest[1]][0] * 0.5
            values.append(updated)
        elif kind == "view":
            values.append(values[rest[0]].copy())
        elif kind == "shift":
            shifted = values[rest[0]].copy()
            shifted[1:] = values[rest[0]][:-1]
            values.append(shifted)
        elif kind in ("input", "constant"):
            values.append((INPUT if kind == "input" else CONSTANT).astype(np.float32))
        else:
            values.append(values[rest[0]] + values[rest[1]])
    return outputs


def written(steps: list[Any], inputs: Any) -> list[Any]:
    values: list[Any] = []
    outputs: list[Any] = []
    names = ("s", "t")
    # The converter refuses a state or an input that nothing uses.
    mb.identity(x=inputs["x"])
    for name in names:
        mb.read_state(input=inputs[name])
    for kind, *rest in steps:
        if kind == "out":
            outputs.append(values[rest[0]])
        elif kind == "read":
            values.append(mb.read_state(input=inputs[names[rest[0]]]))
        elif kind == "write":
            mb.coreml_update_state(state=inputs[names[rest[0]]], value=values[rest[1]])
        elif kind == "update":
            row = mb.mul(x=mb.slice_by_index(x=values[rest[1]], begin=[0, 0], end=[1, 2]), y=np.float16(0.5))
            values.append(mb.slice_update(x=values[rest[0]], update=row, begin=[rest[2], 0], end=[rest[2] + 1, 2]))
        elif kind == "view":
            values.append(mb.transpose(x=mb.transpose(x=values[rest[0]], perm=[1, 0]), perm=[1, 0]))
        elif kind == "shift":
            part = mb.slice_by_index(x=values[rest[0]], begin=[0, 0], end=[2, 2])
            values.append(mb.slice_update(x=values[rest[0]], update=part, begin=[1, 0], end=[3, 2]))
        elif kind in ("input", "constant"):
            values.append(inputs["x"] if kind == "input" else mb.const(val=CONSTANT))
        else:
            values.append(mb.add(x=values[rest[0]], y=values[rest[1]]))
    return outputs


def check_order(steps: list[Any], folder: Path) -> None:
    shapes = {name: ((3, 2), np.float16) for name in ("s", "t")}
    path = save_program(folder / "p.mlpackage", {"x": ((3, 2), np.float16)}, lambda v: written(steps, v), shapes)
    program = MLProgram(path)
    state = program.make_state()
    own = [np.arange(6, dtype=np.float32).reshape(3, 2), -np.arange(1, 7, dtype=np.float32).reshape(3, 2)]
    state.write_state("s", own[0])
    state.write_state("t", own[1])
    x = INPUT.astype(np.float32)  # the very type it is carried in: shared, not copied
    held = []
    for _ in range(3):  # each call finds what the one before left, and changes nothing that a caller holds
        outputs = list(program.predict({"x": x}, state).values())
        held += zip(outputs, interpret(steps, own), strict=True)
        for output, reference in held:
            np.testing.assert_array_equal(output, reference)
        np.testing.assert_array_equal(state.read_state("s"), own[0])
        np.testing.assert_array_equal(state.read_state("t"), own[1])
        np.testing.assert_array_equal(x, INPUT)


@settings(max_examples=12, deadline=None)
@given(steps=state_programs())
def test_order_of_reads_and_writes_matches_copies(steps: list[Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("order")
    check_order(steps, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_ownership_match_copies(rule: str, tmp_path: Path) -> None:
    check_order(RULES[rule], tmp_path)


def test_output_that_became_a_state_is_the_callers_own(tmp_path: Path) -> None:
    # coremltools puts an operation between the two; others need not.
    def build(values: Any) -> list[Any]:
        read = mb.read_state(input=values["s"])
        updated = mb.slice_update(x=read, update=values["x"], begin=[0, 0], end=[3, 1])
        read = mb.coreml_update_state(state=values["s"], value=updated)
        total = mb.add(x=read, y=values["x"], name="total")
        mb.coreml_update_state(state=values["s"], value=total)
        return [total]

    states = {"s": ((3, 2), np.float16)}
    path = save_program(tmp_path / "o.mlpackage", {"x": ((3, 1), np.float16)}, build, states)
    file = path / "Data/com.apple.CoreML/model.mlmodel"
    model = Model_pb2.Model()
    model.ParseFromString(file.read_bytes())
    block = model.mlProgram.functions["main"].block_specializations["CoreML8"]
    block.outputs[:] = ["total"]
    model.description.output[0].name = "total"
    file.write_bytes(model.SerializeToString())
    program = MLProgram(path)
    state = program.make_state()
    x = np.ones((3, 1), np.float16)
    first = predict(program, state, x=x)
    kept = first.copy()
    np.testing.assert_array_equal(state.read_state("s"), kept)
    predict(program, state, x=3 * x)
    np.testing.assert_array_equal(first, kept)
    before = state.read_state("s")
    first[:] = 7
    np.testing.assert_array_equal(state.read_state("s"), before)


def test_cache_updates_happen_in_place(cache: Path) -> None:
    decode = MLProgram(cache, "decode")
    state = decode.make_state()
    before = [state.cell(name).tensor.data_ptr() for name in ("keys", "values")]
    predict(decode, state, x=rows(1), position=at(2))
    assert [state.cell(name).tensor.data_ptr() for name in ("keys", "values")] == before


def test_fp16_mode_rounds_every_result(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        squared = mb.mul(x=values["x"], y=values["x"])
        return [
            mb.sub(x=squared, y=values["x"]),
            mb.reduce_mean(x=squared, axes=[-1]),
            mb.reduce_sum_square(x=values["x"], axes=[-1]),
        ]

    path = save_program(tmp_path / "r.mlpackage", {"x": ((4,), np.float16)}, build)
    x = np.array([300.0, 1.001, 0.333, 1e-4], np.float16)
    rounded, mean, total = MLProgram(path, mode="fp16").predict({"x": x}).values()
    with np.errstate(over="ignore", invalid="ignore"):
        squared = (x.astype(np.float32) ** 2).astype(np.float16)  # 300² does not fit
        np.testing.assert_array_equal(rounded, (squared.astype(np.float32) - x.astype(np.float32)).astype(np.float16))
    assert rounded.dtype == np.float16
    assert np.isinf(squared[0])
    assert np.isinf(mean).all()
    assert np.isinf(total).all()
    exact = x.astype(np.float32)
    for own, reference in zip(
        MLProgram(path).predict({"x": x}).values(), (exact**2 - exact, (exact**2).mean(), (exact**2).sum()), strict=True
    ):
        assert own.dtype == np.float32
        np.testing.assert_allclose(own.reshape(np.shape(reference)), reference, rtol=1e-6)


def test_fp16_mode_accumulates_in_fp32(tmp_path: Path) -> None:
    # One by one in fp16, 4096 ones end at 2048: there the next number is two away.
    path = save_program(
        tmp_path / "a.mlpackage",
        {"x": ((1, 4096), np.float16)},
        lambda v: [mb.matmul(x=v["x"], y=np.ones((4096, 1), np.float16)), mb.reduce_sum(x=v["x"], axes=[1])],
    )
    for output in MLProgram(path, mode="fp16").predict({"x": np.ones((1, 4096), np.float16)}).values():
        assert output.item() == 4096


class Block(torch.nn.Module):
    """Attention over a cache and a gated feed-forward, with most operations that a transformer converts to."""

    def __init__(self, width: int = 32, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = torch.nn.Embedding(60, width)
        self.qkv = torch.nn.Conv2d(width, 3 * width, 1)
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, width)
        self.register_buffer("keyCache", torch.zeros(1, heads, length, width // heads))
        self.register_buffer("valueCache", torch.zeros(1, heads, length, width // heads))

    def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        S = ids.shape[1]
        x = self.embedding(ids)
        q, k, v = self.qkv(self.norm(x).transpose(1, 2).unsqueeze(2)).chunk(3, 1)
        q, k, v = (part.reshape(1, self.heads, -1, S).transpose(2, 3) for part in (q, k, v))
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-5)
        self.keyCache[:, :, position : position + S] = k
        self.valueCache[:, :, position : position + S] = v
        weights = torch.softmax(q @ self.keyCache.transpose(-1, -2) * 0.35 + mask, -1)
        x = x + (weights @ self.valueCache).transpose(1, 2).reshape(1, S, -1)
        gate, up = self.up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up) + x


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Block, Path]]:
    torch.manual_seed(0)
    module = Block().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    example = (torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, 2, 16))
    path = tmp_path_factory.mktemp("block") / "block.mlpackage"
    with quiet():
        ct.convert(
            torch.jit.trace(module, example),
            inputs=[
                ct.TensorType("ids", (1, 2), np.int32),
                ct.TensorType("position", (1,), np.int32),
                ct.TensorType("mask", (1, 1, 2, 16), np.float16),
            ],
            outputs=[ct.TensorType("out", dtype=np.float16)],
            states=[
                ct.StateType(ct.TensorType(shape=(1, 4, 16, 8), dtype=np.float16), name=name)
                for name in ("keyCache", "valueCache")
            ],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        ).save(str(path))
    with torch.no_grad():
        # The program's constants are fp16; the reference computes with the same ones.
        for tensor in module.state_dict().values():
            tensor.copy_(tensor.half().float())
            if tensor.ndim == 4 and tensor.shape[-2] == 16:
                tensor.zero_()

    def fresh() -> tuple[Block, Path]:
        module.keyCache.zero_()
        module.valueCache.zero_()
        return module, path

    return fresh


@pytest.mark.parametrize(("mode", "least_db"), [("fp32", 90), ("fp16", 50)])
def test_converted_module_matches_torch(
    transformer: Callable[[], tuple[Block, Path]], mode: Any, least_db: float
) -> None:
    module, path = transformer()
    program = MLProgram(path, mode=mode)
    state = program.make_state()
    signal = noise = 0.0
    for step in range(4):
        ids = np.array([[7 * step + 3, 55 - step]], np.int32)
        position = 2 * step
        mask = np.where(np.arange(16) <= position + np.arange(2)[:, None], 0, -4e4).astype(np.float16)[None, None]
        with torch.no_grad():
            reference = module(torch.tensor(ids), torch.tensor([position]), torch.tensor(mask).float()).numpy()
        own = program.predict({"ids": ids, "position": at(position), "mask": mask}, state)["out"]
        signal += float((reference**2).sum())
        noise += float(((own - reference) ** 2).sum())
    assert 10 * np.log10(signal / noise) > least_db
    reference_cache = module.keyCache.detach().numpy()
    tolerance = 1e-4 if mode == "fp32" else 5e-3
    np.testing.assert_allclose(
        state.read_state("keyCache"), reference_cache, atol=tolerance * np.abs(reference_cache).max()
    )


def test_programs_of_one_package_share_constants(cache: Path, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float16)
    path = save_program(
        tmp_path / "w.mlpackage", {"x": ((1, 16), np.float16)}, lambda v: [mb.matmul(x=v["x"], y=weight)]
    )
    one, other = (MLProgram(Package.open(path), mode=mode) for mode in ("fp32", "fp16"))

    def weights(program: MLProgram) -> list[int]:
        kept = [*program._plan.slots, *(part for step in program._plan.steps for part in step.template)]
        return [part.data_ptr() for part in kept if isinstance(part, torch.Tensor) and part.shape == (16, 16)]

    assert weights(one)
    assert weights(one) == weights(other)


def test_package_saved_anew_has_its_own_constants(tmp_path: Path) -> None:
    def save(factor: float) -> MLProgram:
        weight = np.full((16, 16), factor, np.float16)
        shapes = {"x": ((1, 16), np.float16)}
        return MLProgram(save_program(tmp_path / "w.mlpackage", shapes, lambda v: [mb.matmul(x=v["x"], y=weight)]))

    x = np.ones((1, 16), np.float16)
    old, new = save(1), save(2)
    assert (predict(old, x=x) == 16).all()
    assert (predict(new, x=x) == 32).all()


def test_caller_may_change_what_it_gave_and_got(tmp_path: Path) -> None:
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)
    path = save_program(
        tmp_path / "o.mlpackage",
        {"x": ((4, 6), np.float32)},
        lambda v: [mb.transpose(x=v["x"], perm=[1, 0]), mb.identity(x=mb.const(val=weight)), v["x"]],
    )
    program = MLProgram(path)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    given_x = x.copy()
    for _ in range(2):
        turned, constant, same = program.predict({"x": x}).values()
        np.testing.assert_array_equal(constant, weight)
        for output in (turned, constant, same):
            output[:] = 7
        np.testing.assert_array_equal(x, given_x)
