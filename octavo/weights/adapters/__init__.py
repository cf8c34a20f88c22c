"""Low-rank adapters as files: PEFT folders and GGUF files (decision 052)."""
