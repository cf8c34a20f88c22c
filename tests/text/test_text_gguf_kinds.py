"""GGUF vocabularies of every kind: words split as each name says, WordPiece as in BERT's own tokenizer, and other settings of a
file. Real vocabularies are in test_text_real_vocabularies.py."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from vocabularies import CORPUS, TORTURE, byte_level, gguf_of_byte_level, marked_bpe, random_texts

from octavo.text.tokenize import pretokenizers
from octavo.text.tokenize.gguf_vocab import gguf_tokenizer, read_vocabulary
from octavo.text.tokenize.tokenizer import Tokenizer


def words(pre: str, text: str) -> list[str]:
    cutter = pretokenizers.pre_tokenizer(pretokenizers.words_named(pre))
    return [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("falcon", "a`b 12345", ["a", "`", "b", " ", "123", "45"]),
        ("command-r", "a12 b", ["a", "1", "2", " b"]),
        ("dbrx", "1234 I'LL", ["123", "4", " I", "'LL"]),
        ("glm4", "x\n\n y", ["x", "\n\n", " y"]),
        ("jais-2", "a" + " " * 12 + "b", ["a", " " * 8, " " * 2, " ", " b"]),
        ("minicpm5", "a12345", ["a", "123", "45"]),
        ("laguna", "!\n\n?", ["!", "\n\n", "?"]),
        ("qwen2", "!\n\n?", ["!\n\n", "?"]),
        ("ufakzeka", "it's", ["it", "'s"]),
        ("qwen35", "हिन्दी 1", ["हिन्दी", " ", "1"]),
        ("seed-coder", "!\n12", ["!", "\n", "1", "2"]),
        ("bailingmoe", "a\n \n b", ["a", "\n \n", " b"]),
        ("exaone-moe", "한국 말 12", ["한국 말", " ", "1", "2"]),
        ("deepseek-llm", "ab 日本\n12", ["ab", " ", "日本", "\n", "1", "2"]),
        ("deepseek-coder", "x.y 日", ["x", ".", "y", " ", "日"]),
        ("deepseek-v3", "日本x.y 1234", ["日本", "x", ".y", " ", "123", "4"]),
        ("spark2_5", "!\n\n1234", ["!", "\n", "\n", "1", "2", "3", "4"]),
        ("afmoe", "1234567 한국.x", ["1", "234", "567", " ", "한국", ".x"]),
        ("tiny_aya", "1234567 aB", ["1", "234", "567", " a", "B"]),
        ("tiny_aya", "12345x 123456 ½1234", ["123", "45", "x", " ", "123", "456", " ", "½", "1", "234"]),
        ("superbpe", "by the way 1234567", ["by the way ", "1", "234", "567"]),
        ("superbpe", "½1234 12½345 12", ["½1", "234", " ", "12½", "345", " ", "12"]),
        ("tekken", "camelCase 12/", ["camel", "Case", " ", "1", "2", "/"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("youtu", "한국어，x 12", ["한국어", "，", "x", " ", "1", "2"]),
        ("kimi-k2", "中文abc中'S", ["中文", "abc", "中", "'S"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("chameleon", "IMGIMGABZ x  y", ["IMGIMGABZ", " x", "  ", "y"]),
    ],
)
def test_each_name_cuts_its_way(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


def test_long_runs_take_time_in_proportion() -> None:
    """Without a clock: a quadratic algorithm would not finish within the test's time limit (10^10 steps at this length)."""
    for pre in (
        "default",
        "qwen2",
        "deepseek-llm",
        "jais-2",
        "exaone-moe",
        "chameleon",
        "llama-bpe",
        "gpt-4o",
        "bloom",
        "afmoe",
        "tiny_aya",
        "superbpe",
    ):
        for run in (" " * 100_000 + "x", "\n" * 100_000, "a" * 100_000, "7" * 100_000, "\u0301" * 100_000):
            assert "".join(words(pre, run)) == run


