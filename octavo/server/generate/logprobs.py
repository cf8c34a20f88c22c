"""Logprobs as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

import codecs
from collections.abc import Iterable, Sequence

import msgspec

from octavo.messages import Logprobs
from octavo.server.generate.offload import one_of
from octavo.text import Text

_Decoder = codecs.getincrementaldecoder("utf-8")


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]  # of the token itself, even if it is part of a character


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, gc=False):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Lists of one length, an entry for each token. The first token of a prompt has no logprob."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    logprob: float
    rank: int
    decoded_token: str


def count_logprobs(entries: Iterable[Logprobs | None]) -> int:
    """Number of logprobs in these entries, the top ones included."""
    return sum(len(entry.token_ids) for entry in entries if entry is not None)


def chat_logprobs(text: Text, entries: Sequence[Logprobs], as_ids: bool = False) -> ChatLogprobs:
    """`as_ids`: tokens are named by their ids, which are unambiguous; `bytes` are those of the text all the same."""

    def shown(token_id: int, logprob: float) -> TopLogprob:
        spelled = text.spell(token_id)
        return TopLogprob(_id_name(token_id) if as_ids else _words(spelled), logprob, list(spelled))

    content, size = [], count_logprobs(entries)
    for entry in entries:
        own, *top = map(shown, entry.token_ids, entry.logprobs)
        content.append(one_of(size, TokenLogprob(own.token, own.logprob, own.bytes, top)))
    return ChatLogprobs(content)


def completion_logprobs(
    text: Text,
    token_ids: Sequence[int],
    entries: Sequence[Logprobs | None],
    offsets: Sequence[int],
    as_ids: bool = False,
) -> CompletionLogprobs:
    """`offsets`: where each token begins in the text of the choice. `as_ids`: tokens are named by their ids."""
    name = _id_name if as_ids else lambda token_id: _words(text.spell(token_id))
    shown, size = CompletionLogprobs([*offsets], [], [], []), count_logprobs(entries)
    for token_id, entry in zip(token_ids, entries, strict=True):
        shown.tokens.append(name(token_id))
        if entry is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for other, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            top.setdefault(name(other), logprob)  # parts of characters may be spelled alike
        shown.token_logprobs.append(entry.logprobs[0])
        shown.top_logprobs.append(one_of(size, top))
    return shown


class TextOffsets:
    """Where the tokens of one choice begin in its text, an echoed prompt included. Tokens that are parts of one character have its place."""

    def __init__(self, text: Text, skip_special_tokens: bool) -> None:
        self._text, self._skips = text, skip_special_tokens
        self._end = 0  # characters so far
        self._decoder = _Decoder("replace")

    def of_prompt(self, token_ids: Sequence[int], shown: str) -> list[int]:
        """`shown`: the prompt's text, which may lack the control tokens that tokenizing added, and the space before a first word."""
        found = []
        for token_id in token_ids:
            found.append(self._end)
            spelled = self._text.spell(token_id)
            if token_id in self._text.special_ids and not shown.startswith(_words(spelled), self._end):
                continue
            if not self._end and spelled.startswith(b" ") and not shown.startswith(" "):
                spelled = spelled[1:]
            self._end += len(self._decoder.decode(spelled))
        return found

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        found = []
        for token_id in token_ids:
            found.append(self._end)
            if not (self._skips and token_id in self._text.special_ids):
                self._end += len(self._decoder.decode(self._text.spell(token_id)))
        return found


def prompt_logprobs(text: Text, entries: Sequence[Logprobs]) -> list[dict[str, PromptLogprob] | None]:
    """By token id, for every prompt token; the first has none."""
    shown: list[dict[str, PromptLogprob] | None] = [None]
    size = count_logprobs(entries)
    for entry in entries:
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        by_id: dict[str, PromptLogprob] = {}
        for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            by_id.setdefault(str(token_id), PromptLogprob(logprob, rank, _words(text.spell(token_id))))
        shown.append(one_of(size, by_id))
    return shown


def _id_name(token_id: int) -> str:
    """As vLLM writes it."""
    return f"token_id:{token_id}"


def _words(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")
