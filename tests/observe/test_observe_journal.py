"""The way through the engine, on the real loop, scheduler and cache, with a clock that ticks and an executor without a model:
stages without gaps, and numbers that add up, whatever happens."""

import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from octavo.cache import KVCache
from octavo.engine.build import build_engine
from octavo.engine.cost_meter import CostMeter
from octavo.messages import Abort, EngineReport, GenerateRequest, PoolingParams, SamplingParams, StepPlan, StepResult
from octavo.messages.speculation import SpeculationSettings
from octavo.observe.journeys.stages import FOLD_AT, MAX_STAGES, EngineJourney, Stage, Track, fold
from octavo.observe.journeys.step_totals import Look, StepTotals, between, histogram
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.schedule.drafts.base import Speculation
from octavo.schedule.drafts.lengths import speculation
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts

PAGE_SIZE = 4


class Tokens:
    """Samples token 7 for every row, and behind all that is drafted; a vector for a row that is pooled."""

    def __init__(self, overlap: bool, pooled: bool = False) -> None:
        self.overlap, self._pooled = overlap, pooled
        self._plans: list[StepPlan] = []

    def start(self) -> EngineReport:
        raise AssertionError

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.pop(0)
        num_samples = sum(plan.samples)
        if self._pooled:
            return StepResult(plan.step, [], [b"1234"] * num_samples)
        runs = [1 + len(draft.tokens) for draft in plan.drafts]
        return StepResult(plan.step, [7] * (num_samples + sum(runs) - len(runs)), runs=runs)

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        self.prepared = done
        if grammar != "slow":
            done(0)

    def close(self) -> None:
        pass


class Engine:
    """A loop whose clock moves by one for each look at it."""

    def __init__(
        self,
        num_pages: int,
        rows: int = 8,
        budget: int = 16,
        overlap: bool = False,
        host: int = 0,
        pooled: bool = False,
        stall_limit: StallLimit | None = None,
        drafts: Speculation | None = None,
    ) -> None:
        self.now = 1000.0
        report = EngineReport("cpu", "float32", 100, 64, rows, budget, PAGE_SIZE, num_pages, host, 1, 1)
        cache = KVCache(num_pages, PAGE_SIZE, host)
        scheduler = Scheduler(
            cache, rows, budget, swap_min_tokens=PAGE_SIZE, stall_limit=stall_limit, speculation=drafts
        )
        self.loop, _, self.control = build_engine(
            scheduler, Tokens(overlap, pooled), EngineMetrics("m", report), self.tick
        )
        self.journal = self.control.journal
        self.ended: dict[str, EngineJourney] = {}
        self.journal.on_end = lambda journey: self.ended.update({journey.id: journey})

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        pooling: PoolingParams | None = None,
        grammar: str = "",
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=1, n=n, ignore_eos=True, grammar=grammar)
        self.loop.add(GenerateRequest(name, prompt, params, [], http_id=f"http-{name}", pooling=pooling))

    def run(self) -> None:
        while self.loop.has_work:
            self.loop.step()


def adds_up(track: Track, prompt_len: int) -> None:
    stages = track.stages
    for stage, after in itertools.pairwise(stages):
        assert stage.end == after.start, "a gap, or two stages at once"
    assert sum(stage.output_tokens for stage in stages) == track.output_tokens
    assert sum(stage.name == "preempted" for stage in stages) == track.preemptions
    known = prompt_len
    for stage in stages:
        if stage.name in ("queue", "preempted"):
            assert sum(wait.seconds for wait in stage.waits) == pytest.approx(stage.seconds)
            for wait in stage.waits:
                assert wait.reason not in ("order", "turn") or sum(wait.behind.values()) == pytest.approx(wait.seconds)
        if stage.name == "decode":
            assert sum(stage.ms.values()) == sum(stage.rows.values()) == stage.steps >= stage.output_tokens
        if stage.name in ("prefill", "recompute"):
            assert sum(chunk.tokens for chunk in stage.chunks) == stage.computed_tokens
            if stage.output_tokens:  # it came to its end
                assert stage.cached_tokens + stage.computed_tokens == known
        known += stage.output_tokens


