"""Compresses a model's weights in PyTorch, to the values that its package will hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ane_layers.checkpoint import to_float16_checked
from ane_layers.compression.plan import Plan, compressed_tensor
from ane_layers.compression.report import CompressionReport, TensorReport, report_compressed, report_plain
from ane_layers.compression.setting import FP16
from ane_layers.compression.units import units
from ane_layers.compression.weights import CompressedWeight


@dataclass(eq=False)
class Compression:
    """A source of compressed weights for conversion, and a record of what it did.

    Made from a plan alone it compresses each weight when it is asked for, and keeps none. `compress` returns one that keeps what it gave
    to the model, so that conversion writes the very same.
    """

    plan: Plan
    kept: dict[str, CompressedWeight] = field(default_factory=dict)
    _reports: dict[str, TensorReport] = field(default_factory=dict)

    def weight(self, path: str, weight: Tensor) -> CompressedWeight | None:
        """The compressed form of a weight; None if it stays fp16.

        Raises:
            ValueError: if the weight changed after `compress`, or fp16 cannot hold it.
        """
        if path in self.kept:
            if not torch.equal(compressed_tensor(self.kept[path], weight), weight.detach()):
                raise ValueError(f"{path}: was changed after it was compressed; compress the model again")
            return self.kept[path]
        compressed = self.plan.compress(path, weight)
        setting = self.plan.settings.get(path, FP16)
        if compressed is None:
            reason = "not in the recipe" if path not in self.plan.settings else f"recipe {self.plan.recipe.name}: fp16"
            self._reports[path] = report_plain(path, tuple(weight.shape), reason)
            return None
        self._reports[path] = report_compressed(path, compressed, setting, note=self._note(path, weight))
        return compressed

    def share(self, path: str, owner: str, weight: Tensor) -> None:
        """Notes that a weight's bytes are part of another's."""
        self._reports[path] = report_plain(path, tuple(weight.shape), f"part of the table of {owner}", shared=True)

    def part(self, paths: Collection[str]) -> Compression:
        """The compression of a part of the model, which has these weights alone."""
        kept = {path: weight for path, weight in self.kept.items() if path in paths}
        reports = {path: report for path, report in self._reports.items() if path in paths}
        return Compression(self.plan.part(paths), kept, reports)

    def absorb(self, reports: Iterable[TensorReport]) -> None:
        """Takes over what a part's compression has to report."""
        self._reports |= {report.path: report for report in reports}

    def leave(self, path: str, tensor: Tensor, reason: str) -> None:
        """Notes a tensor that no recipe compresses."""
        self._reports[path] = report_plain(path, tuple(tensor.shape), reason)

    def _note(self, path: str, weight: Tensor) -> str:
        asked = self.plan.asked.get(path)
        fitted = self.plan.settings[path]
        return "" if asked in (None, fitted) else f"{asked} does not fit {list(weight.shape[:2])}: {fitted}"

    @property
    def report(self) -> CompressionReport:
        """What was done so far, in the order of the model's modules; what no recipe compresses comes last."""
        order = {path: place for place, path in enumerate(self.plan.settings)}
        tensors = sorted(self._reports.values(), key=lambda tensor: order.get(tensor.path, len(order)))
        return CompressionReport(self.plan.recipe.name, tuple(tensors))


def compress(model: nn.Module, plan: Plan, *, progress: Callable[[str], None] | None = None) -> Compression:
    """Replaces the weights of a model by the values that a package made with `plan` holds, bit for bit.

    Weights that stay fp16 are rounded to it. Norms and biases are left as they are: conversion works them into constants of its own.

    Args:
        model: changed in place.
        plan: made for this model (`make_plan`).
        progress: called with a line of text now and then.

    Returns:
        To be given to `convert`, so that nothing is compressed twice; `report` tells what was done.

    Raises:
        ValueError: naming the weight, if fp16 cannot hold it or its setting does not fit.
    """
    compression = Compression(plan)
    found = units(model)
    with torch.no_grad():
        for count, unit in enumerate(found):
            if progress is not None:
                progress(f"compressing {unit.name} ({count + 1} of {len(found)})")
            for path, weight in unit.weights.items():
                if path in plan.shared and unit.kind == "head":
                    continue  # follows from the embedding's, below
                compressed = compression.weight(path, weight)
                if compressed is None:
                    _assign(model, path, to_float16_checked(path, weight).to(weight.dtype))
                else:
                    compression.kept[path] = compressed
                    _assign(model, path, compressed_tensor(compressed, weight))
        _share(model, compression)
    compressed_paths = {path for unit in found for path in unit.weights}
    for path, parameter in model.named_parameters():
        if path not in compressed_paths:
            compression.leave(path, parameter, "norms and biases are few, and stay fp16")
    return compression


def _share(model: nn.Module, compression: Compression) -> None:
    """Makes the pieces of a tied head views of the embedding again."""
    found = units(model)
    for head in (unit for unit in found if unit.kind == "head"):
        pieces = [path for path in head.weights if path in compression.plan.shared]
        if not pieces:
            continue
        owner = next(
            path
            for unit in found
            if unit.kind == "embedding"
            for path in unit.weights
            if path in compression.plan.shared
        )
        table = model.get_parameter(owner).detach()
        first = 0
        for path in pieces:
            piece = head.weights[path]
            rows = table[first : first + piece.shape[0]].reshape(piece.shape)
            first += piece.shape[0]
            _assign(model, path, rows)
            compression.share(path, owner, rows)


def _assign(model: nn.Module, path: str, value: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, nn.Parameter(value, requires_grad=False))
