"""The door and the one error handler: keys, bodies, routes, ids, and what we did not foresee."""

import asyncio
import base64
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.errors import EngineDead, Field, InvalidRequest, Overloaded
from octavo.messages import GenerateRequest, TokenDelta
from octavo.server.generate.field_names import FieldNames
from octavo.server.http.errors import describe
from octavo.server.http.middleware import Entrance
from tests.doubles import REPORT, ScriptedEngine, byte_text, config, says
from tests.server.conftest import Serve, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/byte-model"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/v1/live"),
    ("POST", COMPLETIONS), ("POST", CHAT), ("GET", "/nowhere"), ("OPTIONS", CHAT), ("GET", "/openapi.json"), ("POST", "/docs"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/compat"), ("GET", "/health/"), ("GET", "/HEALTH"), ("GET", "/health/ready/"),
    ("GET", "/health/progress"), ("POST", "/"), ("POST", "/pages/cockpit.js"),
]  # fmt: skip


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), ROUTES)
    async def test_every_route_but_health_needs_a_key(self, serve: Serve, method: str, path: str) -> None:
        client = serve(api_key="secret")
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer "},
        ):
            response = await client.request(method, path, headers=headers)
            error = error_of(response, 401)
            assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "secret" not in response.text

    async def test_probes_are_open(self, serve: Serve) -> None:
        for path in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await serve(api_key="secret").get(path)).status_code == 200
        assert (await serve(api_key="secret").post("/ping")).json() == {"status": "ok"}

    @pytest.mark.parametrize(
        ("options", "expected"),
        [  # without a key, with the API key, with the metrics key
            ({}, (200, 200, 200)),
            ({"api_key": "secret"}, (401, 200, 401)),
            ({"api_key": "secret", "metrics_open": True}, (200, 200, 200)),
            ({"api_key": "secret", "metrics_key": "other, scraper"}, (401, 200, 200)),
            ({"metrics_key": "scraper"}, (401, 401, 200)),
        ],
    )
    async def test_who_reads_metrics(self, serve: Serve, options: dict[str, Any], expected: tuple[int, ...]) -> None:
        client = serve(**options)
        headers = [{}, {"authorization": "Bearer secret"}, {"authorization": "Bearer scraper"}]
        assert tuple([(await client.get("/metrics", headers=each)).status_code for each in headers]) == expected
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics/"), ("POST", COMPLETIONS)):
            response = await client.request(method, path, headers=headers[2])
            assert (response.status_code == 401) == ("api_key" in options), path

    async def test_open_metrics_are_not_for_other_sites_pages(self, serve: Serve) -> None:
        client = serve(api_key="secret", metrics_open=True)
        response = await client.get("/metrics", headers={"origin": "https://evil.example"})
        assert response.status_code == 403 and "# TYPE" not in response.text

    @pytest.mark.parametrize(
        ("credentials", "status"),
        [
            (b"anybody:one", 200), (b":one", 200), (b"\xff\xfe:one", 200), ("é:schlüssel".encode(), 200), (b"a:b:c", 200),
            (b"one", 401), (b"one:", 401), (b":", 401), (b"", 401), (b"a:two", 401), (b"a:one ", 401), (b"a:\xff\xfe", 401),
            ("é:schlüssel".encode("latin-1"), 401),
        ],
    )  # fmt: skip
    async def test_a_key_as_a_password(self, serve: Serve, credentials: bytes, status: int) -> None:
        client = serve(api_key="one, schlüssel, b:c")
        header = b"Basic " + base64.b64encode(credentials)
        assert (await client.get("/v1/models", headers={"authorization": header})).status_code == status

    async def test_credentials_that_are_none(self, serve: Serve) -> None:
        client = serve(api_key="one")
        for header in (
            b"Basic",
            b"Basic ",
            b"Basic a:one",
            b"Basic YTpvbmU",
            b"Basic YTpvbmU= x",
            b"Basic \xff\xfe",
            b"YTpvbmU=",
        ):
            response = await client.get("/v1/models", headers={"authorization": header})
            assert error_of(response, 401)["code"] == "invalid_api_key", header
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/v1/models", headers={"authorization": b"basic  YTpvbmU= "})).status_code == 200

    async def test_a_password_that_a_browser_sends_for_another_sites_page_opens_nothing(self, serve: Serve) -> None:
        client = serve(api_key="one")
        for headers, status in (
            ({}, 200), ({"origin": "http://localhost"}, 200), ({"sec-fetch-site": "same-origin", "origin": "http://inner"}, 200),
            ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site", "origin": "http://localhost"}, 403),
        ):  # fmt: skip
            response = await client.post(COMPLETIONS, json={"prompt": "a"}, auth=("a", "one"), headers=headers)
            assert response.status_code == status, headers
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/play", auth=("a", "one"), headers=link)).status_code == 200
        header = {"authorization": "Bearer one", "origin": "http://evil.example"}
        assert (await client.post(COMPLETIONS, json={"prompt": "a"}, headers=header)).status_code == 200

    async def test_several_keys(self, serve: Serve) -> None:
        client = serve(api_key="one, two,")
        for header, status in (
            ("Bearer one", 200), ("bearer two", 200), ("Bearer ", 401), ("Bearer one, two", 401), ("Basic one", 401),
            ("Bearer \xff", 401),
        ):  # fmt: skip
            response = await client.get("/v1/models", headers={"authorization": header.encode("latin-1")})
            assert response.status_code == status, header

    async def test_a_key_outside_ascii(self, serve: Serve) -> None:
        client = serve(api_key="schlüssel, 鍵")
        for key, status in (("schlüssel", 200), ("鍵", 200), ("schlussel", 401), ("Ã¼", 401)):
            response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert response.status_code == status, key

    async def test_no_key_configured_means_open(self, serve: Serve) -> None:
        assert (await serve().get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 200

    async def test_behind_a_prefix(self, serve: Serve) -> None:
        client = serve(api_key="secret", root_path="/llm")
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/llm/llm/health")).status_code == 401
        assert (await client.get("/llmhealth")).status_code == 401
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200


class TestBodies:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize(
        ("body", "words"),
        [
            (b"", "not valid JSON"),
            (b'{"model": ', "not valid JSON"),
            (b"{'model': 1}", "not valid JSON"),
            (b'{"a": 1} x', "not valid JSON"),
            (b'{"model": "\xff"}', "not valid JSON"),
            (b'{"model": "\\ud83d"}', "not valid JSON"),
            (b'{"messages":' + b"[" * 20000 + b"]" * 20000 + b"}", "nested deeper than 128 levels"),
            (b'{"x":' * 20000 + b"1" + b"}" * 20000, "nested deeper than 128 levels"),
            (b"[]", "JSON object"),
            (b"null", "JSON object"),
            (b'"text"', "JSON object"),
            (b"5", "JSON object"),
        ],
        ids=lambda value: str(value)[:20],
    )
    async def test_malformed(self, serve: Serve, path: str, body: bytes, words: str) -> None:
        assert words in error_of(await serve().post(path, content=body), 400)["message"]

    async def test_not_a_number(self, serve: Serve) -> None:
        for value in ("NaN", "Infinity", "-Infinity", "1e999"):
            response = await serve().post(COMPLETIONS, content=f'{{"prompt": "a", "temperature": {value}}}')
            assert error_of(response, 400)["param"] in ("temperature", None)

    async def test_declared_length_over_the_limit(self, serve: Serve) -> None:
        response = await serve(max_body_bytes=100).post(COMPLETIONS, content=b" " * 101)
        error = error_of(response, 413)
        assert "100 bytes" in error["message"] and error["code"] == "request_too_large"

    async def test_chunked_length_over_the_limit(self, serve: Serve) -> None:
        num_read = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal num_read
            for _ in range(1000):
                num_read += 10
                yield b" " * 10

        client = serve(max_body_bytes=100)
        response = await client.post(COMPLETIONS, content=chunks())
        assert "content-length" not in response.request.headers
        assert "100 bytes" in error_of(response, 413)["message"]
        assert num_read == 110, "reading must stop where the limit is passed"

    async def test_a_body_at_the_limit_is_read(self, serve: Serve) -> None:
        body = json.dumps({"prompt": "a"}).encode()
        client = serve(max_body_bytes=100)
        assert (await client.post(COMPLETIONS, content=body.ljust(100))).status_code == 200

    async def test_all_bodies_together_have_a_limit(self, serve: Serve) -> None:
        client = serve(max_bodies_bytes=2**20)
        began, may_end = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"prompt": "a", "max_tokens": 1}' + b" " * (2**20 - 100_000)
            began.set()
            await may_end.wait()
            yield b" "

        large = b'{"prompt": "a", "max_tokens": 1}'.ljust(150_000)
        first = asyncio.create_task(client.post(COMPLETIONS, content=slow()))
        await began.wait()
        refused = await client.post(COMPLETIONS, content=large)
        assert "--max-bodies-bytes" in error_of(refused, 429)["message"] and refused.headers["retry-after"] == "2"
        small = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert small.status_code == 200, "ordinary requests are served while large ones wait"
        may_end.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, content=large)).status_code == 200, "what has ended counts no longer"


