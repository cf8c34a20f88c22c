"""The five workloads on one engine: tokens per second against vLLM, the targets and the physical limit."""

import statistics
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import limits, workloads
from benchmarks.gpu.show import Results, gib, share, table
from benchmarks.gpu.subject import Subject, peak_bytes, reset_peak
from benchmarks.gpu.targets import TARGETS
from benchmarks.gpu.workloads import Item

WARMUP_SEED = 99
SHORT_WARMUP = 16  # output tokens of a short warm-up

_TITLES = ("workload", "tokens/s of each run", "median", "vLLM", "ratio", "must", "aim", "limit", "share", "steps", "seconds", "peak GiB")  # fmt: skip


def run(
    subject: Subject, names: Sequence[str], seeds: Sequence[int], scale: float, warmup: str, results: Results
) -> int:
    """Measures each workload in turn. Returns how many failed."""
    figures: dict[str, Any] = {}
    failed: list[str] = []
    for name in names:
        try:
            figures[name] = measure(subject, name, seeds, scale, warmup)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name} failed: {type(error).__name__}: {error}")
            continue
        print(f"{name}: {', '.join(f'{rate:,.0f}' for rate in figures[name]['rates'])} tokens/s", flush=True)
        results.put("workloads", figures)
    print()
    print(table(_TITLES, [_row(name, figure) for name, figure in figures.items()]))
    print(_footnote(figures))
    for line in failed:
        print(line)
    return len(failed)


def measure(subject: Subject, name: str, seeds: Sequence[int], scale: float, warmup: str) -> dict[str, Any]:
    """Run one warm-up of the same kind with a seed of its own, then once for each seed."""
    warmup_seconds = 0.0
    if warmup != "none":
        items = workloads.make(name, WARMUP_SEED, scale)
        if warmup == "short":
            items = [item._replace(output_len=min(item.output_len, SHORT_WARMUP)) for item in items]
        warmup_seconds = subject.generate(items)
    reset_peak()
    runs = [_timed(subject, name, workloads.make(name, seed, scale)) for seed in seeds]
    rates = [run["rate"] for run in runs]
    middle = min(runs, key=lambda run: abs(run["rate"] - statistics.median(rates)))
    target = TARGETS.get(subject.llm.model_name, {}).get(name) if scale == 1.0 else None
    return {
        "unit": "input tokens/s" if workloads.counts_inputs(name) else "output tokens/s",
        "seeds": list(seeds),
        "rates": [round(rate, 1) for rate in rates],
        "median": round(statistics.median(rates), 1),
        "target": target._asdict() if target else None,
        "limit_rate": round(middle["limit_rate"], 1),
        "unshared_limit_rate": round(middle["unshared_limit_rate"], 1),
        "share_of_limit": statistics.median(rates) / middle["limit_rate"],
        "seconds": [round(run["seconds"], 4) for run in runs],
        "steps": [run["steps"] for run in runs],
        "ideal_steps": [run["ideal_steps"] for run in runs],
        "preemptions": sum(run["preemptions"] for run in runs),
        "warmup_seconds": round(warmup_seconds, 3),
        "peak_bytes": peak_bytes(),
        "pages_used_peak": subject.llm.engine_stats()["pages_used_peak"],  # since the engine's start
    }


def _timed(subject: Subject, name: str, items: Sequence[Item]) -> dict[str, Any]:
    before = subject.llm.engine_stats()
    seconds = subject.generate(items)
    after = subject.llm.engine_stats()
    counts_inputs = workloads.counts_inputs(name)
    tokens = sum(len(item.prompt) if counts_inputs else item.output_len for item in items)
    report, window = subject.report, subject.model.window
    steps = list(limits.steps_of(items, report.max_num_seqs, report.max_num_batched_tokens, window))
    least = limits.total_seconds(steps, subject.model, subject.chip)
    least_unshared = limits.total_seconds(steps, subject.model, subject.chip, shared_once=False)
    return {
        "rate": tokens / seconds,
        "seconds": seconds,
        "steps": int(after["steps"] - before["steps"]),
        "preemptions": int(after["preemptions"] - before["preemptions"]),
        "ideal_steps": len(steps),
        "limit_rate": tokens / least,
        "unshared_limit_rate": tokens / least_unshared,
    }


def _row(name: str, figure: dict[str, Any]) -> list[str]:
    target = figure["target"]
    median = figure["median"]
    against = ["–"] * 4
    if target:
        marks = [f"{target[key]:,}{' ✓' if median >= target[key] else ' ✗'}" for key in ("must", "aim")]
        against = [f"{target['vllm']:,}", f"{median / target['vllm']:.2f}", *marks]
    return [
        name,
        " ".join(f"{rate:,.0f}" for rate in figure["rates"]),
        f"{median:,.0f}",
        *against,
        f"{figure['limit_rate']:,.0f}",
        share(figure["share_of_limit"]),
        f"{statistics.fmean(figure['steps']):.0f}/{statistics.fmean(figure['ideal_steps']):.0f}",
        f"{statistics.median(figure['seconds']):.2f}",
        gib(figure["peak_bytes"]),
    ]


def _footnote(figures: dict[str, Any]) -> str:
    lines = [
        "steps: taken / needed, means of the runs, by continuous batching at these limits; peak: tensors, with the whole KV store"
    ]
    for name, figure in figures.items():
        if figure["unshared_limit_rate"] < figure["limit_rate"] * 0.999:
            lines.append(
                f"{name}: the limit reads the shared prefix once a step; "
                f"were every row to read it for itself, {figure['unshared_limit_rate']:,.0f}"
            )
        if figure["preemptions"]:
            lines.append(f"{name}: {figure['preemptions']} preemptions: the KV store is too small for the load")
    return "\n".join(lines)
