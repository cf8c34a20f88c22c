"""A stream's pieces add up to the whole decode for any ids; no piece holds half a character."""

import codecs
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import (
    SAMPLES,
    byte_level,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    marked_bpe,
    random_texts,
    sentencepiece_model,
    suffix_bpe,
    word_piece,
)

from octavo.text.tokenize.detokenizer import BytePieces
from octavo.text.tokenize.gguf_vocab import gguf_tokenizer, read_vocabulary
from octavo.text.tokenize.tokenizer import Tokenizer, read_tokenizer_json


def from_json(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return read_tokenizer_json(path)


def gguf_sentencepiece() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return gguf_tokenizer(read_vocabulary(gguf_of_sentencepiece(sentencepiece_model("bpe", Path(folder)))))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": lambda: from_json(byte_level()),
    "marked_bpe": lambda: from_json(marked_bpe()),
    "gguf_byte_level": lambda: gguf_tokenizer(read_vocabulary(gguf_of_byte_level(byte_level(), "gpt-2"))),
    "gguf_sentencepiece": gguf_sentencepiece,
    "word_piece": lambda: from_json(word_piece()),
    "suffix_bpe": lambda: from_json(suffix_bpe()),
}
AS_BYTES = ["byte_level", "marked_bpe", "gguf_byte_level", "gguf_sentencepiece"]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, skip)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def byte_ids(kind: str, text: bytes) -> list[int]:
    """One id for each byte."""
    return [_ids_of_bytes(kind)[byte] for byte in text]


@functools.cache
def _ids_of_bytes(kind: str) -> dict[int, int]:
    pieces = tokenizer_of(kind)._pieces  # type: ignore[attr-defined]
    spelt = {pieces.piece(token_id, False): token_id for token_id in range(tokenizer_of(kind).vocab_size)}
    return {byte: spelt[bytes([byte])] for byte in range(256)}


@st.composite
def ids(draw: st.DrawFn, kind: str, max_size: int = 40) -> list[int]:
    """Any ids, some outside the vocabulary, many of the first ones: the bytes and special tokens."""
    size = tokenizer_of(kind).vocab_size
    one = st.one_of(st.integers(0, size + 3), st.integers(0, min(size, 260) - 1))
    return draw(st.lists(one, max_size=max_size))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_pieces_concatenate_to_the_whole_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    output = data.draw(ids(kind))
    assert "".join(streamed(tokenizer, [], output, skip)) == tokenizer.decode(output, skip)


@pytest.mark.parametrize("kind", AS_BYTES)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_continuation_is_the_whole_without_the_prompt(kind: str, data: st.DataObject) -> None:
    """The prompt ends with a whole character, as every encoded text does: then the two decodes differ by the output."""
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(data.draw(st.text(max_size=8)), data.draw(st.booleans()))
    output = data.draw(ids(kind))
    before, whole = tokenizer.decode(prompt, True), tokenizer.decode(prompt + output, True)
    assert before + "".join(streamed(tokenizer, prompt, output)) == whole


@pytest.mark.parametrize("kind", AS_BYTES)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_a_continuation_completes_what_the_prompt_left_unfinished(kind: str, data: st.DataObject, skip: bool) -> None:
    """A prompt of ids may end anywhere, even inside a character or between special tokens."""
    tokenizer = tokenizer_of(kind)
    begun = data.draw(st.sampled_from(["", "é", "日", "👋", "a👋🏽"])).encode()
    cut = data.draw(st.integers(0, len(begun)))
    prompt = data.draw(ids(kind, 6)) + byte_ids(kind, begun[:cut]) + data.draw(ids(kind, 1))
    output = data.draw(ids(kind, 1)) + byte_ids(kind, begun[cut:]) + data.draw(ids(kind, 6))
    finished = "".join(streamed(tokenizer, [], prompt, skip)[:-1])
    # One U+FFFD stands for an unfinished character; two for half a surrogate, where the decoder also waits for the next byte.
    assert tokenizer.decode(prompt, skip) in (finished, finished + "\ufffd", finished + "\ufffd\ufffd")
    assert finished + "".join(streamed(tokenizer, prompt, output, skip)) == tokenizer.decode(prompt + output, skip)


