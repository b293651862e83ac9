"""A model as several packages in a folder, each with some of its layers; they hand hidden states over to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ane_layers.chunks import is_package, open_packages
from ane_layers.compression import Compression, Plan, units
from ane_layers.compression.setting import FP16
from ane_layers.conversion.files import move_into_place
from ane_layers.conversion.tracing import late_bound_weights
from ane_layers.conversion.unfinished import chunk_folder
from ane_layers.models.base import CausalLM
from ane_layers.models.part import Part, PartSizes, cut, cut_to
from ane_layers.program import Package


def part_sizes(model: CausalLM, plan: Plan | None = None) -> PartSizes:
    """Bytes that a model's parts take in a package.

    Args:
        model: as it will be converted; its weights may be on the meta device.
        plan: of its compression; fp16 without.
    """
    layers = dict.fromkeys(range(model.part.first, model.part.last), 0)
    apart = {"embedding": 0, "head": 0}
    for unit in units(model):
        stored = 0
        for path, weight in unit.weights.items():
            setting = FP16 if plan is None else plan.settings.get(path, FP16)
            stored += sum(setting.stored_bytes(tuple(weight.shape)))
        if unit.layer is None:
            apart[unit.kind] += stored
        else:
            layers[unit.layer] += stored
    return PartSizes(apart["embedding"], list(layers.values()), apart["head"])


def choose_parts(
    model: CausalLM, plan: Plan | None, *, chunks: int | None, limit: int | None, head_apart: bool
) -> list[Part]:
    """Where to cut a model: into a number of chunks, or as few as keep each within a number of bytes.

    Raises:
        ValueError: for more chunks than layers, or a limit that one layer exceeds.
    """
    sizes = part_sizes(model, plan)
    if limit is None:
        return cut(sizes, 1 if chunks is None else chunks, head_apart=head_apart)
    if chunks is not None:
        raise ValueError(f"chunks ({chunks}) and a limit of bytes ({limit}) exclude each other")
    # Each package has a table of rotary angles of its own, norms, and the alignment of its records.
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith("rotary.table")]
    overhead = sum(2 * table.numel() for table in tables) + (1 << 16)
    return cut_to(sizes, limit - overhead, head_apart=head_apart or None)


def check_folder(target: Path) -> None:
    """Whether a folder of chunks can be written there. Raises `ValueError` with the reason."""
    if is_package(target):
        raise ValueError(f"{target}: several chunks go into a folder; give a name that does not end in .mlpackage")
    if target.exists() and not (target.is_dir() and all(is_package(entry) for entry in target.iterdir())):
        raise ValueError(f"{target}: exists and is no folder of packages, so it is not replaced")
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: is not a folder, so {target.name} cannot be written there")


def convert_chunks(
    make: Callable[[Part], CausalLM],
    parts: Sequence[Part],
    target: str | Path,
    *,
    compression: Compression | None = None,
    run: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Package]:
    """Writes the parts of a model as `chunk_0.mlpackage` … into a folder, which appears once all of them are complete.

    Args:
        make: gives a part of the model when it is needed; one is held at a time.
        parts: in order; see `choose_parts`.
        target: the folder; chunks that are there are replaced.
        compression: of the whole model's weights. It reports on all of them afterwards.
        run: what decides the result (see `conversion.folder`), for a conversion that can be resumed: finished chunks are kept when it is
            interrupted or fails, and a later call with the same `run` goes on from them.
        progress: called with a line of text at each step.
        options: see `CausalLM.convert`.

    Returns:
        The packages as read back from disk.

    Raises:
        ValueError: for a target that cannot be written, or a compressed table that embedding and head share, which two packages cannot.
    """
    target = Path(target)
    say = progress or (lambda line: None)
    check_folder(target)
    plan = None if compression is None else compression.plan
    if plan is not None and len(parts) > 1 and any(plan.settings[path] != FP16 for path in plan.shared):
        raise ValueError(
            f"recipe {plan.recipe.name} keeps embedding and head in one table, and they are in different chunks; give it tied = 'split'"
        )
    with chunk_folder(target, run) as store:
        for part in parts:

            def told(line: str, part: Part = part) -> None:
                say(f"chunk {part.number + 1} of {part.count}: {line}")

            reports = store.finished(part)
            if reports is None:
                told(str(part))
                model = make(part)
                own = None if compression is None else compression.part(late_bound_weights(model))
                model.convert(store.package(part), compression=own, progress=told, **options)
                del model
                reports = [] if own is None else list(own.report.tensors)
                store.add(part, reports)
            else:
                told("finished by an earlier run")
            if compression is not None:
                compression.absorb(reports)
        open_packages(store.chunks)
        move_into_place(store.chunks, target, store.scratch)
    return open_packages(target)
