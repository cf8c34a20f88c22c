"""⑤⑥ The backend seam: how keys and values are written to pages and read back.
Knows nothing of models."""
