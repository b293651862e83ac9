"""What `analyze` and `compare` tell: records, layers, contexts, the bandwidth model, and how it prints."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from analysis_programs import save_functions
from mil_programs import mb, quiet, save_program
from rich.console import Console

from ane_layers.analysis import (
    ARTICLE_BANDWIDTH_MB_S,
    analyze,
    article_comparison,
    article_readings,
    compare,
    inspect,
    tokens_per_second,
    traffic,
)
from ane_layers.analysis.contexts import ContextModel
from ane_layers.analysis.flow import Flow
from ane_layers.analysis.layers import layers
from ane_layers.analysis.printing import print_analysis
from ane_layers.analysis.printing_comparison import print_article, print_comparison
from ane_layers.analysis.records import Record, records
from ane_layers.models import Exaone4
from ane_layers.program import Function, Package

Folder = Callable[..., Path]
F16, I32 = np.float16, np.int32
LAYERS, BLOCK = 3, 5


def convert(folder: Path, path: Path, context: int, sharing: str) -> Package:
    model = Exaone4.from_pretrained(folder, context_length=context, dtype=None, head_sharing=sharing)
    return model.convert(path, prefill=BLOCK)


@pytest.fixture(scope="module")
def fold(exaone4_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return convert(exaone4_folder(layers=LAYERS), tmp_path_factory.mktemp("fold") / "p.mlpackage", 48, "fold")


@pytest.fixture(scope="module")
def repeat(exaone4_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return convert(exaone4_folder(layers=LAYERS), tmp_path_factory.mktemp("repeat") / "p.mlpackage", 48, "repeat_kv")


@pytest.fixture(scope="module")
def longer(exaone4_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Package]:
    return {
        sharing: convert(
            exaone4_folder(layers=LAYERS), tmp_path_factory.mktemp("longer") / f"{sharing}.mlpackage", 112, sharing
        )
        for sharing in ("fold", "repeat_kv")
    }


def only(function: Function, kind: str) -> list[Record]:
    return [record for record in records(Flow(function)) if record.type == kind]


# Everything materialised.


def test_records_add_up_to_traffic(fold: Package, repeat: Package) -> None:
    for package in (fold, repeat):
        for function in package.functions.values():
            expected = traffic(function)
            found = records(Flow(function))
            for name in ("weights", "kv_read", "kv_written", "repetition"):
                assert sum(getattr(record, name) for record in found) == getattr(expected, name) > -1
            assert len(found) == inspect(package)["functions"][function.name]["operations"]["compute"]


SIZE = 2 * 3 * 4 * 2


MATERIALISED: dict[str, tuple[Callable[[Any], Any], str, int, int]] = {
    "unary": (lambda v: mb.relu(x=v["x"]), "relu", SIZE, SIZE),
    "binary": (lambda v: mb.add(x=v["x"], y=v["y"]), "add", 2 * SIZE, SIZE),
    "one input taken twice": (lambda v: mb.mul(x=v["x"], y=v["x"]), "mul", SIZE, SIZE),
    "broadcast": (lambda v: mb.add(x=v["x"], y=v["row"]), "add", SIZE + 8, SIZE),
    "reduction": (lambda v: mb.reduce_sum(x=v["x"], axes=[-1], keep_dims=True), "reduce_sum", SIZE, SIZE // 4),
    "to a wider type": (lambda v: mb.cast(x=v["x"], dtype="fp32"), "cast", SIZE, 2 * SIZE),
    "view": (lambda v: mb.reshape(x=v["x"], shape=(6, 4)), "reshape", 0, 0),
    "transpose": (lambda v: mb.transpose(x=v["x"], perm=(1, 0, 2)), "transpose", SIZE, SIZE),
    "slice": (
        lambda v: mb.slice_by_index(x=v["x"], begin=(0, 0, 0), end=(1, 3, 4)),
        "slice_by_index",
        SIZE // 2,
        SIZE // 2,
    ),
    "lookup": (lambda v: mb.gather(x=v["x"], indices=v["one"], axis=0), "gather", SIZE // 2 + 4, SIZE // 2),
    "tile": (lambda v: mb.tile(x=v["x"], reps=(1, 1, 5)), "tile", SIZE, 5 * SIZE),
    "weights": (lambda v: mb.matmul(x=v["x"], y=np.ones((4, 5), F16)), "matmul", SIZE + 40, SIZE // 4 * 5),
    "row of a table": (lambda v: mb.gather(x=np.ones((9, 5), F16), indices=v["one"], axis=0), "gather", 10 + 4, 10),
    "update of a value": (
        lambda v: mb.slice_update(x=v["x"], update=v["part"], begin=(0, 0, 0), end=(1, 3, 4)),
        "slice_update",
        SIZE + SIZE // 2,
        SIZE,
    ),
    "update of a state": (
        lambda v: mb.coreml_update_state(
            state=v["s"],
            value=mb.slice_update(x=mb.read_state(input=v["s"]), update=v["part"], begin=(0, 0, 0), end=(1, 3, 4)),
        ),
        "slice_update",
        SIZE // 2,
        SIZE // 2,
    ),
    "a state's update written": (
        lambda v: mb.coreml_update_state(
            state=v["s"],
            value=mb.slice_update(x=mb.read_state(input=v["s"]), update=v["part"], begin=(0, 0, 0), end=(1, 3, 4)),
        ),
        "write_state",
        0,
        0,
    ),
    "a state written anew": (lambda v: mb.coreml_update_state(state=v["s"], value=v["x"]), "write_state", SIZE, SIZE),
    "a state read": (lambda v: mb.relu(x=mb.read_state(input=v["s"])), "read_state", 0, 0),
    "a shape": (lambda v: mb.shape(x=v["x"]), "shape", 0, 12),
}


@pytest.fixture(scope="module")
def materialised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Function]:
    inputs = {
        "x": ((2, 3, 4), F16),
        "y": ((2, 3, 4), F16),
        "row": ((4,), F16),
        "one": ((1,), I32),
        "part": ((1, 3, 4), F16),
    }
    builds = {name: lambda values, build=build: [build(values)] for name, (build, *_) in MATERIALISED.items()}
    path = tmp_path_factory.mktemp("materialised") / "p.mlpackage"
    return save_functions(path, inputs, builds, {"s": ((2, 3, 4), F16)})


@pytest.mark.parametrize("name", MATERIALISED)
def test_an_operation_reads_and_writes_what_its_shapes_say(name: str, materialised: dict[str, Function]) -> None:
    _, type_, read, written = MATERIALISED[name]
    (record,) = only(materialised[name], type_)
    assert (record.read, record.written) == (read, written)


def test_materialised_sums_all_operations_and_copies_are_listed(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        x = mb.transpose(x=values["x"], perm=(0, 2, 1))
        part = mb.slice_by_index(x=mb.read_state(input=values["s"]), begin=(1, 0, 0), end=(2, 3, 4))
        return [mb.exp(x=mb.matmul(x=part, y=x))]

    inputs = {"x": ((1, 3, 4), F16)}
    path = save_program(tmp_path / "p.mlpackage", inputs, build, {"s": ((2, 3, 4), F16)})
    function = analyze(Package.open(path), with_records=True)["functions"]["main"]
    moved, product = SIZE // 2, 3 * 3 * 2
    # transpose, slice, matmul, exp, and the identity that gives the output its name.
    assert function["materialised"] == {
        "read": 2 * moved + 2 * moved + 2 * product,
        "written": 2 * moved + 3 * product,
    }
    assert function["copies"]["count"] == 3
    assert function["copies"]["bytes"] == 2 * moved + product
    assert function["copies"]["of_caches"] == {"count": 1, "bytes": moved}
    assert function["copies"]["by_type"]["slice_by_index"] == {"count": 1, "bytes": moved}
    assert function["largest"][0]["bytes"] == moved
    assert {record["name"] for record in function["records"]} >= {"matmul_0", "exp_0"}
    assert function["kinds"]["matrix product"] == {"count": 1, "by_type": {"matmul": 1}}


def test_a_loop_body_is_counted_once_and_said_so(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        weight = np.ones((4, 4), F16)
        looped = mb.while_loop(
            _cond=lambda x: mb.less(x=mb.reduce_sum(x=x), y=F16(100)),
            _body=lambda x: mb.matmul(x=x, y=weight),
            loop_vars=(values["x"],),
        )
        return [looped]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((4, 4), F16)}, build)
    function = analyze(Package.open(path), with_records=True)["functions"]["main"]
    assert function["traffic"]["weights"] == 32
    assert [note for note in function["notes"] if "while_loop" in note and "once" in note]
    depths = {record["type"]: record["depth"] for record in function["records"]}
    assert (depths["while_loop"], depths["matmul"]) == (0, 1)
    assert {record["type"]: record["read"] for record in function["records"]}["while_loop"] == 0


# Layers.


def test_layers_of_exaone4_are_those_of_its_weights(fold: Package, repeat: Package) -> None:
    for package in (fold, repeat):
        for name, function in package.functions.items():
            rows = {row["layer"]: row for row in analyze(package, name)["functions"][name]["layers"]}
            assert list(rows) == ["embedding", *map(str, range(LAYERS)), "head", "other"]
            numbered = [rows[str(number)] for number in range(LAYERS)]
            # Layers are alike; the first reads the states besides, the last has the final norm, whose weight lost its name.
            assert {row["kv_read"] for row in numbered} == {2 * 2 * 48 * 16 * 2}
            assert len({row["repetition"] for row in numbered}) == 1
            assert numbered[1]["by_type"]["matmul"] == 2
            assert numbered[1]["by_type"]["conv"] == 4
            assert numbered[2]["weights"] == numbered[1]["weights"] + 2 * 40
            # Fused: qkv 12 heads of 16, o, gate and up, down; a norm of 5 columns of 16 with an epsilon for each of 2 KV heads, two of 40.
            matrices = 12 * 16 * 40 + 40 * 8 * 16 + 3 * 72 * 40
            rows_of_norm = (5 * 16 + 10) * (1 if name == "decode" else BLOCK) + 2 * 40
            assert numbered[1]["weights"] == 2 * (matrices + rows_of_norm)
            assert rows["head"]["weights"] == 2 * 109 * 40
            assert rows["embedding"]["by_type"]["gather"] == 1
            whole = analyze(package, name)["functions"][name]["traffic"]["total"]
            assert sum(row["total"] for row in rows.values()) == whole
            assert len(layers(Flow(function))) == sum(row["operations"] for row in rows.values())


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.w", "model.layers.1.w"],
        ["transformer_h_0_attn_weight", "transformer_h_1_attn_weight"],
        ["blocks_0_fc", "blocks_1_fc"],
        ["encoder_layer_0_weight", "encoder_layer_1_weight"],
    ],
)
def test_layers_follow_the_names_that_others_give_weights(names: list[str], tmp_path: Path) -> None:
    def weight(name: str) -> Any:
        return mb.const(val=np.random.default_rng(0).normal(size=(4, 4)).astype(F16), name=name.replace(".", "_"))

    def build(values: Any) -> list[Any]:
        shared = mb.add(x=values["mask"], y=F16(1), name="shared")
        x = mb.gather(x=mb.const(val=np.ones((20, 4), F16), name="wte"), indices=values["ids"], axis=0, name="rows")
        aside = mb.matmul(x=x, y=weight("aside"), name="aside_product")
        for number, name in enumerate(names):
            mine = mb.exp(x=values["mask"], name=f"mine{number}")
            x = mb.matmul(x=mb.relu(x=x, name=f"before{number}"), y=weight(name), name=f"product{number}")
            x = mb.add(x=mb.add(x=x, y=mine, name=f"added{number}"), y=shared, name=f"after{number}")
        x = mb.mul(x=x, y=mb.const(val=np.full(12, 2, F16)[:4], name="norm_weight"), name="norm")
        return [mb.matmul(x=x, y=weight("output"), name="logits"), aside]

    path = save_program(tmp_path / "p.mlpackage", {"ids": ((1,), I32), "mask": ((1, 4), F16)}, build)
    of_layer = {step.name: layer for step, layer in layers(Flow(Package.open(path).function())).items()}
    assert of_layer["shared"] == "other"
    assert [of_layer[name] for name in ("rows", "before0", "aside_product")] == ["embedding"] * 3
    for number in range(2):
        assert [of_layer[f"{name}{number}"] for name in ("mine", "product", "added", "after")] == [str(number)] * 4
    # What cannot be known: it belongs to the layer after it.
    assert of_layer["before1"] == "0"
    assert (of_layer["norm"], of_layer["logits"]) == ("head", "head")


def test_without_layers_names_only_the_lookup_is_embedding(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        x = mb.gather(x=np.ones((20, 4), F16), indices=values["ids"], axis=0, name="rows")
        return [mb.matmul(x=mb.relu(x=x, name="relu"), y=np.ones((4, 5), F16), name="product")]

    path = save_program(tmp_path / "p.mlpackage", {"ids": ((1,), I32)}, build)
    of_layer = {step.name: layer for step, layer in layers(Flow(Package.open(path).function())).items()}
    assert [of_layer[name] for name in ("rows", "relu", "product")] == ["embedding", "other", "other"]


@pytest.mark.parametrize("matrix", ["norm_weight", "columns"])
def test_what_goes_to_a_state_is_no_head(matrix: str, tmp_path: Path) -> None:
    """The norm of k, whose weight has lost its layer's number, or is a matrix; it gets to attention by way of the state alone."""
    values = np.full(4, 2, F16) if matrix == "norm_weight" else np.full((3, 4), 2, F16)

    def build(given: Any) -> list[Any]:
        x = given["x"]
        for number in range(2):
            weight = mb.const(val=np.full((4, 4), 0.5, F16), name=f"layers_{number}_k")
            key = mb.mul(
                x=mb.matmul(x=x, y=weight), y=mb.const(val=values, name=f"{matrix}{number}"), name=f"k{number}"
            )
            begin, end = (number, 0, 0), (number + 1, 3, 4)
            new = mb.expand_dims(x=key, axes=[0])
            new = mb.slice_update(
                x=mb.read_state(input=given["s"]), update=new, begin=begin, end=end, name=f"update{number}"
            )
            whole = mb.coreml_update_state(state=given["s"], value=new)
            keys = mb.slice_by_index(
                x=whole, begin=begin, end=end, squeeze_mask=(True, False, False), name=f"part{number}"
            )
            # The last layer's keys are for the next call.
            if number == 0:
                x = mb.matmul(x=mb.softmax(x=mb.matmul(x=x, y=keys, transpose_y=True)), y=keys)
                x = mb.matmul(x=x, y=mb.const(val=np.full((4, 4), 0.5, F16), name=f"layers_{number}_o"))
        return [mb.matmul(x=x, y=mb.const(val=np.full((4, 9), 0.5, F16), name="output"), name="logits")]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((3, 4), F16)}, build, {"s": ((2, 3, 4), F16)})
    of_layer = {step.name: layer for step, layer in layers(Flow(Package.open(path).function())).items()}
    assert [of_layer[f"{name}{n}"] for n in range(2) for name in ("k", "update")] == ["0", "0", "1", "1"]
    assert of_layer["logits"] == "head"


