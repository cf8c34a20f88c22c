"""Ollama's own Python client: every call that Octavo offers, against the embedded model."""

import json

import pytest

ollama = pytest.importorskip("ollama", reason="ollama is not installed: make test-clients")

from tests.clients.conftest import MODEL  # noqa: E402

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name the capital of Germany."}]
GREEDY = {"temperature": 0, "num_predict": 64}


@pytest.fixture
def client(base_url: str) -> "ollama.Client":
    return ollama.Client(host=base_url.removesuffix("/v1"))


def test_models(client: "ollama.Client") -> None:
    assert client.list().models[0].model == MODEL
    (running,) = client.ps().models
    assert running.model == MODEL and running.context_length > 0
    shown = client.show(MODEL)
    assert shown.details.format == "gguf" and shown.details.parameter_size == "135M"
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo["general.architecture"] == "llama"


def test_chat_and_stream(client: "ollama.Client") -> None:
    answer = client.chat(MODEL, messages=QUESTION, options=GREEDY)
    assert "Berlin" in answer.message.content and answer.done_reason == "stop" and answer.eval_count > 0
    pieces = list(client.chat(f"{MODEL}:latest", messages=QUESTION, options=GREEDY, stream=True, keep_alive="5m"))
    assert "".join(piece.message.content for piece in pieces) == answer.message.content
    assert [piece.done for piece in pieces[-2:]] == [False, True]


def test_generate(client: "ollama.Client") -> None:
    assert "Berlin" in client.generate(MODEL, prompt=QUESTION[0]["content"], options=GREEDY).response
    raw = client.generate(MODEL, prompt="Once upon a time", raw=True, options=GREEDY, logprobs=True, top_logprobs=2)
    assert raw.response and raw.logprobs[0].top_logprobs[0].token == raw.logprobs[0].token
    loaded = client.generate(MODEL)
    assert loaded.done_reason == "load" and loaded.response == ""


def test_a_schema_and_json(client: "ollama.Client") -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    answer = client.chat(MODEL, messages=QUESTION, format=schema, options=GREEDY)
    assert json.loads(answer.message.content).keys() == {"country", "capital"}


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
      city: name of the city
    """
    return f"20 degrees in {city}"


def test_tools_and_their_results(client: "ollama.Client") -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")},
    ]
    answer = client.chat(MODEL, messages=messages, tools=[get_weather], options=GREEDY)
    assert answer.message.content or answer.message.tool_calls


def test_embeddings(client: "ollama.Client") -> None:
    answer = client.embed(MODEL, input=["a", "b"])
    one, two = answer.embeddings
    assert len(one) == len(two) > 0 and one != two and answer.prompt_eval_count == 2
    assert list(client.embeddings(MODEL, prompt="a").embedding) == pytest.approx(list(one))


def test_errors(client: "ollama.Client") -> None:
    with pytest.raises(ollama.ResponseError, match="loads no other model") as missing:
        client.chat("llama3.2", messages=QUESTION)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.chat(MODEL, messages=QUESTION, options={"temperature": -1})
    with pytest.raises(ollama.ResponseError, match="being served"):
        client.delete(MODEL)
    with pytest.raises(ollama.ResponseError, match="is not the name of a model"):
        client.pull("a/b/c/d")
