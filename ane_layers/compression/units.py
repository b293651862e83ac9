"""The weights of a model that can be compressed, as a recipe speaks of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn

from ane_layers.layers import Embedding, Linear, OutputHead

Kind: TypeAlias = Literal["linear", "head", "embedding"]


@dataclass(frozen=True)
class Unit:
    """One weight, or the pieces of an output head together.

    Attributes:
        name: the module's path: `model.layers.0.mlp.down_proj`, `lm_head`, `model.embed_tokens`.
        kind: what it is.
        layer: the decoder layer it belongs to; None outside of layers.
        weights: parameter path → weight.
    """

    name: str
    kind: Kind
    layer: int | None
    weights: Mapping[str, Tensor]

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def within(self) -> str:
        """The path inside its layer (`mlp.down_proj`), or the whole name."""
        return self.name.split(f".{self.layer}.", 1)[1] if self.layer is not None else self.name


def units(model: nn.Module) -> list[Unit]:
    """Every `Linear`, `Embedding` and `OutputHead` of a model, in the order of its modules.

    A layer's number is that of the outermost `nn.ModuleList` around the module.
    """
    found: list[Unit] = []
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    heads = [path for path, module in model.named_modules() if isinstance(module, OutputHead)]
    for path, module in model.named_modules():
        if isinstance(module, OutputHead):
            pieces = {f"{path}.pieces.{i}.weight".lstrip("."): piece.weight for i, piece in enumerate(_linears(module))}
            found.append(Unit(path, "head", None, pieces))
        elif isinstance(module, Linear | Embedding) and not any(path.startswith(f"{head}.") for head in heads):
            kind: Kind = "linear" if isinstance(module, Linear) else "embedding"
            weights: dict[str, Tensor] = {f"{path}.weight" if path else "weight": module.weight}
            found.append(Unit(path, kind, _layer(path, lists), weights))
    return found


def _linears(head: OutputHead) -> list[Linear]:
    return [piece for piece in head.pieces if isinstance(piece, Linear)]


def _layer(path: str, lists: Sequence[str]) -> int | None:
    for outer in lists:  # outer lists come before those inside of them
        if path.startswith(f"{outer}."):
            return int(path[len(outer) + 1 :].split(".", 1)[0])
    return None


def matching(found: Sequence[Unit], pattern: str, *, within: bool = False) -> list[Unit]:
    """Units whose name, or path inside their layer, matches a shell pattern (`*`, `?`, `[…]`).

    Raises:
        ValueError: if none does, listing what there is.
    """
    chosen = [unit for unit in found if fnmatch.fnmatchcase(unit.within if within else unit.name, pattern)]
    if not chosen:
        known = dict.fromkeys(
            unit.within if within else unit.name.replace(f".{unit.layer}.", ".*.", 1) for unit in found
        )
        raise ValueError(f"pattern {pattern!r} matches no module; there are {', '.join(known)}")
    return chosen
