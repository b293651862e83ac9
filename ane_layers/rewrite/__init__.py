"""Folds the queries of attention in programs that exist already, and takes their repeated keys and values away.

For packages on disk, `fold_package`. While converting, the graph pass `ane_layers::fold_repeated_kv`: `ane_layers.rewrite.graph_pass`,
which imports coremltools' converter and is therefore not imported here.
"""

from ane_layers.rewrite.equality import Equality, equality
from ane_layers.rewrite.package import FoldedPackage, fold_package, plan_package
from ane_layers.rewrite.planning import Plan, plan
from ane_layers.rewrite.report import Folded, FoldReport, FunctionReport, Refused, Repeated

__all__ = [
    "Equality",
    "FoldReport",
    "Folded",
    "FoldedPackage",
    "FunctionReport",
    "Plan",
    "Refused",
    "Repeated",
    "equality",
    "fold_package",
    "plan",
    "plan_package",
]
