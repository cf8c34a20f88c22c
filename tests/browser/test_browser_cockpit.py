"""The cockpit in a browser, over a real load: its numbers are the metrics', its map shows a prefix being shared, and why requests wait.
Knows nothing of the feed's format."""

import json
import threading
import urllib.request
from typing import Any

import pytest

from tests.browser.conftest import KEY, keep, until
from tests.e2e.servers import Server

pytestmark = pytest.mark.model
WORDS = "You answer at length and never stop before you have told everything. " * 14


def load(server: Server, num: int, max_tokens: int, name: str) -> list[threading.Thread]:
    """So many requests with one system prompt, at once."""

    def one(number: int) -> None:
        messages = [{"role": "system", "content": WORDS}, {"role": "user", "content": f"Tell story number {number}."}]
        body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {KEY}",
            "x-request-id": f"{name}-{number}",
        }
        request = urllib.request.Request(server.base + "/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            assert b"[DONE]" in response.read()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    return threads


def number_of(page: Any, selector: str) -> int:
    """The first number in an element's text."""
    text = page.inner_text(selector).replace(",", "")
    return int("".join(letter if letter.isdigit() else " " for letter in text).split()[0])


def metric(server: Server, name: str) -> float:
    _, text = server.get("/metrics", Authorization=f"Bearer {KEY}")
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(value) for _, value in lines)


def test_a_load_is_shown_as_the_metrics_tell_it(open_page: Any, server: Server) -> None:
    page = open_page("/")
    page.wait_for_selector("#connection[data-state=live]")
    until(page, "document.getElementById('advice').textContent.startsWith('Nothing to do')")
    assert number_of(page, "#count-shared") == 0
    threads = load(server, 20, 160, "shown")
    until(page, "/[1-9]/.test(document.getElementById('count-shared').textContent)")
    until(page, "document.getElementById('advice').textContent.includes('KV pages')")
    assert "--kv-cache-memory-bytes" in page.inner_text("#advice")
    page.hover("#map", position={"x": 5, "y": 5})
    until(page, "document.getElementById('tip').textContent.includes('shared by')")
    assert "shown-" in page.inner_text("#tip")
    keep(page, "cockpit-light")
    for thread in threads:
        thread.join()
    until(page, "document.getElementById('advice').textContent.startsWith('Nothing to do')")
    until(page, "document.getElementById('ended').childElementCount === 20")
    assert metric(server, "vllm:request_success_total") == 20
    assert number_of(page, "#batch-told") == metric(server, "vllm:num_requests_running") == 0
    total = number_of(page, "#count-free") + number_of(page, "#count-cached")
    used = number_of(page, "[data-stage=pages] .more")
    assert used == 0 and f"of {total:,} in use" in page.inner_text("[data-stage=pages] .more")
    assert metric(server, "vllm:num_preemptions_total") > 0, "the load was meant to run out of pages"
    show_preempted(page, server)


def show_preempted(page: Any, server: Server) -> None:
    """The waterfall of a request that was preempted: its stages' times sum to the whole."""
    _, text = server.get("/v1/requests?limit=100", Authorization=f"Bearer {KEY}")
    journey = max(json.loads(text)["data"], key=lambda journey: journey["preemptions"])
    assert journey["preemptions"] > 0
    page.click(f"#ended button[title={journey['id']}]")
    page.wait_for_selector("#journey [data-stage=preempted]")
    spent = page.eval_on_selector_all("#journey .stage", "stages => stages.map(stage => Number(stage.dataset.seconds))")
    assert sum(spent) == pytest.approx(journey["seconds"], rel=0.02)
    keep(page, "journey-of-a-preempted-request")
    page.click("#journey-close")


def test_it_is_usable_in_the_dark_and_by_keyboard(open_page: Any, server: Server) -> None:
    page = open_page("/", "dark")
    page.wait_for_selector("#connection[data-state=live]")
    threads = load(server, 4, 60, "dark")
    until(page, "/[1-9]/.test(document.getElementById('count-shared').textContent)")
    keep(page, "cockpit-dark")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#page-told").startswith("page 1")
    for thread in threads:
        thread.join()
    unnamed = page.eval_on_selector_all(
        "button, input, canvas, select, textarea, dialog",
        "all => all.filter(one => !(one.textContent.trim() || one.ariaLabel || one.labels?.length || one.getAttribute('aria-labelledby'))).map(one => one.outerHTML)",
    )
    assert unnamed == [], "a screen reader could not name them"
