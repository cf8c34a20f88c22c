"""POST /pooling, with vLLM's shapes: what a model makes of its hidden states: a vector for each input, one for each of its tokens, or
labels."""

import base64
import time
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.admission.pairs import classification
from octavo.admission.validate import choose_pooling
from octavo.errors import InvalidRequest, Unsupported
from octavo.messages import GenerateRequest, PoolingParams, numbers_of
from octavo.server.generate.embeddings import EmbeddingRequest, requests_of, vectors
from octavo.server.generate.offload import offload, offload_prompt, one_of
from octavo.server.generate.requests import new_id
from octavo.server.generate.scoring import NOT_OFFERED as POOLING_NOT_OFFERED
from octavo.server.generate.scoring import PoolingAnswer, pooling_answer
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.service import Service

MAX_NUMBERS = 2**22
"""In the vectors of all tokens of one request: 16 MiB."""

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **POOLING_NOT_OFFERED,
    "add_special_tokens": (True,),
    "messages": (),
    "data": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}


class PoolingRequest(EmbeddingRequest):
    task: str | None = (
        None  # embed, token_embed or classify; None: classify if the model has a classification head, else embed
    )
    use_activation: bool | None = None  # vLLM's: a classifier's activation; of vectors: the newer name of `normalize`


ROUTE_SCHEMA = RouteSchema("pooling", "/pooling", PoolingRequest, NOT_OFFERED)


class Pooled(msgspec.Struct, frozen=True, gc=False):
    index: int
    data: (
        list[list[float] | float] | str
    )  # a list for each token, or one of numbers; str: base64 of float32, little endian
    object: Literal["pooling"] = "pooling"


class PoolingResponse(PoolingAnswer[Pooled], frozen=True, gc=False):
    pass


SHAPES = {"POST /pooling": Shape(PoolingResponse)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/pooling")
    async def pooling(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, service.config)
        await service.check_model(fields.model)
        response_id, params = new_id("pooling"), _params(service, fields)
        requests = await offload_prompt(
            fields.num_bytes, lambda: requests_of(service, fields, params, arrived, response_id)
        )
        width = params.dimensions or service.report.hidden_size
        num_tokens = sum(len(each.prompt_ids) for each in requests)
        if params.kind == "tokens" and num_tokens * width > MAX_NUMBERS:
            raise InvalidRequest(
                f"input has {num_tokens} tokens, whose vectors of {width} numbers are {num_tokens * width} numbers; one request may "
                f"have at most {MAX_NUMBERS}: send fewer inputs, or set dimensions",
                param="input",
            )
        service.submit(requests)
        is_base64 = fields.encoding_format == "base64"
        data = await while_connected(
            _data(service, requests, width if params.kind == "tokens" else 0, is_base64), service.track
        )
        return pooling_answer(service, PoolingResponse, response_id, data, num_tokens, fields.ignored)

    return router


def _params(service: Service, fields: PoolingRequest) -> PoolingParams:
    text, report = service.text, service.report
    match fields.task or ("classify" if report.num_labels else "embed"):
        case "classify":
            for name in ("pooling", "normalize", "dimensions"):
                if getattr(fields, name) is not None:
                    raise InvalidRequest(
                        f"{name} is of vectors, and this request asks for labels: leave it out", param=name
                    )
            return classification(text, report, fields.use_activation)
        case "embed" | "token_embed" as task:
            normalize = fields.normalize if fields.use_activation is None else fields.use_activation
            if None not in (fields.normalize, fields.use_activation) and fields.normalize != fields.use_activation:
                raise InvalidRequest(
                    "normalize and use_activation are two names of the same choice: give only one of them",
                    param="normalize",
                )
            if task == "embed":
                return choose_pooling(text.pooling_config, report, fields.pooling, normalize, fields.dimensions)
            if fields.pooling is not None:
                raise InvalidRequest(
                    "pooling is of one vector, and this request asks for every token's", param="pooling"
                )
            one = choose_pooling(text.pooling_config, report, "mean", normalize, fields.dimensions)
            return msgspec.structs.replace(one, kind="tokens")
        case task:
            raise Unsupported(f"task must be embed, token_embed or classify, got {task[:40]!r}", param="task")


async def _data(service: Service, requests: list[GenerateRequest], width: int, is_base64: bool) -> list[Pooled]:
    """`width`: numbers of each token's vector; 0: an input has one list."""
    found = await vectors(service, requests)
    size = sum(map(len, found)) // 4

    def shown(index: int, vector: bytes) -> Pooled:
        if is_base64:
            return one_of(size, Pooled(index, base64.b64encode(vector).decode()))
        numbers = numbers_of(vector)
        if not width:
            return one_of(size, Pooled(index, [*numbers]))
        return one_of(size, Pooled(index, [numbers[at : at + width] for at in range(0, len(numbers), width)]))

    return await offload(size, lambda: [shown(index, vector) for index, vector in enumerate(found)])
