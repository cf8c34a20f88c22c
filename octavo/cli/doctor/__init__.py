"""`octavo doctor`: would a model serve (model.py), and does it give the same bytes in every company (determinism.py)?
Knows nothing of torch or tensors: what needs them is loaded by name."""
