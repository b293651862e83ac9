"""Finds the files of a package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_file(folder: Path) -> Path:
    """The model file that the manifest of the package in `folder` names as its root.

    Raises:
        ValueError: the folder, its manifest or the file is missing, or the manifest is unsound.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder, expected an .mlpackage")
    manifest = folder / "Manifest.json"
    if not manifest.is_file():
        raise ValueError(f"{manifest}: manifest is missing, {folder.name} is no .mlpackage")
    try:
        content = json.loads(manifest.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{manifest}: not valid JSON: {error}") from error
    root = _field(content, "rootModelIdentifier", manifest)
    items = _field(content, "itemInfoEntries", manifest)
    path = _field(_field(items, root, manifest), "path", manifest)
    return inside(folder, folder / "Data" / path, f"{manifest}: field path is {path!r}")


def inside(folder: Path, file: Path, where: str) -> Path:
    """`file`, if it is one and lies in `folder`: a package must not make its reader open anything else.

    Raises:
        ValueError: it is missing or lies elsewhere; the message starts with `where`.
    """
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{where}, which leads out of the package")
    if not file.is_file():
        raise ValueError(f"{where}, and that file is missing")
    return file


def _field(content: Any, name: str, manifest: Path) -> Any:
    if not isinstance(content, dict) or name not in content:
        raise ValueError(f"{manifest}: field {name} is missing")
    return content[name]
