"""From a model folder to a package, or to a folder of chunks that are loaded and converted one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ane_layers
from ane_layers.chunks import is_package
from ane_layers.compression import Compression, Ranking, Recipe
from ane_layers.compression.plan import Importance
from ane_layers.compression.preparation import prepare
from ane_layers.conversion.chunks import check_folder, choose_parts, convert_chunks
from ane_layers.conversion.converter import check_target
from ane_layers.journal import folder_facts
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


def check_output(target: Path, chunking: Chunking, recipe: Recipe | None, *, resume: bool = False) -> None:
    """Whether the result can be written there. Raises `ValueError` with the reason, before anything is loaded."""
    if not chunking.several:
        check_target(target)
        if resume:
            raise ValueError(
                f"{target}: is one package, and only finished chunks can be resumed; ask for several (--chunks)"
            )
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
    resume: bool = False,
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
        resume: whether finished chunks are kept when the conversion is interrupted or fails, beside the target in `<target>.unfinished`,
            and those that an earlier one left are taken over.
        duplicate_tied, progress, options: see `CausalLM.convert`.

    Raises:
        ValueError, ConversionError: nothing is left on disk, but for chunks kept by `resume`. Also for chunks that were left by a
            conversion of another model or with other settings.
    """
    target = Path(target)
    chunking = (chunking or Chunking()).of(recipe)
    check_output(target, chunking, recipe, resume=resume)

    arguments = {"context_length": loading.context_length, "fuse": loading.fuse, **loading.options}
    if not chunking.several:
        model = open_folder(folder, **arguments)
        compression = None if recipe is None else prepare(model, recipe, ranking=ranking, importance=importance)
        options |= {"compression": compression, "duplicate_tied": duplicate_tied, "progress": progress}
        return Conversion([model.convert(target, **options)], compression)
    # Embedding and head, which a loaded model may share, are in different packages: planned without weights, each gets a table.
    whole = outline(folder, **arguments)
    compression = None if recipe is None else prepare(whole, recipe, ranking=ranking, importance=importance)
    plan = None if compression is None else compression.plan
    parts = choose_parts(whole, plan, chunks=chunking.chunks, limit=chunking.limit, head_apart=chunking.head_apart)
    settings = {"duplicate_tied": duplicate_tied, **options}
    run = _facts(Path(folder), loading, parts, compression, settings) if resume else None
    packages = convert_chunks(
        open_folder(folder, **arguments).take_part,
        parts,
        target,
        compression=compression,
        run=run,
        progress=progress,
        **settings,
    )
    return Conversion(packages, compression)


def _facts(
    folder: Path, loading: Loading, parts: Sequence[Part], compression: Compression | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides the contents of chunks: a conversion goes on only from those that were made with the same."""
    plan = None if compression is None else compression.plan
    importance = hashlib.sha256()
    for path, moments in sorted(plan.importance.items()) if plan is not None else []:
        importance.update(path.encode() + moments.numpy().tobytes())
    return {
        "ane_layers": ane_layers.__version__,
        "coremltools": version("coremltools"),
        "torch": version("torch"),
        "model": folder_facts(folder),
        "loading": [loading.context_length, loading.fuse, dict(loading.options)],
        "parts": [asdict(part) for part in parts],
        "recipe": None if plan is None else {path: setting.key for path, setting in plan.settings.items()},
        "importance": importance.hexdigest(),
        "settings": dict(settings),
    }
