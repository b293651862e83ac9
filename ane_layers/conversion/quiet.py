"""What coremltools does besides converting: noise on the terminal, and checks after every pass."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from unittest.mock import patch


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


@contextlib.contextmanager
def checked_once() -> Iterator[None]:
    """Leaves out the whole program's validation after each of some hundred passes, and its text for a log that nobody reads.

    They are four tenths of the time that a graph of 30 layers takes. What comes out is validated once by the caller, and the file is
    read back and checked in any case.
    """
    from coremltools.converters.mil.mil import Program

    def unchecked(self: Program, check_essential_scope: bool = False) -> None:
        """Later."""

    with patch.object(Program, "validate", unchecked), patch.object(Program, "__str__", object.__repr__):
        yield
