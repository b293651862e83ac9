"""A measured sensitivity ranking, as `ane-layers sensitivity` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

FORMAT = "ane_layers.ranking"
VERSION = 1


@dataclass(frozen=True)
class ModuleHarm:
    """What compressing one module alone does to the model's output.

    Attributes:
        name: the module's path, as in `Unit.name`.
        layer: its decoder layer; None for head and embedding.
        harm: by `Setting.key`: the mean Kullback-Leibler divergence from the original's next-token distribution, in nats, measured or
            predicted.
    """

    name: str
    layer: int | None
    harm: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Harm of layers and modules.

    Attributes:
        method: `"kl"`, measured by recomputing, or `"fisher"`, predicted from gradients.
        model: what was ranked: `model_type`, `num_hidden_layers`, `hidden_size`, `vocab_size`.
        setting: `Setting.key` that the layers are ranked at.
        tokens: of calibration text.
        layers: harm of compressing each whole layer at `setting`, by layer number.
        modules: harm of each module, at `setting` and perhaps others.
        agreement: of this ranking with the other method's, where both were run.
    """

    method: str
    model: Mapping[str, Any]
    setting: str
    tokens: int
    layers: Mapping[int, float]
    modules: tuple[ModuleHarm, ...]
    agreement: Mapping[str, float] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """Layer numbers, the most harmed first; equal ones by number."""
        return sorted(self.layers, key=lambda layer: (-self.layers[layer], layer))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; layers and modules with the most harm first."""
        modules = sorted(self.modules, key=lambda module: -module.harm.get(self.setting, 0.0))
        return {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method,
            "model": dict(self.model),
            "setting": self.setting,
            "tokens": self.tokens,
            "layers": [{"layer": layer, "harm": self.layers[layer]} for layer in self.order],
            "modules": [asdict(module) | {"harm": dict(module.harm)} for module in modules],
            "agreement": dict(self.agreement),
        }

    @classmethod
    def from_dict(cls, data: Any, *, file: str = "ranking") -> Self:
        """The reverse of `as_dict`. Raises `ValueError` naming the file and what is wrong."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{file}: is no ranking; `ane-layers sensitivity` writes one")
        if data.get("version") != VERSION:
            raise ValueError(f"{file}: field version is {data.get('version')!r}, expected {VERSION}")
        try:
            return cls(
                method=str(data["method"]),
                model=dict(data["model"]),
                setting=str(data["setting"]),
                tokens=int(data["tokens"]),
                layers={int(entry["layer"]): float(entry["harm"]) for entry in data["layers"]},
                modules=tuple(
                    ModuleHarm(
                        str(entry["name"]),
                        None if entry["layer"] is None else int(entry["layer"]),
                        {str(key): float(value) for key, value in entry["harm"].items()},
                    )
                    for entry in data["modules"]
                ),
                agreement={str(key): float(value) for key, value in data.get("agreement", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}: is a damaged ranking ({type(error).__name__}: {error})") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a file. Raises `ValueError` naming it."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{path}: is not valid JSON ({error})") from error
        return cls.from_dict(data, file=str(path))

    def check_model(self, model: Mapping[str, Any], *, file: str = "ranking") -> None:
        """Whether the ranking is of this model. Raises `ValueError` naming the first field that differs."""
        for name, value in self.model.items():
            if model.get(name) != value:
                raise ValueError(f"{file}: ranks a model with {name} {value}, this one has {model.get(name)}")


def model_facts(config: Any) -> dict[str, Any]:
    """The fields of a config by which a ranking knows its model."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    return {name: getattr(config, name) for name in names}
