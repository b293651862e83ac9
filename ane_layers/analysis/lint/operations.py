"""Rules about single kinds of operations: repetition, projections, fused attention, lookups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph, byte_size, is_float, shape_of, shown, whole_number
from ane_layers.analysis.lint.registry import rule
from ane_layers.analysis.lint.shapes import OLD_LIMIT
from ane_layers.analysis.movement import JOINS, LOOKUPS, REARRANGEMENTS, SELECTIONS, VIEWS, data_of, repeats

_SHORT_INDICES = ("int8", "uint8", "int16", "uint16")
_INT16_LIMIT = 32_767
_MASKING = ("add", "mul", "select", "sub")

# What a hidden state of 2,048 channels takes in fp16: every operation of a layer writes and reads as much for one token.
_WORTH_A_WARNING = 4096

# A mask, cosines and sines, for each kind of layer; repetition in every layer is more.
_ONCE_A_CALL = 6


@rule(
    id="repeated-data",
    title="operations that only repeat data",
    severity="warning",
    confidence="high",
    chips="all; measured on a phone in the article: 20.39 instead of 54.30 tok/s",
    source="the article on folded queries that this project implements; the shapes in the file",
    reason="The repeated tensor is written out and read again: for grouped attention the cache, times the group size, in every layer.",
    remedy=f"Fold the queries instead of repeating K and V. Less than {_WORTH_A_WARNING:,} bytes in all are little-repeated-data.",
)
def _repeated_data(graph: Graph) -> Iterator[Case]:
    if not _is_little(graph):
        yield from _repetitions(graph)


@rule(
    id="little-repeated-data",
    title="operations that only repeat data, and little of it",
    severity="info",
    confidence="high",
    chips="all",
    source="the shapes in the file",
    reason=f"All that the function repeats is less than {_WORTH_A_WARNING:,} bytes, what one token's hidden state of 2,048 channels takes "
    "and every operation of a layer moves; from there on see repeated-data.",
    remedy="Nothing for its bytes. Broadcasting spares the operation.",
)
def _little_repeated_data(graph: Graph) -> Iterator[Case]:
    if _is_little(graph):
        yield from _repetitions(graph)


@rule(
    id="linear-instead-of-conv",
    title="projections that are no convolutions",
    severity="info",
    confidence="disputed",
    chips="not said",
    source="Apple's coreai-models authoring rules: always a 1x1 convolution; CoreML-LLM measured parity",
    reason="Apple advises a 1x1 convolution in place of linear and of a product with a constant; one measurement saw no difference.",
    remedy="Hidden states as [B, C, 1, S] and 1x1 convolutions, if in doubt; measure on the device.",
)
def _linear_instead_of_conv(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("linear", "matmul"):
        weight = _weight(step)
        if weight is not None:
            yield Case(name=step.name, text=f"{shown(step)}, weight {list(shape_of(weight))}", size=byte_size(weight))


@rule(
    id="several-fused-attentions",
    title="fused scaled_dot_product_attention, two or more of them",
    severity="warning",
    confidence="medium",
    chips="Apple silicon under macOS 26.5 and 26.6",
    source="stablehlo-coreml pull request 89",
    reason="With two or more of them over long keys the engine's compiler failed, and the whole model ran on the CPU without a word.",
    remedy="Write attention as matmul, softmax and matmul. The report had no trouble with one of them or with short keys.",
)
def _several_fused_attentions(graph: Graph) -> Iterator[Case]:
    fused = list(graph.of_type("scaled_dot_product_attention"))
    if len(fused) > 1:
        for step in fused:
            yield Case(name=step.name, text=shown(step), size=byte_size(step.outputs[0]))


@rule(
    id="head-in-one-piece",
    title="output heads in one piece",
    severity="info",
    confidence="disputed",
    chips="not said",
    source="Anemll advises 16 pieces; CoreML-LLM measured 4.6 % less speed with them at a vocabulary of 262k",
    reason="Splitting the projection onto a large vocabulary is advised by one project and was a loss in another's measurement.",
    remedy="Try both: --head-pieces of ane-layers convert. Above the engine's longest axis there is no choice, see axis-above-65536.",
)
def _head_in_one_piece(graph: Graph) -> Iterator[Case]:
    outputs = set(graph.flow.outputs)
    for step in graph.of_type("conv", "linear", "matmul"):
        weight = _weight(step)
        if weight is None or not step.outputs:
            continue
        longest = max((size or 0 for size in shape_of(step.outputs[0])), default=0)
        if longest > OLD_LIMIT and _reaches(step.outputs[0], outputs):
            yield Case(name=step.name, text=f"{shown(step)}, weight {list(shape_of(weight))}", size=longest)


@rule(
    id="embedding-gather",
    title="lookups of rows in a constant table",
    severity="info",
    confidence="medium",
    chips="all",
    source="ANEForge; SqueezeBits' engineering post",
    reason="Embedding lookups are reported to run off the engine.",
    remedy="Nothing, where they come before everything else. Else do them on the host and pass the rows in.",
)
def _embedding_gather(graph: Graph) -> Iterator[Case]:
    reason = (
        "the indices come from inputs by integer arithmetic alone, so it runs before the layers and not between them"
    )
    for step in graph.of_type("gather"):
        table, indices = step.one("x"), step.one("indices")
        if table is None or indices is None or table.constant is None or len(shape_of(table)) < 2:
            continue
        text = f"{shown(step)} from a table {table.tensor}"
        expected = reason if _is_integer_arithmetic(indices) else None
        yield Case(name=step.name, text=text, size=byte_size(step.outputs[0]), expected=expected)


@rule(
    id="gather-with-32-bit-indices",
    title="lookups with 32-bit indices",
    severity="warning",
    confidence="high",
    chips="all",
    source="coremltools' pass add_int16_cast; Apple's coreai-models authoring rules; ANEForge",
    reason="The engine has no 32-bit integers. coremltools narrows the indices of a lookup to 16 bits unless the axis exceeds 32,767.",
    remedy="Cast the indices to int16 or uint16 where the axis allows; else expect the lookup off the engine.",
)
def _gather_with_32_bit_indices(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("gather", "gather_along_axis"):
        indices, length = step.one("indices"), _gathered_axis(step)
        table = step.one("x")
        if table is None or not is_float(table):
            continue  # arithmetic with shapes
        if indices is not None and indices.tensor is not None and indices.tensor.dtype == "int32":
            reason = f"coremltools keeps 32 bits for an axis above {_INT16_LIMIT:,}" if length > _INT16_LIMIT else None
            text = f"{shown(step)} from an axis of {length:,}"
            yield Case(name=step.name, text=text, size=length, expected=reason)


@rule(
    id="gather-index-overflow",
    title="lookups whose indices are cut to fewer bits than the axis needs",
    severity="error",
    confidence="high",
    chips="all",
    source="ExecuTorch issue 7616; the limits of coremltools' pass add_int16_cast",
    reason="Rows beyond what the indices can hold come out as other rows.",
    remedy="Leave the indices in int32, or split the table.",
)
def _gather_index_overflow(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("gather", "gather_along_axis"):
        indices, length = step.one("indices"), _gathered_axis(step)
        if indices is None or indices.constant is not None:
            continue
        for dtype in _SHORT_INDICES:
            if length - 1 > np.iinfo(dtype).max and dtype in _passed_through(indices):
                yield Case(name=step.name, text=f"{shown(step)} from an axis of {length:,} by {dtype}", size=length)
                break


def _is_little(graph: Graph) -> bool:
    """Whether all repeated data together is small; what is of unknown size is not."""
    sizes = [datum.bytes for step in graph.steps if repeats(step) for datum in step.outputs]
    return None not in sizes and sum(size or 0 for size in sizes) < _WORTH_A_WARNING


def _repetitions(graph: Graph) -> Iterator[Case]:
    repeating = [step for step in graph.steps if repeats(step) and step.outputs]
    joined = Counter(value for step in repeating for value in set(step.inputs.get("values", ())))
    for step in repeating:
        once = all(joined[value] == 1 for value in step.inputs.get("values", ()))
        reason = _lined_up_once(graph, step) if once and len(repeating) <= _ONCE_A_CALL else None
        size = byte_size(step.outputs[0])
        text = f"{shown(step)}, {size:,} bytes" if size else shown(step)
        yield Case(name=step.name, text=text, size=size, expected=reason)


def _weight(step: Step) -> Datum | None:
    """The constant of two axes or more that an operation multiplies with."""
    for parameter in ("weight", "y", "x"):
        datum = step.one(parameter)
        if datum is not None and datum.constant is not None and len(shape_of(datum)) > 1:
            return datum
    return None


def _lined_up_once(graph: Graph, step: Step) -> str | None:
    """Why a repetition is none of a cache: an input, or rows of a constant table, are joined with themselves once a call, and what
    comes of it masks or scales something."""
    values = set(step.inputs.get("values", ()))
    users = step.outputs[0].users
    if step.type not in JOINS or len(values) != 1 or not all(user.type in _MASKING for user in users):
        return None
    value = next(iter(values))
    if graph.flow.inputs.get(value.name) is value:
        return f"the input {value.name} is lined up once a call, as a mask for {len(users)} operations"
    while value.step is not None and value.step.type not in LOOKUPS:
        data = data_of(value.step)
        if value.step.type not in VIEWS | REARRANGEMENTS | SELECTIONS or data is None:
            return None
        value = data
    table = data_of(value.step) if value.step is not None else None
    if table is None or table.constant is None:
        return None
    return f"rows of the table {table.name} are lined up once a call, for {len(users)} operations"


def _reaches(datum: Datum, outputs: set[Datum]) -> bool:
    """Whether a value gets to an output by being rearranged alone."""
    if datum in outputs:
        return True
    onward = [user for user in datum.users if user.type in VIEWS | REARRANGEMENTS | JOINS]
    return any(_reaches(result, outputs) for user in onward for result in user.outputs)


def _gathered_axis(step: Step) -> int:
    shape = shape_of(step.one("x"))
    axis = whole_number(step, "axis", 0)
    return (shape[axis] or 0) if -len(shape) <= axis < len(shape) else 0


def _integers_before(datum: Datum) -> Iterator[Datum]:
    """A value and every integer that it is worked out from; what is not an integer ends the search."""
    seen: set[Datum] = set()
    waiting = [datum]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        is_integer = current.tensor is not None and "int" in current.tensor.dtype
        if current.step is not None and is_integer:
            waiting.extend(source for _, source in current.step.given())


def _is_integer_arithmetic(datum: Datum) -> bool:
    kinds = [current.tensor.dtype if current.tensor is not None else "" for current in _integers_before(datum)]
    return all("int" in kind or kind in ("bool", "string") for kind in kinds)


def _passed_through(datum: Datum) -> set[str]:
    """Integer types of an index and of the computed integers that it comes from."""
    return {
        current.tensor.dtype
        for current in _integers_before(datum)
        if current.tensor is not None and current.constant is None and "int" in current.tensor.dtype
    }
