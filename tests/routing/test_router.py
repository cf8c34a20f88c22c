"""Policies: what must hold whatever replicas report and whatever comes."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.page_keys import adapter_root, keys_of
from octavo.messages import AdapterRef, GenerateRequest, PageEvents, PageSnapshot, ReplicaLoad, SamplingParams
from octavo.routing import POLICIES, Router
from octavo.routing.policy import Option

ROOT, PAGE_SIZE, PACE = b"root", 4, 0.001


def router_of(policy: str = "prefix", num_replicas: int = 4, saturation: float = 1.0, origin: int = 0) -> Router:
    router = Router(ROOT, PAGE_SIZE, POLICIES[policy], saturation, origin)
    for replica in range(num_replicas):
        router.join(replica, 1)
        router.take_events(PageEvents(replica, 1, 1, b"", b"", ReplicaLoad(0, PACE)))
    return router


def prompt_of(group: int, prefix_len: int, own_len: int = 0, own: int = 0) -> list[int]:
    return [group] * prefix_len + [10_000 + own] * own_len


def store(router: Router, replica: int, number: int, prompt: list[int], load: ReplicaLoad) -> None:
    stored = b"".join(key[:8] for key in keys_of(ROOT, prompt, PAGE_SIZE))
    assert router.take_events(PageEvents(replica, 1, number, stored, b"", load))


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 900), st.integers(0, 400)), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(1, 6))
def test_no_saturated_replica_gets_work_while_another_has_room(
    requests: list[tuple[int, int, int]], count: int
) -> None:
    router = router_of(num_replicas=count)
    for at, (group, prefix_len, own_len) in enumerate(requests):
        before = {replica: router.seconds_of(replica) for replica in router.replicas}
        choice = router.route(str(at), prompt_of(group, prefix_len, own_len, at))
        assert choice is not None
        if min(before.values()) < 1.0:
            assert before[choice.replica] < 1.0, "saturated, and another has room"
        else:
            assert choice.reason == "all_saturated"
        assert choice.seconds == before[choice.replica]
        added = router.seconds_of(choice.replica) - before[choice.replica]
        assert added == pytest.approx((prefix_len + own_len - choice.num_held) * PACE), "counted at once"


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([*POLICIES]), st.integers(1, 6), st.integers(0, 3))
def test_equal_inputs_give_equal_choices(
    requests: list[tuple[int, int, int]], policy: str, count: int, origin: int
) -> None:
    runs = []
    for _ in range(2):
        router = router_of(policy, count, origin=origin)
        choices = []
        for at, (group, prefix_len, own_len) in enumerate(requests):
            choices.append(router.route(str(at), prompt_of(group, prefix_len, own_len, at)))
            if at % 3 == 2:
                router.settle(str(at - 1))
                router.take_events(
                    PageEvents(at % count, 1, at + 5, b"", b"", ReplicaLoad(at * 7, PACE, at, {origin: at}))
                )
        runs.append(choices)
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_prefixes_stay_together_while_there_is_room(requests: list[tuple[int, int, int]]) -> None:
    """With a saturation that is never reached, and prefixes that are worth it, each goes to one replica, and no other computes it."""
    router = router_of(saturation=10.0)
    places: dict[int, set[int]] = {}
    for at, (group, _, own_len) in enumerate(requests[:8]):
        choice = router.route(str(at), prompt_of(group, 600, own_len // 4, at))
        assert choice is not None
        places.setdefault(group, set()).add(choice.replica)
    assert all(len(replicas) == 1 for replicas in places.values())


def test_a_burst_of_equal_prompts_does_not_pile_up() -> None:
    """None of them is reported before all are sent."""
    router = router_of(num_replicas=8)
    for at in range(64):
        router.route(str(at), prompt_of(1, 400, 400, at))
    seconds = [router.seconds_of(replica) for replica in range(8)]
    assert max(seconds) - min(seconds) < 1.0


def test_a_burst_of_small_requests_meets_equal_replicas_in_turn() -> None:
    router = router_of(num_replicas=8)
    choices = [router.route(str(at), prompt_of(at, 5)) for at in range(16)]
    assert sorted(choice.replica for choice in choices[:8] if choice) == list(range(8))


def test_a_little_work_that_waits_does_not_outweigh_the_requests_that_run_there() -> None:
    """Requests that produce tokens are no work that waits: by this alone, a burst of short prompts would go to one replica."""
    router = Router(ROOT, PAGE_SIZE, saturation=2.0)
    for replica, (num_tokens, num_open) in enumerate([(0, 30), (20, 2)]):
        router.join(replica, 1)
        load = ReplicaLoad(num_tokens, 1e-3, num_open, {})
        assert router.take_events(PageEvents(replica, 1, 1, b"", b"", load))
    assert router.route("a", [1] * 8).replica == 1
    load = ReplicaLoad(1500, 1e-3, 2, {})
    assert router.take_events(PageEvents(1, 1, 2, b"", b"", load))
    assert router.route("b", [2] * 8).replica == 0, "much work does"


def test_routers_begin_at_different_replicas() -> None:
    firsts = {router_of(num_replicas=8, origin=origin).route("1", [1] * 9).replica for origin in range(8)}
    assert len(firsts) >= 4


def test_the_warm_replica_is_left_when_it_is_saturated_and_the_deepest_is_preferred() -> None:
    router, prompt = router_of(), prompt_of(1, 800)
    store(router, 2, 2, [*prompt, 0], ReplicaLoad(900, PACE))
    store(router, 3, 2, prompt[:400], ReplicaLoad(0, PACE))
    first = router.route("1", [*prompt, 5, 5])
    assert first is not None and (first.replica, first.reason, first.num_held) == (2, "prefix", 800)
    store(router, 2, 3, [], ReplicaLoad(1100, PACE, 5, {0: 1}))
    second = router.route("2", [*prompt, 6, 6])
    assert second is not None and (second.replica, second.reason) == (3, "prefix"), "the next best"
    assert second.num_held == 396, "the page of its last token was not full"


def test_a_few_shared_pages_do_not_hold_requests_together() -> None:
    router, system = router_of(), prompt_of(1, 8)
    store(router, 0, 2, [*system, 0], ReplicaLoad(200, PACE))
    choice = router.route("1", [*system, *prompt_of(2, 300)])
    assert choice is not None and choice.replica != 0


def test_a_replica_that_has_measured_nothing_does_not_get_everything() -> None:
    router = Router(ROOT, PAGE_SIZE, POLICIES["least_work"], 1.0)
    for replica in range(3):
        router.join(replica, 1)
    for replica in range(2):
        router.take_events(PageEvents(replica, 1, 1, b"", b"", ReplicaLoad(0, PACE)))
    taken = Counter(router.route(str(at), prompt_of(at, 100)).replica for at in range(30))
    assert taken == {0: 10, 1: 10, 2: 10}


def test_requests_that_a_report_counts_are_not_counted_twice() -> None:
    router = router_of(num_replicas=1)
    for at in range(3):
        router.route(str(at), prompt_of(at, 101))
    assert router.seconds_of(0) == pytest.approx(0.303)
    router.take_events(PageEvents(0, 1, 2, b"", b"", ReplicaLoad(150, PACE, 2, {0: 2, 1: 40})))
    assert router.seconds_of(0) == pytest.approx(0.150 + 0.101)


def test_a_replica_that_has_left_gets_nothing_and_its_events_are_dropped() -> None:
    router = router_of(num_replicas=2)
    prompt = prompt_of(1, 800)
    store(router, 0, 2, prompt, ReplicaLoad(0, PACE))
    router.leave(0)
    assert not router.take_events(PageEvents(0, 1, 3, b"", b"", ReplicaLoad()))
    assert {router.route(str(at), prompt).replica for at in range(4)} == {1}
    router.join(0, 2)
    assert not router.take_events(PageEvents(0, 1, 4, b"", b"", ReplicaLoad())), "of the fenced epoch"
    assert router.index.num_pages(0) == 0
    router.leave(0)
    router.leave(1)
    assert router.route("none", prompt) is None


def test_round_robin_takes_turns() -> None:
    router = router_of("round_robin", 3)
    first = [router.route(str(at), prompt_of(1, 50)).replica for at in range(9)]
    assert sorted(first[:3]) == [0, 1, 2] and first == first[:3] * 3


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([*POLICIES]))
def test_a_choice_depends_on_the_options_and_not_on_their_order(seed: int, policy: str) -> None:
    r = random.Random(seed)
    options = [
        Option(r.choice([0.0, 0.5, 3.0]), r.randrange(3), at * 7 % 11, r.choice([0.1, 0.1, 2.0]), r.randrange(3), at)
        for at in range(r.randrange(1, 8))
    ]
    shuffled = options[:]
    r.shuffle(shuffled)
    assert POLICIES[policy](options, 1.0) == POLICIES[policy](shuffled, 1.0)


def asked(name: str, adapter: AdapterRef | None, salt: str = "") -> GenerateRequest:
    return GenerateRequest(name, [1], SamplingParams(prefix_salt=salt), [], adapter=adapter)


def test_requests_with_an_adapter_or_a_salt_find_their_own_pages() -> None:
    """And no others': the same prompt has other pages with each of them."""
    router, prompt = router_of(), prompt_of(1, 400)
    sql, tone = AdapterRef("sql", "/sql", "1"), AdapterRef("tone", "/tone", "1")
    cases = [("digest", sql, ""), ("digest", sql, "of one"), ("", None, "of one"), ("", None, "")]
    for replica, (adapter, _, salt) in enumerate(cases):
        params = SamplingParams(adapter=adapter, prefix_salt=salt)
        keys = keys_of(adapter_root(ROOT, params.prefix_space), [*prompt, 0], PAGE_SIZE)
        stored = b"".join(key[:8] for key in keys)
        events = PageEvents(replica, 1, 2, stored, b"", ReplicaLoad(0, PACE), {sql.key: "digest"} if adapter else {})
        assert router.take_events(events)
    for replica, (_, ref, salt) in enumerate(cases):
        choice = router.route(str(replica), [*prompt, 7], space=router.space_of(asked("x", ref, salt)))
        assert choice is not None and (choice.replica, choice.num_held) == (replica, 400)
        router.settle(str(replica))
    unread = router.space_of(asked("y", tone))
    first = router.route("y", [*prompt, 7], space=unread)
    assert first is not None and first.num_held == 0, "no replica has read it"
    second = router.route("z", [*prompt, 8], space=unread)
    assert second is not None and (second.replica, second.num_held) == (first.replica, 400), "held together meanwhile"
    written_again = AdapterRef("sql", "/sql", "2")
    assert router.space_of(asked("x", written_again)) != router.space_of(asked("x", sql))
    snapshot = PageSnapshot(0, 1, 2, b"", ReplicaLoad(0, PACE), {written_again.key: "digest"})
    assert router.take_snapshot(snapshot) and router.space_of(asked("x", written_again)) == "digest"
