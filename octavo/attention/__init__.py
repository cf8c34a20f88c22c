"""⑤⑥ Attention backends: write keys and values to pages, and attend over them."""
