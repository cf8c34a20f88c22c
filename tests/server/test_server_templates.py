"""chat_template: a request's own, where the server was started so; the same sandbox, and the other streams go on."""

from typing import Any

import pytest

from tests.doubles import ScriptedEngine
from tests.server.conftest import Serve, error_of

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi <|turn|>"}]}
OWN = "{{ messages[0].content }}{{ eos_token }}{% if add_generation_prompt %}{{ mood }}{% endif %}"


async def test_it_makes_the_prompt(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine, trust_request_chat_template=True)
    body = {**BODY, "chat_template": OWN, "chat_template_kwargs": {"mood": "!"}}
    assert (await client.post(URL, json=body)).status_code == 200
    assert engine.requests[-1].prompt_ids == [*b"hi <|turn|>", 256, *b"!"]
    tokens = (await client.post("/tokenize", json={**BODY, "chat_template": OWN})).json()["tokens"]
    assert tokens == engine.requests[-1].prompt_ids[:-1]
    await client.post(URL, json=BODY)
    assert engine.requests[-1].prompt_ids != tokens, "the model's own is as it was"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "chat_template is not valid Jinja in line 1"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 seconds"),
        ("{{ 'a' * 10 ** 10 }}", "characters of text"),
        ("a" * 40_000, "at most 32768"),
        (["a"], "must be a string"),
        ("{{ messages[0].content * 100 }}", "context holds 256"),
    ],
)
async def test_what_is_refused(serve: Serve, source: object, words: str) -> None:
    client = serve(trust_request_chat_template=True)
    error = error_of(await client.post(URL, json={**BODY, "chat_template": source}), 400)
    assert words in error["message"] and "\n" not in error["message"]
    assert error["param"] in ("chat_template", "messages")


@pytest.mark.parametrize("path", [URL, "/tokenize"])
async def test_without_the_flag(serve: Serve, path: str) -> None:
    error = error_of(await serve().post(path, json={**BODY, "chat_template": OWN}), 400)
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    assert error["code"] == "unsupported_parameter"
    assert (await serve().post(path, json={**BODY, "chat_template": None})).status_code == 200


async def test_a_prompt_has_no_template(serve: Serve) -> None:
    client = serve(trust_request_chat_template=True)
    error = error_of(await client.post("/tokenize", json={"prompt": "a", "chat_template": OWN}), 400)
    assert error["param"] == "chat_template"
