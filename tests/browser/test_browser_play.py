"""The chat with a real model: an answer streams, is stopped and continued, its tokens show their odds, its journey is drawn, and the
copied code runs elsewhere. What the page does by itself is in test_browser_chat.py."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.browser.conftest import KEY, keep, unnamed, until

pytestmark = pytest.mark.model


def ask(page: Any, text: str, **controls: str) -> None:
    page.wait_for_selector("body[data-ready=yes]")
    until(page, "document.getElementById('model').value.startsWith('SmolLM2')")
    if controls and not page.is_visible("#controls"):
        page.click("#settings-open")
    for name, value in controls.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ended(page: Any) -> None:
    until(page, "document.getElementById('status').textContent.startsWith('finished')")


def inspect(page: Any) -> None:
    page.click("#tab-inspect" if page.is_visible("#panel") else "#inspect-open")


def test_an_answer_streams_and_its_instruments_are_one_click_away(open_page: Any) -> None:
    page = open_page("/play")
    ask(page, "What is the capital of France? Answer in one sentence.", temperature="0", max_tokens="40")
    ended(page)
    assert "Paris" in page.inner_text(".message.assistant .text")
    inspect(page)
    page.wait_for_selector("#journey [data-stage=decode]")
    stages = page.eval_on_selector_all("#journey .stage", "all => all.map(stage => stage.dataset.stage)")
    assert stages[0] == "receive" and stages[-1] == "flush" and "prefill" in stages
    assert "capital of France" in page.inner_text("#code") and "curl -N http://127.0.0.1" in page.inner_text("#code")
    page.select_option("#language", "python")
    assert "client.chat.completions.create(" in page.inner_text("#code")
    assert "browser-key" not in page.inner_text("#code")
    page.click(".message.assistant [aria-label^='Show the odds']")
    page.hover(".message.assistant .token >> nth=1")
    assert page.inner_text("#tip").count("%") >= 5
    keep(page, "playground")
    page.focus(".message.assistant .odds")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#token-note").count("%") >= 5
    assert unnamed(page) == [], "a screen reader could not name them"


def test_a_key_that_is_right_no_longer_is_asked_for_by_the_page(open_page: Any) -> None:
    page = open_page("/play")
    page.evaluate("sessionStorage.setItem('octavo-key', 'of-yesterday')")
    page.reload()
    page.fill("#key", KEY)
    page.click("text=Use it")
    ask(page, "Hi", max_tokens="4")
    ended(page)


def copied(page: Any, language: str) -> str:
    if not page.is_visible("#instruments"):
        inspect(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.select_option("#language", language)
    page.click("#copy")
    until(page, "document.getElementById('copy').dataset.copied === 'yes'")
    return str(page.evaluate("navigator.clipboard.readText()"))


def copy_answer(page: Any) -> bool:
    """Copy the last answer as the model wrote it."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".message.last .bar [aria-label='Copy']")
    until(page, "document.querySelector('.message.last .bar [data-copied=yes]') !== null")
    return True


def run(*command: str) -> str:
    environment = {**os.environ, "OCTAVO_API_KEY": KEY}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_what_is_copied_runs_and_answers_alike(open_page: Any) -> None:
    page = open_page("/play")
    page.wait_for_selector("body[data-ready=yes]")
    page.click("#settings-open")
    page.fill("#system", 'You answer in one word: it\'s "short", and ends with a $HOME `sign`.')
    ask(page, "What's the capital of Italy?", temperature="0", max_tokens="12", top_k="5", stop="\n\n")
    ended(page)
    text = page.evaluate("navigator.clipboard.readText()") if copy_answer(page) else ""
    events = [line[6:] for line in run("bash", "-c", copied(page, "curl")).splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert run(sys.executable, "-c", copied(page, "python")) == text + "\n"


def test_a_tool_is_called_and_its_result_is_used(open_page: Any) -> None:
    page = open_page("/play")
    page.wait_for_selector("body[data-ready=yes]")
    page.click("#settings-open")
    page.click("#tools-box summary")
    page.click("#tools-example")
    page.select_option("#tool_choice", "required")
    ask(page, "What is the weather in Rome?", temperature="0", max_tokens="60")
    page.wait_for_selector(".call textarea")
    assert page.inner_text(".call b") == "weather"
    assert set(json.loads(page.inner_text(".call pre"))) == {"city"}
    printed = run(sys.executable, "-c", copied(page, "python"))
    assert "weather" in printed and '"city"' in printed
    page.click("#tab-settings")
    page.select_option("#tool_choice", "none")
    page.fill(".call textarea", "Sunny, 24 degrees.")
    page.click("text=Send results")
    until(page, "document.querySelectorAll('.message.assistant').length === 2")
    ended(page)
    assert page.inner_text(".message.tool .text") == "Sunny, 24 degrees."


def never_ends(page: Any) -> None:
    """Let answers end by their limit alone: where one is stopped depends on the machine, and the model could have ended there."""

    def send(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", send)


def test_an_answer_is_stopped_and_goes_on(open_page: Any) -> None:
    page = open_page("/play")
    never_ends(page)
    ask(page, "Write a very long story.", temperature="0", max_tokens="1500", min_p="0", frequency_penalty="0.5")
    until(page, "(document.querySelector('.message.assistant .text')?.textContent.length ?? 0) > 40")
    page.click("#stop-button")
    until(page, "document.getElementById('status').textContent === 'stopped'")
    before = page.text_content(".message.assistant .text")
    inspect(page)
    until(page, "document.querySelector('#journey .facts')?.textContent.includes('aborted')")
    page.click("#tab-settings")
    page.fill("#max_tokens", "12")
    page.click("text=Continue")
    ended(page)
    after = page.text_content(".message.assistant .text")
    assert after.startswith(before[:30]) and len(after) > len(before)
    # Now its length has cut it off: it can be continued again and is still one answer.
    page.click("text=Continue")
    until(page, f"document.querySelector('.message.assistant .text').textContent.length > {len(after)}")
    ended(page)
    assert page.locator(".message.assistant").count() == 1


def test_an_answer_by_a_schema(open_page: Any) -> None:
    page = open_page("/play")
    page.wait_for_selector("body[data-ready=yes]")
    page.click("#settings-open")
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
    assert page.locator("text=Continue").count() == 0, "its grammar would start again"
