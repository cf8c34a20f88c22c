"""Validation: turns token ids and sampling parameters into a GenerateRequest that is valid by construction, or raises an error
that names the numbers. The server and the offline API use the same functions."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import msgspec

from octavo import fresh
from octavo.admission.searches import resolve_search
from octavo.config import BudgetConfig
from octavo.errors import ContextTooLong, Field, InvalidRequest, Sentence, Unsupported, quote
from octavo.messages import EngineReport, GenerateRequest, Pooling, PoolingParams, SamplingParams
from octavo.text.pooling_config import PoolingConfig

PROMPT, CHOICES, MAX_TOKENS = Field("prompt"), Field("n"), Field("max_tokens")


def admit(
    request_id: str,
    prompt_ids: list[int],
    params: SamplingParams,
    report: EngineReport,
    eos_ids: Sequence[int],
    *,
    field: Field = PROMPT,
    max_tokens_field: Field = MAX_TOKENS,
    arrived: float = 0.0,
    priority: int = 0,
) -> GenerateRequest:
    """Validate a generation request. `field` and `max_tokens_field` are the caller's fields in errors. best_of is resolved to n
    samples, from which the caller takes the likeliest."""
    if not report.can_generate:
        raise Unsupported("this model is an encoder: it computes embeddings and does not generate text", param=field)
    check_prompt(prompt_ids, report, field)
    room = report.max_model_len - len(prompt_ids)
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextTooLong(
            f"the context holds {report.max_model_len} tokens: the prompt has {len(prompt_ids)}, so "
            + max_tokens_field
            + f" can be at most {room}, got {quote(params.max_tokens)}"
        )
    check_priority(priority, report)
    if params.min_tokens > (params.max_tokens or room):
        raise InvalidRequest(Field("min_tokens") + f" must be at most {room} here, got {quote(params.min_tokens)}")
    if params.stop_token_ids:
        check_ids(params.stop_token_ids, report, Field("stop_token_ids"))
    if params.logprob_token_ids:
        check_ids(params.logprob_token_ids, report, Field("logprob_token_ids"))
    if params.allowed_token_ids:
        check_ids(params.allowed_token_ids, report, Field("allowed_token_ids"))
    for token in params.logit_bias or ():
        if not 0 <= token < report.vocab_size:
            raise InvalidRequest(
                f"logit_bias has the token id {token}; token ids go from 0 to {report.vocab_size - 1}",
                param=f"logit_bias.{token}",
            )
    assert len(params.bad_word_ids) >= len(params.bad_words), "the caller tokenizes bad_words"
    assert params.grammar or not params.structured_outputs, "the caller makes the grammar"
    # An answer ends where its grammar ends, even with ignore_eos.
    ignores_eos = params.ignore_eos and not params.grammar
    stop_ids = [*params.stop_token_ids] if ignores_eos else [*eos_ids, *params.stop_token_ids]
    stop_ids = list(dict.fromkeys(stop_ids))
    if params.use_beam_search or params.best_of is not None:
        params = resolve_search(params, len(prompt_ids), room, len(stop_ids), report)
    resolved = msgspec.structs.replace(
        params,
        max_tokens=params.max_tokens or room,
        seed=fresh.random_seed() if params.seed is None else params.seed,
        structured_outputs=None,  # only the grammar made from it is sent to the engine
    )
    return GenerateRequest(request_id, prompt_ids, resolved, stop_ids, arrived=arrived, priority=priority)


def check_priority(priority: int, report: EngineReport) -> None:
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise InvalidRequest(f"priority must be a 64-bit integer, got {quote(priority)}", param="priority")
    if priority and report.scheduling_policy != "priority":
        raise InvalidRequest(
            f"priority must be 0 here, got {quote(priority)}: this server runs with --scheduling-policy {report.scheduling_policy}",
            param="priority",
        )


def choose_pooling(
    pooling_config: PoolingConfig,
    report: EngineReport,
    kind: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> PoolingParams:
    """Resolve the pooling: the request's choice, else the model's own configuration, else an encoder's mean or a decoder's last
    token."""
    if kind is None and pooling_config.unsupported:
        raise Unsupported(
            f"this model's embeddings need {pooling_config.unsupported}, which is not supported: set pooling to one of "
            f"{', '.join(get_args(Pooling))} to get its hidden states",
            param="pooling",
        )
    if kind is not None and kind not in get_args(Pooling):
        raise InvalidRequest(
            f"pooling must be one of {', '.join(get_args(Pooling))}, got {quote(kind)}", param="pooling"
        )
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= report.hidden_size):
        raise InvalidRequest(
            f"dimensions must be a whole number from 1 to {report.hidden_size}, got {quote(dimensions)}",
            param="dimensions",
        )
    otherwise: Pooling = pooling_config.kind or ("last" if report.can_generate else "mean")
    return PoolingParams(
        otherwise if kind is None else cast(Pooling, kind),
        pooling_config.normalize if normalize is None else normalize,
        dimensions or 0,
    )


def longest_embedding(pooling: PoolingParams, pooling_config: PoolingConfig, report: EngineReport) -> int:
    """Number of tokens of the longest prompt that can be embedded."""
    limits = [report.max_model_len, pooling_config.max_len or report.max_model_len]
    if _needs_one_step(pooling, report):
        limits.append(report.max_num_batched_tokens)
    return min(limits)


def admit_embedding(
    request_id: str,
    prompt_ids: list[int],
    pooling: PoolingParams,
    pooling_config: PoolingConfig,
    report: EngineReport,
    *,
    field: Field = PROMPT,
    arrived: float = 0.0,
    priority: int = 0,
) -> GenerateRequest:
    check_priority(priority, report)
    if not prompt_ids:
        raise InvalidRequest(field + " is empty: at least one token is needed")
    longest = longest_embedding(pooling, pooling_config, report)
    if len(prompt_ids) > longest:
        others = min(report.max_model_len, pooling_config.max_len or report.max_model_len)
        hint = "; raise --max-num-batched-tokens, or use pooling last" if longest < others else ""
        raise ContextTooLong(field + f" has {len(prompt_ids)} tokens; at most {longest} can be embedded{hint}")
    check_ids(prompt_ids, report, field)
    params = SamplingParams(max_tokens=1, seed=0)
    needs_one_step = _needs_one_step(pooling, report)
    return GenerateRequest(
        request_id,
        prompt_ids,
        params,
        [],
        arrived=arrived,
        pooling=pooling,
        needs_one_step=needs_one_step,
        priority=priority,
    )


def cut_to(truncate: int | None, longest: int) -> int | None:
    """Number of tokens to which a prompt is truncated; None: not at all. `truncate`: the caller's value; -1: the longest
    possible."""
    if truncate is None:
        return None
    if type(truncate) is not int or (truncate != -1 and not 1 <= truncate <= longest):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or a whole number from 1 to {longest}, got {quote(truncate)}",
            param="truncate_prompt_tokens",
        )
    return longest if truncate == -1 else truncate


def _needs_one_step(pooling: PoolingParams, report: EngineReport) -> bool:
    """Whether the whole prompt must be computed in one step, nothing of it from the prefix cache."""
    return not report.can_generate or pooling.kind != "last"


def check_prompt(prompt_ids: list[int], report: EngineReport, field: Field) -> None:
    if not prompt_ids:
        raise InvalidRequest(field + " is empty: at least one token is needed")
    if len(prompt_ids) >= report.max_model_len:
        raise ContextTooLong(
            field + f" has {len(prompt_ids)} tokens; the context holds {report.max_model_len}, including the answer"
        )
    check_ids(prompt_ids, report, field)


def _are_natural(ids: Sequence[int]) -> bool:
    """Whether none is negative. False also for ids that do not fit into 32 bits. Takes a third of the time of min()."""
    try:
        array("I", ids)
    except OverflowError:
        return False
    return True


def check_ids(ids: Sequence[int], report: EngineReport, field: Field) -> None:
    if ids and not (_are_natural(ids) and max(ids) < report.vocab_size):
        at = next(i for i, token in enumerate(ids) if not 0 <= token < report.vocab_size)
        raise InvalidRequest(field / at + f" is {quote(ids[at])}; token ids go from 0 to {report.vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The sequences of one HTTP request, its prompts times its choices, and their tokens. Fields are those of the caller, for errors.
    What needs no token ids can be checked before prompts are tokenized."""

    num_prompts: int
    num_choices: int  # sequences of each prompt: n, or best_of
    num_prompt_tokens: int = 0  # of all prompts; 0: not known yet
    num_output_tokens: int = 0  # the sum of every prompt's max_tokens
    max_tokens: int = 0  # the largest of them
    prompt_field: Field = PROMPT
    choices_field: Field = CHOICES
    max_tokens_field: Field = MAX_TOKENS

    def check(self, budget: BudgetConfig) -> None:
        """Raises InvalidRequest."""
        entries = f"{self.num_prompts} entries" if self.num_prompts > 1 else ""
        choices = [self.choices_field + f" is {self.num_choices}"] if self.num_choices > 1 else []
        num_sequences = self.num_prompts * self.num_choices
        if num_sequences > budget.max_request_sequences:
            prompts = [self.prompt_field + f" has {entries}"] if entries else []
            raise InvalidRequest(
                _listed([*prompts, *choices])
                + f", which makes {num_sequences} sequences; one request may have at most "
                f"{budget.max_request_sequences} (--max-request-sequences)"
            )
        num_tokens = self.num_choices * (self.num_prompt_tokens + self.num_output_tokens)
        if budget.max_request_tokens and num_tokens > budget.max_request_tokens:
            known = f"{self.num_prompt_tokens} tokens" if self.num_prompt_tokens else ""
            prompt = " in ".join(part for part in (known, entries) if part)
            prompts = [self.prompt_field + f" has {prompt}"] if prompt else []
            outputs = [self.max_tokens_field + f" is {self.max_tokens}"] if self.max_tokens else []
            raise InvalidRequest(
                _listed([*prompts, *choices, *outputs])
                + f", which may take {num_tokens} tokens in all; one request may take "
                f"at most {budget.max_request_tokens} (--max-request-tokens)"
            )


def _listed(clauses: Sequence[Sentence]) -> Sentence:
    """`a, b and c`."""
    listed = clauses[0]
    for number, clause in enumerate(clauses[1:], 2):
        listed = listed + (" and " if number == len(clauses) else ", ") + clause
    return listed
