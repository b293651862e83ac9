"""Rules about number formats and the range of fp16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph, byte_size, is_float, name_of, plain, shape_of, shown
from ane_layers.analysis.lint.registry import rule
from ane_layers.analysis.movement import LOOKUPS

# Nearer to fp16's lowest value (-65504), a score of a few hundred below zero ends at -inf.
_LOWEST_MASK = -65_000.0
_MASKING = ("add", "concat", "fill", "fill_like", "mul", "select", "sub")
_ADDING = ("add", "mul", "sub")
_SETTINGS = ("crop_resize", "resample", "resize", "upsample")
_SUMS = ("reduce_mean", "reduce_sum")
_STEPS_TO_SUM = 3


@rule(
    id="fp32-operation",
    title="operations that give fp32",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules",
    reason="The engine computes in fp16; an operation in fp32 runs elsewhere and splits the graph.",
    remedy="Convert with fp16 precision. Casts are not counted.",
)
def _fp32_operation(graph: Graph) -> Iterator[Case]:
    for step in graph.steps:
        if step.type not in ("cast", "identity") and any(
            datum.tensor is not None and _is_fp32(datum) for datum in step.outputs
        ):
            yield Case(name=step.name, text=shown(step), size=byte_size(step.outputs[0]))


@rule(
    id="fp32-constant",
    title="operations that take an fp32 constant",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules",
    reason="A single fp32 literal gives an fp32 buffer, which the engine does not take, and splits the graph.",
    remedy="Store constants in fp16. Settings are not counted: a scalar epsilon, which coremltools gives every rsqrt and inverse, and the "
    "scale factors of resizing operations.",
)
def _fp32_constant(graph: Graph) -> Iterator[Case]:
    for step in graph.steps:
        if step.type.startswith(_SETTINGS):
            continue
        constants = [
            datum
            for parameter, datum in step.given()
            if datum.constant is not None and _is_fp32(datum) and not (parameter == "epsilon" and datum.elements == 1)
        ]
        if constants:
            worst = max(constants, key=byte_size)
            yield Case(name=step.name, text=f"{step.name} ({step.type}) takes {worst.tensor}", size=byte_size(worst))


@rule(
    id="infinite-mask",
    title="masks of minus infinity or next to it",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules (-4e4); ml-ane-transformers (-1e4)",
    reason="A row in which all is masked by -inf turns to NaN; -65504 plus a negative score is -inf in fp16.",
    remedy="Mask by a large negative number such as -4e4. Masks that come as inputs cannot be seen here.",
)
def _infinite_mask(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type(*_MASKING):
        for _, datum in step.given():
            array = plain(datum) if is_float(datum) else None
            lowest = float(array.min()) if array is not None and array.size else 0.0
            if lowest == -np.inf or (step.type in _ADDING and lowest < _LOWEST_MASK):
                yield Case(name=step.name, text=f"{shown(step)} takes {lowest:g}", size=byte_size(datum))


@rule(
    id="pow-in-norm",
    title="powers in place of products and roots",
    severity="warning",
    confidence="medium",
    chips="iPhone (which, is not said)",
    source="SqueezeBits' engineering post",
    reason="pow broke the numerics of RMSNorm; x·x did not.",
    remedy="Write the square as x·x, the root as sqrt or rsqrt, or use reduce_l2_norm. Other exponents are not counted.",
)
def _pow_in_norm(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("pow"):
        exponent = plain(step.one("y"))
        if exponent is None or not exponent.size:
            continue
        root = bool((np.abs(exponent) == 0.5).all())
        if bool((exponent == 2).all()) or (root and _comes_from_sum(step.one("x"))):
            text = f"{shown(step)}, exponent {float(exponent.reshape(-1)[0]):g}"
            yield Case(name=step.name, text=text, size=byte_size(step.outputs[0]))


@rule(
    id="angles-in-fp16",
    title="sines and cosines of angles that are worked out in fp16 from positions",
    severity="warning",
    confidence="high",
    chips="all",
    source="the format: 11 significant bits; openvino issue 33214",
    reason="Whole numbers above 2,048 are not all fp16 numbers, and neither are the angles: later positions turn to others.",
    remedy="Look rows of tables up that were computed in fp32, pass cosines and sines in, or work the angles out in fp32.",
)
def _angles_in_fp16(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("cos", "sin"):
        position = _position_in_fp16(step.one("x"))
        if position is not None:
            yield Case(name=step.name, text=f"{shown(step)} of {position}", size=byte_size(step.outputs[0]))


@rule(
    id="offset-slice-on-last-axis",
    title="slices that begin past the start of the last axis",
    severity="info",
    confidence="low",
    chips="M1 by one of its pages, all before A16 by another",
    source="ANEForge's numeric notes (one author)",
    reason="Values above 4,094 in such a slice were reported to turn to inf. The file does not show the values.",
    remedy="Slice another axis, or split. ane-layers verify tells where values grow large.",
)
def _offset_slice_on_last_axis(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("slice_by_index", "slice_by_size"):
        begin, mask, data = plain(step.one("begin")), plain(step.one("begin_mask")), step.one("x")
        if begin is None or data is None or not is_float(data) or begin.size != len(shape_of(data)):
            continue
        masked = mask is not None and bool(mask.reshape(-1)[-1])
        offset = int(begin.reshape(-1)[-1])
        if offset and not masked and shape_of(data)[-1] != 1:
            text = f"{step.name} ({step.type}) of {data.tensor} from {offset}"
            yield Case(name=step.name, text=text, size=byte_size(data))


def _position_in_fp16(angle: Datum | None) -> str | None:
    """The integer that an angle is worked out from by way of fp16; None where it is not, or only by way of fp32."""
    left = [(angle, False)] if angle is not None else []
    seen = set(left)
    while left:
        datum, narrowed = left.pop()
        if datum.tensor is None or datum.constant is not None:
            continue
        if "int" in datum.tensor.dtype:
            if narrowed:
                return f"{name_of(datum)} {datum.tensor}"
            continue
        narrowed = narrowed or datum.tensor.dtype == "fp16"
        # Within a period an angle is small again. What is looked up does not come from its index by arithmetic.
        if datum.step is None or datum.step.type in ("floor_div", "mod", *LOOKUPS):
            continue
        before = {(given, narrowed) for _, given in datum.step.given()} - seen
        seen |= before
        left += before
    return None


def _is_fp32(datum: Datum) -> bool:
    return datum.tensor is not None and datum.tensor.dtype == "fp32"


def _comes_from_sum(datum: Datum | None) -> bool:
    """Whether a sum or a mean is a few operations before a value."""
    nearest: list[Step] = [datum.step] if datum is not None and datum.step is not None else []
    for _ in range(_STEPS_TO_SUM):
        if any(step.type in _SUMS for step in nearest):
            return True
        nearest = [source.step for step in nearest for _, source in step.given() if source.step is not None]
    return False
