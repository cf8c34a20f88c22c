"""instructor: a Pydantic object from the embedded model, by tools and by a JSON schema, whole and in parts."""

import pytest

instructor = pytest.importorskip("instructor", reason="instructor is not installed: make test-clients")

import openai  # noqa: E402
from pydantic import BaseModel, ConfigDict, Field  # noqa: E402

from tests.clients.conftest import MODEL  # noqa: E402

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "France's capital is Paris. Its population is 68 million."}]


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")  # without it, a model this small adds fields of its own

    country: str = Field(max_length=40)
    capital: str = Field(max_length=40)
    population: int


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_an_object(base_url: str, mode: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120), mode=instructor.Mode[mode]
    )
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 160, "temperature": 0, "max_retries": 0}
    if mode == "JSON":  # in this mode only the model enforces the schema, which one this small does not
        options["extra_body"] = {"response_format": {"type": "json_schema", "json_schema": _schema()}}
    assert isinstance(client.chat.completions.create(response_model=Capital, **options), Capital)


def test_an_object_in_parts(base_url: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120), mode=instructor.Mode.TOOLS
    )
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 160, "temperature": 0}
    *_, last = client.chat.completions.create_partial(response_model=Capital, **options)
    assert Capital.model_validate(last.model_dump())


def _schema() -> dict[str, object]:
    return {"name": "capital", "schema": Capital.model_json_schema()}
