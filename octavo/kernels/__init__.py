"""Hand-written kernels for operations that torch has no single call for, or only a slow one."""
