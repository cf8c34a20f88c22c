"""The styles of the collection: each function makes one schema in the manner of a kind of tool or file. They imitate how such schemas are
written (keywords, nesting, sizes, habits), and copy none."""

from collections.abc import Callable
from typing import Any

from benchmarks.schemas.words import KNOWN_FORMATS, NOUNS, OTHER_FORMATS, PATTERNS, VERBS, Source

Schema = dict[str, Any]
DRAFT_4, DRAFT_6, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7))
DRAFT_2019, DRAFT_2020 = (f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12"))


def string(s: Source) -> Schema:
    made: Schema = {"type": "string"}
    match s.count(0, 11):
        case 0 | 1:
            made["minLength"] = s.count(0, 3)
        case 2:
            made["maxLength"] = s.pick((32, 64, 100, 255, 256, 1000, 4096))
        case 3:
            made |= {"minLength": 1, "maxLength": s.pick((50, 63, 128))}
        case 4:
            made["pattern"] = s.pick(PATTERNS)
        case 5:
            made["format"] = s.pick(KNOWN_FORMATS)
        case 6 if s.chance(0.5):
            made["format"] = s.pick(OTHER_FORMATS)
        case 7 | 8:
            made["enum"] = s.values()
    return made


def number(s: Source, exclusive_is_boolean: bool = False) -> Schema:
    made: Schema = {"type": s.pick(("integer", "integer", "number"))}
    if s.chance(0.4):
        made["minimum"] = s.pick((0, 1, -1, -90, 0.0, 10))
        if s.chance(0.2) and exclusive_is_boolean:
            made["exclusiveMinimum"] = True
    elif s.chance(0.15) and not exclusive_is_boolean:
        made["exclusiveMinimum"] = 0
    if s.chance(0.3):
        made["maximum"] = s.pick((100, 65535, 1000, 10, 180, 2147483647))
    if s.chance(0.06):
        made["multipleOf"] = s.pick((0.01, 5, 10, 0.5))
    return made


def scalar(s: Source) -> Schema:
    match s.count(0, 9):
        case 0 | 1 | 2 | 3 | 4:
            return string(s)
        case 5 | 6 | 7:
            return number(s)
        case 8:
            return {"type": "boolean"}
    return {"type": "array", "items": {"type": "string"}}


def described(s: Source, schema: Schema, probability: float = 0.7) -> Schema:
    return {**schema, "description": s.text()} if s.chance(probability) else schema


def listed(s: Source, items: Any, unique: float = 0.2) -> Schema:
    made: Schema = {"type": "array", "items": items}
    if s.chance(unique):
        made["uniqueItems"] = True
    if s.chance(0.3):
        made["minItems"] = s.count(0, 2)
    if s.chance(0.15):
        made["maxItems"] = s.pick((5, 10, 20, 100))
    return made


def record(s: Source, properties: Schema, is_closed: float = 0.5, required: float = 0.5) -> Schema:
    made: Schema = {"type": "object", "properties": properties}
    needed = [name for name in properties if s.chance(required)]
    if needed:
        made["required"] = needed
    if s.chance(is_closed):
        made["additionalProperties"] = False
    return made


def nested(s: Source, depth: int, case: str, make: Callable[[Source], Schema] = scalar, width: int = 6) -> Schema:
    properties: Schema = {}
    for name in s.names(s.count(2, width), case):
        if depth and s.chance(0.3):
            inner = nested(s, depth - 1, case, make, width)
            properties[name] = listed(s, inner, 0.05) if s.chance(0.4) else inner
        elif s.chance(0.15):
            properties[name] = listed(s, string(s))
        else:
            properties[name] = described(s, make(s))
    return record(s, properties)


# ── OpenAPI ──


def openapi_30(s: Source) -> Schema:
    """Components of OpenAPI 3.0: nullable, examples, inheritance by allOf, discriminators, refs to components."""

    def leaf(s: Source) -> Schema:
        made = string(s) if s.chance(0.6) else {"type": "integer", "format": s.pick(("int32", "int64"))}
        if s.chance(0.25):
            made["nullable"] = True
            if "enum" in made and s.chance(0.5):
                made["enum"] = [*made["enum"], None]
        if s.chance(0.4):
            made["example"] = s.pick(NOUNS)
        if s.chance(0.2):
            made["readOnly"] = True
        if s.chance(0.08):
            made["xml"] = {"name": s.pick(NOUNS), "attribute": True}
        if s.chance(0.08):
            made["externalDocs"] = {"url": "https://docs.example.com"}
        return made

    names = s.names(s.count(2, 5), "pascal")
    parts = {name: nested(s, 1, "camel", leaf) for name in names}
    for name in names[1:]:
        if s.chance(0.35):
            parts[name] = {"allOf": [{"$ref": f"#/components/schemas/{names[0]}"}, parts[name]]}
            parts[names[0]].pop("additionalProperties", None)
            parts[name]["allOf"][1].pop("additionalProperties", None)
    root = record(s, {s.name("camel"): {"$ref": f"#/components/schemas/{name}"} for name in names}, 0.2)
    if s.chance(0.3) and len(names) > 2:
        kinds = s.names(2, "pascal")
        for kind in kinds:
            parts[kind] = {
                "type": "object",
                "required": ["kind"],
                "properties": {"kind": {"type": "string", "enum": [kind]}, "data": leaf(s)},
            }
        root["properties"]["subject"] = {
            "oneOf": [{"$ref": f"#/components/schemas/{kind}"} for kind in kinds],
            "discriminator": {
                "propertyName": "kind",
                "mapping": {kind: f"#/components/schemas/{kind}" for kind in kinds},
            },
        }
    return {**root, "components": {"schemas": parts}}


def openapi_31(s: Source) -> Schema:
    """Components of OpenAPI 3.1: type lists with null, examples, $defs."""

    def leaf(s: Source) -> Schema:
        made = scalar(s)
        if s.chance(0.3) and isinstance(made["type"], str) and "enum" not in made:
            made["type"] = [made["type"], "null"]
        if s.chance(0.3):
            made["examples"] = [s.pick(NOUNS)]
        if s.chance(0.1):
            made["deprecated"] = True
        return made

    names = s.names(s.count(1, 4), "pascal")
    return {
        "$schema": DRAFT_2020,
        **record(s, {s.name("camel"): {"$ref": f"#/$defs/{name}"} for name in names}, 0.5),
        "$defs": {name: nested(s, 2, "camel", leaf) for name in names},
    }


# ── files of tools ──


def package_manifest(s: Source) -> Schema:
    """Manifests of package managers, draft 4 or 7: dependency maps, people as text or object, licences."""
    person = {
        "description": "A person who has been involved in creating or maintaining this package.",
        "type": ["object", "string"],
        "required": ["name"],
        "properties": {
            "name": {"type": "string"},
            "url": {"type": "string", "format": "uri"},
            "email": {"type": "string", "format": "email"},
        },
    }
    dependency = {
        "description": "Dependencies: package name to version range.",
        "type": "object",
        "additionalProperties": {"type": "string"},
    }
    properties: Schema = {
        "name": {"description": "The name of the package.", "type": "string", "maxLength": 214, "minLength": 1,
                 "pattern": "^(?:(?:@[a-z0-9-*~][a-z0-9-*._~]*)?/)?[a-z0-9-._~]+$"},
        "version": {"type": "string"},
        "keywords": {"type": "array", "items": {"type": "string"}},
        "license": s.pick(({"type": "string"}, {"anyOf": [{"type": "string"}, {"enum": ["MIT", "ISC", "Apache-2.0"]}]})),
        "author": {"$ref": "#/definitions/person"},
        "contributors": {"type": "array", "items": {"$ref": "#/definitions/person"}},
        "bin": {"type": ["string", "object"], "additionalProperties": {"type": "string"}},
        "scripts": {"type": "object", "properties": {"test": {"type": "string"}, "build": {"type": "string"}},
                    "additionalProperties": {"type": "string", "x-intellij-language-injection": "Shell Script"}},
        "dependencies": {"$ref": "#/definitions/dependency"},
        "devDependencies": {"$ref": "#/definitions/dependency"},
        "engines": {"type": "object", "properties": {"node": {"type": "string"}}, "additionalProperties": {"type": "string"}},
        "private": {"type": "boolean"},
        "os": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "exports": {"oneOf": [{"type": "string", "pattern": "^\\./"}, {"type": "object", "patternProperties": {"^\\.": {"type": "string"}}, "additionalProperties": False}]},
        "workspaces": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "object", "properties": {"packages": {"type": "array", "items": {"type": "string"}}}}]},
    }  # fmt: skip
    kept = dict(s.some(properties.items(), 5, len(properties)))
    for name in s.names(s.count(0, 4), "camel"):
        kept.setdefault(name, described(s, string(s)))
    made: Schema = {"$schema": s.pick((DRAFT_4, DRAFT_7)), "type": "object", "properties": kept}
    made["definitions"] = {"person": person, "dependency": dependency}
    if s.chance(0.5) and "name" in kept:
        made["required"] = [name for name in ("name", "version") if name in kept]
    if s.chance(0.3):
        made["patternProperties"] = {"^_": {"description": "Any property starting with _ is valid.", "tsType": "any"}}
    if s.chance(0.3):
        made["anyOf"] = [{"type": "object", "not": {"required": ["bundledDependencies", "bundleDependencies"]}}]
    return {"title": "JSON schema for a manifest", "id": "https://json.example.org/package", **made}