def test_integers_make_no_head(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        x = mb.matmul(x=values["x"], y=mb.const(val=np.full((4, 4), 0.5, F16), name="layers_0_w"))
        rows = mb.gather_nd(x=x, indices=mb.const(val=np.array([[0, 1], [1, 1]], I32), name="places"), name="picked")
        return [mb.exp(x=rows, name="behind")]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((3, 4), F16)}, build)
    of_layer = {step.name: layer for step, layer in layers(Flow(Package.open(path).function())).items()}
    assert (of_layer["picked"], of_layer["behind"]) == ("0", "0")


def test_two_stacks_are_told_apart(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        x = values["x"]
        for name in ("encoder_layers_0_fc", "encoder_layers_1_fc", "decoder_layers_0_fc"):
            x = mb.matmul(x=x, y=mb.const(val=np.ones((4, 4), F16), name=name), name=f"in_{name}")
        return [x]

    path = save_program(tmp_path / "p.mlpackage", {"x": ((1, 4), F16)}, build)
    of_layer = {step.name: layer for step, layer in layers(Flow(Package.open(path).function())).items()}
    assert [of_layer[f"in_{name}"] for name in ("encoder_layers_1_fc", "decoder_layers_0_fc")] == [
        "encoder.1",
        "decoder.0",
    ]


# Contexts and bandwidth.


@pytest.mark.parametrize("sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_traffic_at_another_context_matches_a_package_built_for_it(
    sharing: str, name: str, fold: Package, repeat: Package, longer: dict[str, Package]
) -> None:
    package = fold if sharing == "fold" else repeat
    model = ContextModel(Flow(package.function(name)))
    assert (model.context_length, model.tokens) == (48, 1 if name == "decode" else BLOCK)
    built = traffic(longer[sharing].function(name))
    assert model.at(112).as_dict() == built.as_dict()
    assert model.at(48).as_dict() == traffic(package.function(name)).as_dict()


def attend(values: Any, name: str, slots: int, new: bool) -> Any:
    key = mb.slice_by_index(x=mb.read_state(input=values[name]), begin=(0, 0, 0, 0), end=(1, 2, slots, 6))
    if new:
        key = mb.concat(values=[key, mb.exp(x=values["new"])], axis=2)
    return mb.matmul(x=mb.softmax(x=mb.matmul(x=values["q"], y=key, transpose_y=True), axis=3), y=key)


@pytest.mark.parametrize("tokens", [True, False])
def test_windows_do_not_grow_with_the_context(tokens: bool, tmp_path: Path) -> None:
    states = {"full": ((1, 2, 64, 6), F16), "window": ((1, 2, 24, 6), F16)}
    inputs = {"q": ((1, 2, 1, 6), F16), "new": ((1, 2, 1, 6), F16)}
    if tokens:
        inputs["ids"] = ((1, 1), I32)

    def build(values: Any) -> list[Any]:
        rows = [mb.gather(x=np.ones((20, 4), F16), indices=values["ids"], axis=0)] if tokens else []
        return [*rows, attend(values, "full", 64, new=True), attend(values, "window", 24, new=False)]

    function = Package.open(save_program(tmp_path / "p.mlpackage", inputs, build, states)).function()
    model = ContextModel(Flow(function))
    slot = 2 * 6 * 2
    assert (model.context_length, model.tokens) == (64, 1 if tokens else None)
    # The full cache is read where it is joined with the new row, the window by both products.
    assert [model.at(slots).kv_read for slots in (16, 32, 64, 640)] == [
        (full + 2 * window) * slot for full, window in ((16, 16), (32, 24), (64, 24), (640, 24))
    ]


def test_scores_of_cache_and_new_tokens_in_one_softmax(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        rows = mb.gather(x=np.ones((20, 4), F16), indices=values["ids"], axis=0)
        old = mb.read_state(input=values["full"])
        scores = [mb.matmul(x=values["q"], y=key, transpose_y=True) for key in (old, mb.exp(x=values["new"]))]
        return [rows, mb.softmax(x=mb.concat(values=scores, axis=3), axis=3)]

    inputs = {"q": ((1, 2, 3, 6), F16), "new": ((1, 2, 3, 6), F16), "ids": ((1, 3), I32)}
    path = save_program(tmp_path / "p.mlpackage", inputs, build, {"full": ((1, 2, 64, 6), F16)})
    model = ContextModel(Flow(Package.open(path).function()))
    assert (model.context_length, model.tokens) == (64, 3)
    assert model.at(8).kv_read == 8 * 2 * 6 * 2


def projected(shape: tuple[int, ...], how: str) -> Callable[[Any], list[Any]]:
    """A chunk's first projection behind a norm, and a mask, rotations and a cache that come in beside the hidden states."""

    def build(values: Any) -> list[Any]:
        x = values["x"]
        axis = {"conv": 1}.get(how, len(shape) - 1)
        length = mb.reduce_l2_norm(x=mb.concat(values=[x, x], axis=axis), axes=[axis], keep_dims=True)
        x = mb.real_div(x=x, y=length)
        if how == "conv":
            x = mb.transpose(x=mb.conv(x=x, weight=np.ones((6, 12, 1, 1), F16)), perm=(0, 2, 3, 1))
        elif how == "linear":
            x = mb.linear(x=x, weight=np.ones((6, 12), F16))
        else:
            x = mb.matmul(x=x, y=np.ones((12, 6), F16))
        x = mb.reshape(x=x, shape=(1, 1, -1, 6))
        scores = mb.matmul(x=mb.mul(x=x, y=values["cos"]), y=values["k_cache"], transpose_y=True)
        return [mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=values["mask"]), axis=3), y=values["k_cache"])]

    return build


