"""Choice of the formats of a model's tool calls and reasoning: by a flag, or by what its chat template shows."""

from dataclasses import dataclass

from octavo.config import AUTO
from octavo.errors import ConfigError
from octavo.text.chat.template import ChatTemplate, DescribedTemplate
from octavo.text.chat.tool_prompt import FORMAT
from octavo.text.parsers import (
    ThinkFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
    reasoning_format,
    tool_format,
)

NONE = "none"  # as a parser's name: the output is not parsed


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    tools: ToolFormat | None  # None: calls stay in the content
    thinking: ThinkFormat | None  # None: reasoning stays in the content
    template_takes_tools: bool  # False: tools are described in the messages, see tool_prompt.py


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for unknown names, before a model is loaded."""
    if tool_call_parser not in (AUTO, NONE):
        tool_format(tool_call_parser)
    if reasoning_parser not in (AUTO, NONE):
        reasoning_format(reasoning_parser)


def choose_formats(
    template: ChatTemplate | DescribedTemplate, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> AnswerFormats:
    """Choose by name (--tool-call-parser, --reasoning-parser), or by what the template shows if the name is AUTO.

    A template that takes tools but shows a call format without a parser is not given the tools. They are then described in
    words, in the common format: such calls can at least be parsed.
    """
    takes_tools = template.reads("tools", with_tools=True)
    tools: ToolFormat | None = None
    if tool_call_parser == AUTO:
        name = find_tool_format(template.source(with_tools=True)) if takes_tools else None
        takes_tools = name is not None
        tools = tool_format(name or FORMAT)
    elif tool_call_parser != NONE:
        tools = tool_format(tool_call_parser)
        if not takes_tools and tools is not tool_format(FORMAT):
            raise ConfigError(
                f"--tool-call-parser {tool_call_parser}: the model's chat template does not take tools; give one that does with "
                f"--chat-template FILE, or leave the flag out: tools are then described in the prompt ({FORMAT} format)"
            )
    thinking: ThinkFormat | None = None
    if reasoning_parser == AUTO:
        found = find_reasoning_format(template.source())
        thinking = reasoning_format(found) if found is not None else None
    elif reasoning_parser != NONE:
        thinking = reasoning_format(reasoning_parser)
    return AnswerFormats(tools, thinking, takes_tools)