class TestRoutes:
    @pytest.mark.parametrize("path", ["/v1/nope", "/v1/completions/", "/docs/", "/redoc"])
    async def test_unknown(self, serve: Serve, path: str) -> None:
        assert error_of(await serve().get(path), 404)["code"] == "not_found"

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/messages", "/v1/messages"),
            ("/v1/ping", "/ping"),
            ("/v1/chat/complete", ""),
            ("/v1/completion", "/v1/completions"),  # and not llama.cpp's /completion
            ("/chat/completion", "/v1/chat/completions"),
            ("/v1/Chat/Completions/", "/v1/chat/completions"),
            ("/v1/file", "/v1/files"),
            ("/pings", "/ping"),
        ],
    )
    async def test_a_route_that_is_nearly_there_is_named(self, serve: Serve, path: str, meant: str) -> None:
        message = error_of(await serve().post(path, json={}), 404)["message"]
        assert message == f"no such route: POST {path}" + (f"; did you mean {meant}?" if meant else "")

    async def test_a_file_that_is_not_there_has_no_other_name(self, serve: Serve) -> None:
        assert "did you mean" not in (await serve().get("/pages/nothing.js")).text

    async def test_wrong_method(self, serve: Serve) -> None:
        response = await serve().get(CHAT)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"

    async def test_models(self, serve: Serve) -> None:
        client = serve(model="org/name")
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["id"] == "byte-model" and card["root"] == "org/name" and card["max_model_len"] == 256
        assert card["object"] == "model" and card["owned_by"] == "octavo" and card["created"] > 0
        assert (await client.get("/v1/models/byte-model")).json() == card
        assert error_of(await client.get("/v1/models/a/b"), 404)["code"] == "model_not_found"

    async def test_version(self, serve: Serve) -> None:
        found = (await serve().get("/version")).json()
        assert found.pop("version")
        assert found == {"system_fingerprint": REPORT.system_fingerprint, "fingerprint": REPORT.fingerprint}