@pytest.mark.parametrize(
    ("shape", "how", "count"),
    [
        ((1, 12, 1, 5), "conv", 5),
        ((1, 12, 1, 1), "conv", 1),
        ((1, 5, 12), "linear", 5),
        ((1, 1, 12), "linear", 1),
        ((5, 12), "matmul", 5),
        ((1, 1, 5, 12), "matmul", 5),
    ],
)
def test_tokens_of_a_chunk_are_those_of_its_hidden_states(
    shape: tuple[int, ...], how: str, count: int, tmp_path: Path
) -> None:
    # Neither ids nor states, and inputs that no name tells apart.
    inputs = {
        "mask": ((1, 1, 1, 16), F16),
        "cos": ((1, 1, 1, 6), F16),
        "k_cache": ((1, 1, 16, 6), F16),
        "x": (shape, F16),
    }
    function = Package.open(save_program(tmp_path / "p.mlpackage", inputs, projected(shape, how))).function()
    model = ContextModel(Flow(function))
    assert (model.tokens, model.context_length) == (count, 16)


@pytest.mark.parametrize("slots", [16, 6])
def test_an_update_of_all_slots_grows_with_the_context(slots: int, tmp_path: Path) -> None:
    """Where slots and head size are equal, a new row fills one of two axes that are as long as the context."""

    def build(new: int) -> Callable[[Any], list[Any]]:
        def written(values: Any) -> list[Any]:
            old, rows = mb.read_state(input=values["full"]), mb.exp(x=values[f"new{new}"])
            update = mb.slice_update(x=old, update=rows, begin=(0, 0, 0, 0), end=(1, 2, new, 6))
            key = mb.coreml_update_state(state=values["full"], value=update)
            return [mb.softmax(x=mb.matmul(x=values["q"], y=key, transpose_y=True), axis=3)]

        return written

    inputs = {name: ((1, 2, size, 6), F16) for name, size in (("q", 3), ("new1", 1), (f"new{slots}", slots))}
    builds = {"row": build(1), "all": build(slots)}
    functions = save_functions(tmp_path / "p.mlpackage", inputs, builds, {"full": ((1, 2, slots, 6), F16)})
    row, whole = (ContextModel(Flow(functions[name])) for name in ("row", "all"))
    assert (row.context_length, whole.context_length) == (slots, slots)
    assert row.at(4 * slots).kv_written == row.traffic.kv_written == 2 * 6 * 2
    assert whole.traffic.kv_written == 2 * slots * 6 * 2
    assert whole.at(4 * slots).kv_written == 4 * whole.traffic.kv_written


