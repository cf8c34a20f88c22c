"""Formats of reasoning, one file each: the folder is the registry."""
