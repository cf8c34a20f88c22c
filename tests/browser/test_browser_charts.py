"""The cockpit over the real engine loop without a model: charts with axes and values under the pointer, no spike after a rest, an idle
server that explains itself, a phone; and the page of an encoder."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import PATIENCE_S, keep, unnamed, until
from tests.browser.scripted import LoopServer, ScriptedServer


@pytest.fixture(scope="module")
def server() -> Iterator[LoopServer]:
    server = LoopServer(limits={"max_num_seqs": 4})
    yield server
    server.stop()


def load(server: LoopServer, num: int, max_tokens: int) -> list[threading.Thread]:
    def one(number: int) -> None:
        body = {"prompt": f"the same beginning {number}", "max_tokens": max_tokens, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "x-request-id": f"a-request-with-a-long-name-{number}"}
        request = urllib.request.Request(server.base + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            response.read()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    return threads


def test_an_idle_server_explains_itself_and_a_rest_makes_no_spike(open_page: Any, server: LoopServer) -> None:
    page = open_page("/")
    page.wait_for_selector("#connection[data-state=live]")
    until(page, "document.getElementById('advice').textContent.includes('byte-model is loaded and ready')")
    assert "No request has come since" in page.inner_text("#advice") and page.is_visible("text=Try it")
    keep(page, "cockpit-idle")
    for thread in load(server, 6, 100):
        thread.join()
    until(page, "document.getElementById('advice').textContent.includes('The last request')")
    page.evaluate("() => new Promise(go => setTimeout(go, 2500))")  # a rest
    for thread in load(server, 2, 20):
        thread.join()
    points = json.loads(urllib.request.urlopen(server.base + "/v1/live/history").read())["points"]
    assert sum(point[4] for point in points) == pytest.approx(640, abs=0.5)
    rates = [point[4] for point in points]
    after = rates[
        max(at for at, rate in enumerate(rates) if rate == 0 or points[at][0] - points[max(0, at - 1)][0] > 1) :
    ]
    assert sum(after) < 60, "the tokens from before the rest are not in the second after it"
    assert unnamed(page) == [], "a screen reader could not name them"


def test_axes_values_under_the_pointer_and_a_longer_past(open_page: Any, server: LoopServer) -> None:
    page = open_page("/")
    page.wait_for_selector("#connection[data-state=live]")
    for thread in load(server, 6, 100):
        thread.join()
    until(page, "document.getElementById('chart-rate').getAttribute('aria-label').match(/at most [1-9]/) !== null")
    box = page.locator("#chart-rate").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 40)
    words = page.inner_text("#tip")
    for name in (
        "tokens per second",
        "time to first token",
        "time between tokens",
        "KV pages in use",
        "waiting, at most",
    ):
        assert name in words
    page.mouse.move(box["x"] + 10, box["y"] + 40)
    assert not page.is_visible("#tip"), "the axis has no values"
    page.focus("#chart-ttft")
    page.keyboard.press("ArrowLeft")
    assert "time to first token" in page.text_content("#chart-note")
    for name, span in (("24 h", 86400), ("1 h", 3600), ("5 min", 300)):
        with page.expect_response(lambda response, span=span: f"seconds={span}" in response.url):
            page.click(f"#spans >> text='{name}'")
        until(page, f"document.querySelector('#spans [aria-pressed=true]').textContent === '{name}'")
    page.click("#spans >> text='1 h'")
    page.reload()
    page.wait_for_selector("#connection[data-state=live]")
    assert page.inner_text("#spans [aria-pressed=true]") == "1 h", "the choice is kept"


def test_under_load_on_a_phone_and_on_a_laptop_nothing_is_clipped(open_page: Any, server: LoopServer) -> None:
    threads = load(server, 12, 180)
    for is_phone in (False, True):
        page = open_page("/", is_phone=is_phone, scheme="dark" if is_phone else "light")
        page.wait_for_selector("#connection[data-state=live]")
        until(page, "document.querySelector('#ended tr, #queue tr') !== null")
        page.wait_for_timeout(400)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page does not scroll sideways"
        clipped = page.evaluate(
            """() => [...document.querySelectorAll(".line *, th, td:not(.id), .legend span, #advice, #batch-note")]
            .filter((node) => node.offsetParent && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflow !== "visible")
            .map((node) => node.textContent)"""
        )
        assert clipped == []
        outside = page.evaluate(
            """() => [...document.querySelectorAll(".scroll")].filter((node) => !node.closest("details:not([open])") && node.scrollWidth > node.clientWidth + 1).map((node) => node.textContent.slice(0, 60))"""
        )
        assert outside == [], "no table scrolls sideways"
        assert page.locator("header").bounding_box()["height"] < 60, "the header has one line"
        lines = page.eval_on_selector_all("#line .more", "all => all.map(one => one.offsetHeight)")
        assert len(lines) == 8 and max(lines) < 1.5 * min(lines), "no tile has a word too many"
        keep(page, f"cockpit-{'phone' if is_phone else 'laptop'}")
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def encoder() -> Iterator[ScriptedServer]:
    server = ScriptedServer(is_encoder=True)
    yield server
    server.stop()


def test_an_encoder_gets_a_page_for_its_vectors(browser: Any, encoder: ScriptedServer) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": 800})
    page.set_default_timeout(PATIENCE_S * 1000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(encoder.base + "/play")
    page.wait_for_selector("body[data-ready=yes]")
    assert page.title() == "Octavo embeddings" and "byte-model" in page.inner_text("#model")
    page.click("#send")
    assert "Two texts are needed" in page.inner_text("#problem")
    page.click("#example")
    page.fill("#query", "The parcel has not arrived.")
    page.click("#send")
    page.wait_for_selector("#ranking li")
    assert page.inner_text("#ranking li >> nth=0").startswith("The parcel has not arrived.")
    assert "1.000" in page.inner_text("#ranking li >> nth=0") and page.locator("#matrix td").count() == 25
    assert "5 vectors of 8 numbers" in page.inner_text("#status") and "/v1/embeddings" in page.inner_text("#code")
    keep(page, "embeddings")
    page.fill("#query", "x" * 300)  # longer than the model reads
    page.click("#send")
    until(page, "!document.getElementById('problem').classList.contains('hidden')")
    assert "tokens" in page.inner_text("#problem") and page.input_value("#query") == "x" * 300
    assert unnamed(page) == [] and errors == []
    page.goto(encoder.base + "/")
    page.wait_for_selector("#chat-link-text")
    page.close()
