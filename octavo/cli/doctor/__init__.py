"""`octavo doctor`: checks whether a model would serve (model.py), and whether its output depends on the batch
(determinism.py)."""
