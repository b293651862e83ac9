"""A recipe resolved for one model: a setting for every weight."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ane_layers.checkpoint import to_float16_checked
from ane_layers.compression.allocation import allocate
from ane_layers.compression.ranking import Ranking, model_facts
from ane_layers.compression.recipe import Recipe
from ane_layers.compression.setting import FP16, Setting
from ane_layers.compression.units import Unit, matching, units
from ane_layers.compression.weights import CompressedWeight, compress_weight
from ane_layers.program.weights import ALIGNMENT

Importance = Mapping[str, Tensor]
"""Parameter path → mean square of each input channel, `[in]`; see `ane_layers.compression.calibration.input_moments`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting for every weight that can be compressed. It compresses weights one at a time, so that conversion holds one at a time.

    Attributes:
        recipe: that it was made from.
        settings: parameter path → fitted setting.
        asked: parameter path → setting as the recipe has it.
        units: parameter path → name of its module, the pieces of a head under the head's.
        shared: parameter paths that are one table in the file: an embedding and the pieces of a tied head.
        importance: weights of the squared error, for paths that have one.
        promoted: layers that the ranking chose.
    """

    recipe: Recipe
    settings: Mapping[str, Setting]
    asked: Mapping[str, Setting]
    units: Mapping[str, str]
    shared: frozenset[str] = frozenset()
    importance: Importance = field(default_factory=dict)
    promoted: tuple[int, ...] = ()

    def compress(self, path: str, weight: Tensor) -> CompressedWeight | None:
        """The weight as the file will hold it; None if it stays fp16.

        Raises:
            ValueError: naming the weight, if fp16 cannot hold it.
        """
        setting = self.settings.get(path, FP16)
        if setting.scheme == "fp16":
            return None
        stored: np.ndarray = to_float16_checked(path, weight.detach()).numpy()
        moments = self.importance.get(path)
        return compress_weight(path, stored, setting, importance=None if moments is None else moments.numpy())

    def part(self, paths: Collection[str]) -> Plan:
        """The plan of a part of the model, which has these weights alone."""

        def own(values: Mapping[str, Any]) -> dict[str, Any]:
            return {path: value for path, value in values.items() if path in paths}

        return replace(
            self,
            settings=own(self.settings),
            asked=own(self.asked),
            units=own(self.units),
            shared=frozenset(path for path in self.shared if path in paths),
            importance=own(self.importance),
        )

    def key(self, path: str) -> str:
        """Equal for weights whose views may share bytes in the file."""
        if path in self.shared or self.settings.get(path, FP16).scheme == "fp16":
            return self.settings.get(path, FP16).key
        return path


def make_plan(
    model: nn.Module, recipe: Recipe, *, ranking: Ranking | None = None, importance: Importance | None = None
) -> Plan:
    """Resolves a recipe.

    Args:
        model: with `Linear`, `Embedding` and `OutputHead` layers, as it will be converted.
        recipe: of any model.
        ranking: needed by a recipe that promotes layers or allocates bits.
        importance: see `Importance`.

    Raises:
        ValueError: for a pattern that matches nothing, a missing ranking or one of another model, a group that cannot divide, or tied
            tables that cannot be shared.
    """
    where = f"recipe {recipe.name}"
    found = units(model)
    if recipe.needs_ranking:
        if ranking is None:
            section = "promoted" if recipe.promoted else "allocation"
            raise ValueError(
                f"{where}: section [{section}] needs a ranking; `ane-layers sensitivity FOLDER -o ranking.json` makes one"
            )
        if hasattr(model, "config"):
            ranking.check_model(model_facts(model.config))
    try:
        chosen, promoted = _choose(found, recipe, ranking)
        settings = {}
        for unit in found:
            for path, weight in unit.weights.items():
                settings[path] = chosen[unit.name].fitted(path, tuple(weight.shape))
        shared = _shared(found, settings) if recipe.tied == "share" else frozenset()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    names = {path: unit.name for unit in found for path in unit.weights}
    return Plan(
        recipe=recipe,
        settings=settings,
        asked={path: chosen[name] for path, name in names.items()},
        units=names,
        shared=shared,
        importance=importance or {},
        promoted=promoted,
    )


def _choose(found: list[Unit], recipe: Recipe, ranking: Ranking | None) -> tuple[dict[str, Setting], tuple[int, ...]]:
    by_kind = {"linear": recipe.layers, "head": recipe.head, "embedding": recipe.embedding}
    chosen = {unit.name: by_kind[unit.kind] for unit in found}
    promoted: tuple[int, ...] = ()
    if recipe.promoted is not None:
        assert ranking is not None
        layers = {unit.layer for unit in found if unit.layer is not None}
        if recipe.promoted.layers > len(layers):
            raise ValueError(f"[promoted] layers is {recipe.promoted.layers}, the model has {len(layers)}")
        promoted = tuple(ranking.order[: recipe.promoted.layers])
        inside = [unit for unit in found if unit.layer is not None]
        for unit in matching(inside, recipe.promoted.modules, within=True):
            if unit.layer in promoted:
                chosen[unit.name] = recipe.promoted.setting
    if recipe.allocation is not None:
        assert ranking is not None
        chosen |= allocate([unit for unit in found if unit.kind != "embedding"], recipe.allocation, ranking)
    for pattern, setting in recipe.modules:
        for unit in matching(found, pattern):
            chosen[unit.name] = setting
    return chosen, promoted


def _shared(found: list[Unit], settings: Mapping[str, Setting]) -> frozenset[str]:
    """Paths of tables that lie in the same memory: what a tied head and its embedding have in common."""
    heads = [unit for unit in found if unit.kind == "head"]
    tables = [unit for unit in found if unit.kind == "embedding"]
    shared: set[str] = set()
    for head in heads:
        for table in tables:
            whole, whole_path = next(iter(table.weights.values())), next(iter(table.weights))
            pieces = list(head.weights.items())
            if not pieces or not all(_same_memory(piece, whole) for _, piece in pieces):
                continue
            setting = settings[whole_path]
            for path, piece in pieces:
                if settings[path] != setting or not _holds(setting, piece, whole):
                    raise ValueError(
                        f"{path} ({settings[path]}, {piece.shape[0]} rows) cannot be part of the table of {whole_path} ({setting}): its "
                        "groups or bytes do not begin where those of the table do; set tied = 'split', or another group_size"
                    )
            shared |= {whole_path, *head.weights}
    return frozenset(shared)


def _holds(setting: Setting, piece: Tensor, whole: Tensor) -> bool:
    """Whether a piece of a table begins at a group and, in the file, at a multiple of 64 bytes, as its records must."""
    row = (int(piece.storage_offset()) - int(whole.storage_offset())) // math.prod(whole.shape[1:])
    shape = tuple(whole.shape)
    if setting.group_size is not None and (row % setting.group_size or piece.shape[0] % setting.group_size):
        return False
    if piece.numel() * setting.bits % 8 and piece.numel() != whole.numel():
        return False
    data, table = setting.stored_bytes((row, *shape[1:])) if row else (0, 0)
    one_table = setting.scheme == "lut" and setting.group_size is None
    exact = row * math.prod(shape[1:]) * setting.bits % 8 == 0
    return exact and data % ALIGNMENT == 0 and (one_table or table % ALIGNMENT == 0)


def _same_memory(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage()._cdata == whole.untyped_storage()._cdata and part.dtype == whole.dtype


def compressed_tensor(compressed: CompressedWeight, like: Tensor) -> Tensor:
    """The exact values as a tensor: fp32 stays fp32, narrower types become fp16, which holds them."""
    dense = torch.from_numpy(compressed.dense())
    return dense.to(torch.float32) if like.dtype == torch.float32 else dense
