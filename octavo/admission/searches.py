"""What a beam search and `best_of` take beyond one answer: checked at the door, and the best of several chosen at the end.
Knows nothing of HTTP, of text, or of how a step is planned."""

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
    """What the engine is asked. `room`: the most tokens that an answer can have. best_of without beams is n samples whose
    logprobs are known, of which the caller takes the best."""
    name = "n" if params.best_of is None else "best_of"
    width = params.num_sequences
    if width > report.max_num_seqs:
        raise InvalidRequest(f"{name} must be at most {report.max_num_seqs} (--max-num-seqs), got {width}", param=name)
    if not params.use_beam_search:
        if params.best_of is None:
            return params
        return msgspec.structs.replace(params, n=width, best_of=None, logprobs=params.logprobs or 0)
    if params.num_candidates(num_stop_ids) > report.vocab_size:
        raise InvalidRequest(
            f"{name} = {width} beams need more continuations than the {report.vocab_size} tokens there are", param=name
        )

    def pages(max_tokens: int) -> int:
        shape = (report.page_size, report.windows, report.max_num_batched_tokens)
        return pages_of_beams(prompt_len, prompt_len + max_tokens, width, *shape)

    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = _most(room, lambda wanted: pages(wanted) <= report.num_pages)
    if not max_tokens or pages(max_tokens) > report.num_pages:
        raise InvalidRequest(
            f"{width} beams of {prompt_len} + {max_tokens or 1} tokens can take {pages(max_tokens or 1)} KV pages, there are "
            f"{report.num_pages}: lower {name} or max_tokens",
            param=name,
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens, temperature=0.0)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, by halving; 0: none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class Choice(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    index: int
    logprobs: list[Logprobs]  # of each token


Some = TypeVar("Some", bound=Choice)


def likeliest(choices: Sequence[Some], count: int, first_index: int = 0) -> list[Some]:
    """Those with the highest logprob per token, the best first, as OpenAI's best_of has it, and numbered so. Of equals the
    first."""
    means = [sum(entry.logprobs[0] for entry in choice.logprobs) / max(1, len(choice.logprobs)) for choice in choices]
    best = sorted(range(len(choices)), key=lambda at: -means[at])[:count]
    return [replace(choices[at], index=first_index + place) for place, at in enumerate(best)]
