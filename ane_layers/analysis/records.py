"""What each operation reads and writes: one record an operation, in both accountings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ane_layers.analysis.accesses import Access
from ane_layers.analysis.caches import Caches
from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.layers import layers
from ane_layers.analysis.movement import SELECTIONS, UPDATES, VIEWS, data_of, is_copy, new_data_of, reads, repeats, root
from ane_layers.analysis.storage import SMALLEST_COUNTED, stored_bytes
from ane_layers.analysis.traffic import constant_bytes, output_bytes

Kind: TypeAlias = Literal["repetition", "copy", "view", "control flow", "matrix product", "reduction", "elementwise"]

_PRODUCTS = frozenset(
    {"conv", "conv_transpose", "einsum", "gru", "linear", "lstm", "matmul", "rnn", "scaled_dot_product_attention"}
)
_REDUCTIONS = frozenset(
    {
        "argsort",
        "batch_norm",
        "cumsum",
        "instance_norm",
        "l2_norm",
        "layer_norm",
        "local_response_norm",
        "softmax",
        "topk",
    }
)
_MOVING: frozenset[Kind] = frozenset({"copy", "repetition", "view"})
_CONTROL = frozenset({"cond", "make_list", "shape", "list_length", "while_loop"})


@dataclass(frozen=True)
class Record:
    """One operation. Bytes are of one call, those of nested blocks of one round; None where a dimension is open.

    Attributes:
        name, type: of the operation.
        kind: what it does: see `kind_of`.
        layer: that it belongs to (`layers.layers`).
        read, written: everything materialised: inputs and outputs, with the exceptions that `records` lists.
        weights, kv_read, kv_written, repetition: its share of `Traffic`.
        cache: name of the cache whose content it moves unchanged; empty for others.
        depth: blocks around it within the function.
    """

    name: str
    type: str
    kind: Kind
    layer: str
    read: int | None
    written: int | None
    weights: int | None
    kv_read: int | None
    kv_written: int | None
    repetition: int | None
    cache: str = ""
    depth: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def records(flow: Flow) -> list[Record]:
    """A record for every operation but constants, in the order of the file.

    `read` and `written` are what the inputs and outputs hold, each input once, constants as they are stored, except that
    - views (reshape, expand_dims, squeeze, read_state …) move nothing;
    - slices, splits and lookups read what they pass on;
    - an update of a state reads and writes the new rows, and the `write_state` behind it nothing; any other update copies the whole;
    - `shape` and the like read nothing, and neither do a loop or a branch beyond what is inside them;
    - constants of fewer than 10 elements (axes, paddings) count nothing.
    """
    caches = Caches(flow)
    kv_read, kv_written = _by_step(caches.reads()), _by_step(caches.writes())
    of_layer = layers(flow)
    result = []
    for step in flow.steps:
        read, written = _materialised(step, caches)
        result.append(
            Record(
                name=step.name,
                type=step.type,
                kind=kind_of(step),
                layer=of_layer[step],
                read=read,
                written=written,
                weights=constant_bytes(step),
                kv_read=kv_read.get(step, 0),
                kv_written=kv_written.get(step, 0),
                repetition=output_bytes(step) if repeats(step) else 0,
                cache=_cache(step, caches),
                depth=step.depth,
            )
        )
    return result


def kind_of(step: Step) -> Kind:
    """`repetition`: gives data several times. `copy`: moves data and computes nothing (slices, lookups, concat, transpose, updates …).
    `view`: the same elements in the same order. `matrix product`: convolutions, matmul, recurrent layers. `reduction`: reductions, norms,
    softmax, pooling, sorting. `control flow`: loops, branches, shapes, lists. `elementwise`: all else."""
    if repeats(step):
        return "repetition"
    if is_copy(step):
        return "copy"
    if step.type in VIEWS:
        return "view"
    if step.type in _PRODUCTS:
        return "matrix product"
    if step.type in _REDUCTIONS or step.type.startswith("reduce_") or step.type.endswith("_pool"):
        return "reduction"
    return "control flow" if step.type in _CONTROL else "elementwise"


def _materialised(step: Step, caches: Caches) -> tuple[int | None, int | None]:
    if step.type in VIEWS or step.operation.blocks:
        return 0, 0
    if step.type == "write_state":
        replaced = 0 if caches.is_update(step) else data_bytes(step.one("data"))
        return replaced, replaced
    written = output_bytes(step)
    data = data_of(step) if step.type in SELECTIONS | UPDATES else None
    read: int | None = constant_bytes(step)
    for datum in {datum: None for parameter, datum in step.given() if reads(step, parameter)}:
        if root(datum).constant is not None:
            continue
        size = datum.bytes
        if datum is data and step.type in SELECTIONS:
            size = written
        elif datum is data and caches.in_place(step):
            size = 0
        read = None if read is None or size is None else read + size
    if step.type in UPDATES and caches.in_place(step):
        written = data_bytes(new_data_of(step))
    return read, written


def data_bytes(datum: Datum | None) -> int | None:
    """Bytes of a value: as stored of a constant, dense of anything else."""
    if datum is None:
        return 0
    constant = root(datum).constant
    if constant is None:
        return datum.bytes
    return stored_bytes(constant) if (datum.elements or 0) >= SMALLEST_COUNTED else 0


def _cache(step: Step, caches: Caches) -> str:
    data = data_of(step)
    return caches.parts[data].source.name if data in caches.parts and kind_of(step) in _MOVING else ""


def _by_step(accesses: Iterable[Access]) -> dict[Step, int | None]:
    sizes: dict[Step, int | None] = {}
    for access in accesses:
        before = sizes.get(access.step, 0)
        sizes[access.step] = None if before is None or access.bytes is None else before + access.bytes
    return sizes
