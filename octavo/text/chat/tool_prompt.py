"""Tools for models whose chat template does not take any: they are described in words, and calls and results are written as
tagged text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.chat.template import ChatTemplate, DescribedTemplate, content_text

FORMAT = "hermes"

_WORDS = """You can call functions. Each line between the tags <tools> and </tools> describes one, with the JSON schema of its parameters:
<tools>
{tools}
</tools>

Call a function when it helps with the request. To do so, write its name and its arguments as one JSON object between tags, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
The results come back between the tags <tool_response> and </tool_response>. When no function is needed, answer in plain words."""


def spell_out(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate | DescribedTemplate,
) -> list[dict[str, Any]]:
    """Rewrite the conversation for a template that only knows the roles system, user and assistant."""
    history = _history(messages)
    if not tools:
        return history
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    words = _WORDS.format(tools="\n".join(lines))
    role = "system" if template.takes_system else "user"
    if not history or history[0].get("role") != role:
        return [{"role": role, "content": words}, *history]
    first = content_text(history[0].get("content"), 0)
    parts = [first, words] if role == "system" else [words, first]
    return [{**history[0], "content": _joined(parts)}, *history[1:]]


def _history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = []
    results: list[str] = []  # consecutive results become one message: many templates require alternating roles
    for at, message in enumerate(messages):
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{content_text(message.get('content'), at)}\n</tool_response>")
            continue
        if results:
            history.append({"role": "user", "content": "\n".join(results)})
            results = []
        if calls := message.get("tool_calls"):
            content = _joined([content_text(message.get("content"), at), *map(_call, calls)])
            history.append({"role": message["role"], "content": content})
        else:
            history.append(dict(message))
    if results:
        history.append({"role": "user", "content": "\n".join(results)})
    return history


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts))
