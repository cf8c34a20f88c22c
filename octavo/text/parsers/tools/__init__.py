"""Formats of tool calls, one file each: the folder is the registry.
Knows nothing of any format but its file's name."""
