"""Keeps other people's harmless noise off the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_coremltools() -> Iterator[None]:
    """Silences coremltools' import and conversion messages.

    On Linux it reports that its bindings to Core ML ("Failed to load _MLModelProxy …", coremltools issue 2465) are missing, which only
    prediction needs; it reports torch versions it has not been tested with; and it draws a progress bar a pass. Errors still raise.
    """
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
