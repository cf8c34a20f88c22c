"""GET /v1/usage: what the API key has used, and what is left of its limits. An admin key gets all keys."""

from typing import Literal, Protocol

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.server.http.sse import owner_of, viewer_of
from octavo.server.schema.shapes import Shape
from octavo.server.state.owners import Owners
from octavo.server.state.tenants import KeyTenant, Tenants


class KeyLimits(msgspec.Struct, frozen=True):
    """None: no limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_in_flight: int | None
    tokens_per_day: int | None


class KeyUsage(msgspec.Struct, frozen=True):
    key: str  # its name, or its number among the server's keys
    weight: float
    prompt_tokens: int  # ┐ since the key was first used with this --files-folder
    completion_tokens: int  # │
    total_tokens: int  # │
    num_requests: int  # ┘
    tokens_today: int  # since midnight (UTC)
    tokens_in_flight: int
    limits: KeyLimits
    tokens_left_today: int | None  # None: no budget
    object: Literal["key_usage"] = "key_usage"


class UsageList(msgspec.Struct, frozen=True):
    data: list[KeyUsage]  # empty: the server has no keys
    object: Literal["list"] = "list"


SHAPES = {"GET /v1/usage": Shape(UsageList)}


class UsageHost(Protocol):
    @property
    def owners(self) -> Owners: ...

    @property
    def tenants(self) -> Tenants: ...


def router(service: UsageHost) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/usage")
    async def usage(request: Request) -> Response:
        tenants, own = service.tenants, owner_of(request)
        sees_all = viewer_of(service, request).sees_all
        found = [
            usage
            for owner, tenant in tenants.all()
            if (sees_all or owner == own) and (usage := _usage(tenant)) is not None
        ]
        return Response(msgspec.json.encode(UsageList(found)), media_type="application/json")

    return router


def _usage(tenant: KeyTenant) -> KeyUsage | None:
    if tenant.account is None:
        return None
    used, settings = tenant.account.used(), tenant.settings
    limits = KeyLimits(
        settings.rpm or None,
        settings.tpm or None,
        settings.max_tokens_in_flight or None,
        settings.budget_tokens or None,
    )
    total = used.prompt_tokens + used.output_tokens
    left = max(0, settings.budget_tokens - used.today) if settings.budget_tokens else None
    return KeyUsage(
        tenant.name,
        settings.weight,
        used.prompt_tokens,
        used.output_tokens,
        total,
        used.num_requests,
        used.today,
        used.in_flight,
        limits,
        left,
    )
