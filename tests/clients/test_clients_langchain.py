"""langchain-openai: chat, streams, tools, structured output and embeddings against the embedded model."""

import pytest

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed: make test-clients"
)

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from tests.clients.conftest import MODEL  # noqa: E402

pytestmark = pytest.mark.model


class Capital(BaseModel):
    country: str
    capital: str


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"20 degrees in {city}"


@pytest.fixture
def chat(base_url: str) -> "langchain_openai.ChatOpenAI":
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="unused", temperature=0, max_tokens=96, max_retries=0, timeout=120
    )


def test_chat_and_stream(chat: "langchain_openai.ChatOpenAI") -> None:
    answer = chat.invoke("Name the capital of Germany.")
    assert "Berlin" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat.stream("Name the capital of Germany.")) == answer.content


def test_a_tool_that_must_be_called(chat: "langchain_openai.ChatOpenAI") -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke("What is the weather in Paris?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    streamed = None
    for chunk in bound.stream("What is the weather in Paris?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]


def test_the_results_of_tools_go_back(chat: "langchain_openai.ChatOpenAI") -> None:
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}
    messages = [
        HumanMessage("What is the weather in Paris?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("20 degrees", tool_call_id="call_1"),
    ]
    assert chat.bind_tools([get_weather]).invoke(messages).response_metadata["finish_reason"] in ("stop", "tool_calls")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: "langchain_openai.ChatOpenAI", method: str) -> None:
    answer = chat.with_structured_output(Capital, method=method).invoke("Give France and its capital.")
    assert isinstance(answer, Capital)


def test_embeddings(base_url: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=base_url, api_key="unused", check_embedding_ctx_length=False, max_retries=0
    )
    one, two = embeddings.embed_documents(["a", "b"])
    assert len(one) == len(two) > 0 and one != two
