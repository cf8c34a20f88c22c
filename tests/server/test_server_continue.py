"""continue_final_message: the last message goes on where its text ends, whatever the template writes behind it."""

from typing import Any

import pytest

from tests.doubles import TURN, ScriptedEngine, byte_text
from tests.server.conftest import Serve, error_of

BEGUN = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one, two, <|end|> "}]


async def test_the_prompt_ends_with_the_messages_text(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine)
    await client.post("/v1/chat/completions", json={"messages": BEGUN, "continue_final_message": True})
    ids = engine.requests[0].prompt_ids
    text = b"one, two, <|end|> "  # as it is: no control token, nothing trimmed
    assert ids[-len(text) - 12 :] == [TURN, *b"assistant: ", *text]
    counted = (await client.post("/tokenize", json={"messages": BEGUN, "continue_final_message": True})).json()
    assert counted["tokens"] == ids


async def test_a_template_that_trims_and_closes(serve: Serve) -> None:
    engine = ScriptedEngine()
    client = serve(engine, byte_text("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}{{ eos_token }}"))
    await client.post("/v1/chat/completions", json={"messages": BEGUN, "continue_final_message": True})
    assert bytes(engine.requests[0].prompt_ids) == b"[count][one, two, <|end|> "


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        (BEGUN[:1], {}, "of the assistant"),
        (BEGUN, {"add_generation_prompt": True}, "exclude each other"),
        (
            [*BEGUN[:1], {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
            {},
            "without tool calls",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_continued_is_refused(
    serve: Serve, messages: list[Any], fields: dict[str, Any], words: str
) -> None:
    body = {"messages": messages, "continue_final_message": True, **fields}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(await serve().post(path, json=body), 400)
        assert error["param"] == "continue_final_message" and words in error["message"]


async def test_a_template_that_does_not_show_it(serve: Serve) -> None:
    client = serve(text=byte_text("{{ messages[0].content }}"))
    error = error_of(
        await client.post("/v1/chat/completions", json={"messages": BEGUN, "continue_final_message": True}), 400
    )
    assert "cannot be continued" in error["message"]