def test_bandwidth_model_matches_the_article() -> None:
    assert ARTICLE_BANDWIDTH_MB_S == 55_900
    assert tokens_per_second(1_030_000_000) == pytest.approx(54.27, abs=0.005)
    assert tokens_per_second(2_742_000_000) == pytest.approx(20.39, abs=0.005)
    assert tokens_per_second(100_000_000, 60_000) == 600
    assert tokens_per_second(None) is None
    assert tokens_per_second(0) is None
    with pytest.raises(ValueError, match="bandwidth must be positive, got 0"):
        tokens_per_second(1, 0)


def test_article_readings_match_its_figures() -> None:
    # Figures of the article and of the arithmetic beside it, to the digits that are given there.
    readings = article_readings()
    whole, part = (readings[name]["builds"] for name in ("layers", "feed_forward"))
    assert round(whole["fold"]["total"] / 1e6) == 1086
    assert round(part["fold"]["total"] / 1e6, 1) == 1044.4
    assert [round(b["predicted"], 1) for b in (whole["fold"], whole["repeat_kv"])] == [51.5, 18.0]
    assert [round(b["predicted"], 1) for b in (part["fold"], part["repeat_kv"])] == [53.5, 18.3]
    assert [round(100 * b["error"], 1) for b in (part["fold"], part["repeat_kv"])] == [-1.4, -10.3]
    assert [round(whole[name]["inferred"] / 1e6) for name in ("fold", "repeat_kv")] in ([1029, 2742], [1030, 2742])
    difference = readings["layers"]["difference"]
    assert round(difference["total"] / 1e6) == 2013
    assert round(difference["inferred"] / 1e6) == 1712
    assert round(difference["inferred_share"], 2) == 0.85
    assert round(readings["layers"]["speedup"]["measured"], 2) == 2.66


