"""Sends answers back as the clients' libraries keep them, to a server that refuses unknown fields."""

import os
import sys
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.e2e.servers import Server

pytestmark = pytest.mark.filterwarnings(
    "ignore:Pydantic serializer warnings:UserWarning"
)  # openai's own warnings about the answers it parsed

HI = {"role": "user", "content": "A city?"}


class Place(BaseModel):
    city: str


@pytest.fixture(scope="module")
def strict_url() -> Iterator[str]:
    options = ("--strict-fields", "--kv-cache-memory-bytes", "512M", "--api-processes", "1")
    with Server(*options, python=os.environ.get("OCTAVO_PYTHON", sys.executable)) as server:
        yield server.base + "/v1"


def test_openai(strict_url: str) -> None:
    client = openai.OpenAI(base_url=strict_url, api_key="x", max_retries=0)
    completions = client.chat.completions
    said = (
        completions.parse(model=MODEL, messages=[HI], response_format=Place, max_tokens=40, temperature=0)
        .choices[0]
        .message
    )
    completions.create(model=MODEL, messages=[HI, said, HI], max_tokens=4)
    tool = openai.pydantic_function_tool(Place)
    called = completions.parse(model=MODEL, messages=[HI], tools=[tool], tool_choice="required", max_tokens=60)
    message = called.choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.parsed_arguments is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
    completions.create(model=MODEL, messages=[HI, message, result], max_tokens=4)
    with completions.stream(model=MODEL, messages=[HI], response_format=Place, max_tokens=40, temperature=0) as stream:
        kept = stream.get_final_completion().choices[0].message
    completions.create(model=MODEL, messages=[HI, kept, HI], max_tokens=4)
    response = client.responses.parse(model=MODEL, input="A city?", text_format=Place, max_output_tokens=40)
    client.responses.create(model=MODEL, input=[HI, *response.output, HI], max_output_tokens=4)


def test_litellm(strict_url: str) -> None:
    litellm = pytest.importorskip("litellm")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    wants = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        "tool_choice": "required",
    }
    options = {"model": f"openai/{MODEL}", "api_base": strict_url, "api_key": "x", "max_tokens": 60}
    message = litellm.completion(messages=[HI], **wants, **options).choices[0].message
    pieces = litellm.completion(messages=[HI], stream=True, **wants, **options)
    streamed = litellm.stream_chunk_builder([*pieces]).choices[0].message
    for kept in (message, message.model_dump(), streamed.model_dump()):
        call = kept["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "ok", "name": "f"}
        litellm.completion(messages=[HI, kept, result], **options)


def test_langchain(strict_url: str) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    models = pytest.importorskip("langchain_openai")
    chat = models.ChatOpenAI(base_url=strict_url, api_key="x", model=MODEL, max_tokens=60)
    bound = chat.bind_tools([Place], tool_choice="any")
    hi = messages.HumanMessage("A city?")
    pieces = [*bound.stream([hi])]
    for said in (bound.invoke([hi]), sum(pieces[1:], pieces[0])):
        chat.invoke([hi, said, messages.ToolMessage("ok", tool_call_id=said.tool_calls[0]["id"])])
    for method in ("json_schema", "function_calling"):
        chat.with_structured_output(Place, method=method).invoke("A city?")
