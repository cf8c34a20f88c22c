"""The cockpit in a real browser, over a real server under load: what it shows is what the metrics say."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
PREFIX = "It was a bright cold day in April, and the clocks were striking thirteen. " * 6


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 900}, color_scheme="dark")
        page.faults = []
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.faults.append(message.text))
        page.on("request", lambda asked: asked.url.startswith(server.base) or page.faults.append(asked.url))
        page.goto(server.base + "/")
        yield page
        browser.close()


def screenshot(page: Any, name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("OCTAVO_ARTEFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png", full_page=True)


def until(page: Any, condition: str) -> None:
    """Asked from outside: within the page, its own policy forbids what is made of text."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {condition}; {page.locator('body').inner_text()[:2000]}; {page.faults}")


def number(page: Any, place: str) -> int:
    return int(page.locator(place).inner_text())


def start(server: Server, name: str, prompt: str, num_tokens: int) -> threading.Thread:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    ask = threading.Thread(
        target=server.post, args=("/v1/completions", body), kwargs={"X-Request-Id": name}, daemon=True
    )
    ask.start()
    return ask


def test_a_running_load_its_pages_and_a_journey(page: Any, server: Server, tmp_path: Path) -> None:
    until(page, "document.getElementById('status').textContent === 'live'")
    assert page.locator("#line li").count() == 8 and number(page, "#num-shared") == 0
    first = start(server, "first", PREFIX + "Then", 400)
    until(page, "document.querySelector('#batch td:nth-child(2)')?.textContent === 'first'")
    second = start(server, "second", PREFIX + "And so", 300)
    until(
        page,
        "document.querySelectorAll('#batch tr').length === 2 && +document.getElementById('num-shared').textContent > 3",
    )
    assert server.in_use()[0] == 2 == page.locator("#batch tr").count()
    shared = number(page, "#num-shared")
    assert shared >= len(PREFIX.split()) // 16  # at least a token for each word, sixteen in a page
    # Walk to a shared page by the keyboard: its owners are named.
    page.locator("#pages").focus()
    page.keyboard.press("Home")
    for _ in range(400):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(5)
        if "is shared by" in page.locator("#page-told").inner_text():
            break
    until(
        page,
        "/is shared by .*first.*second|is shared by .*second.*first/.test(document.getElementById('page-told').textContent)",
    )
    screenshot(page, "cockpit-dark", tmp_path)
    for ask in (first, second):
        ask.join(120)
    until(page, "document.querySelectorAll('#ended tr').length >= 2 && !document.querySelectorAll('#batch tr').length")
    assert number(page, "#num-shared") == 0 and number(page, "#num-cached") > 0
    page.get_by_role("button", name="first").click()
    page.wait_for_selector("#journey .lane")
    journey = json.loads(server.get("/v1/requests/first")[1])
    assert page.locator("#journey .lane").count() == len(journey["stages"])
    assert (
        "400 computed" not in page.locator("#journey").inner_text() and "steps" in page.locator("#journey").inner_text()
    )
    page.emulate_media(color_scheme="light")
    screenshot(page, "cockpit-light", tmp_path)
    assert page.faults == []


def test_the_playground_streams_stops_resumes_and_shows_the_journey(page: Any, server: Server, tmp_path: Path) -> None:
    page.goto(server.base + "/play")
    until(page, "document.getElementById('model').textContent !== ''")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "120")
    page.fill("#message", "Tell me a long story about a lighthouse.")
    page.click("#send")
    until(page, "document.querySelectorAll('.token').length >= 5")
    page.click("#stop")
    until(page, "!document.getElementById('resume').disabled")
    stopped = page.locator(".turn").last.inner_text()
    page.click("#resume")
    page.wait_for_selector("#journey .lane", timeout=60_000)
    whole = page.locator(".turn").last.inner_text()
    assert whole.startswith(stopped) and len(whole) > len(stopped)
    body = {
        "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        "temperature": 0,
        "max_tokens": 120,
    }
    said = json.loads(server.post("/v1/chat/completions", body)[1])["choices"][0]["message"]["content"]
    assert whole.removeprefix("assistant").strip() == said.strip()
    page.locator(".token").nth(3).hover()
    until(page, "/% likely/.test(document.getElementById('probability').textContent)")
    page.click("#python")
    assert "max_tokens=120" in page.locator("#code").inner_text()
    page.click("#curl")
    assert '"temperature": 0' in page.locator("#code").inner_text()
    assert "decode" in page.locator("#journey").inner_text()
    screenshot(page, "playground-light", tmp_path)
    assert page.faults == []
