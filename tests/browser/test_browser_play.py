"""The playground in a browser: an answer streams, is stopped and resumed, its tokens tell their odds, and its journey is drawn.
Knows nothing of how answers are made."""

from typing import Any

import pytest

from tests.browser.conftest import keep, until

pytestmark = pytest.mark.model


def ask(page: Any, text: str, **controls: str) -> None:
    until(page, "document.getElementById('model').textContent.startsWith('SmolLM2')")
    for name, value in controls.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ended(page: Any) -> None:
    until(page, "document.getElementById('status').textContent.startsWith('ended by')")


def test_an_answer_streams_and_tells_of_itself(open_page: Any) -> None:
    page = open_page("/play")
    ask(page, "What is the capital of France? Answer in one sentence.", temperature="0", max_tokens="40")
    ended(page)
    assert "Paris" in page.inner_text(".message.assistant .text")
    page.hover(".message.assistant .token >> nth=1")
    assert page.inner_text("#tip").count("%") >= 5
    page.wait_for_selector("#journey [data-stage=decode]")
    stages = page.eval_on_selector_all("#journey .stage", "all => all.map(stage => stage.dataset.stage)")
    assert stages[0] == "receive" and stages[-1] == "flush" and "prefill" in stages
    assert "capital of France" in page.inner_text("#code") and "curl -N http://127.0.0.1" in page.inner_text("#code")
    page.select_option("#language", "python")
    assert "client.chat.completions.create(" in page.inner_text("#code")
    assert "browser-key" not in page.inner_text("#code")
    keep(page, "playground")


def test_an_answer_is_stopped_and_goes_on(open_page: Any) -> None:
    page = open_page("/play")
    ask(page, "Write a very long story.", temperature="0", max_tokens="1500", min_p="0", frequency_penalty="0.5")
    until(page, "document.querySelectorAll('.token').length > 10")
    page.click("#stop-button")
    until(page, "document.getElementById('status').textContent === 'stopped'")
    before = page.inner_text(".message.assistant .text")
    until(page, "document.querySelector('#journey .facts')?.textContent.includes('aborted')")
    page.fill("#max_tokens", "12")
    page.click("#resume")
    ended(page)
    after = page.inner_text(".message.assistant .text")
    assert after.startswith(before) and len(after) > len(before)


def test_an_answer_by_a_schema_and_a_mistake_in_one(open_page: Any) -> None:
    page = open_page("/play")
    page.select_option("#format", "json_schema")
    page.fill(
        "#schema",
        '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": false}',
    )
    ask(page, "Which city?", temperature="0", max_tokens="60")
    ended(page)
    assert page.inner_text(".message.assistant .text").replace(" ", "").replace("\n", "") in (
        '{"city":"Paris"}',
        '{"city":"Rome"}',
    )
    page.fill("#schema", "{")
    ask(page, "And now?")
    assert "the schema is not JSON" in page.inner_text("#status")
