"""What a folding did, what it left alone, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Folded:
    """One attention whose keys and values are read unrepeated now.

    Attributes:
        scores: names of the products of queries and keys, or of the fused operation.
        values: names of the products with values.
        groups: G, query heads for each KV head.
        rows: S, tokens of a call.
        removed: the operations that repeated, now gone.
    """

    scores: tuple[str, ...]
    values: tuple[str, ...]
    groups: int
    rows: int
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A repetition that was left as it is, with the bytes that it writes (None if a dimension is open)."""

    operation: str
    type: str
    bytes: int | None
    reason: str


@dataclass(frozen=True)
class Repeated:
    """Operations that only repeat data (see `ane_layers.analysis.movement.repeats`), those among them that are `tile`, and bytes that
    they write; all operations that are no constants."""

    tiles: int
    tile_bytes: int
    repetitions: int
    repetition_bytes: int
    operations: int


@dataclass(frozen=True)
class FunctionReport:
    """One function of a program. Shapes that are open count as no bytes."""

    function: str
    folded: tuple[Folded, ...]
    refused: tuple[Refused, ...]
    before: Repeated
    after: Repeated


@dataclass(frozen=True)
class FoldReport:
    """All functions of a program, in order."""

    functions: tuple[FunctionReport, ...]

    @property
    def folded(self) -> int:
        """Attentions folded, in all functions."""
        return sum(len(function.folded) for function in self.functions)

    @property
    def refused(self) -> tuple[Refused, ...]:
        return tuple(refused for function in self.functions for refused in function.refused)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON: `{"functions": {NAME: {"folded", "refused", "before", "after"}}}`."""
        functions = {}
        for function in self.functions:
            entry = asdict(function)
            functions[entry.pop("function")] = entry
        return {"functions": functions}
