"""A vocabulary of made-up words for models that are nothing but a configuration: a server must spell the tokens it streams.
Nearly every token is a short word with a space before it, as most of a real one's are."""

import json
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.text.tokenize.files import vocabulary_file

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_TOKENS = 1 << 22  # many times as many as any model has
_SPACE = "Ġ"  # how byte-level vocabularies write a leading space
_CHARACTERS = [
    _SPACE,
    "Ċ",
    *map(chr, range(33, 127)),
]  # space, end of line and what ASCII prints: with them, it can be encoded
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def made_up_tokenizer(model: Path, folder: Path) -> str:
    """Write a tokenizer into `folder` for a model's folder that has none. → where it is; "": the model has one."""
    if not model.is_dir() or vocabulary_file(model) is not None:
        return ""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        size = None
    if type(size) is not int or not 1 <= size <= _MOST_TOKENS:
        raise ConfigError(
            f"{path} has no vocab_size from 1 to {_MOST_TOKENS}, so no tokenizer can be made up: give --tokenizer a folder with one"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    write_tokenizer(folder, size)
    return str(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json into `folder`: byte-level BPE without merges, and a template for chats. It decodes every id. Made-up words
    become one token, other ASCII one for each character; what is not ASCII is left out."""
    characters = _CHARACTERS if vocab_size >= 2 * len(_CHARACTERS) else []
    tokens = [*characters, *(_SPACE + _word(number) for number in range(vocab_size - len(characters)))]
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [], "ignore_merges": True},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


def _word(number: int) -> str:
    """Return a different word for every number: a, b, … z, aa, ba, …."""
    word = ""
    while True:
        word += _LETTERS[number % 26]
        number = number // 26 - 1
        if number < 0:
            return word
