"""The article's bandwidth model: tokens per second are bandwidth divided by the bytes that a token moves.

Source: "Core ML Decode Optimization: Removing the 1.9 GiB Per-Token Copy Caused by GQA repeat_kv", section 4. The model leaves out
arithmetic, latency and whatever a device keeps on its chip. It is meant for decoding one token at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ane_layers.analysis.geometry import EXAONE4_1B, DecoderGeometry

ARTICLE_BANDWIDTH_MB_S = 55_900
"""The constant that the article fits its phone's throughput with, in MB/s (10⁶ bytes)."""

ARTICLE_TOKENS_PER_SECOND: Mapping[str, float] = {"fold": 54.30, "repeat_kv": 20.39}
"""Measured by the article on one phone: the same weights (4-bit feed-forward, 8 layers promoted to 8 bits, 6-bit head), context 4096."""


def tokens_per_second(total_bytes: int | None, bandwidth_mb_s: float = ARTICLE_BANDWIDTH_MB_S) -> float | None:
    """`bandwidth ÷ total`: how many calls that move `total_bytes` each a memory of this bandwidth lets through in a second.

    Returns:
        None if the total is not known or nothing is moved.

    Raises:
        ValueError: a bandwidth that is not positive.
    """
    if not bandwidth_mb_s > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth_mb_s} MB/s")
    if not total_bytes:
        return None
    return bandwidth_mb_s * 1e6 / total_bytes


def article_comparison(
    fold_total: int, repeat_total: int, bandwidth_mb_s: float = ARTICLE_BANDWIDTH_MB_S
) -> dict[str, Any]:
    """The article's A/B, predicted from two totals of bytes a token, against what it measured.

    Args:
        fold_total: of the build that folds the queries, `Traffic.total`.
        repeat_total: of the same weights with repeated K and V.
        bandwidth_mb_s: for the prediction.

    Returns:
        `bandwidth`; `builds`, a row each for `fold` and `repeat_kv`: `total` bytes, `predicted` and `measured` tokens per second,
        `error` (predicted ÷ measured − 1), and `inferred`, the bytes that the measured speed stands for at the article's constant;
        `difference` of the two builds in `total` and `inferred`, and what share of the former the latter is (`inferred_share`); and
        `speedup`, `predicted` and `measured`.
    """
    builds: dict[str, dict[str, Any]] = {}
    for name, total in (("fold", fold_total), ("repeat_kv", repeat_total)):
        predicted, measured = tokens_per_second(total, bandwidth_mb_s), ARTICLE_TOKENS_PER_SECOND[name]
        builds[name] = {
            "total": total,
            "predicted": predicted,
            "measured": measured,
            "error": None if predicted is None else predicted / measured - 1,
            "inferred": ARTICLE_BANDWIDTH_MB_S * 1e6 / measured,
        }
    inferred = builds["repeat_kv"]["inferred"] - builds["fold"]["inferred"]
    return {
        "bandwidth": bandwidth_mb_s,
        "builds": builds,
        "difference": {
            "total": repeat_total - fold_total,
            "inferred": inferred,
            "inferred_share": inferred / (repeat_total - fold_total) if repeat_total != fold_total else None,
        },
        "speedup": {
            "predicted": repeat_total / fold_total if fold_total else None,
            "measured": ARTICLE_TOKENS_PER_SECOND["fold"] / ARTICLE_TOKENS_PER_SECOND["repeat_kv"],
        },
    }


def article_readings(geometry: DecoderGeometry = EXAONE4_1B) -> dict[str, dict[str, Any]]:
    """`article_comparison` by arithmetic alone, for both things that "8 layers promoted to 8-bit" can mean.

    Returns:
        `layers`: all weights of 8 layers at 8 bits; `feed_forward`: only their feed-forward weights. The rest is at 4 bits, the head at
        6, lookup tables left out, context 4096.
    """
    readings = {}
    for name, promoted in (("layers", geometry.layer_weights), ("feed_forward", geometry.feed_forward_weights)):
        fold = geometry.decode_bytes(4096, bits=4, head_bits=6, promoted=(8, promoted, 8))
        readings[name] = article_comparison(fold, fold + 2 * geometry.repeated_bytes(4096))
    return readings
