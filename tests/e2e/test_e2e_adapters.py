"""Adapters on a real server: loaded once, known to every API process and to the next engine; streams outlive an engine that is killed."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.adapters import ALL, write_model, write_peft
from tests.e2e.servers import Server
from tests.native import native

native()  # skips this file where there are no kernels


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    weights = write_model(place / "model", 2048)
    for seed, name in enumerate(("pirate", "poet")):
        write_peft(place / "adapters" / name, weights, rank=8, seed=seed, targets=ALL, size=0.8)
    return place


def ask(model: str, stream: bool = False) -> dict[str, object]:
    return {
        "model": model,
        "prompt": "abcdefgh",
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


async def streamed(client: httpx.AsyncClient, model: str, begun: asyncio.Event) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=ask(model, stream=True)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun.set()
    return text


async def answers(server: Server, kills: bool) -> list[str]:
    """Of the base and two adapters at the same time; `kills`: the engine, in the middle."""
    async with httpx.AsyncClient(base_url=server.base, timeout=120) as client:
        begun = [asyncio.Event() for _ in range(3)]
        names = ("model", "pirate", "poet")
        tasks = [asyncio.create_task(streamed(client, name, event)) for name, event in zip(names, begun, strict=True)]
        for event in begun:
            await event.wait()
        if kills:
            os.kill(server.engine(), signal.SIGKILL)
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
        expected = asyncio.run(answers(server, kills=False))
        assert len(set(expected)) == 3
        assert asyncio.run(answers(server, kills=True)) == expected
        assert server.metric("octavo:restarts_total") == 1
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "poet"})[0] == 200
        assert [server.post("/v1/completions", ask("poet"))[0] for _ in range(4)] == [404] * 4
        assert server.terminate() == 0
