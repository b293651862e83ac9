"""Measures one part of a model at a time: a layer with its modules, the head, or the embedding."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ane_layers.checkpoint import to_float16_checked
from ane_layers.compression.fisher import (
    Gradients,
    LayerGradients,
    embedding_terms,
    layer_gradients,
    predicted_divergence,
)
from ane_layers.compression.kl import changed_divergence
from ane_layers.compression.plan import compressed_tensor
from ane_layers.compression.replay import Replay
from ane_layers.compression.setting import Setting
from ane_layers.compression.units import Unit, units
from ane_layers.compression.weights import compress_weight
from ane_layers.models import from_folder

Part: TypeAlias = int | str
"""A layer's number, or the name of a module outside of layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What a process needs to measure any part; it can be sent to another machine that sees the same folder.

    Attributes:
        key: equal for equal jobs.
        folder: of the model.
        tokens: windows, int64 `[n, S]`.
        settings: that modules are measured at; layers at the first.
        methods: `"kl"`, `"fisher"` or both.
        samples, seed: see `Gradients`.
    """

    key: str
    folder: str
    tokens: np.ndarray
    settings: tuple[Setting, ...]
    methods: tuple[str, ...]
    samples: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class PartHarm:
    """Harm of a part, in nats per position.

    Attributes:
        part: which.
        layer: of the whole layer compressed at the first setting, by method; empty for what is no layer.
        modules: by method, module and `Setting.key`.
    """

    part: Part
    layer: dict[str, float]
    modules: dict[str, dict[str, dict[str, float]]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        return cls(part=data["part"], layer=data["layer"], modules=data["modules"])


def parts(model: nn.Module) -> list[Part]:
    """The layers, then what stands outside of them."""
    found: dict[Part, None] = {}
    for unit in sorted(units(model), key=lambda unit: unit.layer is None):
        found[unit.name if unit.layer is None else unit.layer] = None
    return list(found)


def measure(job: Job, part: Part) -> PartHarm:
    """Measures a part, in whatever process or thread this is.

    The model, what enters its layers and their gradients are kept for the process's next part of the same job. One part at a time: its
    weights are changed in the shared model.
    """
    with _lock:
        if job.key not in _loaded:
            _loaded.clear()  # before the next is made: two models at once may not fit
            _loaded[job.key] = Meter(job)
        return _loaded[job.key].measure(part)


def release() -> None:
    """Frees what `measure` keeps in this process."""
    with _lock:
        _loaded.clear()


_lock = threading.Lock()
_loaded: dict[str, Meter] = {}


class Meter:
    """A loaded model, ready to measure parts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        tokens = torch.from_numpy(job.tokens)
        self.model = from_folder(job.folder, context_length=tokens.shape[1])
        self.replay = Replay(self.model, tokens)
        self.gradients: Gradients | None = None
        if "fisher" in job.methods:
            self.gradients = Gradients(self.replay, samples=job.samples, seed=job.seed)

    def measure(self, part: Part) -> PartHarm:
        members = [unit for unit in units(self.model) if part in (unit.layer, unit.name)]
        modules: dict[str, dict[str, dict[str, float]]] = {
            method: {unit.name: {} for unit in members} for method in self.job.methods
        }
        inside = self._gradients_inside(part, members)
        together: dict[str, Tensor] = {}
        terms_together = torch.zeros(())
        for unit in members:
            for setting in self.job.settings:
                weights = self._compressed(unit, setting)
                if "kl" in modules:
                    harm = changed_divergence(self.replay, weights, self._start(unit))
                    modules["kl"][unit.name][setting.key] = harm
                if "fisher" in modules:
                    harm, terms = self._predicted(unit, weights, inside)
                    modules["fisher"][unit.name][setting.key] = harm
                if setting == self.job.settings[0] and isinstance(part, int):
                    together |= weights
                    if "fisher" in modules:
                        terms_together = terms_together + terms
        layer = {}
        if isinstance(part, int):
            if "kl" in modules:
                layer["kl"] = changed_divergence(self.replay, together, part)
            if "fisher" in modules:
                layer["fisher"] = predicted_divergence(terms_together)
        return PartHarm(part=part, layer=layer, modules=modules)

    def _compressed(self, unit: Unit, setting: Setting) -> dict[str, Tensor]:
        """A unit's weights as a package would hold them, by path."""
        found = {}
        for path, weight in unit.weights.items():
            stored: np.ndarray = to_float16_checked(path, weight.detach()).numpy()
            found[path] = compressed_tensor(compress_weight(path, stored, setting), weight)
        return found

    def _start(self, unit: Unit) -> int:
        """The first layer that a change of the unit can reach."""
        if unit.layer is not None:
            return unit.layer
        return len(self.replay.layers) if unit.kind == "head" else 0

    def _gradients_inside(self, part: Part, members: Sequence[Unit]) -> LayerGradients | None:
        if self.gradients is None or not isinstance(part, int):
            return None
        return layer_gradients(self.replay, self.gradients, part, [unit.name for unit in members])

    def _predicted(
        self, unit: Unit, weights: Mapping[str, Tensor], inside: LayerGradients | None
    ) -> tuple[float, Tensor]:
        """Predicted harm, and the terms it is made of where it is made of terms."""
        assert self.gradients is not None
        if inside is not None:
            ((path, weight),) = weights.items()
            terms = inside.terms(unit.name, weight - unit.weights[path])
        elif unit.kind == "embedding":
            terms = embedding_terms(self.replay, self.gradients, weights)
        else:  # the change of the logits can be had, so nothing needs to be drawn
            return changed_divergence(self.replay, weights, self._start(unit), second_order=True), torch.zeros(())
        return predicted_divergence(terms), terms
