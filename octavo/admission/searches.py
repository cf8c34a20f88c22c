"""Beam search and `best_of`: checks at admission that beams fit, and chooses the best sequences at the end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from octavo.cache.span import pages_of_beams
from octavo.errors import InvalidRequest
from octavo.messages import EngineReport, Logprobs, SamplingParams


def resolve_search(
    params: SamplingParams, prompt_len: int, room: int, num_stop_ids: int, report: EngineReport
) -> SamplingParams:
    """Return the parameters to send to the engine. `room`: the most tokens that an answer can have. best_of without beams becomes
    n samples with logprobs, from which the caller takes the best (`likeliest`)."""
    name = "n" if params.best_of is None else "best_of"
    width = params.num_sequences
    if not params.use_beam_search:
        if params.best_of is None:
            return params
        return msgspec.structs.replace(params, n=width, best_of=None, logprobs=params.logprobs or 0)
    if width > report.max_num_seqs:
        raise InvalidRequest(
            f"{name} must be at most {report.max_num_seqs} for a beam search, whose beams run together (--max-num-seqs), got {width}",
            param=name,
        )
    if params.num_candidates(num_stop_ids) > report.vocab_size:
        raise InvalidRequest(
            f"{name} = {width} beams need more candidates than the vocabulary has tokens ({report.vocab_size})",
            param=name,
        )

    def pages(max_tokens: int) -> int:
        shape = (report.page_size, report.windows, report.max_num_batched_tokens)
        return pages_of_beams(prompt_len, prompt_len + max_tokens, width, *shape)

    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = _most(room, lambda wanted: pages(wanted) <= report.num_pages)
    if not max_tokens or pages(max_tokens) > report.num_pages:
        raise InvalidRequest(
            f"{width} beams of {prompt_len} + {max_tokens or 1} tokens can take {pages(max_tokens or 1)} KV pages, but there "
            f"are only {report.num_pages}: lower {name} or max_tokens",
            param=name,
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens, temperature=0.0)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Find the largest number up to `limit` that fits, by bisection. 0: none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class ScoredChoice(Protocol):
    """A dataclass with the fields that `likeliest` reads."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    index: int
    logprobs: list[Logprobs]  # one entry per token


T = TypeVar("T", bound=ScoredChoice)


def likeliest(choices: Sequence[T], count: int, first_index: int = 0) -> list[T]:
    """Return the `count` choices with the highest mean logprob per token, best first, renumbered, as OpenAI's best_of does. Ties
    keep their order."""
    means = [sum(entry.logprobs[0] for entry in choice.logprobs) / max(1, len(choice.logprobs)) for choice in choices]
    best = sorted(range(len(choices)), key=lambda at: -means[at])[:count]
    return [replace(choices[at], index=first_index + place) for place, at in enumerate(best)]
