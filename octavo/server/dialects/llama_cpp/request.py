"""What a request to llama.cpp's routes may say, and the same as fields of a generation and its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from octavo.errors import Field, InvalidRequest, Unsupported, quote, quote_json
from octavo.messages.params import MAX_BIASES
from octavo.server.generate.field_names import FieldNames
from octavo.server.generate.infill import fill_prompt, fill_tokens
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import Prompt, check_size, check_text_len
from octavo.server.schema.fields import (
    MAX_STOPS,
    GenerationFields,
    PlainStreamFields,
    RequestFields,
    make_fields,
)
from octavo.server.schema.lists import AtMost
from octavo.server.schema.shapes import LlamaBias, LlamaFiles, LlamaPrompts, Messages, StructuredOutputs, Tools
from octavo.server.state.service import Service

MAX_PROMPTS = 1024
MAX_BIAS_CHARS = 65536  # of all texts in logit_bias
RANDOM_SEED = -1
ALL_TOKENS = -1  # of repeat_last_n
NEVER = -100.0  # logit_bias false

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "cache_prompt": (True,),
    "dry_allowed_length": (),
    "dry_base": (),
    "dry_multiplier": (0, 0.0),
    "dry_penalty_last_n": (),
    "dry_sequence_breakers": (),
    "dynatemp_exponent": (),
    "dynatemp_range": (0, 0.0),
    "id_slot": (-1,),
    "image_data": ([],),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "n_cache_reuse": (0,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_keep": (0, -1),
    "penalize_nl": (True,),
    "post_sampling_probs": (False,),
    "response_fields": ([],),
    "samplers": (),
    "sse_ping_interval": (),
    "t_max_predict_ms": (0,),
    "t_max_prompt_ms": (0,),
    "tfs_z": (1, 1.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "typ_p": (1, 1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
    "xtc_threshold": (),
}

_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "ignore_eos",
    "grammar",
    "json_schema",
    "structured_outputs",
)
"""Fields that a generation has under the same name."""
NAMES = FieldNames(
    {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl"}
)


class LlamaOptions(RequestFields, PlainStreamFields):
    """null is the same as absent."""

    temperature: float | None = None  # negative: greedy, as 0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, AtMost(MAX_STOPS)] = None
    n_predict: int | None = None  # negative: until the model or the context ends; 0: only the prompt is computed
    max_tokens: int | None = None  # another name of n_predict
    n_cmpl: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    ignore_eos: bool | None = None
    logit_bias: LlamaBias = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs = None  # vLLM's, and what is to become of constraints that cannot be enforced
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer. None: as many as the context holds."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return given if given is not None and given >= 0 else None


class LlamaCompletionRequest(LlamaOptions):
    prompt: LlamaPrompts


class InfillRequest(LlamaOptions):
    input_prefix: str
    input_suffix: str
    input_extra: LlamaFiles = None
    prompt: str | None = None


class TemplateRequest(RequestFields):
    messages: Messages
    tools: Tools = None
    chat_template: Any = None  # a string, where requests may bring templates
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a generation."""

    fields: GenerationFields
    prompts: list[Prompt]
    is_list: bool  # several prompts, or one in a list: the answer is a list
    is_empty: bool = False  # n_predict 0: a token is computed, and not returned


async def parse_completion(service: Service, fields: LlamaCompletionRequest) -> Asked:
    return await offload_prompt(fields.num_bytes, lambda: _parse_completion(service, fields))


async def parse_infill(service: Service, fields: InfillRequest) -> Asked:
    return await offload_prompt(fields.num_bytes, lambda: _parse_infill(service, fields))


def _parse_completion(service: Service, fields: LlamaCompletionRequest) -> Asked:
    given, is_list = _prompts(fields.prompt)
    asked = _generation(service, fields)
    check_size(asked, len(given), service.report, service.config.budget)
    check_text_len(service, fields.num_bytes, fields.prompt, Field("prompt"))
    found = [
        _prompt(service, item, Field("prompt", at) if is_list else Field("prompt")) for at, item in enumerate(given)
    ]
    return Asked(asked, found, is_list or asked.num_sequences > 1, fields.limit == 0)


def _parse_infill(service: Service, fields: InfillRequest) -> Asked:
    files = _files(fields.input_extra)
    tokens = fill_tokens(service.text)
    asked = _generation(service, fields, stop_token_ids=[*tokens.ends])
    check_size(asked, 1, service.report, service.config.budget)
    before, after, typed = fields.input_prefix, fields.input_suffix, fields.prompt or ""
    check_text_len(service, fields.num_bytes, (before, after, typed, files), Field("input_prefix"))
    ids = fill_prompt(service.text, tokens, before + typed, after, service.report.max_model_len, files)
    return Asked(asked, [Prompt(ids, Field("input_prefix"))], asked.num_sequences > 1, fields.limit == 0)


