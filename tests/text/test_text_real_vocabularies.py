"""Real vocabularies from the folder named by OCTAVO_TEST_VOCABULARIES: ids equal to each reference's.
`python scripts/fetch_vocabularies.py FOLDER` fills such a folder."""

import base64
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from vocabularies import TORTURE, gguf_of_byte_level, random_texts

from octavo.text import Text, load_text
from octavo.text.tokenize.gguf_vocab import gguf_tokenizer, read_vocabulary
from octavo.text.tokenize.tokenizer import Tokenizer

TEXTS = [*TORTURE, *random_texts(41, 200)]


def fetched(name: str) -> Path:
    folder = os.environ.get("OCTAVO_TEST_VOCABULARIES")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"set OCTAVO_TEST_VOCABULARIES to a folder that holds {name}")
    return Path(folder) / name


def check(tokenizer: Tokenizer, reference: Callable[[str], list[int]]) -> None:
    """Compare the ids of plain text: none of it is a control token."""
    for text in TEXTS:
        ids = tokenizer.encode_chat(tokenizer.lookalikes.hide(text))
        assert ids == reference(text), text
        stream = tokenizer.detokenizer([], False)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, False)


LLAMA_CPP = [
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
]


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_as_llama_cpp(name: str) -> None:
    path = fetched(f"llama.cpp/ggml-vocab-{name}.gguf")
    text = load_text(path)
    inputs = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    outputs = Path(f"{path}.out").read_text().split("\n")
    assert len(inputs) > 40
    for given, ids in zip(inputs, outputs, strict=False):
        if name == "qwen35" and unicodedata.normalize("NFC", given) != given:
            continue  # the model's own tokenizer composes characters; llama.cpp leaves the text as it is
        assert text.encode(given, add_special_tokens=False) == [int(number) for number in ids.split()], given


PRE = {
    "deepseek-coder-33b-base": "deepseek-coder",
    "deepseek-llm-7b-base": "deepseek-llm",
    "deepseek-v3": "deepseek-v3",
    "qwen3": "qwen2",
    "qwen-3.5": "qwen35",
    "glm-4": "chatglm-bpe",
    "glm-4.7-flash": "glm4",
    "minimax": "minimax-m2",
    "gptoss": "gpt-4o",
    "mistral_nemo": "tekken",
    "llama3_1": "llama-bpe",
    "gemma3": None,
    "jiutian-139moe-chat": None,
}


@pytest.mark.parametrize("name", PRE)
def test_a_tokenizer_json_and_the_gguf_vocabulary_made_of_it(name: str) -> None:
    folder = fetched(name)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text, pre = load_text(folder), PRE[name]
    gguf = gguf_tokenizer(read_vocabulary(gguf_of_byte_level(library, pre))) if pre else None
    for words in TEXTS:
        ids = library.encode(words, add_special_tokens=False).ids
        assert text.encode(words, add_special_tokens=False) == ids
        assert text.decode(ids) == library.decode(ids)
        stream = text._tokenizer.detokenizer([], False)
        assert "".join(map(stream.push, ids)) + stream.flush() == text.decode(ids, skip_special_tokens=False)
        if gguf is not None:
            assert gguf.encode(words, False) == ids


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "mistral_nemo", "jiutian-139moe-chat"])
def test_no_control_token_comes_of_what_people_write(name: str) -> None:
    text = load_text(fetched(name))
    added = text._tokenizer._tokenizer.get_added_tokens_decoder()  # type: ignore[attr-defined]
    control = {i: token.content for i, token in added.items() if token.special or token.content.startswith("<｜")}
    words = "".join(control.values()) + " ".join(control.values())
    ids = text._tokenizer.encode_chat(text._tokenizer.lookalikes.hide(words))
    assert not control.keys() & set(ids)
    assert control.keys() <= set(text.encode(words))


def test_qwens_first_vocabulary_as_tiktoken() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    path = fetched("qwen/qwen.tiktoken")
    pairs = [line.split() for line in path.read_bytes().splitlines() if line]
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    reference = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    text = load_text(path)
    assert (text.vocab_size, text.eos_ids) == (151851, (151643, 151645))
    check(text._tokenizer, lambda words: list(reference.encode_ordinary(unicodedata.normalize("NFC", words))))


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken_as_mistral_common(name: str) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    path = fetched(f"mistral/{name}")
    reference = tekken.Tekkenizer.from_file(path)
    text = load_text(path)
    assert text.vocab_size == reference.n_words
    check(text._tokenizer, lambda words: list(reference.encode(words, bos=False, eos=False)))
    assert text.encode("hi") == list(reference.encode("hi", bos=True, eos=False))


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece_as_the_package(name: str) -> None:
    path = fetched(f"mistral/{name}")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    text: Text = load_text(path)
    check(text._tokenizer, lambda words: list(reference.encode(words)))
