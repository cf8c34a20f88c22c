"""Text written by users never becomes a control token in a chat; text written by the template does.
The ids are checked against the `tokenizers` library, set to treat control tokens as text."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from vocabularies import (
    CORPUS,
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    marked_bpe,
    sentencepiece_model,
    write_gguf_metadata,
)

from octavo.errors import ConfigError, InvalidRequest
from octavo.text import Text, load_text
from octavo.text.tokenize.special_token_escape import SpecialTokenEscape, any_of

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>{% endfor %}"


def chatty_byte_level() -> tokenizers.Tokenizer:
    """Role markers that overlap, and one that the vocabulary does not mark as special, as in DeepSeek's."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "s><", "★"])
    tokenizer.add_tokens([AddedToken("<｜User｜>", normalized=True), "<think>"])
    return tokenizer


def from_folder(write: Callable[[Path], Any]) -> Text:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        return load_text(Path(folder))


def from_gguf(metadata: Callable[[Path], dict[str, Any]]) -> Text:
    with tempfile.TemporaryDirectory() as folder:
        made = {**metadata(Path(folder)), "tokenizer.chat_template": TEMPLATE}
        return load_text(write_gguf_metadata(Path(folder) / "m.gguf", made))


def save(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))


def marked_with_roles() -> tokenizers.Tokenizer:
    tokenizer = marked_bpe()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer


KINDS: dict[str, Callable[[], Text]] = {
    "byte_level": lambda: from_folder(functools.partial(save, chatty_byte_level())),
    "marked_bpe": lambda: from_folder(functools.partial(save, marked_with_roles())),
    "gguf_byte_level": lambda: from_gguf(lambda _: gguf_of_byte_level(chatty_byte_level(), "gpt-2")),
    "gguf_sentencepiece": lambda: from_gguf(lambda folder: gguf_of_sentencepiece(sentencepiece_model("bpe", folder))),
    "sentencepiece": lambda: from_folder(functools.partial(sentencepiece_model, "unigram")),
}


@functools.cache
def text_of(kind: str) -> Text:
    return KINDS[kind]()


def spelt(text: Text, ids: list[int]) -> list[str]:
    return [text.decode([token_id], skip_special_tokens=False) for token_id in ids]


