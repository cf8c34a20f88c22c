"""Hub ids against a small real HTTP server that answers as a hub does; each case in a process of its own.

The library reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE when it is imported, hence the processes."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from octavo.weights.sources.hub import looks_like_hub_id

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"spm",
    "generation_config.json": b'{"eos_token_id": 2}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors": b"weights" * 100,
    "README.md": b"# no",
    "pytorch_model.bin": b"pickle",
    "model.onnx": b"onnx",
    "consolidated.safetensors": b"again",
    "original/model.safetensors": b"and again",
    "original/params.json": b"{}",
    "original/tokenizer.model": b"spm",
    "onnx/merges.txt": b"a b",
    "onnx/model.onnx": b"onnx",
}
REPOSITORIES = {
    "org/tiny": FILES,
    "lone": FILES,
    "org/pickled": {"config.json": FILES["config.json"], "pytorch_model.bin": b"pickle"},
    "org/bare": {"model.safetensors": b"x"},
    "org/secret": FILES,
}


class Hub(ThreadingHTTPServer):
    """Counts downloads; org/secret needs the right token, org/gated refuses everyone, org/broken answers 500."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.downloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(self.path.split("?")[0]).strip("/")
        if path.startswith("api/models/"):
            status, headers, body = self.describe(path.removeprefix("api/models/"))
        else:
            status, headers, body = self.download(path, with_body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def describe(self, path: str) -> tuple[int, dict[str, str], bytes]:
        what = next((what for what in ("/revision/", "/tree/") if what in path), "")
        hub_id, _, revision = path.partition(what) if what else (path, "", "main")
        if hub_id == "org/broken":
            return 500, {}, b"{}"
        if hub_id == "org/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        private = hub_id == "org/secret" and self.headers["Authorization"] != "Bearer right"
        if hub_id not in REPOSITORIES or private:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if revision not in ("main", "v1", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = REPOSITORIES[hub_id]
        if what == "/tree/":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        info = {"id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    def download(self, path: str, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        hub_id, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        data = REPOSITORIES.get(hub_id, {}).get(name)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if with_body:
            self.server.downloads.append(name)
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data

    def log_message(self, format: str, *args: object) -> None:
        """No log: a failing test prints the downloads."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import sys
from octavo.errors import ConfigError
from octavo.weights.sources.source import resolve
try:
    source = resolve(sys.argv[1], sys.argv[2], allow_missing_weights=sys.argv[3] == "dummy")
except ConfigError as error:
    print("refused", error.message)
else:
    print(source.kind, source.name, source.path)
assert "torch" not in sys.modules
"""


def run_resolve(
    home: Path, endpoint: str, hub_id: str, revision: str = "", load: str = "auto", **environment: str
) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    clean = {name: value for name, value in clean.items() if not name.lower().endswith("_proxy")}
    environment = {**clean, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment}
    command = [sys.executable, "-c", PROGRAM, hub_id, revision, load]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("\n") == 1, "one line"
    return ran.stdout.strip()


def folder_of(answer: str) -> Path:
    assert answer.startswith("folder "), answer
    return Path(answer.split(" ", 2)[2])


def test_what_serves_a_model_is_fetched_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    answer = run_resolve(tmp_path, hub.url, "org/tiny")
    assert answer.split()[1] == "org/tiny"
    folder = folder_of(answer)
    wanted = set(list(FILES)[:7])
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == wanted
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sorted(hub.downloads) == sorted(wanted)
    assert folder_of(run_resolve(tmp_path, hub.url, "org/tiny")) == folder
    assert len(hub.downloads) == len(wanted), "the second time all is in the cache"


def test_a_fetched_model_is_there_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(run_resolve(tmp_path, hub.url, "org/tiny"))
    assert folder_of(run_resolve(tmp_path, hub.url, "org/tiny", HF_HUB_OFFLINE="1")) == folder
    assert folder_of(run_resolve(tmp_path, "http://127.0.0.1:1", "org/tiny")) == folder


def test_a_name_of_one_word_and_a_revision(hub: Hub, tmp_path: Path) -> None:
    assert run_resolve(tmp_path, hub.url, "lone", "v1").startswith("folder lone")
    answer = run_resolve(tmp_path, hub.url, "lone", "v9")
    assert answer.startswith("refused") and "v9" in answer and "--revision" in answer


def test_random_weights_need_no_weights_fetched(hub: Hub, tmp_path: Path) -> None:
    folder = folder_of(run_resolve(tmp_path, hub.url, "org/tiny", "", "dummy"))
    assert not (folder / "model.safetensors").exists()
    assert "model.safetensors" not in hub.downloads


def test_a_token_opens_what_is_private(hub: Hub, tmp_path: Path) -> None:
    assert "HF_TOKEN" in run_resolve(tmp_path, hub.url, "org/secret")
    assert run_resolve(tmp_path, hub.url, "org/secret", HF_TOKEN="right").startswith("folder")


@pytest.mark.parametrize(
    ("hub_id", "problem"),
    [
        ("org/none", "neither a file or folder here nor a model"),
        ("org/gated", "gated"),
        ("org/pickled", "no safetensors"),
        ("org/bare", "config.json"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(hub: Hub, tmp_path: Path, hub_id: str, problem: str) -> None:
    answer = run_resolve(tmp_path, hub.url, hub_id)
    assert answer.startswith("refused") and problem in answer and hub_id in answer
    assert "pytorch_model.bin" not in hub.downloads


def test_a_hub_that_fails_or_is_not_there(hub: Hub, tmp_path: Path) -> None:
    for endpoint, hub_id in ((hub.url, "org/broken"), ("http://127.0.0.1:1", "org/tiny")):
        answer = run_resolve(tmp_path, endpoint, hub_id)
        assert answer.startswith("refused") and endpoint in answer and hub_id in answer
    answer = run_resolve(tmp_path, hub.url, "org/tiny", HF_HUB_OFFLINE="1")
    assert answer.startswith("refused") and "HF_HUB_OFFLINE" in answer


@pytest.mark.parametrize("name", ["gpt2", "org/model", "Org-1/model_2.5", "HuggingFaceTB/SmolLM2-135M"])
def test_hub_ids(name: str) -> None:
    assert looks_like_hub_id(name)


@pytest.mark.parametrize("name", ["", "/a", "./a", "~/a", "a/", "a/b/c", "a b", "../a", "a..b/c", "a/b\n", "-x", "é/b"])
def test_what_is_no_hub_id(name: str) -> None:
    assert not looks_like_hub_id(name)
