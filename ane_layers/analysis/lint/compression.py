"""Rules about how weights are compressed."""

from __future__ import annotations

from collections.abc import Iterator

from ane_layers.analysis.flow import Datum
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph, compressed_constants
from ane_layers.analysis.lint.registry import rule
from ane_layers.program import TensorType
from ane_layers.program.constexpr import Compressed, Constant
from ane_layers.program.types import BITS

_TABLES = "constexpr_lut_to_dense"
_SCALES = "constexpr_blockwise_shift_scale"
_LINEAR = (_SCALES, "constexpr_affine_dequantize")
_ADVISED_GROUPS = (8, 16)
_VERSION = "com.github.apple.coremltools.version"


@rule(
    id="int4-per-block-in-conv",
    title="convolutions with 4-bit weights scaled per block",
    severity="warning",
    confidence="low",
    chips="M4 Max",
    source="ane-book (one author)",
    reason="Convolutions whose weights are 4-bit integers with a scale per block ran on the CPU in small programs.",
    remedy="Use 4-bit lookup tables, or integers of 8 bits per channel.",
)
def _int4_per_block_in_conv(graph: Graph) -> Iterator[Case]:
    for datum, constant in compressed_constants(graph):
        if constant.scheme == _SCALES and _bits(constant) == 4 and _is_per_block(constant):
            for step in datum.users:
                if step.type == "conv" and step.one("weight") is datum:
                    scales = _tensor(constant.parts["scale"])
                    yield Case(
                        name=step.name,
                        text=f"{step.name}: weight {list(constant.type.shape)}, scales {list(scales.shape)}",
                        size=constant.type.element_count,
                    )


