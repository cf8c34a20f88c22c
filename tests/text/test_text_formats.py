"""The formats that a chat template implies, support for templates without tools, and marks that are special tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.errors import ConfigError
from octavo.messages import SamplingParams
from octavo.text import load_text
from octavo.text.chat.template import ChatTemplate
from octavo.text.chat.tool_prompt import spell_out
from octavo.text.formats import check_parsers, choose_formats
from octavo.text.parsers import reasoning_format, tool_format
from tests.doubles import write_byte_tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HERMES = "{% if tools %}{{ tools }}<tool_call>{% endif %}" + PLAIN
STRANGE = "{% if tools %}{{ tools }}<|call|>{% endif %}" + PLAIN
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "it's <b>"}}}


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, {})


def test_the_template_says_which_formats_answers_have() -> None:
    hermes = choose_formats(template(HERMES + "</think>"))
    assert hermes.tools is tool_format("hermes") and hermes.template_takes_tools
    assert hermes.thinking is reasoning_format("qwen3")
    assert choose_formats(template(PLAIN, tool_use=HERMES)).template_takes_tools


@pytest.mark.parametrize("source", [PLAIN, STRANGE])
def test_without_a_known_format_tools_are_described_in_words(source: str) -> None:
    formats = choose_formats(template(source))
    assert formats.tools is tool_format("hermes") and not formats.template_takes_tools and formats.thinking is None


def test_flags_override_the_template() -> None:
    formats = choose_formats(template(HERMES), "mistral", "deepseek_r1")
    assert (formats.tools, formats.thinking) == (tool_format("mistral"), reasoning_format("deepseek_r1"))
    formats = choose_formats(template(HERMES + "</think>"), "none", "none")
    assert (formats.tools, formats.thinking, formats.template_takes_tools) == (None, None, True)
    with pytest.raises(ConfigError, match="--chat-template FILE"):
        choose_formats(template(PLAIN), "mistral")
    with pytest.raises(ConfigError, match="--reasoning-parser 'deep' is not known"):
        check_parsers("auto", "deep")


@pytest.mark.parametrize(
    "written", ["{{ a }}", "{{ '' ~ a }}", "{{ '' + a }}", "{{ a + '' }}", "{{ a | tojson }}", "{{ a | string }}"]
)
def test_arguments_are_json_however_a_template_writes_them(written: str) -> None:
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + written
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert json.loads(template(source).render([message])) == {"at": "it's <b>"}


def test_templates_may_also_look_into_arguments() -> None:
    source = "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert template(source).render([message]) == "at=it's <b>"


def test_tools_in_words_join_the_system_message() -> None:
    rewritten = spell_out(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], TOOLS, template(PLAIN)
    )
    assert [message["role"] for message in rewritten] == ["system", "user"]
    assert rewritten[0]["content"].startswith("Be brief.\n\n") and '"name": "look"' in rewritten[0]["content"]
    (first, second) = spell_out([{"role": "user", "content": "Hi"}], TOOLS, template(PLAIN))
    assert (first["role"], second) == ("system", {"role": "user", "content": "Hi"})


def test_tools_in_words_join_the_users_message_where_there_is_no_system() -> None:
    refuses = template("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN)
    (only,) = spell_out([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], TOOLS, refuses)
    assert only["role"] == "user" and only["content"].endswith("\n\nHi")


def test_calls_and_results_become_text_in_turns_that_alternate() -> None:
    rewritten = spell_out(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "one", "tool_call_id": "c1"},
            {"role": "tool", "content": [{"type": "text", "text": "two"}], "tool_call_id": "c1"},
            {"role": "assistant", "content": "Done."},
        ],
        [],
        template(PLAIN),
    )
    assert [message["role"] for message in rewritten] == ["user", "assistant", "user", "assistant"]
    assert (
        rewritten[1]["content"].startswith("Well.\n\n<tool_call>\n{")
        and rewritten[1]["content"].count("</tool_call>") == 2
    )
    assert rewritten[2]["content"].count("<tool_response>") == 2 and "two" in rewritten[2]["content"]


def test_marks_are_kept_though_they_are_special_tokens(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    text = load_text(tmp_path)
    ids = text.encode("a<|turn|>b<|end|>c")
    assert len(ids) == 5
    for marks, shown in (((), "abc"), (("<|turn|>", "<|nothing|>"), "a<|turn|>bc")):
        stream = text.stream(SamplingParams(), (), marks)
        assert "".join(stream.push([token_id]).text for token_id in ids) == shown


def test_marks_are_kept_by_decoders_that_are_no_table(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "##b": 2}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CALL]", "[END]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = load_text(tmp_path).stream(SamplingParams(), (), ("[CALL]",))
    assert "".join(stream.push([token_id]).text for token_id in (1, 2, 3, 4, 1)) == "ab [CALL] a"
