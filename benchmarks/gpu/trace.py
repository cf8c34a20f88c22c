"""Steady decode under torch's profiler: the share of the wall time in which the GPU was busy, and with which kernels.
On a CPU it traces operators instead, which rehearses everything but the kernels."""

import gzip
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import growth, workloads
from benchmarks.gpu.show import Results, share, table
from benchmarks.gpu.subject import StepTimes, Subject
from benchmarks.gpu.targets import BUSY_SHARE

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_TOP = 20


class Interval(NamedTuple):
    """One kernel or operator, in microseconds of the trace's own clock."""

    name: str
    start: float
    end: float


class TracedSteps(StepTimes):
    """Starts the profiler after num_before turns of steady decode, and stops it num_traced turns later."""

    def __init__(self, subject: Subject, batch: int, num_before: int, num_traced: int) -> None:
        super().__init__(subject.llm)
        self._batch, self._num_before, self._num_traced = batch, num_before, num_traced
        self._num_steady = 0
        self.first = self.last = 0  # turns between which the profiler ran
        self.profiler = make_profiler()

    def after_step(self) -> None:
        self._num_steady = self._num_steady + 1 if self.num_tokens[-1] == self._batch else 0
        if not self.first and self._num_steady == self._num_before:
            self.profiler.start()
            self.first = len(self.ended)
        elif self.first and not self.last and len(self.ended) == self.first + self._num_traced:
            self.last = len(self.ended)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # work in flight belongs to the trace
            self.profiler.stop()


def make_profiler() -> profile:
    if torch.cuda.is_available():
        return profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    # A rehearsal: a CPU computes large steps on a separate thread.
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], acc_events=True, experimental_config=everywhere)


def run(
    subject: Subject, num_rows: int, path: str, seed: int, scale: float, num_traced: int, results: Results, part: str
) -> int:
    """Traces steps of so many rows, or as many as the load and the engine have, as that part of the results. Returns 1 if the window could
    not be traced."""
    with make_profiler():  # the first start of the tracing library takes seconds
        pass
    items = workloads.make("decode_heavy", seed, scale)
    batch = min(len(items), num_rows, subject.report.max_num_seqs)
    num_before = 3 * growth.SETTLING_STEPS
    num_steps = num_before + num_traced + growth.SETTLING_STEPS
    items = [item._replace(output_len=_output_len(subject, items, num_steps)) for item in items[:batch]]
    with TracedSteps(subject, batch, num_before, num_traced) as steps:
        subject.generate(items)
    if not steps.last:
        print(
            f"trace: fewer than {num_steps} steps in which all {batch} rows got a token: give a smaller --trace-steps"
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        steps.profiler.export_chrome_trace(str(file))
        text = file.read_bytes()
    if path:
        Path(path).write_bytes(gzip.compress(text, 6) if path.endswith(".gz") else text)
    figures = judge(read(text), num_traced)
    before = range(steps.first - num_before + growth.SETTLING_STEPS, steps.first)
    figures |= {
        "batch": batch,
        "untraced_step_ms": _step_ms(steps.ended, before),
        # The first two turns after the start wait for the profiler.
        "traced_step_ms": _step_ms(steps.ended, range(steps.first + 2, steps.last)),
        "file": path or None,
    }
    results.put(part, figures)
    print("\n" + show(figures))
    return 0


def _output_len(subject: Subject, items: Sequence[workloads.Item], num_steps: int) -> int:
    """Return an output length with which all rows decode at once for num_steps steps: the first rows start while the last wait."""
    tokens = sum(len(item.prompt) for item in items[: subject.report.max_num_seqs])
    # Decodes take at most half of a step's token budget here.
    return num_steps + 2 * -(-tokens // subject.report.max_num_batched_tokens) + 2


def _step_ms(ended: Sequence[float], turns: range) -> float:
    return round(statistics.median(ended[i] - ended[i - 1] for i in turns) * 1e3, 4)


# ── reading a trace ─────────────────────────────────────────────────────────────────────────────────


def read(text: bytes) -> list[Interval]:
    """Return the device's kernels in order of their start; on a machine without a GPU, the operators."""
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in events if event.get("cat") in _GPU_CATEGORIES]
    chosen = kernels or [event for event in events if event.get("cat") == "cpu_op"]
    intervals = [Interval(event["name"], event["ts"], event["ts"] + event["dur"]) for event in chosen]
    return sorted(intervals, key=lambda interval: interval.start)


def busy(intervals: Iterable[Interval]) -> float:
    """Return the microseconds in which at least one interval ran. Intervals are sorted by start."""
    total, reached = 0.0, float("-inf")
    for interval in intervals:
        total += max(0.0, interval.end - max(interval.start, reached))
        reached = max(reached, interval.end)
    return total


def judge(intervals: Sequence[Interval], num_steps: int) -> dict[str, Any]:
    """Return busy time over the span from the first kernel's start to the last one's end, and the time of each kernel."""
    if not intervals:
        raise RuntimeError("the trace contains no work of the device")
    span = max(interval.end for interval in intervals) - intervals[0].start
    took: dict[str, list[float]] = defaultdict(list)
    for interval in intervals:
        took[interval.name].append(interval.end - interval.start)
    total = sum(map(sum, took.values()))
    top = sorted(took.items(), key=lambda pair: -sum(pair[1]))[:_TOP]
    gaps = _gaps(intervals)
    return {
        "num_steps": num_steps,
        "span_ms": round(span / 1e3, 3),
        "busy_ms": round(busy(intervals) / 1e3, 3),
        "busy_share": round(busy(intervals) / span, 4),
        "longest_gaps_us": [round(gap, 1) for gap in gaps[:5]],
        "kernels_per_step": round(len(intervals) / num_steps, 1),
        "top": [
            {
                "name": name,
                "share": round(sum(times) / total, 4),
                "per_step": round(len(times) / num_steps, 2),
                "mean_us": round(statistics.fmean(times), 2),
                "us_per_step": round(sum(times) / num_steps, 1),
            }
            for name, times in top
        ],
    }


def _gaps(intervals: Sequence[Interval]) -> list[float]:
    """Return the stretches in which nothing ran, the longest first."""
    gaps, reached = [], intervals[0].end
    for interval in intervals[1:]:
        if interval.start > reached:
            gaps.append(interval.start - reached)
        reached = max(reached, interval.end)
    return sorted(gaps, reverse=True)


def show(figures: dict[str, Any]) -> str:
    mark = "✓" if figures["busy_share"] >= BUSY_SHARE else "✗"
    gaps = ", ".join(f"{gap:.0f}" for gap in figures["longest_gaps_us"]) or "none"
    lines = [
        f"decode of {figures['batch']} rows, {figures['num_steps']} steps traced: busy {figures['busy_ms']:.1f} of "
        f"{figures['span_ms']:.1f} ms = {figures['busy_share']:.1%} (must: {BUSY_SHARE:.0%} {mark})",
        f"{figures['kernels_per_step']:.0f} kernels a step; step {figures['untraced_step_ms']:.3f} ms before the trace, "
        f"{figures['traced_step_ms']:.3f} ms in it; longest gaps {gaps} µs",
        "",
    ]
    rows = [
        [_short(top["name"]), share(top["share"]), f"{top['per_step']:g}", f"{top['mean_us']:.1f}", f"{top['us_per_step']:.0f}"]
        for top in figures["top"]
    ]  # fmt: skip
    return "\n".join(lines) + table(("kernel", "share", "a step", "mean µs", "µs a step"), rows)


def _short(name: str) -> str:
    return name if len(name) <= 70 else name[:69] + "…"
