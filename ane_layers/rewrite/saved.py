"""Carries a plan out on the messages of a saved program. Weights are not looked at: constants keep pointing into their file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from ane_layers.analysis.flow import Datum
from ane_layers.program import TensorType
from ane_layers.program.protocol import DATA_TYPES
from ane_layers.rewrite.draft import Argument, NewOperation, NewValue
from ane_layers.rewrite.planning import Plan

_CODES = {name: code for code, name in DATA_TYPES.items()}


def rewrite_function(message: Any, plan: Plan) -> None:
    """Changes a function's message in place.

    Raises:
        ValueError: the function has a block for more than one generation of operations.
    """
    if len(message.block_specializations) != 1:
        raise ValueError(f"the function has {len(message.block_specializations)} versions, expected one")
    block = message.block_specializations[message.opset]
    inserted: dict[str, list[NewOperation]] = defaultdict(list)
    for new in plan.operations:
        inserted[new.before.outputs[0].name].append(new)
    removed = {step.outputs[0].name for step in plan.removed}
    written = type(block)()
    orphans: set[str] = set()
    for operation in block.operations:
        name = operation.outputs[0].name if operation.outputs else ""
        for new in inserted.get(name, ()):
            _write(written, new)
        if name in removed:
            orphans |= _references(operation)
        else:
            written.operations.add().CopyFrom(operation)
    _drop_constants(written, orphans, set(block.outputs))
    del block.operations[:]
    block.operations.extend(written.operations)


def _drop_constants(block: Any, orphans: set[str], outputs: set[str]) -> None:
    """Removes constants that only removed operations used."""
    used = outputs.union(*(_references(operation) for operation in block.operations))
    for i in reversed(range(len(block.operations))):
        operation = block.operations[i]
        if operation.type == "const" and operation.outputs[0].name in orphans - used:
            del block.operations[i]


def _references(operation: Any) -> set[str]:
    names = {
        binding.name
        for argument in operation.inputs.values()
        for binding in argument.arguments
        if binding.WhichOneof("binding") == "name"
    }
    for block in operation.blocks:
        names |= set(block.outputs)
        names = names.union(*(_references(inner) for inner in block.operations))
    return names


def _write(block: Any, new: NewOperation) -> None:
    label = new.outputs[0].name
    # Constants stand in front of what uses them.
    names = {parameter: _names(block, label, parameter, argument) for parameter, argument in new.inputs.items()}
    operation = block.operations.add(type=new.type)
    for parameter, given in names.items():
        for name in given:
            operation.inputs[parameter].arguments.add().name = name
    for output in new.outputs:
        _set_type(operation.outputs.add(name=output.name).type, output.type)
    _set_value(operation.attributes["name"], np.array(label))


def _names(block: Any, label: str, parameter: str, argument: Argument) -> list[str]:
    if isinstance(argument, tuple):
        return [name for value in argument for name in _names(block, label, parameter, value)]
    if isinstance(argument, NewValue) or (isinstance(argument, Datum) and argument.name):
        return [argument.name]
    if isinstance(argument, Datum):
        assert argument.constant is not None
        value = argument.constant.array()
    else:
        value = np.asarray(argument)
    name = f"{label}_{parameter}_0"
    constant = block.operations.add(type="const")
    _set_value(constant.attributes["val"], value)
    _set_value(constant.attributes["name"], np.array(name))
    output = constant.outputs.add(name=name)
    output.type.CopyFrom(constant.attributes["val"].type)
    return [name]


def _set_type(message: Any, type_: TensorType) -> None:
    message.tensorType.dataType = _CODES[type_.dtype]
    message.tensorType.rank = type_.rank
    for size in type_.shape:
        assert size is not None
        message.tensorType.dimensions.add().constant.size = size


_KINDS = {"b": ("bool", "bools"), "U": ("string", "strings"), "i": ("int32", "ints")}


def _set_value(message: Any, value: np.ndarray) -> None:
    tensor = message.immediateValue.tensor
    if value.dtype == np.float16:
        dtype = "fp16"
        tensor.bytes.values = value.tobytes()
    elif value.dtype == np.float32:
        dtype = "fp32"
        tensor.floats.values.extend(value.reshape(-1).tolist())
    else:
        dtype, field = _KINDS[value.dtype.kind]
        values = getattr(tensor, field)
        values.SetInParent()
        values.values.extend(value.reshape(-1).tolist())
    _set_type(message.type, TensorType(dtype, value.shape))
