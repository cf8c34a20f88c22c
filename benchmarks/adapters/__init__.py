"""Adapters: PEFT itself as the reference, and what they cost."""
