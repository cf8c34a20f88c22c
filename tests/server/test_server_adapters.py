"""Adapters over HTTP: a request's model, the list of models, loading and unloading, and who may do so."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from octavo.config import Config, replace
from octavo.engine.build import start_engine
from octavo.engine.in_process_client import InProcessClient
from octavo.errors import ConfigError, InvalidRequest
from octavo.server.app import build_app
from octavo.server.state.adapters import AdapterRegistry
from octavo.weights.adapters.reader_process import AdapterReader
from octavo.weights.sources.source import local
from tests.adapters import ALL, weights_of, write_model, write_peft
from tests.doubles import byte_text
from tests.native import native

native()  # skips this file where there are no kernels

KEY, ADMIN = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    weights = write_model(place / "model", 256)
    write_peft(place / "adapters" / "pirate", weights, rank=8, seed=1, targets=ALL, size=0.8)
    write_peft(place / "adapters" / "poet", weights, rank=4, seed=2, targets=ALL, size=0.8)
    write_peft(place / "elsewhere" / "secret", weights, rank=4, seed=3)
    return place


class Server:
    def __init__(self, place: Path, **options: Any) -> None:
        settings: dict[str, Any] = {
            "enable_lora": True,
            "lora_modules": f"pirate={place / 'adapters' / 'pirate'}",
            "lora_folders": str(place / "adapters"),
            "lora_memory": 2**22,
            "kv_cache_memory_bytes": 2**21,
            "max_num_seqs": 8,
            "cpu_threads": 1,
        }
        self.config = replace(Config(), **(settings | options))
        self.engine = start_engine(self.config, local(place / "model"), "tiny")
        self.client = InProcessClient(self.engine)
        self.app = build_app(self.client, byte_text(), self.config, "tiny")
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://localhost")

    async def complete(self, model: str | None, prompt: str = "abcdefgh", **more: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0} | more
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> tuple[int, str]:
        response = await self.http.post(path, json=body, **more)
        return response.status_code, response.text


@pytest.fixture
async def server(place: Path) -> AsyncIterator[Server]:
    server = Server(place)
    yield server
    await server.http.aclose()
    server.client.close()


async def test_the_name_of_an_adapter_is_a_model(server: Server) -> None:
    base, pirate = await server.complete("tiny"), await server.complete("pirate")
    assert (base["model"], pirate["model"]) == ("tiny", "pirate")
    assert base["choices"][0]["text"] != pirate["choices"][0]["text"]
    assert (await server.complete(None))["choices"] == base["choices"]
    cards = (await server.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("pirate", "tiny")]
    assert cards[1]["root"].endswith("adapters/pirate")
    assert (await server.http.get("/v1/models/pirate")).json()["parent"] == "tiny"
    status, text = await server.post("/v1/completions", {"model": "parrot", "prompt": "a"})
    message = json.loads(text)["error"]["message"]
    assert status == 404 and message == "model 'parrot' is not served here; use 'tiny', or the adapter 'pirate'"


async def test_the_error_for_an_unknown_model_names_a_few_adapters(place: Path) -> None:
    async def message(num_adapters: int) -> str:
        modules = ",".join(f"a{number}={place / 'adapters' / 'pirate'}" for number in range(num_adapters))
        server = Server(place, lora_modules=modules)
        try:
            status, text = await server.post("/v1/completions", {"model": "parrot", "prompt": "a"})
        finally:
            await server.http.aclose()
            server.client.close()
        assert status == 404
        return str(json.loads(text)["error"]["message"]).partition("use ")[2]

    assert await message(0) == "'tiny'"
    assert await message(2) == "'tiny', or one of the adapters 'a0', 'a1'"
    eight = ", ".join(f"'a{number}'" for number in range(8))
    assert await message(10) == f"'tiny', or one of the adapters {eight} and 2 more (/v1/models)"


async def test_every_dialect(server: Server) -> None:
    """The same prompt with the adapter and without: each dialect gives the adapter's answer, and its name."""
    message = [{"role": "user", "content": "abcdefgh"}]
    common = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": message, **common}, "choices"),
        ("/v1/messages", {"messages": message, "max_tokens": 8, "temperature": 0}, "content"),
        ("/v1/responses", {"input": "abcdefgh", "max_output_tokens": 16, "temperature": 0}, "output"),
        (
            "/api/chat",
            {"messages": message, "stream": False, "options": {"num_predict": 8, "temperature": 0}},
            "message",
        ),
        (
            "/api/generate",
            {"prompt": "abcdefgh", "stream": False, "options": {"num_predict": 8, "temperature": 0}},
            "response",
        ),
        ("/completion", {"prompt": "abcdefgh", "n_predict": 8, "temperature": 0}, "content"),
    ]
    for path, body, member in calls:
        answers = []
        for model in ("tiny", "pirate"):
            status, text = await server.post(path, {"model": model, **body})
            assert status == 200, (path, text)
            answer = json.loads(text)
            assert answer["model"] == model, path
            answers.append(json.dumps(_without_ids(answer[member])))
        assert answers[0] != answers[1], path
    vectors = [
        json.loads((await server.post("/v1/embeddings", {"model": model, "input": "abc"}))[1])["data"][0]["embedding"]
        for model in ("tiny", "pirate")
    ]
    assert vectors[0] != vectors[1]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(entry) for key, entry in value.items() if key != "id"}
    return [_without_ids(entry) for entry in value] if isinstance(value, list) else value