class TestRequestIds:
    async def test_given_ids_come_back(self, serve: Serve) -> None:
        response = await serve().get("/version", headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"

    async def test_unfit_ids_are_replaced(self, serve: Serve) -> None:
        for given in (b"", b"\xe9", b"a" * 201, b"a\tb"):
            response = await serve().get("/nope", headers={"x-request-id": given})
            assert response.headers["x-request-id"].startswith("req-")

    async def test_two_requests_with_one_id_do_not_meet_in_the_engine(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        client = serve(engine)
        for _ in range(2):
            await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "same"})
        assert len({request.id for request in engine.requests}) == 2


class TestFailures:
    async def test_unforeseen_errors_say_only_their_id(self, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
        def script(request: GenerateRequest) -> list[list[TokenDelta]]:
            raise AssertionError("unused")

        class Broken(ScriptedEngine):
            def submit(self, request: GenerateRequest) -> None:
                raise ValueError("the secret plan")

        client = serve(Broken(script))
        with caplog.at_level(logging.ERROR):
            for stream in (False, True):
                response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
                error = error_of(response, 500)
                assert error["code"] == "internal_error" and error["type"] == "server_error"
                assert response.headers["x-request-id"] in error["message"]
                assert "secret" not in response.text and "Traceback" not in response.text
                assert response.headers["x-request-id"] in caplog.text and "the secret plan" in caplog.text

    async def test_a_refusal_before_the_first_byte_is_a_status_even_for_a_stream(self, serve: Serve) -> None:
        class Full(ScriptedEngine):
            def submit(self, request: GenerateRequest) -> None:
                raise Overloaded("1000 requests wait", retry_after=7)

        for stream in (False, True):
            response = await serve(Full()).post(COMPLETIONS, json={"prompt": "a", "stream": stream})
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert response.headers["retry-after"] == "7"

    async def test_a_failed_request_is_500_and_others_go_on(self, serve: Serve) -> None:
        def script(request: GenerateRequest) -> list[list[TokenDelta]]:
            good = says("fine")(request)
            return says("x", reason="error")(request) if request.prompt_ids[0] == ord("!") else good

        client = serve(ScriptedEngine(script))
        assert error_of(await client.post(COMPLETIONS, json={"prompt": "!"}), 500)["code"] == "request_failed"
        assert error_of(await client.post(COMPLETIONS, json={"prompt": ["a", "!"]}), 500)["code"] == "request_failed"
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).json()["choices"][0]["text"] == "fine"

    async def test_a_dead_engine_is_503(self, serve: Serve) -> None:
        engine = ScriptedEngine()
        client = serve(engine)
        assert (await client.get("/health")).status_code == 200
        engine.die()
        for response in (
            await client.post(COMPLETIONS, json={"prompt": "a"}),
            await client.get("/v1/models"),
            await client.get("/metrics"),
            await client.get("/health"),
        ):
            assert error_of(response, 503)["code"] == "engine_dead"

    def test_a_start_up_error_never_leaks_into_a_response(self) -> None:
        from octavo.errors import ConfigError

        status, body = describe(ConfigError("--flag is wrong"), "req-1")
        assert status == 500 and "--flag" not in body.error.message
        assert describe(EngineDead("gone"), "req-1")[0] == 503


