"""Where a model name comes from, and how its files become tensors.
Knows nothing of layers, ranks or requests."""
