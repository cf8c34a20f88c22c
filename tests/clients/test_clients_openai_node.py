"""openai for Node: chat, streams, tools, structured output, completions and embeddings; check.mjs reports its results."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL

FOLDER = Path(__file__).parent / "openai_node"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        shutil.which("node") is None or not (FOLDER / "node_modules" / "openai").is_dir(),
        reason="openai (npm) is not installed: make test-clients",
    ),
]


@pytest.fixture(scope="module")
def seen(base_url: str) -> dict[str, object]:
    run = subprocess.run(
        ["node", "check.mjs", base_url, MODEL], cwd=FOLDER, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_chat_and_stream(seen: dict[str, object]) -> None:
    assert "Berlin" in seen["chat"] and seen["stream"] == seen["chat"]
    assert seen["usage"]["total_tokens"] == seen["usage"]["prompt_tokens"] + seen["usage"]["completion_tokens"]


def test_tools(seen: dict[str, object]) -> None:
    (call,) = seen["calls"]
    assert call["function"]["name"] == "get_weather" and isinstance(json.loads(call["function"]["arguments"]), dict)
    assert seen["streamedCalls"] == [call["function"]] and seen["finish"] == "tool_calls"


def test_structured_output(seen: dict[str, object]) -> None:
    assert json.loads(seen["json"]).keys() == {"country", "capital"}


def test_completions_embeddings_errors(seen: dict[str, object]) -> None:
    assert seen["completion"] and seen["embedding"] > 0 and seen["status"] == 404


def test_responses(seen: dict[str, object]) -> None:
    assert seen["response"] and seen["responseEvents"][0] == "response.created"
    assert seen["responseEvents"][-1] in ("response.completed", "response.incomplete")
