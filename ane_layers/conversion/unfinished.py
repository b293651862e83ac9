"""Where chunks stand until all of them are there: private and gone on any exit, or kept for a conversion that is resumed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ane_layers.compression.report import TensorReport
from ane_layers.conversion.files import workspace
from ane_layers.journal import Journal
from ane_layers.models.part import Part

_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Unfinished:
    """A folder of chunks that is being written.

    Attributes:
        chunks: the folder itself, which becomes the target.
        scratch: that it stands in.
        journal: of finished chunks; None if they are not kept.
    """

    chunks: Path
    scratch: Path
    journal: Journal | None = None
    _finished: dict[int, dict[str, Any]] = field(default_factory=dict)

    def package(self, part: Part) -> Path:
        return self.chunks / f"chunk_{part.number}.mlpackage"

    def finished(self, part: Part) -> list[TensorReport] | None:
        """What compression reported of a chunk that an earlier run finished; None if it has to be converted."""
        entry = self._finished.get(part.number)
        if entry is None or not self.package(part).is_dir() or _size(self.package(part)) != entry["bytes"]:
            return None
        return [TensorReport.from_dict(tensor) for tensor in entry["tensors"]]

    def add(self, part: Part, reports: Sequence[TensorReport]) -> None:
        """Notes that a chunk is complete and checked."""
        if self.journal is not None:
            tensors = [report.as_dict() for report in reports]
            self.journal.add({"chunk": part.number, "bytes": _size(self.package(part)), "tensors": tensors})


@contextlib.contextmanager
def chunk_folder(target: Path, run: Mapping[str, Any] | None) -> Iterator[Unfinished]:
    """A folder for chunks, beside the target.

    Args:
        target: of the conversion.
        run: what decides the chunks' contents, for a conversion that goes on from the finished chunks of an earlier one, and leaves its
            own behind when it fails or is interrupted: a note on the exception tells where. None leaves nothing behind.

    Raises:
        ValueError: if the target's folder cannot be written, or an earlier conversion's chunks are of another run.
    """
    if run is None:
        with workspace(target) as scratch:
            chunks = scratch / target.name
            chunks.mkdir()
            yield Unfinished(chunks, scratch)
        return
    scratch = target.with_name(f"{target.name}.unfinished")
    if scratch.exists() and not scratch.is_dir():
        raise ValueError(f"{scratch}: is a file, where finished chunks are kept")
    try:
        scratch.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{scratch.parent}: cannot be written ({error.strerror})") from error
    journal = Journal(scratch / _JOURNAL, run)
    chunks = scratch / "chunks"
    finished = {entry["chunk"]: entry for entry in journal.finished}
    chunks.mkdir(exist_ok=True)
    # A run that was killed, rather than interrupted, leaves its workspaces and a chunk that it did not come to note.
    for entry in [*chunks.iterdir(), *scratch.glob(".*")]:
        if not (entry.suffix == ".mlpackage" and entry.stem.removeprefix("chunk_") in map(str, finished)):
            shutil.rmtree(entry, ignore_errors=True)
    try:
        yield Unfinished(chunks, scratch, journal, finished)
    except BaseException as error:
        if kept := sum(1 for _ in chunks.glob("chunk_*.mlpackage")):
            error.add_note(
                f"{kept} finished chunks are kept in {scratch}; the same command with --resume goes on from there"
            )
        else:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _size(package: Path) -> int:
    return sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
