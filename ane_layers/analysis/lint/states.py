"""Rules about states: their axes, number and shapes, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator

from ane_layers.analysis.flow import Datum, Step
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph, byte_size, shape_of, shown
from ane_layers.analysis.lint.registry import rule
from ane_layers.analysis.movement import root

_MULTIPLE = 32
_WIDE_UPDATE = 128
_FEW_STATES = 2


@rule(
    id="state-axis-not-multiple-of-32",
    title="states with an axis that is no multiple of 32",
    severity="warning",
    confidence="medium",
    chips="M4 (macOS 15.2)",
    source="coremltools issue 2631: 270 fails, 256 works",
    reason="A state whose last axes are no multiples of 32 fails on the engine and runs on the CPU and the GPU.",
    remedy="Round the context up to a multiple of 32 and pad head_dim. The last two axes are checked, a spare one of length 1 aside.",
)
def _state_axis_not_multiple_of_32(graph: Graph) -> Iterator[Case]:
    for name, datum in graph.flow.states.items():
        wrong = [axis for axis in _slots_and_width(datum) if (shape_of(datum)[axis] or 0) % _MULTIPLE]
        if wrong:
            yield _axes_case(name, datum, wrong)


@rule(
    id="state-axis-not-power-of-2",
    title="states with an axis that is no power of two",
    severity="warning",
    confidence="medium",
    chips="iPhone (which, is not said)",
    source="SqueezeBits' engineering post: a head_dim of 80 had to be padded to 128",
    reason="Every axis of a state but the first had to be a power of two to stay on the engine. Stricter than coremltools issue 2631.",
    remedy="Pad head_dim to a power of two and choose such a context. Where both reports must hold, this one decides.",
)
def _state_axis_not_power_of_2(graph: Graph) -> Iterator[Case]:
    for name, datum in graph.flow.states.items():
        sizes = shape_of(datum)
        wrong = [axis for axis in range(1, len(sizes)) if not _is_power_of_2(sizes[axis] or 0)]
        if wrong:
            lax = all(axis in _slots_and_width(datum) and (sizes[axis] or 0) % _MULTIPLE == 0 for axis in wrong)
            reason = (
                "the lengths are multiples of 32, which is all that the other report (coremltools issue 2631) asks for"
            )
            yield _axes_case(name, datum, wrong, reason if lax else None)


@rule(
    id="more-than-2-states",
    title="states beyond the two that are advised",
    severity="info",
    confidence="disputed",
    chips="not said",
    source="CoreML-LLM's notes advise 2 for a model or a chunk; SqueezeBits shows an export with 48",
    reason="Many states are said to cost time or placement; an export with 48 of them is shown to work.",
    remedy="One state for all keys and one for all values, [layers, K, T, D].",
)
def _more_than_2_states(graph: Graph) -> Iterator[Case]:
    states = graph.flow.states
    if len(states) > _FEW_STATES:
        kinds = len({datum.type for datum in states.values()})
        reason = f"there are {kinds} kinds of cache, which one state cannot hold, and two states of each"
        paired = kinds > 1 and len(states) == 2 * kinds
        for name, datum in states.items():
            yield _state_case(name, datum, reason if paired else None)


@rule(
    id="state-shapes-differ",
    title="states of differing shape",
    severity="warning",
    confidence="low",
    chips="M1, A14",
    source="Anemll's notes on its version 0.3.5",
    reason="M1 and A14 failed where the states of a model differ in shape.",
    remedy="Give all states one shape, or put the kinds into chunks of their own.",
)
def _state_shapes_differ(graph: Graph) -> Iterator[Case]:
    states = graph.flow.states
    shapes = [shape_of(datum) for datum in states.values()]
    if len(set(shapes)) > 1:
        # [layers, K, T, D]: caches of two lengths differ in how many layers have them and in their slots.
        caches = all(len(shape) == 4 for shape in shapes) and len({(shape[1], shape[3]) for shape in shapes}) == 1
        reason = "they are caches of different length over the same heads; on M1 and A14 that may fail all the same"
        for name, datum in states.items():
            yield _state_case(name, datum, reason if caches else None)


@rule(
    id="wide-state-update",
    title="updates of a state that are 128 wide or wider",
    severity="warning",
    confidence="low",
    chips="not said",
    source="Anemll issue 27: 16 and 32 positions worked where 128 failed",
    reason="A slice_update of 128 positions of a cache kept the model off the engine.",
    remedy="Prefill in smaller blocks; 64 lies between what worked and what failed.",
)
def _wide_state_update(graph: Graph) -> Iterator[Case]:
    for step in graph.of_type("slice_update"):
        whole, update = step.one("x"), step.one("update")
        if whole is None or update is None or not _is_state_update(step, whole):
            continue
        partial = [new for old, new in zip(shape_of(whole), shape_of(update), strict=False) if new != old]
        width = max((size or 0 for size in partial), default=0)
        if width >= _WIDE_UPDATE:
            yield Case(name=step.name, text=f"{shown(step, update)} into {whole.tensor}", size=width)


@rule(
    id="output-also-written-to-state",
    title="outputs that are also written to a state",
    severity="error",
    confidence="medium",
    chips="Macs",
    source="coremltools pull request 2713",
    reason="Loading or running a program crashed where one value is an output and is written to a state.",
    remedy="Return another value, or let the host read the state.",
)
def _output_also_written_to_state(graph: Graph) -> Iterator[Case]:
    outputs = {root(datum): datum for datum in graph.flow.outputs}
    written: set[str] = set()
    for step in graph.of_type("write_state"):
        state, data = step.one("input"), step.one("data")
        if state is None or data is None:
            continue
        written.add(state.name)
        sources = [data]
        if data.step is not None and data.step.type == "slice_update":
            sources += [update for update in [data.step.one("update")] if update is not None]
        for source in sources:
            output = outputs.get(root(source))
            if output is not None and source.constant is None:
                yield Case(name=step.name, text=f"{output.name} {output.tensor} goes to {state.name}")
    for origin, output in outputs.items():
        if origin.step is not None and origin.step.type == "read_state":
            state = origin.step.one("input")
            if state is not None and state.name in written:
                yield Case(name=origin.step.name, text=f"{output.name} {output.tensor} is {state.name} itself")


def _is_state_update(step: Step, whole: Datum) -> bool:
    if whole.step is not None and whole.step.type == "read_state":
        return True
    return any(user.type == "write_state" for datum in step.outputs for user in datum.users)


def _slots_and_width(datum: Datum) -> list[int]:
    """The last two axes; one of length 1 before the last is a spare axis."""
    shape = shape_of(datum)
    last = len(shape) - 1
    return [axis for axis in (last - 1, last) if axis >= 0 and (axis == last or shape[axis] != 1)]


def _is_power_of_2(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def _axes_case(name: str, datum: Datum, axes: list[int], expected: str | None = None) -> Case:
    lengths = ", ".join(f"axis {axis} is {shape_of(datum)[axis]}" for axis in axes)
    return Case(name=name, text=f"{name} {datum.tensor}: {lengths}", size=byte_size(datum), expected=expected)


def _state_case(name: str, datum: Datum, expected: str | None) -> Case:
    return Case(name=name, text=f"{name} {datum.tensor}", size=byte_size(datum), expected=expected)
