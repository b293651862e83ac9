"""Constants as tensors, decoded once and shared by every program that refers to the same blobs."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from torch import Tensor

from ane_layers.interpreter.values import fp16_from_numpy, from_numpy
from ane_layers.program import Blob, Immediate, Operation, Reference, TensorType
from ane_layers.program.constexpr import Constant, compressed, is_compressed

# Decode and prefill are two programs over one weight file; while either lives, its tensors serve both.
_SHARED: WeakValueDictionary[tuple[object, ...], Tensor] = WeakValueDictionary()

# Elements from which on a constant's size matters.
_LARGE = 1 << 14


def is_constant(operation: Operation) -> bool:
    """Whether the operation only gives a constant, plain or compressed."""
    return operation.type == "const" or is_compressed(operation)


def constants(operation: Operation, known: Mapping[str, Constant]) -> dict[str, Constant]:
    """The constants that such an operation gives, by name.

    Raises:
        ValueError: it has no value.
    """
    if is_compressed(operation):
        return dict(compressed(operation, known))
    value = operation.attributes.get("val") or operation.inputs.get("val", (None,))[0]
    if value is None or isinstance(value, Reference):
        raise ValueError(f"operation {operation.name!r} (const): value is missing")
    return {operation.outputs[0].name: value}


def tensor(constant: Constant, *, compact: bool = False) -> Tensor:
    """A constant in its carrier, decompressed as its type says (fp16 stays rounded). Not to be written to.

    Args:
        constant: plain or compressed.
        compact: a large one of type fp16 stays fp16: mapped from its file where it is stored so, half the size where not.

    Raises:
        ValueError: its type cannot be computed with.
    """
    kept = compact and _is_large_fp16(constant.type)
    key = (kept, _key(constant))
    decoded = _SHARED.get(key)
    if decoded is None:
        if not isinstance(constant.type, TensorType):
            raise ValueError(f"constant is a {type(constant.type).__name__}, not a tensor")
        array = constant.array()
        decoded = fp16_from_numpy(array) if kept else from_numpy(array, constant.type.dtype)
        _SHARED[key] = decoded
    return decoded


def _is_large_fp16(type_: object) -> bool:
    return isinstance(type_, TensorType) and type_.dtype == "fp16" and type_.element_count >= _LARGE


def _key(constant: Constant) -> tuple[object, ...]:
    """Equal for constants of equal value: where blobs lie, or the bytes themselves."""
    if isinstance(constant, Blob):
        return (*constant.key, constant.type)
    if isinstance(constant, Immediate):
        return (constant.type, constant.array().tobytes())
    parts = tuple((name, _key(part)) for name, part in sorted(constant.parts.items()))
    return (constant.type, constant.scheme, constant.output, parts)
