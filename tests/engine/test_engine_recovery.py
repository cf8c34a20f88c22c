"""Who goes on in a new engine, in what order, and how one request that ends engines is found among many."""

import random

import msgspec
import pytest

from octavo.client.streams import PROOF_TOKENS, Streams, joined
from octavo.engine.recovery import Recovery, split_into_waves
from octavo.errors import EngineDead, RequestFailed
from octavo.messages import Abort, Finish, GenerateRequest, Hello, SamplingParams, TokenDelta


def request(name: str, submitted: float = 0.0, strikes: int = 0, n: int = 1, begun=()) -> GenerateRequest:
    params = SamplingParams(max_tokens=100, seed=1, n=n)
    return GenerateRequest(name, [1, 2], params, [], submitted=submitted, strikes=strikes, begun=[*begun])


def names(requests) -> list[str]:
    return [each.id for each in requests]


def test_survivors_come_in_the_order_of_their_arrival_over_all_processes():
    recovery = Recovery(2)
    recovery.hello(Hello(0, "", [request("a", 1.0), request("d", 4.0)]))
    recovery.hold(request("e", 5.0))  # came to the new engine directly
    assert recovery.next_wave() == [] and not recovery.is_over  # another process has not spoken
    recovery.hello(Hello(1, "", [request("c", 3.0), request("b", 2.0)]))
    assert names(recovery.next_wave()) == ["a", "b", "c", "d"]
    assert names(recovery.next_wave()) == ["e"]
    assert recovery.next_wave() == [] and recovery.is_over


def test_the_first_engine_has_nothing_to_wait_for_but_hellos():
    recovery = Recovery(1)
    assert not recovery.is_over
    recovery.hello(Hello(0, ""))
    assert recovery.next_wave() == [] and recovery.is_over


def test_a_client_that_leaves_meanwhile_is_not_taken_along():
    recovery = Recovery(1)
    recovery.hello(Hello(0, "", [request("a"), request("b", n=2, begun=[[7], [8]]), request("c")]))
    recovery.hold(request("d"))
    recovery.drop(Abort("a"))
    recovery.drop(Abort("b", 0))
    recovery.drop(Abort("c", 0))  # its only choice
    recovery.drop(Abort("d"))
    (left,) = recovery.next_wave()
    assert left.id == "b" and left.begun == [None, [8]]
    assert recovery.next_wave() == [] and recovery.is_over


def test_a_wave_whose_last_client_left_is_passed_over():
    recovery = Recovery(1)
    recovery.hello(Hello(0, "", [request("a", 1.0, strikes=2), request("b", 2.0, strikes=2), request("c", 3.0)]))
    assert names(recovery.next_wave()) == ["b"]
    recovery.drop(Abort("a"))
    recovery.note([TokenDelta("b", 0, [1] * PROOF_TOKENS)])
    assert names(recovery.next_wave()) == ["c"] and recovery.is_over


def test_who_ends_takes_what_it_brought_along():
    recovery = Recovery(2)
    mine, theirs = [request("a", 1.0), request("b", 2.0)], [msgspec.structs.replace(request("c", 3.0), origin=1)]
    recovery.hello(Hello(0, "", mine))
    recovery.hello(Hello(1, "", theirs))
    recovery.hold(msgspec.structs.replace(request("d", 4.0), origin=1))
    recovery.lose(1)
    assert names(recovery.next_wave()) == ["a", "b"] and not recovery.next_wave() and recovery.is_over


def test_suspects_are_tried_by_halves_before_the_others():
    survivors = [request(str(i), i, strikes=2 if i in (1, 3, 5, 7) else i % 2) for i in range(9)]
    assert [names(wave) for wave in split_into_waves(survivors)] == [["5", "7"], ["1", "3"], ["0", "2", "4", "6", "8"]]
    recovery = Recovery(1)
    recovery.hello(Hello(0, "", survivors))
    assert names(recovery.next_wave()) == ["5", "7"]
    recovery.note([TokenDelta("5", 0, [1])] * PROOF_TOKENS + [TokenDelta("7", 0, [1])])
    assert recovery.next_wave() == []  # 7 has proved nothing yet
    recovery.note([TokenDelta("7", 0, [], Finish("stop"))])
    assert names(recovery.next_wave()) == ["1", "3"]
    recovery.forget("1")  # its client left
    recovery.note([TokenDelta("3", 0, [1] * PROOF_TOKENS)])
    assert names(recovery.next_wave()) == ["0", "2", "4", "6", "8"]
    assert recovery.is_over