# The documents.


def test_analyze_has_what_inspect_and_the_contracts_say(fold: Package) -> None:
    result = analyze(fold)
    counts = inspect(fold)["functions"]
    assert list(result["functions"]) == ["decode", "prefill"]
    for name, function in result["functions"].items():
        assert {key: function[key] for key in counts[name]} == counts[name]
        assert function["traffic"] == traffic(fold.function(name)).as_dict()
        assert function["tokens_per_second"] == pytest.approx(55_900e6 / function["traffic"]["total"])
        assert function["tokens_per_call"] == (1 if name == "decode" else BLOCK)
        for finding in function["lint"]:
            assert {"rule", "severity", "message", "source"} <= set(finding)
        # A write_state behind an update moves nothing.
        assert function["copies"]["by_type"]["slice_update"]["count"] == function["state_writes"] == 2 * LAYERS
        assert "write_state" not in function["copies"]["by_type"]
        states = [cache["name"] for cache in function["caches"]]
        assert states == ["keyCache", "valueCache"]
        assert all((cache["reads"], cache["writes"]) == (LAYERS, LAYERS) for cache in function["caches"])
        assert [row["context"] for row in function["contexts"] if row["built"]] == [48]
        assert [row["context"] for row in function["contexts"]] == [48, *(2**power for power in range(9, 17))]
    json.dumps(result, allow_nan=False)


