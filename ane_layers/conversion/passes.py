"""Graph passes that coremltools lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import register_pass

# What must stay where it is: each run of it reads, writes or draws something.
_EFFECTS = (
    "read_state",
    "write_state",
    "coreml_update_state",
    "random_",
    "const",
    "while_loop",
    "cond",
    "make_list",
    "list_",
)
_LARGEST_COMPARED = 64


@register_pass(namespace="ane_layers")
class merge_equal_operations(AbstractGraphPass):  # noqa: N801 (passes are named in snake case there)
    """Computes once what a block computes twice: same operation, same inputs.

    Every layer that writes its cache works out the same begin and end of the slice, once for keys and once for values; the embedding's
    and the rotary table's index guards repeat as well. PyTorch's tracer writes it all down and no pass of coremltools 9 merges it.
    """

    def apply(self, prog: Any) -> None:
        for function in prog.functions.values():
            _merge(function)


def _merge(block: Any) -> None:
    seen: dict[Any, Any] = {}
    outputs = set(block.outputs)
    for operation in list(block.operations):
        if operation.op_type.startswith(_EFFECTS) or operation.blocks:
            continue
        key = _key(operation)
        if key is None or any(output in outputs for output in operation.outputs):
            continue
        first = seen.setdefault(key, operation)
        if first is operation:
            continue
        for old, new in zip(operation.outputs, first.outputs, strict=True):
            block.replace_uses_of_var_after_op(anchor_op=operation, old_var=old, new_var=new)
        block.remove_ops([operation])


def _key(operation: Any) -> Any:
    inputs = []
    for name, value in sorted(operation.inputs.items()):
        vars_ = value if isinstance(value, list | tuple) else [value]
        parts = [_value(var) for var in vars_]
        inputs.append((name, tuple(parts)))
    return operation.op_type, tuple(inputs)


def _value(var: Any) -> Any:
    """Small constants by value, everything else by identity."""
    if var is None:
        return None
    if var.op is not None and var.op.op_type == "const" and var.val is not None:
        value = np.asarray(var.val)
        if value.size <= _LARGEST_COMPARED:
            return (str(value.dtype), value.shape, value.tobytes() if value.dtype.kind != "U" else str(value))
    return id(var)


def pipeline() -> Any:
    """coremltools' default passes and ours, as `ct.convert(pass_pipeline=…)` takes them."""
    import coremltools as ct

    passes = ct.PassPipeline.DEFAULT
    passes.append_pass("ane_layers::merge_equal_operations")
    passes.append_pass("common::dead_code_elimination")
    return passes
