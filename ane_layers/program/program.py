"""Turns the messages of a model file into records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ane_layers.program.constants import NUMPY_TYPES, Constant, Immediate, blob, decode
from ane_layers.program.files import inside
from ane_layers.program.flexible import flexible_shapes
from ane_layers.program.names import check_names
from ane_layers.program.protocol import value_type
from ane_layers.program.types import (
    Argument,
    Block,
    Function,
    Operation,
    Reference,
    StateType,
    TensorType,
    Value,
    ValueType,
)
from ane_layers.program.weights import WeightFile

_MODEL_FOLDER = "@model_path/"


class ProgramReader:
    """Reads the functions of one model `file` of the package in `folder`; weight files are opened once."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        self._file = file
        self._weights: dict[str, WeightFile] = {}

    def functions(self, model: Any) -> dict[str, Function]:
        """Every function of a model message, in the order of the description.

        Raises:
            ValueError: the program or its description is unsound.
        """
        descriptions = {entry.name: entry for entry in model.description.functions}
        if len(descriptions) < len(model.description.functions):
            raise ValueError(f"{self._file}: field description.functions names a function twice")
        if not descriptions:
            # A package with a single function describes it at the top level.
            descriptions = {name: model.description for name in model.mlProgram.functions}
        if set(descriptions) != set(model.mlProgram.functions):
            raise ValueError(
                f"{self._file}: field description.functions names {', '.join(sorted(descriptions))}, "
                f"the program has {', '.join(sorted(model.mlProgram.functions))}"
            )
        if not descriptions:
            raise ValueError(f"{self._file}: field functions is empty: the program has nothing to run")
        functions = {
            name: self._function(name, model.mlProgram.functions[name], description)
            for name, description in descriptions.items()
        }
        for file in self._weights.values():
            file.check_layout()
        return functions

    def _function(self, name: str, message: Any, description: Any) -> Function:
        where = f"{self._file}: function {name!r}"
        specializations = message.block_specializations
        if message.opset not in specializations:
            raise ValueError(f"{where}: field opset is {message.opset!r}, and no block is written for it")
        block = self._block(specializations[message.opset], where)
        inputs = self._values(message.inputs, where)
        produced = {value.name: value for value in inputs}
        produced.update((value.name, value) for operation in block.operations for value in operation.outputs)
        plain = tuple(value for value in inputs if not isinstance(value.type, StateType))
        states = tuple(value for value in inputs if isinstance(value.type, StateType))
        for kind, described, own in (
            ("input", description.input, [value.name for value in plain]),
            ("output", description.output, block.outputs),
            ("state", description.state, [value.name for value in states]),
        ):
            unknown = [entry.name for entry in described if entry.name not in own]
            if unknown:
                raise ValueError(f"{where}: field description.{kind} names {unknown[0]!r}, which the program lacks")
        function = Function(
            name=name,
            inputs=plain,
            outputs=tuple(produced[output] for output in block.outputs if output in produced),
            states=states,
            block=block,
            opset=message.opset,
            optional_inputs=_optional_inputs(description.input),
            flexible_inputs=flexible_shapes(description.input, where),
        )
        check_names(function, where)
        return function

    def _block(self, message: Any, where: str) -> Block:
        return Block(
            inputs=self._values(message.inputs, where),
            outputs=tuple(message.outputs),
            operations=tuple(self._operation(operation, where) for operation in message.operations),
        )

    def _operation(self, message: Any, where: str) -> Operation:
        outputs = self._values(message.outputs, where)
        label = outputs[0].name if outputs else message.type
        place = f"{where}: operation {label!r} ({message.type})"
        attributes = {
            key: self._constant(value, label if key == "val" else f"{label}.{key}", place)
            for key, value in message.attributes.items()
        }
        return Operation(
            type=message.type,
            name=_name(attributes, label),
            inputs={
                key: tuple(self._argument(binding, f"{label}.{key}", place) for binding in argument.arguments)
                for key, argument in message.inputs.items()
            },
            outputs=outputs,
            attributes=attributes,
            blocks=tuple(self._block(block, place) for block in message.blocks),
        )

    def _values(self, messages: Iterable[Any], where: str) -> tuple[Value, ...]:
        return tuple(Value(entry.name, value_type(entry.type, f"{where}: value {entry.name!r}")) for entry in messages)

    def _argument(self, binding: Any, name: str, where: str) -> Argument:
        if binding.WhichOneof("binding") == "name":
            return Reference(binding.name)
        return self._constant(binding.value, name, where)

    def _constant(self, message: Any, name: str, where: str) -> Constant:
        type_ = value_type(message.type, f"{where}: constant {name!r}")
        kind = message.WhichOneof("value")
        if kind == "immediateValue":
            return Immediate(type_, self._immediate(message.immediateValue, type_, f"{where}: constant {name!r}"))
        if kind != "blobFileValue" or not isinstance(type_, TensorType):
            raise ValueError(f"{where}: constant {name!r} has a value of kind {kind!r}, expected a value or a blob")
        stored = message.blobFileValue
        return blob(type_, self._weight_file(stored.fileName, where), stored.offset, name)

    def _weight_file(self, name: str, where: str) -> WeightFile:
        if name not in self._weights:
            field = f"{where}: field fileName is {name!r}"
            if not name.startswith(_MODEL_FOLDER):
                raise ValueError(f"{field}, expected a path below {_MODEL_FOLDER}")
            path = self._file.parent / name.removeprefix(_MODEL_FOLDER)
            self._weights[name] = WeightFile(inside(self._folder, path, field))
        return self._weights[name]

    def _immediate(self, message: Any, type_: ValueType, where: str) -> Any:
        kind = message.WhichOneof("value")
        if kind == "tensor" and isinstance(type_, TensorType):
            return _tensor(message.tensor, type_, where)
        if kind in ("list", "tuple"):
            values = getattr(message, kind).values
            return tuple(self._constant(value, str(index), where) for index, value in enumerate(values))
        if kind == "dictionary":
            pairs = message.dictionary.values
            return {
                self._constant(pair.key, "key", where).array().item(): self._constant(pair.value, "value", where)
                for pair in pairs
            }
        raise ValueError(f"{where}: field immediateValue is of kind {kind!r}, which does not fit its type")


def _tensor(message: Any, type_: TensorType, where: str) -> np.ndarray:
    kind = message.WhichOneof("value")
    try:
        if kind == "bytes":
            # The message owns these bytes; an array over them is read-only, as a constant should be.
            return decode(np.frombuffer(message.bytes.values, np.uint8), type_)
        if kind is None or type_.dtype not in NUMPY_TYPES:
            raise ValueError(f"field value is of kind {kind!r}, which does not fit {type_}")
        values = np.array(getattr(message, kind).values, NUMPY_TYPES[type_.dtype] if kind != "strings" else np.str_)
        if values.size != type_.element_count:
            raise ValueError(f"field values has {values.size} elements, its type {type_} needs {type_.element_count}")
        return values.reshape(type_.shape)  # type: ignore[arg-type]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


def _name(attributes: Mapping[str, Constant], fallback: str) -> str:
    name = attributes.get("name")
    return str(name.array().item()) if name is not None else fallback


def _optional_inputs(descriptions: Iterable[Any]) -> dict[str, float]:
    """Inputs that a caller may leave out, with the value that then fills them."""
    optional = {}
    for entry in descriptions:
        if entry.type.isOptional:
            array = entry.type.multiArrayType
            default = array.WhichOneof("defaultOptionalValue")
            optional[entry.name] = float(getattr(array, default)) if default else 0.0
    return optional
