"""An engine that is killed, with pinned prefixes and a disk tier: pins come back, and prefixes from files where those are."""

import json
import os
import signal
import threading
import time
import urllib.request

import pytest

from tests.e2e.servers import Server

pytestmark = pytest.mark.model

WORDS = ["river", "stone", "lamp", "window", "harbour", "orchard", "letter", "engine", "garden", "winter", "ladder"]
LONG = "A list of things that I saw: " + ", ".join(WORDS[at * at % len(WORDS)] + f" {at}" for at in range(150))
SHORT = "The rules of this house are few, and everybody who comes here learns them on the first day. " * 3


@pytest.fixture(scope="module", params=["computed again", "from files"])
def server(request, tmp_path_factory):
    arguments = ["--kv-cache-memory-bytes", "256M", "--api-processes", "2", "--record-bytes", "0"]
    if request.param == "from files":
        arguments += ["--kv-tier", f"disk:256MiB:{tmp_path_factory.mktemp('tier')}"]
    with Server(*arguments) as server:
        server.has_tier = request.param == "from files"
        yield server
        assert server.terminate() == 0, server.lines


def pins(server: Server) -> dict[str, dict]:
    status, text = server.get("/v1/prefix")
    assert status == 200, text
    return {pin["name"]: pin for pin in json.loads(text)["data"]}


def wait_for(condition, server: Server, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, server.lines
        time.sleep(0.05)


def stream(server: Server, after_first) -> str:
    """The text of a long greedy answer; `after_first` is called when its first token is there."""
    body = {"model": "", "prompt": LONG, "max_tokens": 120, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        server.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert event.get("choices") is not None, event
                if not text:
                    after_first()
                text += "".join(choice["text"] for choice in event["choices"])
    return text


def test_pins_and_prefixes_of_a_killed_engine_come_back(server):
    for name, prompt, seconds in (("long", LONG, None), ("short", SHORT, 3600), ("gone", SHORT + "Yes.", None)):
        body = {"action": "pin", "name": name, "prompt": prompt} | ({"seconds": seconds} if seconds else {})
        status, text = server.post("/v1/prefix", body)
        assert status == 200, text
    assert server.post("/v1/prefix", {"action": "unpin", "name": "gone"})[0] == 200
    before = pins(server)
    assert set(before) == {"long", "short"}
    assert all(pin["cached_tokens"] == pin["tokens"] > 0 for pin in before.values())
    expected = stream(server, lambda: None)
    num_tokens = before["long"]["tokens"] + before["short"]["tokens"]
    if server.has_tier:
        wait_for(lambda: server.metric("octavo:kv_tier_tokens_total", "stored") >= num_tokens, server)
    old = server.engine()
    killed = threading.Event()

    def kill() -> None:
        os.kill(old, signal.SIGKILL)
        killed.set()

    assert stream(server, kill) == expected, "the stream of the dead engine goes on, with the same tokens"
    assert killed.is_set() and server.engine() != old
    wait_for(lambda: all(pin["cached_tokens"] == pin["tokens"] for pin in pins(server).values()), server)
    after = pins(server)
    assert set(after) == {"long", "short"}, "what was unpinned stays so"
    assert all(after[name]["tokens"] == before[name]["tokens"] for name in after)
    assert after["long"]["seconds_left"] is None and 0 < after["short"]["seconds_left"] < 3600
    loaded = server.metric("octavo:kv_tier_tokens_total", "loaded")
    if server.has_tier:
        assert loaded >= before["long"]["tokens"], "the survivor's prefix came from files"
    else:
        assert not loaded
    # A pin that came back can be unpinned, and does not come back again.
    assert server.post("/v1/prefix", {"action": "unpin", "name": "long"})[0] == 200
    os.kill(server.engine(), signal.SIGKILL)
    wait_for(lambda: server.get("/v1/prefix")[0] == 200 and "short" in pins(server), server)
    assert set(pins(server)) == {"short"}


def test_replicas_of_a_machine_share_a_folder(tmp_path):
    """What one replica has computed the other one loads, and so does a later server; every token is the one that is computed."""
    arguments = ("--kv-cache-memory-bytes", "128M", "--api-processes", "1", "--record-bytes", "0")
    arguments += ("--data-parallel-size", "2", "--routing-policy", "round_robin")
    arguments += ("--kv-tier", f"disk:256MiB:{tmp_path / 'tier'}")
    body = {"prompt": LONG, "max_tokens": 12, "temperature": 0}

    def ask(server: Server) -> tuple[str, int]:
        """(the text, tokens of the prompt that were there)"""
        status, text = server.post("/v1/completions", body)
        assert status == 200, text
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with Server(*arguments) as server:
        expected, num_cached = ask(server)
        assert not num_cached
        wait_for(lambda: server.metric("octavo:kv_tier_tokens_total", "stored") >= 512, server)
        wait_for(lambda: server.metric("octavo:kv_tier_pages", 'engine="1"') > 0, server)
        wait_for(lambda: server.metric("octavo:kv_tier_pages", 'engine="0"') > 0, server)
        again, num_cached = ask(server)
        assert again == expected and num_cached >= 512
        assert server.metric("octavo:kv_tier_loads_total") == 1, "the other replica had it from the files of the first"
        assert server.terminate() == 0, server.lines
    with Server(*arguments) as server:
        assert all(ask(server) == (expected, num_cached) for _ in range(2)), "in both replicas"
        assert server.metric("octavo:kv_tier_loads_total") == 2
