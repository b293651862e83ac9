"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_json(value: dict[str, Any], file: Path) -> None:
    """Writes a JSON object; see `write`."""
    text = json_text(value) + "\n"
    write(file, lambda stream: stream.write(text.encode()))


def json_text(value: dict[str, Any]) -> str:
    """As JSON, which has no infinity: one that stands for an exact match becomes null, and so does NaN."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(file: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Lets `fill` write into a temporary file beside the target, then renames it. A failure or an interrupt leaves nothing.

    Raises:
        OSError: the folder cannot be written to.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            fill(stream)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    # There is no way to read it without setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