def ci_workflow(s: Source) -> Schema:
    """Pipelines of continuous integration: jobs by name, steps that use or run, text or list."""
    env = {
        "type": "object",
        "additionalProperties": {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]},
    }
    texts = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
    if s.chance(0.4):
        texts["oneOf"][1]["uniqueItems"] = True
    step: Schema = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "name": {"type": "string"}, "uses": {"type": "string"}, "run": {"type": "string"},
                       "with": {"$ref": "#/definitions/env"}, "env": {"$ref": "#/definitions/env"},
                       "if": {"type": ["boolean", "number", "string"]}, "timeout-minutes": {"type": "number", "minimum": 1},
                       "continue-on-error": {"type": "boolean", "default": False}},
        "additionalProperties": False,
    }  # fmt: skip
    if s.chance(0.4):
        step |= {"oneOf": [{"required": ["uses"]}, {"required": ["run"]}]}
    elif s.chance(0.3):
        step |= {"anyOf": [{"required": ["uses"]}, {"required": ["run"]}], "dependencies": {"with": ["uses"]}}
    job: Schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"}, "needs": {"$ref": "#/definitions/texts"}, "runs-on": {"$ref": "#/definitions/texts"},
            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}, "minItems": 1},
            "strategy": {"type": "object", "properties": {"matrix": {"type": "object", "additionalProperties": {"type": "array"}},
                                                            "fail-fast": {"type": "boolean"}}, "required": ["matrix"]},
            "timeout": {"type": "string", "pattern": "^\\d+ (seconds|minutes|hours)$"},
        },
        "required": ["runs-on"],
    }  # fmt: skip
    events = ["push", "pull_request", "schedule", "release", "workflow_dispatch"]
    on: Schema = {
        "oneOf": [
            {"enum": events},
            {"type": "array", "items": {"enum": events}, "minItems": 1, "uniqueItems": s.chance(0.5)},
            {
                "type": "object",
                "properties": {event: {"type": ["object", "null"]} for event in events},
                "additionalProperties": False,
            },
        ]
    }
    properties = {"name": {"type": "string"}, "on": on, "env": {"$ref": "#/definitions/env"}}
    jobs = {
        "type": "object",
        "patternProperties": {"^[_a-zA-Z][a-zA-Z0-9_-]*$": {"$ref": "#/definitions/job"}},
        "minProperties": 1,
        "additionalProperties": False,
    }
    return {
        "$schema": s.pick((DRAFT_7, DRAFT_7, DRAFT_4)),
        "$comment": "One pipeline.",
        "type": "object",
        "properties": {**properties, "jobs": jobs},
        "required": ["on", "jobs"],
        "additionalProperties": s.chance(0.4),
        "definitions": {"env": env, "texts": texts, "step": step, "job": job},
    }