def names(track: Track) -> list[str]:
    return [stage.name for stage in track.stages]


def test_a_grammar_that_is_not_ready_is_what_is_waited_for() -> None:
    engine = Engine(num_pages=32, rows=2)
    engine.add("busy", [1, 2], max_tokens=9)
    engine.add("a", [1, 2, 3], max_tokens=2, n=2, grammar="slow")
    engine.add("b", [4], max_tokens=3)
    for _ in range(4):
        engine.loop.step()
    assert "b" in engine.ended and engine.control.state().waiting_by_reason["grammar"] == 1
    engine.loop.executor.prepared(0)  # type: ignore[attr-defined]
    engine.run()
    for track in engine.ended["a"].tracks:
        adds_up(track, 3)
        assert track.stages[0].waits[0].reason == "grammar" and track.stages[0].waits[0].seconds > 12
    # Of two rows, one was busy's: the second choice waited for the other.
    first, second = engine.ended["a"].tracks
    assert [wait.reason for wait in first.stages[0].waits] == ["grammar", "step"]
    assert names(second) == ["queue", "prefill", "queue", "prefill", "decode"]
    assert [wait.reason for wait in second.stages[2].waits] == ["rows", "step"]


def test_further_sequences_of_a_request_wait_for_their_turn() -> None:
    """Three prompts of one request in two rows: the third waits, and the second gives its row to another request."""
    engine = Engine(num_pages=64, rows=2)
    for part in range(3):
        params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
        engine.loop.add(GenerateRequest(f"a-{part}", [part], params, [], response_id="a", part=part))
    engine.loop.step()
    engine.add("b", [9], max_tokens=2)
    engine.loop.step()
    assert engine.control.state().waiting_by_reason == {
        "rows": 1, "pages": 0, "budget": 0, "streams": 0, "order": 0, "turn": 1, "step": 0, "grammar": 0,
    }  # fmt: skip
    engine.run()
    for journey in engine.ended.values():
        adds_up(journey.tracks[0], 1)
    assert names(engine.ended["b"].tracks[0]) == ["queue", "prefill", "decode"]
    assert names(engine.ended["a-1"].tracks[0]) == ["queue", "prefill", "decode", "preempted", "recompute", "decode"]
    waits = {wait.reason: wait for wait in engine.ended["a-2"].tracks[0].stages[0].waits}
    assert waits.keys() == {"rows", "turn", "step"} and waits["turn"].behind == {"rows": waits["turn"].seconds}


def test_one_request_alone() -> None:
    engine = Engine(num_pages=32, budget=8)
    engine.add("a", list(range(20)), max_tokens=5)
    engine.run()
    (track,) = engine.ended["a"].tracks
    assert engine.ended["a"].http_id == "http-a" and engine.ended["a"].prompt_tokens == 20
    assert names(track) == ["queue", "prefill", "decode"] and track.finish_reason == "length"
    queue, prefill, decode = track.stages
    assert [wait.reason for wait in queue.waits] == ["step"]
    assert [(chunk.start, chunk.tokens) for chunk in prefill.chunks] == [(0, 8), (8, 8), (16, 4)]
    assert prefill.output_tokens == 1 and decode.output_tokens == decode.steps == 4
    assert decode.mean_rows == 1 and decode.rows == {"1": 4} and decode.mixed_steps == 0
    assert decode.ms == {"5000": 4}  # the clock ticks four times a step
    adds_up(track, 20)


def test_a_draft_is_not_part_of_the_prompt() -> None:
    """The prompt's last chunk has one token, so the step may verify a draft behind it."""
    engine = Engine(num_pages=32, budget=8, drafts=speculation(SpeculationSettings("ngram", 4)))
    engine.loop.scheduler.learn(StepCosts(0.030, 0.001, 0.001, 0.0, 0.0))
    engine.add("a", [7] * 17, max_tokens=12)
    engine.run()
    (track,) = engine.ended["a"].tracks
    prefill, decode = track.stages[1], track.stages[2]
    assert track.drafted_tokens > 0 and decode.steps < decode.output_tokens
    assert [(chunk.start, chunk.tokens) for chunk in prefill.chunks] == [(0, 8), (8, 8), (16, 1)]
    assert prefill.cached_tokens + prefill.computed_tokens == 17


