"""A server without a key in a real browser: its own pages work by every name of the machine and behind proxies, links from elsewhere
open them, and another site's page gets nothing done."""

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.browser.conftest import PATIENCE_S, until
from tests.browser.test_browser_play import ask, ended
from tests.e2e.servers import Server

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--kv-cache-memory-bytes", "60M", "--max-model-len", "512") as started:
        yield started


def use_both_pages(page: Any, base: str) -> None:
    page.goto(base + "/")
    until(page, "document.body.textContent.includes('SmolLM2')")
    page.goto(base + "/play")
    ask(page, "Hi", max_tokens="4")
    ended(page)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "tunnel.localhost"])
def test_the_pages_work_by_every_name(page: Any, server: Server, name: str) -> None:
    use_both_pages(page, server.base.replace("127.0.0.1", name))


@contextlib.contextmanager
def proxy(server: Server, change: Callable[[bytes], bytes]) -> Iterator[str]:
    """A reverse proxy that changes the head of each request. One request per connection."""
    target = ("127.0.0.1", int(server.base.rpartition(":")[2]))

    def pass_on(client: socket.socket) -> None:
        with client, socket.create_connection(target) as upstream:
            data = b""
            while b"\r\n\r\n" not in data:
                if not (chunk := client.recv(65536)):
                    return
                data += chunk
            head, _, rest = data.partition(b"\r\n\r\n")
            lines = [line for line in change(head).split(b"\r\n") if not line.lower().startswith(b"connection:")]
            upstream.sendall(b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + rest)
            while True:
                for ready in select.select([client, upstream], [], [])[0]:
                    if not (chunk := ready.recv(65536)):
                        return
                    (upstream if ready is client else client).sendall(chunk)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def rewritten(head: bytes) -> bytes:
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"host:")]
    return b"\r\n".join([*lines, b"Host: 10.9.8.7:8000"])


def without_fetch_metadata(head: bytes) -> bytes:
    """As a browser sends it over plain HTTP from another machine."""
    lines = head.split(b"\r\n")
    host = next(line[5:].strip() for line in lines if line.lower().startswith(b"host:"))
    kept = [line for line in lines if not line.lower().startswith((b"sec-", b"host:"))]
    return b"\r\n".join([*kept, b"Host: 10.9.8.7:8000", b"X-Forwarded-Host: " + host, b"X-Forwarded-Proto: http"])


@pytest.mark.parametrize("change", [bytes, rewritten, without_fetch_metadata], ids=["as it is", "Host", "forwarded"])
def test_the_pages_work_behind_a_proxy(page: Any, server: Server, change: Callable[[bytes], bytes]) -> None:
    with proxy(server, change) as base:
        use_both_pages(page, base)


ATTACKS = """async (base) => {
  const body = JSON.stringify({ prompt: "a", max_tokens: 1 });
  const attempts = {
    simple: () => fetch(base + "/v1/completions", { method: "POST", body, mode: "no-cors" }),
    text: () => fetch(base + "/v1/completions", { method: "POST", body, mode: "no-cors", headers: { "Content-Type": "text/plain" } }),
    untyped: () => fetch(base + "/v1/completions", { method: "POST", body: new Blob([body]), mode: "no-cors" }),
    json: () => fetch(base + "/v1/completions", { method: "POST", body, headers: { "Content-Type": "application/json" } }),
    upload: () => {
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", new Blob(["{}"]), "a.jsonl");
      return fetch(base + "/v1/files", { method: "POST", body: form, mode: "no-cors" });
    },
    read: () => fetch(base + "/v1/models"),
    beacon: () => navigator.sendBeacon(base + "/v1/completions", body),
    image: () => new Promise((done) => Object.assign(new Image(), { onload: done, onerror: done, src: base + "/v1/models" })),
  };
  const results = {};
  for (const [name, attempt] of Object.entries(attempts))
    results[name] = await Promise.resolve(attempt()).then((got) => String(got?.type ?? got), () => "refused");
  return results;
}"""


class Elsewhere(BaseHTTPRequestHandler):
    """Another site: an empty page, or one with a form and a link."""

    target = ""

    def do_GET(self) -> None:
        body = (
            "<!doctype html><link rel=icon href=data:,>"
            f"<form method=post enctype=text/plain action='{self.target}/v1/completions'>"
            """<input name='{"prompt":"a","max_tokens":1,"x":"' value='"}'><button id=send>send</button></form>"""
            f"<a id=link href='{self.target}/play'>link</a><iframe src='{self.target}/v1/models'></iframe>"
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def elsewhere(server: Server) -> Iterator[str]:
    Elsewhere.target = server.base
    other = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield f"http://evil.localhost:{other.server_address[1]}/"
    other.shutdown()
    other.server_close()


def test_another_sites_page_gets_nothing_done(page: Any, server: Server, elsewhere: str) -> None:
    before = server.metric("vllm:request_success_total")
    forbidden = server.metric("octavo:forbidden_requests_total")
    page.goto(elsewhere)
    results = page.evaluate(ATTACKS, server.base)
    assert results["json"] == results["read"] == "refused", results
    page.click("#send")  # a form, which navigates to the answer
    until(page, "document.body.textContent.includes('forbidden')")
    assert server.metric("vllm:request_success_total") == before
    assert server.metric("octavo:forbidden_requests_total") - forbidden >= 8
    assert json.loads(server.get("/v1/files")[1])["data"] == []


def test_a_link_from_another_site_opens_our_page(page: Any, server: Server, elsewhere: str) -> None:
    page.goto(elsewhere)
    page.click("#link")
    ask(page, "Hi", max_tokens="4")
    ended(page)
