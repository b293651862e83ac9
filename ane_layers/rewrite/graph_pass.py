"""The folding as a graph pass of coremltools. Importing this module registers it; it imports coremltools' converter."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from coremltools.converters.mil.mil import Builder, types
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.helper import block_context_manager
from coremltools.converters.mil.mil.passes.pass_registry import register_pass

from ane_layers.program import (
    Block,
    Function,
    Immediate,
    Operation,
    Reference,
    StateType,
    TensorType,
    TupleType,
    Value,
    ValueType,
)
from ane_layers.rewrite.draft import Argument, NewOperation
from ane_layers.rewrite.planning import Plan, plan, repeated
from ane_layers.rewrite.report import FoldReport, FunctionReport

NAME = "ane_layers::fold_repeated_kv"


@register_pass(namespace="ane_layers")
class fold_repeated_kv(AbstractGraphPass):  # noqa: N801 (passes are named in snake case there)
    """Folds the queries of attention over repeated keys and values, and takes the repetition away; see `ane_layers.rewrite`.

    It belongs behind coremltools' own passes, which give the graph its final shapes and types. What it does not recognise it leaves alone.

    Attributes:
        report: of the last program. It belongs to the class: coremltools makes an instance of its own for every conversion.
    """

    report: ClassVar[FoldReport] = FoldReport(())

    def apply(self, prog: Any) -> None:
        functions = tuple(_fold(name, function) for name, function in prog.functions.items())
        fold_repeated_kv.report = FoldReport(functions)


def last_report() -> FoldReport:
    """What the pass did to the last program that was converted with it."""
    return fold_repeated_kv.report


def pass_pipeline() -> Any:
    """coremltools' default passes, then this one, as `ct.convert(pass_pipeline=…)` takes them."""
    import coremltools as ct

    passes = ct.PassPipeline.DEFAULT
    passes.append_pass(NAME)
    return passes


def _fold(name: str, function: Any) -> FunctionReport:
    record, _, _ = _recorded(name, function)
    found = plan(record)
    if found.operations:
        _carry_out(function, found, name)
    after, _, _ = _recorded(name, function)
    return FunctionReport(name, found.folded, found.refused, repeated(record), repeated(after))


@block_context_manager  # type: ignore[untyped-decorator]
def _carry_out(block: Any, found: Plan, name: str) -> None:
    _, values, operations = _recorded(name, block)
    for new in found.operations:
        old = operations[new.before.outputs[0].name]
        results = _insert(new, old, values)
        for output, result in zip(new.outputs, results, strict=True):
            if output.name in values:  # it stands in for an old value
                replaced = values[output.name]
                block.replace_uses_of_var_after_op(anchor_op=replaced.op, old_var=replaced, new_var=result)
            values[output.name] = result
    gone = {step.outputs[0].name for step in found.removed}
    block.remove_ops([operation for key, operation in reversed(operations.items()) if key in gone])


def _insert(new: NewOperation, before: Any, values: dict[str, Any]) -> list[Any]:
    def given(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [given(value) for value in argument]
        if isinstance(argument, np.ndarray | bool):
            return argument
        return values[argument.name]

    inputs = {parameter: given(argument) for parameter, argument in new.inputs.items()}
    name = new.outputs[0].name
    made = getattr(Builder, new.type)(**inputs, before_op=before, name=f"{name}_folded" if name in values else name)
    results = list(made) if isinstance(made, list | tuple) else [made]
    for output, result in zip(new.outputs, results, strict=True):
        assert tuple(result.shape) == output.type.shape, f"{output.name}: {result.shape}, planned {output.type}"
    return results


def _recorded(name: str, block: Any) -> tuple[Function, dict[str, Any], dict[str, Any]]:
    """A function of coremltools' as plain records, its values by the names they have there, and its operations by their first."""
    names: dict[int, str] = {}
    values: dict[str, Any] = {}
    operations: dict[str, Any] = {}

    def value(var: Any) -> Value:
        label = var.name
        while label in values:
            label += "_"
        names[id(var)], values[label] = label, var
        return Value(label, _type(var))

    def read(inner: Any, inputs: tuple[Value, ...]) -> Block:
        records = []
        for operation in inner.operations:
            given = {
                key: tuple(Reference(names[id(var)]) for var in (entry if isinstance(entry, list | tuple) else [entry]))
                for key, entry in operation.inputs.items()
                if entry is not None and not _is_inner(entry)
            }
            blocks = tuple(read(each, tuple(value(var) for var in each.inputs)) for each in operation.blocks)
            outputs = tuple(value(var) for var in operation.outputs)
            constant = operation.op_type == "const"
            records.append(
                Operation(
                    type=operation.op_type,
                    name=operation.name,
                    inputs={} if constant else given,
                    outputs=outputs,
                    attributes={"val": Immediate(outputs[0].type, _array(operation.outputs[0]))} if constant else {},
                    blocks=blocks,
                )
            )
            if outputs and inner is block:
                operations[outputs[0].name] = operation
        return Block(inputs, tuple(names[id(var)] for var in inner.outputs), tuple(records))

    inputs = tuple(value(var) for var in block.inputs.values())
    body = read(block, ())
    function = Function(
        name=name,
        inputs=tuple(entry for entry in inputs if not isinstance(entry.type, StateType)),
        outputs=tuple(Value(names[id(var)], _type(var)) for var in block.outputs),
        states=tuple(entry for entry in inputs if isinstance(entry.type, StateType)),
        block=body,
        opset="",
    )
    return function, values, operations


def _is_inner(entry: Any) -> bool:
    """Whether an argument is no value: blocks of loops and branches are given as functions."""
    return not all(hasattr(var, "sym_type") for var in (entry if isinstance(entry, list | tuple) else [entry]))


def _array(var: Any) -> np.ndarray:
    return np.asarray(var.val)


def _type(var: Any) -> ValueType:
    type_ = var.sym_type
    if types.is_state(type_):
        return StateType(_tensor(type_.wrapped_type()))
    if types.is_list(type_) or types.is_dict(type_) or types.is_tuple(type_):
        return TupleType(())
    return _tensor(type_)


def _tensor(type_: Any) -> TensorType:
    if not types.is_tensor(type_):
        return TensorType(_dtype(type_), ())
    shape = (int(size) if isinstance(size, int | np.integer) else None for size in type_.get_shape())
    return TensorType(_dtype(type_.get_primitive()), tuple(shape))


def _dtype(type_: Any) -> str:
    name = str(types.builtin_to_string(type_))
    return {"str": "string"}.get(name, name)
