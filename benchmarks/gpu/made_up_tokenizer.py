"""A vocabulary of made-up words for models that are nothing but a config: a server must spell the tokens it streams.
Every token is a short word with a space before it, as most of a real one's are."""

import json
from pathlib import Path
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "Ġ"  # how byte-level vocabularies write a leading space


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json into `folder`: byte-level BPE without merges. It decodes every id and cannot encode text."""
    vocabulary = {_SPACE + _word(i): i for i in range(vocab_size)}
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text("{}")


def _word(number: int) -> str:
    """Return a different word for every number: a, b, … z, aa, ba, …."""
    word = ""
    while True:
        word += _LETTERS[number % 26]
        number = number // 26 - 1
        if number < 0:
            return word
