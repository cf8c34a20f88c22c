"""langchain-ollama: chat, streams, structured output, tools' results and embeddings against the embedded model."""

import pytest

langchain_ollama = pytest.importorskip(
    "langchain_ollama", reason="langchain-ollama is not installed: make test-clients"
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
def chat(base_url: str) -> "langchain_ollama.ChatOllama":
    return langchain_ollama.ChatOllama(
        model=MODEL, base_url=base_url.removesuffix("/v1"), temperature=0, num_predict=96, validate_model_on_init=True
    )


def test_chat_and_stream(chat: "langchain_ollama.ChatOllama") -> None:
    answer = chat.invoke("Name the capital of Germany.")
    assert "Berlin" in answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["done_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat.stream("Name the capital of Germany.")) == answer.content


def test_structured_output(chat: "langchain_ollama.ChatOllama") -> None:
    answer = chat.with_structured_output(Capital, method="json_schema").invoke("Give France and its capital.")
    assert isinstance(answer, Capital)


def test_the_results_of_tools_go_back(chat: "langchain_ollama.ChatOllama") -> None:
    call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}
    messages = [
        HumanMessage("What is the weather in Paris?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("20 degrees", tool_call_id="call_1"),
    ]
    answer = chat.bind_tools([get_weather]).invoke(messages)
    assert answer.content or answer.tool_calls


def test_embeddings(base_url: str) -> None:
    embeddings = langchain_ollama.OllamaEmbeddings(model=MODEL, base_url=base_url.removesuffix("/v1"))
    one, two = embeddings.embed_documents(["a", "b"])
    assert len(one) == len(two) > 0 and one != two
