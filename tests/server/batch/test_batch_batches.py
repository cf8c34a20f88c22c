"""/v1/batches through the application, with a scripted engine: statuses, outputs, pace, cancel, expiry, and going on after a break."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo.ipc.heartbeat import Heartbeat
from octavo.server.batch import runner as runner_module
from octavo.server.batch.batches import BatchStore
from octavo.server.batch.files import FileStore
from tests.doubles import ScriptedEngine, says
from tests.server.conftest import Serve, error_of

CHAT = "/v1/completions"


def line(custom_id: str, url: str = CHAT, **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "p", **body}}


async def upload(client, *lines: object) -> str:
    content = b"\n".join(item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines)
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    assert sent.status_code == 200, sent.text
    return sent.json()["id"]


async def create(client, file_id: str, **fields: object) -> dict:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    made = await client.post("/v1/batches", json=body)
    assert made.status_code == 200, made.text
    return made.json()


async def until(client, batch_id: str, *statuses: str) -> dict:
    async with asyncio.timeout(10):
        while True:
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(0.01)


def hold_at(engine: ScriptedEngine, num_requests: int) -> asyncio.Event:
    """Set when so many requests have come; from then on the engine computes nothing."""
    held = asyncio.Event()

    def watch(request, step):
        if len(engine.requests) >= num_requests:  # several may come between two steps
            engine.gate.clear()
            held.set()

    engine.on_step = watch
    return held


async def content(client, file_id: str) -> list[dict]:
    got = await client.get(f"/v1/files/{file_id}/content")
    assert got.status_code == 200, got.text
    return [json.loads(text) for text in got.text.splitlines()]


async def split(client, done: dict, code: str, custom_ids: list[str]) -> int:
    """How many have an answer; every other must have a record that says `code`, and the batch must count both."""
    responded = [record["custom_id"] for record in await content(client, done["output_file_id"])]
    rest = await content(client, done["error_file_id"])
    assert {record["error"]["code"] for record in rest} == {code}
    assert sorted([*responded, *(record["custom_id"] for record in rest)]) == sorted(custom_ids)
    assert done["request_counts"] == {"total": len(custom_ids), "completed": len(responded), "failed": len(rest)}
    return len(responded)


async def half_done(serve: Serve, folder: Path, *lines: dict) -> tuple[dict, int]:
    """A batch whose process ended in the middle. → the batch, how many lines were answered"""
    engine = ScriptedEngine(says("hello"))
    held = hold_at(engine, 12)
    client = serve(engine, files_folder=str(folder))
    async with background(client):
        batch = await create(client, await upload(client, *lines))
        await asyncio.wait_for(held.wait(), 10)
    num_done = next(folder.glob("batches/*.output")).read_bytes().count(b"\n")  # noqa: ASYNC240
    assert 0 < num_done < len(lines)
    return batch, num_done


@contextlib.asynccontextmanager
async def background(client) -> AsyncIterator[None]:
    """What an API process does beside its requests."""
    task = asyncio.create_task(client.app.state.service.run_background())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_batch_from_its_file_to_its_outputs(serve: Serve, tmp_path):
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path), api_key="k")
    client.headers["authorization"] = "Bearer k"  # the lines themselves have none, and need none
    lines = [line(f"r{n}") for n in range(20)] + [line("bad", temperature=-1), line("named", frobnicate=1)]
    file_id = await upload(client, *lines)
    async with background(client):
        batch = await create(client, file_id, metadata={"job": "7"})
        assert batch["object"] == "batch" and batch["status"] == "validating"
        assert batch["expires_at"] == batch["created_at"] + 24 * 3600 and batch["metadata"] == {"job": "7"}
        done = await until(client, batch["id"], "completed", "failed")
    assert done["request_counts"] == {"total": 22, "completed": 21, "failed": 1}, done
    assert done["model"] == "byte-model" and done["usage"]["output_tokens"] == 21 * 6
    assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
    answers = {record["custom_id"]: record for record in await content(client, done["output_file_id"])}
    assert answers.keys() == {f"r{n}" for n in range(20)} | {"named"}
    for record in answers.values():
        assert record["error"] is None and record["response"]["status_code"] == 200
        assert record["response"]["body"]["choices"][0]["text"] == "hello" and record["response"]["request_id"]
    assert answers["named"]["response"]["body"]["ignored_fields"] == ["frobnicate"]
    (error,) = await content(client, done["error_file_id"])
    assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    outputs = (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"]
    assert {file["id"] for file in outputs} == {done["output_file_id"], done["error_file_id"]}
    assert not list(tmp_path.glob("batches/*.open")) and not list(tmp_path.glob("batches/*.output"))


async def test_a_batch_of_responses(serve: Serve, tmp_path):
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path))
    asked = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"input": "hi"}}
    async with background(client):
        batch = await create(client, await upload(client, asked), endpoint="/v1/responses")
        done = await until(client, batch["id"], "completed", "failed")
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, done
    (record,) = await content(client, done["output_file_id"])
    body = record["response"]["body"]
    assert body["output"][0]["content"][0]["text"] == "hello"
    assert done["usage"]["total_tokens"] == body["usage"]["total_tokens"] > 0


async def test_lines_of_a_batch_say_whether_a_checked_answer_satisfies_its_schema(serve: Serve, tmp_path):
    """A schema is enforced, refused or checked in a line as in a request of its own."""
    client = serve(ScriptedEngine(says("[2, 2]")), files_folder=str(tmp_path))
    schema = {"type": "array", "not": {"not": {"contains": {"const": 2}}}}  # which cannot be enforced
    checked = {"structured_outputs": {"unenforced": "check"}, "max_tokens": 50}

    def wish(**more: object) -> dict:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, **more}}}}

    lines = [
        line("yes", **wish(), **checked),
        line("no", **wish(uniqueItems=True), **checked),
        line("strict", **wish(), max_tokens=50),
    ]
    async with background(client):
        batch = await create(client, await upload(client, *lines))
        done = await until(client, batch["id"], "completed", "failed")
    records = {record["custom_id"]: record["response"] for record in await content(client, done["output_file_id"])}
    verdicts = {name: record["body"]["choices"][0]["schema_valid"] for name, record in records.items()}
    assert verdicts == {"yes": True, "no": False}
    (error,) = await content(client, done["error_file_id"])
    assert error["custom_id"] == "strict" and "'contains'" in error["response"]["body"]["error"]["message"]


async def test_a_batch_of_responses_takes_nobodys_place_in_the_store(serve: Serve, tmp_path):
    """Its lines are asked with the key that created it, and kept only where they say so, as long as there is room."""
    client = serve(
        ScriptedEngine(says("hello")), files_folder=str(tmp_path), api_key="k,other", max_stored_responses=5,
        batch_concurrency=1,
    )  # fmt: skip
    client.headers["authorization"] = "Bearer k"

    async def kept(response_id: str) -> bool:
        return (await client.get(f"/v1/responses/{response_id}")).status_code == 200

    mine = [(await client.post("/v1/responses", json={"input": "a"})).json()["id"] for _ in range(3)]
    lines = [line(f"r{n}", "/v1/responses", input="b", prompt=None) for n in range(9)]
    lines[0]["body"]["previous_response_id"] = mine[0]
    lines += [line(f"s{n}", "/v1/responses", input="c", prompt=None, store=True) for n in range(3)]
    async with background(client):
        batch = await create(client, await upload(client, *lines), endpoint="/v1/responses")
        done = await until(client, batch["id"], "completed", "failed")
    assert done["request_counts"]["completed"] == 12, done
    records = await content(client, done["output_file_id"])
    said = {record["custom_id"]: record["response"]["body"] for record in records}
    assert [name for name in said if said[name]["store"]] == ["s0", "s1"], "there was room for two"
    client.headers["authorization"] = "Bearer other"
    assert not await kept(said["s0"]["id"])
    client.headers["authorization"] = "Bearer k"
    assert await kept(said["s0"]["id"])  # and was used
    mine.append((await client.post("/v1/responses", json={"input": "d"})).json()["id"])
    assert [await kept(response_id) for response_id in (*mine, said["s0"]["id"])] == [True] * 5
    assert not await kept(said["s1"]["id"]), "what a batch left is the first to go"
    assert not list(tmp_path.glob("batches/*.owner"))


async def test_lines_go_to_the_engine_so_many_at_once_and_batches_in_turn(serve: Serve, tmp_path):
    """Eight rows: two lines at a time, of all batches together, so that whoever comes by HTTP finds a place."""
    engine = ScriptedEngine(says("hello"))
    most = 0

    def watch(request, step):
        nonlocal most
        most = max(most, engine.num_running)

    engine.on_step = watch
    client = serve(engine, files_folder=str(tmp_path))
    async with background(client):
        long = await create(client, await upload(client, *[line(f"long{n}", max_tokens=7) for n in range(200)]))
        short = await create(client, await upload(client, *[line(f"short{n}", max_tokens=9) for n in range(3)]))
        done = await until(client, short["id"], "completed")
        assert done["request_counts"]["completed"] == 3
        early = (await client.get(f"/v1/batches/{long['id']}")).json()
        assert early["status"] == "in_progress"  # the short one did not wait for the long one
        await until(client, long["id"], "completed")
    assert most == 2


@pytest.mark.parametrize("num_waiting", [0, 3])
async def test_while_others_wait_for_the_engine_one_line_at_a_time_is_enough(serve: Serve, tmp_path, num_waiting):
    engine = ScriptedEngine(says("hello"))
    engine.heartbeat = Heartbeat()
    engine.heartbeat.end(1, 8, num_waiting)  # what the engine last said of its rows and its queue
    most = 0

    def watch(request, step):
        nonlocal most
        most = max(most, engine.num_running)

    engine.on_step = watch
    client = serve(engine, files_folder=str(tmp_path))
    async with background(client):
        batch = await create(client, await upload(client, *[line(f"r{n}") for n in range(12)]))
        await until(client, batch["id"], "completed")
    assert most == (1 if num_waiting else 2)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), b"{oops"], "invalid_json_line", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a", "/v1/embeddings")], "invalid_url", 1),
        ([line("a", stream=True)], "invalid_value", 1),
        ([b""], "empty_file", None),
        ([b"\n" * 200_000, line("a")], "too_many_lines", 200_001),
    ],
)
async def test_a_file_with_a_bad_line_fails_whole_and_says_which(serve: Serve, tmp_path, lines, code, number):
    client = serve(files_folder=str(tmp_path))
    async with background(client):
        batch = await create(client, await upload(client, *lines))
        failed = await until(client, batch["id"], "failed", "completed")
    assert failed["status"] == "failed" and failed["failed_at"] and failed["output_file_id"] is None
    assert failed["errors"]["object"] == "list"
    assert [(error["code"], error["line"]) for error in failed["errors"]["data"]] == [(code, number)]


async def test_bad_creations_are_refused_by_name(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path))
    file_id = await upload(client, line("a"))
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": "http://elsewhere/v1/completions"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "999h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"model": "other"}, "model"),
    ):
        answer = await client.post("/v1/batches", json={**good, **change})
        assert error_of(answer, 404 if param == "model" else 400)["param"] == param
    del good["endpoint"]
    assert "endpoint is missing" in error_of(await client.post("/v1/batches", json=good), 400)["message"]
    assert (await client.get("/v1/batches")).json()["data"] == []
    for path in ("batch_x", "batch_" + "0" * 32, "..%2fx"):
        error_of(await client.get(f"/v1/batches/{path}"), 404)
        error_of(await client.post(f"/v1/batches/{path}/cancel"), 404)


async def test_lists(serve: Serve, tmp_path):
    client = serve(files_folder=str(tmp_path))
    file_id = await upload(client, line("a"))
    ids = [(await create(client, file_id))["id"] for _ in range(3)]
    page = (await client.get("/v1/batches", params={"limit": 2})).json()
    assert [batch["id"] for batch in page["data"]] == [ids[2], ids[1]] and page["has_more"] is True
    rest = (await client.get("/v1/batches", params={"after": ids[1]})).json()
    assert [batch["id"] for batch in rest["data"]] == [ids[0]] and rest["has_more"] is False
    assert error_of(await client.get("/v1/batches", params={"limit": 101}), 400)["param"] == "limit"


async def test_cancel_keeps_what_was_answered_and_ends_the_rest(serve: Serve, tmp_path):
    engine = ScriptedEngine(says("hello"))
    held = hold_at(engine, 6)
    client = serve(engine, files_folder=str(tmp_path))
    async with background(client):
        batch = await create(client, await upload(client, *[line(f"r{n}") for n in range(50)]))
        await asyncio.wait_for(held.wait(), 10)
        cancelling = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling" and cancelling["cancelling_at"]
        done = await until(client, batch["id"], "cancelled")
    assert engine.num_running == 0  # what was under way was aborted
    assert done["cancelled_at"] and done["cancelling_at"]
    assert 0 < await split(client, done, "batch_cancelled", [f"r{n}" for n in range(50)]) < 50
    assert "has ended" in error_of(await client.post(f"/v1/batches/{batch['id']}/cancel"), 400)["message"]


async def test_a_batch_expires_and_names_what_was_not_answered(serve: Serve, tmp_path, monkeypatch):
    engine = ScriptedEngine(says("hello"))
    hold_at(engine, 6)
    client = serve(engine, files_folder=str(tmp_path))
    file_id = await upload(client, *[line(f"r{n}") for n in range(20)])
    batch = await create(client, file_id, completion_window="1h")
    card = next(tmp_path.glob("batches/*.json"))
    card.write_text(card.read_text().replace(str(batch["expires_at"]), str(int(time.time()) + 2)))
    async with background(client):
        done = await until(client, batch["id"], "expired")
    assert await split(client, done, "batch_expired", [f"r{n}" for n in range(20)])


async def test_a_batch_goes_on_in_the_next_process(serve: Serve, tmp_path):
    """The first is stopped in the middle, with half a record on the disk; the second asks only what is left."""
    batch, num_done = await half_done(serve, tmp_path, *[line(f"r{n}") for n in range(30)])
    with next(tmp_path.glob("batches/*.output")).open("ab") as file:
        file.write(b'{"id":"batch_req_0123')
    second = ScriptedEngine(says("hello"))
    client = serve(second, files_folder=str(tmp_path))
    assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
    async with background(client):
        done = await until(client, batch["id"], "completed", "failed")
    assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}, done
    assert len(second.requests) == 30 - num_done
    ids = [record["custom_id"] for record in await content(client, done["output_file_id"])]
    assert sorted(ids) == sorted(f"r{n}" for n in range(30))


async def test_one_process_runs_batches_and_another_takes_over(serve: Serve, tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "LOOK_SECONDS", 0.02)
    engines = [ScriptedEngine(says("hello")) for _ in range(2)]
    clients = [serve(engine, files_folder=str(tmp_path)) for engine in engines]
    file_id = await upload(clients[1], *[line(f"r{n}") for n in range(5)])
    async with background(clients[1]):
        async with background(clients[0]):  # has no lock
            batch = await create(clients[0], file_id)
            await until(clients[0], batch["id"], "completed")
            stuck = await create(clients[0], file_id)
            await until(clients[0], stuck["id"], "completed")
        assert not engines[0].requests and len(engines[1].requests) == 10
    async with background(clients[0]):  # the other has ended
        third = await create(clients[1], file_id)
        await until(clients[1], third["id"], "completed")
    assert len(engines[0].requests) == 5


async def test_a_batch_that_fills_the_store_fails_and_keeps_what_it_has(serve: Serve, tmp_path, monkeypatch):
    """And nobody's tokens wait while the folder is looked through."""
    monkeypatch.setattr(runner_module, "LOOK_EVERY_RECORDS", 2)
    looks: set[tuple[str, bool]] = set()
    for store, look in ((FileStore, FileStore.check_room), (BatchStore, BatchStore.unfinished)):

        def watched(self, look=look):
            looks.add((look.__name__, threading.current_thread() is threading.main_thread()))
            return look(self)

        monkeypatch.setattr(store, look.__name__, watched)
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path), max_files_bytes=6000)
    async with background(client):
        batch = await create(client, await upload(client, *[line(f"r{n}") for n in range(20)]))
        done = await until(client, batch["id"], "completed", "failed")
    assert done["status"] == "failed" and done["errors"]["data"][0]["code"] == "storage_full", done
    assert len(await content(client, done["output_file_id"])) == done["request_counts"]["completed"] > 0
    assert looks == {("check_room", False), ("unfinished", False)}


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_batch_outlives_its_input_file(serve: Serve, tmp_path, is_deleted):
    batch, _ = await half_done(serve, tmp_path, *[line(f"r{n}") for n in range(30)])
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path))
    if is_deleted:
        assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).json()["deleted"]
    else:
        card = tmp_path / "files" / f"{batch['input_file_id']}.json"
        card.write_text(card.read_text().replace('"expires_at":null', f'"expires_at":{int(time.time()) - 1}'))
    error_of(await client.get(f"/v1/files/{batch['input_file_id']}"), 404)
    async with background(client):
        done = await until(client, batch["id"], "completed", "failed")
    assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}, done
    assert len(await content(client, done["output_file_id"])) == 30
    assert not [path for path in tmp_path.glob("batches/*") if path.suffix != ".json"], "nothing is left of it"


