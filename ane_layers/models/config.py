"""Reading a Hugging Face config.json into a family's frozen dataclass, with errors that name the file, the field and the value."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")

# Fields of a config.json that do not take part in the arithmetic of inference: bookkeeping, training, and generation defaults.
BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)


def load_config(folder: str | Path) -> tuple[dict[str, Any], Path]:
    """The raw config.json of a folder and its path.

    Raises:
        ValueError: if it is missing, is not JSON, or is not an object.
    """
    path = Path(folder) / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); a Hugging Face model folder is expected"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error.msg} at line {error.lineno})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: a JSON object is expected, found {type(config).__name__}")
    return config, path


def read_fields(
    cls: type[Config], config: Mapping[str, Any], *, file: str | Path, ignore: Collection[str] = ()
) -> Config:
    """Fills a dataclass from a config.json: every field without a default must be there, of its type; no other may be.

    A field that a family does not handle is refused rather than dropped, since it may change the arithmetic.

    Raises:
        ValueError: for a missing, mistyped or unknown field, and whatever the dataclass itself refuses, with the file's name in front.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(config) - set(fields) - BOOKKEEPING - set(ignore))
    if unknown:
        named = ", ".join(f"{name} = {json.dumps(config[name])}" for name in unknown)
        raise ValueError(f"{file}: {cls.__name__} does not handle {named}")
    missing = [name for name, field in fields.items() if name not in config and field.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{file}: field {', '.join(missing)} is missing")
    hints = typing.get_type_hints(cls)
    values = {name: config[name] for name in fields if name in config}
    for name, value in values.items():
        if not _is_of(value, hints[name]):
            raise ValueError(f"{file}: field {name} must be {_describe(hints[name])}, got {json.dumps(value)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _is_of(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, list) and all(_is_of(item, typing.get_args(hint)[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        # Python reads NaN and Infinity from JSON.
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(
        hint, "a list" if typing.get_origin(hint) is tuple else "an object"
    )


def check_positive(config: Any, *names: str) -> None:
    """Raises `ValueError` naming the first of these fields that is not above zero."""
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ValueError(f"field {name} must be above 0, got {value}")


def check_model_type(cls: Any, config: Mapping[str, Any], *, file: str | Path) -> None:
    """Raises `ValueError` if a config.json is of another family than `cls.model_type`."""
    found = config.get("model_type")
    if found != cls.model_type:
        raise ValueError(f"{file}: field model_type must be {cls.model_type!r}, got {found!r}{family_hint(found)}")


def family_hint(model_type: Any) -> str:
    """What to say about a `model_type` that is easily mistaken for a supported one."""
    return f" ({_HINTS[model_type]})" if isinstance(model_type, str) and model_type in _HINTS else ""


_HINTS = {
    "exaone": "EXAONE 3.x, another architecture",
    "gemma3": "Gemma 3 with its vision tower; save the language model alone, as gemma3_text",
}


def canonical(config: Mapping[str, Any], *, file: str | Path) -> dict[str, Any]:
    """A config.json in one form, whichever version of transformers wrote it, with what null stands for filled in.

    - `rope_parameters` (transformers 5) becomes `rope_theta` and `rope_scaling` (transformers 4). Where a file has both, transformers
      goes by `rope_parameters`; a contradiction is refused here.
    - Scaling of type default is no scaling; the key `type` of older files is `rope_type`.
    - A missing `head_dim` is `hidden_size / num_attention_heads`; `num_key_value_heads` of null is `num_attention_heads`; a pattern of 0
      is none.

    Raises:
        ValueError: naming the file, the field and the value.
    """
    config = dict(config)
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        if not isinstance(rope, dict) or "rope_theta" not in rope:
            raise ValueError(f"{file}: field rope_parameters must hold rope_theta, got {json.dumps(rope)}")
        parts = {"rope_theta": rope["rope_theta"]}
        parts["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        for name, value in parts.items():
            given = config.get(name)
            if given is not None and _scaling(given) != _scaling(value):
                raise ValueError(
                    f"{file}: field {name} is {json.dumps(given)}, but rope_parameters says {json.dumps(value)}"
                )
        config.update(parts)
    config["rope_scaling"] = _scaling(config.get("rope_scaling"))
    if config.get("head_dim") is None:
        size, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if isinstance(size, int) and isinstance(heads, int) and heads > 0:
            config["head_dim"] = size // heads
    if config.get("num_key_value_heads", 0) is None:
        config["num_key_value_heads"] = config.get("num_attention_heads")
    if config.get("sliding_window_pattern") == 0:
        config["sliding_window_pattern"] = None
    return config


def _scaling(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    scaling = {("rope_type" if key == "type" else key): item for key, item in value.items()}
    return None if scaling.get("rope_type", "default") == "default" and set(scaling) <= {"rope_type"} else scaling


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(
    num_hidden_layers: int, *, layer_types: Sequence[str] | None, sliding_window: int | None, pattern: int | str | None
) -> tuple[str, ...]:
    """The kind of attention of every layer. `layer_types` wins over a pattern, as in Hugging Face; 4 and "LLLG" mean the same pattern.

    Raises:
        ValueError: for a wrong length, an unknown kind or letter, or a sliding layer without a window.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"field sliding_window must be above 0, got {sliding_window}")
    if layer_types is not None:
        types = tuple(layer_types)
        if len(types) != num_hidden_layers:
            raise ValueError(f"field layer_types has {len(types)} entries for num_hidden_layers = {num_hidden_layers}")
        unknown = sorted(set(types) - {FULL, SLIDING})
        if unknown:
            raise ValueError(f"field layer_types must hold {FULL!r} or {SLIDING!r}, got {unknown[0]!r}")
    elif sliding_window is None or not pattern:
        types = (FULL,) * num_hidden_layers
    else:
        letters = "L" * (pattern - 1) + "G" if isinstance(pattern, int) else pattern
        if isinstance(pattern, int) and pattern < 1:
            raise ValueError(f"field sliding_window_pattern must be at least 1, got {pattern}")
        if set(letters) - set("LG"):
            raise ValueError(f"field sliding_window_pattern must be made of L and G, got {pattern!r}")
        types = tuple(SLIDING if letters[i % len(letters)] == "L" else FULL for i in range(num_hidden_layers))
    if SLIDING in types and sliding_window is None:
        raise ValueError(f"field layer_types holds {SLIDING!r} but sliding_window is null")
    return types


def same_layers(config: Any) -> tuple[str, ...]:
    """The kind of every layer where all have the same: sliding, unless there is no window, or one that the longest context fits in.

    Raises:
        ValueError: for a window that is not above 0.
    """
    if config.sliding_window is not None:
        check_positive(config, "sliding_window")
    windowed = config.sliding_window is not None and config.sliding_window < config.max_position_embeddings
    return (SLIDING if windowed else FULL,) * config.num_hidden_layers


def upper_layers(config: Any) -> None:
    """Fills in `layer_types` where layers from `max_window_layers` on see a window, and takes a window away that is not used.

    Raises:
        ValueError: as `layer_types` does.
    """
    window = config.sliding_window if config.use_sliding_window else None
    first = config.num_hidden_layers if window is None else config.max_window_layers
    types = config.layer_types
    if types is None:
        types = tuple(SLIDING if number >= first else FULL for number in range(config.num_hidden_layers))
    types = layer_types(config.num_hidden_layers, layer_types=types, sliding_window=window, pattern=None)
    object.__setattr__(config, "sliding_window", window)
    object.__setattr__(config, "layer_types", types)
