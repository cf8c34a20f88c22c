"""The cockpit with 10,000 pages and 1,000 requests: every page and every row is drawn, can be pointed at, and shows what the feed
says. The model is a clock (benchmarks.front_engine); all else is the real server. The browser's CPU time is only printed."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cockpit import ask_for_ever
from benchmarks.front import SERVE
from benchmarks.front_engine import MAX_MODEL_LEN, PAGES, STEP_MS, VOCAB_SIZE
from benchmarks.gpu.serve import server
from octavo.text.tokenize.made_up import write_tokenizer
from tests.browser.conftest import PATIENCE_S, keep, until

NUM_REQUESTS, NUM_PAGES = 1000, 10_000
# A request takes minutes, so that all of them run at once before the first one ends, also where the machine is slow.
STEP_SECONDS, PROMPT_LEN, SHARED_LEN, OUTPUT_LEN = 2.0, 32, 16, 400
GATHER_SECONDS = 300


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with NUM_REQUESTS requests."""
    folder: Path = tmp_path_factory.mktemp("clock")
    write_tokenizer(folder, VOCAB_SIZE)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB_SIZE}))
    command = [sys.executable, "-m", "benchmarks.front", SERVE, str(folder), "--port", "0", "--load-format", "dummy"]
    command += ["--max-num-seqs", str(NUM_REQUESTS), "--max-model-len", str(MAX_MODEL_LEN), "--api-processes", "1"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(STEP_MS, str(STEP_SECONDS * 1000))
        patched.setenv(PAGES, str(NUM_PAGES))
        running = server(command)
        url, _ = running.__enter__()
    try:
        host, port = url.removeprefix("http://").split("/")[0].split(":")
        is_over = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(ask_all(host, int(port), is_over)))
        thread.start()
        yield url.removesuffix("/v1")
        is_over.set()
        thread.join()
    finally:
        running.__exit__(None, None, None)


async def ask_all(host: str, port: int, is_over: threading.Event) -> None:
    tasks = [
        asyncio.create_task(ask_for_ever(host, port, number, PROMPT_LEN, SHARED_LEN, OUTPUT_LEN))
        for number in range(NUM_REQUESTS)
    ]
    await asyncio.to_thread(is_over.wait)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def last_place(page: Any) -> str:
    """The tooltip of the map's last place: the first one that a pointer meets from the lower right corner, line by line."""
    page.locator("#map").scroll_into_view_if_needed()  # notes above it come and go
    box = page.locator("#map").bounding_box()
    for below in range(int(box["height"]) - 1, 0, -2):
        for at in range(int(box["width"]) - 1, 0, -2):
            page.mouse.move(box["x"] + at, box["y"] + below)
            if page.is_visible("#tip"):
                return str(page.inner_text("#tip"))
    return ""


def test_ten_thousand_pages_and_a_thousand_requests(browser: Any, crowd: str) -> None:
    page = browser.new_page(viewport={"width": 1366, "height": 768})
    page.set_default_timeout(PATIENCE_S * 1000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(crowd + "/")
    full = "/^(9[0-9][0-9]|1,000) of 1,000 rows/.test(document.getElementById('batch-note').textContent)"
    until(page, full, GATHER_SECONDS)
    counts = "['free', 'cached', 'shared', 'owned'].map(name => Number(document.getElementById(`count-${name}`).textContent.replace(/\\D/g, '')))"
    assert sum(page.evaluate(counts)) == NUM_PAGES
    page.click("#pause")
    assert last_place(page).startswith(f"page {NUM_PAGES - 1}:")
    page.focus("#batch")
    page.keyboard.press("End")
    assert "row " in page.inner_text("#row-note")
    keep(page, "cockpit-10000-pages-1000-requests")
    page.click("#pause")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy() -> float:
        values = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return float(values["TaskDuration"])

    before = busy()
    page.wait_for_timeout(4000)
    print(f"the page's main thread was busy for {(busy() - before) / 4:.0%} of the time")
    assert errors == []
