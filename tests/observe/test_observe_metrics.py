"""EngineMetrics against hand-computed values, its text against Prometheus' own parser, and the dashboard against both."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.messages import (
    Draft,
    EngineReport,
    Finish,
    GenerateRequest,
    Responded,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenDelta,
)
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.observe.metrics.exposition import Histogram, Scrape
from octavo.observe.metrics.gauges import EngineState, HoldState, TierState
from octavo.observe.step_observer import Observers, StepObserver, StepTimes
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, Planned
from octavo.schedule.step_costs import StepCosts
from tests.calls import Calls

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "octavo.json"

REPORT = EngineReport(
    device="cpu (1 thread)",
    dtype="float32",
    vocab_size=256,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    page_size=16,
    num_pages=32,
    num_host_pages=4,
    weights_bytes=1000,
    page_bytes=100,
)


def request(id: str, prompt_len: int = 10, n: int = 1, max_tokens: int = 20, arrived: float = 100.0) -> GenerateRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=1)
    return GenerateRequest(id=id, prompt_ids=[1] * prompt_len, params=params, stop_ids=[], arrived=arrived)


def samples(metrics: EngineMetrics, state: EngineState | None = None) -> dict[tuple[str, str], float]:
    """(sample name, its one extra label's value or "") → value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text(state or EngineState())):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            if not sample.name.startswith(("http_", "vllm:admission_rejections")):
                assert sample.labels["model_name"] == "m" and sample.labels["engine"] == "0"
            found[sample.name, ",".join(extra.values())] = sample.value
    return found


def one_request_life() -> EngineMetrics:
    """Arrives at 100, gets a row at 101 with 4 of 10 tokens cached, first token at 103, then 104, 106; ends."""
    metrics = EngineMetrics("m", REPORT)
    metrics.arrived(request("a"), now=100.5)
    metrics.admitted("a", 101.0, num_cached_tokens=4)
    metrics.step(102.0, 6, [])
    metrics.step(103.0, 6, [TokenDelta("a", 0, [7])])
    metrics.step(104.0, 1, [TokenDelta("a", 0, [8])])
    metrics.step(106.0, 1, [TokenDelta("a", 0, [9], Finish("stop", stop_token=9))])
    return metrics


def test_counters_and_times_of_one_request() -> None:
    found = samples(one_request_life())
    assert found["vllm:prompt_tokens_total", ""] == 10
    assert found["vllm:generation_tokens_total", ""] == 3
    assert found["vllm:prefix_cache_queries_total", ""] == 10
    assert found["vllm:prefix_cache_hits_total", ""] == 4
    assert found["vllm:prompt_tokens_cached_total", ""] == 4
    assert found["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 4
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 6
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 0
    assert found["octavo:steps_total", ""] == 4
    sums = {
        "vllm:time_to_first_token_seconds": 3.0,
        "vllm:inter_token_latency_seconds": 1.0 + 2.0,
        "vllm:request_time_per_output_token_seconds": 1.5,
        "vllm:e2e_request_latency_seconds": 6.0,
        "vllm:request_queue_time_seconds": 1.0,
        "vllm:request_inference_time_seconds": 5.0,
        "vllm:request_prefill_time_seconds": 2.0,
        "vllm:request_decode_time_seconds": 3.0,
        "vllm:request_prompt_tokens": 10,
        "vllm:request_generation_tokens": 3,
        "vllm:iteration_tokens_total": 14,
        "vllm:request_params_n": 1,
        "vllm:request_params_max_tokens": 20,
        "vllm:request_max_num_generation_tokens": 3,
        "vllm:request_num_preemptions": 0,
        "vllm:request_prefill_kv_computed_tokens": 6,
    }
    for name, expected in sums.items():
        assert found[f"{name}_sum", ""] == pytest.approx(expected), name
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", "2.5"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "5.0"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "+Inf"] == 1


def test_choices_are_counted_each_and_their_request_once() -> None:
    metrics = EngineMetrics("m", REPORT)
    metrics.arrived(request("a", n=3), now=100.0)
    metrics.admitted("a", 100.0, 0)
    metrics.step(101.0, 10, [TokenDelta("a", i, [5]) for i in range(3)])
    metrics.step(102.0, 3, [TokenDelta("a", 1, [5], Finish("length"))])
    metrics.step(103.0, 2, [TokenDelta("a", 0, [5], Finish("stop"))])
    assert samples(metrics)["vllm:request_params_n_count", ""] == 0
    metrics.step(104.0, 1, [TokenDelta("a", 2, [5], Finish("length"))])
    found = samples(metrics)
    assert found["vllm:request_params_n_sum", ""] == 3 and found["vllm:request_params_n_count", ""] == 1
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 2
    assert found["vllm:prompt_tokens_total", ""] == 10
    assert found["vllm:generation_tokens_total", ""] == 6
    assert found["vllm:request_success_total", "length"] == 2
    assert found["vllm:request_success_total", "stop"] == 1


def test_abort_counts_only_what_had_not_finished_and_later_deltas_are_ignored() -> None:
    metrics = EngineMetrics("m", REPORT)
    metrics.arrived(request("a", n=2), now=100.0)
    metrics.arrived(request("b"), now=100.0)
    metrics.admitted("a", 100.0, 0)
    metrics.step(101.0, 10, [TokenDelta("a", 0, [5], Finish("stop")), TokenDelta("a", 1, [5])])
    metrics.aborted("a", 0, "abort", 102.0)  # it had finished
    assert samples(metrics)["vllm:request_success_total", "abort"] == 0
    metrics.aborted("a", -1, "abort", 102.0)
    metrics.aborted("a", -1, "abort", 102.0)
    metrics.aborted("b", -1, "abort", 102.0)  # never admitted
    metrics.aborted("never seen", -1, "abort", 102.0)
    metrics.step(103.0, 1, [TokenDelta("a", 1, [5])])
    found = samples(metrics)
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "abort"] == 2
    assert found["vllm:generation_tokens_total", ""] == 2
    assert found["vllm:request_params_n_count", ""] == 2


def test_a_stop_string_in_one_choice_ends_that_choice_only() -> None:
    metrics = EngineMetrics("m", REPORT)
    metrics.arrived(request("a", n=2), now=100.0)
    metrics.step(101.0, 10, [TokenDelta("a", 0, [5]), TokenDelta("a", 1, [5])])
    metrics.aborted("a", 1, "stop", 102.0)
    metrics.step(103.0, 1, [TokenDelta("a", 0, [5], Finish("length"))])
    found = samples(metrics)
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:request_success_total", "abort"] == 0
    assert found["vllm:generation_tokens_total", ""] == 3
    assert found["vllm:request_params_n_count", ""] == 1


def test_a_second_admission_is_not_a_second_wait() -> None:
    metrics = EngineMetrics("m", REPORT)
    metrics.arrived(request("a"), now=100.0)
    metrics.admitted("a", 101.0, 0)
    metrics.preempted("a")
    metrics.preempted("a")
    metrics.preempted("never seen")
    metrics.admitted("a", 150.0, 8)
    metrics.aborted("a", -1, "abort", 151.0)
    found = samples(metrics)
    assert found["vllm:request_num_preemptions_sum", ""] == 2 and found["vllm:request_num_preemptions_count", ""] == 1
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ""] == 10
    assert found["vllm:request_queue_time_seconds_sum", ""] == 1.0
    assert found["vllm:prompt_tokens_total", ""] == 10
    assert found["vllm:num_preemptions_total", ""] == 3


