"""The picture at the head of the README: twelve streams of a real model that come and go, in the dark. Each of them has its row, and the
page has room for all that it says."""

import json
import random
import threading
import urllib.request
from typing import Any

import pytest

from tests.browser.conftest import KEY, keep, until
from tests.e2e.servers import Server

pytestmark = pytest.mark.model

NUM_STREAMS = 12
TOPICS = ("tea", "owls", "rivers", "chess", "bread", "maps", "clocks", "rain")
SHOW_A_HINT = """() => {
  const [advice, hint] = ["advice", "hint"].map((id) => document.getElementById(id));
  hint.textContent = "Simulated over the last 120 s (24 requests): ".repeat(8);
  hint.classList.remove("hidden");
  const boxes = [advice, hint].map((one) => one.getBoundingClientRect().toJSON());
  hint.classList.add("hidden");
  return boxes;
}"""


def stream_for_ever(server: Server, seed: int, is_over: threading.Event) -> None:
    draw = random.Random(seed)
    while not is_over.is_set():
        topic, number = draw.choice(TOPICS), draw.randrange(1000)
        words = f"You know all about {topic}. " * draw.randint(6, 24)
        messages = [
            {"role": "system", "content": words},
            {"role": "user", "content": f"Tell me about {topic}, part {number}."},
        ]
        body = {"messages": messages, "max_tokens": draw.randint(60, 220), "ignore_eos": True, "stream": True}
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {KEY}",
            "x-request-id": f"{topic}-{number}",
        }
        request = urllib.request.Request(server.base + "/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            for _ in response:
                if is_over.is_set():
                    return


def test_twelve_streams(open_page: Any, server: Server) -> None:
    page = open_page("/", "dark")
    page.wait_for_selector("#connection[data-state=live]")
    is_over = threading.Event()
    threads = [threading.Thread(target=stream_for_ever, args=(server, seed, is_over)) for seed in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        until(page, "document.querySelectorAll('#ended tr').length >= 24")
        until(page, f"document.getElementById('batch-note').textContent.startsWith('{NUM_STREAMS} of')")
        keep(page, "cockpit")
        advice, hint = page.evaluate(SHOW_A_HINT)
        assert advice["height"] < 50 and hint["top"] >= advice["bottom"], "a hint has its own line"
        lines = page.eval_on_selector_all("#line .more", "all => all.map(one => one.offsetHeight)")
        assert len(lines) == 8 and max(lines) < 1.5 * min(lines), "no tile has a word too many"
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