def test_a_found_prefix_and_steps_shared_with_a_prompt() -> None:
    engine = Engine(num_pages=32, budget=8)
    prompt = list(range(12))
    engine.add("a", prompt, max_tokens=12)
    engine.loop.step()
    engine.loop.step()  # its first token is out
    engine.add("b", prompt, max_tokens=2)
    engine.run()
    (first,), (second,) = engine.ended["a"].tracks, engine.ended["b"].tracks
    prefill = second.stages[1]
    assert prefill.cached_tokens == 8 and [(c.start, c.tokens) for c in prefill.chunks] == [(8, 4)]
    assert first.stages[2].mixed_steps == 1 and set(first.stages[2].rows) == {"1", "2"}
    adds_up(first, 12)
    adds_up(second, 12)


def test_waits_name_rows_budget_and_order() -> None:
    engine = Engine(num_pages=64, rows=1, budget=8)
    for name in "abc":
        engine.add(name, list(range(8)), max_tokens=3)
    engine.run()
    waits = {name: {wait.reason: wait for wait in engine.ended[name].tracks[0].stages[0].waits} for name in "abc"}
    assert set(waits["a"]) == {"step"}
    assert set(waits["b"]) == {"step", "budget", "rows"} and waits["b"]["rows"].steps == 2
    assert set(waits["c"]) == {"step", "rows", "order"}
    # While it stood behind b it waited for whatever b lacked.
    assert set(waits["c"]["order"].behind) == {"budget", "rows"}
    for name in "abc":
        adds_up(engine.ended[name].tracks[0], 8)


def test_a_prompt_that_was_cut_for_streams_says_so() -> None:
    """Which chunks, to which limit; and the head of the queue what it waited for."""
    engine = Engine(num_pages=64, budget=64, stall_limit=StallLimit(0.04))
    meter = next(observer for observer in engine.loop.observers if isinstance(observer, CostMeter))
    engine.loop.observers.remove(meter)  # it would measure the looks at the clock
    engine.loop.scheduler.learn(StepCosts(0.01, 0.0, 0.001, 0.0, 0.0))
    engine.add("stream", [1, 2, 3], max_tokens=12)
    engine.loop.step()
    engine.add("long", list(range(100, 150)), max_tokens=2)
    engine.add("next", list(range(200, 220)), max_tokens=2)
    engine.run()
    prefill = next(stage for stage in engine.ended["long"].tracks[0].stages if stage.name == "prefill")
    assert [(chunk.tokens, chunk.limit_ms) for chunk in prefill.chunks] == [(31, 40.0), (19, 0.0)]
    assert prefill.capped_steps == 1
    waits = {wait.reason: wait for wait in engine.ended["next"].tracks[0].stages[0].waits}
    assert waits["streams"].steps == 2 and waits["streams"].seconds > 0
    for name, prompt_len in (("stream", 3), ("long", 50), ("next", 20)):
        adds_up(engine.ended[name].tracks[0], prompt_len)


