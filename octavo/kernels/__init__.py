"""Hand-written kernels: what torch has no single call for, or a slow one.
Knows nothing of requests, models or layers: tensors in, tensors out."""
