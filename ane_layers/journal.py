"""A file of finished parts, so that a long run that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "ane_layers.journal"


class Journal:
    """Lines of JSON: what the run is, then each finished part's result, on disk before `add` returns.

    Args:
        path: of the file; made when the first part is finished.
        run: what decides the results. Nothing that another run left is taken over.

    Attributes:
        finished: the results that the file holds.

    Raises:
        ValueError: if the file is of another run, is no journal, or is damaged other than by a torn last line.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self._header: dict[str, Any] = {"format": FORMAT, "run": json.loads(json.dumps(run))}  # as it is read back
        self.finished: list[Any] = []
        self._size = 0
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent}: is not a folder, so {path.name} cannot be written there")
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
        whole = data[: data.rfind(b"\n") + 1]  # an interrupt may have torn the line behind
        if whole:
            header, *rest = whole.splitlines()
            self._check(self._parse(header, 1))
            self.finished = [self._parse(line, number) for number, line in enumerate(rest, 2)]
            self._size = len(whole)
        elif not _line(self._header).startswith(data):
            raise ValueError(f"{path}: is no journal of an interrupted run; give another name")

    def add(self, result: Any) -> None:
        """Appends a part's result."""
        lines = _line(result) if self._size else _line(self._header) + _line(result)
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(lines)

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{self.path}: line {number} is damaged, or this is no journal; delete the file to begin anew"
            ) from error

    def _check(self, header: Any) -> None:
        if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("run"), dict):
            raise ValueError(f"{self.path}: is no journal of an interrupted run; give another name")
        expected, found = self._header["run"], header["run"]
        if differing := [name for name in {**expected, **found} if expected.get(name) != found.get(name)]:
            raise ValueError(
                f"{self.path}: was left by a run with other {', '.join(differing)}; finish that run, or delete the file to begin anew"
            )


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def folder_facts(folder: Path) -> list[list[Any]]:
    """What tells one checkpoint from another without reading it: the config's hash; names, sizes and times of the weights' files."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    weights = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return [["config.json", config], *([name, stat.st_size, stat.st_mtime_ns] for name, stat in weights)]
