"""Rotary frequencies, and how Hugging Face's `rope_scaling` changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Scaling = Mapping[str, Any]


def rotary_frequencies(
    head_dim: int, *, rope_theta: float, rope_scaling: Scaling | None = None, context_length: int | None = None
) -> Tensor:
    """Inverse frequencies in radians per position, fp32.

    Args:
        head_dim: D, even; where only a part of a head is rotated, the size of that part.
        rope_theta: base of the geometric series.
        rope_scaling: Hugging Face's `rope_scaling` (or `rope_parameters`): `rope_type` (older files: `type`) is `default`, `linear`,
            `llama3`, `yarn` or `longrope`. Some also have a factor on cosines and sines: `rotary_factor`.
        context_length: positions that there will be. `longrope` has one set of frequencies up to
            `original_max_position_embeddings`, and another for more.

    Shape:
        - output: `[D / 2]`

    Raises:
        ValueError: for an odd `head_dim`, an unknown `rope_type`, or a parameter that is missing, unknown or impossible.

    Source: Su et al., "RoFormer", 2021; Chen et al., "Extending Context Window …", 2023 (linear); Peng et al., "YaRN", 2023; Ding et al.,
    "LongRoPE", 2024; llama3 is Meta's for Llama 3.1.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    kind, scaling = _checked(rope_scaling)
    return _KINDS[kind].frequencies(rope_theta**exponents, rope_theta, scaling, context_length)


def rotary_factor(rope_scaling: Scaling | None = None) -> float:
    """The factor on cosines and sines: 1, unless `rope_scaling` is `yarn` or `longrope`. Raises `ValueError` as `rotary_frequencies`."""
    kind, scaling = _checked(rope_scaling)
    return _KINDS[kind].factor(scaling)


class _Kind(NamedTuple):
    """A `rope_type`: its parameters, of which lists may be too, and what it does with periods, theta, parameters and context length."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    frequencies: Callable[[Tensor, float, Scaling, int | None], Tensor]
    factor: Callable[[Scaling], float] = lambda scaling: 1.0
    lists: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def _checked(rope_scaling: Scaling | None) -> tuple[str, Scaling]:
    """The `rope_type` and its parameters; one that is not known may change the frequencies, and is refused."""
    scaling = {name: value for name, value in (rope_scaling or {}).items() if name not in ("rope_type", "type")}
    given = rope_scaling or {}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in _KINDS:
        raise ValueError(f"rope_type {rope_type!r} is not supported; known: {', '.join(map(repr, _KINDS))}")
    kind = _KINDS[rope_type]
    where = f"rope_type {rope_type!r}"
    missing = [name for name in (*kind.required, *kind.lists) if scaling.get(name) is None]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if scaling.get("partial_rotary_factor") == 1:
        del scaling["partial_rotary_factor"]  # all of a head, which is what happens anyway
    for name, value in scaling.items():
        if name not in (*kind.required, *kind.optional, *kind.lists, *kind.flags):
            raise ValueError(f"{where}: {name} = {value!r} is not supported")
        if value is None:
            continue
        if name in kind.lists:
            if not isinstance(value, list | tuple) or not value or not all(map(_is_number, value)) or min(value) <= 0:
                raise ValueError(f"{where}: {name} must be a list of numbers above 0, got {value!r}")
        elif name in kind.flags:
            if not isinstance(value, bool):
                raise ValueError(f"{where}: {name} must be true or false, got {value!r}")
        elif not _is_number(value):
            raise ValueError(f"{where}: {name} must be a finite number, got {value!r}")
        elif name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow") and value <= 0:
            raise ValueError(f"{where}: {name} must be above 0, got {value!r}")
    return rope_type, {name: value for name, value in scaling.items() if value is not None}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _default(periods: Tensor, theta: float, scaling: Scaling, context: int | None) -> Tensor:
    return 1.0 / periods


def _linear(periods: Tensor, theta: float, scaling: Scaling, context: int | None) -> Tensor:
    """Positions are pressed together by `factor`."""
    return 1.0 / periods / scaling["factor"]


def _llama3(periods: Tensor, theta: float, scaling: Scaling, context: int | None) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly in 1 / wavelength."""
    factor, low, high, original = (float(scaling[name]) for name in _LLAMA3)
    if high <= low:
        raise ValueError(f"rope_type 'llama3': impossible low_freq_factor {low}, high_freq_factor {high}")
    frequencies = 1.0 / periods
    wavelengths = 2 * math.pi / frequencies
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: short wavelength, 0: long
    return frequencies * (kept + (1 - kept) / factor)


def _yarn(periods: Tensor, theta: float, scaling: Scaling, context: int | None) -> Tensor:
    """What turns often within the original context is kept, what hardly turns is stretched by `factor`, with a ramp between."""
    size, original = 2 * len(periods), float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        """At which element a pair turns so often within the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast", 32)), dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # A ramp of no width would divide by zero.
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return ramp / (scaling["factor"] * periods) + (1 - ramp) / periods


def _yarn_factor(scaling: Scaling) -> float:
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def growth(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1.0)


def _longrope(periods: Tensor, theta: float, scaling: Scaling, context: int | None) -> Tensor:
    """Every frequency has a divisor of its own, from one list for short contexts and from another for long ones."""
    if context is None:
        raise ValueError("rope_type 'longrope' needs the context length: it has two sets of frequencies")
    for name in ("short_factor", "long_factor"):
        if len(scaling[name]) != len(periods):
            raise ValueError(
                f"rope_type 'longrope': {name} must have {len(periods)} entries, one for each frequency, got {len(scaling[name])}"
            )
    name = "long_factor" if context > scaling["original_max_position_embeddings"] else "short_factor"
    return 1.0 / (torch.tensor(scaling[name], dtype=torch.float32) * periods)


def _longrope_factor(scaling: Scaling) -> float:
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    if "factor" not in scaling:
        raise ValueError("rope_type 'longrope' lacks factor or attention_factor")
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_KINDS = {
    "default": _Kind((), (), _default),
    "linear": _Kind(("factor",), (), _linear),
    "llama3": _Kind(_LLAMA3, (), _llama3),
    "yarn": _Kind(
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        _yarn,
        _yarn_factor,
        flags=("truncate",),
    ),
    "longrope": _Kind(
        ("original_max_position_embeddings",),
        ("factor", "attention_factor"),
        _longrope,
        _longrope_factor,
        lists=("short_factor", "long_factor"),
    ),
}
