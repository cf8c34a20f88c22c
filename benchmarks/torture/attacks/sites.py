"""Attacks whose harm is what they may do: pages of other sites, forged log lines, objects of another key."""

import base64
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.torture.attacks.base import BASES, HI, Answer, Attack, Door, Send, Strike, dumped, must_be, one

_EVIL = "https://evil.example"
_CHAT = "/v1/chat/completions"
_BODY = dumped(BASES[_CHAT])
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
)


def _forbidden(name: str, method: str, path: str, body: bytes = b"", host: str = "", **headers: str) -> Attack:
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return one(
        f"site-{name}",
        lambda door: door.request(method, path, body, given, host=host.replace("PORT", str(door.port))),
        needs="no key",
        is_cheap=True,
        check=must_be(403),
    )


def _allowed(name: str, **headers: str) -> Attack:
    """The server's own pages and programs must keep working."""

    def make(door: Door) -> bytes:
        given = {key: value.replace("PORT", str(door.port)) for key, value in headers.items()}
        return door.request("POST", _CHAT, _BODY, given)

    return one(f"site-{name}", make, is_cheap=True, check=must_be(200))


def _basic(key: str) -> str:
    """As browsers send a password that they have stored."""
    return "Basic " + base64.b64encode(f"torture:{key}".encode()).decode()


def _forged(answers: Sequence[Answer], door: Door) -> str:
    """No line of the log begins with what the path holds, and no control character reaches a terminal."""
    text = Path(door.log).read_bytes()
    if any(line.startswith(b"forged") for line in text.splitlines()):
        return "a forged line is in the log"
    return "an escape character is in the log" if b"\x1b" in text else ""


def _log_lines(door: Door, dice: random.Random) -> Strike:
    paths = [
        "/v1/models/a%0aforged:%20all%20is%20well", "/a%0d%0aforged%20line", "/v1/files/%1b%5b2Jforged", "/%1b]0;title%07",
        "/v1/requests/%c2%9b31m", "/x?a=%0aforged", "/%e2%80%a8forged",
    ]  # fmt: skip
    yield [Send([door.request("GET", path)]) for path in paths]
    yield [Send([door.request("POST", _CHAT, b"{", {"X-Request-Id": "a\x1bforged", "User-Agent": "\x1b[2J"})])]
    body = dumped({"messages": HI, "max_tokens": 1, "model": "x\nforged: y", "user": "\x1b[2J", "x\nforged\x1b": 1})
    yield [Send([door.request("POST", _CHAT, body)])]


def _not_theirs(door: Door, dice: random.Random) -> Strike:
    """Make a file, a batch, a response and a stream with one key, and read them with another. The last round's answers count."""
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    stream = {"prompt": "a", "max_tokens": 4, "stream": True, "stream_options": {"resumable": True}}
    file, response, streamed = yield [
        Send([door.request("POST", "/v1/files", _FORM, form)]),
        Send([door.request("POST", "/v1/responses", dumped({"input": "hi", "max_output_tokens": 1}))]),
        Send([door.request("POST", "/v1/completions", dumped(stream))]),
    ]
    start = {"input_file_id": file.id, "endpoint": _CHAT, "completion_window": "24h"}
    (batch,) = yield [Send([door.request("POST", "/v1/batches", dumped(start))])]
    asked = response.headers.get("x-request-id", "none")
    wanted = [
        ("GET", f"/v1/files/{file.id}"), ("GET", f"/v1/files/{file.id}/content"), ("DELETE", f"/v1/files/{file.id}"),
        ("GET", f"/v1/batches/{batch.id}"), ("POST", f"/v1/batches/{batch.id}/cancel"), ("GET", f"/v1/responses/{response.id}"),
        ("DELETE", f"/v1/responses/{response.id}"), ("GET", f"/v1/responses/{response.id}/input_items"),
        ("GET", f"/v1/stream/{streamed.headers.get('x-stream-id', 'none')}"), ("GET", f"/v1/requests/{asked}"),
    ]  # fmt: skip
    yield [Send([door.request(method, path, key=door.other_key)]) for method, path in wanted]


def _still_theirs(door: Door, dice: random.Random) -> Strike:
    """The owner and an admin key see a file that a third key does not."""
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    (file,) = yield [Send([door.request("POST", "/v1/files", _FORM, form)])]
    yield [Send([door.request("GET", f"/v1/files/{file.id}", key=key)]) for key in (door.key, door.admin_key)]


ATTACKS = [
    _forbidden("cross-origin", "POST", _CHAT, _BODY, Origin=_EVIL),
    _forbidden("null-origin", "POST", _CHAT, _BODY, Origin="null"),
    _forbidden("text-plain", "POST", _CHAT, _BODY, Origin=_EVIL, Content_Type="text/plain"),
    _forbidden("fetch-metadata", "POST", _CHAT, _BODY, Sec_Fetch_Site="cross-site"),
    _forbidden("cross-origin-upload", "POST", "/v1/files", _FORM, Origin=_EVIL, Content_Type="multipart/form-data; boundary=b"),
    _forbidden("cross-origin-delete", "DELETE", "/v1/files/file-0", Origin=_EVIL),
    _forbidden("cross-origin-tokenize", "POST", "/tokenize", dumped(BASES["/tokenize"]), Origin="http://localhost.evil.example"),
    _forbidden("rebound-host", "POST", _CHAT, _BODY, host="evil.example:PORT"),
    _forbidden("rebound-host-read", "GET", "/v1/requests", host="evil.example:PORT"),
    _forbidden("rebound-host-same-origin", "POST", _CHAT, _BODY, host="evil.example:PORT", Origin="http://evil.example:PORT"),
    _allowed("own-origin-is-answered", Origin="http://127.0.0.1:PORT"),
    _allowed("program-is-answered"),
    one("site-without-a-key", lambda door: door.request("POST", _CHAT, _BODY, key="wrong"), needs="key", is_cheap=True, check=must_be(401)),
    one("site-password-from-elsewhere", lambda door: door.request("POST", _CHAT, _BODY, {"Origin": _EVIL, "Authorization": _basic(door.key)}),
        needs="key", is_cheap=True, check=must_be(401, 403)),
    one("site-password-is-answered", lambda door: door.request("POST", _CHAT, _BODY, {"Authorization": _basic(door.key)}),
        needs="key", is_cheap=True, check=must_be(200)),
    Attack("log-lines-in-paths", _log_lines, is_cheap=True, check=_forged),
    Attack("other-key-objects", _not_theirs, needs="key", seconds=15.0, check=must_be(404)),
    Attack("other-key-owner-and-admin", _still_theirs, needs="key", check=must_be(200)),
]  # fmt: skip