def test_a_tier_is_shown() -> None:
    tier = TierState(
        5000, 7, 2, 6, 1, 0.5, 2.5, 9, 0.25, {"slower": 3, "late": 4}, {"bad": 1, "evicted": 2, "failed": 3},
        8000, 11, 4, 5,
    )  # fmt: skip
    found = samples(EngineMetrics("m", REPORT), EngineState(tier=tier))
    size = REPORT.page_size
    assert found["octavo:kv_tier_bytes", ""] == 5000 and found["octavo:kv_tier_pages", ""] == 7
    assert found["octavo:kv_tier_loads_total", ""] == 2
    assert found["octavo:kv_tier_ram_bytes", ""] == 8000 and found["octavo:kv_tier_ram_pages", ""] == 11
    assert [found["octavo:kv_tier_ram_tokens_total", what] for what in ("loaded", "stored")] == [4 * size, 5 * size]
    tokens = {what: found["octavo:kv_tier_tokens_total", what] for what in ("loaded", "missed", "stored")}
    assert tokens == {"loaded": 6 * size, "missed": size, "stored": 9 * size}
    seconds = [found["octavo:kv_tier_seconds_total", what] for what in ("load", "store", "saved")]
    assert seconds == [0.5, 0.25, 2.5]
    assert [found["octavo:kv_tier_passed_requests_total", why] for why in ("slower", "late")] == [3, 4]
    assert [found["octavo:kv_tier_files_total", why] for why in ("bad", "evicted", "failed")] == [1, 2, 3]