@pytest.mark.parametrize("kind", AS_BYTES)
def test_a_character_begun_by_the_prompt_comes_whole(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for character in "é日👋":
        encoded = byte_ids(kind, character.encode())
        for cut in range(1, len(encoded)):
            assert "".join(streamed(tokenizer, encoded[:cut], encoded[cut:])) == character
            pieces = streamed(tokenizer, encoded[:cut], byte_ids(kind, b"!"))
            assert pieces == ["\ufffd!", ""]
    assert streamed(tokenizer, byte_ids(kind, b"\xed\xa0"), byte_ids(kind, b"!")) == ["\ufffd\ufffd!", ""]


@pytest.mark.parametrize("kind", ["byte_level", "marked_bpe"])
def test_the_whole_decode_is_the_librarys_for_valid_text(kind: str) -> None:
    library = {"byte_level": byte_level, "marked_bpe": marked_bpe}[kind]()
    tokenizer = tokenizer_of(kind)
    for text in [*SAMPLES, *random_texts(7, 200)]:
        encoded = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, False) == encoded
        assert tokenizer.decode(encoded, True) == library.decode(encoded)
        assert tokenizer.decode(encoded, False) == library.decode(encoded, skip_special_tokens=False)


def test_invalid_bytes_decode_as_the_library_decodes_them() -> None:
    library, tokenizer = byte_level(), tokenizer_of("byte_level")
    rng = random.Random(11)
    for _ in range(300):
        output = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        assert tokenizer.decode(output, True) == library.decode(output)


@pytest.mark.parametrize("kind", AS_BYTES)
def test_no_piece_holds_half_a_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in ["日本語 👨‍👩‍👧 é", "👋🏽" * 5, "a\U0010ffffb"]:
        pieces = streamed(tokenizer, [], tokenizer.encode(text, False))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_emitted_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("marked_bpe")
    first_byte = 3
    detokenizer = tokenizer.detokenizer([1, 262], True)
    assert [detokenizer.push(first_byte + byte) for byte in "é👋".encode()] == ["", "é", "", "", "", "👋"]
    assert detokenizer.push(first_byte + 0xF0) == ""
    assert detokenizer.flush() == "\ufffd"


def test_the_first_output_token_keeps_its_space_after_a_text_and_loses_it_at_the_start() -> None:
    for kind in ("marked_bpe", "gguf_sentencepiece"):
        tokenizer = tokenizer_of(kind)
        output = tokenizer.encode("a b", False)
        assert "".join(streamed(tokenizer, tokenizer.encode("dot.", True), output)) == " a b"
        assert "".join(streamed(tokenizer, tokenizer.encode("", True), output)) == "a b"


def test_special_tokens_are_skipped_or_spelt_out() -> None:
    tokenizer = tokenizer_of("byte_level")
    output = tokenizer.encode("a<|end|>b  <two words>", False)
    assert tokenizer.decode(output, True) == "ab  <two words>"
    assert tokenizer.decode(output, False) == "a<|end|>b  <two words>"


def test_an_added_token_outside_ascii_is_its_own_text() -> None:
    library = byte_level()
    library.add_tokens(["õ"])
    tokenizer = from_json(library)
    assert tokenizer.decode(tokenizer.encode("xõ", False), True) == "xõ"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=5), max_size=12))
def test_utf8_by_pieces_is_utf8_as_a_whole(pieces: list[bytes]) -> None:
    """The byte path relies on this: the standard library's decoder gives the same result however its input is cut."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    text = "".join(utf8.decode(piece) for piece in pieces) + utf8.decode(b"", final=True)
    assert text == b"".join(pieces).decode("utf-8", "replace")


def test_what_one_stream_has_met_changes_nothing_for_the_next() -> None:
    """Texts are cached by id: neither a special id that another stream showed nor an unfinished character may be cached."""
    spelled = {0: b"a", 1: "é".encode(), 2: b"\xc3", 3: b"\xa9", 4: b"<end>", 5: b" b"}
    pieces = BytePieces(6, spelled.__getitem__, frozenset({4}), strips_first_space=True)
    ids = [5, 4, 0, 2, 3, 1, 2, 0, 5, 3, 4]
    for skip in (False, True, False, True):
        stream = pieces.detokenizer([], skip)
        texts = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        assert "".join(texts) == pieces.decode(ids, skip)
        assert texts[3:5] == ["", "é"]
        assert texts[6:8] == ["", "\ufffda"]
