"""How well texts fit together: pairs of texts → the engine's requests → scores. Shared by /score and /rerank.

A cross-encoder, which is a sequence classifier with one label, reads both texts at once. Any other model embeds each text, and the score is
the cosine of the two vectors."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.responses import Response

from octavo.admission.pairs import PairPrompts, Texts, check_sides, dot, score_pooling
from octavo.admission.validate import RequestSize, admit_embedding, cut_to, longest_embedding
from octavo.errors import Field, InvalidRequest, quote
from octavo.messages import GenerateRequest, numbers_of
from octavo.server.generate.embeddings import MAX_INPUTS, vectors
from octavo.server.generate.offload import offload, offload_prompt
from octavo.server.generate.requests import check_text_len, new_id
from octavo.server.schema.fields import LimitFields, RequestFields
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    "cache_salt": (),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "request_id": (),
    "truncation_side": ("right",),
}


class PoolingUsage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


T = TypeVar("T")


class PoolingAnswer(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """vLLM's list of what a model makes of its hidden states."""

    id: str
    created: int
    model: str
    data: list[T]
    usage: PoolingUsage
    object: Literal["list"] = "list"


def pooling_answer(
    service: Service,
    kind: type[PoolingAnswer[T]],
    response_id: str,
    data: list[T],
    num_tokens: int,
    ignored: Sequence[str],
) -> Response:
    usage = PoolingUsage(num_tokens, num_tokens)
    return json_response(kind(response_id, int(time.time()), service.answering_name, data, usage), ignored)


class ScoringFields(RequestFields, LimitFields):
    """What /score and /rerank share."""

    truncate_prompt_tokens: int | None = None  # vLLM's: of a pair; -1: to the model's limit
    max_tokens_per_query: int | None = None  # vLLM's, as the next: tokens of the first text that are kept; 0: all
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None  # vLLM's: a cross-encoder's activation; None: yes
    priority: int | None = None
    # A label for the caller's own use: accepted, without effect.
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """The requests of one HTTP request's pairs."""

    response_id: str
    requests: list[GenerateRequest]
    num_firsts: int  # of a model that embeds: the first so many requests are of the first texts; 0: a request is a pair

    @property
    def num_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    async def scores(self, service: Service) -> list[float]:
        """One for each pair. The requests must have been submitted."""
        found = await vectors(service, self.requests)
        return await offload(sum(map(len, found)) // 4, lambda: self._scores(found))

    def _scores(self, found: list[bytes]) -> list[float]:
        if not self.num_firsts:
            return [numbers_of(vector)[0] for vector in found]
        firsts, seconds = found[: self.num_firsts], found[self.num_firsts :]
        if len(firsts) == 1:
            query = numbers_of(firsts[0])
            return [dot(query, numbers_of(vector)) for vector in seconds]
        return [dot(numbers_of(a), numbers_of(b)) for a, b in zip(firsts, seconds, strict=True)]


def read_texts(given: Any, name: str, *, takes_objects: bool = False) -> Texts:
    """A string or a list of strings; `takes_objects`: or of objects with a text."""
    if isinstance(given, str):
        return Texts([given], [name])
    if not isinstance(given, list):
        raise _wrong_text(name, takes_objects)
    if not given:
        raise InvalidRequest(f"{name} is empty: at least one text is needed", param=name)
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(
            f"{name} has {len(given)} entries; at most {MAX_INPUTS} are allowed in one request", param=name
        )
    texts: list[str] = []
    for at, item in enumerate(given):
        if takes_objects and isinstance(item, dict) and item.keys() == {"text"}:
            item = item["text"]
        if not isinstance(item, str):
            raise _wrong_text(f"{name}[{at}]", takes_objects)
        texts.append(item)
    return Texts(texts, [f"{name}[{at}]" for at in range(len(texts))])


def _wrong_text(param: str, takes_objects: bool) -> InvalidRequest:
    objects = ' or {"text": …}' if takes_objects else ""
    return InvalidRequest(
        f"{param} must be a string{objects}, or a list of these; only text can be scored", param=param
    )


async def parse_pairs(
    service: Service, fields: ScoringFields, firsts: Texts, seconds: Texts, arrived: float, kind: str
) -> Scoring:
    """`firsts`: one text, which is paired with each of the others, or as many. `kind`: what the answer's id begins with."""
    return await offload_prompt(fields.num_bytes, lambda: _parse(service, fields, firsts, seconds, arrived, kind))


def _parse(
    service: Service, fields: ScoringFields, firsts: Texts, seconds: Texts, arrived: float, kind: str
) -> Scoring:
    report, pooling_config = service.report, service.text.pooling_config
    check_sides(firsts, seconds)
    pooling = score_pooling(service.text, report, fields.use_activation)
    longest = longest_embedding(pooling, pooling_config, report)
    cut = cut_to(fields.truncate_prompt_tokens, longest)
    limits = tuple(_per_text(fields, name, longest) for name in ("max_tokens_per_query", "max_tokens_per_doc"))
    is_pair = pooling.kind == "classify"
    num_requests = len(seconds.texts) + (0 if is_pair else len(firsts.texts))
    RequestSize(num_requests, 1, prompt_field=seconds.field).check(service.config.budget)
    check_text_len(service, fields.num_bytes, [*firsts.texts, *seconds.texts], seconds.field)
    response_id, prompts = new_id(kind), PairPrompts(service.text, pooling, longest, cut)
    if is_pair:
        made = prompts.pairs(firsts, seconds, *limits)
    else:
        made = [*prompts.alone(firsts, limits[0]), *prompts.alone(seconds, limits[1])]
    num_tokens = sum(len(ids) for _, ids, _ in made)
    RequestSize(num_requests, 1, num_tokens, prompt_field=seconds.field).check(service.config.budget)
    times, requests = fields.times(arrived), []
    for part, (param, ids, how) in enumerate(made):
        request = admit_embedding(
            f"{response_id}-{part}",
            ids,
            how,
            pooling_config,
            report,
            field=Field(param),
            arrived=arrived,
            priority=fields.priority or 0,
        )
        requests.append(msgspec.structs.replace(request, response_id=response_id, part=part, **times))
    return Scoring(response_id, requests, 0 if is_pair else len(firsts.texts))


def _per_text(fields: ScoringFields, name: str, longest: int) -> int:
    value = getattr(fields, name) or 0
    if not 0 <= value < longest:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {longest - 1}, got {quote(value)}", param=name)
    return int(value)
