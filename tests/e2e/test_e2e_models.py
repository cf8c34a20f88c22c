"""Several models on one port: real processes, small models, the port that clients see."""

import contextlib
import gzip
import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from octavo.supervisor.runtime_dir import running_servers
from tests.adapters import write_model
from tests.certificates import make_certificates
from tests.e2e.servers import Server
from tests.engine.test_engine_embed import MEAN_POOLING, bert, write
from tests.processes import children_of

FLAGS = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-memory-bytes", "8M", "--api-processes", "1")
LIMIT_S = 240  # a busy machine is slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("models")
    write_model(place / "chat", 4096)
    return f"chat={place / 'chat'}", f"embed={write(bert(), place / 'bert', MEAN_POOLING)}"


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "prompt": "abc", "max_tokens": 8, "ignore_eos": True, "temperature": 0, **more}


class Streaming:
    """A stream of the chat model, read by a thread."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.has_begun = threading.Event()
        body = json.dumps(completion(max_tokens=max_tokens, stream=True)).encode()
        self._request = urllib.request.Request(
            server.base + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=LIMIT_S) as response:
                for line in response:
                    self.lines.append(line.decode().rstrip())
                    if line.startswith(b"data: "):
                        self.has_begun.set()
        except Exception as error:
            self.error = error
        finally:
            self.has_begun.set()

    def text(self) -> str:
        """The whole text, once the stream has ended in order."""
        self._thread.join(LIMIT_S)
        assert self.error is None and not self._thread.is_alive(), self.error
        assert self.lines[-2:] == ["data: [DONE]", ""], self.lines[-3:]
        return text_of("\n".join(self.lines))


def text_of(stream: str) -> str:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def wait_for(server: Server, path: str, status: int) -> str:
    until = time.monotonic() + LIMIT_S
    while (found := server.get(path))[0] != status:
        assert time.monotonic() < until, (found, server.lines)
        time.sleep(0.1)
    return found[1]


def state(server: Server, name: str) -> str:
    return str(json.loads(server.get("/health")[1])["models"][name]["status"])


def _started(pid: int) -> int:
    """When a process was started. Numbers of processes begin anew."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def supervisor_of(server: Server, name: str, models: tuple[str, str]) -> int:
    """The process of a model's own server: they are started in order."""
    own = [pid for pid, command in children_of(server.process.pid).items() if "gateway.child" in command]
    started = sorted(own, key=_started)
    return started[[entry.partition("=")[0] for entry in models].index(name)]