def test_analyze_takes_a_function_and_a_bandwidth_for_each_chip(fold: Package) -> None:
    chips = {"phone": 60_000, "tablet": 100_000.0}
    result = analyze(fold, "prefill", chips, contexts=[100], suppress=["embedding-gather"])
    assert (list(result["functions"]), result["bandwidth"], result["chips"]) == (["prefill"], 55_900, chips)
    function = result["functions"]["prefill"]
    assert function["chips"] == {name: speed * 1e6 / function["traffic"]["total"] for name, speed in chips.items()}
    assert [row["context"] for row in function["contexts"]] == [48, 100]
    assert [finding["rule"] for finding in function["lint"] if finding["suppressed"]] == ["embedding-gather"]
    with pytest.raises(ValueError, match="no function 'encode'"):
        analyze(fold, "encode")
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        analyze(fold, "decode", {"phone": -1})


def test_compare_tells_what_head_sharing_changes(fold: Package, repeat: Package) -> None:
    result = compare(repeat, fold)
    assert [(pair["a"], pair["b"]) for pair in result["functions"]] == [("decode", "decode"), ("prefill", "prefill")]
    decode = result["functions"][0]
    one, other = traffic(repeat.function("decode")), traffic(fold.function("decode"))
    assert one.total is not None
    assert other.total is not None
    figures = decode["figures"]
    assert figures["tile.count"] == {"a": 2 * LAYERS, "b": 0, "difference": -2 * LAYERS, "ratio": 0}
    assert figures["traffic.total"]["difference"] == other.total - one.total < 0
    assert figures["tokens_per_second"]["ratio"] == pytest.approx(one.total / other.total)
    # What is repeated is read once more, and the heads are put in order for it.
    assert -1.1 * one.repetition < figures["materialised.read"]["difference"] <= -one.repetition
    assert decode["by_type"]["tile"]["difference"] == -2 * LAYERS
    assert decode["by_type"]["conv"]["difference"] == 0
    assert "const" not in decode["by_type"]
    assert decode["kinds"]["repetition"]["difference"] == -2 * LAYERS
    assert decode["interface"] == {"inputs": {}, "outputs": {}, "states": {}}
    assert (result["only_a"], result["only_b"]) == ([], [])
    json.dumps(result, allow_nan=False)