@rule(
    id="lut-group-size",
    title="lookup tables in groups of other than 8 or 16",
    severity="info",
    confidence="high",
    chips="all",
    source="coremltools guide, performance of palettization",
    reason="More tables cost speed, fewer cost accuracy; groups of 8 or 16 channels are advised where one table is not enough.",
    remedy="Group 8 or 16 channels a table, or use one table a weight.",
)
def _lut_group_size(graph: Graph) -> Iterator[Case]:
    for datum, constant in _tables(graph):
        counts = _table_counts(constant)
        sizes = zip(constant.type.shape, counts, strict=False)
        groups = {axis: (size or 0) // count for axis, (size, count) in enumerate(sizes) if count > 1}
        if any(group not in _ADVISED_GROUPS for group in groups.values()):
            tables = " x ".join(str(count) for count in counts if count != 1)
            lengths = ", ".join(f"{group} on axis {axis}" for axis, group in groups.items())
            text = f"{datum.name} {constant.type}: {tables} tables, groups of {lengths}"
            yield Case(name=datum.name, text=text, size=constant.type.element_count)


@rule(
    id="lut-of-8-bit-entries",
    title="lookup tables whose entries have 8 bits",
    severity="warning",
    confidence="medium",
    chips="made for A17 Pro, M4 and later",
    source="Apple's palettization guide; CoreML-LLM lost some placement with them",
    reason="Entries of 8 bits pay with activations of 8 bits, on chips that multiply such; alone they cost placement in one report.",
    remedy="Keep the entries in fp16: a table is small.",
)
def _lut_of_8_bit_entries(graph: Graph) -> Iterator[Case]:
    activations = any(graph.of_type("quantize"))
    for datum, constant in _tables(graph):
        table = constant.parts["lut"]
        if isinstance(table, Compressed) and "data" in table.parts:
            table = table.parts["data"]
        if _tensor(table).dtype in ("int8", "uint8"):
            text = f"{datum.name} {constant.type}, activations {'of 8 bits too' if activations else 'not quantized'}"
            yield Case(name=datum.name, text=text, size=constant.type.element_count)


@rule(
    id="lut-with-channel-scale",
    title="lookup tables with a scale per channel behind them",
    severity="warning",
    confidence="medium",
    chips="Apple silicon under macOS 26",
    source="coremltools pull request 2688",
    reason="Weights from a table that are then scaled per channel fail to load on the engine; the CPU and the GPU take them.",
    remedy="Leave enable_per_channel_scale off, or multiply the scale into the table's entries.",
)
def _lut_with_channel_scale(graph: Graph) -> Iterator[Case]:
    for datum, constant in compressed_constants(graph):
        data = constant.parts.get("data")
        scaled = constant.scheme == _SCALES and isinstance(data, Compressed) and data.scheme == _TABLES
        if scaled and _tensor(constant.parts["data"]).dtype.startswith("fp"):
            text = f"{datum.name} {constant.type}"
            yield Case(name=datum.name, text=text, size=constant.type.element_count)


@rule(
    id="palettized-stateful-coremltools-9",
    title="4-bit lookup tables in a stateful program of coremltools 9.0",
    severity="info",
    confidence="medium",
    chips="M5 Max (macOS 26.5)",
    source="coremltools issue 2716",
    reason="One such package crashed after 100 to 200 predictions; built with coremltools 8.3 it did not.",
    remedy="Run a few hundred predictions on the device before shipping. Nothing in the graph tells which packages are concerned.",
)
def _palettized_stateful_coremltools_9(graph: Graph) -> Iterator[Case]:
    version = graph.package.metadata.get(_VERSION, "")
    if graph.flow.states and version.split(".")[:2] == ["9", "0"]:
        for datum, constant in _tables(graph):
            if _entries(constant) == 16:
                text = f"{datum.name} {constant.type}"
                yield Case(name=datum.name, text=text, size=constant.type.element_count)


@rule(
    id="compression-folded-on-old-chips",
    title="integer weights that older chips widen to fp16",
    severity="info",
    confidence="medium",
    chips="M1 (all), M2 (scales per block)",
    source="ANEForge's cross-chip notes (one author): 4-bit tables stream on all chips, integers per channel from M2, per block from M3",
    reason="There such weights save space in the file and no bandwidth: they are widened when the program is compiled.",
    remedy="Where M1 and M2 matter, use 4-bit lookup tables.",
)
def _compression_folded_on_old_chips(graph: Graph) -> Iterator[Case]:
    for datum, constant in compressed_constants(graph):
        part = constant.parts.get("data", constant.parts.get("quantized_data"))
        if constant.scheme in _LINEAR and part is not None and not isinstance(part, Compressed):
            scales = "per block" if constant.scheme == _SCALES and _is_per_block(constant) else "not per block"
            text = f"{datum.name} {_tensor(part)}, {scales}"
            yield Case(name=datum.name, text=text, size=constant.type.element_count)


def _tables(graph: Graph) -> Iterator[tuple[Datum, Compressed]]:
    """Weights from lookup tables, those too that are scaled afterwards, each with the constant that steps take."""
    for datum, constant in compressed_constants(graph):
        data = constant.parts.get("data")
        for table in (constant, data):
            if isinstance(table, Compressed) and table.scheme == _TABLES:
                yield datum, table


def _entries(table: Compressed) -> int | None:
    """Entries of a table: the first generation of the format has one table on one axis, the second (…, entries, vector)."""
    shape = _tensor(table.parts["lut"]).shape
    return shape[0] if len(shape) == 1 else shape[-2]


def _table_counts(table: Compressed) -> tuple[int, ...]:
    """On each axis of the weight, how many tables there are."""
    return tuple(count or 1 for count in _tensor(table.parts["lut"]).shape[:-2])


def _bits(constant: Compressed) -> int:
    return BITS.get(_tensor(constant.parts["data"]).dtype, 0)


def _is_per_block(constant: Compressed) -> bool:
    """Whether several scales share an axis of the weight, rather than one a channel."""
    scales = _tensor(constant.parts["scale"]).shape
    return any(1 < (count or 1) < (size or 1) for count, size in zip(scales, constant.type.shape, strict=False))


def _tensor(constant: Constant) -> TensorType:
    if not isinstance(constant.type, TensorType):
        raise ValueError(f"part of a compressed constant is a {type(constant.type).__name__}, not a tensor")
    return constant.type
