"""The OpenAPI 3.1 document of this server, made from the types of its requests and responses.

An endpoint's module has its ROUTE_SCHEMA (or ROUTE_SCHEMAS), for what it accepts, and its SHAPES, for what it returns."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.endpoints import endpoint_modules
from octavo.server.http.errors import ErrorBody
from octavo.server.schema.fields import RequestFields, RouteSchema, ranges
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service, version

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]
# Prefixes that are not made from a module's name: generated clients use these names as they are.
_PREFIXES = {
    "octavo.server.dialects.openai_chat.output": "Chat_Output",
    "octavo.server.dialects.openai_completions.output": "Completions",
    "octavo.server.dialects.openai_responses.types": "Response_Types",
    "octavo.server.dialects.anthropic.output": "Message_Output",
}


def build_document(app: FastAPI, service: Service) -> Schema:
    document = get_openapi(title="Octavo", version=version(), routes=app.routes, openapi_version="3.1.0")
    routes, shapes = _declared()
    responses = {key: shape.response for key, shape in shapes.items() if shape.response is not None}
    found, components = msgspec.json.schema_components([ErrorBody, *responses.values()], ref_template=REF)
    references, schemas = _with_short_names(found, components)
    error, by_key = references[0], dict(zip(responses, references[1:], strict=True))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            key = f"{method.upper()} {path}"
            shape = shapes.get(key, Shape())
            operation.pop("requestBody", None)
            if method in ("post", "delete") and path in routes:
                operation["requestBody"] = _request_body(routes[path], schemas, service)
            elif shape.form is not None:
                operation["requestBody"] = {
                    "required": True,
                    "content": {"multipart/form-data": {"schema": shape.form}},
                }
            operation["responses"] = _responses(shape, by_key.get(key), error)
            if shape.leads_to:
                operation["responses"]["200"]["links"] = _links(shape, document["paths"])
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    if service.config.server.api_keys:
        document["security"] = [{"key": []}]
    return document


def _declared() -> tuple[dict[str, RouteSchema[Any]], dict[str, Shape]]:
    routes: dict[str, RouteSchema[Any]] = {}
    shapes: dict[str, Shape] = {}
    for module in endpoint_modules():
        own = getattr(module, "ROUTE_SCHEMAS", None) or filter(None, [getattr(module, "ROUTE_SCHEMA", None)])
        routes.update((route.path, route) for route in cast(Iterable[RouteSchema[Any]], own))
        shapes.update(getattr(module, "SHAPES", {}))
    return routes, shapes


def _responses(shape: Shape, response: Schema | None, error: Schema) -> Schema:
    content: Schema = {media: {"schema": {"description": f"{media}, as it is"}} for media in shape.media}
    if response is not None or not content:
        content["application/json"] = {"schema": response or {}}
    problem = {"content": {"application/json": {"schema": shape.error or error}}}
    return {
        "200": {"description": "the answer", "content": content},
        "4XX": {"description": "the request is not valid or cannot be served; the message says why", **problem},
        "5XX": {"description": "the server failed or is not available; the message says why", **problem},
    }


def _links(shape: Shape, paths: Schema) -> Schema:
    links = {}
    for key in shape.leads_to:
        method, path = key.split(" ")
        operation = paths[path][method.lower()]["operationId"]
        parameter = path.partition("{")[2].partition("}")[0]
        links[operation] = {"operationId": operation, "parameters": {parameter: "$response.body#/id"}}
    return links


def _request_body(route: RouteSchema[Any], schemas: Schema, service: Service) -> Schema:
    model = cast(type[RequestFields], route.schema)
    schema = model.model_json_schema(ref_template=REF.replace("{name}", "{model}"), mode="validation")
    for name, inner in schema.pop("$defs", {}).items():
        schemas.setdefault(name, _tidy(inner))
    if "model" in schema["properties"]:  # the only served model may be omitted
        names = [*service.model_names, *([None] if "model" not in schema.get("required", ()) else [])]
        schema["properties"]["model"] = {"enum": names}
    for name, limits in ranges(service.config).items():
        field = schema["properties"].get(name, {})
        for kind in field.get("anyOf", [field]):
            if kind.get("type") in ("number", "integer"):
                kind.update(limits)
    schema["description"] = (
        "Unknown fields are refused in strict mode, and otherwise listed in ignored_fields: see /v1/compat."
    )
    name = schema["title"]
    schemas[name] = _tidy(schema)
    return {"required": True, "content": {"application/json": {"schema": {"$ref": REF.format(name=name)}}}}


def _tidy(schema: Schema) -> Schema:
    """The schema without titles that repeat a field's name."""
    properties = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _short_name(name: str) -> str:
    module, _, own = name.rpartition(".")
    return _PREFIXES.get(module, module.rpartition(".")[2].title()) + own.title() if module else name


def _with_short_names(references: Iterable[Schema], components: Mapping[str, Schema]) -> tuple[list[Schema], Schema]:
    """msgspec gives types of one name in two modules their modules' names: a short prefix stands for these here."""
    short = {name: _short_name(name) for name in components}
    assert len(set(short.values())) == len(short)

    def renamed(value: Any) -> Any:
        match value:
            case dict():
                return {key: renamed(inner) for key, inner in value.items()}
            case list():
                return [renamed(inner) for inner in value]
            case str() if value.startswith(REF.format(name="")):
                return REF.format(name=short[value.removeprefix(REF.format(name=""))])
        return value

    return [renamed(reference) for reference in references], {
        short[name]: renamed(schema) for name, schema in components.items()
    }


def undocumented(document: Schema) -> Iterator[str]:
    """Operations without a described answer."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["200"]["content"]
            if any(not media["schema"] for media in content.values()):
                yield f"{method.upper()} {path}"
