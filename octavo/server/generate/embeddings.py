"""Embedding requests: what they may say, the engine's requests made from them, and their vectors. Shared by all dialects."""

import asyncio
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from octavo.admission.finish_errors import failure_of
from octavo.admission.validate import RequestSize, admit_embedding, choose_pooling, cut_to, longest_embedding
from octavo.errors import Field, InvalidRequest, RequestFailed
from octavo.messages import GenerateRequest, PoolingParams
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import check_text_len, new_id
from octavo.server.schema.fields import LimitFields, RequestFields
from octavo.server.schema.shapes import Prompts
from octavo.server.state.service import Service

MAX_INPUTS = 2048


class InputFields(RequestFields, LimitFields):
    """What all routes share that compute something of prompts."""

    input: Prompts
    truncate_prompt_tokens: int | None = None  # vLLM's: truncate to this many tokens; -1: to the model's limit
    priority: int | None = None  # vLLM's: lower goes first, where the server schedules by priority
    # A label for the caller's own use: accepted, without effect.
    user: str | None = None


class EmbeddingRequest(InputFields):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None  # vLLM's
    pooling: str | None = None


async def parse(service: Service, fields: EmbeddingRequest, arrived: float) -> list[GenerateRequest]:
    def make() -> list[GenerateRequest]:
        pooling_config, report = service.text.pooling_config, service.report
        pooling = choose_pooling(pooling_config, report, fields.pooling, fields.normalize, fields.dimensions)
        return requests_of(service, fields, pooling, arrived, new_id("embd"))

    return await offload_prompt(fields.num_bytes, make)


def requests_of(
    service: Service, fields: InputFields, pooling: PoolingParams, arrived: float, response_id: str
) -> list[GenerateRequest]:
    """One request for each input. Encodes texts: large ones are to be made in a thread."""
    pooling_config, report = service.text.pooling_config, service.report
    longest = longest_embedding(pooling, pooling_config, report)
    cut = cut_to(fields.truncate_prompt_tokens, longest)
    inputs = _inputs(fields.input)
    RequestSize(len(inputs), 1, prompt_field=Field("input")).check(service.config.budget)
    check_text_len(service, fields.num_bytes, fields.input, Field("input"))
    encoded = {param: _ids(service, item, param, longest, cut) for param, item in inputs.items()}
    num_tokens = sum(map(len, encoded.values()))
    RequestSize(len(inputs), 1, num_tokens, prompt_field=Field("input")).check(service.config.budget)
    requests = [
        admit_embedding(
            f"{response_id}-{number}",
            ids,
            pooling,
            pooling_config,
            report,
            field=Field(param),
            arrived=arrived,
            priority=fields.priority or 0,
        )
        for number, (param, ids) in enumerate(encoded.items())
    ]
    times = fields.times(arrived)
    return [
        msgspec.structs.replace(request, response_id=response_id, part=part, **times)
        for part, request in enumerate(requests)
    ]


def _inputs(given: Any) -> dict[str, str | list[int]]:
    """Inputs by their field names, for errors."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        return {"input": given}
    if not isinstance(given, list):
        raise _wrong_input("input")
    if not given:
        raise InvalidRequest("input is empty: at least one text is needed", param="input")
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(
            f"input has {len(given)} entries; at most {MAX_INPUTS} are allowed in one request", param="input"
        )
    for at, item in enumerate(given):
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise _wrong_input(f"input[{at}]")
    return {f"input[{at}]": item for at, item in enumerate(given)}


def _wrong_input(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: an input must be a string or a list of token ids; several inputs must be a list of these",
        param=param,
    )


def _ids(service: Service, item: str | list[int], param: str, longest: int, cut: int | None) -> list[int]:
    if not isinstance(item, str):
        return item[:cut]
    if not item:
        raise InvalidRequest(Field(param) + " is empty: at least one token is needed")
    if cut is None:
        return service.text.encode(item, param=param, max_tokens=longest)
    return service.text.encode_cut(item, cut, param=param)


async def vectors(service: Service, requests: list[GenerateRequest]) -> list[bytes]:
    """The vectors of submitted requests, in their order: float32, little endian."""
    tasks = [asyncio.create_task(_vector(service, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:  # one that fails, or a client that disconnects, ends the others
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _vector(service: Service, request: GenerateRequest) -> bytes:
    async with aclosing(service.engine.deltas(request.id)) as steps:
        async for deltas in steps:
            service.heard()
            for delta in deltas:
                if delta.finish is not None and delta.finish.reason == "error":
                    raise failure_of(delta.finish)
                if delta.vector:
                    return delta.vector
    raise RequestFailed("the engine ended this request without a vector")