def compose_file(s: Source) -> Schema:
    """Files that describe containers, draft 7: text or object, lists without duplicates, ^x- extensions."""
    services = {
        "image": {"type": "string"},
        "build": {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"context": {"type": "string"}, "args": {"$ref": "#/definitions/list_or_dict"}}, "additionalProperties": False, "patternProperties": {"^x-": {}}}]},
        "command": {"oneOf": [{"type": "null"}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "environment": {"$ref": "#/definitions/list_or_dict"},
        "ports": {"type": "array", "items": {"oneOf": [{"type": "number", "format": "ports"}, {"type": "string", "format": "ports"}, {"type": "object", "properties": {"target": {"type": "integer"}, "published": {"type": ["string", "integer"]}}, "additionalProperties": False}]}, "uniqueItems": True},
        "cap_add": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "depends_on": {"oneOf": [{"$ref": "#/definitions/list_of_strings"}, {"type": "object", "additionalProperties": False, "patternProperties": {"^[a-zA-Z0-9._-]+$": {"type": "object", "properties": {"condition": {"type": "string", "enum": ["service_started", "service_healthy"]}}, "required": ["condition"]}}}]},
        "restart": {"type": "string"},
        "privileged": {"type": ["boolean", "string"]},
        "cpus": {"type": ["number", "string"]},
        "mem_limit": {"type": ["number", "string"]},
        "healthcheck": {"type": "object", "properties": {"interval": {"type": "string", "format": "duration"}, "retries": {"type": ["number", "string"]}, "test": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}}, "additionalProperties": False, "patternProperties": {"^x-": {}}},
    }  # fmt: skip
    service = {
        "id": "#/definitions/service",
        "type": "object",
        "properties": dict(s.some(services.items(), 3, len(services))),
        "additionalProperties": False,
        "patternProperties": {"^x-": {}},
    }
    definitions = {
        "service": service,
        "list_of_strings": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "list_or_dict": {"oneOf": [{"type": "object", "patternProperties": {".+": {"type": ["string", "number", "boolean", "null"]}}, "additionalProperties": False}, {"type": "array", "items": {"type": "string"}, "uniqueItems": True}]},
    }  # fmt: skip
    return {
        "$schema": DRAFT_7,
        "id": "compose.json",
        "type": "object",
        "properties": {
            "version": {"type": "string", "description": "declared for backward compatibility"},
            "services": {
                "type": "object",
                "patternProperties": {"^[a-zA-Z0-9._-]+$": {"$ref": "#/definitions/service"}},
                "additionalProperties": False,
            },
        },
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "definitions": definitions,
    }


