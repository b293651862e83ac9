"""Everything that a package's file tells about its cost, function by function."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ane_layers.analysis.bandwidth import ARTICLE_BANDWIDTH_MB_S, tokens_per_second
from ane_layers.analysis.caches import Caches
from ane_layers.analysis.contexts import CONTEXTS, ContextModel
from ane_layers.analysis.counts import function_counts
from ane_layers.analysis.flow import Flow
from ane_layers.analysis.records import records
from ane_layers.analysis.summaries import (
    cache_table,
    copies,
    kinds,
    largest,
    layer_table,
    materialised,
    notes,
    repetitions,
)
from ane_layers.program import Function, Package


def analyze(
    package: Package,
    function: str | None = None,
    bandwidth: float | Mapping[str, float] = ARTICLE_BANDWIDTH_MB_S,
    *,
    contexts: Iterable[int] = CONTEXTS,
    top: int = 10,
    with_records: bool = False,
    suppress: Collection[str] = (),
) -> dict[str, Any]:
    """The counts of `inspect`, and what every function moves, ready to be written as JSON.

    Args:
        package: ours or not.
        function: only this one; all of them by default.
        bandwidth: in MB/s (10⁶ bytes), or one for each chip by name.
        contexts: context lengths to predict.
        top: how many of the largest intermediates and copies to list.
        with_records: list every operation with what it reads and writes.
        suppress: rules of the lint whose findings are marked as suppressed.

    Returns:
        `{"bandwidth": MB/s, "chips": {name: MB/s}, "functions": {name: {...}}}`, where `bandwidth` is the article's constant if one is
        given for each chip. A function has the keys of `inspect` and these. Bytes are those of one call, operations of nested blocks
        counted once; a figure is None where an open dimension hides a part of it.

        - `traffic`: `weights`, `kv_read`, `kv_written`, `repetition`, `total` (see `Traffic`);
        - `materialised`: `read` and `written` by all operations (see `records`);
        - `tokens_per_second`: `bandwidth ÷ total`, calls a second. One that takes several tokens (`tokens_per_call`; None if
            that cannot be told) moves as much for all of them together; arithmetic bounds it rather than bandwidth.
        - `chips`: the same for each chip;
        - `lint`: findings;
        - `unknown`: which operations' shares are missing, and `notes`: what to know about the figures;
        - `kinds`: operations by what they do (see `kind_of`), `count` and `by_type`;
        - `repetitions`: operations that only repeat data; `copies`: `count`, `bytes` (written), `by_type` and the `largest`;
        - `largest`: the largest results by operation and shape, views and updates in place left out;
        - `layers`: a row each with its number of operations, `by_type`, and shares of the figures above (see `layers.layers`);
        - `caches`: states, inputs and outputs that are caches, with `read` and `written` bytes and `reads`, the number of parts read;
        - `context_length` and `contexts`: a row for each context length (see `ContextModel`) with its `tokens_per_second`;
        - `records`, if asked for.

    Raises:
        ValueError: there is no such function or rule, or a bandwidth is not positive.
    """
    chips = dict(bandwidth) if isinstance(bandwidth, Mapping) else {}
    main = ARTICLE_BANDWIDTH_MB_S if isinstance(bandwidth, Mapping) else bandwidth
    functions = package.functions if function is None else {function: package.function(function)}
    lengths = tuple(contexts)
    return {
        "bandwidth": main,
        "chips": chips,
        "functions": {
            name: function_costs(entry, main, chips, contexts=lengths, top=top, with_records=with_records)
            | {"lint": lint_findings(package, entry, suppress)}
            for name, entry in functions.items()
        },
    }


def analyze_chunks(
    packages: Sequence[Package],
    function: str | None = None,
    bandwidth: float | Mapping[str, float] = ARTICLE_BANDWIDTH_MB_S,
    **options: Any,
) -> dict[str, Any]:
    """`analyze` for a model in several packages, which a token passes one after the other.

    Args:
        packages: the chunks, in order.
        function, bandwidth, options: see `analyze`.

    Returns:
        As `analyze`, with functions by chunk (`chunk_0/decode`); and `together`, for each function `traffic` of all chunks, its
        `tokens_per_second`, and the number of `operations` that are carried out.
    """
    parts = {package.path.stem: analyze(package, function, bandwidth, **options) for package in packages}
    first = next(iter(parts.values()))
    together = {}
    for name in first["functions"]:
        found = [part["functions"][name] for part in parts.values()]
        traffic = {key: _sum(entry["traffic"][key] for entry in found) for key in found[0]["traffic"]}
        together[name] = {
            "traffic": traffic,
            "tokens_per_second": tokens_per_second(traffic["total"], first["bandwidth"]),
            "operations": sum(entry["operations"]["compute"] for entry in found),
        }
    functions = {f"{stem}/{name}": entry for stem, part in parts.items() for name, entry in part["functions"].items()}
    return first | {"functions": functions, "together": together}


def _sum(parts: Iterable[int | None]) -> int | None:
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def lint_findings(package: Package, function: Function, suppress: Collection[str] = ()) -> list[dict[str, Any]]:
    """The findings of the lint, ready for JSON: the only place where analysis and lint meet."""
    from ane_layers.analysis.lint import lint

    return [finding.as_dict() for finding in lint(package, function, suppress=suppress)]


def function_costs(
    function: Function,
    bandwidth: float = ARTICLE_BANDWIDTH_MB_S,
    chips: Mapping[str, float] = MappingProxyType({}),
    *,
    contexts: Iterable[int] = CONTEXTS,
    top: int = 10,
    with_records: bool = False,
) -> dict[str, Any]:
    """All that `analyze` tells about one function, but for the lint."""
    flow = Flow(function)
    model = ContextModel(flow)
    entries = records(flow)
    traffic = model.traffic
    rows = model.rows(contexts)
    for row in rows:
        row["tokens_per_second"] = tokens_per_second(row["total"], bandwidth)
    result = function_counts(function) | {
        "traffic": traffic.as_dict(),
        "materialised": materialised(entries),
        "tokens_per_second": tokens_per_second(traffic.total, bandwidth),
        "tokens_per_call": model.tokens,
        "chips": {name: tokens_per_second(traffic.total, speed) for name, speed in chips.items()},
        "unknown": list(traffic.unknown),
        "notes": notes(flow),
        "kinds": kinds(entries),
        "repetitions": repetitions(entries),
        "copies": copies(entries, top),
        "largest": largest(flow, top),
        "layers": layer_table(entries),
        "caches": cache_table(Caches(flow)),
        "context_length": model.context_length,
        "contexts": rows,
    }
    if with_records:
        result["records"] = [entry.as_dict() for entry in entries]
    return result
