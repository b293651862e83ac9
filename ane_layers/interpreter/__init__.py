"""Runs a saved ML Program with torch, on any machine: the oracle for what a package computes."""

from ane_layers.interpreter.diagnosis import Finding
from ane_layers.interpreter.interface import Mode
from ane_layers.interpreter.ml_program import MLProgram
from ane_layers.interpreter.state import MLState

__all__ = ["Finding", "MLProgram", "MLState", "Mode"]
