"""GET and POST /v1/fleet: who may change the fleet, and what is refused."""

from octavo.messages import FleetState, ReplicaState, ScaleFleet
from tests.doubles import ScriptedEngine, byte_text
from tests.server.conftest import Serve


class Fleet(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetState([ReplicaState(0, "ready", 1), ReplicaState(1, "draining", 2, 3, "core 1")], 1)
        self.wishes: list[ScaleFleet] = []

    def scale(self, wish: ScaleFleet) -> None:
        self.wishes.append(wish)


async def test_one_engine_is_shown_and_not_scaled(serve: Serve):
    client = serve(ScriptedEngine(), byte_text())
    found = (await client.get("/v1/fleet")).json()
    assert [each["status"] for each in found["replicas"]] == ["ready"] and found["target"] == 1
    answer = await client.post("/v1/fleet", json={"replicas": 2})
    assert answer.status_code == 400 and "--data-parallel-size" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "replicas"


async def test_a_wish_is_passed_on(serve: Serve):
    engine = Fleet()
    client = serve(engine, byte_text())
    for body in ({"replicas": 3}, {"restart": True}, {"replicas": 2, "restart": True}):
        answer = await client.post("/v1/fleet", json=body)
        assert answer.status_code == 202 and answer.json()["replicas"][1]["place"] == "core 1"
    assert engine.wishes == [ScaleFleet(3), ScaleFleet(0, True), ScaleFleet(2, True)]


async def test_what_makes_no_sense_is_refused(serve: Serve):
    engine = Fleet()
    client = serve(engine, byte_text())
    for body in ({}, {"restart": False}, {"replicas": 0}, {"replicas": -1}, {"replicas": 65}, {"replicas": "x"}, []):
        answer = await client.post("/v1/fleet", json=body)
        assert answer.status_code == 400, body
    assert not engine.wishes


async def test_of_several_keys_only_an_admin_key_may_change_it(serve: Serve):
    engine = Fleet()
    client = serve(engine, byte_text(), api_key="a,b", admin_key="c")
    assert (await client.post("/v1/fleet", json={"replicas": 2})).status_code == 401
    for key, status in (("a", 403), ("b", 403), ("c", 202)):
        answer = await client.post("/v1/fleet", json={"replicas": 2}, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert engine.wishes == [ScaleFleet(2)]