def test_two_models_answer_side_by_side(models: tuple[str, str]) -> None:
    with Server(*models, *FLAGS) as server:
        listed = {card["id"]: card for card in json.loads(server.get("/v1/models")[1])["data"]}
        assert {name: card["status"] for name, card in listed.items()} == {"chat": "ready", "embed": "ready"}
        inner = {pid for pid, command in children_of(server.process.pid).items() if "gateway.child" in command}
        assert inner <= {record.pid for record in running_servers(with_inner=True)}
        found = {record.pid: record.model for record in running_servers()}
        assert found[server.process.pid] == "chat, embed" and not inner & found.keys(), "octavo ps lists the gateway"
        assert listed["embed"]["capabilities"] == ["embedding"]
        status, text = server.post("/v1/completions", completion())
        assert status == 200 and json.loads(text)["model"] == "chat"
        whole = json.loads(text)["choices"][0]["text"]
        assert json.loads(server.post("/v1/completions", completion(model=None))[1])["choices"][0]["text"] == whole
        assert Streaming(server, 8).text() == whole
        status, text = server.post("/v1/embeddings", {"model": "embed", "input": "7 8"})
        assert status == 200 and len(json.loads(text)["data"][0]["embedding"]) == 48
        status, text = server.post("/v1/rerank", {"model": "embed", "query": "7", "documents": ["8", "7"]})
        assert status == 200 and json.loads(text)["results"][0]["index"] == 1

        status, text = server.post("/v1/completions", completion(model="other"))
        error = json.loads(text)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'chat', 'embed'" in error["message"]
        status, text = server.post("/v1/completions", b'{"model": "chat", ')
        assert status == 400 and "not valid JSON" in text
        packed = gzip.compress(json.dumps(completion()).encode())
        status, text = server.post("/v1/completions", packed, **{"Content-Encoding": "gzip"})
        assert status == 200 and json.loads(text)["choices"][0]["text"] == whole
        assert server.post("/v1/completions", packed[:9], **{"Content-Encoding": "gzip"})[0] == 400
        assert server.post("/v1/completions", completion(model="embed"))[0] == 400, "an encoder does not generate"

        lines = [line for line in server.get("/metrics")[1].splitlines() if line and not line.startswith("#")]
        series = [line.rsplit(" ", 1)[0] for line in lines]
        assert len({*series}) == len(series) and all('model_name="' in each for each in series)
        assert 'octavo:model_loaded{model_name="embed"} 1' in lines
        for name, count in (("chat", 4), ("embed", 4)):
            found = [line for line in lines if line.startswith("vllm:request_success_total") and f'"{name}"' in line]
            assert sum(float(line.rsplit(" ", 1)[1]) for line in found) == count, found
        assert json.loads(server.get("/health")[1]) == {
            "status": "ok", "models": {"chat": {"status": "ok"}, "embed": {"status": "ok"}}
        }  # fmt: skip

        # A model whose server dies does not disturb the other, and comes back.
        long = Streaming(server, 1500)
        assert long.has_begun.wait(LIMIT_S)
        os.kill(supervisor_of(server, "embed", models), signal.SIGKILL)
        wait_for(server, "/health?model=embed", 503)
        wait_for(server, "/health?model=chat", 200)  # a machine that stands still may make it wait
        assert len(long.text()) >= 100
        wait_for(server, "/health?model=embed", 200)
        assert server.post("/v1/embeddings", {"model": "embed", "input": "7 8"})[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        assert not children_of(server.process.pid)


def test_models_take_turns_without_cutting_a_stream(models: tuple[str, str]) -> None:
    turns = ("--max-loaded-models", "1", "--model-min-seconds", "0", "--admin-key", "boss", "--api-key", "user")
    keys = {"Authorization": "Bearer user"}
    with Server(*models, *FLAGS, *turns) as server:
        assert server.get("/v1/models")[0] == 401
        listed = json.loads(server.get("/v1/models", **keys)[1])["data"]
        assert {card["id"]: card["status"] for card in listed} == {"chat": "ready", "embed": "unloaded"}
        assert server.post("/v1/embeddings", {"model": "embed", "input": "7"})[0] == 401
        assert state(server, "embed") == "unloaded", "a stranger cannot have a model loaded"
        assert server.post("/sleep?model=chat", {}, **keys)[0] == 403

        body = completion(max_tokens=1500, stream=True)
        request = urllib.request.Request(
            server.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **keys}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as stream:
            first = stream.readline()
            assert first.startswith(b"data: ")
            found: list[tuple[int, str]] = []
            asking = threading.Thread(
                target=lambda: found.append(server.post("/v1/embeddings", {"model": "embed", "input": "7 8"}, **keys))
            )
            asking.start()
            rest = stream.read().decode()
        assert rest.endswith("data: [DONE]\n\n"), "the stream was not cut"
        asking.join(LIMIT_S)
        assert found and found[0][0] == 200, found
        assert (state(server, "chat"), state(server, "embed")) == ("unloaded", "ok")

        with urllib.request.urlopen(request, timeout=LIMIT_S) as stream:
            again = stream.read().decode()
        comments = [line for line in again.splitlines() if line.startswith(": ")]
        assert all("model chat is" in line for line in comments)
        assert text_of(again) == text_of(first.decode() + rest), "a model answers after a turn as before it"

        boss = {"Authorization": "Bearer boss"}
        for level, asleep in ((1, "asleep"), (2, "unloaded")):
            assert server.post(f"/sleep?model=chat&level={level}", {}, **boss)[0] == 200
            assert json.loads(server.get("/is_sleeping?model=chat", **keys)[1]) == {"is_sleeping": True}
            assert state(server, "chat") == asleep
            assert server.post("/wake_up?model=chat", {}, **boss)[0] == 200
            assert state(server, "chat") == "ok"
            with urllib.request.urlopen(request, timeout=LIMIT_S) as stream:
                assert text_of(stream.read().decode()) == text_of(again), "and after a sleep"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0


def test_a_model_that_cannot_be_loaded_is_named_at_the_start(models: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"model 'broken' could not be loaded: .*missing"):
        Server(f"broken={tmp_path / 'missing'}", models[1], *FLAGS)


def test_a_model_that_fails_on_demand_answers_503(models: tuple[str, str], tmp_path: Path) -> None:
    with Server(f"broken={tmp_path / 'missing'}", models[1], *FLAGS, "--load-on-demand") as server:
        listed = json.loads(server.get("/v1/models")[1])["data"]
        assert [card["status"] for card in listed] == ["unloaded", "unloaded"]
        for _ in range(2):  # the second is refused at once: the load is not tried again for every request
            status, text = server.post("/v1/completions", {"prompt": "a"})
            error = json.loads(text)["error"]
            assert (status, error["code"]) == (503, "engine_unavailable") and "missing" in error["message"], text
        health = json.loads(server.get("/health")[1])
        assert health["models"]["broken"]["status"] == "failed" and "missing" in health["models"]["broken"]["message"]
        assert health["models"]["embed"] == {"status": "unloaded"}
        assert server.get("/health")[0] == 503 and server.get("/health?model=embed")[0] == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0


def test_keys_over_models_with_tls_origins_and_kills(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = make_certificates(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    keys = tmp_path / "keys"
    keys.write_text("one team 1 budget_tokens=2000\ntwo\nadmin: boss\n")
    flags = (
        *models, *FLAGS, "--api-key-file", str(keys), "--files-folder", str(tmp_path / "files"),
        "--allowed-origins", "https://app.example", "--ssl-certfile", str(certificates.server),
        "--ssl-keyfile", str(certificates.server_key),
    )  # fmt: skip
    one = {"Authorization": "Bearer one"}

    def used(server: Server) -> int:
        (usage,) = json.loads(server.get("/v1/usage", **one)[1])["data"]
        return int(usage["total_tokens"])

    with Server(*flags) as server:
        assert server.base.startswith("https://")
        preflight = urllib.request.Request(
            server.base + "/v1/completions",
            headers={"Origin": "https://app.example", "Access-Control-Request-Method": "POST"},
            method="OPTIONS",
        )
        with urllib.request.urlopen(preflight, timeout=LIMIT_S) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        origin = {"Origin": "https://app.example", "Content-Type": "application/json", **one}
        body = json.dumps(completion()).encode()
        with urllib.request.urlopen(
            urllib.request.Request(server.base + "/v1/completions", body, origin), timeout=LIMIT_S
        ) as answer:
            assert answer.headers.get_all("access-control-allow-origin") == ["https://app.example"]
            assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
            total = json.loads(answer.read())["usage"]["total_tokens"]
        _, text = server.post("/v1/embeddings", {"model": "embed", "input": "7 8"}, **one)
        total += json.loads(text)["usage"]["total_tokens"]
        assert used(server) == total, "both models count in one place"
        # A process that is killed has counted what it has sent.
        chat = supervisor_of(server, "chat", models)
        streamed = json.dumps(completion(max_tokens=1500, stream=True, stream_options={"include_usage": True})).encode()
        request = urllib.request.Request(server.base + "/v1/completions", streamed, origin)
        seen = 0
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(request, timeout=LIMIT_S) as stream,
        ):
            for line in stream:
                seen += line.startswith(b'data: {"id"') and b'"text":""' not in line
                if seen == 50:
                    for pid, command in children_of(chat).items():
                        if command.endswith("server.process"):
                            os.kill(pid, signal.SIGKILL)
        wait_for(server, "/health?model=chat", 200)
        counted = used(server)
        assert total + 50 <= counted < 2000
        server.process.kill()
        server.process.wait()
    with Server(*flags) as server:
        assert used(server) == counted, "nothing is lost, nothing is counted again"
        left = 2000 - counted
        body = completion(max_tokens=left, prompt="a" * 10)
        choice = json.loads(server.post("/v1/completions", body, **one)[1])["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget"), left
        assert used(server) == 2000
        assert server.post("/v1/embeddings", {"model": "embed", "input": "7"}, **one)[0] == 429
        assert server.post("/v1/embeddings", {"model": "embed", "input": "7"}, Authorization="Bearer two")[0] == 200
