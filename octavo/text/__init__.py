"""Text and back: tokenizers, chat templates, the incremental detokenizer and stop strings.
Knows nothing of torch, of the engine or of HTTP."""

from octavo.text.load import load_text
from octavo.text.stream import TextDelta, TextStream
from octavo.text.text import Text

__all__ = ["Text", "TextDelta", "TextStream", "load_text"]
