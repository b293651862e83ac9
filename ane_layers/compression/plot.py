"""A picture of a sensitivity ranking."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ane_layers.compression.rank_agreement import default_top
from ane_layers.compression.ranking import Ranking
from ane_layers.compression.setting import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOP, _OTHER = "#b5482a", "#9aa5b1"
FORMATS = (".png", ".svg")


def check_picture(path: str | Path) -> None:
    """Whether a picture can be written there, before an hour is spent on what it shows. Raises `ValueError`."""
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a picture's name must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: is no folder, so {path.name} cannot be written there")


def plot_ranking(ranking: Ranking, path: str | Path, *, top: int | None = None) -> None:
    """Draws harm by layer, the most harmed ones in colour with their rank, and beneath it harm by module within each layer.

    Args:
        ranking: with at least one layer.
        path: ends in .png or .svg; written whole or not at all.
        top: how many layers are marked; by default the share that `top8` promotes of 30.

    Raises:
        ValueError: for another suffix, a ranking without layers, a `top` beyond them, or a file that cannot be written.
    """
    from matplotlib.figure import Figure

    path = Path(path)
    layers = sorted(ranking.layers)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: a picture's name must end in {' or '.join(FORMATS)}")
    if not layers:
        raise ValueError("the ranking has no layers to draw")
    top = default_top(len(layers)) if top is None else top
    if not 0 <= top <= len(layers):
        raise ValueError(f"top must be within 0 … {len(layers)}, the ranking's layers, got {top}")
    rows, strip = _by_module(ranking, layers)
    figure = Figure(figsize=(max(7.0, 2.4 + 0.34 * len(layers)), 3.9 + 0.3 * len(rows)), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.4 + 0.36 * len(rows)])
    figure.suptitle(_title(ranking), x=0.01, ha="left", fontsize=10)
    _draw_layers(upper, ranking, layers, top)
    image = lower.imshow(strip, aspect="auto", cmap="YlOrBr", vmin=0, interpolation="nearest")
    lower.set_yticks(range(len(rows)), rows)
    lower.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    lower.set_xlabel("layer")
    figure.colorbar(image, ax=lower, label="nats", pad=0.01)
    scratch = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(scratch, dpi=150)
        os.replace(scratch, path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        scratch.unlink(missing_ok=True)


def _draw_layers(axes: Axes, ranking: Ranking, layers: list[int], top: int) -> None:
    values = [ranking.layers[layer] for layer in layers]
    ranks = {layer: rank for rank, layer in enumerate(ranking.order[:top], 1)}
    bars = axes.bar(
        range(len(layers)), values, width=0.75, color=[_TOP if layer in ranks else _OTHER for layer in layers]
    )
    axes.bar_label(bars, [str(ranks.get(layer, "")) for layer in layers], padding=2, fontsize=8, color=_TOP)
    axes.margins(x=0.01, y=0.12)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("harm of the whole layer, nats")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(ranking: Ranking) -> str:
    how = {"kl": "measured", "fisher": "predicted"}.get(ranking.method, ranking.method)
    lines = [
        "Harm of compressing each part alone",
        f"{Setting.from_key(ranking.setting)}; {how} on {ranking.tokens:,} tokens",
    ]
    outside = {module.name: module.harm.get(ranking.setting) for module in ranking.modules if module.layer is None}
    if named := [f"{name} {harm:.2g}" for name, harm in outside.items() if harm is not None]:
        lines.append(f"outside of the layers: {', '.join(named)} nats")
    return "\n".join(lines)


def _by_module(ranking: Ranking, layers: list[int]) -> tuple[list[str], np.ndarray]:
    """Names of modules within a layer, and their harm, `[modules, layers]`; NaN, drawn blank, where a layer has no such module."""
    inside = [module for module in ranking.modules if module.layer is not None]
    names = {module.name: module.name.split(f".{module.layer}.", 1)[-1] for module in inside}
    rows = list(dict.fromkeys(names.values()))
    strip = np.full((max(1, len(rows)), len(layers)), np.nan)
    for module in inside:
        if module.layer in layers:
            strip[rows.index(names[module.name]), layers.index(module.layer)] = module.harm.get(ranking.setting, np.nan)
    return rows, strip
