"""The article's accounting, held against arithmetic done by hand, against `transformers`' parameters and coremltools' own reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from analysis_programs import save_functions
from coremltools.converters.mil.mil import types
from mil_programs import mb, quiet, save_program
from safetensors import safe_open

from ane_layers.analysis import Traffic, traffic
from ane_layers.analysis.caches import Caches
from ane_layers.analysis.contexts import ContextModel
from ane_layers.analysis.flow import Flow
from ane_layers.analysis.geometry import EXAONE4_1B
from ane_layers.analysis.records import records
from ane_layers.analysis.summaries import cache_table
from ane_layers.models import Exaone4
from ane_layers.program import Package

Folder = Callable[..., Path]
Shapes = dict[str, tuple[tuple[int, ...], type]]
F16, I32 = np.float16, np.int32


def of(path: Path, inputs: Shapes, build: Any, states: Shapes | None = None) -> Traffic:
    return traffic(save_functions(path / "p.mlpackage", inputs, {"": build}, states)[""])


def table(rows: int, columns: int, bits: int, groups: int = 1) -> Any:
    """A table of fp16 numbers, looked up by indices of `bits`, one lookup table for each group of rows."""
    rng = np.random.default_rng(0)
    unsigned = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    return mb.constexpr_lut_to_dense(
        indices=rng.integers(0, 2**bits, (rows, columns)).astype(np.uint8).astype(unsigned),
        lut=rng.normal(size=(groups, 1, 2**bits, 1)).astype(F16),
    )


def scaled(rows: int, columns: int, groups: int) -> Any:
    """int8 numbers with an fp16 scale for each of `groups` of rows, and each half of the columns."""
    rng = np.random.default_rng(1)
    return mb.constexpr_blockwise_shift_scale(
        data=rng.integers(-128, 127, (rows, columns)).astype(np.int8),
        scale=rng.uniform(0.5, 1, (groups, 2)).astype(F16),
    )


# Packages of our own: every byte by arithmetic.

CONTEXT, BLOCK = 48, 5


@pytest.fixture(scope="module")
def exaone4(exaone4_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Package]:
    folder = exaone4_folder(layers=3)
    packages = {}
    for sharing in ("fold", "repeat_kv"):
        model = Exaone4.from_pretrained(folder, context_length=CONTEXT, dtype=None, head_sharing=sharing)
        path = tmp_path_factory.mktemp("traffic") / f"{sharing}.mlpackage"
        packages[sharing] = model.convert(path, prefill=BLOCK)
    return packages


def stored_elements(folder: Path) -> int:
    """Numbers in the checkpoint, which holds the tied table once."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  it is no dict


