"""A chat template in a request: it replaces the model's, runs in the same sandbox, and is refused in one line."""

import pytest

from octavo.errors import InvalidRequest
from octavo.text import Text
from octavo.text.chat.template import MAX_REQUEST_SOURCE, ChatTemplate, request_template
from tests.doubles import byte_text

HI = [{"role": "user", "content": "hi <|end|>"}]


def with_template(source: str) -> Text:
    text = byte_text()
    return text.with_template(request_template(source, text.template_variables))


def test_it_replaces_the_models_own() -> None:
    text = byte_text()
    own = with_template("{{ messages[0].content }}|{{ eos_token }}")
    assert own.render_chat(HI) == "hi <|end|>|<|end|>"
    assert own.encode_chat(HI)[:10] == [*b"hi <|end|>"], "what a person writes is no control token here either"
    assert own.encode_chat(HI)[10:] == [*b"|", 256]
    assert text.render_chat(HI) != own.render_chat(HI)


def test_its_code_renders_without_its_source() -> None:
    text = byte_text()
    compiled = request_template("{{ messages[0].content }}|{{ eos_token }}{{ mood }}", text.template_variables)
    loaded = ChatTemplate.of_code(compiled.code, text.template_variables)
    assert loaded.render(HI, mood="!") == compiled.render(HI, mood="!") == "hi <|end|>|<|end|>!"
    assert {"messages", "eos_token", "mood"} <= compiled.names


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "not valid Jinja in line 1"),
        ("a\n{{ b", "not valid Jinja in line 2"),
        ("{{ 'a' * 10 ** 12 }}", "is not allowed"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ (" * 3000 + "1" + ") }}" * 3000, "not valid Jinja"),
        ("x" * (MAX_REQUEST_SOURCE + 1), f"at most {MAX_REQUEST_SOURCE}"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "2 seconds"),
    ],
)
def test_what_it_may_not_do(source: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_template(source).encode_chat(HI)
    assert words in caught.value.message and "\n" not in caught.value.message
    assert caught.value.param in ("chat_template", "messages")
