"""Formats of tool calls, one file each: the folder is the registry."""
