"""The folding on a package on disk, on any machine: its model file is changed, its weight file is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ane_layers.chunks import CONFIG_KEY
from ane_layers.program import Package
from ane_layers.program.files import model_file
from ane_layers.program.protocol import model_class
from ane_layers.rewrite.equality import Equality, equality
from ane_layers.rewrite.planning import Plan, plan, repeated
from ane_layers.rewrite.report import FoldReport, FunctionReport
from ane_layers.rewrite.saved import rewrite_function

GATE_DB = 80.0
"""Least agreement in fp32 arithmetic: sums in another order leave more than 120 dB, a wrong head next to nothing."""


@dataclass(frozen=True)
class FoldedPackage:
    """A folded package, what was done to it, and how far it agrees with the original (None if that was not asked for)."""

    package: Package
    report: FoldReport
    equality: Equality | None

    def as_dict(self) -> dict[str, Any]:
        return self.report.as_dict() | {"equality": self.equality.as_dict() if self.equality is not None else None}


def plan_package(package: Package) -> dict[str, Plan]:
    """What would be done to each function, without doing it."""
    return {name: plan(function) for name, function in package.functions.items()}


def fold_package(
    source: str | Path,
    target: str | Path,
    *,
    check: bool = True,
    calls: int = 3,
    progress: Callable[[str], None] | None = None,
) -> FoldedPackage:
    """Writes a package whose attention reads keys and values unrepeated, beside the original.

    The result is read back from disk and, with `check`, run against the original in the interpreter, before it gets its name. A failure
    or an interrupt leaves nothing.

    Args:
        source: an `.mlpackage`, whoever made it.
        target: of the new one, ending in `.mlpackage`. One that exists is replaced; `source` itself is not.
        check: whether both are run on random inputs, every function `calls` times.
        calls: see `check`.
        progress: called with a line of text at each step.

    Raises:
        ValueError: nothing can be folded (with the reasons), a package cannot be read or written, or the two do not agree.
    """
    # What lays packages out and moves them into place comes with conversion; the converter itself is not imported.
    from ane_layers.conversion.converter import check_target
    from ane_layers.conversion.files import move_into_place, workspace

    source, target = Path(source), Path(target)
    say = progress or (lambda line: None)
    check_target(target)
    if target.resolve() == source.resolve():
        raise ValueError(f"{target}: is the package that is read; give the folded one another name")
    original = Package.open(source)
    say("looking for repeated keys and values")
    plans = plan_package(original)
    if not any(each.folded for each in plans.values()):
        raise ValueError(f"{source}: nothing to fold: {_why(plans)}")
    with workspace(target) as folder:
        made = folder / target.name
        say("copying the package")
        shutil.copytree(source, made)
        file = model_file(made)
        model = model_class()()
        model.ParseFromString(file.read_bytes())
        for name, each in plans.items():
            if each.folded:
                rewrite_function(model.mlProgram.functions[name], each)
        _note_sharing(model)
        file.write_bytes(model.SerializeToString(deterministic=True))
        say("reading back and checking")
        written = Package.open(made)
        report = _report(original, written, plans)
        agreed = equality(original, written, calls=calls, progress=say) if check else None
        if agreed is not None and not agreed.least >= GATE_DB:
            raise ValueError(
                f"{target}: agrees with the original to {agreed.least:.1f} dB only, less than {GATE_DB:g} dB"
            )
        move_into_place(made, target, folder)
    return FoldedPackage(replace(written, path=target), report, agreed)


def _note_sharing(model: Any) -> None:
    """Has the metadata of one of our own packages name the way in which heads are shared now, unless something is still repeated."""
    entries = model.description.metadata.userDefined
    blocks = [
        block for function in model.mlProgram.functions.values() for block in function.block_specializations.values()
    ]
    if CONFIG_KEY not in entries or any(operation.type == "tile" for block in blocks for operation in block.operations):
        return
    try:
        config = json.loads(entries[CONFIG_KEY])
    except json.JSONDecodeError:
        return  # damaged before; folding needs none of it
    if isinstance(config, dict):
        entries[CONFIG_KEY] = json.dumps(config | {"head_sharing": "fold"})


def _report(original: Package, written: Package, plans: dict[str, Plan]) -> FoldReport:
    return FoldReport(
        tuple(
            FunctionReport(
                name, each.folded, each.refused, repeated(original.functions[name]), repeated(written.functions[name])
            )
            for name, each in plans.items()
        )
    )


def _why(plans: dict[str, Plan]) -> str:
    largest = sorted(
        (refused for each in plans.values() for refused in each.refused), key=lambda refused: -(refused.bytes or 0)
    )
    if not largest:
        return "no data is repeated"
    return f"{largest[0].operation} ({largest[0].type}): {largest[0].reason}"
