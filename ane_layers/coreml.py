"""Core ML itself as the runtime of a session, on a Mac."""

from __future__ import annotations

import platform
import warnings
from typing import TYPE_CHECKING

from ane_layers.conversion.quiet import quiet_coremltools

if TYPE_CHECKING:
    from ane_layers.generation import Runtime

MACOS = 15  # the first with states


def coreml_runtime(path: str, function_name: str) -> Runtime:
    """One function of a package, loaded by Core ML for the CPU and the Neural Engine.

    Which of the two runs an operation is Core ML's choice. Functions of one package share a state.

    Args:
        path: of the package.
        function_name: such as `"decode"`.

    Raises:
        ValueError: the system is not macOS 15 or later, or Core ML does not load the package.
    """
    release = platform.mac_ver()[0]
    if not release or int(release.split(".")[0]) < MACOS:
        system = f"macOS {release}" if release else platform.system()
        raise ValueError(
            f"--runtime coreml needs macOS {MACOS} or later, this is {system}; the interpreter runs anywhere"
        )
    with quiet_coremltools():
        import coremltools
    with warnings.catch_warnings(record=True) as caught:
        # coremltools warns of a model that does not load, and fails only when it is to predict.
        warnings.simplefilter("always")
        model = coremltools.models.MLModel(
            path, function_name=function_name, compute_units=coremltools.ComputeUnit.CPU_AND_NE
        )
    if model.__proxy__ is None:
        reasons = " ".join(" ".join(str(warning.message) for warning in caught).split())
        raise ValueError(
            f"{path}: Core ML did not load function {function_name!r}: {reasons or 'its bindings are missing in coremltools'}"
        )
    runtime: Runtime = model
    return runtime
