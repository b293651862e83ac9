"""Recipes: how the weights of a model are stored, as data."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ane_layers.compression.setting import FP16, Setting

Tied = Literal["split", "share"]
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """The layers that a sensitivity ranking puts first, stored with more bits.

    Args:
        layers: how many.
        setting: for them.
        modules: pattern of the path inside a layer: `*` promotes the whole layer, `mlp.*` its feed-forward part only.
    """

    layers: int
    setting: Setting
    modules: str = "*"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Bits chosen for each module, so that the predicted harm is least within a budget.

    Args:
        bits_per_weight: the budget, as an average over the bits that a decoded token reads: all linear layers and the head, tables
            included. The embedding is read by rows and has its own section.
        bits: widths to choose from.
        group_size: output channels that share a table; every width is also tried with one table per tensor.
    """

    bits_per_weight: float
    bits: tuple[int, ...] = (2, 3, 4, 6, 8)
    group_size: int = 16

    @property
    def candidates(self) -> list[Setting]:
        """Every setting that a module may get."""
        return [Setting(bits=bits, group_size=size) for bits in self.bits for size in (self.group_size, None)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How each weight of a model is stored. Sections apply in the order in which they are listed; later ones win.

    Args:
        name: for reports and the package's metadata.
        description: a line for readers.
        chunks: packages that the build has.
        tied: for a table that embedding and head share: `"split"` stores it twice, each with its own setting; `"share"` once, and their
            settings must be equal.
        layers: linear layers inside decoder layers.
        promoted: layers with more bits, by a ranking.
        allocation: bits by predicted harm, by a ranking; in place of `layers`, `promoted` and `head`.
        head: the output head.
        embedding: the token table.
        modules: settings by shell patterns of module paths (`model.layers.0.*`).
    """

    name: str
    description: str = ""
    chunks: int = 1
    tied: Tied = "split"
    layers: Setting = FP16
    promoted: Promotion | None = None
    allocation: Allocation | None = None
    head: Setting = FP16
    embedding: Setting = FP16
    modules: tuple[tuple[str, Setting], ...] = field(default=())

    def __post_init__(self) -> None:
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"chunks must be a positive integer, got {self.chunks!r}")
        if self.tied not in get_args(Tied):
            raise ValueError(f"tied must be one of {', '.join(get_args(Tied))}, got {self.tied!r}")
        if self.tied == "share" and self.head != self.embedding:
            raise ValueError(
                f"tied is 'share', but head ({self.head}) and embedding ({self.embedding}) differ; give both the same setting, "
                "or set tied = 'split', which stores the table twice"
            )
        if self.allocation is not None and self.promoted is not None:
            raise ValueError("allocation and promoted exclude each other")

    @property
    def needs_ranking(self) -> bool:
        return self.promoted is not None or self.allocation is not None


def shipped() -> list[str]:
    """Names of the recipes that come with the library."""
    folder = files("ane_layers.compression") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(source: str | Path) -> Recipe:
    """A shipped recipe by name, or one from a file whose name ends in `.toml`.

    Raises:
        ValueError: naming the file, the key and the value.
    """
    if str(source).endswith(".toml"):
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
        return parse_recipe(text, name=path.stem, file=str(path))
    if str(source) not in shipped():
        raise ValueError(
            f"recipe {str(source)!r} is not known; there are {', '.join(shipped())}, or give a file that ends in .toml"
        )
    text = (files("ane_layers.compression") / "recipes" / f"{source}.toml").read_text(encoding="utf-8")
    return parse_recipe(text, name=str(source), file=f"{source}.toml")


def parse_recipe(text: str, *, name: str, file: str) -> Recipe:
    """A recipe from TOML. Raises `ValueError` naming the file, the key and the value."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: is not valid TOML ({error})") from error
    known = {part.name for part in dataclasses.fields(Recipe)} - {"name"}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    values: dict[str, Any] = {"name": name}
    for key, value in data.items():
        if key in ("layers", "head", "embedding"):
            values[key] = _setting(value, f"{file}: [{key}]")
        elif key == "promoted":
            values[key] = _promotion(value, f"{file}: [promoted]")
        elif key == "allocation":
            values[key] = _allocation(value, f"{file}: [allocation]")
        elif key == "modules":
            values[key] = _modules(value, file)
        elif key == "description" and not isinstance(value, str):
            raise ValueError(f"{file}: description must be a text, got {value!r}")
        else:
            values[key] = value
    try:
        return Recipe(**values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _table(value: Any, where: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table of keys, got {value!r}")
    if unknown := sorted(set(value) - set(allowed)):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(allowed)}")
    return value


_SETTING = ("scheme", "bits", "group_size", "block_size")


def _setting(value: Any, where: str, extra: tuple[str, ...] = ()) -> Setting:
    table = _table(value, where, (*_SETTING, *extra))
    values = {key: table[key] for key in _SETTING if key in table}
    scheme = values.get("scheme", "lut")
    if scheme == "fp16":
        values.setdefault("bits", 16)
    elif "bits" not in values:
        raise ValueError(f"{where}: key bits is missing")
    try:
        return Setting(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _promotion(value: Any, where: str) -> Promotion:
    setting = _setting(value, where, ("layers", "modules"))
    layers, modules = value.get("layers"), value.get("modules", "*")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise ValueError(f"{where}: layers must be a number of layers, got {layers!r}")
    if not isinstance(modules, str):
        raise ValueError(f"{where}: modules must be a pattern such as 'mlp.*', got {modules!r}")
    return Promotion(layers=layers, setting=setting, modules=modules)


def _allocation(value: Any, where: str) -> Allocation:
    table = _table(value, where, ("bits_per_weight", "bits", "group_size"))
    budget, bits, group_size = (
        table.get("bits_per_weight"),
        table.get("bits", [2, 3, 4, 6, 8]),
        table.get("group_size", 16),
    )
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 1 <= budget <= 16:
        raise ValueError(f"{where}: bits_per_weight must be within 1 … 16, got {budget!r}")
    if not isinstance(bits, list) or not bits:
        raise ValueError(f"{where}: bits must be a list of widths, got {bits!r}")
    try:
        for width in bits:
            Setting(bits=width, group_size=group_size)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Allocation(bits_per_weight=float(budget), bits=tuple(sorted(bits)), group_size=group_size)


def _modules(value: Any, file: str) -> tuple[tuple[str, Setting], ...]:
    if not isinstance(value, list):
        raise ValueError(f"{file}: modules must be written as [[modules]] sections, got {value!r}")
    found = []
    for number, entry in enumerate(value, 1):
        where = f"{file}: [[modules]] number {number}"
        setting = _setting(entry, where, ("match",))
        if not isinstance(entry.get("match"), str):
            raise ValueError(f"{where}: match must be a pattern such as 'model.layers.0.*', got {entry.get('match')!r}")
        found.append((entry["match"], setting))
    return tuple(found)


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML text that `parse_recipe` reads back; used for allocated ones."""

    def lines(values: Mapping[str, Any]) -> list[str]:
        written = []
        for key, value in values.items():
            if value is None:
                continue
            if isinstance(value, tuple):
                value = list(value)
            text = (
                repr(value)
                if not isinstance(value, str)
                else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
            )
            written.append(f"{key} = {text}")
        return written

    def setting(value: Setting) -> dict[str, Any]:
        return dataclasses.asdict(value)

    top = {"description": recipe.description, "chunks": recipe.chunks, "tied": recipe.tied}
    parts = [lines(top)]
    parts += [[f"[{key}]", *lines(setting(getattr(recipe, key)))] for key in ("layers", "head", "embedding")]
    if recipe.promoted is not None:
        promoted = recipe.promoted
        head = {"layers": promoted.layers, "modules": promoted.modules}
        parts.append(["[promoted]", *lines(head | setting(promoted.setting))])
    if recipe.allocation is not None:
        parts.append(["[allocation]", *lines(dataclasses.asdict(recipe.allocation))])
    parts += [["[[modules]]", *lines({"match": match} | setting(value))] for match, value in recipe.modules]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
