"""Several API keys on one server: what one key made does not exist for another, and an admin key sees all."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from octavo.server.app import build_app
from octavo.server.state import live_feed
from octavo.server.state.owners import SALT_FILE, Owners
from tests.doubles import AsgiCall, ScriptedEngine, byte_text, config, never_ends, says
from tests.server.batch.test_batch_batches import background, content, create, line, until, upload
from tests.server.conftest import Serve, error_of
from tests.server.running import Served, ask, engine

COMPLETIONS = "/v1/completions"
ONE, TWO, BOSS = ({"Authorization": f"Bearer {key}"} for key in ("one", "two", "boss"))
KEYS: dict[str, Any] = {"api_key": "one,two", "admin_key": "boss"}


def as_key(client: httpx.AsyncClient, headers: dict[str, str]) -> httpx.AsyncClient:
    """The same server, spoken to with another key."""
    client.headers["authorization"] = headers["Authorization"]
    return client


async def same_error(
    client: httpx.AsyncClient, method: str, path: str, mine: str, unknown: str, headers: dict[str, str], **more: Any
) -> None:
    """An id of another key is refused in the words with which an unknown one is."""
    refused = [await client.request(method, path.format(name), headers=headers, **more) for name in (mine, unknown)]
    errors = [
        json.dumps(error_of(each, 404)).replace(name, "ID") for each, name in zip(refused, (mine, unknown), strict=True)
    ]
    assert errors[0] == errors[1], (method, path)


class TestFilesAndBatches:
    async def test_a_file_is_its_keys(self, serve: Serve, tmp_path: Path) -> None:
        client = serve(files_folder=str(tmp_path), **KEYS)
        file_id = await upload(as_key(client, ONE), line("a"))
        unknown = "file-" + "0" * 32
        for method, path in (("GET", "/v1/files/{}"), ("GET", "/v1/files/{}/content"), ("DELETE", "/v1/files/{}")):
            await same_error(client, method, path, file_id, unknown, TWO)
        for headers, ids in ((ONE, [file_id]), (TWO, []), (BOSS, [file_id])):
            listed = (await client.get("/v1/files", headers=headers)).json()
            assert [file["id"] for file in listed["data"]] == ids and "owner" not in json.dumps(listed)
            assert (listed["first_id"], listed["has_more"]) == (ids[0] if ids else None, False)
        assert (await client.get(f"/v1/files/{file_id}/content", headers=BOSS)).status_code == 200
        assert (await client.delete(f"/v1/files/{file_id}", headers=BOSS)).status_code == 200
        error_of(await client.get(f"/v1/files/{file_id}", headers=ONE), 404)

    async def test_a_batch_its_output_and_its_requests_are_its_keys(self, served: Any, tmp_path: Path) -> None:
        server: Served = served(files_folder=str(tmp_path), **KEYS)
        client = as_key(server.http, ONE)
        client.app = server.app  # type: ignore[attr-defined]
        file_id = await upload(client, *[line(f"r{n}", max_tokens=3) for n in range(3)])
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for wrong in (file_id, "file-" + "0" * 32):
            error = error_of(await client.post("/v1/batches", json={**body, "input_file_id": wrong}, headers=TWO), 400)
            assert error["message"] == f"no such file: '{wrong}'" and error["param"] == "input_file_id"
        async with background(client):
            batch = await create(client, file_id)
            done = await until(client, batch["id"], "completed", "failed")
        assert done["request_counts"]["completed"] == 3 and "owner" not in done
        unknown = "batch_" + "0" * 32
        await same_error(client, "GET", "/v1/batches/{}", batch["id"], unknown, TWO)
        await same_error(client, "POST", "/v1/batches/{}/cancel", batch["id"], unknown, TWO)
        for headers, ids in ((ONE, [batch["id"]]), (TWO, []), (BOSS, [batch["id"]])):
            listed = (await client.get("/v1/batches", headers=headers)).json()
            assert [each["id"] for each in listed["data"]] == ids
        output = done["output_file_id"]
        await same_error(client, "GET", "/v1/files/{}/content", output, "file-" + "1" * 32, TWO)
        answered = [record["response"]["request_id"] for record in await content(client, output)]
        for headers, whose in ((ONE, set(answered)), (TWO, set()), (BOSS, set(answered))):
            listed = (await client.get("/v1/requests", headers=headers)).json()["data"]
            assert {each["id"] for each in listed if each["handler"] == COMPLETIONS} == whose

    async def test_what_belongs_to_no_key_is_the_admins(self, serve: Serve, tmp_path: Path) -> None:
        """Also what an older version has left: a card without an owner."""
        before = await upload(serve(files_folder=str(tmp_path)), line("a"))
        card = tmp_path / "files" / f"{before}.json"
        old = json.loads(card.read_bytes())
        assert old.pop("owner") == ""
        card.write_text(json.dumps(old))
        keys: list[dict[str, Any]] = [KEYS, {"api_key": "one,two"}, {"api_key": "one"}, {"admin_key": "one"}, {}]
        for options, headers, status in (
            (keys[0], ONE, 404),
            (keys[0], BOSS, 200),
            (keys[1], ONE, 404),
            (keys[2], ONE, 200),  # the only key is everybody's
            (keys[3], ONE, 200),
            (keys[4], {}, 200),
        ):
            client = serve(files_folder=str(tmp_path), **options)
            assert (await client.get(f"/v1/files/{before}", headers=headers)).status_code == status, options

    async def test_owners_outlive_the_server_and_hold_no_key(self, serve: Serve, tmp_path: Path) -> None:
        file_id = await upload(as_key(serve(files_folder=str(tmp_path), **KEYS), ONE), line("a"))
        client = serve(files_folder=str(tmp_path), api_key="three,one,two", admin_key="other")
        assert (await client.get(f"/v1/files/{file_id}", headers=ONE)).status_code == 200
        error_of(await client.get(f"/v1/files/{file_id}", headers=TWO), 404)
        card = (tmp_path / "files" / f"{file_id}.json").read_bytes()
        assert b'"owner":"' in card and b"one" not in card.replace(b'"object"', b"")
        assert (tmp_path / SALT_FILE).stat().st_mode & 0o777 == 0o600


def test_owners_depend_on_the_salt() -> None:
    owners = [Owners(["a", "b"], [], salt) for salt in (b"1", b"2")]
    assert owners[0].of(b"a") != owners[1].of(b"a") and owners[0].of(b"a") != owners[0].of(b"b")


class TestRequests:
    async def test_a_journey_is_its_keys(self, served: Any) -> None:
        server: Served = served(**KEYS)
        answers = {}
        for headers in (ONE, TWO):
            answer = await server.http.post(COMPLETIONS, json=ask(), headers=headers)
            answers[headers["Authorization"]] = (answer.headers["x-request-id"], answer.json()["id"])
        (mine, my_answer), (theirs, _) = answers.values()
        for name in (mine, my_answer):
            await same_error(server.http, "GET", "/v1/requests/{}", name, "req-" + "0" * 24, TWO)
            for headers in (ONE, BOSS):
                assert (await server.http.get(f"/v1/requests/{name}", headers=headers)).json()["id"] == mine
        for headers, ids in ((ONE, [mine]), (TWO, [theirs]), (BOSS, [theirs, mine])):
            listed = (await server.http.get("/v1/requests", headers=headers)).json()["data"]
            assert [each["id"] for each in listed] == ids

    async def test_two_keys_may_choose_the_same_id(self, served: Any) -> None:
        server: Served = served(**KEYS)
        for headers, max_tokens in ((ONE, 3), (TWO, 4), (ONE, 5), (TWO, 6)):
            sent = {**headers, "x-request-id": "same"}
            assert (
                await server.http.post(COMPLETIONS, json=ask(max_tokens=max_tokens), headers=sent)
            ).status_code == 200
        for headers, num_tokens in ((ONE, 5), (TWO, 6), (BOSS, 6)):
            journey = (await server.http.get("/v1/requests/same", headers=headers)).json()
            assert journey["output_tokens"] == num_tokens

    async def test_what_runs_is_shown_to_its_key(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Journeys, the live feed, the owners of a page: while the request runs, and from a later one with the same id."""
        monkeypatch.setattr(live_feed, "INTERVAL_SECONDS", 0.01)
        server: Served = served(engine(num_pages=64, seconds=0.01), **KEYS)
        calls = []
        for headers in (ONE, TWO):
            body = json.dumps(ask(max_tokens=200, stream=True)).encode()
            calls.append(AsgiCall(server.app, "POST", COMPLETIONS, body, {**headers, "x-request-id": "same"}))
            await calls[-1].until(lambda call: bool(call.sent))
        lone = await server.http.get("/v1/requests/same", headers=ONE)
        first = calls[0].sent[0].decode()
        assert lone.json()["response_ids"][0] in first
        seen = {}
        for headers in (ONE, TWO, BOSS, ONE):  # the last: what a later watcher of the same owner gets first
            watch = AsgiCall(server.app, "GET", "/v1/live", headers=headers)
            await watch.until(lambda call: len(call.sent) >= 2)
            states = [json.loads(event.removeprefix(b"data: ")) for event in watch.sent]
            seen[headers["Authorization"]] = {len(state["rows"]) for state in states}
            assert all("owner" not in state and len(state["totals"]) for state in states)
            pages = [(await server.http.get(f"/v1/live/pages/{page}", headers=headers)).json() for page in range(8)]
            owners = [name for page in pages for name in page["owners"]]
            assert len(owners) >= (2 if headers is BOSS else 1) and set(owners) == {"same"}
            watch.leave()
            await watch.done()
        assert seen == {"Bearer one": {1}, "Bearer two": {1}, "Bearer boss": {2}}
        for call in calls:
            call.leave()
            await call.done()

    async def test_the_ended_are_shown_to_their_key(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live_feed, "INTERVAL_SECONDS", 0.01)
        server: Served = served(**KEYS)
        for headers in (ONE, TWO, TWO):
            assert (await server.http.post(COMPLETIONS, json=ask(), headers=headers)).status_code == 200
        watchers = []
        for headers, number in ((ONE, 1), (TWO, 2), (BOSS, 3)):
            watch = AsgiCall(server.app, "GET", "/v1/live", headers=headers)
            watchers.append(watch)
            await watch.until(lambda call: len(call.sent) >= 2)
            states = [json.loads(event.removeprefix(b"data: ")) for event in watch.sent]
            assert sum(len(state["ended"]) for state in states) == number
            assert states[0]["totals"]["finished"] == 3
        for watch in watchers:
            watch.leave()
            await watch.done()

    async def test_progress_names_the_keys_own_requests(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from octavo.engine import progress

        monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
        server: Served = served(engine(seconds=0.02), **KEYS)
        call = AsgiCall(server.app, "POST", COMPLETIONS, json.dumps(ask(max_tokens=100, stream=True)).encode(), ONE)
        await call.until(lambda call: bool(call.sent))
        for headers, number in ((ONE, 1), (TWO, 0), (BOSS, 1)):
            progress = (await server.http.get("/health/progress", headers=headers)).json()
            assert len(progress["without_progress"]) == number and progress["running"] == 1, headers
        call.leave()
        await call.done()


class TestStreamsAndResponses:
    @pytest.fixture
    async def apps(self, tmp_path: Path) -> Any:
        """Two API processes of one server."""
        (tmp_path / "sockets").mkdir()
        made = [config(files_folder=str(tmp_path / "files"), **KEYS) for _ in range(2)]
        apps = [build_app(ScriptedEngine(says("abc")), byte_text(), each, "byte-model") for each in made]
        for number, app in enumerate(apps):
            await app.state.service.peers.open(tmp_path / "sockets", number)
        yield apps
        for app in apps:
            app.state.service.peers.close()
            app.state.service.engine.close()

    async def get(self, app: FastAPI, path: str, headers: dict[str, str]) -> AsgiCall:
        call = AsgiCall(app, "GET", path, headers=headers)
        await call.done()
        return call

    async def test_a_stream_is_its_keys_in_every_process(self, apps: list[FastAPI]) -> None:
        body = {"prompt": "p", "stream": True, "stream_options": {"resumable": True}}
        call = AsgiCall(apps[1], "POST", COMPLETIONS, json.dumps(body).encode(), ONE)
        await call.done()
        path = f"/v1/stream/{call.headers['x-stream-id']}"
        for app in apps:
            for headers, status in ((ONE, 200), (TWO, 404), (BOSS, 200)):
                again = await self.get(app, path, headers)
                assert again.status == status, headers
                assert again.sent[0].startswith(b"id: 0\n") == (status == 200)

    async def test_a_response_is_its_keys_in_every_process(self, apps: list[FastAPI]) -> None:
        call = AsgiCall(apps[1], "POST", "/v1/responses", json.dumps({"input": "hi"}).encode(), ONE)
        await call.done()
        name = json.loads(b"".join(call.sent))["id"]
        for app in apps:
            for headers, status in ((ONE, 200), (TWO, 404), (BOSS, 200)):
                assert (await self.get(app, f"/v1/responses/{name}", headers)).status == status, headers
                assert (await self.get(app, f"/v1/responses/{name}/input_items", headers)).status == status
        for headers, status in ((TWO, 404), (BOSS, 200), (ONE, 404)):
            gone = AsgiCall(apps[0], "DELETE", f"/v1/responses/{name}", headers=headers)
            await gone.done()
            assert gone.status == status

    async def test_the_admin_may_cancel_a_response(self, apps: list[FastAPI]) -> None:
        apps[1].state.service.engine.script = never_ends
        body = {"input": "hi", "stream": True, "stream_options": {"resumable": True}}
        call = AsgiCall(apps[1], "POST", "/v1/responses", json.dumps(body).encode(), ONE)
        await call.until(lambda call: len(call.sent) > 3)
        path = f"/v1/responses/{call.headers['x-stream-id']}/cancel"
        for headers, status in ((TWO, 404), (BOSS, 200)):
            cancel = AsgiCall(apps[0], "POST", path, headers=headers)
            await cancel.done()
            assert cancel.status == status
        await asyncio.wait_for(call.task, 10)