async def test_loading_and_unloading(server: Server, place: Path) -> None:
    poet = {"lora_name": "poet", "lora_path": str(place / "adapters" / "poet")}
    assert (await server.post("/v1/completions", {"model": "poet", "prompt": "a"}))[0] == 404
    status, text = await server.post("/v1/load_lora_adapter", poet)
    assert (status, text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    answer = await server.complete("poet")
    assert answer["choices"] != (await server.complete("pirate"))["choices"]
    status, text = await server.post("/v1/load_lora_adapter", poet)
    assert status == 400 and "loaded already" in text
    status, text = await server.post("/v1/load_lora_adapter", poet | {"load_inplace": True, "lora_int_id": 3})
    assert status == 200 and text.endswith("successfully. Ignored fields: lora_int_id.")
    async with server.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "poet",
            "prompt": "abcdefgh",
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        },
    ) as stream:
        lines = stream.aiter_lines()
        first = await anext(lines)  # a busy machine may send several tokens with it
        # An open stream goes on to its end.
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}))[0] == 200
        rest = [line async for line in lines]
        assert any('"finish_reason":"length"' in line for line in (first, *rest)) and rest[-2] == "data: [DONE]"
    assert (await server.post("/v1/completions", {"model": "poet", "prompt": "a"}))[0] == 404
    status, text = await server.post("/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert status == 404 and "is not loaded" in text
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "pirate"}))[0] == 200
    assert [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]] == ["tiny"]


async def test_mistakes_when_loading(server: Server, place: Path, tmp_path: Path) -> None:
    inside = place / "adapters"
    wide = write_peft(inside / "wide", {"model.layers.0.self_attn.q_proj.weight": torch.zeros(40, 40)})
    cut = write_peft(inside / "cut", weights_of(place / "model"))
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    (inside / "pipe").unlink(missing_ok=True)
    os.mkfifo(inside / "pipe")
    (inside / "link").unlink(missing_ok=True)
    (inside / "link").symlink_to(place / "elsewhere" / "secret")
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_name": "x", "lora_path": str(place / "elsewhere" / "secret")}, 403, "--lora-folders"),
        ({"lora_name": "x", "lora_path": str(inside / ".." / "elsewhere" / "secret")}, 403, "--lora-folders"),
        ({"lora_name": "x", "lora_path": str(inside / "link")}, 403, "--lora-folders"),
        ({"lora_name": "x", "lora_path": str(inside) + "-other"}, 403, "--lora-folders"),
        ({"lora_name": "x", "lora_path": str(inside / "a\0b")}, 400, "null character"),
        ({"lora_name": "x", "lora_path": str(inside / "nothing")}, 400, "does not exist"),
        ({"lora_name": "x", "lora_path": str(inside / ("n" * 300))}, 400, "too long"),
        ({"lora_name": "x", "lora_path": str(inside) + "/a" * 2_000_000}, 400, "1 to 4096 characters"),
        ({"lora_name": "x", "lora_path": str(inside / "pipe")}, 400, "neither a folder nor a file"),
        ({"lora_name": "x", "lora_path": str(cut)}, 400, "truncated or corrupt"),
        ({"lora_name": "x", "lora_path": str(wide)}, 400, "trained on another base"),
        ({"lora_name": "tiny", "lora_path": str(inside / "poet")}, 400, "the model itself"),
        ({"lora_name": "", "lora_path": str(inside / "poet")}, 400, "1 to 200"),
        ({"lora_name": "n" * 201, "lora_path": str(inside / "poet")}, 400, "1 to 200"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": str(inside / "poet"), "base_model_name": "y"}, 400, "base_model_name must be"),
        ({"lora_name": 3, "lora_path": "y"}, 400, "lora_name"),
    ]
    for body, status, message in cases:
        found = await server.post("/v1/load_lora_adapter", body)
        assert found[0] == status and message in found[1], (body, found)
    assert [card["id"] for card in (await server.http.get("/v1/models")).json()["data"]] == ["tiny", "pirate"]
    assert (await server.complete("pirate"))["model"] == "pirate"