@pytest.mark.parametrize("host", [0, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_tells_the_whole_story(overlap: bool, host: int) -> None:
    # Five pages of four: both prompts fit (two each and one spare), their answers do not.
    engine = Engine(num_pages=5, budget=16, overlap=overlap, host=host)
    engine.add("old", list(range(8)), max_tokens=9)
    engine.add("young", list(range(50, 57)), max_tokens=9)
    engine.run()
    (old,), (young,) = engine.ended["old"].tracks, engine.ended["young"].tracks
    assert names(old) == ["queue", "prefill", "decode"] and old.preemptions == 0
    assert young.preemptions == 1 and young.output_tokens == 9 and young.finish_reason == "length"
    left = young.stages[3]
    before = 7 + sum(stage.output_tokens for stage in young.stages[:3])
    assert "pages" in {wait.reason for wait in left.waits}
    if host:
        assert names(young) == ["queue", "prefill", "decode", "preempted", "decode"]
        assert left.dropped_tokens == 0 and before - 1 <= left.swapped_tokens <= before
    else:
        assert names(young) == ["queue", "prefill", "decode", "preempted", "recompute", "decode"]
        assert left.swapped_tokens == 0 and before - 1 <= left.dropped_tokens <= before
        again = young.stages[4]
        assert again.cached_tokens + again.computed_tokens == before + left.output_tokens
    adds_up(old, 8)
    adds_up(young, 7)


def test_choices_share_a_prompt_and_end_apart() -> None:
    engine = Engine(num_pages=32)
    engine.add("a", list(range(9)), max_tokens=4, n=3)
    engine.loop.step()
    engine.loop.step()
    engine.loop.abort(Abort("a", 1, "stop"))
    engine.run()
    tracks = engine.ended["a"].tracks
    assert [track.finish_reason for track in tracks] == ["length", "stop", "length"]
    assert [track.stages[1].cached_tokens for track in tracks] == [0, 8, 8]
    assert tracks[1].output_tokens < tracks[2].output_tokens == 4
    for track in tracks:
        adds_up(track, 9)


def test_a_leader_that_leaves_sends_its_choices_back_to_the_queue() -> None:
    engine = Engine(num_pages=32, budget=4)
    engine.add("a", list(range(9)), max_tokens=4, n=3)
    engine.loop.step()  # a part of the prompt
    engine.loop.abort(Abort("a", 0, "abort"))
    engine.run()
    tracks = engine.ended["a"].tracks
    assert tracks[0].finish_reason == "abort" and tracks[0].output_tokens == 0
    assert names(tracks[1])[:4] == ["queue", "prefill", "queue", "prefill"] and tracks[1].preemptions == 0
    for track in tracks[1:]:
        adds_up(track, 9)


def test_an_embedding_ends_with_its_prompt() -> None:
    engine = Engine(num_pages=32, pooled=True)
    engine.add("a", list(range(9)), max_tokens=1, pooling=PoolingParams("last"))
    engine.run()
    (track,) = engine.ended["a"].tracks
    assert names(track) == ["queue", "prefill"] and track.output_tokens == 0 and track.finish_reason == "stop"
    assert track.stages[1].computed_tokens == 9


def test_grammars_take_time_of_those_who_have_one() -> None:
    engine = Engine(num_pages=32)
    collect = engine.loop.executor.collect
    engine.loop.executor.collect = lambda: msgspec.structs.replace(collect(), grammar_seconds=0.25)  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    engine.loop.add(GenerateRequest("plain", [1, 2, 3], params, []))
    engine.loop.add(GenerateRequest("keeps", [4, 5, 6], msgspec.structs.replace(params, grammar="g"), []))
    engine.run()
    (plain,), (keeps,) = engine.ended["plain"].tracks, engine.ended["keeps"].tracks
    assert [stage.grammar_seconds for stage in keeps.stages] == [0, 0.25, 0.75]
    assert not any(stage.grammar_seconds for stage in plain.stages)


def test_a_request_that_outlived_an_engine_goes_on() -> None:
    engine = Engine(num_pages=32)
    params = SamplingParams(max_tokens=6, seed=1, n=3, ignore_eos=True)
    engine.loop.add(GenerateRequest("a", list(range(9)), params, [], begun=[[7, 7], None, [7]]))
    (open_parts,) = engine.journal.open_parts(engine.loop.scheduler.requests(), engine.now)
    assert [track.index for track in open_parts.tracks] == [0, 2]
    engine.run()
    tracks = engine.ended["a"].tracks
    assert [(track.index, track.output_tokens) for track in tracks] == [(0, 6), (2, 6)]
    for track, had in zip(tracks, (2, 1), strict=True):
        assert names(track) == ["queue", "recompute", "decode"]
        assert sum(stage.output_tokens for stage in track.stages) == 6 - had


def test_open_requests_are_shown_as_they_stand() -> None:
    engine = Engine(num_pages=64, rows=1)
    engine.add("a", list(range(8)), max_tokens=9)
    engine.add("b", list(range(8)), max_tokens=9)
    for _ in range(4):
        engine.loop.step()
    journal, requests = engine.journal, engine.loop.scheduler.requests()
    open_parts = {journey.id: journey.tracks[0] for journey in journal.open_parts(requests, engine.now)}
    assert names(open_parts["a"]) == ["queue", "prefill", "decode"] and open_parts["a"].output_tokens == 4
    assert names(open_parts["b"]) == ["queue"] and {"rows", "budget"} & {
        wait.reason for wait in open_parts["b"].stages[0].waits
    }
    for track in open_parts.values():
        adds_up(track, 8)
    assert [journey.id for journey in journal.open_parts(requests, engine.now, "http-b")] == ["b"]
    assert [journey.id for journey in journal.open_parts(requests, engine.now, "b")] == ["b"]
    assert journal.open_parts(requests, engine.now, "c") == []
    engine.run()
    assert journal.open_parts([], engine.now) == []


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_it_adds_up(seed: int) -> None:
    rng = random.Random(seed)
    host = rng.choice([0, 0, 6, 40])
    rows, budget = rng.randint(3, 8), rng.randint(3, 24)
    engine = Engine(rng.randint(8, 24), rows, budget, rng.random() < 0.5, host)
    prompts: dict[str, int] = {}
    for number in range(rng.randint(1, 14)):
        for _ in range(rng.choice([0, 0, 1, 5])):
            engine.loop.step()
        name, prompt_len = f"r{number}", rng.randint(1, 14)
        prompt = list(range(prompt_len)) if rng.random() < 0.5 else [rng.randrange(90) for _ in range(prompt_len)]
        engine.add(name, prompt, rng.randint(1, 30 - prompt_len), n=rng.choice([1, 1, 1, 2, 3]))
        prompts[name] = prompt_len
        if rng.random() < 0.2:
            victim = rng.choice(list(prompts))
            engine.loop.abort(Abort(victim, rng.choice([-1, 0, 1]), "stop"))
    engine.run()
    assert set(engine.ended) == set(prompts), "every request is reported, once it is over"
    for name, journey in engine.ended.items():
        for track in journey.tracks:
            assert track.finish_reason in ("length", "stop")
            adds_up(track, prompts[name])
    total = sum(track.preemptions for journey in engine.ended.values() for track in journey.tracks)
    assert total == engine.loop.scheduler.num_preemptions
    assert engine.journal.open_parts([], engine.now) == [] and not engine.journal._prompting


def test_a_journal_that_nobody_reads_keeps_nothing() -> None:
    engine = Engine(num_pages=32)
    engine.journal.on_end = None
    engine.add("a", [1, 2, 3], max_tokens=3)
    engine.run()
    assert engine.journal.open_parts([], engine.now) == []


def test_many_stages_are_folded_and_still_sum() -> None:
    stages = [Stage("decode" if i % 2 else "preempted", float(i), float(i + 1)) for i in range(500)]
    folded: list[Stage] = []
    for stage in stages:
        folded.append(stage)
        fold(folded)
    assert len(folded) == MAX_STAGES
    middle = folded[FOLD_AT]
    assert middle.name == "several" and middle.num_stages == 500 - MAX_STAGES + 1
    assert sum(middle.stages.values()) == middle.seconds == middle.num_stages
    assert folded[0] == stages[0] and folded[-1] == stages[-1]
    assert all(a.end == b.start for a, b in itertools.pairwise(folded))


def test_a_difference_of_totals_tells_of_the_steps_between() -> None:
    tally = StepTotals()
    tally.add(0.004, 2, 2)
    first = tally.look()
    tally.add(0.005, 3, 3)
    tally.add(9.0, 2000, 4000)
    steps = between(first, tally.look())
    assert (steps.num_steps, steps.num_rows, steps.num_mixed) == (2, 2003, 1)
    assert histogram(steps.by_ms, (1, 2, 3, 5, *range(6, 21))) == {"5": 1, "more": 1}
    assert between(Look(), first).num_steps == 1
