"""Requests through the real loop, scheduler and cache, on a clock of the test's own: every sample of /metrics, computed by hand.
A metric that has no value here fails the first test; one whose value here tells little must be named with the test that does."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.admission.queue_limit import QueueLimit
from octavo.cache import KVCache
from octavo.engine.build import Engine, build_engine
from octavo.errors import Overloaded
from octavo.messages import (
    EngineReport,
    GenerateRequest,
    ReadMetrics,
    ReadProgress,
    Responded,
    SamplingParams,
    StepPlan,
    StepResult,
)
from octavo.observe.metrics.engine_metrics import HOST_BOUNDS, EngineMetrics
from octavo.observe.metrics.http_metrics import BOUNDS, HIGH_BOUNDS, OUTCOMES
from octavo.schedule import Scheduler
from octavo.schedule.step_costs import StepSamples, StepShape
from tests.observe import test_observe_metrics

STEP_SECONDS = 0.5
REPORT = msgspec.structs.replace(test_observe_metrics.REPORT, num_pages=12, num_host_pages=0, max_num_seqs=2)

# vLLM's bounds, as its boards know them.
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LENGTHS = [1, 2, 5, 10, 20, 50, 100]  # up to the context of 128
ITERATION = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]  # fmt: skip

# A: 20 tokens in, 3 out, arrives half a second before it is queued. B: 16 of its 20 tokens are A's. C waits for a row. D and E come
# last and nobody has looked at them; F is refused.
HISTOGRAMS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": (FIRST, [1.0, 0.5, 1.5]),
    "vllm:inter_token_latency_seconds": (BETWEEN, [0.5, 0.5, 0.5]),
    "vllm:time_per_output_token_seconds": (BETWEEN, [0.5, 0.5, 0.5]),
    "vllm:request_time_per_output_token_seconds": (BETWEEN, [0.5, 0.5]),
    "vllm:e2e_request_latency_seconds": (LATENCY, [2.0, 1.0]),
    "vllm:request_queue_time_seconds": (LATENCY, [0.5, 0.0, 1.0]),
    "vllm:request_inference_time_seconds": (LATENCY, [1.5, 1.0]),
    "vllm:request_prefill_time_seconds": (LATENCY, [0.5, 0.5]),
    "vllm:request_decode_time_seconds": (LATENCY, [1.0, 0.5]),
    "vllm:request_prompt_tokens": (LENGTHS, [20, 20]),
    "vllm:request_generation_tokens": (LENGTHS, [3, 2]),
    "vllm:request_max_num_generation_tokens": (LENGTHS, [3, 2]),
    "vllm:request_params_n": ([1, 2, 5, 10, 20], [1, 1]),
    "vllm:request_params_max_tokens": (LENGTHS, [3, 2]),
    "vllm:request_prefill_kv_computed_tokens": (LENGTHS, [20, 4]),
    "vllm:request_num_preemptions": ([0, 1, 2, 5, 10, 20, 50, 100], [0, 0]),
    "vllm:iteration_tokens_total": (ITERATION, [20, 5, 2, 5]),
    "octavo:host_step_seconds": (list(HOST_BOUNDS), [0, 0, 0, 0]),
    "http_request_duration_highr_seconds": (list(HIGH_BOUNDS), [0.3]),
}  # fmt: skip
VALUES: Mapping[str, Mapping[str, float]] = {
    "vllm:num_requests_running": {"": 1},
    "vllm:num_requests_waiting": {"": 2},
    "vllm:num_requests_waiting_by_reason": {"capacity": 2, "deferred": 0},
    "octavo:waiting_by_reason": {
        "rows": 0,
        "pages": 0,
        "budget": 0,
        "streams": 0,
        "order": 1,
        "turn": 0,
        "step": 1,
        "grammar": 0,
    },
    # C has a page. A's first, which B shared, stays cached; their second ones were not full.
    "vllm:kv_cache_usage_perc": {"": 1 / 12},
    "vllm:gpu_cache_usage_perc": {"": 1 / 12},
    "octavo:kv_pages": {"used": 1, "cached": 1, "free": 10},
    "octavo:kv_slot_use_ratio": {"": 5 / 16},
    "octavo:memory_bytes": {"weights": 1000, "pages": 300},  # three pages were ever in use
    "octavo:host_pages_used": {"": 0},
    "octavo:kv_tier_bytes": {"": 0},
    "octavo:kv_tier_pages": {"": 0},
    "octavo:kv_tier_ram_bytes": {"": 0},
    "octavo:kv_tier_ram_pages": {"": 0},
    "octavo:kv_tier_ram_tokens_total": {"loaded": 0, "stored": 0},
    "octavo:kv_tier_loads_total": {"": 0},
    "octavo:kv_tier_tokens_total": {"loaded": 0, "missed": 0, "stored": 0},
    "octavo:kv_tier_seconds_total": {"load": 0, "store": 0, "saved": 0},
    "octavo:kv_tier_passed_requests_total": {"slower": 0, "late": 0},
    "octavo:kv_tier_files_total": {"bad": 0, "evicted": 0, "failed": 0},
    "octavo:held_prefixes": {"session": 0, "pin": 0},
    "octavo:held_prefix_bytes": {"session": 0, "pin": 0},
    "octavo:held_prefixes_dropped_total": {"": 0},
    # A's prompt is new, of B's 16 tokens were found, C's does not fill a page.
    "octavo:prefix_missed_tokens_total": {
        "tail": 4,
        "new": 20,
        "evicted": 0,
        "window": 0,
        "short": 5,
        "needed": 0,
        "off": 0,
    },
    "vllm:cache_config_info": {"16,12,0,float32": 1},
    "vllm:prompt_tokens_total": {"": 45},
    "vllm:prompt_tokens_cached_total": {"": 16},
    "vllm:prompt_tokens_by_source_total": {"local_compute": 29, "local_cache_hit": 16},
    "vllm:prompt_tokens_cached_by_source_total": {"local_cache_hit": 16},
    "vllm:prefix_cache_queries_total": {"": 45},
    "vllm:prefix_cache_hits_total": {"": 16},
    "vllm:generation_tokens_total": {"": 6},
    "vllm:num_preemptions_total": {"": 0},
    "vllm:spec_decode_num_drafts_total": {"": 0},
    "vllm:spec_decode_num_draft_tokens_total": {"": 0},
    "vllm:spec_decode_num_accepted_tokens_total": {"": 0},
    "vllm:request_success_total": {"stop": 0, "length": 2, "abort": 0, "error": 0, "repetition": 0},
    "vllm:admission_rejections_total": {"num_queued_reqs": 1, "num_queued_tokens": 0, "queue_time": 0},
    "octavo:page_audits_total": {"right": 0, "wrong": 0},
    "octavo:restarts_total": {
        "engine,killed": 2,
        "engine,failed": 0,
        "engine,hung": 0,
        "engine,start": 0,
        "api,killed": 1,
        "api,failed": 0,
        "api,hung": 0,
        "api,start": 0,
    },
    "octavo:malformed_requests_total": {"syntax": 2, "head": 1},
    "octavo:forbidden_requests_total": {"host": 1, "origin": 0, "content_type": 0},
    "octavo:steps_total": {"": 4},
    "octavo:device_busy_seconds_total": {"": 2.0},
    "octavo:capped_steps_total": {"": 0},
    "octavo:step_limit_seconds": {"": 0},
    "octavo:queue_blocked_seconds_total": {"rows": 1.0, "pages": 0, "budget": 0, "streams": 0},
    "octavo:compile_jobs_total": {**dict.fromkeys(OUTCOMES, 0), "done": 2, "kept": 1},
    "http_requests_total": {"/v1/completions,POST,2xx": 1},
}
ELSEWHERE = {
    "vllm:num_preemptions_total": test_observe_metrics.test_a_second_admission_is_not_a_second_wait,
    "vllm:request_num_preemptions": test_observe_metrics.test_a_second_admission_is_not_a_second_wait,
    "vllm:spec_decode_num_drafts_total": test_observe_metrics.test_drafts_and_what_was_accepted,
    "vllm:spec_decode_num_draft_tokens_total": test_observe_metrics.test_drafts_and_what_was_accepted,
    "vllm:spec_decode_num_accepted_tokens_total": test_observe_metrics.test_drafts_and_what_was_accepted,
    "octavo:capped_steps_total": test_observe_metrics.test_steps_with_a_limit_and_their_costs,
    "octavo:step_limit_seconds": test_observe_metrics.test_steps_with_a_limit_and_their_costs,
    "octavo:host_pages_used": test_observe_metrics.test_gauges_show_pages_and_waste,
    "octavo:kv_tier_bytes": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_pages": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_ram_bytes": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_ram_pages": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_ram_tokens_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_loads_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_tokens_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_seconds_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_passed_requests_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:kv_tier_files_total": test_observe_metrics.test_a_tier_is_shown,
    "octavo:held_prefixes": test_observe_metrics.test_held_prefixes_are_shown,
    "octavo:held_prefix_bytes": test_observe_metrics.test_held_prefixes_are_shown,
    "octavo:held_prefixes_dropped_total": test_observe_metrics.test_held_prefixes_are_shown,
    "octavo:host_step_seconds": test_observe_metrics.test_host_time_and_busy_time_of_overlapping_steps,
}
"""Those that are 0 here: who knows another value of theirs."""

NOT_OFFERED = {
    "vllm:engine_sleep_state": "an engine here does not sleep",
    "vllm:lora_requests_info": "only where adapters are enabled, as in vLLM (test_engine_adapters.py)",
    "vllm:num_requests_kv_fetch_by_stage": "pages come from nowhere else",
    "vllm:external_prefix_cache_queries_total": "pages come from nowhere else",
    "vllm:external_prefix_cache_hits_total": "pages come from nowhere else",
    "vllm:mm_cache_queries_total": "text only",
    "vllm:mm_cache_hits_total": "text only",
    "vllm:corrupted_requests_total": "vLLM has it only where logits are searched for NaN",
    "vllm:watermark_requests_total": "no watermarks",
    "vllm:kv_block_lifetime_seconds": "optional in vLLM",
    "vllm:kv_block_idle_before_evict_seconds": "optional in vLLM",
    "vllm:kv_block_reuse_gap_seconds": "optional in vLLM",
    "vllm:estimated_flops_per_gpu_total": "optional in vLLM",
    "vllm:estimated_read_bytes_per_gpu_total": "optional in vLLM",
    "vllm:estimated_write_bytes_per_gpu_total": "optional in vLLM",
    "vllm:tool_call_parser_invocations_total": "not counted",
}
"""vLLM's other metrics, and why there is nothing to say under their names."""


