"""Writing a package so that it is either whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

_AUTHOR = "com.apple.CoreML"
_NAMESPACE = uuid.UUID("a3d1d6c4-6f0c-4a52-9c39-5e0e7f6f4f0a")


@contextlib.contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A private folder beside `target`, on the same file system, removed on every exit, an interrupt included.

    Everything temporary goes there, coremltools' own packages too: it leaves them in the system's folder until the process ends, and
    for good if it is killed (coremltools issue 2670).

    Raises:
        ValueError: if the folder that `target` should stand in does not exist or cannot be written.
    """
    parent = target.parent
    if not parent.is_dir():
        raise ValueError(f"{parent}: is not a folder, so {target.name} cannot be written there")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
    except OSError as error:
        raise ValueError(f"{parent}: cannot be written ({error.strerror})") from error
    previous = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = previous
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(package: Path) -> None:
    """Lays out an `.mlpackage` around `Data/com.apple.CoreML/{model.mlmodel, weights}`.

    The identifiers are derived from the items' names rather than drawn, so that the same program gives the same bytes.
    """
    entries = {}
    for name, path, description in (
        ("model.mlmodel", f"{_AUTHOR}/model.mlmodel", "CoreML Model Specification"),
        ("weights", f"{_AUTHOR}/weights", "CoreML Model Weights"),
    ):
        identifier = str(uuid.uuid5(_NAMESPACE, name)).upper()
        entries[identifier] = {"author": _AUTHOR, "description": description, "name": name, "path": path}
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": entries,
        "rootModelIdentifier": next(iter(entries)),
    }
    (package / "Manifest.json").write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


def move_into_place(package: Path, target: Path, folder: Path) -> None:
    """Puts a finished package where it belongs; an older one there is only then removed (with the workspace `folder`)."""
    previous = folder / "replaced"
    try:
        if target.exists():
            os.replace(target, previous)
        os.replace(package, target)
    except BaseException:
        # An interrupt between the two must not cost the older package, which would go with the workspace.
        if previous.exists() and not target.exists():
            os.replace(previous, target)
        raise