async def test_keys_and_servers_without_adapters(place: Path) -> None:
    server = Server(place, api_key="user", admin_key="admin")
    poet = {"lora_name": "poet", "lora_path": str(place / "adapters" / "poet")}
    try:
        assert (await server.post("/v1/load_lora_adapter", poet))[0] == 401
        status, text = await server.post("/v1/load_lora_adapter", poet, headers=KEY)
        assert status == 403 and "admin key" in text
        assert (await server.post("/v1/load_lora_adapter", poet, headers=ADMIN))[0] == 200
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}, headers=KEY))[0] == 403
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}, headers=ADMIN))[0] == 200
    finally:
        await server.http.aclose()
        server.client.close()
    server = Server(place, enable_lora=False, lora_modules="", lora_folders="", lora_memory="auto")
    try:
        status, text = await server.post("/v1/load_lora_adapter", poet)
        assert status == 400 and "--enable-lora" in text
    finally:
        await server.http.aclose()
        server.client.close()


async def test_metrics_and_journeys(server: Server) -> None:
    response = await server.http.post(
        "/v1/completions",
        json={"model": "pirate", "prompt": "abc", "max_tokens": 4, "ignore_eos": True},
        headers={"X-Request-Id": "asked"},
    )
    assert response.status_code == 200
    journey = (await server.http.get("/v1/requests/asked")).json()
    assert "adapter" in [stage["name"] for stage in journey["stages"]]
    text = (await server.http.get("/metrics")).text
    info = next(line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{"))
    assert 'running_lora_adapters=""' in info and 'waiting_lora_adapters=""' in info  # the engine is idle
    assert next(line for line in text.splitlines() if line.startswith("octavo:adapters_loaded")).endswith(" 1.0")
    assert next(line for line in text.splitlines() if line.startswith("octavo:adapter_loads_total")).endswith(" 1.0")


async def test_broken_files_are_read_once_and_again_when_they_change(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests may name an adapter whose files were replaced by broken ones."""
    shutil.copytree(place / "adapters" / "pirate", tmp_path / "pirate")
    server = Server(place, lora_modules=f"pirate={tmp_path / 'pirate'}")
    threads: list[str] = []

    def read(reader: AdapterReader, path: str, max_rank: int) -> int:
        threads.append(threading.current_thread().name)
        return num_weights(reader, path, max_rank)

    num_weights = AdapterReader.num_weights
    monkeypatch.setattr(AdapterReader, "num_weights", read)
    good = (tmp_path / "pirate" / "adapter_config.json").read_text()

    async def ask() -> tuple[int, str]:
        return await server.post("/v1/completions", {"model": "pirate", "prompt": "a", "max_tokens": 1})

    try:
        (tmp_path / "pirate" / "adapter_config.json").write_text("{")
        for status, text in await asyncio.gather(*(ask() for _ in range(5)), ask()):
            assert status == 400 and "adapter 'pirate' cannot be used" in text and "adapter_config.json" in text
        assert len(threads) == 1 and threads[0].startswith("octavo-adapters"), "not on the event loop"
        (tmp_path / "pirate" / "adapter_config.json").write_text("{{")
        assert (await ask())[0] == 400 and len(threads) == 2
        anew = {"lora_name": "pirate", "lora_path": str(place / "adapters" / "pirate")}
        status, text = await server.post("/v1/load_lora_adapter", anew)
        assert status == 400 and "loaded already" in text
        assert (await server.post("/v1/load_lora_adapter", anew | {"load_inplace": True}))[0] == 200
        assert (await ask())[0] == 200 and len(threads) == 3
    finally:
        await server.http.aclose()
        server.client.close()
    mended = AdapterRegistry(server.config.lora, ["tiny"])
    with pytest.raises(InvalidRequest, match="cannot be used"):
        await mended.find("pirate")
    (tmp_path / "pirate" / "adapter_config.json").write_text(good)
    assert await mended.find("pirate") is not None


async def test_processes_share_what_was_loaded(place: Path, tmp_path: Path) -> None:
    """Two registries of one folder, as those of two API processes."""
    options = replace(Config(), enable_lora=True, lora_modules=f"pirate={place / 'adapters' / 'pirate'}").lora
    first, second = AdapterRegistry(options, ["tiny"]), AdapterRegistry(options, ["tiny"])
    for registry in (first, second):
        registry.open(tmp_path)
    ref = first.describe("poet", str(place / "adapters" / "poet"))
    first.add(ref, replaces=False)
    assert second.names() == ["pirate", "poet"] and await second.find("poet") == ref
    second.remove("poet")
    second.remove("pirate")
    assert first.names() == [] and await first.find("pirate") is None
    later = AdapterRegistry(options, ["tiny"])  # of a process that takes another's place
    later.open(tmp_path)
    assert later.names() == []


def test_names_that_clash(place: Path) -> None:
    options = replace(Config(), enable_lora=True, lora_modules=f"tiny={place / 'adapters' / 'pirate'}").lora
    with pytest.raises(ConfigError, match="the model itself"):
        AdapterRegistry(options, ["tiny"])
