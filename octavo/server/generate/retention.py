"""How long the pages of a conversation are evicted last after its turn, as requests ask for it: OpenAI's prompt_cache_key and prompt_cache_retention,
Anthropic's cache_control. All of them are hints: equal prefixes are shared without them, and pages that running requests need are taken."""

from hashlib import blake2b
from typing import Any

from octavo.server.schema.fields import Retention

SECONDS: dict[Retention, float] = {
    "in_memory": 300.0,
    "in-memory": 300.0,
    "5m": 300.0,
    "1h": 3600.0,
    "24h": 86400.0,
}
KEY_SECONDS = 300.0  # where there is a prompt_cache_key alone
_MAX_DEPTH = 4  # messages → message → content → block → content


def salt_of(text: str) -> str:
    """A client's cache_salt, as the engine gets it."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16, person=b"octavo salt").hexdigest()


def session_of(key: str | None) -> str:
    """A name of bounded length for a client's prompt_cache_key."""
    return blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest() if key else ""


def hold_of(key: str | None, retention: Retention | None, max_seconds: float) -> dict[str, Any]:
    """Fields of a GenerateRequest. Empty: its pages are evicted as all others."""
    asked = SECONDS[retention] if retention is not None else KEY_SECONDS if key else 0.0
    seconds = min(asked, max_seconds)
    return {"session": session_of(key), "retain_seconds": seconds} if seconds > 0 else {}


def retention_in(*parts: object) -> Retention | None:
    """The longest time that a cache_control asks for in system blocks, messages and tools. None: there is none."""
    found: Retention | None = None
    left = [(part, 0) for part in parts]
    while left:
        value, depth = left.pop()
        if isinstance(value, list) and depth <= _MAX_DEPTH:
            left += [(entry, depth) for entry in value]
        elif isinstance(value, dict):
            if isinstance(control := value.get("cache_control"), dict):
                if control.get("ttl") == "1h":
                    return "1h"
                found = "5m"
            if depth < _MAX_DEPTH:
                left += [(value[name], depth + 1) for name in ("content", "function") if name in value]
    return found
