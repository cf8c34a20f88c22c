"""Builds GenerateRequests from fields and prompt ids, checked by octavo/admission."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.admission.validate import MAX_TOKENS, admit
from octavo.errors import Field, InvalidRequest
from octavo.messages import EngineReport, GenerateRequest, SamplingParams
from octavo.server.schema.fields import GenerationFields
from octavo.text import Text


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    field: Field  # the field it came in, for errors: prompt, prompt[3], messages
    text: str | None = None  # None: it came as token ids, or as a chat


MAX_COMPLETION_TOKENS = Field("max_completion_tokens")
LONG_TEXT = 20_000
"""Characters: longer texts are encoded in a thread, so that other streams of this process do not wait."""


def new_id(prefix: str) -> str:
    """A new unique id. Not the client's request id: two clients may choose the same."""
    return f"{prefix}-{os.urandom(16).hex()}"


def build_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    fields: GenerationFields,
    *,
    report: EngineReport,
    text: Text,
    logprobs: int | None,
    default_max_tokens: int | None,
    arrived: float,
    **more: Any,
) -> list[GenerateRequest]:
    """One request per prompt. `default_max_tokens` None: all that fits. `more`: sampling parameters that the dialect decides."""
    values = sampling_values(fields, report, text.default_sampling)
    values |= {"logprobs": logprobs, **more}
    if fields.bad_words:
        values["bad_word_ids"] = text.bad_word_ids(SamplingParams(bad_words=fields.bad_words).bad_words)
    by_other_name = fields.max_tokens is None and fields.max_completion_tokens is not None
    limit = MAX_COMPLETION_TOKENS if by_other_name else MAX_TOKENS
    wanted = fields.max_completion_tokens if by_other_name else fields.max_tokens
    if wanted is not None and wanted < 1:
        raise InvalidRequest(limit + f" must be at least 1, got {wanted}")
    wishes = _wishes(fields, arrived)
    requests = []
    for number, prompt in enumerate(prompts):
        max_tokens = wanted
        if wanted is None and default_max_tokens is not None:
            # A default, unlike a wish, shrinks to the room that the prompt leaves.
            max_tokens = max(1, min(default_max_tokens, report.max_model_len - len(prompt.ids)))
        request = admit(
            f"{response_id}-{number}" if len(prompts) > 1 else response_id,
            prompt.ids,
            SamplingParams(**{**values, "max_tokens": max_tokens}),
            report,
            text.eos_ids,
            field=prompt.field,
            max_tokens_field=limit,
            arrived=arrived,
            priority=fields.priority or 0,
        )
        requests.append(msgspec.structs.replace(request, **wishes) if wishes else request)
    return requests


def _wishes(fields: GenerationFields, arrived: float) -> dict[str, Any]:
    """Rarely used fields of a GenerateRequest."""
    return {**({"wants_progress": True} if fields.wants_progress else {}), **fields.times(arrived)}


_BY_ENDPOINT = {"max_tokens", "logprobs", "bad_word_ids", "structured_outputs", "grammar"}
_BY_FIELDS = [name for name in SamplingParams.__struct_fields__ if name not in _BY_ENDPOINT]


def cut_prompt(ids: list[int], fields: GenerationFields, report: EngineReport) -> list[int]:
    """Truncate the prompt at its beginning: generation continues its end."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return ids
    longest = max(1, report.max_model_len - (fields.max_tokens or fields.max_completion_tokens or 1))
    if keep != -1 and not 1 <= keep < report.max_model_len:
        raise InvalidRequest(
            Field("truncate_prompt_tokens")
            + f" must be -1 (all that fits) or from 1 to {report.max_model_len - 1}, got {keep}"
        )
    return ids[-(longest if keep == -1 else keep) :]


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