def test_held_prefixes_are_shown() -> None:
    holds = HoldState({"session": 3, "pin": 2}, {"session": 700, "pin": 500}, 4)
    found = samples(EngineMetrics("m", REPORT), EngineState(holds=holds))
    assert [found["octavo:held_prefixes", kind] for kind in ("session", "pin")] == [3, 2]
    assert [found["octavo:held_prefix_bytes", kind] for kind in ("session", "pin")] == [700, 500]
    assert found["octavo:held_prefixes_dropped_total", ""] == 4


def test_gauges_show_pages_and_waste() -> None:
    state = EngineState(
        num_running=3,
        num_waiting=2,
        waiting_by_reason={"pages": 1, "order": 1},
        num_used_pages=8,
        num_cached_pages=4,
        num_free_pages=20,
        num_touched_pages=13,
        num_filled_slots=96,
        num_host_pages_used=1,
        blocked_seconds={"pages": 2.5},
    )
    found = samples(EngineMetrics("m", REPORT), state)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:num_requests_waiting", ""] == 2
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert found["octavo:kv_slot_use_ratio", ""] == 0.75
    assert found["octavo:kv_pages", "cached"] == 4
    assert found["octavo:waiting_by_reason", "order"] == 1
    assert found["octavo:host_pages_used", ""] == 1
    assert found["octavo:memory_bytes", "weights"] == REPORT.weights_bytes > 0
    assert found["octavo:memory_bytes", "pages"] == 13 * REPORT.page_bytes > 0
    assert found["octavo:queue_blocked_seconds_total", "pages"] == 2.5
    assert found["octavo:queue_blocked_seconds_total", "rows"] == 0
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == 2
    assert found["vllm:num_requests_waiting_by_reason", "deferred"] == 0
    assert found["vllm:cache_config_info", "16,32,4,float32"] == 1


def test_bucket_bounds_are_inclusive_and_labels_are_escaped() -> None:
    histogram = Histogram([1, 2])
    histogram.observe(1)
    histogram.observe(1.5, times=3)
    histogram.observe(9)
    assert histogram.counts == [1, 3, 1] and histogram.count == 5 and histogram.total == 14.5
    scrape = Scrape({"model_name": 'a"b\\c\nd'})
    scrape.histogram("x", "help", histogram)
    (family,) = text_string_to_metric_families(scrape.text())
    assert {sample.labels["model_name"] for sample in family.samples} == {'a"b\\c\nd'}
    assert [s.value for s in family.samples if s.name == "x_bucket"] == [1, 4, 5]


