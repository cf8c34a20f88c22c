"""What /v1/completions answers with."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.generate.generation import PromptProgress, Usage
from octavo.server.generate.logprobs import CompletionLogprobs, PromptLogprob


class Choice(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: CompletionLogprobs | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType | None = (
        UNSET  # vLLM's; null where not requested
    )
    schema_valid: bool | UnsetType | None = (
        UNSET  # ours: structured_outputs.unenforced is "check"; null: not decided in time
    )


class Completion(msgspec.Struct, frozen=True, gc=False):
    """Whole answers and the chunks of a stream have one shape."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
