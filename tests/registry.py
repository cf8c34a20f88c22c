"""A small hub: a real HTTP server with repositories, ranges, redirects to a second address, tokens and failures."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
LFS_BYTES = 64  # larger files have a checksum, and lie at the second address


class Registry:
    """Files by repository. `requests`: (path, Range or "", has a token) of every download. Failures are set by tests."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, bool]] = []
        self.stored_requests: list[bool] = []  # at the second address: whether the token came along
        self.token = ""  # needed for every repository, where it is not empty
        self.gated: set[str] = set()
        self.has_ranges = True
        self.cuts: list[int] = []  # bytes after which the next downloads break off, one entry for each
        self.num_errors = 0  # so many next requests are answered with 500
        self.spoilt: set[str] = set()  # files of which other bytes are sent than are listed
        self.listing: bytes | None = None  # sent in place of every listing
        self.pause = threading.Event()  # while clear, a download stops after its first bytes
        self.pause.set()
        self._main = _serve(self, _Main)
        self._store = _serve(self, _Stored)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._main.server_address[1]}"

    @property
    def store_url(self) -> str:
        return f"http://localhost:{self._store.server_address[1]}"

    def close(self) -> None:
        self.pause.set()
        for server in (self._main, self._store):
            server.shutdown()
            server.server_close()


@contextmanager
def registry() -> Iterator[Registry]:
    opened = Registry()
    try:
        yield opened
    finally:
        opened.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: Registry


def _serve(registry: Registry, handler: type[BaseHTTPRequestHandler]) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    server.registry = registry
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """No log: tests look at Registry.requests."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, data: bytes) -> None:
        registry = self.server.registry
        start, status, headers = 0, 200, {}
        asked = self.headers.get("Range", "")
        if asked and registry.has_ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                return self.answer(416)
            status, headers = 206, {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        rest = data[start:]
        cut = registry.cuts.pop(0) if registry.cuts else len(rest)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(rest)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        half = min(cut, len(rest)) // 2
        self.wfile.write(rest[:half])
        self.wfile.flush()
        registry.pause.wait(30)
        self.wfile.write(rest[half:cut])
        if cut < len(rest):
            self.close_connection = True
        return None


class _Main(_Handler):
    def do_GET(self) -> None:
        registry, path = self.server.registry, unquote(urlsplit(self.path).path).strip("/")
        has_token = self.headers.get("Authorization") == f"Bearer {registry.token}"
        if registry.num_errors:
            registry.num_errors -= 1
            return self.answer(500)
        if path.startswith("api/models/"):
            hub_id, _, revision = path.removeprefix("api/models/").partition("/revision/")
            return self.list_files(hub_id, revision, has_token)
        hub_id, _, rest = path.partition("/resolve/")
        name = rest.partition("/")[2]
        registry.requests.append((name, self.headers.get("Range", ""), "Authorization" in self.headers))
        data = registry.repositories.get(hub_id, {}).get(name)
        if data is None or (registry.token and not has_token):
            return self.answer(404, X_Error_Code="EntryNotFound")
        if len(data) >= LFS_BYTES:
            return self.answer(302, Location=f"{registry.store_url}/{hub_id}/{name}?signature=x")
        return self.send_file(data)

    def list_files(self, hub_id: str, revision: str, has_token: bool) -> None:
        registry = self.server.registry
        if hub_id in registry.gated:
            return self.answer(403, X_Error_Code="GatedRepo")
        if hub_id not in registry.repositories or (registry.token and not has_token):
            return self.answer(401 if registry.token else 404, X_Error_Code="RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        siblings = []
        for name, data in registry.repositories[hub_id].items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if len(data) >= LFS_BYTES:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = json.dumps({"id": hub_id, "sha": COMMIT, "siblings": siblings}).encode()
        return self.answer(200, body if registry.listing is None else registry.listing, Content_Type="application/json")


class _Stored(_Handler):
    def do_GET(self) -> None:
        registry, path = self.server.registry, unquote(urlsplit(self.path).path).strip("/")
        owner, own, name = path.split("/", 2)
        registry.stored_requests.append("Authorization" in self.headers)
        data = registry.repositories[f"{owner}/{own}"][name]
        self.send_file(bytes(len(data)) if name in registry.spoilt else data)
