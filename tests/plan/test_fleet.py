"""The virtual clock: a fleet with jumps against the same fleet plan by plan; determinism, sessions, failures, refusals."""

import itertools
import random
from collections import Counter, defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import StepPlan
from octavo.plan.arrivals import Lengths, Shape, trace_of
from octavo.plan.figures import Figures, Levels
from octavo.plan.fleet import Run, Simulation, simulate
from octavo.plan.settings import Failure, FleetSettings, Front, Jitter, ReplicaSettings
from octavo.plan.step_model import StepModel
from octavo.plan.trace import Trace, TraceRequest

MODEL = StepModel([1, 8, 64], [0.005, 0.006, 0.03], 1e-4, 3e-7, 2e-7)

DRAFTING = msgspec.structs.replace(MODEL, draft_tokens=3, acceptance=0.7)
NOISY = msgspec.structs.replace(MODEL, noise=[0.7, 0.9, 1.0, 1.4])
HOSTED = msgspec.structs.replace(NOISY, wake=0.004, first=0.002)


def fleet_of(num_replicas: int = 1, depth: int = 0, num_pages: int = 400, **changes: object) -> FleetSettings:
    replica = ReplicaSettings(8, 64, num_pages, 1024, depth=depth, **changes)  # type: ignore[arg-type]
    return FleetSettings(num_replicas, replica, MODEL, start_seconds=1.0, detect_seconds=0.1)


