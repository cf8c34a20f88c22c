"""<think>…</think> of models that always think first and may leave the opening mark out: DeepSeek R1.
Knows nothing of its tool calls. Where the prompt closes the block (V3.1 without thinking) there is no reasoning."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat(
    "<think>",
    "</think>",
    opens_unsaid=True,
    signs=("</think>", "<｜Assistant｜>"),
    rank=1,
    aliases=("deepseek_v3",),
)
