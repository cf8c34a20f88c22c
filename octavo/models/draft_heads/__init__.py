"""Draft heads: small networks that propose tokens from the hidden states of the model that they were trained with (decision 064)."""
