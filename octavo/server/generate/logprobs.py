"""Logprobs as clients read them: OpenAI's two shapes, and vLLM's for prompts."""

from collections.abc import Iterable, Sequence

import msgspec

from octavo.messages import Logprobs
from octavo.server.generate.offload import one_of
from octavo.text import Text


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


def chat_logprobs(text: Text, entries: Sequence[Logprobs]) -> ChatLogprobs:
    def shown(token_id: int, logprob: float) -> TopLogprob:
        spelled = text.spell(token_id)
        return TopLogprob(_words(spelled), logprob, list(spelled))

    content, size = [], count_logprobs(entries)
    for entry in entries:
        own, *top = map(shown, entry.token_ids, entry.logprobs)
        content.append(one_of(size, TokenLogprob(own.token, own.logprob, own.bytes, top)))
    return ChatLogprobs(content)


def completion_logprobs(
    text: Text, token_ids: Sequence[int], entries: Sequence[Logprobs | None], offset: int
) -> CompletionLogprobs:
    """`offset`: characters before the first token."""
    shown, size = CompletionLogprobs([], [], [], []), count_logprobs(entries)
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = _words(text.spell(token_id))
        shown.text_offset.append(offset)
        shown.tokens.append(token)
        offset += len(token)
        if entry is None:
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for other, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            top.setdefault(_words(text.spell(other)), logprob)  # parts of characters may be spelled alike
        shown.token_logprobs.append(entry.logprobs[0])
        shown.top_logprobs.append(one_of(size, top))
    return shown


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


def _words(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")
