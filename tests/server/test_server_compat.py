"""/v1/compat says what requests meet: each claim is tried on the endpoint it is about."""

from typing import Any

import httpx
import pytest

from tests.doubles import REPORT, ScriptedEngine
from tests.server.conftest import Serve, error_of

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}
STRANGE = [["value"]]  # no field that is honoured or only labels takes it


@pytest.mark.parametrize("strict", [False, True])
async def test_what_it_says_is_what_happens(serve: Serve, strict: bool) -> None:
    client = serve(ScriptedEngine(report=REPORT), strict_fields=strict)
    compat = (await client.get("/v1/compat")).json()
    assert compat["strict"] is strict
    dialects = {dialect["path"]: dialect["fields"] for dialect in compat["dialects"]}
    assert dialects.keys() - BODIES.keys() == {"/v1/embeddings", "/v1/batches"}
    for path, body in BODIES.items():
        assert {field["name"] for field in dialects[path] if field["status"] == "honoured"} >= body.keys()
        for field in dialects[path]:
            name = field["name"]
            response = await client.post(path, json={**body, name: STRANGE})
            match field["status"]:
                case "refused":
                    check_error(path, response, name, "unsupported_parameter")
                    assert field["why"]
                    for value in field.get("taken_values", []):
                        assert (await client.post(path, json={**body, name: value})).status_code == 200, (name, value)
                case "accepted_without_effect" if response.status_code == 200:
                    assert response.json().get("ignored_fields", [name]) == [name] and field["why"], name
                case "accepted_without_effect":  # a label, whose type is checked
                    check_error(path, response, name, "invalid_value")
                case "honoured" if "." not in name:
                    check_error(path, response, name, "invalid_value")


def check_error(path: str, response: httpx.Response, name: str, code: str) -> None:
    if path.startswith("/v1/messages"):  # Anthropic's shape has words alone
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error" and name in error["message"], (
            error
        )
    else:
        error = error_of(response, 400)
        assert error["code"] == code and error["param"].startswith(name), (name, error)


async def test_the_names_that_users_bring_are_all_there(serve: Serve) -> None:
    trusting = (await serve(trust_request_chat_template=True).get("/v1/compat")).json()
    compat = (await serve().get("/v1/compat")).json()
    for told, status in ((compat, "refused"), (trusting, "honoured")):
        (chat,) = (dialect for dialect in told["dialects"] if dialect["name"] == "chat")
        assert [field["status"] for field in chat["fields"] if field["name"] == "chat_template"] == [status]
    fields = {d["name"]: {f["name"]: f["status"] for f in d["fields"]} for d in compat["dialects"]}
    assert fields["chat"]["guided_json"] == "honoured", "vLLM takes it and does nothing"
    assert fields["chat"]["user"] == fields["completions"]["service_tier"] == "accepted_without_effect"
    assert fields["chat"]["stream_options.continuous_usage_stats"] == "honoured"
    for name in (
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "logprobs",
    ):
        assert fields["chat"][name] == fields["completions"][name] == "honoured"
    for name in ("use_beam_search", "length_penalty", "best_of", "priority", "repetition_detection.min_count"):
        assert fields["chat"][name] == fields["completions"][name] == "honoured"
    assert fields["chat"]["top_logprobs"] == fields["completions"]["echo"] == "honoured"
    assert fields["embeddings"]["dimensions"] == fields["tokenize"]["return_token_strs"] == "honoured"
    assert compat["unknown_fields"] == "named back in ignored_fields"
