"""Runs one function of any package on arrays from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ane_layers.interpreter import Finding, MLProgram, Mode
from ane_layers.writing import write as write_file


def run(
    package: str | Path,
    inputs: Mapping[str, Path],
    *,
    function: str | None = None,
    mode: Mode = "fp32",
    output_dir: Path | None = None,
    diagnose: bool = False,
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Executes a function once; its states, if it has any, are zero.

    Args:
        package: an `.mlpackage`, ours or not.
        inputs: an `.npy` file for each input, of its declared type and shape.
        function: the package's default one if None.
        mode: arithmetic of the interpreter (see `MLProgram`).
        output_dir: where each output is written as `NAME.npy`; made if it is not there, in a folder that is.
        diagnose: look for numbers that leave fp16.

    Returns:
        A summary that is ready for JSON, and the findings of the diagnosis.

    Raises:
        ValueError: the package cannot be run, a file holds no array, an input does not fit, or there is no place for the output's folder.
    """
    if output_dir is not None:
        check_folder(output_dir)  # before anything is run
    program = MLProgram(package, function, mode, diagnose=diagnose)
    arrays = {name: _load(name, file) for name, file in inputs.items()}
    try:
        outputs = program.predict(arrays, program.make_state() if program.function.states else None)
    except TypeError as error:
        # In a library call another type is a programming mistake; in a file it is a user's.
        raise ValueError(str(error)) from error
    summary = {name: summarize(value) for name, value in outputs.items()}
    if output_dir is not None:
        write(outputs, output_dir)
    return {"function": program.function.name, "mode": mode, "outputs": summary}, program.findings


def check_folder(folder: Path) -> None:
    """Whether a folder is there or can be made. Raises `ValueError`: a missing parent is a mistyped path, here as for a package."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file, not a folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder.parent}: is not a folder, so {folder.name} cannot be made there")


def parse_inputs(texts: Sequence[str]) -> dict[str, Path]:
    """`NAME=FILE` as on the command line.

    Raises:
        ValueError: one is not of this form, or a name is given twice.
    """
    inputs: dict[str, Path] = {}
    for text in texts:
        name, separator, file = text.partition("=")
        if not (name and separator and file):
            raise ValueError(f"--input is {text!r}, expected NAME=FILE.npy")
        if name in inputs:
            raise ValueError(f"--input {name!r} is given twice")
        inputs[name] = Path(file)
    return inputs


def summarize(value: Any) -> dict[str, Any]:
    """Type, shape, least and greatest element of an array; min and max are None where there is none, or one is NaN."""
    if not isinstance(value, np.ndarray):
        return {"value": value}  # a classifier's label or probabilities
    empty = value.size == 0
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "min": None if empty else value.min().item(),
        "max": None if empty else value.max().item(),
    }


def write(outputs: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes each array as `NAME.npy`; a file appears when it is complete.

    Raises:
        ValueError: a name is no plain name of a file.
        OSError: the folder cannot be written to.
    """
    arrays = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
    for name in arrays:
        # Names come from the package, which anyone may have made.
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise ValueError(f"output {name!r} is no plain name, and is not written")
    folder.mkdir(exist_ok=True)
    return [_write(array, folder / f"{name}.npy") for name, array in arrays.items()]


def _write(array: np.ndarray, file: Path) -> Path:
    write_file(file, lambda stream: np.save(stream, array, allow_pickle=False))
    return file


def _load(name: str, file: Path) -> np.ndarray:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"input {name!r}: {file} cannot be read as an .npy array ({error})") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"input {name!r}: {file} holds several arrays, expected one")
    return array
