"""Builds GenerateRequests from fields and prompt ids, checked by octavo/admission; and checks what a request asks for, as far as that
is known before its prompts are tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo import fresh
from octavo.admission.validate import MAX_TOKENS, PROMPT, RequestSize, admit
from octavo.config import BudgetConfig
from octavo.errors import ContextTooLong, Field, InvalidRequest, quote
from octavo.messages import EngineReport, GenerateRequest, SamplingParams
from octavo.observe.journeys.journey import current
from octavo.server.generate.retention import hold_of, salt_of
from octavo.server.schema.fields import GenerationFields
from octavo.server.state.service import Service
from octavo.text import Text


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    field: Field  # the field it came in, for errors: prompt, prompt[3], messages
    text: str | None = None  # None: it came as token ids, or as a chat


MAX_COMPLETION_TOKENS = Field("max_completion_tokens")
MAX_LABEL_LEN = 256  # characters of a user that tell it from others
MAX_REPEATED_BYTES = 8 * 2**20
"""Of sampling parameters, times the prompts of a request: each prompt's request carries them to the engine."""


def new_id(prefix: str) -> str:
    """A new unique id. Not the client's request id: two clients may choose the same."""
    return f"{prefix}-{fresh.random_bytes(16).hex()}"


def _engine_id(response_id: str) -> str:
    """The id of a response's request in the engine, which may still have the request of an API process that has just ended."""
    source = fresh.current.get()
    return response_id if source is None or not source.attempt else f"{response_id}~{source.attempt}"


def build_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    fields: GenerationFields,
    *,
    report: EngineReport,
    budget: BudgetConfig,
    text: Text,
    logprobs: int | None,
    default_max_tokens: int | None,
    arrived: float,
    **more: Any,
) -> list[GenerateRequest]:
    """One request per prompt. `default_max_tokens` None: all that fits. `more`: sampling parameters that the dialect decides."""
    check_beams(fields, report)
    values = sampling_values(fields, report, text.default_sampling)
    values |= {"logprobs": logprobs, **more}
    if fields.cache_salt:
        values["prefix_salt"] = salt_of(fields.cache_salt)
    if fields.bad_words:
        values["bad_word_ids"] = text.bad_word_ids(SamplingParams(bad_words=fields.bad_words).bad_words)
    limit, wanted = _wanted_tokens(fields)
    if wanted is not None and wanted < 1:
        raise InvalidRequest(limit + f" must be at least 1, got {quote(wanted)}")
    all_max_tokens: list[int | None] = [wanted] * len(prompts)
    if wanted is None and default_max_tokens is not None:
        # A default, unlike a wish, shrinks to the room that the prompt leaves.
        rooms = (report.max_model_len - len(prompt.ids) for prompt in prompts)
        all_max_tokens = [max(1, min(default_max_tokens, room)) for room in rooms]
    _size_of(prompts, all_max_tokens, fields, report).check(budget)
    label_tenant(fields.user)
    params_by_limit: dict[int | None, SamplingParams] = {}
    wishes = _wishes(fields, arrived, budget)
    engine_id = _engine_id(response_id)
    if len(prompts) > 1 or engine_id != response_id:
        wishes["response_id"] = response_id
    requests = []
    for number, (prompt, max_tokens) in enumerate(zip(prompts, all_max_tokens, strict=True)):
        if max_tokens not in params_by_limit:
            params_by_limit[max_tokens] = SamplingParams(**{**values, "max_tokens": max_tokens})
            if len(prompts) > 1 and len(params_by_limit) == 1:
                _check_repeated(params_by_limit[max_tokens], len(prompts))
        request = admit(
            f"{engine_id}-{number}" if len(prompts) > 1 else engine_id,
            prompt.ids,
            params_by_limit[max_tokens],
            report,
            text.eos_ids,
            field=prompt.field,
            max_tokens_field=limit,
            arrived=arrived,
            priority=fields.priority or 0,
        )
        requests.append(msgspec.structs.replace(request, part=number, **wishes) if wishes else request)
    return requests


def label_tenant(user: str | None) -> None:
    """Note the user that a request names, for --fairness user."""
    if user and (journey := current.get()) is not None:
        journey.user = user[:MAX_LABEL_LEN]


def _check_repeated(params: SamplingParams, num_prompts: int) -> None:
    size = len(msgspec.msgpack.encode(params)) * num_prompts
    if size > MAX_REPEATED_BYTES:
        raise InvalidRequest(
            f"the sampling parameters of {num_prompts} prompts take {size} bytes together; at most {MAX_REPEATED_BYTES} are "
            "allowed: send fewer prompts, or shorter lists and grammars",
            param="prompt",
        )