async def test_lines_that_pass_no_more_after_a_restart_are_errors_of_their_own(serve: Serve, tmp_path):
    lines = [line(f"r{n}") | ({"priority": 1} if n % 2 else {}) for n in range(30)]
    batch, _ = await half_done(serve, tmp_path, *lines)
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path), strict_fields=True)
    async with background(client):
        done = await until(client, batch["id"], "completed", "failed")
    assert done["status"] == "completed", done
    assert 15 < await split(client, done, "unknown_parameter", [f"r{n}" for n in range(30)]) < 30


@pytest.mark.parametrize("damage", ["input", "output"])
async def test_a_batch_that_cannot_go_on_fails_and_keeps_what_it_has(serve: Serve, tmp_path, damage):
    batch, num_done = await half_done(serve, tmp_path, *[line(f"r{n}") for n in range(30)])
    if damage == "input":
        next(tmp_path.glob("batches/*.input")).unlink()
    else:
        with next(tmp_path.glob("batches/*.output")).open("ab") as file:
            file.write(b"\0" * 99 + b"\n")
    client = serve(ScriptedEngine(says("hello")), files_folder=str(tmp_path))
    async with background(client):
        done = await until(client, batch["id"], "completed", "failed")
    assert done["status"] == "failed" and done["failed_at"] and done["request_counts"]["completed"] == num_done, done
    assert [error["code"] for error in done["errors"]["data"]] == [
        "invalid_file" if damage == "input" else "server_error"
    ]
    kept = (await client.get(f"/v1/files/{done['output_file_id']}/content")).content.splitlines()
    assert len(kept) == num_done + (damage == "output")


async def test_a_batch_whose_end_cannot_be_stored_ends_later(serve: Serve, tmp_path, monkeypatch):
    """As the disk has room again: all it knows is kept, nothing is asked or written twice."""
    monkeypatch.setattr(runner_module, "PAUSE_SECONDS", 0.01)
    adopt, num_tries = FileStore.adopt, 0

    def fails_at_first(*args: object, **kwargs: object) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries in (1, 3):  # for the answers, then for the errors
            raise OSError(28, "No space left on device")
        adopt(*args, **kwargs)

    monkeypatch.setattr(FileStore, "adopt", fails_at_first)
    engine = ScriptedEngine(says("hello"))
    held = hold_at(engine, 6)
    client = serve(engine, files_folder=str(tmp_path), batch_concurrency=1)  # so that it holds exactly six
    async with background(client):
        batch = await create(client, await upload(client, *[line(f"r{n}") for n in range(20)]))
        await asyncio.wait_for(held.wait(), 10)
        await client.post(f"/v1/batches/{batch['id']}/cancel")
        done = await until(client, batch["id"], "cancelled")
    assert num_tries == 5 and len(engine.requests) == 6
    assert await split(client, done, "batch_cancelled", [f"r{n}" for n in range(20)])
