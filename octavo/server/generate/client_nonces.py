"""The line that Claude Code puts before its system prompt and changes in every request: with it no two requests would share a prefix. It comes in
/v1/messages, and in /v1/chat/completions through proxies that translate."""

import re
from typing import Any

from octavo.config import ServerConfig

NONCE = "x-anthropic-billing-header"
_LINES = re.compile(rf"\A({NONCE}:[^\n]*(\n+|\Z))+")


def are_dropped(server: ServerConfig) -> bool:
    """Strict mode honours or refuses: there the line stays."""
    return server.drop_client_nonces and not server.strict_fields


def without_nonce(system: object) -> tuple[object, bool]:
    """The system prompt, text or blocks, without the line, and whether it had one. Only whole lines at the very beginning are taken."""
    if isinstance(system, str):
        rest = _LINES.sub("", system, count=1)
        return rest, rest != system
    if isinstance(system, list) and system and isinstance(system[0], dict) and isinstance(system[0].get("text"), str):
        first: dict[str, Any] = system[0]
        rest = _LINES.sub("", first["text"], count=1)
        if rest != first["text"]:
            return ([{**first, "text": rest}] if rest.strip() else []) + system[1:], True
    return system, False


def drop_nonce(messages: list[dict[str, Any]]) -> bool:
    """Take the line from the system message that a conversation begins with. → whether there was one. A message that has nothing else goes, too,
    unless it is the only one."""
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return False
    content, had_nonce = without_nonce(first.get("content"))
    if had_nonce:
        messages[:1] = [{**first, "content": content}] if content or len(messages) == 1 else []
    return had_nonce
