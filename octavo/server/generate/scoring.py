"""How well texts fit together: pairs of texts → the engine's requests → scores. Shared by /score and /rerank.

A cross-encoder, which is a sequence classifier with one label, reads both texts at once. Any other model embeds each text, and the score is
the cosine of the two vectors."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.admission.validate import RequestSize, admit_embedding, choose_pooling, cut_to, longest_embedding
from octavo.errors import ContextTooLong, Field, InvalidRequest, Unsupported, quote
from octavo.messages import EngineReport, GenerateRequest, PoolingParams, numbers_of
from octavo.server.generate.embeddings import MAX_INPUTS, vectors
from octavo.server.generate.offload import offload, offload_prompt
from octavo.server.generate.requests import check_text_len, new_id
from octavo.server.schema.fields import LimitFields, RequestFields
from octavo.server.state.service import Service
from octavo.text import Text

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
class Texts:
    """One side of the pairs, and where it came from."""

    texts: Sequence[str]
    names: Sequence[str]  # field of each text, for errors

    @property
    def field(self) -> Field:
        return Field(self.names[0].partition("[")[0])


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
            return [_dot(query, numbers_of(vector)) for vector in seconds]
        return [_dot(numbers_of(a), numbers_of(b)) for a, b in zip(firsts, seconds, strict=True)]


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
    if len(firsts.texts) not in (1, len(seconds.texts)):
        raise InvalidRequest(
            f"{firsts.field} has {len(firsts.texts)} texts and {seconds.field} {len(seconds.texts)}: there must be one of the first "
            "for all of the second, or as many of both",
            param=str(firsts.field),
        )
    pooling = _pooling(service, fields)
    longest = longest_embedding(pooling, pooling_config, report)
    cut = cut_to(fields.truncate_prompt_tokens, longest)
    limits = tuple(_per_text(fields, name, longest) for name in ("max_tokens_per_query", "max_tokens_per_doc"))
    is_pair = pooling.kind == "classify"
    num_requests = len(seconds.texts) + (0 if is_pair else len(firsts.texts))
    RequestSize(num_requests, 1, prompt_field=seconds.field).check(service.config.budget)
    check_text_len(service, fields.num_bytes, [*firsts.texts, *seconds.texts], seconds.field)
    response_id, prompts = new_id(kind), _Prompts(service.text, pooling, longest, cut)
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


def _pooling(service: Service, fields: ScoringFields) -> PoolingParams:
    num_labels, text = service.report.num_labels, service.text
    if num_labels > 1:
        raise Unsupported(
            f"this model is a classifier with {num_labels} labels: scores are of models with one label, and of embedding models; "
            "POST /classify gives its labels"
        )
    if num_labels:
        return classification(text, service.report, fields.use_activation)
    return choose_pooling(text.pooling_config, service.report, normalize=True)


def classification(text: Text, report: EngineReport, use_activation: bool | None) -> PoolingParams:
    """Pooling by the model's classification head. Raises Unsupported if it has none."""
    if not report.num_labels:
        raise Unsupported(
            "this model has no classification head: serve a sequence classifier, or use POST /v1/embeddings"
        )
    activation = "none" if use_activation is False else text.classifier_config.activation_for(report.num_labels)
    return PoolingParams("classify", normalize=False, activation=activation)


def _per_text(fields: ScoringFields, name: str, longest: int) -> int:
    value = getattr(fields, name) or 0
    if not 0 <= value < longest:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {longest - 1}, got {quote(value)}", param=name)
    return int(value)


@dataclass(frozen=True, slots=True)
class _Prompts:
    text: Text
    pooling: PoolingParams
    longest: int
    cut: int | None

    def pairs(
        self, firsts: Texts, seconds: Texts, most_first: int, most_second: int
    ) -> list[tuple[str, list[int], PoolingParams]]:
        """(field, ids, pooling) of each pair of texts."""
        _ = self.text.pair_form  # raises before anything is encoded
        heads = [self._part(text, name, most_first) for text, name in zip(firsts.texts, firsts.names, strict=True)]
        found = []
        for at, (text, name) in enumerate(zip(seconds.texts, seconds.names, strict=True)):
            one = 0 if len(heads) == 1 else at
            ids, second_at = self.text.join_pair(heads[one], self._part(text, name, most_second), self.cut)
            if len(ids) > self.longest:
                raise ContextTooLong(
                    Field(name)
                    + f" and {firsts.names[one]} have {len(ids)} tokens together; at most {self.longest} fit: set "
                    "truncate_prompt_tokens to -1 to have them cut"
                )
            found.append((name, ids, msgspec.structs.replace(self.pooling, second_at=second_at)))
        return found

    def alone(self, texts: Texts, most: int) -> list[tuple[str, list[int], PoolingParams]]:
        found = []
        for text, name in zip(texts.texts, texts.names, strict=True):
            if not text:
                raise InvalidRequest(Field(name) + " is empty: at least one token is needed")
            if most or self.cut is not None:
                ids = self.text.encode_cut(text, min(most or self.longest, self.cut or self.longest), param=name)
            else:
                ids = self.text.encode(text, param=name, max_tokens=self.longest)
            found.append((name, ids, self.pooling))
        return found

    def _part(self, text: str, name: str, most: int) -> list[int]:
        is_cut = bool(most) or self.cut is not None
        return self.text.encode_part(text, most or self.longest, param=name, is_cut=is_cut)


def _dot(a: list[float], b: list[float]) -> float:
    return float(sum(map(operator.mul, a, b)))
