"""FBGEMM's 8-bit floats with a scale per row: the same layout as fp8."""

from octavo.weights.formats.quantised.fp8 import plan_load

__all__ = ["plan_load"]
