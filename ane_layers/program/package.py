"""Opens an `.mlpackage`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ane_layers.program.files import model_file
from ane_layers.program.program import ProgramReader
from ane_layers.program.protocol import model_class
from ane_layers.program.types import Function


@dataclass(frozen=True, eq=False)
class Package:
    """A saved ML Program. `metadata` is what its maker put into it (the user-defined entries).

    Example:
        >>> package = Package.open("model.mlpackage")
        >>> [operation.type for operation in package.functions["main"].block.walk()]
    """

    path: Path
    specification_version: int
    functions: Mapping[str, Function]
    default_function: str
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Package:
        """Reads and checks the package in the folder `path`. Weights stay on disk until a constant is asked for.

        Raises:
            ValueError: the folder or one of its files is missing, damaged or inconsistent, or the model is not an
                ML Program. The message names the file, the field and the value.
        """
        folder = Path(path)
        file = model_file(folder)
        model = _parse(file)
        try:
            functions = ProgramReader(folder, file).functions(model)
        except RecursionError as error:
            raise ValueError(f"{file}: its blocks are nested too deeply") from error
        return cls(
            path=folder,
            specification_version=int(model.specificationVersion),
            functions=functions,
            default_function=_default_function(model, functions, file),
            metadata=dict(model.description.metadata.userDefined),
        )

    def __repr__(self) -> str:
        # The fields hold every operation: a megabyte in a notebook.
        functions = ", ".join(f"{name}: {len(f.block.operations)} operations" for name, f in self.functions.items())
        return f"Package({str(self.path)!r}, {functions})"

    def function(self, name: str | None = None) -> Function:
        """The function `name`, or the default one.

        Raises:
            ValueError: there is no such function.
        """
        name = self.default_function if name is None else name
        if name not in self.functions:
            raise ValueError(f"{self.path}: no function {name!r}; it has {', '.join(sorted(self.functions))}")
        return self.functions[name]


def _parse(file: Path) -> Any:
    model = model_class()()
    try:
        model.ParseFromString(file.read_bytes())
    except Exception as error:  # the class of the error depends on which back end parses messages
        raise ValueError(f"{file}: model file is damaged: {error}") from error
    kind = model.WhichOneof("Type")
    if kind != "mlProgram":
        raise ValueError(f"{file}: field Type is {kind!r}, expected 'mlProgram'")
    return model


def _default_function(model: Any, functions: Mapping[str, Function], file: Path) -> str:
    name = model.description.defaultFunctionName
    if not name:
        name = "main" if "main" in functions else next(iter(functions))
    if name not in functions:
        raise ValueError(f"{file}: field defaultFunctionName is {name!r}, the program has {', '.join(functions)}")
    return str(name)