def test_compare_takes_packages_with_other_functions(fold: Package, longer: dict[str, Package], tmp_path: Path) -> None:
    path = save_program(tmp_path / "p.mlpackage", {"x": ((2, 3), F16)}, lambda values: [mb.relu(x=values["x"])])
    result = compare(fold, Package.open(path))
    assert [(pair["a"], pair["b"]) for pair in result["functions"]] == [("decode", "main")]
    assert result["only_a"] == ["prefill"]
    assert result["functions"][0]["interface"]["inputs"]["x"] == {"a": None, "b": {"dtype": "fp16", "shape": [2, 3]}}
    assert result["functions"][0]["figures"]["tokens_per_second"]["ratio"] is None
    result = compare(fold, longer["fold"], functions=[("prefill", "decode")])
    assert [(pair["a"], pair["b"]) for pair in result["functions"]] == [("prefill", "decode")]
    assert result["functions"][0]["interface"]["states"]["keyCache"]["b"]["shape"] == [LAYERS, 2, 112, 16]


def printed(show: Callable[..., None], *arguments: Any, **options: Any) -> str:
    text = io.StringIO()
    show(*arguments, Console(file=text, width=200), **options)
    return text.getvalue()


def test_printed_tables_hold_the_figures(fold: Package, repeat: Package) -> None:
    result = analyze(repeat, bandwidth={"phone": 60_000})
    text = printed(print_analysis, result, details=True)
    total = result["functions"]["decode"]["traffic"]["total"]
    assert f"{total / 1e3:,.2f} kB" in text
    assert f"{60_000e6 / total:,.0f}" in text
    # 6 tiles of 8 heads, 48 slots, 16 numbers of 2 bytes: 12 KiB each.
    decode = text.split("prefill: operations")[0].splitlines()
    tiles = next(line.split() for line in decode if line.startswith("tile "))
    assert tiles == ["tile", "6", "12.00", "KiB", "72.00", "KiB", "0", "…", "2"]
    assert "48, as built" in text
    # Tokens where a call is one token, calls where some take several.
    assert "tokens/s at 55,900" in printed(print_analysis, analyze(repeat, "decode"))
    assert "calls/s at 55,900" in text
    short = printed(print_analysis, analyze(fold))
    assert "decode: repeated data: none" in short
    assert "largest results" not in short
    text = printed(print_comparison, compare(repeat, fold))
    (line,) = [line.split() for line in text.split("prefill")[0].splitlines() if line.startswith("tile operations")]
    assert line == ["tile", "operations", "6", "0", "-6", "0.000"]
    text = printed(print_article, article_comparison(1_086_324_736, 3_099_590_656))
    assert "51.46" in text
    assert "-5.2%" in text


