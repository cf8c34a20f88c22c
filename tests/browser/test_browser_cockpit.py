"""The cockpit in a browser under a real load: its numbers agree with the metrics, its map shows a shared prefix, and it says why
requests wait."""

import json
import os
import signal
import threading
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tests.browser.conftest import KEY, PATIENCE_S, keep, unnamed, until
from tests.cli.pseudo_terminal import Terminal
from tests.e2e.servers import Server

pytestmark = pytest.mark.model
WORDS = "You answer at length and never stop before you have told everything. " * 14


def load(
    server: Server, num: int, max_tokens: int, name: str, given_up: threading.Event | None = None
) -> list[threading.Thread]:
    """Start `num` requests with one system prompt at once. They are read to their end, or until `given_up`."""

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
            lines = []
            for line in response:
                if given_up is not None and given_up.is_set():
                    return
                lines.append(line)
            assert b"[DONE]" in b"".join(lines[-3:])

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
    until(page, "document.getElementById('advice').textContent.startsWith('Idle')")
    assert number_of(page, "#count-shared") == 0
    threads = load(server, 20, 320, "shown")
    until(page, "/[1-9]/.test(document.getElementById('count-shared').textContent)")
    until(page, "document.getElementById('advice').textContent.includes('KV pages')")
    assert "--kv-cache-memory-bytes" in page.inner_text("#advice")
    until(page, "document.getElementById('advice').textContent.includes('because KV pages ran out')")
    page.hover("#map", position={"x": 5, "y": 5})
    until(page, "document.getElementById('tip').textContent.includes('shared by')")
    assert "shown-" in page.inner_text("#tip")
    agree(page, server, threads)
    lanes = page.eval_on_selector_all("#lanes .number", "all => all.map(one => Number(one.textContent))")
    assert lanes and 0 < sum(lanes) <= 20
    keep(page, "cockpit-light")
    for thread in threads:
        thread.join()
    until(page, "document.getElementById('advice').textContent.startsWith('Idle')")
    until(page, "document.getElementById('ended').childElementCount === 20")
    assert metric(server, "vllm:request_success_total") == 20
    assert number_of(page, "#batch-note") == metric(server, "vllm:num_requests_running") == 0
    total = number_of(page, "#count-free") + number_of(page, "#count-cached")
    used = number_of(page, "[data-stage=pages] .more")
    assert used == 0 and page.inner_text("[data-stage=pages] .more") == f"0 of {total:,}"
    assert metric(server, "vllm:num_preemptions_total") > 0, "the load was meant to run out of pages"
    show_preempted(page, server)


def agree(page: Any, server: Server, threads: Sequence[threading.Thread]) -> None:
    """Check that the page shows the metrics' numbers while requests run and wait. It is a quarter of a second behind, in which a request may end
    and pages be taken: requests must be those of one of the last readings, and pages lie between them."""
    pages = 'octavo:kv_pages{model_name="SmolLM2-135M-Instruct",engine="0",state="used"}'
    read: deque[tuple[float, ...]] = deque(maxlen=6)
    while any(thread.is_alive() for thread in threads):
        names = "vllm:num_requests_running", "vllm:num_requests_waiting{", pages
        read.append(tuple(metric(server, name) for name in names))
        running = number_of(page, "#batch-note")
        waiting, used = number_of(page, "[data-stage=queue] .value"), number_of(page, "[data-stage=pages] .more")
        is_seen = any((running, waiting) == counts[:2] for counts in read)
        all_used = [counts[2] for counts in read]
        if is_seen and running > 0 and len(read) > 2 and min(all_used) <= used <= max(all_used):
            return
        page.wait_for_timeout(60)
    raise AssertionError(f"the page shows {running}, {waiting} and {used} pages, the metrics {[*read]}")


def show_preempted(page: Any, server: Server) -> None:
    """Check the waterfall of a preempted request: the times of its stages add up to the total."""
    _, text = server.get("/v1/requests?limit=100", Authorization=f"Bearer {KEY}")
    journey = max(json.loads(text)["data"], key=lambda journey: journey["preemptions"])
    assert journey["preemptions"] > 0
    page.click(f"#ended button[title={journey['id']}]")
    page.wait_for_selector("#journey [data-stage=preempted]")
    spent = page.eval_on_selector_all("#journey .stage", "stages => stages.map(stage => Number(stage.dataset.seconds))")
    assert sum(spent) == pytest.approx(journey["seconds"], rel=0.02)
    keep(page, "journey-of-a-preempted-request")
    page.click("#journey-close")


def test_a_late_visitor_sees_the_past(open_page: Any, server: Server) -> None:
    page = open_page("/")
    page.wait_for_selector("#ended tr")
    assert page.locator("#ended tr").count() == 20
    until(page, "document.getElementById('chart-rate').getAttribute('aria-label').match(/at most [1-9]/) !== null")