def random_trace(r: random.Random, num_requests: int) -> Trace:
    requests, now = [], 0.0
    for _number in range(num_requests):
        now += r.expovariate(r.choice([2.0, 40.0]))
        session = r.randrange(4) if r.random() < 0.3 else -1
        follows = session >= 0 and any(each.session == session for each in requests)
        before = [each for each in requests if each.session == session]
        length = r.randrange(1, 200)
        if follows:
            length = min(900, before[-1].prompt_len + before[-1].output_len + r.randrange(1, 20))
        prefix = [r.randrange(3)] * (length // 48 > 0) if session < 0 else []
        requests.append(TraceRequest(0.05 if follows else now, length, r.randrange(1, 60), prefix, session, follows))
    return Trace("random", requests, 48)


def run(
    trace: Trace, fleet: FleetSettings, with_jumps: bool, failures: list[Failure]
) -> tuple[Run, dict[int, dict[int, StepPlan]]]:
    plans: dict[int, dict[int, StepPlan]] = defaultdict(dict)

    def note(replica: int, planned: object) -> None:
        if not planned.is_empty:  # type: ignore[attr-defined]
            plans[replica][planned.plan.step] = planned.plan  # type: ignore[attr-defined]

    simulation = Simulation(trace, fleet, with_jumps=with_jumps, failures=failures, on_plan=note)
    return simulation.run(), plans


def seen(result: Run) -> list[tuple[int, ...]]:
    return [
        (each.arrived, each.first, each.last, each.ended, each.replica, each.is_refused) for each in result.journeys
    ]


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_fleet_with_jumps_makes_the_same_plans_at_the_same_times(seed):
    r = random.Random(seed)
    trace = random_trace(r, r.randrange(1, 25))
    fleet = fleet_of(r.choice([1, 2, 3]), r.choice([0, 1]), r.choice([70, 150, 400]), overlap_rows=r.choice([0, 2, 4]))
    fleet = msgspec.structs.replace(fleet, model=r.choice([MODEL, NOISY, DRAFTING, HOSTED]))
    failures = [Failure(r.random() * 2, 1, r.random() < 0.7)] if r.random() < 0.3 and fleet.num_replicas > 1 else []
    without, plans = run(trace, fleet, False, failures)
    with_jumps, fewer = run(trace, fleet, True, failures)
    assert seen(without) == seen(with_jumps)
    for replica, of_replica in fewer.items():
        for step, plan in of_replica.items():
            assert plans[replica][step] == plan, (replica, step)
    assert without.figures.num_steps == with_jumps.figures.num_steps
    assert without.figures.num_plans >= with_jumps.figures.num_plans


def steady_trace(num_requests: int = 40, every: float = 0.2, output_len: int = 200) -> Trace:
    return Trace("steady", [TraceRequest(every * at, 100, output_len) for at in range(num_requests)])


def test_most_steps_are_jumped_over():
    figures = simulate(steady_trace(), fleet_of())
    assert figures.num_done == 40 and figures.num_plans < figures.num_steps / 5


def test_the_same_inputs_give_the_same_figures():
    trace = random_trace(random.Random(7), 40)
    assert simulate(trace, fleet_of(3)) == simulate(trace, fleet_of(3))


def test_times_are_those_of_the_steps():
    """One request alone: its prompt in two steps of at most 64 tokens, then a step for each token."""
    run_of_one = Simulation(Trace("one", [TraceRequest(0.0, 100, 3)]), fleet_of()).run()
    journey = run_of_one.journeys[0]
    first = MODEL.products(64) + MODEL.row + MODEL.pair * (64 * 65 // 2)
    second = MODEL.products(36) + MODEL.row + MODEL.pair * (36 * 64 + 36 * 37 // 2)
    assert abs(journey.ttft - first - second) < 1e-9
    decodes = [MODEL.products(1) + MODEL.row + MODEL.context * position for position in (100, 101)]
    assert abs(journey.latency - journey.ttft - sum(decodes)) < 1e-9


def test_an_idle_engine_takes_a_while_to_wake_up():
    """Two requests after a pause each, and one that comes while the second is computed."""
    requests = [TraceRequest(0.0, 40, 1), TraceRequest(5.0, 40, 40), TraceRequest(5.05, 30, 1)]
    waking = msgspec.structs.replace(fleet_of(), model=msgspec.structs.replace(MODEL, wake=0.004))
    before, after = (Simulation(Trace("three", requests), each).run().journeys for each in (fleet_of(), waking))
    later = [round((new.ttft - old.ttft) * 1e6) for old, new in zip(before, after, strict=True)]  # µs
    assert later[:2] == [4000, 4000]
    assert after[1].ended - before[1].ended == 0.004 * 1e12


def test_steps_after_a_first_token_take_longer():
    """Four steps do, each by half of what the one before it does."""
    slow = msgspec.structs.replace(fleet_of(), model=msgspec.structs.replace(MODEL, first=0.008))
    for length, factor in ((1, 0.0), (2, 1.0), (3, 1.5), (4, 1.75), (5, 1.875), (9, 1.875)):
        trace = Trace("one", [TraceRequest(0.0, 100, length)])
        before, after = (Simulation(trace, each).run().journeys[0] for each in (fleet_of(), slow))
        assert after.first == before.first and after.ended - before.ended == factor * 0.008 * 1e12


def test_a_margin_cuts_prompts_shorter_beside_streams():
    """By a limit of 20 ms, a long prompt beside a stream: with the margin, the longest time between tokens is shorter by it."""
    trace = Trace("two", [TraceRequest(0.0, 16, 60), TraceRequest(0.1, 900, 2)])
    gaps = []
    for margin in (1.0, 1.25):
        model = msgspec.structs.replace(MODEL, margin=margin)
        fleet = msgspec.structs.replace(fleet_of(max_inter_token_ms=20.0), model=model)
        gaps.append(Simulation(trace, fleet).run().journeys[0].longest_gap)
    assert 1.1 < gaps[0] / gaps[1] < 1.4


def test_what_happens_before_the_engine_is_in_the_first_token():
    plain = fleet_of()
    slow = msgspec.structs.replace(plain, front=Front(0.5, 0.001))
    trace = Trace("one", [TraceRequest(0.0, 100, 3)])
    assert abs(simulate(trace, slow).ttft.mean - simulate(trace, plain).ttft.mean - 0.6) < 1e-9


def test_the_way_back_is_in_what_clients_see_and_in_no_plan():
    plain = fleet_of()
    far = msgspec.structs.replace(plain, front=Front(first_seconds=0.004, last_seconds=0.001))
    trace = random_trace(random.Random(3), 20)
    trace = msgspec.structs.replace(trace, requests=[each for each in trace.requests if not each.after_previous])
    before, after = Simulation(trace, plain).run(), Simulation(trace, far).run()
    assert seen(before) == seen(after)
    for old, new in zip(before.journeys, after.journeys, strict=True):
        assert abs(new.ttft - old.ttft - 0.004) < 1e-9
        if old.ended - old.first > 0.003 * 1e12:
            assert abs(new.latency - old.latency - 0.001) < 1e-9
            assert abs((old.tpot - new.tpot) * (old.output_len - 1) - 0.003) < 1e-9
        if old.output_len == 1:
            assert abs(new.latency - old.latency - 0.004) < 1e-9


def test_a_session_goes_on_when_its_client_has_the_answer():
    turns = [TraceRequest(0.0, 64, 8, session=1), TraceRequest(0.5, 80, 8, session=1, after_previous=True)]
    far = msgspec.structs.replace(fleet_of(), front=Front(0.0, 0.0, 0.25, 0.25))
    first, second = Simulation(Trace("two", turns), far).run().journeys
    assert second.arrived - first.ended == 0.75 * 1e12


def test_a_session_continues_where_its_pages_are():
    turns = [TraceRequest(0.0, 320, 32, session=1)]
    for turn in range(1, 5):
        turns.append(TraceRequest(0.5, 320 + 64 * turn, 32, session=1, after_previous=True))
    others = [TraceRequest(0.01 * at, 200, 20) for at in range(6)]
    trace = Trace("session", sorted([*turns, *others], key=lambda each: (each.after_previous, each.seconds)))
    result = Simulation(trace, fleet_of(3)).run()
    session = [each for each, request in zip(result.journeys, trace.requests, strict=True) if request.session == 1]
    assert len({journey.replica for journey in session}) == 1
    assert all(a.ended < b.arrived for a, b in itertools.pairwise(session))
    # Of 320 + 64 k prompt tokens, the 320 + 64 (k − 1) + 32 of the turn before were there, but for a part of a page.
    assert result.figures.hit_rate > 0.5


def test_a_shared_prefix_is_computed_once():
    trace = Trace("shared", [TraceRequest(0.5 * at, 192, 8, [5]) for at in range(10)], block_size=160)
    assert simulate(trace, fleet_of()).hit_rate == 9 * 160 / (10 * 192)


def test_requests_of_a_replica_that_ends_go_on_elsewhere():
    trace = steady_trace(30, 0.1, 100)
    without = simulate(trace, fleet_of(3))
    result = Simulation(trace, fleet_of(3), failures=[Failure(1.0)], moments_every=0.1).run()
    assert result.figures.num_done == 30 and result.figures.moved > 0
    assert result.figures.e2e.p99 > without.e2e.p99
    moved = [journey for journey in result.journeys if journey.num_moves]
    assert all(journey.longest_gap >= 0.1 * 1e12 for journey in moved if journey.num_sent)
    assert min(moment.num_replicas for moment in result.moments) == 2
    assert result.moments[-1].num_waiting == 0


def test_nothing_is_lost_while_no_replica_runs():
    result = simulate(steady_trace(10, 0.1, 20), fleet_of(1), failures=[Failure(0.3)])
    assert result.num_done == 10


def test_what_does_not_fit_is_refused_by_name():
    trace = Trace("long", [TraceRequest(0.0, 2000, 10), TraceRequest(0.1, 10, 10)])
    figures = simulate(trace, fleet_of())
    assert figures.num_refused == {"too_long": 1} and figures.num_done == 1
    burst = Trace("burst", [TraceRequest(0.0, 100, 50)] * 60)
    figures = simulate(burst, fleet_of(max_waiting_requests=5))
    assert figures.num_refused["queue_full"] > 30 and figures.num_done == 60 - figures.num_refused["queue_full"]


def test_replicas_follow_the_load():
    trace = steady_trace(300, 0.05, 40)
    fixed = fleet_of(1)
    scaled = msgspec.structs.replace(fixed, max_replicas=4, min_replicas=1, saturation_seconds=0.5)
    result = Simulation(trace, scaled, moments_every=0.5).run()
    assert max(moment.num_replicas for moment in result.moments) > 1
    assert result.figures.num_done == 300 and result.figures.ttft.p99 < simulate(trace, fixed).ttft.p99


def test_levels_and_goodput():
    trace = steady_trace(40, 0.05)
    figures = simulate(trace, fleet_of(), levels=Levels({"ttft_p99": 0.5, "itl_p99": 1.0}))
    assert isinstance(figures, Figures)
    assert Levels({"ttft_p99": 0.5}).missed(figures) == ["ttft_p99"] and 0 < figures.good_share < 1


def test_a_sample_on_as_many_of_the_replicas_is_like_the_whole():
    shape = Shape(40.0, 12.0, Lengths(120, 0.5), Lengths(40, 0.5))
    trace = trace_of(shape, 5)
    whole, sample = simulate(trace, fleet_of(12)), simulate(trace.thinned(1 / 3), fleet_of(4))
    assert abs(sample.num_requests * 3 / whole.num_requests - 1) < 0.1
    for measure, most in (("ttft", 0.25), ("tpot", 0.1), ("itl", 0.1)):
        assert abs(getattr(sample, measure).mean / getattr(whole, measure).mean - 1) < most, measure


def test_a_sample_keeps_sessions_together():
    trace = trace_of(Shape(4.0, 100.0, Lengths(40), Lengths(10), turns=4), 1).thinned(0.5)
    turns = Counter(each.session for each in trace.requests)
    assert set(turns.values()) == {4} and 20 < len(turns) < 80


def test_noise_of_steady_steps_is_in_the_times_between_tokens_alone():
    plain = fleet_of()
    noisy = msgspec.structs.replace(plain, model=msgspec.structs.replace(MODEL, steady_noise=[0.8] * 19 + [4.8]))
    trace = Trace("one", [TraceRequest(0.0, 50, 300)])
    before, after = Simulation(trace, plain).run(), Simulation(trace, noisy).run()
    assert seen(before) == seen(after)
    assert abs(after.figures.itl.mean / before.figures.itl.mean - 1) < 1e-9
    assert after.figures.itl.p99 > 2 * before.figures.itl.p99 and after.figures.itl.p50 < before.figures.itl.p50


def test_steps_with_few_rows_end_before_the_next_plan():
    """A request that comes during the first of two steps of a prompt is in the second one, unless that was planned already."""
    trace = Trace("two", [TraceRequest(0.0, 100, 20), TraceRequest(0.001, 20, 20)])
    rows = {}
    for overlap_rows in (0, 2):
        _, plans = run(trace, fleet_of(depth=1, overlap_rows=overlap_rows), False, [])
        rows[overlap_rows] = [len(plan.rows) for plan in plans[0].values()]
    assert rows[0][:3] == [1, 1, 2] and rows[2][:2] == [1, 2]


def test_tokens_of_steps_that_are_taken_in_at_once_come_together():
    """Two rows are computed while the next plan is made; with one row left, the engine waits for both steps before it sends their tokens."""
    trace = Trace("two", [TraceRequest(0.0, 4, 12), TraceRequest(0.0, 4, 30)])
    result, _ = run(trace, fleet_of(depth=1, overlap_rows=2), False, [])
    waited, _ = run(trace, fleet_of(), False, [])
    longest, usual = (max(each.longest_gap for each in one.journeys) for one in (result, waited))
    assert 1.7 < longest / usual < 2.1 and result.figures.itl.mean < 1.1 * waited.figures.itl.mean


def test_jitter_is_in_the_times_between_tokens_alone():
    plain = fleet_of()
    jittered = msgspec.structs.replace(plain, front=Front(jitter=[Jitter(1, False, [0.0] * 18 + [-0.003, 0.003])]))
    trace = Trace("one", [TraceRequest(0.0, 50, 300)])
    before, after = Simulation(trace, plain).run(), Simulation(trace, jittered).run()
    assert seen(before) == seen(after)
    itl, found = before.figures.itl, after.figures.itl
    assert abs(found.mean / itl.mean - 1) < 1e-9 and abs(found.p50 / itl.p50 - 1) < 0.01
    assert abs(found.p99 - itl.p50 - 0.003) < 1e-4


def test_jitter_is_that_of_steps_with_about_as_many_rows():
    kinds = [Jitter(rows, with_prompt, [float(rows), -float(rows)]) for rows in (2, 8) for with_prompt in (False, True)]
    front = Front(jitter=kinds)
    assert [front.jitter_of(rows, True)[0] for rows in (1, 2, 4, 8, 64)] == [2, 2, 2, 8, 8]
    for wrong in ([Jitter(2, True, [0.1]), *kinds], [2e6, 0.0], []):
        with pytest.raises(ValueError, match="jitter must"):
            Front(jitter=wrong) if wrong and isinstance(wrong[0], Jitter) else Jitter(1, True, wrong)
    assert Front(jitter=kinds[:1]).jitter_of(8, True) == [2, -2] and Front().jitter_of(1, False) == []


def test_draws_differ_in_the_noise_and_in_nothing_else():
    trace = Trace("some", [TraceRequest(float(at), 50, 20) for at in range(8)])
    noisy = msgspec.structs.replace(fleet_of(), model=NOISY)
    assert simulate(trace, fleet_of(), draw=3) == simulate(trace, fleet_of())
    firsts = {simulate(trace, noisy, draw=draw).ttft.mean for draw in range(4)}
    assert len(firsts) > 1


def test_a_slow_machine_slows_steps_down_while_it_is_slow():
    trace = Trace("two", [TraceRequest(0.0, 50, 20), TraceRequest(5.0, 50, 20)])
    slow = Simulation(trace, fleet_of(), with_jumps=False, pace=lambda now: 3.0 if now < 10**12 else 1.0).run()
    first, second = (journey.latency for journey in slow.journeys)
    assert abs(first / second - 3) < 0.01
