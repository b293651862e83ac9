"""What a saved program costs, read from its own files."""

from ane_layers.analysis.analyze import analyze, analyze_chunks
from ane_layers.analysis.bandwidth import (
    ARTICLE_BANDWIDTH_MB_S,
    article_comparison,
    article_readings,
    tokens_per_second,
)
from ane_layers.analysis.compare import compare
from ane_layers.analysis.counts import inspect
from ane_layers.analysis.traffic import Traffic, traffic

__all__ = [
    "ARTICLE_BANDWIDTH_MB_S",
    "Traffic",
    "analyze",
    "analyze_chunks",
    "article_comparison",
    "article_readings",
    "compare",
    "inspect",
    "tokens_per_second",
    "traffic",
]
