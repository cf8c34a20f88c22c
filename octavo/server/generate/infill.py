"""Prompts for filling in the middle: a text before a gap and one after it, between tokens that models of code were trained with."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import Unsupported
from octavo.text import Text

# Names of these tokens in the vocabularies of Qwen, CodeGemma, StarCoder, DeepSeek, CodeLlama and Granite.
_PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>")
_SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>")
_MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>")
_PAD = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
_REPO = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_END = ("<|cursor|>", "▁<EOT>", "<EOT>")

REPO_NAME = "myproject"  # as llama.cpp writes it
FILE_NAME = "filename"


@dataclass(frozen=True, slots=True)
class FillTokens:
    prefix: int
    suffix: int
    middle: int
    repo: int | None
    file: int | None
    ends: tuple[int, ...]  # an answer ends before these: it is past the gap


def can_fill(text: Text) -> bool:
    return all(_find(text, names) is not None for names in (_PREFIX, _SUFFIX, _MIDDLE))


def fill_tokens(text: Text, param: str | None = None) -> FillTokens:
    """Raises Unsupported where the vocabulary has none. `param`: the field that asks for it."""
    prefix, suffix, middle = (_find(text, names) for names in (_PREFIX, _SUFFIX, _MIDDLE))
    if prefix is None or suffix is None or middle is None:
        raise Unsupported(
            (f"{param}: " if param else "")
            + "this model cannot fill in the middle: its vocabulary has no tokens for it (such as <|fim_prefix|>). "
            "Serve a model of code that was trained with them",
            param=param,
        )
    repo, file = _find(text, _REPO), _find(text, _FILE)
    ends = (prefix, suffix, middle, repo, file, _find(text, _PAD), _find(text, _END))
    return FillTokens(prefix, suffix, middle, repo, file, tuple(token for token in ends if token is not None))


def fill_prompt(
    text: Text,
    tokens: FillTokens,
    before: str,
    after: str,
    most: int,
    files: Sequence[tuple[str, str]] = (),
    names: tuple[str, str] = ("input_prefix", "input_suffix"),
) -> list[int]:
    """`most`: tokens of the context. `files`: names and texts of others that give context. `names`: of the fields that hold both texts."""

    def encode(words: str, param: str) -> list[int]:
        return text.encode(words, False, param=param, max_tokens=most)

    ids = text.encode("", True)  # what the vocabulary begins a text with
    if tokens.repo is not None and tokens.file is not None:
        if files:
            ids += [tokens.repo, *encode(REPO_NAME + "\n", "input_extra")]
            for name, words in files:
                ids += [tokens.file, *encode(f"{name}\n{words}\n", "input_extra")]
            ids += [tokens.file, *encode(FILE_NAME + "\n", "input_extra")]
    else:
        for name, words in files:
            ids += encode(f"{name}\n{words}\n", "input_extra")
    ids += [tokens.prefix, *encode(before, names[0])]
    ids += [tokens.suffix, *encode(after, names[1])]
    return [*ids, tokens.middle]


def _find(text: Text, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := text.token_id(name)) is not None), None)
