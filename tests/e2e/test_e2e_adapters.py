"""Adapters on a real server: loaded once, known to every API process and to the next engine; streams outlive an engine that is killed."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import ALL, write_model, write_peft
from tests.e2e.servers import Server
from tests.native import native
from tests.processes import children_of

native()  # skips this file where there are no kernels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    weights = write_model(place / "model", 2048)
    for seed, name in enumerate(("pirate", "poet")):
        write_peft(place / "adapters" / name, weights, rank=8, seed=seed, targets=ALL, size=0.8)
    return place


def ask(model: str, stream: bool = False, max_tokens: int = 1500) -> dict[str, object]:
    return {
        "model": model,
        "prompt": "abcdefgh",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


async def streamed(client: httpx.AsyncClient, model: str, max_tokens: int, begun: asyncio.Event) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=ask(model, True, max_tokens)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun.set()
    return text


async def answers(server: Server, kill: Callable[[], None] | None = None, max_tokens: int = 1500) -> list[str]:
    """Of the base and two adapters at the same time. `kill` is called in the middle."""
    async with httpx.AsyncClient(base_url=server.base, timeout=120) as client:
        begun = [asyncio.Event() for _ in range(3)]
        names = ("model", "pirate", "poet")
        tasks = [
            asyncio.create_task(streamed(client, name, max_tokens, event))
            for name, event in zip(names, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        if kill is not None:
            kill()
        return list(await asyncio.gather(*tasks))


def test_every_process_and_the_next_engine(place: Path) -> None:
    arguments = (
        str(place / "model"), "--served-model-name", "model", "--api-processes", "2", "--kv-cache-memory-bytes", "16M",
        "--enable-lora", "--lora-modules", f"pirate={place / 'adapters' / 'pirate'}", "--lora-folders", str(place / "adapters"),
    )  # fmt: skip
    with Server(*arguments) as server:
        assert any("adapters may take" in line and "1 are registered" in line for line in server.lines), server.lines
        poet = {"lora_name": "poet", "lora_path": str(place / "adapters" / "poet")}
        assert server.post("/v1/load_lora_adapter", poet)[0] == 200
        for _ in range(6):  # connections go to the processes in turn
            cards = json.loads(server.get("/v1/models")[1])["data"]
            assert [card["id"] for card in cards] == ["model", "pirate", "poet"]
        expected = asyncio.run(answers(server))
        assert len(set(expected)) == 3
        assert asyncio.run(answers(server, lambda: os.kill(server.engine(), signal.SIGKILL))) == expected
        assert server.metric("octavo:restarts_total") == 1
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "poet"})[0] == 200
        assert [server.post("/v1/completions", ask("poet"))[0] for _ in range(4)] == [404] * 4
        assert server.terminate() == 0


def test_a_fleet_whose_replicas_have_two_stages(place: Path) -> None:
    """Loading reaches every replica, requests find their adapter's pages, and streams outlive a rank."""
    arguments = (
        str(place / "model"), "--served-model-name", "model", "--kv-cache-memory-bytes", "16M", "--cpu-threads", "1",
        "--data-parallel-size", "2", "--pipeline-parallel-size", "2", "--enable-lora",
        "--lora-modules", f"pirate={place / 'adapters' / 'pirate'}", "--lora-folders", str(place / "adapters"),
    )  # fmt: skip
    with Server(*arguments) as server:
        deadline = time.monotonic() + 60
        while {each["status"] for each in _replicas(server)} != {"ready"}:
            assert time.monotonic() < deadline, server.lines
            time.sleep(0.05)
        poet = {"lora_name": "poet", "lora_path": str(place / "adapters" / "poet")}
        assert server.post("/v1/load_lora_adapter", poet)[0] == 200
        assert server.metric("octavo:adapters_loaded") == 2, "one in each replica"
        expected = asyncio.run(answers(server, max_tokens=900))
        assert len(set(expected)) == 3

        # A router hears of pages a moment after the answer that made them.
        found = [_cached(server, "poet")]
        while found[-1] == 0:
            assert time.monotonic() < deadline, server.lines
            found.append(_cached(server, "poet"))
        assert found[0] == 0 and found[-1] == 384, "of its own pages"
        assert [_cached(server, "poet") for _ in range(2)] == [384, 384] and _cached(server, "model") == 0
        journeys = json.loads(server.get("/v1/requests?state=finished&limit=1000")[1])["data"]
        reasons = [each["replicas"][0]["reason"] for each in journeys if each["prompt_tokens"] == 400]
        assert reasons.count("prefix") >= 2, journeys[:4]

        def kill() -> None:
            """The last stage of the replica that has most to do."""
            pids = {each["replica"]: each["pid"] for each in _replicas(server)}
            busiest = max(pids, key=lambda number: server.metric("vllm:num_requests_running", f'engine="{number}"'))
            os.kill(max(children_of(pids[busiest])), signal.SIGKILL)

        assert asyncio.run(answers(server, kill, 900)) == expected
        journeys = json.loads(server.get("/v1/requests?state=finished&limit=1000")[1])["data"]
        assert any(each["replicas"][-1].get("moved") == "the replica ended" for each in journeys), journeys[:4]
        assert server.terminate() == 0


def _replicas(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/health/progress")[1])["replicas"]
    return found


def _cached(server: Server, model: str) -> int:
    """Ask with a long prompt. → tokens of it that were found."""
    body = ask(model) | {"prompt": "abcdefgh" * 50, "max_tokens": 2}
    status, text = server.post("/v1/completions", body)
    assert status == 200, text
    return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])
