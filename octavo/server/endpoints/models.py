"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names, and its adapters."""

from typing import Literal

import msgspec
from fastapi import APIRouter, Response

from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    root: str  # what --model named, or the embedded model
    parent: str | None = None  # of an adapter: the model's name
    object: Literal["model"] = "model"
    owned_by: Literal["octavo"] = "octavo"
    capabilities: tuple[Literal["chat", "completion", "embedding", "classification"], ...] = ()
    default_sampling: dict[str, float] = {}  # where a request sets none; the model's generation_config.json has them


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


SHAPES = {"GET /v1/models": Shape(ModelList), "GET /v1/models/{name}": Shape(ModelCard)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        names = [*service.model_names, *service.adapters.names()]
        return _json(ModelList([_card(service, name) for name in names]))

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        await service.check_model(name)
        return _json(_card(service, name))

    return router


def _card(service: Service, name: str) -> ModelCard:
    root = service.config.model.model or service.model_name
    report, text = service.report, service.text
    card = ModelCard(name, service.created, report.max_model_len, root)
    if name not in service.model_names:  # an adapter
        card = msgspec.structs.replace(card, root=service.adapters.path_of(name), parent=service.model_name)
    if not report.can_generate:
        return msgspec.structs.replace(
            card, capabilities=("embedding", "classification") if report.num_labels else ("embedding",)
        )
    capabilities = ("chat", "completion", "embedding") if text.has_chat_template else ("completion", "embedding")
    return msgspec.structs.replace(card, capabilities=capabilities, default_sampling=text.default_sampling)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
