"""From a model folder to a package, or to a folder of chunks that are loaded and converted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ane_layers.chunks import is_package
from ane_layers.compression import Compression, Ranking, Recipe
from ane_layers.compression.plan import Importance
from ane_layers.compression.preparation import prepare
from ane_layers.conversion.chunks import check_folder, choose_parts, convert_chunks
from ane_layers.conversion.converter import check_target
from ane_layers.models import open_folder, outline
from ane_layers.models.part import Part
from ane_layers.program import Package


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How a model is divided into packages.

    Attributes:
        chunks: packages with layers; by default as many as the recipe says, or one.
        limit: bytes of weights that a package may have, in place of a number.
        head_apart: whether norm and head are a package of their own.
    """

    chunks: int | None = None
    limit: int | None = None
    head_apart: bool = False

    def of(self, recipe: Recipe | None) -> Chunking:
        """With the recipe's number where none is asked for."""
        if self.chunks is not None or self.limit is not None or recipe is None:
            return self
        return Chunking(chunks=recipe.chunks, head_apart=self.head_apart)

    @property
    def several(self) -> bool:
        """Whether the result is a folder of packages."""
        return self.head_apart or self.limit is not None or (self.chunks or 1) > 1


@dataclass(frozen=True)
class Conversion:
    """What `convert_folder` wrote.

    Attributes:
        packages: one, or the chunks in order.
        compression: with its report; None for fp16.
    """

    packages: list[Package]
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a folder's model is loaded: arguments of `CausalLM.from_pretrained`."""

    context_length: int
    fuse: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


def check_output(target: Path, chunking: Chunking, recipe: Recipe | None) -> None:
    """Whether the result can be written there. Raises `ValueError` with the reason, before anything is loaded."""
    if not chunking.several:
        check_target(target)
    elif is_package(target) and recipe is not None and recipe.chunks == chunking.chunks:
        raise ValueError(
            f"{target}: recipe {recipe.name} makes {recipe.chunks} chunks, which go into a folder; give a name that does not "
            "end in .mlpackage, or ask for one chunk (--chunks 1)"
        )
    else:
        check_folder(target)


def convert_folder(
    folder: str | Path,
    target: str | Path,
    loading: Loading,
    *,
    chunking: Chunking | None = None,
    recipe: Recipe | None = None,
    ranking: str | Path | Ranking | None = None,
    importance: Importance | None = None,
    duplicate_tied: bool = False,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Conversion:
    """Converts a folder in Hugging Face's format.

    Args:
        folder: the model.
        target: a package, or with several chunks the folder of packages.
        loading: context, layout of the weights, options of the family.
        chunking: into how many packages.
        recipe: how weights are stored; fp16 without.
        ranking, importance: for the recipe; see `make_plan`.
        duplicate_tied, progress, options: see `CausalLM.convert`.

    Raises:
        ValueError, ConversionError: nothing is left on disk.
    """
    target = Path(target)
    chunking = (chunking or Chunking()).of(recipe)
    check_output(target, chunking, recipe)

    def load(part: Part | None = None) -> Any:
        return open_folder(
            folder,
            context_length=loading.context_length,
            fuse=loading.fuse,
            part=part,
            **loading.options,
        )

    if not chunking.several:
        model = load()
        compression = None if recipe is None else prepare(model, recipe, ranking=ranking, importance=importance)
        options |= {"compression": compression, "duplicate_tied": duplicate_tied, "progress": progress}
        return Conversion([model.convert(target, **options)], compression)
    whole = outline(folder, context_length=loading.context_length, fuse=loading.fuse, **loading.options)
    compression = None if recipe is None else prepare(whole, recipe, ranking=ranking, importance=importance)
    plan = None if compression is None else compression.plan
    parts = choose_parts(whole, plan, chunks=chunking.chunks, limit=chunking.limit, head_apart=chunking.head_apart)
    packages = convert_chunks(
        load,
        parts,
        target,
        compression=compression,
        duplicate_tied=duplicate_tied,
        progress=progress,
        **options,
    )
    return Conversion(packages, compression)