def kubernetes_crd(s: Source) -> Schema:
    """The openAPIV3Schema of custom resources."""

    def leaf(s: Source) -> Schema:
        match s.count(0, 8):
            case 0:
                return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
            case 1:
                return {"type": "object", "additionalProperties": {"type": "string"}}
            case 2:
                return {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"}
            case 3:
                return {
                    "type": "integer",
                    "format": s.pick(("int32", "int64")),
                    "minimum": s.pick((0, 1)),
                    "default": 1,
                }
            case 4:
                return {"type": "string", "format": "date-time", "nullable": True}
            case 5:
                return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            case 6:
                return {"type": "boolean"}
            case 7:
                return {"type": "string", "enum": [word.title() for word in s.values()]}
        return {"type": "string", "pattern": s.pick(PATTERNS), "maxLength": 253}

    def level(depth: int) -> Schema:
        properties: Schema = {}
        for name in s.names(s.count(3, 7), "camel"):
            if depth and s.chance(0.4):
                inner = level(depth - 1)
                if s.chance(0.4):
                    inner = {
                        "type": "array",
                        "items": inner,
                        "x-kubernetes-list-map-keys": ["name"],
                        "x-kubernetes-list-type": "map",
                    }
                properties[name] = described(s, inner)
            else:
                properties[name] = described(s, leaf(s), 0.9)
        made: Schema = {"type": "object", "properties": properties}
        if s.chance(0.4):
            made["required"] = s.some(properties, 1, 2)
        if s.chance(0.05):
            made["x-kubernetes-validations"] = [{"rule": "self.replicas > 0", "message": "replicas must be positive"}]
        return made

    return {
        "description": s.text(),
        "type": "object",
        "properties": {
            "apiVersion": {"description": "Versioned schema of this representation.", "type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": level(s.count(1, 3)),
            "status": level(1),
        },
        "required": ["spec"],
    }


def editor_settings(s: Source) -> Schema:
    """Settings that an editor's extension contributes."""
    properties: Schema = {}
    for name in s.names(s.count(4, 16), "camel"):
        made = scalar(s)
        made["markdownDescription" if s.chance(0.5) else "description"] = s.text()
        if "enum" in made:
            made[s.pick(("enumDescriptions", "markdownEnumDescriptions"))] = [s.text() for _ in made["enum"]]
        for key, value in (
            ("scope", "window"),
            ("order", 3),
            ("deprecationMessage", "Use another."),
            ("defaultSnippets", [{"label": "a", "body": "$1"}]),
            ("default", None),
            ("doNotSuggest", True),
        ):
            if s.chance(0.15):
                made[key] = value
        properties[f"{s.pick(NOUNS)}.{name}"] = made
    return {
        "$schema": DRAFT_7,
        "title": "Settings",
        "type": "object",
        "properties": properties,
        "allowTrailingCommas": True,
        "additionalProperties": s.chance(0.5),
    }


def helm_values(s: Source) -> Schema:
    """Values of a chart."""
    made = nested(s, 3, "camel")
    return {"$schema": s.pick((DRAFT_7, "http://json-schema.org/schema#")), "title": "Values", **made}


# ── tools of agents, outputs of models ──


def function_tool(s: Source) -> Schema:
    """Parameters of a function, as agents have them."""
    properties: Schema = {}
    for name in s.names(s.count(1, 6)):
        made = s.pick(
            (
                {"type": "string"},
                {"type": "string", "enum": s.values()},
                {"type": "integer"},
                {"type": "number"},
                {"type": "boolean"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}},
            )
        )
        properties[name] = {**made, "description": s.text()}
        if s.chance(0.2):
            properties[name]["default"] = None
    made = {"type": "object", "properties": properties, "required": s.some(properties, 0, len(properties))}
    if s.chance(0.4):
        made |= {"additionalProperties": False}
    if s.chance(0.2):
        made |= {"strict": True}
    if s.chance(0.2):
        made |= {"title": f"{s.pick(VERBS)}_{s.pick(NOUNS)}"}
    return made


def mcp_tool(s: Source) -> Schema:
    """Input schemas of tool servers: generated, with `$schema`, sometimes empty."""
    if s.chance(0.08):
        return {"type": "object", "properties": {}, "$schema": DRAFT_7}
    properties: Schema = {}
    for name in s.names(s.count(1, 8), "camel"):
        match s.count(0, 6):
            case 0:
                made: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
            case 1:
                made = {"type": "array", "items": {"type": "object", "properties": {"path": {"type": "string"}, "edits": {"type": "array", "items": {"type": "string"}}}, "required": ["path"], "additionalProperties": False}}  # fmt: skip
            case 2:
                made = {"type": "number", "exclusiveMinimum": 0, "maximum": 1000000, "default": 5000}
            case 3:
                made = {"type": "string", "format": s.pick(("uri", "date-time", "uuid", "date")), "minLength": 1}
            case 4:
                made = {"type": "object", "additionalProperties": {}, "propertyNames": {"type": "string"}}
            case _:
                made = scalar(s)
        properties[name] = {**made, "description": s.text(), **({"title": name.title()} if s.chance(0.3) else {})}
    made = record(s, properties, 0.6)
    if s.chance(0.2):
        made["annotations"] = {"readOnlyHint": True}
    return {**made, "$schema": DRAFT_7}


def extraction(s: Source) -> Schema:
    """What a model shall read out of a text: nested lists, enums, scores."""

    def leaf(s: Source) -> Schema:
        return s.pick(
            (
                {"type": "string"},
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "string", "enum": s.values()},
                {"type": ["string", "null"]},
                {"type": "string", "format": "date"},
                {"type": "integer", "minimum": 1, "maximum": 5},
                {"type": "boolean"},
            )
        )

    return {**nested(s, 2, "snake", leaf), "description": s.text()}


# ── generated by libraries ──


