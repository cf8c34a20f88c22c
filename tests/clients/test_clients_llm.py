"""The `llm` command, configured for the server by its extra-openai-models.yaml: prompts, tools and schemas."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm", reason="llm is not installed: make test-clients")

from tests.clients.conftest import MODEL

pytestmark = pytest.mark.model


@pytest.fixture
def run(base_url: str, tmp_path: Path):
    lines = ["- model_id: octavo", f"  model_name: {MODEL}", f"  api_base: {base_url}", "  can_stream: true",
             "  supports_tools: true", "  supports_schema: true"]  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines) + "\n")

    def run(*arguments: str) -> str:
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "llm",
                *arguments,
                "-m",
                "octavo",
                "-o",
                "temperature",
                "0",
                "-o",
                "max_tokens",
                "96",
            ],
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"},
        )
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


def test_a_prompt_streamed_and_whole(run) -> None:
    whole = run("Name the capital of Germany.", "--no-stream")
    assert "Berlin" in whole
    assert run("Name the capital of Germany.").strip() == whole.strip()


def test_a_schema(run) -> None:
    answer = json.loads(run("Give France and its capital.", "--schema", "country, capital"))
    assert answer.keys() >= {"country", "capital"}


def test_tools_are_offered(run) -> None:
    """The model may or may not call the tool: either must give an answer."""
    assert run("What time is it? Use the tool.", "--functions", "def get_time() -> str:\n    return 'noon'").strip()
