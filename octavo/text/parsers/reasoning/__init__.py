"""Formats of reasoning, one file each: the folder is the registry.
Knows nothing of any format but its file's name."""
