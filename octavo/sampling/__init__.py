"""Choosing tokens: from logits to ids, by each row's own parameters.
Knows nothing of requests, pages or models."""
