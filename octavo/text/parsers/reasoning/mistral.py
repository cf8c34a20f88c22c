"""[THINK]…[/THINK] of Mistral's reasoning models. The marks are special tokens."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat("[THINK]", "[/THINK]", signs=("[/THINK]",), rank=2, aliases=("magistral",))