class TestCors:
    async def test_off_by_default(self, serve: Serve) -> None:
        response = await serve().get("/version", headers={"origin": "http://a.example"})
        assert "access-control-allow-origin" not in response.headers

    async def test_a_named_origin_may_ask_and_read_refusals(self, serve: Serve) -> None:
        client = serve(allowed_origins="http://a.example, http://b.example", api_key="secret")
        preflight = {"origin": "http://a.example", "access-control-request-method": "POST",
                     "access-control-request-headers": "authorization"}  # fmt: skip
        assert (await client.options(CHAT, headers=preflight)).status_code == 200
        response = await client.post(CHAT, headers={"origin": "http://b.example"})
        assert error_of(response, 401) and response.headers["access-control-allow-origin"] == "http://b.example"
        response = await client.post(CHAT, headers={"origin": "http://c.example"})
        assert "access-control-allow-origin" not in response.headers

    async def test_methods_headers_and_credentials(self, serve: Serve) -> None:
        client = serve(
            allowed_origins="http://a.example", allowed_methods="POST", allowed_headers="x-mine", allow_credentials=True
        )
        asked = {"origin": "http://a.example", "access-control-request-headers": "x-mine"}
        answer = await client.options(CHAT, headers={**asked, "access-control-request-method": "POST"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-credentials"] == "true"
        for wrong in ({"access-control-request-method": "DELETE"}, {"access-control-request-method": "POST",
                      "access-control-request-headers": "x-other"}):  # fmt: skip
            assert (await client.options(CHAT, headers={**asked, **wrong})).status_code == 400


async def test_requests_are_logged_in_one_line_each(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octavo.server"):
        await serve().get("/version", headers={"x-request-id": "quiet"})
        await serve(enable_log_requests=True).get("/nope", headers={"x-request-id": "loud"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("loud GET /nope 404 ")


def test_the_app_is_built_without_an_event_loop() -> None:
    from octavo.server.app import build_app

    assert build_app(ScriptedEngine(), byte_text(), config(), "byte-model").state.service.model_name == "byte-model"


def test_fields_are_renamed_by_their_paths() -> None:
    names = FieldNames({"tools[].function": "tools[]", "tools[].function.parameters": "tools[].schema", "stop": "ends"})
    for path, renamed in (
        (("tools", 3, "function", "parameters", "function", 4), "tools[3].schema.function[4]"),
        (("tools", 3, "function", "name"), "tools[3].name"),
        (("tools", 3), "tools[3]"),
        (("tools", "function"), "tools.function"),
        (("stop", 1), "ends[1]"),
        (("tools", 3, "stop"), "tools[3].stop"),
        (("stops",), "stops"),
    ):
        assert str(names.of(Field(*path))) == renamed
    error = InvalidRequest("stop: " + Field("stop") / 1 + " and " + Field("n") + " stop", param=Field("n"))
    assert (error.message, error.param) == ("stop: stop[1] and n stop", "n")
    with pytest.raises(InvalidRequest, match=r"^stop: ends\[1\] and n stop$"), names.in_errors():
        raise error
    assert error.message == "stop: ends[1] and n stop" and InvalidRequest(Field("a") / 0 + "!").param == "a[0]"


async def test_a_burst_begins_in_order_and_few_at_a_time() -> None:
    entrance, begun, iteration = Entrance(), [], 0

    async def request(number: int) -> None:
        await entrance.enter()
        begun.append((number, iteration))

    tasks = [asyncio.create_task(request(number)) for number in range(50)]
    while len(begun) < 49:
        await asyncio.sleep(0)
        iteration += 1
        if iteration == 1:
            tasks[30].cancel()  # a client that leaves gives its place to the next
        assert iteration < 100
    assert [number for number, _ in begun] == [number for number in range(50) if number != 30]
    starts = Counter(at for _, at in begun)
    assert max(starts.values()) <= Entrance.MAX_STARTS and len(starts) <= 50 // Entrance.MAX_STARTS + 2
    await entrance.enter()  # at once: nothing waits
