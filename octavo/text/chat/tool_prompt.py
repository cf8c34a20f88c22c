"""Tools for models whose chat template does not take any: they are described in words, and calls and results are written as
tagged text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.chat.template import ChatTemplate, plain_content

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
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """Rewrite the conversation for a template that only knows the roles system, user and assistant."""
    told = _history(messages)
    if not tools:
        return told
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    words = _WORDS.format(tools="\n".join(lines))
    role = "system" if template.takes_system else "user"
    if not told or told[0].get("role") != role:
        return [{"role": role, "content": words}, *told]
    first = plain_content(told[0].get("content"), 0)
    parts = [first, words] if role == "system" else [words, first]
    return [{**told[0], "content": _joined(parts)}, *told[1:]]


def _history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    was_result = False
    for at, message in enumerate(messages):
        is_result = message.get("role") == "tool"
        if is_result:
            content = f"<tool_response>\n{plain_content(message.get('content'), at)}\n</tool_response>"
            if was_result:  # join consecutive results: many templates require alternating roles
                told[-1]["content"] += "\n" + content
            else:
                told.append({"role": "user", "content": content})
        elif calls := message.get("tool_calls"):
            content = _joined([plain_content(message.get("content"), at), *map(_call, calls)])
            told.append({"role": message["role"], "content": content})
        else:
            told.append(dict(message))
        was_result = is_result
    return told


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts))