def pydantic_2(s: Source) -> Schema:
    """Model classes of Python: $defs, titles, anyOf null, tagged unions, tuples, enums."""
    kinds = s.names(s.count(2, 4), "pascal")
    defs: Schema = {
        kind: {
            "title": kind,
            "type": "object",
            "properties": {"type": {"const": kind.lower(), "title": "Type", "type": "string"}, **{name: {**scalar(s), "title": name.title()} for name in s.names(s.count(1, 3))}},
            "required": ["type"],
        }
        for kind in kinds
    }  # fmt: skip
    defs["Level"] = {"enum": s.values(), "title": "Level", "type": "string"}
    fields: Schema = {
        "subject": {
            "discriminator": {
                "mapping": {kind.lower(): f"#/$defs/{kind}" for kind in kinds},
                "propertyName": "type",
            },
            "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
            "title": "Subject",
        },
        "point": {
            "maxItems": 2,
            "minItems": 2,
            "prefixItems": [{"type": "number"}, {"type": "number"}],
            "title": "Point",
            "type": "array",
        },
        "level": {"$ref": "#/$defs/Level", "default": "low"},
        "tags": {"items": {"type": "string"}, "title": "Tags", "type": "array", "uniqueItems": True},
        "created": {"anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}], "default": None},
        "amount": {"anyOf": [{"type": "number"}, {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"}]},
        "extra": {"additionalProperties": True, "title": "Extra", "type": "object"},
        "ratio": {"exclusiveMinimum": 0.0, "maximum": 1.0, "type": "number"},
        "secret": {"format": "password", "title": "Secret", "type": "string", "writeOnly": True},
        "wait": {"format": "duration", "type": "string"},
    }
    kept = dict(s.some(fields.items(), 2, 6))
    for name in s.names(s.count(1, 4)):
        kept[name] = {**scalar(s), "title": name.replace("_", " ").title()}
    made = record(s, kept, 0.3)
    return {"$defs": defs, **made, "title": s.name("pascal")}


def pydantic_1(s: Source) -> Schema:
    """The older form: definitions, allOf around a ref."""
    names = s.names(s.count(1, 4), "pascal")
    definitions = {name: {"title": name, **nested(s, 1, "snake")} for name in names}
    properties = {name.lower(): {"title": name, "allOf": [{"$ref": f"#/definitions/{name}"}]} for name in names}
    properties |= {name: {"title": name, **scalar(s), "env_names": [name]} for name in s.names(2)}
    return {"title": "Settings", **record(s, properties), "definitions": definitions}


def zod(s: Source) -> Schema:
    """From TypeScript validators: draft 7, closed objects, unions by a literal, records."""

    def leaf(s: Source) -> Schema:
        match s.count(0, 8):
            case 0:
                return {"anyOf": [{"type": "string"}, {"type": "number"}]}
            case 1:
                return {"type": "object", "additionalProperties": scalar(s)}
            case 2:
                return {"anyOf": [{"type": "object", "properties": {"kind": {"type": "string", "const": word}, "value": scalar(s)}, "required": ["kind", "value"], "additionalProperties": False} for word in s.values(2, 3)]}  # fmt: skip
            case 3:
                return {"type": "string", "format": "uuid"}
            case 4:
                return {
                    "type": "array",
                    "minItems": 2,
                    "maxItems": 2,
                    "items": [{"type": "number"}, {"type": "string"}],
                }
            case 5:
                return {"type": ["string", "null"]}
        return scalar(s)

    made = nested(s, 2, "camel", leaf)
    if s.chance(0.5):
        name = s.name("pascal")
        return {"$ref": f"#/definitions/{name}", "definitions": {name: made}, "$schema": DRAFT_7}
    return {**made, "$schema": DRAFT_7}


def typescript(s: Source) -> Schema:
    """From TypeScript types: definitions with type parameters in their names, unions of literals."""
    names = [f"{name}<{s.name('pascal')}>" if s.chance(0.2) else name for name in s.names(s.count(2, 5), "pascal")]
    definitions: Schema = {}
    for at, name in enumerate(names):
        made = nested(s, 1, "camel")
        if at + 1 < len(names):
            made["properties"]["next"] = {"$ref": f"#/definitions/{_quoted(names[at + 1])}"}
        if s.chance(0.3):
            made["properties"]["mode"] = {
                "anyOf": [{"const": word, "type": "string"} for word in s.values()] + [{"type": "number"}]
            }
        if s.chance(0.2):
            made["properties"]["handler"] = {"isFunction": True, "$comment": "(event: Event) => void"}
        made["additionalProperties"] = False
        definitions[name] = made
    return {
        "$schema": DRAFT_7,
        "$ref": f"#/definitions/{_quoted(names[0])}",
        "definitions": definitions,
    }


def _quoted(name: str) -> str:
    return name.replace("<", "%3C").replace(">", "%3E")


def java_draft_4(s: Source) -> Schema:
    """From Java classes: draft 4, ids, javaType, boolean exclusive bounds."""

    def leaf(s: Source) -> Schema:
        made = string(s) if s.chance(0.5) else number(s, exclusive_is_boolean=True)
        if s.chance(0.3):
            made["javaType"] = "java.lang.Object"
        if s.chance(0.2):
            made["id"] = f"#{s.name()}"
        if s.chance(0.1):
            made["readonly"] = True
        if s.chance(0.1):
            made["existingJavaType"] = "long"
        return made

    made = nested(s, 2, "camel", leaf)
    if s.chance(0.2):
        first, *others = made["properties"]
        if others:
            made["dependencies"] = {first: others[:1]}
    if s.chance(0.2):
        made["properties"]["pair"] = {"type": "array", "items": [string(s), leaf(s)], "additionalItems": False}
    return {
        "$schema": DRAFT_4,
        "id": f"http://example.com/{s.name('kebab')}.json#",
        "javaInterfaces": ["java.io.Serializable"],
        **made,
    }


# ── data ──


def event_tracking(s: Source) -> Schema:
    """Self-describing events of analytics: types with null, maximal lengths, closed."""
    properties: Schema = {}
    for name in s.names(s.count(2, 14), "camel" if s.chance(0.5) else "snake"):
        match s.count(0, 4):
            case 0:
                made: Schema = {
                    "type": ["integer", "null"],
                    "minimum": 0,
                    "maximum": s.pick((32767, 2147483647, 9007199254740991)),
                }
            case 1:
                made = {"type": ["string", "null"], "enum": [*s.values(), None]}
            case 2:
                made = {"type": "boolean"}
            case 3:
                made = {
                    "type": "string",
                    "format": s.pick(("date-time", "uuid", "uri", "ipv4")),
                    "maxLength": s.pick((64, 2048)),
                }
            case _:
                made = {"type": s.pick(("string", ["string", "null"])), "maxLength": s.pick((16, 128, 255, 4096))}
        properties[name] = described(s, made)
    made = record(s, properties, 0.9, 0.3)
    if s.chance(0.1):
        made["minProperties"] = 1
    return {
        "$schema": "http://iglu.example.com/schemas/self-desc/schema/jsonschema/1-0-0#",
        "self": {"vendor": "com.example", "name": s.name(), "format": "jsonschema", "version": "1-0-0"},
        **made,
    }


def news_article(s: Source) -> Schema:
    """Content of a publisher: parts by reference, content elements told apart by their type."""
    traits = {
        f"trait_{name}": {"title": name.title(), "description": s.text(), **string(s)}
        for name in s.names(s.count(2, 5))
    }
    kinds = s.values(2, 5)
    elements = {
        f"story_{kind}": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": [kind]},
                **{name[6:]: {"$ref": f"#/definitions/{name}"} for name in traits},
                "additional_properties": {"type": "object"},
            },
            "required": ["type"],
        }
        for kind in kinds
    }
    made: Schema = {
        "type": "object",
        "properties": {
            "version": {"type": "string", "enum": ["0.10.9"]},
            "content_elements": {
                "type": "array",
                "items": {s.pick(("oneOf", "anyOf")): [{"$ref": f"#/definitions/{name}"} for name in elements]},
            },
            **{name[6:]: {"$ref": f"#/definitions/{name}"} for name in traits},
        },
        "required": ["version"],
        "additionalProperties": False,
    }
    if s.chance(0.2):
        made["anyOf"] = [{"required": ["version"]}, {"required": ["content_elements"]}]
    return {
        "$schema": DRAFT_4,
        "title": "Story",
        "description": s.text(),
        **made,
        "definitions": {**traits, **elements},
    }


def geometry(s: Source) -> Schema:
    """Geometries and features: positions as lists of numbers, shapes told apart by an enum."""
    position = {"type": "array", "minItems": 2, "items": {"type": "number"}}
    if s.chance(0.4):
        position |= {"maxItems": 3}
    shapes = {
        "Point": {"$ref": "#/definitions/position"},
        "LineString": {"type": "array", "minItems": 2, "items": {"$ref": "#/definitions/position"}},
        "Polygon": {
            "type": "array",
            "items": {"type": "array", "minItems": 4, "items": {"$ref": "#/definitions/position"}},
        },
    }
    branches = [
        {
            "title": name,
            "type": "object",
            "required": ["type", "coordinates"],
            "properties": {
                "type": {"type": "string", "enum": [name]},
                "coordinates": inner,
                "bbox": {"type": "array", "minItems": 4, "items": {"type": "number"}},
            },
        }
        for name, inner in s.some(shapes.items(), 2, 3)
    ]
    if s.chance(0.5):
        return {"$schema": DRAFT_7, "oneOf": branches, "definitions": {"position": position}}
    feature = {
        "type": "object",
        "required": ["type", "geometry", "properties"],
        "properties": {
            "type": {"type": "string", "enum": ["Feature"]},
            "id": {"oneOf": [{"type": "number"}, {"type": "string"}]},
            "properties": {"oneOf": [{"type": "null"}, {"type": "object"}]},
            "geometry": {"oneOf": [{"type": "null"}, *branches]},
        },
    }
    return {"$schema": DRAFT_7, "title": "Feature", **feature, "definitions": {"position": position}}


def form(s: Source) -> Schema:
    """Forms of user interfaces: enumNames, ui:, dependencies, conditions on a choice."""
    fields = s.names(s.count(2, 6), "camel")
    properties: Schema = {
        name: {**scalar(s), "title": name.title(), **({"ui:widget": "textarea"} if s.chance(0.2) else {})}
        for name in fields
    }
    options = s.values(2, 4)
    properties["choice"] = {
        "type": "string",
        "enum": options,
        "enumNames": [word.title() for word in options],
        "default": options[0],
    }
    made: Schema = {"title": "A form", "type": "object", "properties": properties, "required": ["choice"]}
    match s.count(0, 6):
        case 0:
            made["dependencies"] = {fields[0]: [fields[-1]]}
        case 1:
            made |= {
                "if": {"properties": {"choice": {"const": options[0]}}},
                "then": {"required": [fields[0]]},
                "else": {"required": [fields[-1]]},
            }
        case 2:
            made["allOf"] = [
                {
                    "if": {"properties": {"choice": {"const": option}}, "required": ["choice"]},
                    "then": {"required": [s.pick(fields)]},
                }
                for option in options
            ]
        case 3:
            made["dependencies"] = {
                "choice": {
                    "oneOf": [
                        {
                            "properties": {
                                "choice": {"enum": [option]},
                                f"more_{option}": scalar(s),
                            }
                        }
                        for option in options
                    ]
                }
            }
    if s.chance(0.2):
        properties["flags"] = {
            "type": "array",
            "items": {"type": "string", "enum": s.values(3, 5)},
            "uniqueItems": True,
        }
    return made


def conditional_config(s: Source) -> Schema:
    """Configurations whose parts depend on a kind: chains of conditions, const branches, not required."""
    kinds = s.values(2, 4)
    own = {kind: f"{kind}_options" for kind in kinds}
    properties: Schema = {"kind": {"enum": kinds}, **{name: nested(s, 0, "snake") for name in own.values()}}
    properties |= {name: described(s, scalar(s)) for name in s.names(s.count(1, 4))}
    made: Schema = {"type": "object", "properties": properties, "required": ["kind"]}
    match s.count(0, 4):
        case 0:
            made["allOf"] = [
                {"if": {"properties": {"kind": {"const": kind}}}, "then": {"required": [own[kind]]}} for kind in kinds
            ]
        case 1:
            made["oneOf"] = [{"properties": {"kind": {"const": kind}}, "required": [own[kind]]} for kind in kinds]
        case 2:
            made["not"] = {"required": s.some(own.values(), 2, 2)}
        case 3:
            made["if"] = {"properties": {"kind": {"enum": kinds[:1]}}, "required": ["kind"]}
            made["then"] = {"properties": {own[kinds[0]]: {"required": [s.name()]}}}
        case _:
            made["dependentRequired"] = {own[kinds[0]]: [own[kinds[1]]]}
    if s.chance(0.3):
        made["additionalProperties"] = False
    return {"$schema": s.pick((DRAFT_7, DRAFT_2019, DRAFT_2020)), **made}


def resource_template(s: Source) -> Schema:
    """Templates of cloud resources: one branch for each type, expressions instead of values."""
    expression = {"type": "string", "pattern": "^\\[([^\\[].*)?\\]$", "description": "An expression."}
    branches = []
    for kind in s.names(s.count(2, 5), "pascal"):
        branches.append(
            {
                "type": "object",
                "properties": {
                    "type": {"enum": [f"Example.{kind}/items"]},
                    "apiVersion": {"type": "string", "enum": ["2020-01-01"]},
                    "name": {"type": "string", "minLength": 1},
                    "size": {"oneOf": [{"type": "integer", "minimum": 1}, {"$ref": "#/definitions/expression"}]},
                    "tags": {
                        "oneOf": [
                            {"type": "object", "additionalProperties": {"type": "string"}, "properties": {}},
                            {"$ref": "#/definitions/expression"},
                        ]
                    },
                },
                "required": ["type", "apiVersion", "name"],
                "description": f"Example.{kind}/items",
            }
        )
    parameter = {
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "properties": {
                "type": {"enum": ["string", "int", "bool", "object"]},
                "minLength": {"type": "integer"},
                "allowedValues": {"type": "array", "minItems": 1},
            },
            "required": ["type"],
        },
    }
    return {
        "id": "https://schema.example.com/template.json#",
        "$schema": DRAFT_4,
        "type": "object",
        "properties": {
            "contentVersion": {"type": "string", "pattern": "(^[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+$)"},
            "parameters": parameter,
            "resources": {"type": "array", "items": {"oneOf": branches}, "minItems": 0},
        },
        "required": ["contentVersion", "resources"],
        "additionalProperties": False,
        "definitions": {"expression": expression},
    }


# ── shapes ──


def recursive(s: Source) -> Schema:
    """Trees: references to the root, to anchors, to ids, and mutual ones."""
    leaf = {"type": "object", "properties": {"value": scalar(s)}, "required": ["value"], "additionalProperties": False}
    match s.count(0, 4):
        case 0:
            return {
                "$schema": DRAFT_7,
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#"}},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        case 1:
            return {
                "$schema": DRAFT_2020,
                "$id": "https://example.com/tree",
                "$ref": "#node",
                "$defs": {
                    "node": {
                        "$anchor": "node",
                        "type": "object",
                        "properties": {"data": scalar(s), "children": {"type": "array", "items": {"$ref": "#node"}}},
                        "required": ["data"],
                    }
                },
            }
        case 2:
            return {
                "$schema": DRAFT_7,
                "$id": "http://example.com/root.json",
                "type": "object",
                "properties": {"item": {"$ref": "item.json"}, "other": {"$ref": "http://example.com/item.json"}},
                "definitions": {"item": {"$id": "item.json", **leaf}},
            }
        case 3:
            return {
                "definitions": {
                    "expression": {
                        "oneOf": [
                            {"$ref": "#/definitions/literal"},
                            {"$ref": "#/definitions/call"},
                        ]
                    },
                    "literal": {
                        "type": "object",
                        "properties": {"kind": {"const": "literal"}, "value": scalar(s)},
                        "required": ["kind", "value"],
                        "additionalProperties": False,
                    },
                    "call": {
                        "type": "object",
                        "properties": {
                            "kind": {"const": "call"},
                            "name": {"type": "string"},
                            "arguments": {"type": "array", "items": {"$ref": "#/definitions/expression"}},
                        },
                        "required": ["kind", "name"],
                        "additionalProperties": False,
                    },
                },
                "$ref": "#/definitions/expression",
            }
    return {
        "$schema": DRAFT_4,
        "id": "http://example.com/menu#",
        "type": "object",
        "properties": {
            "menu": {"$ref": "#/definitions/menu"},
        },
        "definitions": {
            "menu": {
                "type": "object",
                "properties": {
                    "label": string(s),
                    "items": {"type": "array", "items": {"$ref": "#/definitions/menu"}, "uniqueItems": s.chance(0.3)},
                },
            }
        },
    }


def legacy_draft_4(s: Source) -> Schema:
    """Hand-written draft 4: every older spelling."""
    made = nested(s, 2, "snake", lambda s: string(s) if s.chance(0.5) else number(s, True))
    properties = made["properties"]
    if s.chance(0.3):
        properties["range"] = {
            "type": "array",
            "items": [{"type": "number"}, {"type": "number"}],
            "additionalItems": False,
            "minItems": 2,
        }
    if s.chance(0.2):
        properties["amount"] = {
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": True,
            "maximum": 100,
            "exclusiveMaximum": s.chance(0.5),
        }
    if s.chance(0.2):
        properties["codes"] = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "minItems": 1}
    if s.chance(0.15):
        made["dependencies"] = {next(iter(properties)): [list(properties)[-1]]}
    if s.chance(0.1):
        properties["other"] = {"not": {"type": "null"}}
    if s.chance(0.1):
        made["maxProperties"] = 20
    return {"$schema": DRAFT_4, "id": "schema.json", **made, "definitions": {"unused": {"type": "string"}}}


def modern_2020(s: Source) -> Schema:
    """Hand-written 2019-09 and 2020-12: $defs, anchors, unevaluated properties, dependent keywords, contains."""
    made = nested(s, 1, "camel")
    properties = made["properties"]
    names = list(properties)
    match s.count(0, 9):
        case 0:
            made["dependentRequired"] = {names[0]: [names[-1]]}
        case 1:
            made["dependentSchemas"] = {names[0]: {"required": [names[-1]]}}
        case 2:
            made["propertyNames"] = {"pattern": "^[A-Za-z][A-Za-z0-9_]*$"}
        case 3:
            base = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
            made.pop("additionalProperties", None)
            return {
                "$schema": DRAFT_2020,
                "allOf": [{"$ref": "#/$defs/base"}],
                **made,
                "unevaluatedProperties": False,
                "$defs": {"base": base},
            }
        case 4:
            properties["roles"] = {
                "type": "array",
                "items": {"enum": ["admin", "user", "guest"]},
                "contains": {"const": "admin"},
                "maxItems": 5,
            }
        case 5:
            properties["pair"] = {"type": "array", "prefixItems": [scalar(s), scalar(s)], "items": False}
        case 6:
            properties["limits"] = {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 3,
                "additionalProperties": {"type": "integer"},
            }
        case 7:
            properties["labels"] = {
                "type": "object",
                "propertyNames": {"maxLength": 63},
                "additionalProperties": {"type": "string"},
            }
        case 8:
            properties["label"] = {"$ref": "#label"}
            made["$defs"] = {"label": {"$anchor": "label", "type": "string", "minLength": 1}}
    return {"$schema": s.pick((DRAFT_2019, DRAFT_2020)), "$id": "urn:example:form", **made}


def large(s: Source) -> Schema:
    """Schemas of 20 to 150 kB, with up to 500 properties in an object, or nested 30 levels."""
    match s.count(0, 2):
        case 0:
            properties = {name: described(s, scalar(s)) for name in s.names(s.count(100, 500))}
            return {"$schema": DRAFT_7, **record(s, properties, 0.7, 0.3)}
        case 1:
            names = s.names(s.count(30, 90), "pascal")
            definitions = {name: nested(s, 1, "camel") for name in names}
            properties = {name.lower(): {"$ref": f"#/definitions/{name}"} for name in names}
            return {"$schema": DRAFT_7, **record(s, properties, 0.7, 0.1), "definitions": definitions}
    made: Schema = nested(s, 0, "snake")
    for _ in range(s.count(15, 28)):
        made = record(s, {s.name(): made, s.name("camel"): scalar(s)}, 0.5, 0.4)
    return {"$schema": DRAFT_7, **made}


STYLES: dict[str, Callable[[Source], Schema]] = {
    make.__name__: make
    for make in (
        openapi_30,
        openapi_31,
        package_manifest,
        ci_workflow,
        compose_file,
        kubernetes_crd,
        editor_settings,
        helm_values,
        function_tool,
        mcp_tool,
        extraction,
        pydantic_2,
        pydantic_1,
        zod,
        typescript,
        java_draft_4,
        event_tracking,
        news_article,
        geometry,
        form,
        conditional_config,
        resource_template,
        recursive,
        legacy_draft_4,
        modern_2020,
        large,
    )
}
