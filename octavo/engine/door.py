"""The door: turns token ids and sampling wishes into a GenerateRequest that is valid by construction, or refuses with the numbers.
Knows nothing of HTTP or text; servers and the offline API pass through the same door."""

import secrets
from collections.abc import Sequence

import msgspec

from octavo.errors import ContextTooLong, InvalidRequest
from octavo.messages import EngineReport, GenerateRequest, SamplingParams


def admit(
    request_id: str,
    prompt_ids: list[int],
    params: SamplingParams,
    report: EngineReport,
    eos_ids: Sequence[int],
    *,
    param: str = "prompt",
    max_tokens_param: str = "max_tokens",
    arrived: float = 0.0,
) -> GenerateRequest:
    """`param` and `max_tokens_param` name the caller's fields in messages."""
    check_prompt(prompt_ids, report, param)
    room = report.max_model_len - len(prompt_ids)
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextTooLong(
            f"the context holds {report.max_model_len} tokens: the prompt has {len(prompt_ids)}, "
            f"so {max_tokens_param} can be at most {room}, got {params.max_tokens}",
            param=max_tokens_param,
        )
    if params.n > report.max_num_seqs:
        raise InvalidRequest(f"n must be at most {report.max_num_seqs} (--max-num-seqs), got {params.n}", param="n")
    if params.min_tokens > (params.max_tokens or room):
        raise InvalidRequest(f"min_tokens must be at most {room} here, got {params.min_tokens}", param="min_tokens")
    check_ids(params.stop_token_ids, report, "stop_token_ids")
    stop_ids = [*params.stop_token_ids] if params.ignore_eos else [*eos_ids, *params.stop_token_ids]
    resolved = msgspec.structs.replace(
        params,
        max_tokens=params.max_tokens or room,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
    )
    return GenerateRequest(request_id, prompt_ids, resolved, list(dict.fromkeys(stop_ids)), arrived=arrived)


def check_prompt(prompt_ids: list[int], report: EngineReport, param: str) -> None:
    if not prompt_ids:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt_ids) >= report.max_model_len:
        raise ContextTooLong(
            f"{param} has {len(prompt_ids)} tokens; the context holds {report.max_model_len}, the answer included",
            param=param,
        )
    check_ids(prompt_ids, report, param)


def check_ids(ids: Sequence[int], report: EngineReport, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < report.vocab_size):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < report.vocab_size)
        raise InvalidRequest(f"{param}[{at}] is {ids[at]}; token ids go from 0 to {report.vocab_size - 1}", param=param)
