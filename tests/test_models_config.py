"""EXAONE 4's config.json: what is read, what equals `transformers`, what is refused and how the refusal reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ane_layers.layers import rotary_frequencies
from ane_layers.models import Exaone4, Exaone4Config, from_folder

ABSENT: Any = object()
FULL, SLIDING = "full_attention", "sliding_attention"

# EXAONE 4.0 1.2B as transformers 4 wrote it.
V4: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 361,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "max_position_embeddings": 65536,
    "model_type": "exaone4",
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "vocab_size": 102400,
}


def changed(config: dict[str, Any] = V4, /, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (config | changes).items() if value is not ABSENT}


def as_v5(config: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": config["rope_theta"]} | (config["rope_scaling"] or {"rope_type": "default"})
    changes = {"rope_theta": ABSENT, "rope_scaling": ABSENT, "torch_dtype": ABSENT}
    return changed(config, rope_parameters=rope, dtype="bfloat16", **changes)


def written(folder: Path, config: Any) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def read(folder: Path, config: Any = V4, /, **changes: Any) -> Exaone4Config:
    return Exaone4Config.from_pretrained(written(folder, changed(config, **changes)))


def refusal(folder: Path, *parts: str) -> str:
    """Reading must fail with one line that names the file and holds every part."""
    with pytest.raises(ValueError, match=re.escape(str(folder / "config.json"))) as error:
        Exaone4Config.from_pretrained(folder)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    return message


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_fields_match_the_file(tmp_path: Path) -> None:
    config = read(tmp_path)
    for field in dataclasses.fields(config):
        if field.name in V4:
            assert getattr(config, field.name) == V4[field.name]
    assert config.layer_types == (FULL,) * 30


@pytest.mark.parametrize("scaling", [V4["rope_scaling"], None])
def test_config_of_transformers_5_matches_that_of_transformers_4(
    tmp_path: Path, scaling: dict[str, Any] | None
) -> None:
    four = changed(rope_scaling=scaling)
    old, new = read(tmp_path, four), read(tmp_path, as_v5(four))
    different = {name for name in vars(old) if getattr(old, name) != getattr(new, name)}
    assert different <= {"rope_scaling"}  # null and {"rope_type": "default"} mean the same
    frequencies = [
        rotary_frequencies(64, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling) for config in (old, new)
    ]
    assert_close(*frequencies, atol=0, rtol=0)
    if scaling is not None:
        assert old == new


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_frequencies_match_transformers(tmp_path: Path, key: str) -> None:
    scaling = changed(V4["rope_scaling"], rope_type=ABSENT) | {key: "llama3"}
    config = read(tmp_path, rope_scaling=scaling)
    reference = transformers.Exaone4Config(**as_v5(V4) | {"layer_types": [FULL] * 30})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference)
    actual = rotary_frequencies(64, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling)
    assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 1000000, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_both_kinds_of_rope_fields_match_transformers_or_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A file edited by hand may hold both; `transformers` must not read one thing and we another."""
    contents = changed(as_v5(V4), layer_types=[FULL] * 30, **changes)
    reference = transformers.Exaone4Config.from_pretrained(written(tmp_path, contents)).rope_parameters
    try:
        config = Exaone4Config.from_pretrained(tmp_path)
    except ValueError:
        return
    assert config.rope_theta == reference["rope_theta"]
    assert (config.rope_scaling or {}).get("rope_type", "default") == reference["rope_type"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(None, "GGGGGGGG"), (4, "LLLGLLLG"), ("LLLG", "LLLGLLLG"), (0, "GGGGGGGG"), (3, "LLGLLGLL"), ("LG", "LGLGLGLG")],
)
def test_layer_types_of_a_pattern_match_hf_39696(tmp_path: Path, pattern: int | str | None, expected: str) -> None:
    config = read(tmp_path, num_hidden_layers=8, sliding_window=16, sliding_window_pattern=pattern)
    assert config.layer_types == tuple(SLIDING if letter == "L" else FULL for letter in expected)
    if isinstance(pattern, int) and pattern:  # transformers crashes on null, 0 and strings
        reference = transformers.Exaone4Config(num_hidden_layers=8, sliding_window=16, sliding_window_pattern=pattern)
        assert list(config.layer_types) == reference.layer_types


