"""Sampling: from logits to token ids, by each row's parameters."""