def _generation(service: Service, fields: LlamaOptions, **more: Any) -> GenerationFields:
    _check_ranges(service, fields)
    if fields.repeat_last_n not in (None, 0, ALL_TOKENS):
        fields.pass_over(Field("repeat_last_n"), service.config)
    values: dict[str, Any] = {name: getattr(fields, name) for name in _SAME} | fields.limits | more
    values["stream"], values["n"] = fields.stream, fields.n_cmpl
    values["stop"] = [stop for stop in fields.stop or () if stop]
    values["grammar"] = fields.grammar or None
    values["repetition_penalty"] = None if fields.repeat_last_n == 0 else fields.repeat_penalty
    values["seed"] = None if fields.seed == RANDOM_SEED else fields.seed
    values["max_tokens"] = None if fields.limit is None else max(1, fields.limit)
    if fields.temperature is not None:
        values["temperature"] = max(0.0, fields.temperature)
    if fields.stream and fields.return_progress:
        values["stream_options"] = {"include_progress": True}
    checked = {"logit_bias": _biases(service, fields.logit_bias)} if fields.logit_bias else None
    with NAMES.in_errors():
        asked = make_fields(GenerationFields, values, fields.num_bytes, checked)
        asked.check_search(service.config)
    return asked


def _check_ranges(service: Service, fields: LlamaOptions) -> None:
    most = service.config.budget.max_logprobs
    if fields.n_probs is not None and not 0 <= fields.n_probs <= most:
        raise InvalidRequest(
            Field("n_probs") + f" must be between 0 and {most} (--max-logprobs), got {quote(fields.n_probs)}"
        )
    if None not in (fields.n_predict, fields.max_tokens) and fields.n_predict != fields.max_tokens:
        raise InvalidRequest(
            Field("max_tokens") + " and n_predict are two names of the same limit: give only one of them"
        )


def _biases(service: Service, given: Any) -> dict[int, float]:
    """By token id. A text stands for each of its tokens; false: never."""
    where = Field("logit_bias")
    pairs = [*given.items()] if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest(where + " must be a list of [token, bias] or an object of token: bias")
    if len(pairs) > MAX_BIASES:
        raise InvalidRequest(where + f" has {len(pairs)} entries; at most {MAX_BIASES} are allowed")
    texts = [pair[0] for pair in pairs if isinstance(pair[0], str)]
    if sum(map(len, texts)) > MAX_BIAS_CHARS:
        raise InvalidRequest(where + f" has texts of more than {MAX_BIAS_CHARS} characters in all")
    found: dict[int, float] = {}
    for at, (token, bias) in enumerate(pairs):
        if isinstance(given, dict) and token.isascii() and token.isdecimal() and len(token) < 19:
            token = int(token)
        if bias is False:
            bias = NEVER
        if type(bias) not in (int, float):
            raise InvalidRequest(where / at + f": a bias must be a number or false, got {quote_json(bias)}")
        if type(token) is int:
            found[token] = float(bias)
        elif isinstance(token, str):
            ids = service.text.encode(token, False, param="logit_bias", max_tokens=MAX_BIASES)
            found |= dict.fromkeys(ids, float(bias))
            if len(found) > MAX_BIASES:
                raise InvalidRequest(where + f" has texts of more than {MAX_BIASES} tokens in all")
        else:
            raise InvalidRequest(where / at + f": a token must be an id or a text, got {quote_json(token)}")
    return found


def _prompts(given: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether the answer is a list. A list of ids, or of ids and texts, is one prompt; one of texts alone is
    several, as llama.cpp reads it."""
    if not isinstance(given, list):
        return [given], False
    if not given:
        raise InvalidRequest(Field("prompt") + " is empty: at least one token is needed")
    if any(type(item) is int for item in given):
        return [given], False
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(
            Field("prompt") + f" has {len(given)} entries; at most {MAX_PROMPTS} are allowed in one request"
        )
    return given, len(given) > 1


def _prompt(service: Service, given: Any, where: Field) -> Prompt:
    """A text, ids, or a list of both."""
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise Unsupported(where / "multimodal_data" + " is not supported: images and audio are not")
        given = given.get("prompt_string")
    most = service.report.max_model_len
    if isinstance(given, str):
        return Prompt(service.text.encode(given, param=str(where), max_tokens=most), where, given)
    if not isinstance(given, list) or not all(isinstance(item, str) or type(item) is int for item in given):
        raise InvalidRequest(
            where + ": a prompt must be a text, a list of token ids and texts, or an object with a prompt_string"
        )
    if all(type(item) is int for item in given):
        return Prompt(given, where)
    ids: list[int] = []
    for at, item in enumerate(given):
        ids += [item] if type(item) is int else service.text.encode(item, at == 0, param=str(where), max_tokens=most)
        if len(ids) > most:
            break  # refused on admission
    return Prompt(ids, where)


def _files(given: Sequence[Any] | None) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for at, file in enumerate(given or ()):
        match file:
            case {"text": str(text)}:
                name = file.get("filename")
                if name is not None and not isinstance(name, str):
                    raise InvalidRequest(Field("input_extra", at, "filename") + " must be a string")
                found.append((name or "tmp", text))
            case _:
                raise InvalidRequest(Field("input_extra", at) + ' must be {"filename", "text"}')
    return found
