"""<think>…</think> where the model or the template says both marks: Qwen3, QwQ, SmolLM3 and most others.
Refuses to guess: an answer without an opening mark, from a prompt without one, has no reasoning."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat("<think>", "</think>", signs=("</think>",), aliases=("think",))
