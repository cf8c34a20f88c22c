"""Ranked vocabularies, as tiktoken has them: joined by rank, special tokens in their places, and the messages for broken files.
The reference joins by hand, as tiktoken does. Real files are in test_text_real_vocabularies.py."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers
from vocabularies import CORPUS, TORTURE, random_texts

from octavo.errors import ConfigError
from octavo.text import Text, load_text
from octavo.text.tokenize.tokenizer import byte_level_name

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"


def ranked() -> list[bytes]:
    """Byte strings by rank: every byte, then those joined by a training run."""
    trained = Library(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [*CORPUS, "aaaa aaa aa aaaaaaaa abab ababab" * 3]
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=460, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {byte_level_name(bytes([byte])): byte for byte in range(256)}
    names = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    joined = [bytes(byte_of[character] for character in name) for name, _ in names if len(name) > 1]
    # Files also rank whole words that no joins produce.
    return [bytes([byte]) for byte in range(256)] + joined + ["déjà".encode(), b" zyx"]


RANKED = ranked()


def join(word: bytes) -> list[int]:
    """Join the neighbours whose union is the token of the lowest rank, leftmost first, until none is left."""
    rank_of = {token: rank for rank, token in enumerate(RANKED)}
    if word in rank_of:
        return [rank_of[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        ranks = [(rank_of.get(parts[at] + parts[at + 1], len(RANKED)), at) for at in range(len(parts) - 1)]
        rank, at = min(ranks, default=(len(RANKED), 0))
        if rank == len(RANKED):
            return [rank_of[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def expected(pattern: str, text: str) -> list[int]:
    return [token_id for word in regex.findall(pattern, text) for token_id in join(word.encode())]


def qwen(folder: Path) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(RANKED)]
    path = folder / "qwen.tiktoken"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def tekken(folder: Path, num_special: int = 30, **changes: Any) -> Path:
    content = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(RANKED) + 1,
            "default_vocab_size": len(RANKED) + num_special,
            "default_num_special_tokens": num_special,
            "version": "v3",
        },
        # One entry more than num_vocab_tokens: entries beyond that are ignored.
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*RANKED, b"aaaaaaaaaaaaaa"])
        ],
        **changes,
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps(content))
    return path


# The reference is quadratic: long runs are shortened for it.
TEXTS = [text[:300] for text in TORTURE] + CORPUS[:5] + ["déjà zyx", "aaaaaaaaaaaaaaaaa ababababab"]


def plain(text: Text, words: str) -> list[int]:
    return text.encode_chat([{"role": "user", "content": words}])


def with_template(folder: Path) -> Text:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return load_text(folder)


def runs(seed: int) -> list[str]:
    print(f"seed {seed}")
    rng = random.Random(seed)
    return ["".join(rng.choices(rng.choice(["a", "ab", "ab ", "éa"]), k=rng.randrange(1, 60))) for _ in range(200)]


def test_qwen_joins_by_rank(tmp_path: Path) -> None:
    import unicodedata

    qwen(tmp_path)
    text = with_template(tmp_path)
    for words in [*TEXTS, *random_texts(19, 100), *runs(23)]:
        composed = unicodedata.normalize("NFC", words)
        assert plain(text, words) == expected(PATTERN, composed), words
        assert text.decode(plain(text, words)) == composed


def test_qwens_special_tokens_follow_the_ranks(tmp_path: Path) -> None:
    path, size = qwen(tmp_path), len(RANKED)
    for text in (load_text(tmp_path), load_text(path)):
        assert (text.vocab_size, text.eos_ids) == (size + 208, (size, size + 2))
        assert text.encode("<|im_start|>a<|endoftext|><|extra_204|>") == [size + 1, ord("a"), size, size + 207]
        assert text.decode([size + 1, ord("a"), size]) == "a"


def test_tekken_joins_by_rank_after_its_special_tokens(tmp_path: Path) -> None:
    tekken(tmp_path)
    text = with_template(tmp_path)
    assert (text.vocab_size, text.eos_ids) == (len(RANKED) + 30, (2,))
    for words in [*TEXTS, *random_texts(29, 100), *runs(31)]:
        assert plain(text, words) == [30 + rank for rank in expected(TEKKEN_PATTERN, words)], words
        assert text.decode(plain(text, words)) == words
    a = 30 + ord("a")
    assert text.encode("[INST]a[/INST]</s><SPECIAL_29>") == [1, 3, a, 4, 2, 29]


def test_a_newer_tekken_names_its_special_tokens(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[THINK]", "[/THINK]"]
    named = [{"rank": i, "token_str": name, "is_control": i < 3} for i, name in enumerate(names)]
    text = load_text(tekken(tmp_path, num_special=8, special_tokens=named))
    ids = text.encode("[THINK]a", add_special_tokens=False)
    assert ids == [3, 8 + ord("a")]
    assert text.decode([1, *ids, 7]) == "[THINK]a"
    assert text.decode([7], skip_special_tokens=False) == "<SPECIAL_7>"


def test_streams_are_the_whole_decode(tmp_path: Path) -> None:
    text = load_text(tekken(tmp_path))
    rng = random.Random(37)
    for _ in range(300):
        ids = [rng.randrange(text.vocab_size + 3) for _ in range(rng.randrange(20))]
        stream = text._tokenizer.detokenizer([], True)
        assert "".join(map(stream.push, ids)) + stream.flush() == text.decode(ids)


def broken_tekken(folder: Path, **config: Any) -> Path:
    content = json.loads(tekken(folder).read_text())
    return tekken(folder, config={**content["config"], **config})


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: (folder / "tekken.json").write_text("{"), "cannot be read as a tekken"),
        (lambda folder: (folder / "tekken.json").write_text('{"vocab": []}'), "no 'config'"),
        (lambda folder: broken_tekken(folder, pattern="(("), "cannot be read as a tekken"),
        (lambda folder: broken_tekken(folder, default_vocab_size=9999), "announces 9969 tokens"),
        (lambda folder: broken_tekken(folder, default_num_special_tokens="many"), "cannot be read as a tekken"),
        (lambda folder: tekken(folder, vocab=[{"token_bytes": "?"}]), "cannot be read as a tekken"),
        (lambda folder: tekken(folder, special_tokens=[{"token_str": "a"}]), "gives 'a' two ids"),
        (lambda folder: tekken(folder, special_tokens=[{"token_str": "<s>"}] * 2), "damaged"),
        (lambda folder: tekken(folder, special_tokens=[{"token_str": "\ud800"}]), "cannot be read as a tekken"),
        (lambda folder: tekken(folder, num_special=10**9), "announces 1000000000 special tokens"),
        (lambda folder: (folder / "qwen.tiktoken").write_text("YQ== 0\nnothing\n"), "line 2"),
        (lambda folder: (folder / "qwen.tiktoken").write_text("YQ== 0\nYg== 2\n"), "ranks"),
        (lambda folder: (folder / "qwen.tiktoken").write_text(""), "cut short"),
        (lambda folder: (folder / "qwen.tiktoken").write_text("YQ== 0\nYg== 1\n"), "lacks the byte 0x00"),
        (
            lambda folder: (folder / "tokenizer.model").write_text("YQ== 0\nYg== 1\n"),
            "tiktoken.*does not contain its pre-tokenizer",
        ),
    ],
)
def test_a_broken_file_says_so_in_one_line(write: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=words) as raised:
        load_text(tmp_path)
    assert "\n" not in raised.value.message
    assert str(tmp_path) in raised.value.message
