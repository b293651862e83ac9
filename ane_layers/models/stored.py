"""Weights that stay in their folder until they are written into a package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ane_layers.models.part import Part

if TYPE_CHECKING:
    from ane_layers.models.base import CausalLM

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class StoredWeights:
    """Reads a model's large weights when they are asked for: a layer's together, as they are after `fuse`, and one layer at a time.

    Args:
        load: gives a part of the model with its weights.
    """

    def __init__(self, load: Callable[[Part], CausalLM]) -> None:
        self._load = load
        self._part: Part | None = None
        self._weights: dict[str, Tensor] = {}

    def __call__(self, path: str) -> Tensor:
        """The weight of a parameter path. What was read before it is let go, so ask in the order of the layers."""
        part = _part_of(path)
        if part != self._part:
            self._weights = {}  # before the next part is read
            self._weights = dict(self._load(part).named_parameters())
            self._part = part
        return self._weights[path].detach()


def _part_of(path: str) -> Part:
    if match := _LAYER.match(path):
        number = int(match[1])
        return Part(first=number, last=number + 1, embedding=False, head=False, count=2)
    head = path.startswith("lm_head.")
    return Part(first=0, last=0, embedding=not head, head=head, count=2)
