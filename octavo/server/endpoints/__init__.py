"""The endpoints: the folder is the list. A module here has `router(service) -> APIRouter`; adding one touches no other file of octavo/.

What a module's routes accept is in its ROUTE_SCHEMA (or ROUTE_SCHEMAS), what they return in its SHAPES: /v1/compat and /openapi.json read
these."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from fastapi import APIRouter

from octavo.server.state.service import Service


def endpoint_modules() -> Iterator[ModuleType]:
    """Every module of this folder, by name."""
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        yield importlib.import_module(f"{__name__}.{found.name}")


def routers(service: Service) -> Iterator[APIRouter]:
    for module in endpoint_modules():
        yield module.router(service)