def test_a_step_of_256_rows_is_cheap() -> None:
    metrics = EngineMetrics("m", REPORT)
    for i in range(256):
        metrics.arrived(request(f"cmpl-{i:032x}"), now=100.0)
    deltas = [TokenDelta(f"cmpl-{i:032x}", 0, [5]) for i in range(256)]
    with Calls() as calls:
        metrics.step(101.0, 256, deltas)
    print(f"{calls.num / 256:.1f} calls per row")
    assert calls.num < 6 * 256


def test_cache_dtype_is_what_the_pages_hold() -> None:
    def label(report: EngineReport) -> str:
        (info,) = [
            line for line in EngineMetrics("m", report).text(EngineState()).splitlines() if "cache_dtype=" in line
        ]
        return info.split('cache_dtype="')[1].split('"')[0]

    assert label(REPORT) == "float32"
    assert label(msgspec.structs.replace(REPORT, kv_dtype="fp8")) == "fp8"


def test_host_time_and_busy_time_of_overlapping_steps() -> None:
    """A step's stages by hand, each at its time; the executor computes beside the host."""
    metrics = EngineMetrics("m", REPORT)
    now = [0.0]
    observers = Observers([metrics], lambda: now[0])
    plan = StepPlan(0, [], [], [], [0], [0], [1], [True], [], [], [])
    planned, committed = (
        Planned(plan, [], [], [], [], [], []),
        Committed(plan, StepResult(0, [7]), 1, [], [], [], []),
    )

    def at(seconds: float, stage: Callable[..., None], *about: Any) -> None:
        now[0] = seconds
        stage(*about)

    at(9.9998, observers.began)
    at(10.0, observers.planned, planned)
    at(10.0002, observers.submitted)
    at(10.0002, observers.stepped, planned, 1)
    at(10.499, observers.began)
    at(10.5, observers.planned, planned)  # while the first is computed
    at(10.5005, observers.submitted)
    at(11.0, observers.collected)  # 10 … 11
    at(11.0005, observers.committed, committed)
    at(11.001, observers.stepped, planned, 1)
    at(11.75, observers.collected)  # 11 … 11.75: it began when the one before it ended
    at(11.75, observers.committed, committed)
    at(20.0, observers.planned, planned)
    at(20.25, observers.collected)  # after a time of nothing to do
    at(20.25, observers.committed, committed)
    found = samples(metrics)
    assert found["octavo:device_busy_seconds_total", ""] == 2.0
    assert found["octavo:host_step_seconds_sum", ""] == pytest.approx(0.0024)
    assert found["octavo:host_step_seconds_bucket", "0.0005"] == 1 and found["octavo:host_step_seconds_count", ""] == 2


def test_an_event_reaches_those_that_override_it_and_costs_the_others_nothing() -> None:
    class Counts(StepObserver):
        num_planned = 0

        def planned(self, planned: Planned, now: float) -> None:
            self.num_planned += 1

    counts, silent = Counts(), StepObserver()
    observers = Observers([silent, counts])
    subscribed = {name: notified for name, notified in vars(observers).items() if name.startswith("_on_")}
    assert [name for name, notified in subscribed.items() if notified] == ["_on_planned"]
    events = {name for name in vars(StepObserver) if not name.startswith("_")} - {"is_essential", "dropped"}
    assert {f"_on_{event}" for event in events} == set(subscribed), "an event that no observer would hear of"
    plan = StepPlan(0, [], [], [], [], [], [], [], [], [], [])
    observers.planned(Planned(plan, [], [], [], [], [], []))
    observers.remove(counts)
    observers.planned(Planned(plan, [], [], [], [], [], []))
    assert counts.num_planned == 1 and list(observers) == [silent]


