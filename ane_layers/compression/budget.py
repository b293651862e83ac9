"""A budget as users state it (size, bytes a token, bits a weight), turned into a recipe with a setting for every module."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ane_layers.compression.allocation import allocate, harm_of, stored_bytes
from ane_layers.compression.plan import make_plan
from ane_layers.compression.ranking import Ranking, model_facts
from ane_layers.compression.recipe import Allocation, Recipe, load_recipe
from ane_layers.compression.setting import Setting
from ane_layers.compression.units import units
from ane_layers.models import CausalLM, outline


@dataclass(frozen=True, kw_only=True)
class AllocationFigures:
    """What an allocation came to.

    Attributes:
        bits_per_weight: of layers and head together, tables included.
        read_bytes: of layers and head: what every token reads.
        stored_bytes: of all weights in the package; norms are left out.
        predicted_harm: sum over modules, in nats.
        modules: how many of them got each setting.
    """

    bits_per_weight: float
    read_bytes: int
    stored_bytes: int
    predicted_harm: float
    modules: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def allocated_recipe(
    folder: str | Path,
    ranking: str | Path | Ranking,
    *,
    name: str = "allocated",
    base: str | Path | Recipe = "base",
    bits_per_weight: float | None = None,
    bytes_per_token: int | None = None,
    size: int | None = None,
    context: int = 4096,
) -> tuple[Recipe, AllocationFigures]:
    """A recipe that names a setting for every module, for one model.

    Args:
        folder: of the model; only its config is read.
        ranking: with the harm of every module at several widths.
        name: of the recipe.
        base: recipe whose embedding and chunks are taken.
        bits_per_weight, bytes_per_token, size: the budget, one of them: an average over layers and head; what a token reads, the cache at
            `context` included; the weights in the package.
        context: slots of the cache.

    Raises:
        ValueError: for no budget or several, one that is too small, or a ranking that does not fit.
    """
    loaded = ranking if isinstance(ranking, Ranking) else Ranking.load(ranking)
    model = outline(folder)
    loaded.check_model(model_facts(model.config), file=str(ranking) if not isinstance(ranking, Ranking) else "ranking")
    found = units(model)
    read = [unit for unit in found if unit.kind != "embedding"]
    template = base if isinstance(base, Recipe) else load_recipe(base)
    embedding = sum(stored_bytes(unit, template.embedding) for unit in found if unit.kind == "embedding")
    elements = sum(unit.elements for unit in read)
    budget = _budget(model, elements, embedding, bits_per_weight, bytes_per_token, size, context)
    chosen = allocate(
        read, Allocation(bits_per_weight=8 * budget / elements, bits=_widths(loaded), group_size=_group(loaded)), loaded
    )
    settings = tuple((unit.name, chosen[unit.name]) for unit in read)
    recipe = Recipe(
        name=name,
        description=f"Allocated from a {loaded.method} ranking: least predicted harm within {budget:,} bytes of layers and head.",
        chunks=template.chunks,
        embedding=template.embedding,
        modules=settings,
    )
    make_plan(model, recipe)  # what cannot be written is refused now
    spent = sum(stored_bytes(unit, chosen[unit.name]) for unit in read)
    figures = AllocationFigures(
        bits_per_weight=8 * spent / elements,
        read_bytes=spent,
        stored_bytes=spent + embedding,
        predicted_harm=sum(harm_of(loaded, unit.name, chosen[unit.name]) for unit in read),
        modules=dict(sorted(Counter(setting.key for setting in chosen.values()).items())),
    )
    return recipe, figures


def _budget(
    model: CausalLM,
    elements: int,
    embedding: int,
    bits_per_weight: float | None,
    bytes_per_token: int | None,
    size: int | None,
    context: int,
) -> int:
    given = {"bits_per_weight": bits_per_weight, "bytes_per_token": bytes_per_token, "size": size}
    if sum(value is not None for value in given.values()) != 1:
        raise ValueError(f"give one budget: {', '.join(given)}")
    if bits_per_weight is not None:
        return int(bits_per_weight * elements / 8)
    if size is not None:
        return size - embedding
    assert bytes_per_token is not None
    config: Any = model.config
    # Keys and values of every slot, and the new rows.
    slot = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return bytes_per_token - slot * (context + 1)


def _widths(ranking: Ranking) -> tuple[int, ...]:
    keys = {key for module in ranking.modules for key in module.harm}
    return tuple(sorted({Setting.from_key(key).bits for key in keys if key.startswith("lut")}))


def _group(ranking: Ranking) -> int:
    keys = {key for module in ranking.modules for key in module.harm if key.startswith("lut")}
    sizes = {size for key in keys if (size := Setting.from_key(key).group_size)}
    return min(sizes, default=16)
