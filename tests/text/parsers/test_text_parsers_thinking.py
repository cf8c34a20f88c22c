"""Reasoning in every format, alone and before tool calls: the same for any cut into pieces.
Needs no model: answers are written here as the formats' models write them."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.text.parsers import (
    AnswerParser,
    CollectedEvents,
    Event,
    find_reasoning_format,
    reasoning_format,
    reasoning_formats,
    tool_format,
)

NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def collect(events: Iterable[Event]) -> CollectedEvents:
    answer = CollectedEvents()
    answer.collect(events)
    return answer


def parse(name: str, pieces: Iterable[str], prompt: str = "") -> CollectedEvents:
    parser = AnswerParser(tool_format("hermes"), {"now": {}}, reasoning_format(name), prompt, new_id=lambda: "id")
    return collect([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nHm.\n\nYes.\n</think>\n\nHello", "Hm.\n\nYes.", "Hello"),
        ("qwen3", "", "<think>\n\n</think>\n\nHello", "", "Hello"),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nHello", "Hm.", "Hello"),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hello", "", "Hello"),
        ("qwen3", "", "\n Hello", "", "\n Hello"),
        ("qwen3", "", "The mark <think> opens, </think> closes.", "", "The mark <think> opens, </think> closes."),
        ("qwen3", "", "<think>a</think>b</think>c", "a", "b</think>c"),
        ("qwen3", "", "<think>cut o</thin", "cut o</thin", ""),
        ("qwen3", "", "<thin", "", "<thin"),
        ("qwen3", "", "", "", ""),
        ("deepseek_r1", "<｜Assistant｜>", "Hm.\n</think>\n\nHello", "Hm.", "Hello"),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "<think>\nHm.</think>Hello", "Hm.", "Hello"),
        ("deepseek_r1", "<｜Assistant｜></think>", "Hello", "", "Hello"),
        ("mistral", "", "[THINK]Hm.[/THINK]Hello", "Hm.", "Hello"),
    ],
)
def test_cases(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    answer = parse(name, [text], prompt)
    assert (answer.reasoning, answer.content, answer.calls) == (reasoning, content, [])


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    answer = parse("qwen3", [f"<think>I could say {NOW}</think>\n\n{NOW}"])
    assert answer.reasoning == f"I could say {NOW}" and answer.content == ""
    assert [call.name for call in answer.calls] == ["now"]


def test_the_marks_that_may_be_special_tokens_are_named() -> None:
    parser = AnswerParser(tool_format("mistral"), {}, reasoning_format("mistral"))
    assert parser.marks == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
    assert AnswerParser().marks == ()


FRAGMENTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "\r\n", "<", "</", "think", "Hello", "é", NOW]


@pytest.mark.parametrize("name", sorted(reasoning_formats()))
@pytest.mark.parametrize("is_open", [False, True])
def test_any_text_gives_the_same_in_any_pieces(name: str, is_open: bool) -> None:
    prompt = reasoning_format(name).opening + "\n" if is_open else ""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), st.lists(st.integers(0, 60), max_size=10))
    def check(text: str, cuts: list[int]) -> None:
        once = parse(name, [text], prompt)
        at = sorted(min(cut, len(text)) for cut in cuts)
        assert parse(name, [text[a:b] for a, b in pairwise([0, *at, len(text)])], prompt) == once
        assert parse(name, text, prompt) == once
        if not once.calls:  # only the marks, and line breaks and spaces beside them, are removed
            marks = (reasoning_format(name).opening, reasoning_format(name).closing)
            left = len(once.reasoning.strip()) + len(once.content.strip())
            assert len("".join(text.split())) - sum(map(len, marks)) <= left
            assert once.reasoning + once.content in text.replace(marks[1], "") or once.reasoning in text

    check()


def test_text_is_said_as_soon_as_no_mark_can_claim_it() -> None:
    parser = AnswerParser(think_format=reasoning_format("qwen3"))
    pieces = ["<thi", "nk>", "\n", "a", "\n", "b </th", "e", "\n</think>", "\n\n", "c", "\n"]
    answers = [collect(parser.feed(piece)) for piece in pieces]
    assert [answer.reasoning for answer in answers] == ["", "", "", "a", "", "\nb ", "</the", "", "", "", ""]
    assert [answer.content for answer in answers] == [""] * 9 + ["c", "\n"]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "qwen3"),
        ("{{ '<｜Assistant｜><think>\\n' }} {{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("{{ '[THINK]' + chunk.thinking + '[/THINK]' }}", "mistral"),
        ("{{ content }}", None),
    ],
)
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    assert find_reasoning_format(template) == name


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"^--reasoning-parser 'r1' is not known; .*deepseek_r1, mistral, qwen3$"):
        reasoning_format("r1")
