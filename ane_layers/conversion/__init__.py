"""PyTorch modules to Core ML programs. The only part that imports coremltools' converter, and only when something is converted."""

from ane_layers.conversion.check import Expectations
from ane_layers.conversion.converter import check_target, convert
from ane_layers.conversion.errors import ConversionError
from ane_layers.conversion.tracing import FunctionSpec

__all__ = ["ConversionError", "Expectations", "FunctionSpec", "check_target", "convert"]
