"""Rules about ranks, axes and sizes that are known only when the program runs."""

from __future__ import annotations

from collections.abc import Iterator

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph, byte_size, is_float, name_of, shape_of, shown
from ane_layers.analysis.lint.registry import rule
from ane_layers.analysis.lint.singletons import expected_singletons
from ane_layers.analysis.movement import JOINS, REARRANGEMENTS, VIEWS
from ane_layers.program.types import BITS

OLD_LIMIT = 16_384
NEW_LIMIT = 65_536
_ALIGNMENT = 64
_JOINING = (VIEWS | REARRANGEMENTS | JOINS) - {"read_state"}


@rule(
    id="rank-above-5",
    title="values above rank 5",
    severity="error",
    confidence="high",
    chips="all",
    source="coremltools issue 1723; Apple's coreai-models authoring rules",
    reason="Core ML does not take tensors of more than five axes; a program with such a value cannot be loaded.",
    remedy="Merge axes, or split the operation. Tables of a compressed weight may have more axes; they are not counted.",
)
def _rank_above_5(graph: Graph) -> Iterator[Case]:
    for datum, label in graph.values:
        if len(shape_of(datum)) > 5:
            yield Case(name=name_of(datum), text=f"{label} {datum.tensor}", size=byte_size(datum))


@rule(
    id="matmul-above-rank-4",
    title="matrix products and transposes above rank 4",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules; CoreML-LLM measured a rank-5 grouped attention at 2.7 instead of 15.0 tok/s",
    reason="A transpose or a matrix product at rank 5 fails to compile for the engine or leaves it.",
    remedy="Stay at rank 4: merge the group axis of grouped attention into the rows of the query (fold).",
)
def _matmul_above_rank_4(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("matmul", "transpose", "einsum"):
        data = [*(datum for _, datum in step.given()), *step.outputs]
        widest = max(data, key=lambda datum: len(shape_of(datum)))
        if len(shape_of(widest)) > 4:
            yield Case(name=step.name, text=shown(step, widest), size=byte_size(widest))


@rule(
    id="rank-above-4",
    title="values above rank 4",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules; a comment in ExecuTorch's static attention",
    reason="The engine works on four axes. Five are the limit of Core ML, and what the engine does with them depends on the operation.",
    remedy="Merge two axes before the operation. For grouped attention: fold the queries.",
)
def _rank_above_4(graph: Graph) -> Iterator[Case]:
    for datum, label in graph.values:
        if len(shape_of(datum)) > 4:
            yield Case(name=name_of(datum), text=f"{label} {datum.tensor}", size=byte_size(datum))


@rule(
    id="singleton-last-axis",
    title="values whose last axis is 1",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple, 'Deploying Transformers on the Apple Neural Engine'; Apple's coreai-models authoring rules",
    reason="Buffers are aligned to 64 bytes on the last axis, so that an fp16 value with a last axis of 1 takes 32 times its size.",
    remedy="Put a long axis last: heads as [B, H, S, D], not [B, H, D, S] with S = 1. A single token's hidden states cannot avoid it.",
)
def _singleton_last_axis(graph: Graph) -> Iterator[Case]:
    expected = expected_singletons(graph)
    for step in graph.steps:
        for datum in step.outputs:
            shape, elements = shape_of(datum), datum.elements
            if len(shape) > 1 and shape[-1] == 1 and elements and datum.tensor is not None and is_float(datum):
                padding = elements * (_ALIGNMENT - BITS[datum.tensor.dtype] // 8)
                text = f"{shown(step, datum)}, {padding:,} bytes of padding"
                yield Case(name=step.name, text=text, size=padding, expected=expected.get(datum))


@rule(
    id="axis-above-16384",
    title="axes above 16,384",
    severity="warning",
    confidence="medium",
    chips="A15, M2 and before (M3 too, by ANEForge's own table)",
    source="ANEForge's cross-chip notes (one author, measured on Macs)",
    reason="Older engines take at most 16,384 on an axis, but 65,536 on the channels (axis 1 of 4).",
    remedy="Split the axis into pieces, or do without these chips.",
)
def _axis_above_16384(graph: Graph) -> Iterator[Case]:
    yield from _long_axes(graph, OLD_LIMIT, NEW_LIMIT)


@rule(
    id="axis-above-65536",
    title="axes above 65,536",
    severity="warning",
    confidence="medium",
    chips="all",
    source="ANEForge's cross-chip notes (one author, measured on Macs)",
    reason="No engine is reported to take more than 65,536 on an axis; the operation runs elsewhere.",
    remedy="Split the axis: an output head over a large vocabulary as several convolutions.",
)
def _axis_above_65536(graph: Graph) -> Iterator[Case]:
    yield from _long_axes(graph, NEW_LIMIT, None)


@rule(
    id="flexible-shape",
    title="inputs of flexible shape",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules",
    reason="The engine runs programs of fixed shapes; with flexible ones the function leaves it.",
    remedy="One function a shape in one package: equal weights are stored once.",
)
def _flexible_shape(graph: Graph) -> Iterator[Case]:
    for name, datum in graph.flow.inputs.items():
        flexible = graph.function.flexible_inputs.get(name)
        if flexible is not None:
            yield Case(name=name, text=f"{name} (input): {flexible}")
        elif None in shape_of(datum):
            yield Case(name=name, text=f"{name} (input) {datum.tensor}")


@rule(
    id="open-dimension",
    title="results of a size known only when it runs",
    severity="warning",
    confidence="high",
    chips="all",
    source="Apple's coreai-models authoring rules",
    reason="Nothing behind such a value has a fixed shape either, and all of it leaves the engine.",
    remedy="Make inputs static; look rows up by index instead of slicing from a computed position.",
)
def _open_dimension(graph: Graph) -> Iterator[Case]:
    for step in graph.steps:
        for datum in step.outputs:
            if None in shape_of(datum):
                yield Case(name=step.name, text=shown(step, datum))


def _long_axes(graph: Graph, low: int, high: int | None) -> Iterator[Case]:
    """Values with an axis beyond `low`, and beyond `high` none."""
    leading = _leading_out(graph)
    explained: set[Datum] = set()
    for datum, label in graph.values:
        longest = _longest(datum, low)
        if longest <= low or (high is not None and longest > high) or not is_float(datum):
            continue
        reason = None
        if datum.step is not None and datum in leading and _only_joins(datum.step, low, explained):
            explained.add(datum)
            reason = "it only joins what was computed in pieces within the limit, and goes to the outputs without further arithmetic"
        yield Case(name=name_of(datum), text=f"{label} {datum.tensor}", size=longest, expected=reason)


def _longest(datum: Datum, limit: int) -> int:
    """The longest axis; channels count only above the limit of their own."""
    shape = shape_of(datum)
    limits = [max(limit, NEW_LIMIT) if len(shape) == 4 and axis == 1 else limit for axis in range(len(shape))]
    return max((size or 0 for size, bound in zip(shape, limits, strict=True) if (size or 0) > bound), default=0)


def _only_joins(step: Step, limit: int, explained: set[Datum]) -> bool:
    if step.type not in _JOINING:
        return False
    return all(datum in explained or _longest(datum, limit) == 0 for _, datum in step.given())


def _leading_out(graph: Graph) -> set[Datum]:
    """Values that nothing but rearranging stands between and the outputs."""
    outputs = set(graph.flow.outputs)
    leading: set[Datum] = set()
    for step in reversed(graph.steps):
        for datum in step.outputs:
            onward = all(user.type in _JOINING and leading.issuperset(user.outputs) for user in datum.users)
            if onward and (datum.users or datum in outputs):
                leading.add(datum)
    return leading
