"""`octavo plan --check URL`: sends the load to a running server, and prints what was predicted beside what was seen."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from octavo.cli.bench import clients, report
from octavo.cli.bench.sending import RequestResult
from octavo.cli.bench.serve import warm_up
from octavo.cli.bench.workload import trace_workload
from octavo.errors import RequestFailed
from octavo.plan.figures import Figures, Spread
from octavo.plan.fleet import simulate
from octavo.plan.settings import FleetSettings
from octavo.plan.speed import Probed, Speed, speed_of
from octavo.plan.trace import Trace

_VOCABULARY = 30_000
_DRAWS = 8
EVERY_TOKEN = {"return_token_ids": True}
"""A field of requests: every token has its id. Texts do not count tokens: one may be a part of a character, and an event may carry several."""


class Row(msgspec.Struct, frozen=True):
    name: str
    predicted: float
    seen: float

    @property
    def off(self) -> float:
        return self.predicted / self.seen - 1 if self.seen else 0.0


def compare(trace: Trace, settings: FleetSettings, results: list[RequestResult]) -> list[Row]:
    """What is predicted is the mean of several draws of the steps' noise: one alone decides the p99 of a few dozen requests."""
    draws = _DRAWS if settings.model.noise else 1
    return rows_of([simulate(trace, settings, draw=draw) for draw in range(draws)], results)


def rows_of(runs: Sequence[Figures], results: list[RequestResult]) -> list[Row]:
    """`runs`: simulated ones. Times in seconds."""
    good = [result for result in results if not result.error]
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    seen = {
        "ttft": [result.ttft for result in good if result.ttft is not None],
        "tpot": [result.tpot for result in good if result.tpot is not None],
        "itl": [gap for result in good for gap in result.gaps],
        "e2e": [result.latency for result in good if result.latency is not None],
    }
    names = {"ttft": "first token", "tpot": "per token", "itl": "inter-token", "e2e": "end to end"}
    rows = []
    for measure, values in seen.items():
        spreads: list[Spread | None] = [getattr(figures, measure) for figures in runs]
        if None in spreads or not values:
            continue
        for which in ("mean", "p50", "p99"):
            value = sum(values) / len(values) if which == "mean" else report.percentile(values, float(which[1:]))
            rows.append(
                Row(f"{names[measure]}, {which}, s", fmean(getattr(spread, which) for spread in spreads), value)
            )
    predicted = fmean(figures.output_rate for figures in runs)
    rows.append(Row("output tokens/s", predicted, sum(result.output_tokens for result in good) / seconds))
    return rows


def check(arguments: argparse.Namespace, trace: Trace, settings: FleetSettings, measured: Speed | None) -> int:
    """`measured`: the machine's speed when its costs were measured. It is probed just before and after the load, and the prediction is for the
    speed that it had."""
    from octavo.cli.planning.measure import probe  # it imports this file

    options = argparse.Namespace(
        base_url=arguments.check, model=None, api_key=None, endpoint="completions", timeout=600.0, output_len=16, temperature=0.0,
        ignore_eos=True, num_warmups=2, prompt_kind="ids", input_len=32, vocab_size=_VOCABULARY, seed=1, max_concurrency=None,
        extra_body=EVERY_TOKEN,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        model = runner.run(warm_up(options))
    seed = time.time_ns()  # prompts that the server has not seen in an earlier check
    load = trace_workload(trace, _VOCABULARY, seed)
    key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0]
    is_probed = measured is not None and settings.num_replicas == 1
    probes: list[Probed] = []
    for at in range(2):
        if is_probed:
            try:
                probes += probe(arguments.check, model, _VOCABULARY, settings.replica.max_model_len, key, seed + 1 + at)
            except RequestFailed as error:
                print(
                    f"octavo plan: the speed that the server has now is not taken into account: {error}",
                    file=sys.stderr,
                )
                is_probed, probes = False, []
        if not at:
            results = clients.send_all(options, model, load, lambda count: None, 1).results
    speed = Speed()
    if measured is not None and probes:
        speed = speed_of(settings, probes).beside(measured)
    rows = compare(trace, speed.applied_to(settings), results)
    failed = sum(bool(result.error) for result in results)
    if arguments.json:
        table: list[dict[str, Any]] = [
            {"name": row.name, "predicted": row.predicted, "seen": row.seen, "off": row.off} for row in rows
        ]
        answer = {"model": model, "requests": len(results), "failed": failed, "rows": table}
        print(json.dumps(answer | {"speed": msgspec.to_builtins(speed)}))
    else:
        print(f"{model} at {arguments.check}: {len(results)} requests, {failed} failed")
        if probes:
            print(
                f"before and after them, prompts took {speed.prompts:.2f} times and rows {speed.rows:.2f} times as long as when the machine was measured; "
                "the prediction is for that speed"
            )
        print(f"\n{'':24}{'predicted':>12}{'seen':>12}{'off by':>10}")
        for row in rows:
            print(f"{row.name:24}{row.predicted:>12.4g}{row.seen:>12.4g}{row.off:>+10.1%}")
    return 1 if failed else 0
