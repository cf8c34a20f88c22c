"""Usage of keys on a real server whose processes are killed: what clients got is what was counted."""

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.servers import Server

pytestmark = pytest.mark.model


def ask(server: Server, key: str, number: int, found: list[dict], on_event=lambda: None) -> None:
    body = {"prompt": f"Story {number}", "max_tokens": 60, "ignore_eos": True, "stream": True, "seed": number}
    body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.base + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                on_event()
                if chunk.get("usage"):
                    found.append(chunk["usage"])


def test_every_token_is_counted_once(tmp_path: Path) -> None:
    """Over an engine that is killed while it answers, and a server that is killed and started again."""
    keys = tmp_path / "keys"
    keys.write_text("one team-a 2\ntwo team-b 1 budget_tokens=150\nadmin: boss\n")
    flags = ("--api-key-file", str(keys), "--files-folder", str(tmp_path / "files"), "--fairness", "key")
    flags += ("--api-processes", "2", "--kv-cache-memory-bytes", "64M", "--record-bytes", "0")
    served: list[dict] = []
    with Server(*flags) as server:
        is_killed = threading.Event()
        seen = [0]

        def kill_engine() -> None:
            seen[0] += 1
            if seen[0] >= 40 and not is_killed.is_set():
                is_killed.set()
                os.kill(server.engine(), signal.SIGKILL)

        threads = [
            threading.Thread(target=ask, args=(server, "one", number, served, kill_engine)) for number in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert is_killed.is_set() and len(served) == 6, "answers go on in the next engine"
        server.process.kill()  # its processes end with it
        server.process.wait()
    with Server(*flags) as server:
        usage = json.loads(server.get("/v1/usage", Authorization="Bearer one")[1])["data"]
        assert [each["total_tokens"] for each in usage] == [sum(each["total_tokens"] for each in served)]
        spent: list[dict] = []
        for number in range(2):
            ask(server, "two", number, spent)
        (usage,) = json.loads(server.get("/v1/usage", Authorization="Bearer two")[1])["data"]
        assert usage["total_tokens"] == sum(each["total_tokens"] for each in spent) <= 150
        while usage["tokens_left_today"]:
            body = {"prompt": "a", "max_tokens": usage["tokens_left_today"] + 5, "ignore_eos": True}
            status, text = server.post("/v1/completions", body, Authorization="Bearer two")
            if status == 429:  # the prompt does not fit any more
                break
            choice = json.loads(text)["choices"][0]
            assert status == 200 and (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget")
            (usage,) = json.loads(server.get("/v1/usage", Authorization="Bearer two")[1])["data"]
            assert usage["tokens_today"] == 150
        assert server.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer two")[0] == 429
        assert server.terminate() == 0
