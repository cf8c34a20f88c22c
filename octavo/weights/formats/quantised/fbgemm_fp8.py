"""8-bit floats with a scale for each row, as FBGEMM has them: laid out as fp8's.
Knows nothing that fp8.py does not."""

from octavo.weights.formats.quantised.fp8 import plan

__all__ = ["plan"]