class ByTheClock:
    """A step takes half a second of a clock that nothing else moves."""

    overlap = False

    def __init__(self) -> None:
        self.now = 100.0
        self._plans: list[StepPlan] = []

    def start(self) -> EngineReport:
        return REPORT

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        self.now += STEP_SECONDS
        plan = self._plans.pop(0)
        return StepResult(plan.step, [7] * sum(plan.samples))

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


def ask(id: str, prompt: list[int], max_tokens: int, arrived: float) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return GenerateRequest(id=id, prompt_ids=prompt, params=params, stop_ids=[], arrived=arrived)


def life() -> Engine:
    device = ByTheClock()
    scheduler = Scheduler(KVCache(REPORT.num_pages, REPORT.page_size), REPORT.max_num_seqs, 64)
    engine = build_engine(
        scheduler, device, EngineMetrics("m", REPORT), lambda: device.now, queue_limit=QueueLimit(max_requests=1)
    )
    loop, _, control = engine
    for process in ("engine", "api", "engine"):
        control.heartbeat.count_restart(process, "killed")
    for origin, kind, reason in (
        (0, "malformed", "syntax"), (3, "malformed", "syntax"), (1, "malformed", "head"), (1, "forbidden", "host"),
    ):  # fmt: skip
        control.heartbeat.count_refusal(origin, kind, reason)
    control.heartbeat.reset()  # the next engine's; counts of the whole server go on
    loop.add(ask("A", list(range(20)), 3, 99.5))
    loop.step()  # … 100.5: A's first token
    loop.add(ask("B", [*range(16), 90, 91, 92, 93], 2, 100.5))
    loop.add(ask("C", [50, 51, 52, 53, 54], 2, 100.5))
    loop.step()  # … 101.0: A's second, B's first
    loop.step()  # … 101.5: the last of both
    loop.step()  # … 102.0: C's first
    control.responded(Responded(["x"], "POST", "/v1/completions", 200, 0.3, jobs={"done": 2, "kept": 1}))
    for id in ("D", "E"):
        loop.add(ask(id, [60], 2, 102.0))
    with pytest.raises(Overloaded):
        control.check(ask("F", [60], 2, 102.0))
    return engine


