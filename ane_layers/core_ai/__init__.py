"""The families as Core AI assets: an optional exporter, and the runtime that comes with Core AI's Python packages.

Needs `pip install ane-layers[coreai]`; nothing is imported from there before it is used.
"""

from ane_layers.core_ai.export import export
from ane_layers.core_ai.packages import require
from ane_layers.core_ai.runtime import CoreAIProgram, CoreAISession
from ane_layers.core_ai.verification import verify

__all__ = ["CoreAIProgram", "CoreAISession", "export", "require", "verify"]
