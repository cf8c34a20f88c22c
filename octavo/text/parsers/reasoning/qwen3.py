"""<think>…</think> where the model or the template writes both marks: Qwen3, QwQ, SmolLM3 and most others. If neither the
output nor the prompt has the opening mark, there is no reasoning."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat("<think>", "</think>", signs=("</think>",), aliases=("think",))
