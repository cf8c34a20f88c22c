"""Web pages: a site that is not ours can neither use this server nor read its answers, and our own pages can."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import Config, replace
from octavo.errors import ConfigError
from octavo.server.http.browsers import machine_names, split_host
from tests.server.conftest import Serve, error_of

COMPLETIONS = "/v1/completions"
BODY = b'{"prompt": "a", "max_tokens": 2}'
JSON = {"content-type": "application/json"}


async def status_of(client: httpx.AsyncClient, host: str, path: str = "/v1/models", **headers: str) -> int:
    return (await client.get(path, headers={"host": host, **headers})).status_code


OWN = [
    "localhost", "localhost:8000", "LOCALHOST", "localhost.", "localhost.:80", "a.localhost", "b.a.localhost:1", "127.0.0.1",
    "127.0.0.1:8000", "192.168.1.7", "[::1]", "[::1]:8000", "[FE80::1]", "[::ffff:10.0.0.1]:9",
]  # fmt: skip
FOREIGN = [
    "rebind.evil.example", "rebind.evil.example:8000", "evil", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost",
    "127.0.0.1.nip.io", "localhost..", "",
]  # fmt: skip
INVALID = [
    "a b", "a:b", "a:123456", "[::1", "::1", "[evil]", "a/b", "http://a", "user@localhost", "a,b", "ä.example", "[::1]x", "a:1:2",
]  # fmt: skip


class TestHosts:
    @pytest.mark.parametrize("host", OWN)
    async def test_own_names_and_addresses(self, serve: Serve, host: str) -> None:
        assert await status_of(serve(), host) == 200

    @pytest.mark.parametrize("host", FOREIGN)
    async def test_names_of_others(self, serve: Serve, host: str) -> None:
        client = serve()
        for path in ("/v1/models", "/", "/health", "/nothing", "/metrics"):
            assert await status_of(client, host, path) in (403, 400), path
        response = await client.post(COMPLETIONS, content=BODY, headers={"host": host or " ", **JSON})
        if host and not host.endswith(".."):
            error = error_of(response, 403)
            assert error["code"] == "forbidden" and "--allowed-hosts" in error["message"], error

    @pytest.mark.parametrize("host", INVALID)
    async def test_no_host_at_all(self, serve: Serve, host: str) -> None:
        for options in ({}, {"api_key": "one"}, {"allowed_hosts": "*"}):
            response = await serve(**options).get("/health", headers={"host": host.encode()})
            assert "Host" in error_of(response, 400)["message"]

    async def test_the_machines_own_name(self, serve: Serve) -> None:
        name = socket.gethostname()
        client = serve()
        for host in (name, name.upper(), name.partition(".")[0], f"{name.partition('.')[0]}.local:8000"):
            assert await status_of(client, host) == 200, host

    def test_the_hosts_file_has_its_full_name(self, tmp_path: Path) -> None:
        name = socket.gethostname().partition(".")[0]
        file = tmp_path / "hosts"
        file.write_text(
            f"127.0.0.1 localhost other\n# 1.2.3.4 {name} commented\n10.0.0.1\t{name}.Corp.Example {name} # {name}.x\n\n1.1.1.1\n"
        )
        found = machine_names(file)
        assert {name.lower(), f"{name.lower()}.corp.example", f"{name.lower()}.local"} <= found
        assert not found & {"other", "commented", f"{name}.x"}
        assert name.lower() in machine_names(tmp_path / "nothing")

    async def test_names_that_the_operator_adds(self, serve: Serve) -> None:
        client = serve(allowed_hosts="LLM.example.com, *.corp.example,short.")
        for host, status in (
            ("llm.example.com", 200), ("LLM.Example.COM.:8443", 200), ("x.llm.example.com", 403), ("example.com", 403),
            ("a.corp.example", 200), ("a.b.corp.example", 200), ("corp.example", 403), ("evilcorp.example", 403), ("short", 200),
            ("localhost", 200), ("10.0.0.1", 200), ("evil.example", 403),
        ):  # fmt: skip
            assert await status_of(client, host) == status, host
        assert await status_of(serve(allowed_hosts="*"), "evil.example") == 200

    async def test_with_a_key_any_name_unless_some_are_given(self, serve: Serve) -> None:
        key = {"authorization": "Bearer one"}
        assert await status_of(serve(api_key="one"), "any.example", **key) == 200
        assert await status_of(serve(admin_key="one"), "any.example", **key) == 200
        client = serve(api_key="one", allowed_hosts="llm.example.com")
        assert await status_of(client, "any.example", **key) == 403
        assert await status_of(client, "llm.example.com", **key) == 200
        assert await status_of(client, "llm.example.com") == 401

    @pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "*.*", "*a", "a.*", "*.", "a..b", "a b", "[::1]"])
    def test_a_flag_that_names_no_host(self, name: str) -> None:
        with pytest.raises(ConfigError, match="--allowed-hosts"):
            replace(Config(), allowed_hosts=name)

    @pytest.mark.parametrize(
        ("version", "hosts", "status"),
        [
            ("1.1", [], 400), ("1.1", [b"localhost", b"localhost"], 400), ("1.1", [b"localhost", b"evil.example"], 400),
            ("1.1", [b"localhost"], 200), ("1.0", [], 200), ("1.0", [b"evil.example"], 403), ("1.0", [b"a", b"a"], 400),
        ],
    )  # fmt: skip
    async def test_one_host_in_each_request(self, serve: Serve, version: str, hosts: list[bytes], status: int) -> None:
        client = serve()
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": version, "method": "GET", "scheme": "http",
            "path": "/v1/models", "raw_path": b"/v1/models", "query_string": b"", "root_path": "", "client": None, "server": None,
            "headers": [(b"host", host) for host in hosts],
        }  # fmt: skip
        await client.app(scope, receive, send)  # type: ignore[attr-defined]
        assert sent[0]["status"] == status, sent

    @pytest.mark.parametrize(
        ("text", "host"),
        [
            ("a", ("a", None)), ("A.b.:80", ("a.b", 80)), ("a:", ("a", None)), ("[::1]:1", ("::1", 1)), (" a ", ("a", None)),
            ("1.2.3.4", ("1.2.3.4", None)), ("a_b-c", ("a_b-c", None)), ("[::1%eth0]", ("::1%eth0", None)), (".", ("", None)),
            ("[1.2.3.4]", ("1.2.3.4", None)), ("[]", None), ("", None), (":80", None),
        ],
    )  # fmt: skip
    def test_parts_of_a_host(self, text: str, host: object) -> None:
        assert split_host(text) == host


def fetched(site: str, mode: str = "cors", dest: str = "empty", **more: str) -> dict[str, str]:
    return {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest, **more}


class TestOrigins:
    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 200),
            (fetched("same-origin", origin="http://localhost"), 200),
            (fetched("same-origin", origin="https://seen.by.the.browser.example"), 200),  # a proxy has rewritten Host
            (fetched("none"), 200),
            (fetched("cross-site", origin="http://evil.example"), 403),
            (fetched("same-site", origin="http://localhost:3000"), 403),
            (fetched("cross-site", "no-cors"), 403),
            (fetched("cross-site", "navigate", "document", origin="http://evil.example"), 403),  # a form
            (fetched(""), 403),
            ({"origin": "http://localhost"}, 200),
            ({"origin": "http://localhost:80"}, 200),
            ({"origin": "http://LOCALHOST"}, 200),
            ({"origin": "https://localhost"}, 403),
            ({"origin": "http://localhost:3000"}, 403),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "http://localhost.evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": ""}, 403),
            ({"origin": "localhost"}, 403),
            ({"origin": "file://localhost"}, 403),
            ({"origin": "https://localhost", "x-forwarded-proto": "https"}, 200),
            ({"origin": "https://llm.example", "x-forwarded-proto": "https, http", "x-forwarded-host": "llm.example"}, 200),
            ({"origin": "https://evil.example", "x-forwarded-proto": "https", "x-forwarded-host": "llm.example"}, 403),
        ],
    )  # fmt: skip
    async def test_a_change_is_for_our_own_pages(self, serve: Serve, headers: dict[str, str], status: int) -> None:
        client = serve()
        response = await client.post(COMPLETIONS, content=BODY, headers={**JSON, **headers})
        assert response.status_code == status, response.text
        if status == 403:
            error = error_of(response, 403)
            assert error["code"] == "forbidden" and "--allowed-origins" in error["message"], error
        assert (await client.delete("/v1/responses/x", headers=headers)).status_code == (404 if status == 200 else 403)

    async def test_two_origins_are_not_one(self, serve: Serve) -> None:
        headers = [("origin", "http://localhost"), ("origin", "http://evil.example")]
        response = await serve().post(COMPLETIONS, content=BODY, headers=[*JSON.items(), *headers])
        assert response.status_code == 403

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            (fetched("cross-site", "navigate", "document"), 200),
            (fetched("same-site", "navigate", "document"), 200),
            (fetched("none", "navigate", "document"), 200),
            ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
            (fetched("cross-site", "navigate", "iframe"), 403),
            (fetched("cross-site", "no-cors", "image"), 403),
            (fetched("cross-site", "no-cors", "script"), 403),
            (fetched("cross-site", "cors", origin="http://evil.example"), 403),
            (fetched("same-origin", "no-cors", "script"), 200),
            ({"origin": "http://evil.example"}, 403),
        ],
    )
    async def test_links_from_elsewhere_work(self, serve: Serve, headers: dict[str, str], status: int) -> None:
        client = serve()
        for path in ("/", "/play", "/pages/shared/common.js", "/v1/models", "/openapi.json"):
            assert (await client.get(path, headers=headers)).status_code == status, path

    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("text/plain", 403), ("text/plain;application/json", 403),
            ("application/x-www-form-urlencoded", 403), ("", 403), ("application/jsonx", 403), (None, 403),
        ],
    )  # fmt: skip
    async def test_browsers_post_json(self, serve: Serve, kind: str | None, status: int) -> None:
        client = serve()
        typed = {} if kind is None else {"content-type": kind}
        for browser in (fetched("same-origin"), {"origin": "http://localhost"}):
            response = await client.post(COMPLETIONS, content=BODY, headers={**typed, **browser})
            assert response.status_code == status, response.text
        assert (await client.post(COMPLETIONS, content=BODY, headers=typed)).status_code == 200, (
            "other clients may omit it"
        )

    async def test_browsers_post_without_a_body(self, serve: Serve) -> None:
        response = await serve().post("/v1/responses/x/cancel", headers=fetched("same-origin"))
        assert response.status_code == 404

    async def test_uploads(self, serve: Serve, tmp_path: Path) -> None:
        client = serve(files_folder=str(tmp_path))
        for headers, status in (
            ({}, 200), (fetched("same-origin", origin="http://localhost"), 200), (fetched("cross-site", "no-cors"), 403),
            ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
        ):  # fmt: skip
            line = json.dumps(
                {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}
            ).encode()
            response = await client.post(
                "/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"}, headers=headers
            )
            assert response.status_code == status, response.text

    async def test_a_site_that_rebinds_its_name_is_its_own_origin_and_still_refused(self, serve: Serve) -> None:
        headers = {
            "host": "rebind.evil.example:8000",
            **fetched("same-origin", origin="http://rebind.evil.example:8000"),
            **JSON,
        }
        assert error_of(await serve().post(COMPLETIONS, content=BODY, headers=headers), 403)["code"] == "forbidden"
        headers |= {"x-forwarded-host": "localhost"}
        assert (await serve().post(COMPLETIONS, content=BODY, headers=headers)).status_code == 403

    async def test_origins_that_the_operator_allows(self, serve: Serve) -> None:
        client = serve(allowed_origins="https://ui.example,http://localhost:3000")
        for origin, status in (
            ("https://ui.example", 200), ("http://localhost:3000", 200), ("http://ui.example", 403), ("https://evil.example", 403),
        ):  # fmt: skip
            for browser in ({}, fetched("cross-site")):
                response = await client.post(COMPLETIONS, content=BODY, headers={"origin": origin, **browser, **JSON})
                assert response.status_code == status, origin
                assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
        preflight = {"origin": "https://ui.example", "access-control-request-method": "POST"}
        assert (await client.options(COMPLETIONS, headers=preflight)).status_code == 200
        response = await client.post(
            COMPLETIONS, content=BODY, headers={"origin": "https://ui.example", "content-type": "text/plain"}
        )
        assert response.status_code == 403
        view = serve(allowed_origins="app://obsidian.md,null")
        for origin in ("app://obsidian.md", "null"):
            headers = {**JSON, **fetched("cross-site", origin=origin)}
            assert (await view.post(COMPLETIONS, content=BODY, headers=headers)).status_code == 200
        free = serve(allowed_origins="*")
        for headers in ({"origin": "https://evil.example"}, fetched("cross-site", "no-cors")):
            assert (await free.post(COMPLETIONS, content=BODY, headers={**headers, **JSON})).status_code == 200

    async def test_who_sends_a_key_may_come_from_anywhere(self, serve: Serve) -> None:
        client = serve(api_key="one")
        evil = fetched("cross-site", origin="http://evil.example", host="any.example")
        for key, status in (
            ({"authorization": "Bearer one"}, 200), ({"x-api-key": "one"}, 200), ({"authorization": "Bearer two"}, 401), ({}, 401),
        ):  # fmt: skip
            response = await client.post(COMPLETIONS, content=BODY, headers={**evil, **key})
            assert response.status_code == status, key
        assert (await client.get("/health", headers=evil)).status_code == 200