def test_when_nothing_runs_the_pages_are_counted():
    engine = life()
    loop, _, control = engine
    control.rest()  # somebody waits: not now
    assert found(engine)["octavo:page_audits_total"] == {"right": 0, "wrong": 0}
    while loop.has_work:
        loop.step()
    for _ in range(2):  # once for what was computed since
        control.rest()
    assert found(engine)["octavo:page_audits_total"] == {"right": 1, "wrong": 0}
    loop.add(ask("G", [70] * 20, 2, 110.0))
    while loop.has_work:
        loop.step()
    loop.scheduler.cache.pool.refs[loop.scheduler.cache.pool.blank[0]] += 1
    control.rest()
    assert found(engine)["octavo:page_audits_total"] == {"right": 1, "wrong": 1}
    problems = json.loads(control.reply(ReadProgress(call=1)))["page_problems"]
    assert any(problem.startswith("1 pages held when nothing runs: ") for problem in problems), problems


ELSEWHERE["octavo:page_audits_total"] = test_when_nothing_runs_the_pages_are_counted


def found(engine: Engine) -> dict[str, dict[str, float]]:
    """Sample → its labels' values, without those that all have, joined → value."""
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(engine.control.reply(ReadMetrics(call=1))):
        for sample in family.samples:
            common = {"model_name": "m", "engine": "0"}
            if sample.name.startswith("http_"):
                common = {}
            elif sample.name == "vllm:admission_rejections_total":
                common = {"model_name": "m"}
            assert common.items() <= sample.labels.items(), sample
            rest = ",".join(value for name, value in sample.labels.items() if name not in common)
            values.setdefault(sample.name, {})[rest] = sample.value
    return values


