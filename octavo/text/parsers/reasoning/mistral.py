"""[THINK]…[/THINK] of Mistral's reasoning models; the marks are special tokens.
Knows nothing of their tool calls."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat("[THINK]", "[/THINK]", signs=("[/THINK]",), rank=2, aliases=("magistral",))
