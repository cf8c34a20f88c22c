"""<think>…</think> of models that always reason first and may omit the opening mark: DeepSeek R1. If the prompt closes the
block (V3.1 without thinking), there is no reasoning."""

from octavo.text.parsers.thinking import ThinkFormat

FORMAT = ThinkFormat(
    "<think>",
    "</think>",
    opens_unsaid=True,
    signs=("</think>", "<｜Assistant｜>"),
    rank=1,
    aliases=("deepseek_v3",),
)
