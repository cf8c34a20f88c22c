"""Chat templates: rendered as transformers renders them, refused with a clear message, and confined to their sandbox."""

from typing import Any

import pytest

from octavo.errors import ConfigError, InvalidRequest, Unsupported
from octavo.text.chat.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": "<&>'\""}}}]


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **variables)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}\n  {% for m in messages %}\n{{ m.role }}: {{ m.content | trim }}\n  {% endfor %}\n",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ tools | tojson }} {{ tools | tojson(indent=2) }} {{ messages | tojson(ensure_ascii=true) }}",
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ missing }}{{ documents is none }}",
        "{%- if tools is none -%}none{%- else -%}{{ tools | length }}{%- endif -%}",
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_as_transformers_renders(source: str, tools: Any) -> None:
    from transformers import PreTrainedTokenizerFast
    from vocabularies import byte_level

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>")
    messages = [{"role": "system", "content": " bé <&> 'kind' "}, *HI]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert render(source, messages, tools=tools) == expected


def test_the_date_is_todays() -> None:
    import datetime

    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + offset) for offset in (-1, 0)}


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as raised:
        ChatTemplate({}, {}).render(HI)
    assert raised.value.param == "messages"


def test_a_template_with_a_syntax_error_is_a_start_up_mistake() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja") as raised:
        ChatTemplate({"default": "{% for %}"}, {})
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_raises_is_about_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_text_parts_are_joined_and_nothing_becomes_empty() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"


def test_other_fields_of_a_message_reach_the_template() -> None:
    assert render("{{ messages[0].name }}", [{"role": "user", "content": "", "name": "Ada"}]) == "Ada"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, Unsupported),
        ({"role": "user", "content": [{"type": "text"}]}, InvalidRequest),
        ({"role": "user", "content": [7]}, InvalidRequest),
        ({"role": "user", "content": 7}, InvalidRequest),
        ({"content": "no role"}, InvalidRequest),
        ("text", InvalidRequest),
    ],
)
def test_malformed_messages_are_refused_by_place(message: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"messages\[1\]"):
        render(CHATML, [*HI, message])


def test_variables_of_the_caller_are_given_but_replace_no_message() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert (both.render(HI), both.render(HI, tools=TOOLS)) == ("plain", "tools")
