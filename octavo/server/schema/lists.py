"""AtMost: a limit on the entries of a list or an object, checked before they are validated. FirstError: a list that may be long,
whose validation stops at the first wrong entry.

A list with neither reports every wrong entry, with an error object of about a kilobyte for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

TOO_MANY = "too_many"  # type of the error; its context has num and most


@dataclass(frozen=True, slots=True)
class AtMost:
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        for form in found.get("anyOf", [found]):
            if form.get("type") == "array":
                form["maxItems"] = self.most
            elif form.get("type") == "object":
                form["maxProperties"] = self.most
        return found

    def _check(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            raise too_many(value, self.most)
        return value


def too_many(value: list[Any] | Mapping[Any, Any], most: int) -> PydanticCustomError:
    return PydanticCustomError(TOO_MANY, "At most {most} entries are allowed", {"num": len(value), "most": most})


@dataclass(frozen=True, slots=True)
class FirstError:
    """pydantic's FailFast, also for a list that may be null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        schema = handler(source)
        inner: Any = schema["schema"] if schema["type"] == "nullable" else schema
        assert inner["type"] == "list"
        inner["fail_fast"] = True
        return schema