@pytest.mark.parametrize("pattern", [None, 0, 4, "LLLG"])
def test_layers_without_a_window_are_all_full(tmp_path: Path, pattern: int | str | None) -> None:
    config = read(tmp_path, num_hidden_layers=8, sliding_window=None, sliding_window_pattern=pattern)
    assert config.layer_types == (FULL,) * 8


def test_64_layers_lllg_match_48_windows_and_16_full(tmp_path: Path) -> None:
    config = read(tmp_path, num_hidden_layers=64, sliding_window=4096, sliding_window_pattern="LLLG")
    assert config.layer_types is not None
    assert (config.layer_types.count(SLIDING), config.layer_types.count(FULL)) == (48, 16)


def test_layer_types_win_over_the_pattern_as_exllamav3_148(tmp_path: Path) -> None:
    given = [FULL, SLIDING, FULL]
    config = read(tmp_path, num_hidden_layers=3, layer_types=given, sliding_window=16, sliding_window_pattern="LLLG")
    assert list(config.layer_types or ()) == given
    reference = transformers.Exaone4Config(
        num_hidden_layers=3, layer_types=given, sliding_window=16, sliding_window_pattern=4
    )
    assert reference.layer_types == given


def test_absent_window_matches_transformers_or_is_refused(tmp_path: Path) -> None:
    """`transformers`' defaults are a window of 4096 and pattern 4, not full attention: another model."""
    contents = changed(sliding_window=ABSENT, sliding_window_pattern=ABSENT)
    reference = transformers.Exaone4Config.from_pretrained(written(tmp_path, contents))
    try:
        config = Exaone4Config.from_pretrained(tmp_path)
    except ValueError:
        return
    assert (config.sliding_window, list(config.layer_types or ())) == (reference.sliding_window, reference.layer_types)


@pytest.mark.parametrize(("head_dim", "expected"), [(32, 32), (None, 16), (ABSENT, 16)])
def test_projections_match_vllm_2622(tmp_path: Path, head_dim: int | None, expected: int) -> None:
    config = read(
        tmp_path,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=16,
        head_dim=head_dim,
    )
    assert config.head_dim == expected
    with torch.device("meta"):
        shapes = Exaone4(config, context_length=4).checkpoint_shapes()
    attention = "model.layers.0.self_attn"
    assert shapes[f"{attention}.q_proj.weight"] == (4 * expected, 64)
    assert shapes[f"{attention}.k_proj.weight"] == (2 * expected, 64)
    assert shapes[f"{attention}.o_proj.weight"] == (64, 4 * expected)
    assert shapes[f"{attention}.q_norm.weight"] == (expected,)


def test_several_end_tokens_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[361, 2]).eos_token_id == (361, 2)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    ],
)
def test_missing_field_is_refused(tmp_path: Path, name: str) -> None:
    refusal(written(tmp_path, changed(**{name: ABSENT})), f"field {name} is missing")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "2048"),
        ("hidden_size", 2048.0),
        ("hidden_size", None),
        ("hidden_size", True),
        ("num_hidden_layers", [30]),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", True),
        ("rope_theta", None),
        ("rope_scaling", "llama3"),
        ("rope_scaling", [16]),
        ("sliding_window", 4096.0),
        ("sliding_window_pattern", ["L", "G"]),
        ("layer_types", FULL),
        ("layer_types", [FULL, 3]),
        ("tie_word_embeddings", 1),
        ("eos_token_id", ["</s>"]),
        ("hidden_act", None),
    ],
)
def test_field_of_another_type_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    refusal(written(tmp_path, changed(**{name: value})), name, json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": 0}, ("hidden_size", "0")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads", "0")),
        ({"num_key_value_heads": 5}, ("num_attention_heads", "32", "num_key_value_heads", "5")),
        ({"rms_norm_eps": -1e-5}, ("rms_norm_eps", "-1e-05")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
        ({"rms_norm_eps": float("inf")}, ("rms_norm_eps",)),
        ({"rope_theta": float("inf")}, ("rope_theta",)),
        ({"rope_theta": 0}, ("rope_theta", "0")),
        ({"head_dim": 0}, ("head_dim", "0")),
        ({"head_dim": 63}, ("head_dim", "63")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"sliding_window": 0}, ("sliding_window", "0")),
        ({"sliding_window": 16, "sliding_window_pattern": "LLXG"}, ("sliding_window_pattern", "LLXG")),
        ({"sliding_window": 16, "sliding_window_pattern": -2}, ("sliding_window_pattern", "-2")),
        ({"layer_types": [FULL] * 29}, ("layer_types", "29", "num_hidden_layers", "30")),
        ({"layer_types": [FULL] * 29 + ["chunked"]}, ("layer_types", "chunked")),
        ({"layer_types": [FULL] * 29 + [SLIDING]}, ("layer_types", SLIDING, "sliding_window")),
        ({"attention_bias": False}, ("attention_bias", "false")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "4")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    ],
)
def test_impossible_or_unknown_value_is_refused(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    refusal(written(tmp_path, changed(**changes)), *parts)


@pytest.mark.parametrize("form", ["4", "5"])
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rope_type": "yarn"}, ("rope_type", "yarn")),
        ({"rope_type": ABSENT, "type": "linear"}, ("linear",)),
        ({"factor": ABSENT}, ("llama3", "factor")),
        ({"factor": 0}, ("factor", "0")),
        ({"factor": "sixteen"}, ("factor", "sixteen")),
        ({"factor": [16]}, ("factor", "16")),
        ({"factor": float("nan")}, ("factor", "nan")),
        ({"original_max_position_embeddings": ABSENT}, ("original_max_position_embeddings",)),
    ],
)
def test_rope_scaling_that_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...], form: str
) -> None:
    config = changed(rope_scaling=changed(V4["rope_scaling"], **changes))
    refusal(written(tmp_path, config if form == "4" else as_v5(config)), *parts)


