"""POST /classify, with vLLM's shapes: the likeliest label of each input, and the probabilities of all."""

import time

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.admission.pairs import classification
from octavo.messages import GenerateRequest, numbers_of
from octavo.server.generate.embeddings import InputFields, requests_of, vectors
from octavo.server.generate.offload import offload, offload_prompt, one_of
from octavo.server.generate.requests import new_id
from octavo.server.generate.scoring import NOT_OFFERED as POOLING_NOT_OFFERED
from octavo.server.generate.scoring import PoolingAnswer, pooling_answer
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.service import Service

NOT_OFFERED: dict[str, tuple[object, ...]] = {
    **POOLING_NOT_OFFERED,
    "add_special_tokens": (True,),
    "messages": (),
}


class ClassifyRequest(InputFields):
    use_activation: bool | None = None  # vLLM's; None: yes


ROUTE_SCHEMA = RouteSchema("classify", "/classify", ClassifyRequest, NOT_OFFERED)


class Classified(msgspec.Struct, frozen=True, gc=False):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(PoolingAnswer[Classified], frozen=True, gc=False):
    pass


SHAPES = {"POST /classify": Shape(Classification)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/classify")
    async def classify(request: Request) -> Response:
        arrived = time.monotonic()
        service.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, service.config)
        await service.check_model(fields.model)
        response_id = new_id("classify")

        def make() -> list[GenerateRequest]:
            pooling = classification(service.text, service.report, fields.use_activation)
            return requests_of(service, fields, pooling, arrived, response_id)

        requests = await offload_prompt(fields.num_bytes, make)
        service.submit(requests)
        data = await while_connected(_labels(service, requests), service.track)
        num_tokens = sum(len(each.prompt_ids) for each in requests)
        return pooling_answer(service, Classification, response_id, data, num_tokens, fields.ignored)

    return router


async def _labels(service: Service, requests: list[GenerateRequest]) -> list[Classified]:
    found = await vectors(service, requests)
    size, config = sum(map(len, found)) // 4, service.text.classifier_config

    def shown(index: int, probs: list[float]) -> Classified:
        best = max(range(len(probs)), key=probs.__getitem__)
        return one_of(size, Classified(index, config.label(best), probs, len(probs)))

    return await offload(size, lambda: [shown(index, numbers_of(vector)) for index, vector in enumerate(found)])
