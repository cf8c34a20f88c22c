"""From text to token ids and back: tokenizers, chat templates, grammars, output parsers, the detokenizer and stop strings.

The names below are loaded on first use: a process that only compiles grammars (octavo/sandbox) loads no tokenizer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.text.load import load_text
    from octavo.text.stream import TextDelta, TextStream
    from octavo.text.text import Text

__all__ = ["Text", "TextDelta", "TextStream", "load_text"]

_HOMES = {"Text": "text", "TextDelta": "stream", "TextStream": "stream", "load_text": "load"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