@pytest.mark.parametrize("rope", [[], {}, {"rope_type": "default"}, {"full_attention": {"rope_theta": 1e4}}, "default"])
def test_rope_parameters_without_theta_are_refused(tmp_path: Path, rope: Any) -> None:
    refusal(written(tmp_path, changed(as_v5(V4), rope_parameters=rope)), "rope_parameters", "rope_theta")


EXAONE3 = {
    "activation_function": "silu",
    "architectures": ["ExaoneForCausalLM"],
    "hidden_size": 2560,
    "layer_norm_epsilon": 1e-05,
    "model_type": "exaone",
    "num_attention_heads": 32,
    "num_layers": 30,
    "vocab_size": 102400,
}


def test_exaone_3_is_refused_by_name_as_llama_cpp_9025(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: .*model_type.*exaone4?.*EXAONE 3") as error:
        Exaone4Config.from_pretrained(written(tmp_path, EXAONE3))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "exaone4_5", None, 4, ["exaone4"], ABSENT])
def test_another_model_type_is_refused(tmp_path: Path, model_type: Any) -> None:
    folder = written(tmp_path, changed(model_type=model_type))
    refusal(folder, "model_type", "exaone4", "None" if model_type is ABSENT else repr(model_type))
    if model_type == "llama":  # a family, but not with these fields
        with pytest.raises(ValueError, match="LlamaConfig does not handle sliding_window"):
            from_folder(folder, context_length=8)
    else:
        with pytest.raises(ValueError, match=r"model_type.*supported: exaone, exaone4, .*llama"):
            from_folder(folder, context_length=8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("not json", "JSON"),
        ('{"model_type": "exaone4",}', "JSON"),
        ("[1, 2]", "object"),
        ("null", "object"),
        ('"exaone4"', "object"),
        ("[" * 100_000, "config.json"),
        ('{"hidden_size": ' + "1" * 5000 + "}", "config.json"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, text: str, part: str) -> None:
    refusal(written(tmp_path, text), part)


def test_binary_garbage_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00garbage")
    refusal(tmp_path, "UTF-8")


def test_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path, "No such file")
    refusal(tmp_path / "nowhere", "No such file")
    (tmp_path / "config.json").mkdir()
    refusal(tmp_path, "cannot be read")


def test_hybrid_model_has_rolling_caches_for_its_sliding_layers(tmp_path: Path) -> None:
    config = read(tmp_path, sliding_window=4096, sliding_window_pattern="LLLG", num_hidden_layers=64)
    with torch.device("meta"):
        model = Exaone4(config, context_length=8)
    assert (model.cache.key.shape[0], model.sliding_cache.key.shape[0]) == (16, 48)


@pytest.mark.parametrize("context", [0, -1, 65537])
def test_context_out_of_range_is_refused(tmp_path: Path, context: int) -> None:
    with pytest.raises(ValueError, match=rf"context_length.*65536.*{context}"), torch.device("meta"):
        Exaone4(read(tmp_path), context_length=context)


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        read(tmp_path).hidden_size = 3  # type: ignore[misc]
