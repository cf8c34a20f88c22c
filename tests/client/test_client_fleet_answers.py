"""Pinned prefixes and journeys of several replicas, merged into one answer."""

import msgspec

from octavo.client.fleet_answers import ReplicaAnswer, merged_journeys, merged_prefixes
from octavo.messages import PinnedPrefix, PrefixReply


def answer(replica: int, *cached: int, error: str = "") -> ReplicaAnswer:
    pins = [PinnedPrefix(name, 64, found, 400, None) for name, found in zip("ab", cached, strict=False)]
    return reply_of(replica, PrefixReply(pins, error, [b"k"] * len(pins)))


def reply_of(replica: int, reply: PrefixReply) -> ReplicaAnswer:
    return ReplicaAnswer(replica, None, msgspec.json.encode(reply).decode())


def test_a_prefix_is_listed_once_with_the_tokens_of_the_replica_that_has_most() -> None:
    merged = msgspec.json.decode(merged_prefixes([answer(0, 16, 0), answer(1, 0, 48)]), type=PrefixReply)
    assert [(pin.name, pin.cached_tokens) for pin in merged.pinned] == [("a", 16), ("b", 48)] and merged.error == ""


def test_prefixes_of_two_keys_with_the_same_name_are_both_listed() -> None:
    mine, yours = PinnedPrefix("a", 64, 16, 400, None), PinnedPrefix("a", 32, 32, 200, 9.0)
    cold = PinnedPrefix("a", 32, 0, 200, 9.0)
    answers = [
        reply_of(0, PrefixReply([mine, cold], "", [b"m", b"y"])),
        reply_of(1, PrefixReply([yours, mine], "", [b"y", b"m"])),  # each replica has them in its own order
    ]
    assert msgspec.json.decode(merged_prefixes(answers), type=PrefixReply).pinned == [mine, yours]


def test_an_error_of_one_is_the_answer() -> None:
    merged = msgspec.json.decode(merged_prefixes([answer(0, 16), answer(1, error="too large")]), type=PrefixReply)
    assert merged.error == "too large" and [pin.name for pin in merged.pinned] == ["a"]


def test_each_request_is_listed_once_and_the_latest_first() -> None:
    def journey(name: str, ended: float, state: str = "finished") -> dict:
        return {"id": name, "state": state, "received_at": 100.0, "seconds": ended - 100.0}

    old, new, late = journey("a", 101), journey("b", 103), journey("c", 102)
    bodies = ([journey("d", 101, "running"), new, old], [journey("e", 101, "waiting"), late, new, old])
    answers = [ReplicaAnswer(number, None, msgspec.json.encode(body).decode()) for number, body in enumerate(bodies)]
    assert [each["id"] for each in msgspec.json.decode(merged_journeys(answers, 9))] == [*"debca"]
    assert [each["id"] for each in msgspec.json.decode(merged_journeys(answers, 4))] == [*"debc"]