@pytest.mark.parametrize("sharing", ["fold", "repeat_kv"])
@pytest.mark.parametrize(("function", "length"), [("decode", 1), ("prefill", BLOCK)])
def test_traffic_of_exaone4_matches_its_sizes(
    exaone4_folder: Folder, exaone4: dict[str, Package], sharing: str, function: str, length: int
) -> None:
    # 8 query and 2 KV heads of size 16, hidden size 40: see conftest.
    layers, heads, kv_heads, size, hidden = 3, 8, 2, 16, 40
    numbers = stored_elements(exaone4_folder(layers=layers))
    # Folded norms have a column for each query of a group and the key, for every token, where the checkpoint has one for q and one for k;
    # and an epsilon beside each column of each KV head.
    columns = heads // kv_heads + 1
    numbers += layers * (columns * size * length - 2 * size)
    numbers += layers * (heads + kv_heads) * length
    # Of epsilons for hidden states there is one a token, too few to count in decode; rows of both tables besides.
    numbers += length * (hidden + 2 * size)
    cache = 2 * layers * kv_heads * size * 2
    repetition = cache * CONTEXT * (heads // kv_heads)
    if sharing == "fold":
        repetition = 0 if length == 1 else (heads // kv_heads) * length * CONTEXT * 2  # the mask, once
    repetition += 0 if length == 1 else 2 * size * columns * length * 2  # cosines and sines, once
    actual = traffic(exaone4[sharing].function(function))
    expected = Traffic(2 * numbers, cache * CONTEXT, cache * length, repetition)
    assert actual == expected
    assert actual.total == 2 * numbers + cache * (CONTEXT + length) + 2 * repetition


def test_repetition_matches_the_tiles_that_coremltools_reads(exaone4: dict[str, Package]) -> None:
    from coremltools.converters.mil.frontend.milproto.load import load

    spec = ct.models.MLModel(str(exaone4["repeat_kv"].path), skip_model_load=True).get_spec()
    program = load(spec, spec.specificationVersion, str(exaone4["repeat_kv"].path / "Data/com.apple.CoreML/weights"))
    for name, function in program.functions.items():
        tiles = [operation.outputs[0] for operation in function.operations if operation.op_type == "tile"]
        assert len(tiles) == 6
        expected = sum(int(np.prod(tile.shape)) * 2 for tile in tiles)
        rotary = (
            0 if name == "decode" else 2 * 16 * 5 * 5 * 2
        )  # joined, not tiled: cosines and sines of 5 tokens, 5 times
        assert traffic(exaone4["repeat_kv"].function(name)).repetition == expected + rotary


def attention_program(path: Path, layers: int, repeat: bool) -> Traffic:
    """Decode attention at EXAONE 4.0 1.2B's sizes, states written in place; states hold no data in the file."""
    geometry, slots = EXAONE4_1B, 4096
    heads, kv_heads, size = geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim
    groups = heads // kv_heads

    def build(values: Any) -> list[Any]:
        query = mb.reshape(x=values["q"], shape=(1, heads, 1, size) if repeat else (1, kv_heads, groups, size))
        for layer in range(layers):
            caches = []
            for name in ("keyCache", "valueCache"):
                begin, end = (layer, 0, 7, 0), (layer + 1, kv_heads, 8, size)
                new = mb.slice_update(x=mb.read_state(input=values[name]), update=values["new"], begin=begin, end=end)
                whole = mb.coreml_update_state(state=values[name], value=new)
                part = mb.slice_by_index(x=whole, begin=(layer, 0, 0, 0), end=(layer + 1, kv_heads, slots, size))
                if repeat:
                    part = mb.tile(x=mb.expand_dims(x=part, axes=[2]), reps=(1, 1, groups, 1, 1))
                    part = mb.reshape(x=part, shape=(1, heads, slots, size))
                caches.append(part)
            weights = mb.softmax(x=mb.matmul(x=query, y=caches[0], transpose_y=True), axis=-1)
            query = mb.matmul(x=weights, y=caches[1])
        return [query]

    state = ((geometry.num_hidden_layers, kv_heads, slots, size), F16)
    inputs: Shapes = {"q": ((1, heads * size), F16), "new": ((1, kv_heads, 1, size), F16)}
    return of(path, inputs, build, {"keyCache": state, "valueCache": state})


def test_attention_of_the_articles_model_matches_its_figures(tmp_path: Path) -> None:
    fold = attention_program(tmp_path, 30, repeat=False)
    assert fold == Traffic(0, 240 * 2**20, 60 * 2**10, 0)
    repeated = attention_program(tmp_path, 30, repeat=True)
    assert repeated == Traffic(0, 240 * 2**20, 60 * 2**10, 960 * 2**20)
    assert fold.total is not None
    assert repeated.total == fold.total + 2_013_265_920


# Weights as they are stored.


def product(weight: Callable[[], Any], x: str = "x") -> Callable[[Any], list[Any]]:
    return lambda v: [mb.matmul(x=v[x], y=weight(), transpose_y=True)]


WEIGHTS: dict[str, tuple[Callable[[Any], list[Any]], int]] = {
    "dense": (product(lambda: np.full((64, 32), 0.5, F16)), 64 * 32 * 2),
    "4 bits": (product(lambda: table(64, 32, 4)), 64 * 32 // 2 + 16 * 2),
    "4 bits in groups": (product(lambda: table(64, 32, 4, groups=4)), 64 * 32 // 2 + 4 * 16 * 2),
    "6 bits": (product(lambda: table(64, 32, 6)), 64 * 32 * 6 // 8 + 64 * 2),
    "2 bits, odd": (product(lambda: table(63, 5, 2), "odd"), -(-63 * 5 * 2 // 8)),  # 4 entries are too few to count
    "8 bits, scaled": (product(lambda: scaled(64, 32, 16)), 64 * 32 + 16 * 2 * 2),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    inputs: Shapes = {"x": ((1, 32), F16), "odd": ((1, 5), F16)}
    builds = {name: build for name, (build, _) in WEIGHTS.items()}
    return save_functions(tmp_path_factory.mktemp("weights") / "p.mlpackage", inputs, builds)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_count_as_stored(name: str, weights: dict[str, Any]) -> None:
    assert traffic(weights[name]) == Traffic(WEIGHTS[name][1], 0, 0, 0)


def test_a_weight_counts_for_every_operation_that_reads_it(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        weight = mb.const(val=np.full((8, 8), 0.5, F16))
        # A view passes it on unread; one operation reads it once, however often it takes it.
        seen = mb.reshape(x=weight, shape=(1, 8, 8))
        x = mb.matmul(x=values["x"], y=weight)
        return [mb.matmul(x=x, y=seen), mb.mul(x=weight, y=weight)]

    assert of(tmp_path, {"x": ((1, 8), F16)}, build).weights == 3 * 128


def rows_of(build_table: Callable[[], Any], ids: str = "three") -> Callable[[Any], list[Any]]:
    def build(values: Any) -> list[Any]:
        found = mb.gather(x=build_table(), indices=values[ids], axis=0)
        return [mb.relu(x=found), mb.exp(x=found)]  # read by many, looked up once

    return build


LOOKUPS: dict[str, tuple[Callable[[Any], list[Any]], int]] = {
    "dense": (rows_of(lambda: np.full((64, 32), 0.5, F16)), 3 * 32 * 2),
    "more rows than there are": (rows_of(lambda: np.full((64, 32), 0.5, F16), "hundred"), 64 * 32 * 2),
    "4 bits": (rows_of(lambda: table(64, 32, 4)), 3 * 32 // 2 + 16 * 2),
    "three of eight tables at most": (rows_of(lambda: table(64, 32, 6, groups=8)), 3 * 32 * 6 // 8 + 3 * 64 * 2),
    "both tables": (rows_of(lambda: table(64, 32, 6, groups=2)), 3 * 32 * 6 // 8 + 2 * 64 * 2),
    "a scale a row": (rows_of(lambda: scaled(64, 32, 64)), 3 * 32 + 3 * 2 * 2),
    "columns": (
        lambda v: [mb.gather(x=table(64, 32, 6, groups=8), indices=v["three"], axis=1)],
        3 * 64 * 6 // 8 + 8 * 64 * 2,
    ),
    "pairs": (lambda v: [mb.gather_nd(x=numbers(), indices=v["pairs"])], 3 * 10 * 2),
    "elements": (lambda v: [mb.gather_along_axis(x=numbers(), indices=v["places"], axis=0)], 3 * 10 * 2),
    "a slice from where an input says": (
        lambda v: [mb.slice_by_size(x=numbers(), begin=v["two"], size=(3, 10))],
        3 * 10 * 2,
    ),
    "a slice": (lambda v: [mb.slice_by_index(x=numbers(), begin=(2, 0), end=(5, 10))], 3 * 10 * 2),
    "both halves": (lambda v: list(mb.split(x=numbers(), split_sizes=[4, 8], axis=0)), 12 * 10 * 2),
}


def numbers() -> Any:
    return mb.const(val=np.random.default_rng(0).normal(size=(12, 10)).astype(F16))


@pytest.fixture(scope="module")
def lookups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    inputs: Shapes = {
        "three": ((1, 3), I32),
        "hundred": ((1, 100), I32),
        "pairs": ((3, 1), I32),
        "places": ((3, 10), I32),
        "two": ((2,), I32),
    }
    builds = {name: build for name, (build, _) in LOOKUPS.items()}
    return save_functions(tmp_path_factory.mktemp("lookups") / "p.mlpackage", inputs, builds)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_or_slice_of_a_table_counts_what_it_passes_on(name: str, lookups: dict[str, Any]) -> None:
    assert traffic(lookups[name]) == Traffic(LOOKUPS[name][1], 0, 0, 0)


def test_older_compressed_formats_count_as_stored(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        lut = mb.constexpr_lut_to_dense(
            indices=np.arange(32 * 16 // 2, dtype=np.uint8),
            lut=np.arange(16).astype(F16),
            shape=np.array([32, 16], np.uint32),
        )
        affine = mb.constexpr_affine_dequantize(
            quantized_data=np.ones((32, 16), np.int8),
            zero_point=np.int8(0),
            scale=np.arange(1, 33).astype(F16),
            axis=0,
        )
        rows = mb.gather(x=affine, indices=values["ids"], axis=0)
        return [mb.matmul(x=values["x"], y=mb.add(x=lut, y=affine), transpose_y=True), rows]

    inputs: Shapes = {"x": ((1, 16), F16), "ids": ((2,), I32)}
    path = save_program(tmp_path / "p.mlpackage", inputs, build, target=ct.target.iOS16)
    actual = traffic(Package.open(path).function())
    # Both whole in the addition; two rows, each with its scale, in the lookup.
    assert actual.weights == (32 * 16 // 2 + 16 * 2) + (32 * 16 + 32 * 2) + (2 * 16 + 2 * 2)


# The cache.

STATE = ((4, 2, 16, 6), F16)
QUERY = ((1, 2, 3, 6), F16)
LAYER = 2 * 16 * 6 * 2
ROW = 2 * 6 * 2


def layer(x: Any, number: int, slots: int = 16) -> Any:
    return mb.slice_by_index(x=x, begin=(number, 0, 0, 0), end=(number + 1, 2, slots, 6))


def write(state: Any, new: Any, number: int = 0) -> Any:
    x = mb.slice_update(x=mb.read_state(input=state), update=new, begin=(number, 0, 5, 0), end=(number + 1, 2, 6, 6))
    return mb.coreml_update_state(state=state, value=x)


def scores(values: Any, key: Any) -> Any:
    return mb.matmul(x=values["q"], y=key, transpose_y=True)


CACHES: dict[str, tuple[Callable[[Any], list[Any]], int, int]] = {
    "a slice": (lambda v: [scores(v, layer(mb.read_state(input=v["s"]), 1))], LAYER, 0),
    "the whole": (lambda v: [mb.relu(x=mb.read_state(input=v["s"]))], 4 * LAYER, 0),
    "a slice of a slice": (lambda v: [scores(v, layer(layer(mb.read_state(input=v["s"]), 1), 0, 8))], LAYER // 2, 0),
    "a transposed slice": (
        lambda v: [mb.matmul(x=v["q"], y=mb.transpose(x=layer(mb.read_state(input=v["s"]), 1), perm=(0, 1, 3, 2)))],
        LAYER,
        0,
    ),
    "a converted slice": (
        lambda v: [mb.exp(x=mb.cast(x=layer(mb.read_state(input=v["s"]), 1), dtype="fp32"))],
        LAYER,  # in the type of the state
        0,
    ),
    "heads one by one": (
        lambda v: [
            mb.matmul(x=v["q1"], y=head, transpose_y=True)
            for head in mb.split(x=layer(mb.read_state(input=v["s"]), 1), num_splits=2, axis=1)
        ],
        LAYER,
        0,
    ),
    "twice": (lambda v: [f(x=layer(mb.read_state(input=v["s"]), 1)) for f in (mb.exp, mb.relu)], 2 * LAYER, 0),
    "rows that are looked up": (
        lambda v: [mb.relu(x=mb.gather(x=mb.read_state(input=v["s"]), indices=v["ids"], axis=0))],
        2 * LAYER,
        0,
    ),
    "only its shape": (lambda v: [mb.shape(x=mb.read_state(input=v["s"]))], 0, 0),
    "written in place, then read": (lambda v: [scores(v, layer(write(v["s"], v["new"]), 0))], LAYER, ROW),
    "read where it is joined": (
        lambda v: [scores(v, mb.concat(values=[layer(mb.read_state(input=v["s"]), 0), v["new"]], axis=2))],
        LAYER,
        0,
    ),
    "two rows, one write": (
        lambda v: [
            mb.coreml_update_state(
                state=v["s"],
                value=mb.slice_update(
                    x=mb.slice_update(
                        x=mb.read_state(input=v["s"]), update=v["new"], begin=(0, 0, 1, 0), end=(1, 2, 2, 6)
                    ),
                    update=v["new"],
                    begin=(1, 0, 1, 0),
                    end=(2, 2, 2, 6),
                ),
            )
        ],
        0,
        2 * ROW,
    ),
    "written anew": (
        lambda v: [mb.coreml_update_state(state=v["s"], value=mb.mul(x=mb.read_state(input=v["s"]), y=F16(0.5)))],
        4 * LAYER,
        4 * LAYER,
    ),
    "rolled on": (
        lambda v: [
            mb.coreml_update_state(
                state=v["s"],
                value=mb.concat(
                    values=[
                        mb.slice_by_index(x=mb.read_state(input=v["s"]), begin=(0, 0, 1, 0), end=(4, 2, 16, 6)),
                        mb.slice_by_index(x=mb.read_state(input=v["s"]), begin=(0, 0, 0, 0), end=(4, 2, 1, 6)),
                    ],
                    axis=2,
                ),
            )
        ],
        4 * LAYER,
        4 * LAYER,
    ),
    "copied to another": (
        lambda v: [mb.coreml_update_state(state=v["s"], value=mb.read_state(input=v["t"]))],
        4 * LAYER,
        4 * LAYER,
    ),
}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    inputs: Shapes = {"q": QUERY, "q1": ((1, 1, 3, 6), F16), "new": ((1, 2, 1, 6), F16), "ids": ((2,), I32)}
    builds = {name: build for name, (build, *_) in CACHES.items()}
    path = tmp_path_factory.mktemp("caches") / "p.mlpackage"
    return save_functions(path, inputs, builds, {"s": STATE, "t": STATE})


@pytest.mark.parametrize("name", CACHES)
def test_cache_traffic_of_a_state(name: str, caches: dict[str, Any]) -> None:
    _, kv_read, kv_written = CACHES[name]
    assert traffic(caches[name]) == Traffic(0, kv_read, kv_written, 0)


def read_only(values: Any, past: str, join: bool) -> list[Any]:
    """Attention over a cache that comes in, with new keys that go out: joined with it, or in two parts."""
    new = mb.mul(x=values["new"], y=F16(0.5))
    old = layer(values[past], 2)
    keys = [mb.concat(values=[old, new], axis=2)] if join else [old, new]
    return [*(scores(values, key) for key in keys), mb.expand_dims(x=new, axes=[0])]


@pytest.mark.parametrize(
    ("past", "join", "is_cache"),
    [("x", True, True), ("keyCache", False, True), ("k_cache_0", True, True), ("x", False, False)],
)
def test_cache_traffic_of_inputs_and_outputs(past: str, join: bool, is_cache: bool, tmp_path: Path) -> None:
    inputs: Shapes = {"q": QUERY, "new": ((1, 2, 1, 6), F16), past: STATE}
    actual = of(tmp_path, inputs, lambda values: read_only(values, past, join))
    assert (actual.kv_read, actual.kv_written) == ((LAYER, ROW) if is_cache else (0, 0))


# Caches that come in, are changed before attention reads them, and go out.

SLOTS = {"k": ((1, 2, 16, 6), F16), "v": ((1, 2, 16, 6), F16)}
WHOLE = 2 * 2 * 16 * 6 * 2


def attended(values: Any, k: Any, v: Any) -> list[Any]:
    weights = mb.softmax(x=mb.add(x=mb.matmul(x=values["q"], y=k, transpose_y=True), y=values["mask"]), axis=-1)
    return [mb.matmul(x=weights, y=v), k, v]


def changed(change: Callable[[Any, Any, Any], Any]) -> Callable[[Any], list[Any]]:
    """Attention over two caches, each changed by `change(values, cache, new rows)`."""

    def build(values: Any) -> list[Any]:
        new = mb.mul(x=values["new"], y=F16(0.5))
        return attended(values, change(values, values["k"], new), change(values, values["v"], new))

    return build


def kept(values: Any) -> Any:
    return mb.sub(x=F16(1), y=values["at"])


def hit(values: Any) -> Any:
    return mb.greater(x=values["at"], y=F16(0.5))


CHANGED: dict[str, tuple[Callable[[Any, Any, Any], Any], int, int]] = {
    # How it is changed; bytes read by attention and of new rows.
    "multiplied and added": (
        lambda v, old, new: mb.add(x=mb.mul(x=old, y=kept(v)), y=mb.mul(x=new, y=v["at"])),
        WHOLE,
        2 * ROW,
    ),
    "new first": (
        lambda v, old, new: mb.add(x=mb.mul(x=v["at"], y=new), y=mb.mul(x=kept(v), y=old)),
        WHOLE,
        2 * ROW,
    ),
    "the difference added": (
        lambda v, old, new: mb.add(x=old, y=mb.mul(x=mb.sub(x=new, y=old), y=v["at"])),
        WHOLE,
        2 * ROW,
    ),
    "selected": (lambda v, old, new: mb.select(cond=hit(v), a=new, b=old), WHOLE, 2 * ROW),
    "selected, written out before": (
        lambda v, old, new: mb.select(cond=hit(v), a=mb.tile(x=new, reps=(1, 1, 16, 1)), b=old),
        WHOLE,
        2 * ROW,
    ),
    "updated": (
        lambda v, old, new: mb.slice_update(x=old, update=new, begin=(0, 0, 3, 0), end=(1, 2, 4, 6)),
        WHOLE,
        2 * ROW,
    ),
    # The oldest row leaves, where it is joined.
    "moved on": (
        lambda v, old, new: mb.concat(
            values=[mb.slice_by_index(x=old, begin=(0, 0, 1, 0), end=(1, 2, 16, 6)), new], axis=2
        ),
        WHOLE // 16 * 15,
        2 * ROW,
    ),
    # A product of its own gives the rows: which of them are new does not show, so all are.
    "added by a product": (
        lambda v, old, new: mb.add(x=mb.mul(x=old, y=kept(v)), y=mb.matmul(x=v["at"], y=new)),
        WHOLE,
        WHOLE,
    ),
}
ATTENDED: Shapes = {
    **SLOTS,
    "q": QUERY,
    "new": ((1, 2, 1, 6), F16),
    "at": ((1, 1, 16, 1), F16),
    "mask": ((1, 1, 1, 16), F16),
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    builds = {name: changed(change) for name, (change, *_) in CHANGED.items()}
    # The same into states.
    for name, (change, *_) in CHANGED.items():

        def build(values: Any, change: Any = change) -> list[Any]:
            new = mb.mul(x=values["new"], y=F16(0.5))
            caches = []
            for state in ("ks", "vs"):
                value = change(values, mb.read_state(input=values[state]), new)
                caches.append(mb.coreml_update_state(state=values[state], value=value))
            return attended(values, *caches)[:1]

        builds[f"{name}, states"] = build
    path = tmp_path_factory.mktemp("changes") / "p.mlpackage"
    return save_functions(path, ATTENDED, builds, {"ks": SLOTS["k"], "vs": SLOTS["v"]})


@pytest.mark.parametrize("name", CHANGED)
def test_a_cache_is_followed_through_its_change(name: str, changes: dict[str, Any]) -> None:
    _, kv_read, kv_written = CHANGED[name]
    actual = traffic(changes[name])
    assert (actual.kv_read, actual.kv_written) == (kv_read, kv_written)
    assert {cache["name"] for cache in cache_table(Caches(Flow(changes[name]))) if cache["kind"] == "input"} == {
        "k",
        "v",
    }
    model = ContextModel(Flow(changes[name]))
    assert model.context_length == 16
    written = kv_written if kv_written < WHOLE else 2 * kv_written
    assert model.at(32).kv_written == written
    assert model.at(32).kv_read == 2 * kv_read


@pytest.mark.parametrize("name", CHANGED)
def test_a_state_is_followed_through_its_change(name: str, changes: dict[str, Any]) -> None:
    _, kv_read, kv_written = CHANGED[name]
    actual = traffic(changes[f"{name}, states"])
    joined = name == "moved on"  # joined, then written, then read by attention
    assert (actual.kv_read, actual.kv_written) == (kv_read + joined * WHOLE, kv_written)
    assert ContextModel(Flow(changes[f"{name}, states"])).context_length == 16


def test_what_a_mask_write_moves_is_materialised(changes: dict[str, Any]) -> None:
    cache, row, mask = WHOLE // 2, ROW, 16 * 2
    of_step = {record.name: record for record in records(Flow(changes["multiplied and added"]))}
    written = [record for record in of_step.values() if record.written == cache]
    # For each cache: the kept part, the spread rows, their sum; and identities that name the outputs.
    assert sorted((record.type, record.read) for record in written) == sorted(
        2 * [("mul", cache + mask), ("mul", row + mask), ("add", 2 * cache), ("identity", cache)]
    )
    # Every share is that of an operation which attends or writes, not of the mask's arithmetic.
    assert {record.type for record in of_step.values() if record.kv_read} == {"matmul"}


def test_rotations_and_gates_are_no_mask_writes(tmp_path: Path) -> None:
    def rotated(values: Any, x: Any) -> Any:
        first, second = mb.split(x=x, num_splits=2, axis=3)
        turned = mb.concat(values=[mb.mul(x=second, y=F16(-1)), first], axis=3)
        return mb.add(x=mb.mul(x=x, y=values["cos"]), y=mb.mul(x=turned, y=values["sin"]))

    def build(values: Any) -> list[Any]:
        query, key = rotated(values, values["a"]), rotated(values, values["b"])
        return [mb.softmax(x=mb.matmul(x=query, y=key, transpose_y=True), axis=-1)]

    rows = ((1, 2, 5, 6), F16)
    table = ((1, 1, 5, 6), F16)
    actual = of(tmp_path, {"a": rows, "b": rows, "cos": table, "sin": table}, build)
    assert (actual.kv_read, actual.kv_written) == (0, 0)


def test_masks_queries_and_rotations_are_no_caches(tmp_path: Path) -> None:
    def build(values: Any) -> list[Any]:
        query = mb.matmul(x=values["q"], y=values["rotation"])
        key = mb.mul(x=values["new"], y=F16(0.5))
        masked = mb.add(x=mb.matmul(x=query, y=key, transpose_y=True), y=mb.concat(values=[values["mask"]] * 3, axis=2))
        return [mb.softmax(x=masked, axis=-1)]

    inputs: Shapes = {
        "q": QUERY,
        "new": ((1, 2, 1, 6), F16),
        "mask": ((1, 1, 1, 1), F16),
        "rotation": ((1, 1, 6, 6), F16),
    }
    actual = of(tmp_path, inputs, build)
    assert (actual.kv_read, actual.kv_written) == (0, 0)


# Repetition.

X = (1, 2, 1, 5, 6)
SIZE = 2 * 5 * 6 * 2
REPEATED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "tile": (lambda v: mb.tile(x=v["x"], reps=(1, 1, 3, 1, 1)), 3 * SIZE),
    "tile by one": (lambda v: mb.tile(x=v["x"], reps=(1, 1, 1, 1, 1)), 0),
    "concat of one value": (lambda v: mb.concat(values=[v["x"]] * 3, axis=2), 3 * SIZE),
    "concat of views of one value": (
        lambda v: mb.concat(values=[mb.squeeze(x=v["x"], axes=[2]), mb.reshape(x=v["x"], shape=(1, 2, 5, 6))], axis=1),
        2 * SIZE,
    ),
    "every head twice": (lambda v: mb.concat(values=[v["x"], v["x"], v["y"], v["y"]], axis=1), 4 * SIZE),
    "stack of one value": (lambda v: mb.stack(values=[v["x3"], v["x3"]], axis=0), 2 * 5 * 6 * 2),
    "every head twice, each sliced anew": (
        lambda v: mb.concat(
            values=[
                mb.slice_by_index(x=v["x"], begin=(0, head, 0, 0, 0), end=(1, head + 1, 1, 5, 6))
                for head in (0, 0, 1, 1)
            ],
            axis=1,
        ),
        2 * SIZE,
    ),
    "different slices": (
        lambda v: mb.concat(
            values=[
                mb.slice_by_index(x=v[name], begin=(0, head, 0, 0, 0), end=(1, head + 1, 1, 5, 6))
                for name, head in (("x", 0), ("x", 1), ("y", 0), ("y", 1))
            ],
            axis=1,
        ),
        0,
    ),
    "concat of two values": (lambda v: mb.concat(values=[v["x"], v["y"]], axis=1), 0),
    "concat with one more": (lambda v: mb.concat(values=[v["x"], v["x"], v["y"]], axis=1), 0),
    "halves swapped": (lambda v: mb.concat(values=mb.split(x=v["x"], num_splits=2, axis=1)[::-1], axis=1), 0),
    "lookup of each index twice": (
        lambda v: mb.gather(x=v["x"], indices=np.array([1, 1, 0, 0], I32), axis=1),
        2 * SIZE,
    ),
    "lookup of more than there is": (lambda v: mb.gather(x=v["x"], indices=v["three"], axis=1), 3 * SIZE // 2),
    "lookup in another order": (lambda v: mb.gather(x=v["x"], indices=np.array([1, 0], I32), axis=1), 0),
    "product with ones": (lambda v: mb.mul(x=v["x"], y=np.ones((1, 2, 3, 5, 6), F16)), 3 * SIZE),
    "sum with zeros": (lambda v: mb.add(x=np.zeros((1, 2, 3, 5, 6), F16), y=v["x"]), 3 * SIZE),
    "product with filled ones": (
        lambda v: mb.mul(x=v["x"], y=mb.fill(shape=(1, 2, 3, 5, 6), value=F16(1))),
        3 * SIZE,
    ),
    "ones less a value": (lambda v: mb.sub(x=np.zeros((1, 2, 3, 5, 6), F16), y=v["x"]), 0),
    "product with twos": (lambda v: mb.mul(x=v["x"], y=np.full((1, 2, 3, 5, 6), 2, F16)), 0),
    "product with ones of its shape": (lambda v: mb.mul(x=v["x"], y=np.ones(X, F16)), 0),
    "nearest neighbours": (
        lambda v: mb.upsample_nearest_neighbor(x=v["x4"], scale_factor_height=2, scale_factor_width=3),
        6 * SIZE,
    ),
}


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    inputs: Shapes = {
        "x": (X, F16),
        "y": (X, F16),
        "x3": ((5, 6), F16),
        "x4": ((1, 2, 5, 6), F16),
        "three": ((3,), I32),
    }
    builds = {name: lambda values, build=build: [build(values)] for name, (build, _) in REPEATED.items()}
    return save_functions(tmp_path_factory.mktemp("repeated") / "p.mlpackage", inputs, builds)


@pytest.mark.parametrize("name", REPEATED)
def test_repetition_counts_what_only_repeats(name: str, repeated: dict[str, Any]) -> None:
    actual = traffic(repeated[name])
    assert (actual.repetition, actual.kv_read) == (REPEATED[name][1], 0)
    assert actual.total == actual.weights + 2 * REPEATED[name][1]


def test_open_dimensions_are_named_and_not_guessed(tmp_path: Path) -> None:
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 4)
            self.linear = torch.nn.Linear(4, 4, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.linear(self.embedding(ids))
            return torch.cat([x, x], dim=1)

    with quiet():
        model = ct.convert(
            torch.jit.trace(Module().eval(), torch.zeros(1, 3, dtype=torch.int32)),
            inputs=[ct.TensorType("ids", (1, ct.RangeDim(1, 8, default=3)), np.int32)],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
        model.save(str(tmp_path / "open.mlpackage"))
    actual = traffic(Package.open(tmp_path / "open.mlpackage").function())
    assert (actual.weights, actual.kv_read, actual.repetition, actual.total) == (4 * 4 * 2, 0, None, None)
    assert [line.split(":")[0] for line in actual.unknown] == ["weights", "repetition"]
