"""A made-up tokenizer for a model that is nothing but a configuration."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.text import load_text
from octavo.text.tokenize.files import NAMES
from octavo.text.tokenize.made_up import made_up_tokenizer, write_tokenizer


@pytest.mark.parametrize("size", [50, 1000])
def test_it_spells_every_id(tmp_path: Path, size: int) -> None:
    write_tokenizer(tmp_path, size)
    (tmp_path / "config.json").write_text("{}")
    text = load_text(tmp_path)
    words = [text.decode([i]) for i in range(size)]
    assert len(set(words)) == size and sum(word.strip().isalpha() for word in words) >= min(size, 900)


def test_it_encodes_ascii_and_its_own_words(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    (tmp_path / "config.json").write_text("{}")
    text = load_text(tmp_path)
    for said in ("What is 2 + 2?\n", "a zz aa"):
        ids = text.encode(said)
        assert text.decode(ids).strip() == said.strip()
    assert len(text.encode(" zz aa b")) == 3


def test_it_is_made_up_only_where_there_is_none(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "made-up"
    model.mkdir()
    for content in ("{}", "[]", "", '{"vocab_size": true}', '{"vocab_size": 10000000000}', "[" * 100_000):
        (model / "config.json").write_text(content)
        with pytest.raises(
            ConfigError, match=r"has no vocab_size from 1 to [0-9]*, so no tokenizer can be made up: give --tokenizer"
        ):
            made_up_tokenizer(model, folder)
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 300}}))
    assert made_up_tokenizer(model, folder) == str(folder)
    assert load_text(model, tokenizer=str(folder)).decode([299]).strip()
    for name in NAMES:
        (model / name).write_text("")
        assert made_up_tokenizer(model, folder) == ""
        (model / name).unlink()
    assert made_up_tokenizer(model / "config.json", folder) == ""
