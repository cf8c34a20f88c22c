"""Kernels that wait to be measured on a GPU before anything uses them.
Knows nothing of the engine."""
