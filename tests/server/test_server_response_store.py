"""Responses that are kept: continued, retrieved, listed, deleted, and bounded in number and in bytes."""

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
from openai.types.responses import ResponseItemList

from octavo.messages import Finish, GenerateRequest, TokenDelta
from octavo.server.dialects.openai_responses.store import KeptResponses, ResponseStore, StoredResponse
from octavo.server.dialects.openai_responses.types import InputText, MessageItem
from octavo.server.state.peers import Peers
from tests.doubles import AsgiCall, ScriptedEngine, says
from tests.server.conftest import Serve, error_of
from tests.server.openai_schema import check_response, typed_events
from tests.server.test_server_responses import URL, prompt


async def test_a_conversation_goes_on(serve: Serve) -> None:
    engine = ScriptedEngine(says("one"))
    client = serve(engine)
    first = (await client.post(URL, json={"input": "a", "instructions": "be kind"})).json()
    assert first["store"] is True
    streamed = await client.post(URL, json={"input": "b", "previous_response_id": first["id"], "stream": True})
    second = typed_events(streamed.content)[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    assert engine.requests[-1].prompt_ids == prompt("user: a", "assistant: one", "user: b"), "instructions are not kept"
    body = {"input": "c", "instructions": "be brief", "previous_response_id": second["id"], "store": False}
    third = check_response((await client.post(URL, json=body)).json())
    turns = ("system: be brief", "user: a", "assistant: one", "user: b", "assistant: one", "user: c")
    assert engine.requests[-1].prompt_ids == prompt(*turns)
    assert third["store"] is False
    error_of(await client.get(f"{URL}/{third['id']}"), 404)


async def test_retrieve_and_delete(serve: Serve) -> None:
    client = serve()
    response = (await client.post(URL, json={"input": "a"})).json()
    path = f"{URL}/{response['id']}"
    assert check_response((await client.get(path)).json()) == response
    assert (await client.get(path, params={"include": "message.output_text.logprobs"})).status_code == 200
    error_of(await client.get(path, params={"stream": "true"}), 404)
    assert error_of(await client.get(path, params={"odd": "true"}), 400)["param"] == "odd"
    for bad, param in (
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "0", "starting_after": "1"}, "starting_after"),
        ({"stream": "yes"}, "stream"),
        ({"stream": ""}, "stream"),
        ({"stream": "true", "include_obfuscation": "true"}, "include_obfuscation"),
    ):
        assert error_of(await client.get(path, params=bad), 400)["param"] == param
    assert (await client.get(path, params={"stream": "False", "include_obfuscation": "false"})).json() == response
    error = error_of(await client.post(path + "/cancel"), 400)
    assert "is finished" in error["message"]
    assert (await client.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    for call in (
        client.get(path),
        client.delete(path),
        client.post(path + "/cancel"),
        client.get(path + "/input_items"),
    ):
        error = error_of(await call, 404)
        assert error["code"] == "not_found" and response["id"] in error["message"]


async def test_input_items(serve: Serve) -> None:
    client = serve(ScriptedEngine(says("one")))
    first = (await client.post(URL, json={"input": "a"})).json()
    more = [{"role": "user", "content": f"{at}"} for at in range(3)]
    second = (await client.post(URL, json={"input": more, "previous_response_id": first["id"]})).json()
    path = f"{URL}/{second['id']}/input_items"
    page = (await client.get(path)).json()
    assert page["object"] == "list" and page["has_more"] is False
    ResponseItemList.model_validate(page)
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["2", "1", "0", "one", "a"], "the newest first"
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    part = (await client.get(path, params={"order": "asc", "limit": 2, "after": page["data"][-1]["id"]})).json()
    assert [item["content"][0]["text"] for item in part["data"]] == ["one", "0"] and part["has_more"] is True
    for name, value in (
        ("limit", "0"),
        ("limit", "101"),
        ("limit", "x"),
        ("order", "up"),
        ("after", "msg_none"),
        ("odd", "1"),
    ):
        assert error_of(await client.get(path, params={name: value}), 400)["param"] == name


async def test_an_item_by_its_id(serve: Serve) -> None:
    engine = ScriptedEngine(says("one"))
    client = serve(engine)
    message = (await client.post(URL, json={"input": "a"})).json()["output"][0]
    reference = {"type": "item_reference", "id": message["id"]}
    items = [{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}]
    assert (await client.post(URL, json={"input": items})).status_code == 200
    assert engine.requests[-1].prompt_ids == prompt("user: a", "assistant: one", "user: b")
    many = [{"type": "item_reference", "id": f"msg_{number}"} for number in range(257)]
    assert "at most 256" in error_of(await client.post(URL, json={"input": many}), 400)["message"]


async def test_the_one_used_longest_ago_leaves_first(serve: Serve) -> None:
    client = serve(max_stored_responses=2)
    ids = [(await client.post(URL, json={"input": "a"})).json()["id"] for _ in range(2)]
    assert (await client.get(f"{URL}/{ids[0]}")).status_code == 200
    ids.append((await client.post(URL, json={"input": "a"})).json()["id"])
    statuses = [(await client.get(f"{URL}/{response_id}")).status_code for response_id in ids]
    assert statuses == [200, 404, 200]
    error = error_of(await client.post(URL, json={"input": "b", "previous_response_id": ids[1]}), 404)
    assert error["param"] == "previous_response_id"


async def test_a_server_that_keeps_nothing(serve: Serve) -> None:
    for options in ({"max_stored_responses": 0}, {"max_stored_response_bytes": 0}):
        client = serve(**options)
        response = check_response((await client.post(URL, json={"input": "a"})).json())
        assert response["store"] is False
        error = error_of(await client.post(URL, json={"input": "a", "store": True}), 400)
        assert error["param"] == "store" and "--max-stored-responses" in error["message"]


async def test_one_too_large_to_be_kept_says_so(serve: Serve) -> None:
    client = serve(max_stored_response_bytes=2500)
    response = check_response((await client.post(URL, json={"input": "a" * 200, "instructions": "b" * 20})).json())
    assert response["store"] is False
    error_of(await client.get(f"{URL}/{response['id']}"), 404)


@pytest.mark.parametrize("size", [1, 1000, 9000])
def test_bytes_are_bounded(size: int) -> None:
    store = ResponseStore(10_000, 100_000)
    for at in range(500):
        assert store.put(StoredResponse(f"r{at}", b"", b"x" * size, b"[]", 0), [f"i{at}"])
        assert 0 < store.num_bytes <= 100_000
    assert store.get("r499", b"") is not None and store.get("r0", b"") is None
    assert len(store) == 100_000 // (size + 2 + 1024)
    for at in range(500):
        store.delete(f"r{at}", b"")
    assert len(store) == store.num_bytes == len(store._homes) == len(store._own_items) == 0


async def test_another_key_sees_none_of_it(serve: Serve) -> None:
    client = serve(api_key="one,two")
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    response = (await client.post(URL, json={"input": "a"}, headers=one)).json()
    path = f"{URL}/{response['id']}"
    error_of(await client.get(path, headers=two), 404)
    error_of(await client.delete(path, headers=two), 404)
    error_of(await client.post(URL, json={"input": "b", "previous_response_id": response["id"]}, headers=two), 404)
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    error_of(await client.post(URL, json={"input": [reference]}, headers=two), 400)
    assert (await client.get(path, headers=one)).status_code == 200


async def test_any_process_finds_what_another_keeps(tmp_path: Path) -> None:
    made = [Peers() for _ in range(3)]
    kept = [KeptResponses(ResponseStore(10, 10**6), peers) for peers in made]
    for number, peers in enumerate(made):
        await peers.open(tmp_path, number)
    item = MessageItem("msg_1", "user", [InputText("a")])
    response = StoredResponse("resp_1", b"me", b"{}", msgspec.json.encode([item]), 0)
    kept[1].own.put(response, ["msg_1"])
    for one in kept:
        assert await one.get("resp_1", b"me") == response and await one.item("msg_1", b"me") == item
        assert await one.get("resp_1", b"you") is None and await one.item("msg_1", b"you") is None
        assert await one.get("resp_2", b"me") is None and await one.get("r" * 10**6, b"me") is None
        assert not await one.delete("resp_1", b"you")
    assert await kept[0].delete("resp_1", b"me") and not await kept[2].delete("resp_1", b"me")
    assert await kept[1].get("resp_1", b"me") is None
    for peers in made:
        peers.close()


class TestResuming:
    BODY = json.dumps({"input": "a", "stream": True, "stream_options": {"resumable": True}}).encode()

    async def test_a_stream_is_read_on_and_its_response_kept(self, serve: Serve) -> None:
        client = serve(ScriptedEngine(says("the quick brown fox")))
        app = client.app  # type: ignore[attr-defined]
        call = AsgiCall(app, "POST", URL, self.BODY)
        await call.until(lambda call: len(call.sent) >= 5)
        call.leave()
        await call.done()
        response_id = call.headers["x-stream-id"]
        seen = b"".join(call.sent)
        last = seen.count(b"\n\n") - 1
        query = {"stream": "true", "starting_after": str(last)}
        rest = (await client.get(f"{URL}/{response_id}", params=query)).content
        events = typed_events(re.sub(rb"id: \d+\n", b"", seen + rest))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "the quick brown fox"
        assert (await client.get(f"{URL}/{response_id}")).json() == events[-1]["response"]
        whole = (await client.get(f"/v1/stream/{response_id}")).content
        assert typed_events(re.sub(rb"id: \d+\n", b"", whole)) == events

    @pytest.mark.parametrize("spelled", ["true", "1", "True"])
    async def test_where_to_read_on(self, serve: Serve, spelled: str) -> None:
        client = serve(ScriptedEngine(says("ab")))
        whole = await client.post(URL, content=self.BODY)
        path = f"{URL}/{whole.headers['x-stream-id']}"
        assert (await client.get(path, params={"stream": spelled})).content == whole.content
        last = whole.content.count(b"\n\n") - 1
        done = await client.get(path, params={"stream": spelled, "starting_after": str(last - 1)})
        assert done.content == b"id: %d\ndata: [DONE]\n\n" % last
        beyond = await client.get(path, params={"stream": spelled, "starting_after": "99"})
        error = error_of(beyond, 400)
        assert error["param"] == "starting_after" and f"the last event is {last}" in error["message"]

    @pytest.mark.parametrize("num_processes", [1, 2])
    async def test_one_that_is_made_without_its_client_is_cancelled_or_deleted(
        self, serve: Serve, tmp_path: Path, num_processes: int
    ) -> None:
        """Through any process; either ends its making. What was cancelled is kept as far as it came."""
        engine = ScriptedEngine(lambda request: [[TokenDelta(request.id, 0, [ord("a")])]] * 50)
        clients = [serve(engine), serve()][:num_processes]
        apps = [client.app for client in clients]  # type: ignore[attr-defined]
        for number, app in enumerate(apps):
            await app.state.service.peers.open(tmp_path, number)
        for verb in ("cancel", "delete"):
            call = AsgiCall(apps[0], "POST", URL, self.BODY)
            await call.until(lambda call: len(call.sent) >= 5)
            call.leave()
            await call.done()
            path = f"{URL}/{call.headers['x-stream-id']}"
            if verb == "delete":
                assert (await clients[-1].delete(path)).json()["deleted"] is True
                error_of(await clients[-1].get(path), 404)
            else:
                response = (await clients[-1].post(f"{path}/cancel")).json()
                assert response["status"] == "cancelled" and response["output"][0]["status"] == "incomplete"
                assert set(response["output"][0]["content"][0]["text"]) == {"a"}
                assert (await clients[0].get(path)).json() == response
                assert "is finished" in error_of(await clients[-1].post(f"{path}/cancel"), 400)["message"]
            async with asyncio.timeout(10):
                while len(engine.aborts) < 1 + (verb == "delete"):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            error_of(await clients[-1].get(path, params={"stream": "true"}), 404)
        for app in apps:
            app.state.service.peers.close()

    async def test_what_is_deleted_cannot_be_read_as_a_stream(self, serve: Serve) -> None:
        client = serve()
        path = f"{URL}/{(await client.post(URL, content=self.BODY)).headers['x-stream-id']}"
        assert (await client.delete(path)).status_code == 200
        error_of(await client.get(path, params={"stream": "true"}), 404)

    async def test_a_failure_is_kept_too(self, serve: Serve) -> None:
        def fails(request: GenerateRequest) -> list[list[TokenDelta]]:
            failure = TokenDelta(request.id, 0, [], Finish("error", message="the page table is torn"))
            return [[TokenDelta(request.id, 0, [ord("a")])], [failure]]

        client = serve(ScriptedEngine(fails))
        response = await client.post(URL, content=self.BODY)
        for content in (response.content, (await client.get(f"/v1/stream/{response.headers['x-stream-id']}")).content):
            events = typed_events(re.sub(rb"id: \d+\n", b"", content))
            assert events[-1]["response"]["error"]["message"] == "the page table is torn"
