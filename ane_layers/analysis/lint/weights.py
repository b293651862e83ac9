"""Rules about the size of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ane_layers.analysis.counts import blobs, weight_bytes
from ane_layers.analysis.lint.finding import Case
from ane_layers.analysis.lint.graph import Graph
from ane_layers.analysis.lint.registry import rule

PHONE_LIMIT = 1_000_000_000
NEAR_FILE_LIMIT = 2_000_000_000
FILE_LIMIT = 1 << 31
_HARDLY_ANY = 0.01


@rule(
    id="weights-above-1-gb",
    title="weights above 1 GB",
    severity="warning",
    confidence="high",
    chips="iPhones",
    source="coremltools guide, utilities for mlmodels; field reports range from 0.25 GB (ane-book) to 2 GB",
    reason="The engine of an iPhone takes models of about 1 GB of weights at most.",
    remedy="Compress the weights, or split the model into chunks that are packages of their own.",
)
def _weights_above_1_gb(graph: Graph) -> Iterator[Case]:
    size = weight_bytes(graph.function)
    if size > PHONE_LIMIT:
        text = f"{size / 1e9:.2f} GB of weights"
        yield Case(name=graph.function.name, text=text, size=size, expected=_whole_and_uncompressed(graph, size))


@rule(
    id="weight-file-near-2-gb",
    title="weight files near 2 GB",
    severity="warning",
    confidence="high",
    chips="all",
    source="coremltools issue 1807",
    reason="From 2³¹ bytes on, a weight file is refused; little is left.",
    remedy="Compress the weights, or split the model into chunks.",
)
def _weight_file_near_2_gb(graph: Graph) -> Iterator[Case]:
    for path, size in _weight_files(graph).items():
        if NEAR_FILE_LIMIT <= size < FILE_LIMIT:
            yield _file_case(path, size)


@rule(
    id="weight-file-above-2-gib",
    title="weight files of 2 GiB and more",
    severity="error",
    confidence="high",
    chips="all",
    source="coremltools issue 1807 (the model could not be loaded); coremltools pull request 2593 (the engine's message names 2³¹ bytes)",
    reason="A weight file of 2³¹ bytes or more is refused by the engine, and was refused altogether on older systems.",
    remedy="Compress the weights, or split the model into chunks.",
)
def _weight_file_above_2_gib(graph: Graph) -> Iterator[Case]:
    for path, size in _weight_files(graph).items():
        if size >= FILE_LIMIT:
            yield _file_case(path, size)


def _weight_files(graph: Graph) -> dict[Path, int]:
    paths = {blob.file.path for blob in blobs(graph.function.block.walk())}
    return {path: path.stat().st_size for path in sorted(paths)}


def _file_case(path: Path, size: int) -> Case:
    return Case(name=path.name, text=f"{path.name} has {size:,} bytes, the limit is {FILE_LIMIT:,}", size=size)


def _whole_and_uncompressed(graph: Graph, size: int) -> str | None:
    """What shows that the package is an fp16 build in one chunk."""
    ids = [name for name, tensor in graph.integer_inputs.items() if tensor.rank == 2]
    # What is compressed is either held by the operation that decompresses it or of another type.
    other: dict[tuple[object, ...], int] = {}
    for operation in graph.function.block.walk():
        for constant in blobs([operation]):
            if operation.type != "const" or constant.type.dtype != "fp16":
                other[constant.key] = constant.stored_bytes
    if not ids or sum(other.values()) > _HARDLY_ANY * size:
        return None
    return f"an fp16 build in one chunk: it starts at token ids ({ids[0]}) and its weights are stored as fp16, none compressed"