class Server:
    """Two API processes' streams, and engines that give every seated request tokens until a poisoned one is among them."""

    def __init__(self, num_requests: int, poison: set[str], rows: int) -> None:
        self.poison, self.rows = poison, rows
        self.streams = [Streams(), Streams()]
        self.num_engines = 0
        self.failed: list[str] = []
        self.given: dict[str, int] = {}
        for number in range(num_requests):
            self.streams[number % 2].open(request(f"r{number}", float(number)))
            self.given[f"r{number}"] = 0

    def run_engine(self) -> list[str]:
        """Return the requests in rows when the engine ended; none: all work is done."""
        self.num_engines += 1
        recovery = Recovery(2)
        for origin, streams in enumerate(self.streams):
            recovery.hello(Hello(origin, "", streams.survivors()))
        waiting: list[str] = []
        seated: list[str] = []
        while True:
            while wave := recovery.next_wave():
                waiting += names(wave)
            if not waiting and not seated:
                assert recovery.is_over
                return []
            while waiting and len(seated) < self.rows:
                seated.append(waiting.pop(0))
            if self.poison.intersection(seated):
                return seated
            for name in seated[:]:
                self.given[name] += 1
                delta = TokenDelta(name, 0, [5], Finish("length") if self.given[name] == 20 else None)
                if delta.finish is not None:
                    seated.remove(name)
                recovery.note([delta])
                for streams in self.streams:
                    streams.deliver([delta])

    def run(self) -> None:
        while seated := self.run_engine():
            for streams in self.streams:
                self.failed += streams.strike(seated)
            assert self.num_engines < 100


@pytest.mark.parametrize("seed", range(40))
def test_poison_is_found_and_everybody_else_goes_on(seed):
    dice = random.Random(seed)
    number, rows = dice.randrange(1, 65), dice.choice([1, 4, 16, 64])
    poison = {f"r{i}" for i in dice.sample(range(number), min(number, dice.choice([1, 1, 2, 3])))}
    server = Server(number, poison, rows)
    server.run()
    assert set(server.failed) == poison and len(server.failed) == len(poison)
    assert all(count == (0 if name in poison else 20) for name, count in server.given.items())
    # Two engines to grow suspicious, one for each halving of the rows, one more where a cleared half ran beside the culprit.
    assert server.num_engines <= 1 + len(poison) * (5 + rows.bit_length())


def test_deaths_from_outside_blame_nobody():
    streams = Streams()
    for name in "ab":
        streams.open(request(name))
    for _ in range(5):
        streams.deliver([TokenDelta(name, 0, [1] * PROOF_TOKENS) for name in "ab"])
        assert streams.strike(["a", "b"]) == []
        assert [each.strikes for each in streams.survivors()] == [1, 1]
    assert streams.strike(["a"]) == []
    assert streams.strike(["a"]) == ["a"]  # without any progress, alone, for the second time
    assert names(streams.survivors()) == ["b"]
    again = request("c")
    with pytest.raises(RequestFailed, match="request a, which was identical, ended two engines"):
        streams.open(msgspec.structs.replace(again, params=msgspec.structs.replace(again.params, seed=7)))
    streams.open(msgspec.structs.replace(again, prompt_ids=[1, 2, 3]))
    assert names(streams.survivors()) == ["b", "c"]


async def test_a_request_that_is_given_up_is_named():
    streams = Streams()
    streams.open(request("a", n=2))
    streams.strike(["a"])
    assert streams.strike(["a"]) == ["a"]
    first, second = await streams.next("a")
    assert (first.index, second.index) == (0, 1) and first.finish is not None and first.finish.reason == "error"
    assert "request a was alone" in (first.finish.message or "") and not streams.close("a")


async def test_a_reader_that_lags_costs_no_more_than_its_tokens():
    streams = Streams()
    streams.open(request("a", n=2))
    for number in range(5000):
        streams.deliver([TokenDelta("a", number % 2, [number])])
    assert len(streams._streams["a"].deltas) < 600
    deltas = joined(await streams.next("a"))
    assert [delta.token_ids for delta in deltas] == [[*range(0, 5000, 2)], [*range(1, 5000, 2)]]
    streams.fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await streams.next("a")