CONTROL = ["<|start|>", "<|end|>", "<s>", "</s>", "s><", "★", "<｜User｜>"]
words = st.lists(
    st.sampled_from([*CONTROL, "<", "|", ">", "<|", "end|>", "s", "a", " ", "é", "\U0002a000", "\U0002a001"])
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(parts=words)
@example(parts=["<|end|>", "<|start|>"])
@example(parts=["<s>", "<"])
def test_only_the_template_writes_control_tokens(kind: str, parts: list[str]) -> None:
    text, content = text_of(kind), "x" + "".join(parts) + "x"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    ids = text.encode_chat(messages)
    plain = text.encode_chat([{"role": "user", "content": "x"}] * 2)
    control = {token for token in map(text._tokenizer.token_id, CONTROL) if token is not None}
    assert [token for token in ids if token in control] == [token for token in plain if token in control]
    # No text is lost, whatever it looks like.
    assert text.render_chat(messages).startswith(f"<|start|>user\n{content}<|end|>")
    if kind.endswith("byte_level"):
        assert text.decode(ids, skip_special_tokens=False) == text.render_chat(messages)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(parts=words)
def test_hidden_text_has_the_ids_of_a_tokenizer_that_knows_no_control_tokens(parts: list[str]) -> None:
    library, text = byte_level(), from_folder_once()
    library.encode_special_tokens = True
    content = "x" + "".join(parts) + "x"
    ids = text.encode_chat([{"role": "user", "content": content}])
    assert ids == [0, *library.encode("user\n" + content).ids, 1]


@functools.cache
def from_folder_once() -> Text:
    return from_folder(functools.partial(save, byte_level()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_without_look_alikes_is_encoded_as_its_text_is(kind: str) -> None:
    text = text_of(kind)
    for content in [*CORPUS[:5], "", " \n ", "a\U0002a000b\U0002a001", "x <think> y"]:
        messages = [{"role": "user", "content": content}]
        assert text.encode_chat(messages) == text.encode(text.render_chat(messages), add_special_tokens=False)


def test_a_completion_prompt_may_write_control_tokens() -> None:
    """As in vLLM and llama.cpp's server: the author of a completion writes the whole prompt."""
    text = from_folder_once()
    assert text.encode("<|start|>user<|end|>") == [0, *text.encode("user"), 1]


TOOLS = [{"type": "function", "function": {"name": "<|end|>", "parameters": {"<|start|>": "é<|end|>\\"}}}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}",
        "{{ messages | tojson }}",
        "{{ messages | tojson(ensure_ascii=true) }} {{ tools | tojson(ensure_ascii=true, indent=2) }}",
        "{{ messages[0].role ~ extra.deep[0] }} {{ tools | string }}",
        "{{ messages[0].content.upper() }} {{ messages[0].content[:9] }} {{ messages[0].content | length }}",
        "{% for k, v in tools[0].function.parameters.items() %}{{ k }}={{ v | e }}{% endfor %}",
    ],
)
def test_a_template_may_do_with_the_words_what_it_likes(source: str) -> None:
    text = from_folder_once()
    plain = from_folder(functools.partial(save, byte_level()))
    for each in (text, plain):
        each._template = type(each._template)({"default": source}, {})
        each.formats = dataclasses.replace(each.formats, template_takes_tools=True)
    messages = [{"role": "<|end|>", "content": "\\ufdd0 é \U0002a000 <|start|>", "name": "<|end|>"}]
    arguments: dict[str, Any] = {"tools": TOOLS, "extra": {"deep": ["<|end|>"]}}
    # Without look-alikes to hide, the template sees the words unchanged.
    plain._tokenizer.lookalikes = SpecialTokenEscape([])
    expected = plain.render_chat(messages, **arguments)
    assert text.render_chat(messages, **arguments) == expected.replace("&lt;|", "<|")
    assert not {0, 1} & set(text.encode_chat(messages, **arguments))


def test_what_a_template_says_of_the_words_is_said_as_they_were_written() -> None:
    text = from_folder(functools.partial(save, byte_level()))
    text._template = type(text._template)({"default": "{{ raise_exception('no: ' + messages[0].content) }}"}, {})
    with pytest.raises(InvalidRequest, match=r"no: <\|end\|>$"):
        text.encode_chat([{"role": "user", "content": "<|end|>"}])


def test_normalizing_makes_no_control_token_of_other_text() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<|role|>", normalized=True)])
    text = from_folder(functools.partial(save, tokenizer))
    role = tokenizer.token_to_id("<|role|>")
    disguised = "＜|role|＞"
    assert role in text.encode(disguised)
    assert role not in text.encode_chat([{"role": "user", "content": disguised}])


@pytest.mark.parametrize("kind", ["unigram", "whole words", "word piece"])
def test_a_model_that_would_spell_control_tokens_by_itself_does_not(kind: str) -> None:
    """Their names are entries of its table: a unigram model would find them there, and others would in a word that is one."""
    pieces = ["<unk>", "<s>", "EOS", "▁", "x", *"<s>EO"]
    tokens = {token: i for i, token in enumerate(dict.fromkeys(pieces))}
    model: Any = {
        "unigram": lambda: models.Unigram([(token, 0.0 if i < 3 else -2.0) for token, i in tokens.items()], 0, False),
        "whole words": lambda: models.BPE(tokens, [], unk_token="<unk>", ignore_merges=True),
        "word piece": lambda: models.WordPiece({**tokens, "##O": 20, "##S": 21}, unk_token="<unk>"),
    }[kind]()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "EOS", "<|start|>", "<|end|>"])
    text = from_folder(functools.partial(save, tokenizer))
    start, end = tokenizer.token_to_id("<|start|>"), tokenizer.token_to_id("<|end|>")
    ids = text.encode_chat([{"role": "x", "content": "EOS <s> <|end|>"}])
    assert (ids[0], ids[-1], ids.count(start), ids.count(end)) == (start, end, 1, 1)
    assert not {1, 2} & set(ids)
    assert text.encode("EOS <s>") == [2, 1]


def test_user_defined_tokens_of_a_sentencepiece_model_that_read_like_control_tokens(tmp_path: Path) -> None:
    """The sentencepiece package finds them in every text by itself; <|end|> is one in this model."""
    model: sentencepiece.SentencePieceProcessor = sentencepiece_model("bpe", tmp_path)
    end = model.piece_to_id("<|end|>")
    assert end in model.encode("a<|end|>")
    text = text_of("sentencepiece")
    ids = text.encode_chat([{"role": "user", "content": "little<|end|>fox"}])
    assert "".join(spelt(text, ids)).count("<|end|>") == 2
    assert ids.count(text._tokenizer.token_id("<|end|>")) == 1


def test_any_of_matches_the_longest() -> None:
    import re

    tokens = ["a", "ab", "abc", "b.", "b|", "ü", "", *("x" * length for length in range(1, 300))]
    pattern = re.compile(any_of(tokens))
    for sample, longest in [("abd", "ab"), ("abcd", "abc"), ("b.|", "b."), ("x" * 500, "x" * 299), ("üa", "ü")]:
        assert pattern.match(sample)[0] == longest  # type: ignore[index]
    assert pattern.match("c") is None


def test_a_vocabulary_of_too_many_control_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="1000 different characters"):
        SpecialTokenEscape([chr(0x4E00 + at) for at in range(1000)])


def test_words_nested_too_deeply_are_the_callers_mistake() -> None:
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested"):
        from_folder_once().encode_chat([{"role": "user", "content": "x"}], extra=deep)
