"""Core AI's Python packages, imported when they are needed, and their noise."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

EXTRA = "pip install 'ane-layers[coreai]'"


def require(name: str) -> Any:
    """A module of `coreai-torch` or `coreai-core`.

    Raises:
        ValueError: they are not installed.
    """
    try:
        with quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"Core AI needs its Python packages: {EXTRA} ({error})") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences a converter that draws progress bars, warns of torch builds by their suffix, and a runtime that logs from native code."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)