def buckets(bounds: Sequence[float], seen: Sequence[float]) -> dict[str, float]:
    return {**{str(float(b)): sum(s <= b for s in seen) for b in bounds}, "+Inf": len(seen)}


def expected() -> dict[str, dict[str, Any]]:
    wanted: dict[str, dict[str, Any]] = {name: dict(values) for name, values in VALUES.items()}
    for name, (bounds, seen) in HISTOGRAMS.items():
        wanted[f"{name}_bucket"] = buckets(bounds, seen)
        wanted[f"{name}_count"], wanted[f"{name}_sum"] = {"": len(seen)}, {"": sum(seen)}
    samples = StepSamples()  # two sizes are enough for the first fit; the next comes after four steps more
    for shape in (StepShape(1, 19, 0, 210), StepShape(2, 3, 20, 17 + 18 + 19 + 20)):
        samples.add(shape, 0.5)
    fitted = msgspec.structs.asdict(samples.fit())
    wanted["octavo:step_cost_seconds"] = {part: fitted[part] for part in ("step", "row", "token", "context", "pair")}
    route = "/v1/completions,POST"
    name = "http_request_duration_seconds"
    wanted[f"{name}_bucket"] = {f"{route},{bound}": value for bound, value in buckets(list(BOUNDS), [0.3]).items()}
    wanted[f"{name}_count"], wanted[f"{name}_sum"] = {route: 1}, {route: 0.3}
    return wanted


def test_every_sample_has_the_value_that_it_must_have() -> None:
    exported, wanted = found(life()), expected()
    assert set(exported) == set(wanted), set(exported) ^ set(wanted)
    for name, values in wanted.items():
        assert exported[name] == values, name


def test_what_tells_little_here_is_known_elsewhere() -> None:
    silent = {name for name, values in VALUES.items() if not any(values.values())}
    silent |= {name for name, (_, seen) in HISTOGRAMS.items() if not any(seen)}
    assert silent == set(ELSEWHERE)
    for name, test in ELSEWHERE.items():
        assert f'"{name}' in inspect.getsource(test), name


def test_vllms_names_are_offered_or_said_not_to_be() -> None:
    offered = {*VALUES, *HISTOGRAMS, "http_request_duration_seconds", "octavo:step_cost_seconds"}
    offered.add("vllm:spec_decode_num_accepted_tokens_per_pos_total")  # has no sample before the first draft
    assert not offered & set(NOT_OFFERED)
    vllm = {name for name in offered if name.startswith("vllm:")}
    assert len(vllm) + len(NOT_OFFERED) == 53, (
        "of vLLM 0.32: those that are always there, the optional ones, two old names"
    )
    text = life().control.reply(ReadMetrics(call=1))
    assert set(re.findall(r"^# TYPE (\S+) ", text, re.M)) == offered
