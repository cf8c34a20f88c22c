"""What a request to /v1/completions may say, and its prompts as token ids."""

import functools

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.server.generate.infill import fill_prompt, fill_tokens
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import Prompt, check_size, check_text_len, cut_prompt
from octavo.server.schema.fields import GenerationFields
from octavo.server.schema.shapes import Prompts
from octavo.server.schema.unsupported import NOT_OFFERED as NOT_OFFERED_ANYWHERE
from octavo.server.state.service import Service

MAX_PROMPTS = 1024

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **NOT_OFFERED_ANYWHERE,
    "add_special_tokens": (True,),
}


class CompletionRequest(GenerationFields):
    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None  # 0 asks for the chosen token's alone
    suffix: str | None = None  # what follows the gap that the answer is to fill


async def parse(service: Service, fields: CompletionRequest) -> tuple[CompletionRequest, list[Prompt]]:
    """The prompts, and the fields with what filling in the middle adds to them."""
    return await offload_prompt(fields.num_bytes, functools.partial(_parse, service, fields))


def _parse(service: Service, fields: CompletionRequest) -> tuple[CompletionRequest, list[Prompt]]:
    given = fields.prompt
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        prompts = {"prompt": given}
    elif not isinstance(given, list):
        raise _wrong_prompt("prompt")
    elif not given:
        raise InvalidRequest("prompt is empty: at least one token is needed", param="prompt")
    elif len(given) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt has {len(given)} entries; at most {MAX_PROMPTS} are allowed in one request", param="prompt"
        )
    else:
        prompts = {f"prompt[{at}]": item for at, item in enumerate(given)}
    check_size(fields, len(prompts), service.report, service.config.budget)
    for param, item in prompts.items():
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise _wrong_prompt(param)
    if fields.suffix:
        return _fill(service, fields, fields.suffix)
    check_text_len(service, fields.num_bytes, given, Field("prompt"))
    words, report = service.text.encode, service.report
    limit = report.max_model_len if fields.truncate_prompt_tokens is None else None
    found = []
    for param, item in prompts.items():
        ids = words(item, param=param, max_tokens=limit) if isinstance(item, str) else item
        kept = cut_prompt(ids, fields, report)
        found.append(Prompt(kept, Field(param), item if isinstance(item, str) and len(kept) == len(ids) else None))
    return fields, found


def _fill(service: Service, fields: CompletionRequest, suffix: str) -> tuple[CompletionRequest, list[Prompt]]:
    """Only one prompt: each further one would tokenize the suffix again."""
    tokens = fill_tokens(service.text, "suffix")
    prompt = fields.prompt[0] if isinstance(fields.prompt, list) and len(fields.prompt) == 1 else fields.prompt
    if not isinstance(prompt, str):
        raise InvalidRequest("with suffix, prompt must be one string", param="prompt")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(fields, name):
            raise Unsupported(f"{name} cannot be combined with suffix: leave one of them out", param=name)
    check_text_len(service, fields.num_bytes, (prompt, suffix), Field("prompt"))
    most, ends = service.report.max_model_len, [*(fields.stop_token_ids or []), *tokens.ends]
    ids = fill_prompt(service.text, tokens, prompt, suffix, most, names=("prompt", "suffix"))
    return fields.model_copy(update={"stop_token_ids": ends}), [Prompt(ids, Field("prompt"))]


def _wrong_prompt(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: a prompt must be a string or a list of token ids; several prompts must be a list of these",
        param=param,
    )