def test_http_requests_by_route() -> None:
    metrics = EngineMetrics("m", REPORT)
    for handler, status, seconds in (("/a", 200, 0.3), ("/a", 204, 0.7), ("/a", 404, 0.05), ("/metrics", 200, 1.0)):
        metrics.responded(Responded(["x"], "POST", handler, status, seconds))
    found = samples(metrics)
    assert found["http_requests_total", "/a,POST,2xx"] == 2 and found["http_requests_total", "/a,POST,4xx"] == 1
    assert not [key for key in found if "/metrics" in key[1]]
    assert found["http_request_duration_seconds_bucket", "/a,POST,0.1"] == 1
    assert found["http_request_duration_seconds_bucket", "/a,POST,0.5"] == 2
    assert found["http_request_duration_seconds_sum", "/a,POST"] == pytest.approx(1.05)
    assert found["http_request_duration_highr_seconds_bucket", "0.75"] == 3
    assert found["http_request_duration_highr_seconds_count", ""] == 3


def test_the_dashboard_names_nothing_that_is_not_there() -> None:
    board = json.loads(DASHBOARD.read_text())
    metrics = EngineMetrics("m", REPORT)
    metrics.responded(Responded(["x"], "POST", "/a", 200, 0.1))
    known = {name for name, _ in samples(metrics, EngineState(waiting_by_reason={"pages": 1}))}
    labels = {label for family in text_string_to_metric_families(metrics.text(EngineState(waiting_by_reason={"pages": 1})))
              for sample in family.samples for label in sample.labels}  # fmt: skip
    texts = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert all(panel.get("targets") for panel in board["panels"] if panel["type"] != "row")
    grouped = {
        label.strip() for text in texts for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(",")
    }
    grouped |= {label for text in texts for label in re.findall(r"[{,]\s*(\w+)=~?\"", text)}
    assert grouped and grouped <= labels, grouped - labels
    texts += [variable["query"] for variable in board["templating"]["list"]]
    named = {name for text in texts for name in re.findall(r"\b(?:vllm:|octavo:|http_)\w+", text)}
    assert len(named) > 20 and named <= known, named - known


def test_drafts_and_what_was_accepted() -> None:
    metrics = EngineMetrics("m", REPORT)
    columns = ([0, 1], [4, 9], [4, 3], [True, True])
    plan = StepPlan(0, [], [], [], *columns, [], [], [], drafts=[Draft(0, [7, 8, 9]), Draft(1, [7, 7])])
    for runs in ([3, 1], [4, 2]):
        result = StepResult(0, [7] * sum(runs), runs=runs)
        metrics.committed(Committed(plan, result, 7, [], [], [], []), StepTimes(1.0, 0.5))
    found = samples(metrics)
    assert found["vllm:spec_decode_num_drafts_total", ""] == 4
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 10
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 6
    by_position = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(at)] for at in range(3)]
    assert by_position == [3, 2, 1]


def test_steps_with_a_limit_and_their_costs() -> None:
    metrics = EngineMetrics("m", REPORT)
    plan = StepPlan(0, [], [], [], [], [], [], [], [], [], [])
    metrics.planned(Planned(plan, [], [], [], [], [], []), 1.0)
    before = samples(metrics)
    assert before["octavo:capped_steps_total", ""] == 0 == before["octavo:step_limit_seconds", ""]
    assert not any(name == "octavo:step_cost_seconds" for name, _ in before), "not known yet"
    capped = Request(0, request("a"), 0)
    for seconds in (0.05, 0.0625):
        metrics.planned(Planned(plan, [], [], [], [], [], [], capped=capped, limit_seconds=seconds), 1.0)
    metrics.costs_learned(StepCosts(0.5, 0.25, 0.125, 0.0, 0.0625), 2.0)
    found = samples(metrics)
    assert found["octavo:capped_steps_total", ""] == 2 and found["octavo:step_limit_seconds", ""] == 0.0625
    parts = {part: value for (name, part), value in found.items() if name == "octavo:step_cost_seconds"}
    assert parts == {"step": 0.5, "row": 0.25, "token": 0.125, "context": 0.0, "pair": 0.0625}
