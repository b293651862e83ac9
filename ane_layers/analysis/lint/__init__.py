"""Holds a saved function against what is publicly known about the Neural Engine and the tool chain."""

from ane_layers.analysis.lint import compression, numerics, operations, shapes, states, weights  # noqa: F401  they register rules
from ane_layers.analysis.lint.finding import Case, Confidence, Finding, Rule, Severity
from ane_layers.analysis.lint.registry import fails, lint, rules, rules_by_subject

__all__ = ["Case", "Confidence", "Finding", "Rule", "Severity", "fails", "lint", "rules", "rules_by_subject"]