def check_size(fields: GenerationFields, num_prompts: int, report: EngineReport, budget: BudgetConfig) -> None:
    """Check what a request asks for as far as it is known before its prompts are tokenized. Raises InvalidRequest."""
    limit, wanted = _wanted_tokens(fields)
    max_tokens = min(max(0, wanted or 0), report.max_model_len)
    RequestSize(
        num_prompts,
        fields.num_sequences,
        num_output_tokens=num_prompts * max_tokens,
        max_tokens=max_tokens,
        choices_field=fields.choices_field,
        max_tokens_field=limit,
    ).check(budget)


def check_text_len(service: Service, num_bytes: int, text: object, field: Field) -> None:
    """Raise ContextTooLong if the strings in `text` are together longer than one request's may be. `num_bytes`: at least as many
    as there can be characters in it."""
    most = service.max_text_len
    if num_bytes > most and (found := _count_characters(text)) > most:
        raise ContextTooLong(
            field + f" has {found} characters of text; at most {most} are tokenized for one request (--max-text-len)"
        )


def _count_characters(value: object) -> int:
    """Characters of all strings in a JSON value, names of members included."""
    total, left = 0, [value]
    while left:
        match left.pop():
            case str(text):
                total += len(text)
            case Mapping() as members:
                left += members.keys()
                left += members.values()
            case list() | tuple() as entries:
                left += entries
    return total


def _size_of(
    prompts: Sequence[Prompt], all_max_tokens: list[int | None], fields: GenerationFields, report: EngineReport
) -> RequestSize:
    lens = [len(prompt.ids) for prompt in prompts]
    # A prompt or a max_tokens that does not fit the context has an error of its own.
    rooms = [max(0, report.max_model_len - length) for length in lens]
    outputs = [room if most is None else min(most, room) for most, room in zip(all_max_tokens, rooms, strict=True)]
    field = prompts[0].field
    return RequestSize(
        len(prompts),
        fields.num_sequences,
        sum(lens),
        sum(outputs),
        max(outputs),
        field if len(prompts) == 1 else PROMPT,
        fields.choices_field,
        _wanted_tokens(fields)[0],
    )


def _wanted_tokens(fields: GenerationFields) -> tuple[Field, int | None]:
    """The field that limits the answer, and its value."""
    if fields.max_tokens is None and fields.max_completion_tokens is not None:
        return MAX_COMPLETION_TOKENS, fields.max_completion_tokens
    return MAX_TOKENS, fields.max_tokens


def check_beams(fields: GenerationFields, report: EngineReport) -> None:
    """A beam search holds its rows until it ends: it gets half of them at most, so that other requests run beside it."""
    most = max(1, report.max_num_seqs // 2)
    if fields.use_beam_search and fields.num_sequences > most:
        raise InvalidRequest(
            fields.choices_field
            + f" must be at most {most} for a beam search, half of the rows (--max-num-seqs {report.max_num_seqs}), "
            f"got {fields.num_sequences}"
        )


def _wishes(fields: GenerationFields, arrived: float, budget: BudgetConfig) -> dict[str, Any]:
    """Rarely used fields of a GenerateRequest."""
    wishes: dict[str, Any] = fields.times(arrived)
    if fields.wants_progress:
        wishes["wants_progress"] = True
    retention = fields.retention
    if retention is not None or fields.prompt_cache_key:
        wishes |= hold_of(fields.prompt_cache_key, retention, budget.max_prefix_retention)
    return wishes


_BY_ENDPOINT = {
    "max_tokens",
    "logprobs",
    "bad_word_ids",
    "prediction_ids",
    "structured_outputs",
    "grammar",
    "adapter",
    "prefix_salt",
}
_BY_FIELDS = [name for name in SamplingParams.__struct_fields__ if name not in _BY_ENDPOINT]


def cut_prompt(ids: list[int], fields: GenerationFields, report: EngineReport) -> list[int]:
    """Truncate the prompt: at its beginning, since generation continues its end, unless the request says otherwise."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return ids
    longest = max(1, report.max_model_len - (fields.max_tokens or fields.max_completion_tokens or 1))
    if keep != -1 and not 1 <= keep < report.max_model_len:
        raise InvalidRequest(
            Field("truncate_prompt_tokens")
            + f" must be -1 (all that fits) or from 1 to {report.max_model_len - 1}, got {quote(keep)}"
        )
    most = longest if keep == -1 else keep
    return ids[:most] if fields.truncation_side == "right" else ids[-most:]


def sampling_values(fields: GenerationFields, report: EngineReport, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The request's sampling parameters over the model's defaults, without max_tokens, which depends on the prompt."""
    given = {name: value for name in _BY_FIELDS if (value := getattr(fields, name)) is not None}
    if fields.repetition_detection is not None:
        given["repetition_detection"] = fields.repetition_detection.params()
    if fields.use_beam_search:  # the model's defaults are about sampling
        defaults = {}
    values = {**defaults, **given}
    # Beyond the vocabulary means no limit; an unbounded integer would not fit the message format.
    values["top_k"] = min(values.get("top_k", 0), report.vocab_size)
    return values
