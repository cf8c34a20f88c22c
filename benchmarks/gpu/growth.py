"""How the decode step grows: batch 1 to 1,024 at one context, context 128 to 32k at a few batches, through the real engine."""

import statistics
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu import limits
from benchmarks.gpu.show import Results, share, table
from benchmarks.gpu.subject import StepTimes, Subject
from benchmarks.gpu.workloads import Item

BATCHES = tuple(2**i for i in range(11))  # at BATCH_CONTEXT
BATCH_CONTEXT = 512
CONTEXTS = (128, 512, 2048, 8192, 32_768)  # at CONTEXT_BATCHES
CONTEXT_BATCHES = (1, 16, 64)
SETTLING_STEPS = 8  # at the start of steady decode, not counted: a graph may be captured, caches are cold
MEASURED_STEPS = 24

_WINDOW = 1 + SETTLING_STEPS + MEASURED_STEPS + 1
_ASSUMED_PREFILL_SHARE = 0.7  # of the physical limit, for guessing what a point will cost


class Point(NamedTuple):
    batch: int
    context: int


def points(scale: float = 1.0) -> list[Point]:
    """Every point once, in order of batch at the one context, then of context."""

    def small(size: int) -> int:
        return max(1, round(size * scale))

    by_batch = [Point(small(batch), small(BATCH_CONTEXT)) for batch in BATCHES]
    by_context = [Point(small(batch), small(context)) for batch in CONTEXT_BATCHES for context in CONTEXTS]
    return list(dict.fromkeys(by_batch + by_context))


def run(subject: Subject, wanted: Sequence[Point], max_prefill_seconds: float, results: Results) -> int:
    """Return how many points failed. Points that do not fit or cost too much are skipped with a message."""
    figures: list[dict[str, Any]] = []
    remarks: list[str] = []
    num_failed = 0
    prompts = Prompts(subject)
    subject.llm.reset_prefix_cache()
    for point in wanted:
        name = f"batch {point.batch}, context {point.context}"
        reason = _too_many_rows(subject, point)
        load = [] if reason else prompts.load(point)
        if reason or (reason := _too_large(subject, point, load, max_prefill_seconds)):
            remarks.append(f"{name}: skipped, {reason}")
            continue
        try:
            figures.append(measure(subject, point, load))
            prompts.note(load)
        except Exception as error:
            traceback.print_exc()
            remarks.append(f"{name}: failed, {type(error).__name__}: {error}")
            num_failed += 1
            continue
        results.put("growth", {"points": figures, "remarks": remarks})
    results.put("growth", {"points": figures, "remarks": remarks})
    titles = ("batch", "context", "step ms", "p90 ms", "limit ms", "share", "tokens/s")
    print("\n" + table(titles, [_row(figure) for figure in figures]))
    for remark in remarks:
        print(remark)
    return num_failed