# Anyone's packages.


def convert_module(module: torch.nn.Module, inputs: list[Any], path: Path, **options: Any) -> Package:
    example = tuple(torch.zeros([s if isinstance(s, int) else s.default for s in t.shape.shape]) for t in inputs)
    with quiet():
        ct.convert(torch.jit.trace(module.eval(), example), inputs=inputs, skip_model_load=True, **options).save(
            str(path)
        )
    return Package.open(path)


@pytest.mark.parametrize(
    ("target", "precision"), [(ct.target.iOS15, ct.precision.FLOAT32), (ct.target.iOS16, ct.precision.FLOAT16)]
)
def test_a_convolutional_network_of_an_older_format(target: Any, precision: Any, tmp_path: Path) -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5), torch.nn.Softmax(-1)
    )
    package = convert_module(
        module,
        [ct.TensorType("x", (1, 3, 8, 8))],
        tmp_path / "p.mlpackage",
        minimum_deployment_target=target,
        compute_precision=precision,
        classifier_config=ct.ClassifierConfig([f"class {number}" for number in range(5)]),
    )
    function = analyze(package)["functions"]["main"]
    # A classifier's label and its dictionary of probabilities have no shape.
    assert {value["dtype"] for value in function["outputs"].values()} == {"string", "dictionary"}
    assert all(value["shape"] == [] for value in function["outputs"].values())
    size = 4 if precision is ct.precision.FLOAT32 else 2
    # The bias of the classes is too small to count in the file, and so is that of the channels.
    assert function["traffic"]["weights"] == size * (8 * 27 + 5 * 8 * 36)
    assert (function["tokens_per_call"], function["context_length"], function["contexts"]) == (None, None, [])
    assert function["lint"] is not None
    json.dumps(function, allow_nan=False)
    printed(print_analysis, analyze(package), details=True)


def test_a_flexible_network_says_what_is_not_known(tmp_path: Path) -> None:
    package = convert_module(
        torch.nn.Linear(6, 4, bias=False),
        [ct.TensorType("x", (ct.RangeDim(1, 9, default=2), 6))],
        tmp_path / "p.mlpackage",
        minimum_deployment_target=ct.target.iOS17,
    )
    function = analyze(package)["functions"]["main"]
    assert function["traffic"]["total"] == 6 * 4 * 2  # nothing of the traffic depends on it
    assert function["materialised"] == {"read": None, "written": None}
    assert [note for note in function["notes"] if "x ([1 … 9, 6])" in note]
    assert "?" in printed(print_analysis, analyze(package), details=True)
