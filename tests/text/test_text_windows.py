"""A long text is encoded in windows: the ids are those of the whole, and no call of the library gets much of it."""

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from octavo.errors import ContextTooLong, InvalidRequest
from octavo.text.tokenize import pretokenizers, windows
from octavo.text.tokenize.tokenizer import LibraryTokenizer, has_prepend, rest_encoder
from octavo.text.tokenize.windows import encode_in_windows
from tests.doubles import byte_text
from tests.text.vocabularies import CORPUS, TORTURE

WINDOW, OVERLAP, MAX_WORD = 2048, 512, 8192
PIECES = [
    *CORPUS[:5],
    *(text for text in TORTURE if len(text) < 600),
    "7" * 40,
    " " * 30,
    "x" * 50,
    ". ",
    "\n\n",
    "国家",
]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("WINDOW", WINDOW), ("OVERLAP", OVERLAP), ("MAX_WORD", MAX_WORD)):
        monkeypatch.setattr(windows, name, size)


def trained(cut: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = cut
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt2() -> tokenizers.Tokenizer:
    return trained(pretokenizers.pre_tokenizer(pretokenizers.words_named("gpt-2")))


def llama2() -> tokenizers.Tokenizer:
    """Tokens with a space mark in front only, no pre-tokenizer, and a normalizer that puts a mark before every text."""
    tokenizer = tokenizers.Tokenizer(trained(pre_tokenizers.Metaspace()).model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<|end|>"])
    return tokenizer


def texts(seed: int, num: int) -> list[str]:
    print(f"seed {seed}")
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        parts: list[str] = []
        while sum(map(len, parts)) < 5 * WINDOW:
            parts.append(rng.choice(PIECES) * rng.choice([1, 1, 1, 2, 4]))
        found.append("".join(parts))
    return found


def encoder(tokenizer: tokenizers.Tokenizer, sizes: list[int] | None = None) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        if sizes is not None:
            sizes.append(len(text))
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


@pytest.mark.parametrize("words", pretokenizers._ALL, ids=lambda words: words.names[0])
def test_the_ids_are_those_of_the_whole(words: pretokenizers.Words) -> None:
    tokenizer = trained(pretokenizers.pre_tokenizer(words), pretokenizers.normalizer(words))
    whole = encoder(tokenizer)
    for text in texts(1, 3):
        sizes: list[int] = []
        encode = encoder(tokenizer, sizes)
        assert encode_in_windows(encode, encode, text) == whole(text)
        assert len(sizes) > 4 and max(sizes) <= MAX_WORD + OVERLAP


def test_a_space_before_every_text_is_only_at_the_beginning() -> None:
    tokenizer = llama2()
    assert has_prepend(tokenizer) and not has_prepend(gpt2())
    assert tokenizer.encode("a").tokens == ["▁a"]
    for text in texts(2, 3):
        sizes: list[int] = []
        encode = encoder(tokenizer, sizes)
        assert encode_in_windows(encode, rest_encoder(encode), text) == encoder(tokenizer)(text)
        assert len(sizes) > 4 and max(sizes) <= MAX_WORD + OVERLAP


def test_a_cut_that_changes_tokens_is_not_used() -> None:
    """A tokenizer whose tokens cross every boundary: the text is encoded as a whole, not wrongly."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={"a": 0, " ": 1, "a ": 2, "a a": 3}, merges=[("a", " "), ("a ", "a")])
    )
    text = "a " * (4 * MAX_WORD)
    sizes: list[int] = []
    encode = encoder(tokenizer, sizes)
    assert encode_in_windows(encode, encode, text) == encoder(tokenizer)(text)
    assert len(text) in sizes


@pytest.mark.parametrize("character", ["7", "a", " ", "\n", "=", "国", "🌳", "\u0301"])
def test_a_word_without_end_is_refused(character: str) -> None:
    tokenizer = gpt2()
    encode = encoder(tokenizer)
    with pytest.raises(InvalidRequest, match="more than 8192 characters without a boundary"):
        encode_in_windows(encode, encode, "a b " * 3000 + character * 2 * MAX_WORD)
    text = "a b " * 3000 + character * (MAX_WORD // 2) + " a b" * 3000
    assert encode_in_windows(encode, encode, text) == encode(text)


def test_it_stops_when_there_are_too_many() -> None:
    encode = encoder(gpt2())
    sizes: list[int] = []
    counted = encoder(gpt2(), sizes)
    text = "one two three " * 5000
    ids = encode_in_windows(counted, counted, text, max_ids=100)
    assert 100 < len(ids) < 3000 and encode(text)[: len(ids)] == ids
    assert sum(sizes) < 3 * (WINDOW + OVERLAP)


def test_special_tokens_stay_around_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.tokenize.tokenizer.WINDOW", WINDOW)
    base = gpt2()
    base.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", base.token_to_id("<|end|>"))]
    )
    tokenizer = LibraryTokenizer(base, base.get_vocab_size(), None)
    text = "one two three " * 1000
    end = base.token_to_id("<|end|>")
    inner = tokenizer.encode(text, False)
    assert inner == base.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, True) == [end, *inner, end] == base.encode(text).ids


def test_a_long_text_that_does_not_fit_is_refused_by_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("octavo.text.tokenize.tokenizer", "octavo.text.text"):
        monkeypatch.setattr(f"{module}.WINDOW", WINDOW)
    text = byte_text()
    with pytest.raises(ContextTooLong, match=r"^prompt\[2\]: .*more than 1000 tokens") as refusal:
        text.encode("a b " * 1000, param="prompt[2]", max_tokens=1000)
    assert refusal.value.param == "prompt[2]"
    with pytest.raises(ContextTooLong, match=r"^messages: ") as refusal:
        text.encode_chat([{"role": "user", "content": "a b " * 1000}], max_tokens=1000)
    assert refusal.value.param == "messages"
    with pytest.raises(InvalidRequest, match=r"^prompt: .*without a boundary") as wrong:
        text.encode("a" * 20_000)
    assert wrong.value.param == "prompt"