def measure(subject: Subject, point: Point, load: list[Item]) -> dict[str, Any]:
    """Prefill all rows, then time the steps in which every row gets one token."""
    with StepTimes(subject.llm) as times:
        subject.generate(load, keep_cache=True)
    window = steady_window(times.num_tokens, point.batch)
    intervals = [times.ended[i] - times.ended[i - 1] for i in window]
    mean = sum(intervals) / len(intervals)
    # Tokens generated up to the middle of the window, on top of the prompts.
    middle = window[len(window) // 2]
    total_context = sum(len(item.prompt) for item in load) + sum(times.num_tokens[:middle])
    least = limits.step_seconds(
        limits.decode_work(point.batch, total_context, subject.model.window), subject.model, subject.chip
    )
    return {
        "batch": point.batch,
        "context": round(total_context / point.batch, 1),
        "steps_measured": len(intervals),
        "step_ms": round(statistics.median(intervals) * 1e3, 4),
        "step_mean_ms": round(mean * 1e3, 4),
        "step_p90_ms": round(sorted(intervals)[int(0.9 * (len(intervals) - 1))] * 1e3, 4),
        "limit_ms": round(least * 1e3, 4),
        "share_of_limit": least / statistics.median(intervals),
        "tokens_per_second": round(point.batch / mean, 1),
    }


def steady_window(num_tokens: Sequence[int], batch: int) -> range:
    """Return the longest run of turns in which, as in the turn before, every row got a token, without its first
    SETTLING_STEPS turns and without its last one, after which rows finish."""
    best = range(0)
    start = None
    for i, num in enumerate([*num_tokens, -1]):
        if num == batch and start is None:
            start = i
        elif num != batch and start is not None:
            if i - start > len(best):
                best = range(start, i)
            start = None
    if len(best) < SETTLING_STEPS + 4:
        raise RuntimeError(f"only {len(best)} steps in which all {batch} rows got a token: too few to measure")
    return range(best.start + 1 + SETTLING_STEPS, best.stop - 1)


class Prompts:
    """Row i's prompt, of any length, is the start of row i's own stream of random tokens.

    So a longer or larger point finds in the prefix cache what a smaller one computed, and rows share nothing: most of this
    benchmark's time is prefill. Pages are counted, and the cache is reset before it would have to evict."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[int, int] = {}  # row → tokens of its stream that are in the cache
        self._num_pages = 0  # that may hold tokens
        self._is_caching = subject.llm.config.cache.enable_prefix_caching

    def load(self, point: Point) -> list[Item]:
        """Return requests with enough output tokens for all rows to decode at once, through the window: the first rows
        decode while the last ones are still prefilling. An item's shared_len is the part that the cache holds."""
        report = self._subject.report
        prompt_len = max(1, point.context - _WINDOW)
        if self._num_pages + self._new_pages(point.batch, prompt_len, 4 * _WINDOW) > report.num_pages:
            self._subject.llm.reset_prefix_cache()
            self._known, self._num_pages = {}, 0
        items = [
            Item(self._stream(row, prompt_len), 10**9, min(prompt_len - 1, self._known.get(row, 0)))
            for row in range(point.batch)
        ]
        num_prefill_steps = 0
        for work in limits.steps_of(items, point.batch, report.max_num_batched_tokens):
            num_prefill_steps += 1
            if work.num_samples == point.batch:
                break
        return [item._replace(output_len=num_prefill_steps + _WINDOW) for item in items]

    def note(self, load: Sequence[Item]) -> None:
        """Record that the load has run."""
        if not self._is_caching:
            return
        prompt_len = len(load[0].prompt)
        self._num_pages += self._new_pages(len(load), prompt_len, load[0].output_len)
        for row in range(len(load)):
            self._known[row] = max(self._known.get(row, 0), prompt_len)

    def _new_pages(self, batch: int, prompt_len: int, output_len: int) -> int:
        page_size = self._subject.report.page_size
        found = sum(min(prompt_len, self._known.get(row, 0)) // page_size for row in range(batch))
        return batch * (-(-(prompt_len + output_len) // page_size) + 1) - found

    def _stream(self, row: int, num_tokens: int) -> list[int]:
        vocab_size = self._subject.report.vocab_size
        ids = np.random.default_rng(row).integers(min(1000, vocab_size // 2), vocab_size, size=num_tokens)
        return [int(token) for token in ids.tolist()]


def _too_many_rows(subject: Subject, point: Point) -> str:
    """Why the engine cannot decode that many rows in one step; empty if it can."""
    report = subject.report
    if point.batch > report.max_num_seqs:
        return f"the engine has {report.max_num_seqs} rows (--max-num-seqs)"
    if point.batch > report.max_num_batched_tokens:
        return f"a step has {report.max_num_batched_tokens} tokens (--max-num-batched-tokens)"
    return ""


def _too_large(subject: Subject, point: Point, load: list[Item], max_prefill_seconds: float) -> str:
    """Why the load cannot be run; empty if it can."""
    report = subject.report
    longest = len(load[0].prompt) + load[0].output_len
    if longest > report.max_model_len:
        return f"{longest} tokens do not fit the context of {report.max_model_len} (--max-model-len)"
    pages = point.batch * -(-longest // report.page_size)
    if pages + point.batch // 2 > report.num_pages:  # the scheduler keeps that much back for rows to grow
        return f"{pages:,} KV pages are needed and there are {report.num_pages:,}"
    once = [item._replace(output_len=1) for item in load]
    window = subject.model.window
    work = list(limits.steps_of(once, report.max_num_seqs, report.max_num_batched_tokens, window))
    seconds = limits.total_seconds(work, subject.model, subject.chip, shared_once=False) / _ASSUMED_PREFILL_SHARE
    if seconds > max_prefill_seconds:
        return f"prefill would take about {seconds:.1f} s (--max-prefill-seconds {max_prefill_seconds:g})"
    return ""


def _row(figure: dict[str, Any]) -> list[str]:
    return [
        str(figure["batch"]),
        f"{figure['context']:.0f}",
        f"{figure['step_ms']:.3f}",
        f"{figure['step_p90_ms']:.3f}",
        f"{figure['limit_ms']:.3f}",
        share(figure["share_of_limit"]),
        f"{figure['tokens_per_second']:,.0f}",
    ]
