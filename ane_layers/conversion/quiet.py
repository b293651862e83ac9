"""What coremltools does besides converting: noise on the terminal, and work that it repeats after every pass."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any
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
def converted_once() -> Iterator[None]:
    """Leaves out what coremltools does again after each of some hundred passes, which is about half of the time that a graph takes.

    - The whole program is validated. The caller does that once, with what comes out; and the file is read back and checked in any case.
    - It is written as text, for a log that nobody reads.
    - Which compressed weights each value depends on is worked out anew, for every value: nothing, while a program has none.
    """
    from coremltools.converters.mil.mil import Block, Program

    propagate = Block._propagate_nonreplaceable_vars
    compressed = False

    def unchecked(self: Program, check_essential_scope: bool = False) -> None:
        """Later."""

    def propagate_if_any(self: Block) -> None:
        nonlocal compressed
        compressed = compressed or any(op.op_type.startswith("constexpr_") for op in _operations(self))
        if compressed:
            propagate(self)

    with (
        patch.object(Program, "validate", unchecked),
        patch.object(Program, "__str__", object.__repr__),
        patch.object(Block, "_propagate_nonreplaceable_vars", propagate_if_any),
    ):
        yield


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


@contextlib.contextmanager
def collected_at_the_end() -> Iterator[None]:
    """Looks for unused cycles once, and only among objects that were made inside.

    A conversion makes millions that are all in use until it ends, and then hundreds of megabytes that are in cycles.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
