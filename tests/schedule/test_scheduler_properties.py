"""The scheduler and the cache against the oracle, over random workloads: prefix sharing, fork, swap, abort, overlap."""

from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.schedule.workload import Workload


@pytest.mark.parametrize("has_windows", [False, True], ids=["one group", "windows"])
def test_two_thousand_seeded_workloads(has_windows):
    total: Counter[str] = Counter()
    for seed in range(2000):
        try:
            total.update(asdict(Workload(seed, has_windows=has_windows).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    # The campaign is worth something only if it reached what it is about.
    reached = ("preemptions", "swaps", "copies", "forks", "hits", "aborts", "vectors")
    for what in (*reached, "passed", "short_hits") if has_windows else reached:
        assert total[what] > 200, (what, total)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_plans_that_go_through_several_stages(num_stages):
    """What a stage samples reaches the first one with the next plan; rows are spread over the plans in flight, and none is left out for
    long."""
    total: Counter[str] = Counter()
    for seed in range(160):
        kinds = {
            "has_windows": seed % 3 == 0,
            "has_beams": seed % 4 == 0,
            "has_late": seed % 5 == 0,
            "has_limit": seed % 2 == 0,
            "has_responses": seed % 6 == 0,
            "is_mortal": seed % 8 == 0,
        }
        try:
            total.update(asdict(Workload(seed, num_stages=num_stages, **kinds).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("preemptions", "swaps", "copies", "forks", "hits", "aborts", "vectors", "left_out", "late", "beams"):
        assert total[what] > 20, (what, total)
    assert total["capped"] > 10, total
    assert Workload(3, num_stages=num_stages).run().in_flight <= num_stages + 1


def test_streams_outlive_engines():
    """At any step, all that is left are the tokens that clients have seen: what follows them is what would have come."""
    total: Counter[str] = Counter()
    for seed in range(800):
        try:
            total.update(
                asdict(Workload(seed, has_windows=seed % 3 == 0, has_beams=seed % 4 == 0, is_mortal=True).run())
            )
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("deaths", "survivors", "preemptions", "forks", "aborts"):
        assert total[what] > 200, (what, total)


@pytest.mark.parametrize("has_windows", [False, True], ids=["one group", "windows"])
def test_a_thousand_seeded_workloads_with_beam_searches_and_priorities(has_windows):
    total: Counter[str] = Counter()
    for seed in range(1000):
        try:
            total.update(asdict(Workload(seed, has_windows=has_windows, has_beams=True).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("preemptions", "copies", "aborts", "beams", "forced", "overtaken"):
        assert total[what] > 100, (what, total)
    assert total["beams_again"] > 20, total


def test_grammars_are_waited_for_by_those_who_need_them():
    """Nobody enters before its grammar is ready, nobody is overtaken once it is, and nobody else is kept waiting."""
    total: Counter[str] = Counter()
    for seed in range(500):
        try:
            case = Workload(seed, has_beams=seed % 3 == 0, is_mortal=seed % 4 == 0, has_grammars=True)
            total.update(asdict(case.run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("awaiting", "forgotten", "delayed", "passed_by", "preemptions", "forks", "aborts", "deaths"):
        assert total[what] > 100, (what, total)


@pytest.mark.parametrize("has_windows", [False, True], ids=["one group", "windows"])
def test_a_row_whose_mask_is_late_loses_nothing_but_the_step(has_windows):
    """It sits out and samples the same position again: its tokens are those of a run without lateness, and so are its neighbours'."""
    total: Counter[str] = Counter()
    for seed in range(1000):
        try:
            case = Workload(
                seed,
                has_windows=has_windows,
                has_beams=seed % 3 == 0,
                is_mortal=seed % 5 == 0,
                has_grammars=True,
                has_late=True,
            )
            total.update(asdict(case.run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("late", "void", "rested", "preemptions", "swaps", "copies", "forks", "aborts", "deaths"):
        assert total[what] > 100, (what, total)
    assert not has_windows or total["restarts"] > 20, total


@pytest.mark.parametrize("has_beams", [False, True], ids=["fcfs", "priorities and beams"])
def test_a_thousand_seeded_workloads_of_responses_with_many_sequences(has_beams):
    """Prompts and choices of one response give way to those of others, and every token stays what it is alone."""
    total: Counter[str] = Counter()
    for seed in range(1000):
        options = {"has_windows": seed % 3 == 0, "has_grammars": seed % 5 == 0, "is_mortal": seed % 7 == 0}
        try:
            total.update(asdict(Workload(seed, has_responses=True, has_beams=has_beams, **options).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("made_way", "promoted", "apart", "preemptions", "copies", "forks", "swaps", "aborts", "deaths"):
        assert total[what] > 100, (what, total)


@pytest.mark.parametrize("has_beams", [False, True], ids=["fcfs", "priorities and beams"])
def test_prompts_beside_streams_keep_to_the_time_there_is(has_beams):
    """Whatever the limit and the costs: no step is longer than it may be, the oldest prompt goes on, none overtakes another, streams keep
    their place, and every token stays what it is alone."""
    total: Counter[str] = Counter()
    for seed in range(560):
        options = {"has_windows": seed % 3 == 0, "has_grammars": seed % 5 == 0, "has_late": seed % 10 == 0}
        options |= {"is_mortal": seed % 7 == 0, "has_responses": seed % 4 == 0}
        try:
            total.update(asdict(Workload(seed, has_limit=True, has_beams=has_beams, **options).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in (
        "capped",
        "held",
        "least",
        "whole",
        "free",
        "preemptions",
        "swaps",
        "forks",
        "vectors",
        "aborts",
        "deaths",
    ):
        assert total[what] > 20, (what, total)


@pytest.mark.parametrize("has_windows", [False, True], ids=["one group", "windows"])
def test_drafts_change_no_token(has_windows):
    """Right or wrong, in flight when their row is preempted, aborted or forked from, or when the engine dies: every token stays what it
    is, and pages behind the last that counts are free again."""
    total: Counter[str] = Counter()
    for seed in range(600):
        options = {"has_grammars": seed % 5 == 0, "has_late": seed % 10 == 0, "has_beams": seed % 6 == 0}
        options |= {"is_mortal": seed % 7 == 0, "has_responses": seed % 4 == 0, "has_limit": seed % 9 == 0}
        try:
            total.update(asdict(Workload(seed, has_windows=has_windows, has_drafts=True, **options).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in (
        "accepted",
        "rejected",
        "cut",
        "given_back",
        "unproposed",
        "sat_out",
        "preemptions",
        "swaps",
        "forks",
        "aborts",
    ):
        assert total[what] > 100, (what, total)
    assert total["lost"] > 5, total


def test_drafts_from_recent_outputs_are_of_the_same_key():
    """They change no token. What is kept for a key are the last outputs of its own requests that may draft, as many as there may be, and
    nothing else is ever followed."""
    total: Counter[str] = Counter()
    for seed in range(400):
        options = {"has_grammars": seed % 5 == 0, "has_late": seed % 10 == 0, "has_beams": seed % 6 == 0}
        options |= {"is_mortal": seed % 7 == 0, "has_responses": seed % 4 == 0, "has_limit": seed % 9 == 0}
        try:
            total.update(asdict(Workload(seed, has_windows=seed % 3 == 0, has_recent=True, **options).run()))
        except BaseException:
            print(f"workload seed {seed}")
            raise
    for what in ("accepted", "rejected", "kept", "followed", "preemptions", "swaps", "forks", "aborts", "deaths"):
        assert total[what] > 100, (what, total)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=2**32, max_value=2**64), *[st.booleans()] * 5)
def test_any_workload(seed, has_windows, has_beams, has_responses, has_limit, has_drafts):
    options = {"has_windows": has_windows, "has_beams": has_beams, "has_responses": has_responses}
    options["has_drafts"] = has_drafts
    Workload(seed, has_limit=has_limit, **options).run()
