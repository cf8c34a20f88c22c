"""Schemathesis against a real server on a tiny model: this server's own OpenAPI document, and any other that it should fit.
`make fuzz-api` runs it; schemathesis has its own virtual environment.

It finds answers with a status of 500 or more, statuses and content types that the document does not name, and bodies, including
those of errors, that do not match the document."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.doubles import VOCAB_SIZE, write_byte_tokenizer
from tests.e2e.servers import Server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""  # 504: only if the request's own deadline_ms has passed
FOREIGN_CHECKS = ("not_a_server_error", "response_schema_conformance")
"""Checks for another server's document, which does not describe our errors."""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 256,
}
NAME = "tiny"


@contextmanager
def tiny_server(*flags: str) -> Iterator[Server]:
    """A server with random weights, a vocabulary of bytes and a context of 96 tokens: an answer takes milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        write_byte_tokenizer(Path(folder))
        sizes = ("--max-model-len", "96", "--kv-cache-memory-bytes", "8M", "--load-format", "dummy")
        with Server(folder, *sizes, "--served-model-name", NAME, *flags) as server:
            yield server


def with_our_model(document: dict[str, Any]) -> dict[str, Any]:
    """Adapt another server's document to ours. Requests name our model: any other name is a 404 and would hide the other checks.
    An `embedding` may be a string. Nothing else is changed."""

    def walk(value: Any) -> Any:
        match value:
            case dict():
                changed = {key: walk(inner) for key, inner in value.items()}
                properties = changed.get("properties")
                if not isinstance(properties, dict):
                    return changed
                if "model" in properties and {"messages", "prompt", "input"} & properties.keys():
                    properties["model"] = {"enum": [NAME]}
                if {"embedding", "index"} <= properties.keys():
                    # OpenAI's servers write base64 as a string, and its clients read it, but its document omits that.
                    properties["embedding"] = {"anyOf": [properties["embedding"], {"type": "string"}]}
                return changed
            case list():
                return [walk(inner) for inner in value]
        return value

    return walk(document)


def endless(document: dict[str, Any]) -> list[str]:
    """Paths of event streams that never end: a test that waits for their end would hang."""
    gets = {path: methods["get"] for path, methods in document["paths"].items() if "get" in methods and "{" not in path}
    return [path for path, get in gets.items() if "text/event-stream" in get["responses"]["200"].get("content", {})]


def fuzz(command: str, path: Path, base: str, checks: tuple[str, ...], arguments: argparse.Namespace) -> int:
    settings = path.with_suffix(".toml")
    settings.write_text(SETTINGS)
    left_out = [part for feed in endless(json.loads(path.read_text())) for part in ("--exclude-path", feed)]
    return subprocess.call(
        [
            command, "--config-file", str(settings), "run", str(path), *left_out, "--url", base, "--checks", ",".join(checks),
            "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(arguments.max_examples),
            "--seed", str(arguments.seed), "--workers", str(arguments.workers), "--request-timeout", "60",
            "--continue-on-failure", "--suppress-health-check", "all", "--output-truncate", "true",
        ]
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemathesis", default="schemathesis", help="the schemathesis command")
    parser.add_argument(
        "--document", action="append", default=[], help="another OpenAPI document; its paths are below /v1"
    )
    parser.add_argument("--max-examples", type=int, default=300, help="examples per operation in the fuzzing phase")
    parser.add_argument("--seed", type=int, default=1)
    # Two would be faster, but Python 3.11's ast.parse, which hypothesis uses to describe lambdas, fails beside other threads.
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--skip-own", action="store_true")
    arguments = parser.parse_args()
    codes = []
    with tiny_server() as server, tempfile.TemporaryDirectory() as folder:
        documents = [] if arguments.skip_own else [(server.get("/openapi.json")[1], server.base, CHECKS)]
        for other in arguments.document:
            ours = with_our_model(json.loads(Path(other).read_text()))
            documents.append((json.dumps(ours), server.base + "/v1", FOREIGN_CHECKS))
        for number, (text, base, checks) in enumerate(documents):
            path = Path(folder) / f"{number}.json"
            path.write_text(text)
            codes.append(fuzz(arguments.schemathesis, path, base, checks, arguments))
        status, text = server.get("/health")
        assert status == 200, text
        state = server.wait_until_idle()
    print(f"still running, waiting, pages in use: {state}; warnings in the server's log:")
    print("\n".join(sorted({line for line in server.lines if "WARNING" in line or "ERROR" in line})[:20]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
