"""Reading Hugging Face folders: layouts, names, shapes, values, and what is refused."""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from ane_layers.checkpoint import Checkpoint, CheckpointError, to_float16_checked

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TIED = {HEAD: EMBEDDING}
Tensors = dict[str, torch.Tensor]


def tensors(extra: Mapping[str, torch.Tensor] | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (6, 4), NORM: (4,), "model.layers.0.mlp.up_proj.weight": (8, 4)}
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return drawn | dict(extra or {})


def shapes_of(stored: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def write(folder: Path, shards: dict[str, Tensors], index: Any = None, config: Any = None) -> Path:
    """Writes shards; ``index`` is a weight_map, or True for the one that fits the shards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config if config is not None else {"model_type": "exaone4"}))
    for file, stored in shards.items():
        save_file(stored, folder / file)
    if index is True:
        index = {name: file for file, stored in shards.items() for name in stored}
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def single(folder: Path, stored: Tensors, config: Any = None) -> Path:
    return write(folder, {"model.safetensors": stored}, config=config)


def refusal(folder: Path, *parts: str) -> str:
    """Opening must fail with one line that holds every part, and must leave the folder as it was."""
    before = sorted(folder.rglob("*")) if folder.is_dir() else None
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    assert before == (sorted(folder.rglob("*")) if folder.is_dir() else None)
    return message


@pytest.fixture(autouse=True)
def unexpected_warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_file_matches_what_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = tensors(dtype=dtype)
    checkpoint = Checkpoint.open(str(single(tmp_path / "c", stored, {"model_type": "exaone4", "hidden_size": 4})))
    assert checkpoint.folder == tmp_path / "c"
    assert checkpoint.config == {"model_type": "exaone4", "hidden_size": 4}
    assert set(checkpoint) == set(stored)
    assert len(checkpoint) == 3
    assert NORM in checkpoint
    assert HEAD not in checkpoint
    assert cast(object, 3) not in checkpoint
    for name, tensor in stored.items():
        assert checkpoint[name].dtype == checkpoint.dtype(name) == dtype
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.file(name) == tmp_path / "c" / "model.safetensors"
        assert torch.equal(checkpoint[name], tensor)
    assert checkpoint.check(shapes_of(stored)) == {name: name for name in stored}


def test_names_not_stored_are_key_errors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path, tensors()))
    assert checkpoint.get(HEAD) is None
    for look in (checkpoint.__getitem__, checkpoint.shape, checkpoint.dtype, checkpoint.file, checkpoint.float16):
        with pytest.raises(KeyError, match=HEAD):
            look(HEAD)


def test_a_tensor_changed_in_memory_leaves_the_file_alone(tmp_path: Path) -> None:
    stored = tensors()
    Checkpoint.open(single(tmp_path, stored))[NORM].zero_()
    assert torch.equal(Checkpoint.open(tmp_path)[NORM], stored[NORM])


def test_shards_with_odd_names_follow_the_weight_map(tmp_path: Path) -> None:
    stored = tensors()
    shards = {"weights final (2).safetensors": {EMBEDDING: stored[EMBEDDING]},
              "model-00007-of-00002.safetensors": {NORM: stored[NORM]},
              "part_b": {name: t for name, t in stored.items() if "layers" in name}}  # fmt: skip
    checkpoint = Checkpoint.open(write(tmp_path, shards, index=True))
    assert set(checkpoint) == set(stored)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in stored.items())
    assert checkpoint.file(NORM).name == "model-00007-of-00002.safetensors"


def test_a_stale_copy_in_another_shard_loses_to_the_weight_map(tmp_path: Path) -> None:
    right, stale = torch.ones(4), torch.zeros(4)
    shards = {"a.safetensors": {NORM: stale, "x": torch.ones(2)}, "b.safetensors": {NORM: right}}
    write(tmp_path, shards, index={"x": "a.safetensors", NORM: "b.safetensors"})
    with pytest.warns(UserWarning, match=rf"a\.safetensors.*{NORM}.*does not place"):
        checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint[NORM], right)
    assert checkpoint.file(NORM).name == "b.safetensors"


def test_index_that_maps_a_tensor_to_a_shard_that_lacks_it(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": {"x": torch.ones(2)}}, index={"x": "a.safetensors", NORM: "a.safetensors"})
    refusal(tmp_path, "model.safetensors.index.json", NORM, "a.safetensors")


def test_unused_shard_warns(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"y": torch.ones(2)}}
    write(tmp_path, shards, index={"x": "a.safetensors"})
    with pytest.warns(UserWarning, match=r"does not use 'b\.safetensors'"):
        assert list(Checkpoint.open(tmp_path)) == ["x"]


def test_shard_missing_on_disk(tmp_path: Path) -> None:
    write(tmp_path, {"a.safetensors": {"x": torch.ones(2)}}, index={"x": "a.safetensors", "y": "b.safetensors"})
    refusal(tmp_path, "model.safetensors.index.json", "b.safetensors", "not in the folder")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x", "sub/x", "..\\x", "C:x", "..", ".", "", 7, None])
def test_shard_names_that_leave_the_folder_are_refused(tmp_path: Path, shard: Any) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    folder = write(tmp_path / "c", {}, index={"x": shard})
    refusal(folder, "model.safetensors.index.json", repr(shard), "plain file name")


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    from transformers import Exaone4ForCausalLM

    model = tiny_exaone4(tie=True)
    model.save_pretrained(tmp_path)
    wrong = {name: torch.zeros_like(t) for name, t in model.state_dict().items() if name != HEAD}
    write(tmp_path, {"part.safetensors": wrong}, index=True, config=model.config.to_dict())
    with pytest.warns(UserWarning, match=r"model\.safetensors\.index\.json is not used"):
        checkpoint = Checkpoint.open(tmp_path)
    loaded = Exaone4ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(checkpoint[name], loaded[name]) for name in checkpoint)


def test_an_index_may_use_model_safetensors_as_a_shard(tmp_path: Path) -> None:
    shards = {"model.safetensors": {"x": torch.ones(2)}, "more.safetensors": {"y": torch.ones(2)}}
    assert set(Checkpoint.open(write(tmp_path, shards, index=True))) == {"x", "y"}


@pytest.mark.parametrize("text", ["{", "[1]", "null", "", "{}", '{"weight_map": []}', '{"weight_map": {}}',
                                  b"\xff\xfe", "[" * 100_000])  # fmt: skip
def test_broken_index(tmp_path: Path, text: str | bytes) -> None:
    write(tmp_path, {"a": {"x": torch.ones(2)}})
    (tmp_path / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refusal(tmp_path, "model.safetensors.index.json")


# ---- folders that are not a checkpoint -------------------------------------------------------------------------------


def test_no_such_folder(tmp_path: Path) -> None:
    refusal(tmp_path / "LGAI-EXAONE", "LGAI-EXAONE", "no such folder", "hf download")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    refusal(single(tmp_path, tensors()) / "model.safetensors", "model.safetensors", "is a file", "folder")


def test_directory_without_config(tmp_path: Path) -> None:
    (single(tmp_path, tensors()) / "config.json").unlink()
    refusal(tmp_path, "config.json", "download")


@pytest.mark.parametrize("text", ["{", "", "[1]", '"exaone4"', "garbage", b"\xff\xfe\x00"])
def test_broken_config(tmp_path: Path, text: str | bytes) -> None:
    single(tmp_path, tensors())
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refusal(tmp_path, "config.json")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth"])
def test_bin_only_says_how_to_convert(tmp_path: Path, file: str) -> None:
    write(tmp_path, {})
    (tmp_path / file).write_bytes(b"pickle")
    refusal(tmp_path, file, "safetensors", "save_pretrained")


def test_safetensors_under_other_names_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"model-00001-of-00002.safetensors": tensors()})
    refusal(tmp_path, "model-00001-of-00002.safetensors", "model.safetensors.index.json")


def test_folder_without_weights(tmp_path: Path) -> None:
    refusal(write(tmp_path, {}), "model.safetensors")


def with_length(data: bytes, length: int) -> bytes:
    return struct.pack("<Q", length) + data[8:]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],  # truncated in the tensors,
        lambda data: data[:20],  # in the header,
        lambda data: data[:4],  # in the header's length
        lambda data: b"",
        lambda data: data + b"xx",
        lambda data: with_length(data, 5),
        lambda data: with_length(data, 10**12),
        lambda data: with_length(data, len(data)),
        lambda data: data[:8] + b"}" + data[9:],
    ],
)
def test_damaged_safetensors(tmp_path: Path, damage: Any, sharded: bool) -> None:
    file = "a.safetensors" if sharded else "model.safetensors"
    path = write(tmp_path, {file: tensors()}, index=True if sharded else None) / file
    path.write_bytes(damage(path.read_bytes()))
    refusal(tmp_path, file, "download it again")


def test_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refusal(tmp_path, "model.safetensors", "git lfs pull")


# ---- names and shapes ------------------------------------------------------------------------------------------------


def check_refusal(folder: Path, expected: Mapping[str, tuple[int, ...]], **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder).check(expected, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_stray_input_layernorm_is_refused_by_name(tmp_path: Path) -> None:
    expected = shapes_of(tensors())
    stray = {"model.layers.0.input_layernorm.weight": torch.ones(4), "other": torch.ones(1)}
    message = check_refusal(single(tmp_path, tensors(stray)), expected)
    assert "'model.layers.0.input_layernorm.weight'" in message
    assert "'other'" in message
    assert "model.safetensors" in message


def test_every_unassigned_parameter_is_named(tmp_path: Path) -> None:
    expected = shapes_of(tensors()) | {"model.layers.0.mlp.gate_proj.weight": (8, 4), "model.extra": (1,)}
    message = check_refusal(single(tmp_path, tensors()), expected)
    assert "'model.layers.0.mlp.gate_proj.weight'" in message
    assert "'model.extra'" in message


@pytest.mark.parametrize("name", list(tensors()))
def test_any_one_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    stored = tensors()
    del stored[name]
    assert repr(name) in check_refusal(single(tmp_path, stored), shapes_of(tensors()))


LAYER = {"q_proj": (3, 4), "o_proj": (4, 3), "up_proj": (5, 4), "down_proj": (4, 5), "norm": (4,)}


def test_the_same_name_over_layers_is_listed_compactly(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.input_layernorm.weight": torch.ones(4) for i in (0, 1, 2, 3, 7, 10, 11)}
    message = check_refusal(single(tmp_path, tensors(extra)), shapes_of(tensors()))
    assert "'model.layers.{0…3,7,10,11}.input_layernorm.weight'" in message


def test_a_wrong_size_is_told_in_a_short_line(tmp_path: Path) -> None:
    """It changes the shape of every tensor of every layer."""
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(30) for name, shape in LAYER.items()}
    checkpoint = single(tmp_path, {name: torch.ones(shape) for name, shape in shapes.items()})
    wanted = {name: tuple(6 if size == 4 else size for size in shape) for name, shape in shapes.items()}
    message = check_refusal(checkpoint, wanted)
    assert "'model.layers.{0…29}.down_proj.weight' has shape (4, 5) in model.safetensors, expected (6, 5)" in message
    assert "'model.layers.{0…29}.norm.weight' has shape (4,) in model.safetensors, expected (6,)" in message
    assert message.endswith("; 90 more tensors have other shapes than expected")
    assert len(message.replace(str(tmp_path), "")) < 300  # all of them were a thousand
    # Missing names are cut likewise: four of five in each of 30 layers.
    message = check_refusal(single(tmp_path, tensors()), shapes)
    assert message.count("model.layers.{0…29}.") == 4
    assert " and 30 more; " in message


def test_wrong_shape_names_tensor_both_shapes_and_file(tmp_path: Path) -> None:
    expected = shapes_of(tensors()) | {NORM: (5,), EMBEDDING: (4, 6)}
    message = check_refusal(single(tmp_path, tensors()), expected)
    for part in (NORM, "(5,)", "(4,)", EMBEDDING, "(6, 4)", "(4, 6)", "model.safetensors"):
        assert part in message


def test_rotary_frequencies_are_the_only_ignored_names(tmp_path: Path) -> None:
    buffers = {
        "model.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    checkpoint = Checkpoint.open(single(tmp_path, tensors(buffers)))
    assert checkpoint.check(shapes_of(tensors()))
    assert not set(buffers) & set(checkpoint)
    assert set(checkpoint.ignored) == set(buffers)
    refused = [
        "inv_freq",
        "model.inv_freq",
        "model.rotary_emb.inv_freq.weight",
        "model.position_ids",
        "my_rotary_emb.inv_freq",
    ]
    for name in refused:
        assert repr(name) in check_refusal(single(tmp_path, tensors({name: torch.ones(2)})), shapes_of(tensors()))


# ---- tied embedding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_expected", [True, False])
def test_tied_without_head_uses_the_embedding_once(tmp_path: Path, head_expected: bool) -> None:
    expected = shapes_of(tensors()) | ({HEAD: (6, 4)} if head_expected else {})
    checkpoint = Checkpoint.open(single(tmp_path, tensors()))
    sources = checkpoint.check(expected, tied=TIED)
    assert set(sources) == set(expected)
    if head_expected:
        assert sources[HEAD] == EMBEDDING
        assert checkpoint[sources[HEAD]].data_ptr() == checkpoint[EMBEDDING].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tied_with_identical_head_is_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = tensors()
    stored[HEAD] = stored[EMBEDDING].to(dtype, copy=True)
    sources = Checkpoint.open(single(tmp_path, stored)).check(shapes_of(stored), tied=TIED)
    assert sources[HEAD] == EMBEDDING


def test_tied_with_different_head_warns_and_the_embedding_wins(tmp_path: Path) -> None:
    stored = tensors()
    stored[HEAD] = stored[EMBEDDING].clone()
    stored[HEAD][5, 3] += 1
    checkpoint = Checkpoint.open(single(tmp_path, stored))
    with pytest.warns(UserWarning, match=rf"{HEAD}.*differs.*{EMBEDDING}"):
        assert checkpoint.check(shapes_of(stored), tied=TIED)[HEAD] == EMBEDDING


def test_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    message = check_refusal(single(tmp_path, tensors({HEAD: torch.ones(7, 4)})), shapes_of(tensors()), tied=TIED)
    assert HEAD in message
    assert "(7, 4)" in message
    assert "(6, 4)" in message


def test_tied_and_the_embedding_itself_missing(tmp_path: Path) -> None:
    stored = tensors()
    stored[HEAD] = stored.pop(EMBEDDING)
    message = check_refusal(single(tmp_path, stored), shapes_of(tensors()) | {HEAD: (6, 4)}, tied=TIED)
    assert repr(EMBEDDING) in message


def test_tied_to_a_tensor_that_is_not_stored(tmp_path: Path) -> None:
    assert "'absent'" in check_refusal(single(tmp_path, tensors()), shapes_of(tensors()), tied={HEAD: "absent"})


@pytest.mark.parametrize(("config", "said"), [({"tie_word_embeddings": False}, "false"), ({"a": 1}, "not set")])
def test_untied_without_head_names_both_facts(tmp_path: Path, config: Any, said: str) -> None:
    message = check_refusal(single(tmp_path, tensors(), config), shapes_of(tensors()) | {HEAD: (6, 4)})
    assert f"tie_word_embeddings is {said}" in message
    assert "lm_head.weight is absent" in message
    assert "config.json" in message
    assert "model.safetensors" in message


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    stored = tensors(dtype=dtype)
    stored[EMBEDDING][5, 3] = value
    checkpoint = Checkpoint.open(single(tmp_path, stored))
    assert torch.equal(checkpoint[NORM], stored[NORM])
    for read in (checkpoint.__getitem__, checkpoint.float16):
        for _ in range(2):  # a failed read must not count as a checked one
            with pytest.raises(CheckpointError, match=rf"model\.safetensors: '{re.escape(EMBEDDING)}' holds {value}"):
                read(EMBEDDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 7, 100_003, 299_999])
def test_one_nan_is_found_anywhere_in_a_large_tensor(tmp_path: Path, place: int, dtype: torch.dtype) -> None:
    large = torch.ones(300, 1000, dtype=dtype)
    large.view(-1)[place] = float("nan")
    with pytest.raises(CheckpointError, match="'large' holds nan"):
        Checkpoint.open(single(tmp_path, {"large": large}))["large"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_overflows_fp16_stops_and_is_named(tmp_path: Path, sign: int, dtype: torch.dtype) -> None:
    stored = tensors(dtype=dtype)
    stored[EMBEDDING][2, 1] = sign * 70000
    checkpoint = Checkpoint.open(single(tmp_path, stored))
    value = float(stored[EMBEDDING][2, 1])
    assert float(checkpoint[EMBEDDING][2, 1]) == value  # fine as stored
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: '{re.escape(EMBEDDING)}' holds {value:g}"):
        checkpoint.float16(EMBEDDING)
    with pytest.raises(CheckpointError, match=rf"^'w' holds {value:g}.*65504"):
        to_float16_checked("w", stored[EMBEDDING])


@pytest.mark.parametrize(
    ("value", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (-65519.0, True), (-65520.0, False)]
)
def test_fp16_bound_is_where_rounding_reaches_infinity(value: float, fits: bool) -> None:
    tensor = torch.tensor([0.0, value])
    assert bool(tensor.half().isfinite().all()) == fits
    if fits:
        assert torch.equal(to_float16_checked("w", tensor), tensor.half())
    else:
        with pytest.raises(CheckpointError):
            to_float16_checked("w", tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float16_matches_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = tensors({"empty": torch.zeros(0, 3, dtype=dtype), "scalar": torch.tensor(2.0, dtype=dtype)}, dtype)
    checkpoint = Checkpoint.open(single(tmp_path, stored))
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.float16(name), tensor.to(torch.float16))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_unsupported_dtypes_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    single(tmp_path, tensors({"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2).to(dtype)}))
    refusal(tmp_path, "model.safetensors", "'model.layers.0.mlp.gate_proj.weight'", "bfloat16")


# ---- against transformers --------------------------------------------------------------------------------------------


def tiny_exaone4(*, tie: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Exaone4Config, Exaone4ForCausalLM

    config = Exaone4Config(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=3, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tie, sliding_window=None,
                           layer_types=["full_attention"] * 3, max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(0)
    model = Exaone4ForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("max_shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_match_transformers(tmp_path: Path, dtype: torch.dtype, tie: bool, max_shard_size: str) -> None:
    from transformers import Exaone4ForCausalLM

    model = tiny_exaone4(tie=tie, dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (max_shard_size == "8KB")
    state = model.state_dict()
    loaded = Exaone4ForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config["model_type"] == "exaone4"
    assert (HEAD in checkpoint) != tie
    sources = checkpoint.check(shapes_of(state), tied=TIED if tie else {})
    assert set(sources) == set(state)
    for name, source in sources.items():
        assert checkpoint.dtype(source) == dtype
        assert torch.equal(checkpoint[source], state[name])
        assert torch.equal(checkpoint[source], loaded[name])
