"""From text to token ids and back: tokenizers, chat templates, grammars, output parsers, the detokenizer and stop strings."""

from octavo.text.load import load_text
from octavo.text.stream import TextDelta, TextStream
from octavo.text.text import Text

__all__ = ["Text", "TextDelta", "TextStream", "load_text"]