def bert_vocabulary() -> dict[str, int]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]
    letters = sorted({letter for text in CORPUS for letter in text.lower() if not letter.isspace()})
    tokens += [
        *letters,
        *(f"##{letter}" for letter in letters),
        "the",
        "quick",
        "##uick",
        "##ck",
        "##s",
        "naive",
        "cafe",
    ]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def bert(lowercase: bool) -> tokenizers.Tokenizer:
    """Make a tokenizer as BERT's own tokenizer.json does."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(bert_vocabulary(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def gguf_of_bert(**more: Any) -> dict[str, Any]:
    """Metadata as converters write it: ▁ before a word's start, no ## before its continuations."""
    names = list(bert_vocabulary())
    control = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    plain = [name if name in control else name[2:] if name.startswith("##") else f"▁{name}" for name in names]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": plain,
        "tokenizer.ggml.token_type": [3 if name in control else 1 for name in names],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize("options", [{}, {"normalizer.lowercase": False}])
def test_word_piece_is_berts(options: dict[str, bool]) -> None:
    library = bert(lowercase=not options)
    tokenizer = gguf_tokenizer(read_vocabulary(gguf_of_bert(**options)))
    for text in [*TORTURE, *CORPUS, *random_texts(17, 300), "a" * 101, "Naïve CAFÉ [MASK] the [CLS]quicks"]:
        assert tokenizer.encode(text, True) == library.encode(text).ids, text
        assert tokenizer.encode(text, False) == library.encode(text, add_special_tokens=False).ids
    ids = library.encode("the quicks naive", add_special_tokens=False).ids
    assert tokenizer.decode([2, *ids, 3], True) == library.decode(ids) == "the quicks naive"
    stream = tokenizer.detokenizer([], True)
    assert "".join(map(stream.push, ids)) + stream.flush() == "the quicks naive"


def test_what_goes_around_word_pieces() -> None:
    def around(metadata: dict[str, Any]) -> list[int]:
        return gguf_tokenizer(read_vocabulary(metadata)).encode("", True)

    assert around(gguf_of_bert()) == [2, 3]
    assert around(gguf_of_bert(bos_token_id=4)) == [4, 3]
    assert around(gguf_of_bert(add_sep_token=False)) == [2]
    assert around(gguf_of_bert(add_bos_token=False)) == [3]
    unnamed = {key: value for key, value in gguf_of_bert().items() if "cls" not in key and "sep" not in key}
    assert around(unnamed) == [2, 3]


@pytest.mark.parametrize(
    "changes", [{"model": "gemma4"}, {"model": "gpt2", "pre": "gemma4"}, {"model": "gpt2", "pre": "sarvam-moe"}]
)
def test_merges_over_raw_characters(changes: dict[str, str]) -> None:
    """Spaces are ▁, characters in no token become bytes, and nothing is put before the first word."""
    library = marked_bpe()
    library.normalizer = normalizers.Replace(" ", "▁")
    tokens = [library.id_to_token(i) for i in range(library.get_vocab_size())]
    metadata = {
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "merges": ["▁ ▁"],
        "bos_token_id": 1,
        "unknown_token_id": 0,
        **changes,
    }
    tokenizer = gguf_tokenizer(read_vocabulary({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}))
    for text in ["a  b", " b日é", "\U0001f44b \n\n x", "", "</s>a"]:
        assert tokenizer.encode(text, False) == library.encode(text).ids
        assert tokenizer.encode(text, True) == [1, *library.encode(text).ids]
        assert tokenizer.decode(tokenizer.encode(text, False), False) == text


def test_a_vocabulary_that_takes_words_whole_needs_no_merge_for_them() -> None:
    """A token that no merge produces: vocabularies whose models take whole words use it, others do not."""
    library = byte_level()
    metadata = gguf_of_byte_level(library, "llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zyx")
    metadata["tokenizer.ggml.token_type"].append(1)
    new = len(metadata["tokenizer.ggml.tokens"]) - 1

    def encode(pre: str) -> list[int]:
        tokenizer: Tokenizer = gguf_tokenizer(read_vocabulary({**metadata, "tokenizer.ggml.pre": pre}))
        return tokenizer.encode("zyx", False)

    assert encode("llama-bpe") == encode("glm4") == encode("gpt-4o") == [new]
    assert new not in encode("gpt-2")
