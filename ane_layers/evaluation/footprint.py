"""Bytes that a model takes in a package, and bytes that a decoded token moves, by the article's accounting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ane_layers.analysis.counts import weight_bytes
from ane_layers.analysis.traffic import traffic
from ane_layers.compression import Compression, Plan, Recipe, make_plan, units
from ane_layers.compression.report import TensorReport, report_plain
from ane_layers.models import CausalLM
from ane_layers.program import Package


@dataclass(frozen=True)
class Footprint:
    """Sizes, in bytes.

    Attributes:
        weight_bytes: of all weights as stored, lookup tables and scales included, a table that embedding and head share once.
        bytes_per_token: that one decoded token moves: weights that are read, of the embedding one row; the keys and values of all
            slots, which are read; and the new ones, which are written. None if a package leaves it open.
    """

    weight_bytes: int
    bytes_per_token: int | None


def model_footprint(model: CausalLM, compression: Compression | None = None, *, context: int) -> Footprint:
    """What a package made of this model will hold and move, to within what no checkpoint holds: tables of rotary angles (one row a
    token is read of them) and alignment.

    Args:
        model: as it would be converted.
        compression: of this model; without, weights count as fp16.
        context: slots of the cache.
    """
    plan = make_plan(model, Recipe(name="fp16", tied="share")) if compression is None else compression.plan
    reports = _plain(model, plan) if compression is None else {part.path: part for part in compression.report.tensors}
    tables = [path for unit in units(model) if unit.kind == "embedding" for path in unit.weights]
    total = sum(part.stored_bytes for part in reports.values())
    # A table that the head shares is read whole; its bytes are listed with the embedding.
    unread = sum(reports[path].stored_bytes for path in tables if path not in plan.shared)
    rows = sum(_row_bytes(reports[path]) for path in tables)
    config = model.config
    # Keys and values of one slot, in fp16.
    slot = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return Footprint(total, total - unread + rows + context * slot + slot)


def package_footprint(packages: Sequence[Package]) -> Footprint:
    """Of `decode` in a package, or in all chunks of a model: what their files refer to, constant tables included, and what
    `ane_layers.analysis.traffic` adds up."""
    functions = [package.function("decode") for package in packages]
    moved = [traffic(function).total for function in functions]
    open_ = None in moved
    total = None if open_ else sum(part for part in moved if part is not None)
    return Footprint(sum(map(weight_bytes, functions)), total)


def _plain(model: CausalLM, plan: Plan) -> Mapping[str, TensorReport]:
    """Every parameter as fp16, the pieces of a tied head as parts of the embedding."""
    pieces = {path for unit in units(model) if unit.kind == "head" for path in unit.weights if path in plan.shared}
    return {
        path: report_plain(path, tuple(parameter.shape), "", shared=path in pieces)
        for path, parameter in model.named_parameters()
    }


def _row_bytes(table: TensorReport) -> int:
    """One row of an embedding, with the lookup table or scales that it needs."""
    rows = table.shape[0]
    data = -(-table.data_bytes // rows)
    if table.setting.scheme == "linear":
        return data + table.table_bytes // rows
    return data + table.table_bytes * (table.setting.group_size or rows) // rows