def test_it_is_usable_in_the_dark_and_by_keyboard(open_page: Any, server: Server) -> None:
    page = open_page("/", "dark")
    page.wait_for_selector("#connection[data-state=live]")
    threads = load(server, 30, 120, "dark")
    until(page, "/[1-9]/.test(document.getElementById('count-shared').textContent)")
    until(page, "document.getElementById('queue').childElementCount > 0")
    keep(page, "cockpit-dark")
    # The focus stays where it is while a table is updated, and stays in the table when its row is removed.
    page.focus("#ended button[title^=shown-] >> nth=0")
    name = page.evaluate("document.activeElement.title")
    until(page, "document.querySelector('#ended button').title.startsWith('dark-')")
    assert page.evaluate("document.activeElement.title") == name and name.startswith("shown-")
    more = load(server, 30, 120, "darker")
    until(page, "document.getElementById('queue').childElementCount > 0")
    page.focus("#queue button >> nth=0")
    leaver = page.evaluate("document.activeElement.title")
    until(page, f"document.activeElement.title !== '{leaver}'")
    assert page.evaluate("document.activeElement.closest('.card').querySelector('#queue') !== null")
    threads += more
    # Rows that last until this test has looked at them, however slow the browser is.
    given_up = threading.Event()
    threads += load(server, 6, 1500, "darkest", given_up)
    until(page, "/^[1-9]/.test(document.getElementById('batch-note').textContent)")
    page.focus("#batch")
    page.keyboard.press("ArrowDown")
    assert "row " in page.inner_text("#row-note") and "dark" in page.inner_text("#row-note")
    page.keyboard.press("Enter")
    page.wait_for_selector("#journey[open] [data-stage]")
    assert page.inner_text("#journey-id").startswith("dark")
    page.keyboard.press("Escape")
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#page-note").startswith("page 2")
    until(page, "document.getElementById('page-note').textContent.includes('shared by')")
    page.click("#batch-details summary")
    until(page, "document.querySelectorAll('#batch-rows tr').length > 2")
    page.hover("#batch", position={"x": 40, "y": 6})
    assert page.inner_text("#tip").startswith("row ")
    given_up.set()
    for thread in threads:
        thread.join()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert unnamed(page) == [], "a screen reader could not name them"


def test_a_dead_engine_is_shown_and_what_was_is_kept(open_page: Any, server: Server) -> None:
    page = open_page("/")
    page.wait_for_selector("#ended button[title=darker-1]")
    terminal = Terminal("top", "--url", server.base, size=(60, 30), environment={"OCTAVO_API_KEY": KEY})
    terminal.until(lambda screen: "0/64 rows" in screen, PATIENCE_S)
    threads = load(server, 3, 600, "orphan")
    until(page, "document.getElementById('batch-note').textContent.startsWith('3 of')")
    terminal.until(lambda screen: "orphan-0" in screen and "decode +1" in screen and "3/64 rows" in screen, PATIENCE_S)
    os.kill(server.engine(), signal.SIGKILL)
    terminal.until(lambda screen: "No connection since" in screen, PATIENCE_S)
    page.wait_for_selector("body[data-stale=yes]")
    until(page, "document.getElementById('advice').textContent.includes('This page shows the state at')")
    keep(page, "cockpit-without-an-engine")
    page.wait_for_selector("body[data-stale=no]", timeout=120_000)
    assert "engine restarted" in page.inner_text("#connection")
    until(page, "document.getElementById('chart-rate').getAttribute('aria-label').match(/at most [1-9]/) !== null")
    _, text = server.get("/v1/live/history?seconds=600", Authorization=f"Bearer {KEY}")
    points = json.loads(text)["points"]
    assert sum(point[12] for point in points) == 2, "two engines have started, and both are in the history"
    first = next(point[0] for point in reversed(points) if point[12])
    assert sum(point[4] for point in points if point[0] < first) > 1000, "what the first one did is kept"
    terminal.until(lambda screen: "orphan-0" in screen and "No connection" not in screen, PATIENCE_S)
    terminal.press("q")
    assert terminal.close() == (0, "")
    for thread in threads:
        thread.join()
    page.wait_for_selector("#ended button[title=orphan-0]")
    assert page.locator("#ended button[title=darker-1]").count() == 1, "kept over the engine's death, and not twice"
    page.click("#ended button[title=orphan-0]")
    page.wait_for_selector("#journey [data-stage=restart]")
    assert "an engine ended during this request" in page.inner_text("#journey-body")
    keep(page, "journey-over-a-dead-engine")
