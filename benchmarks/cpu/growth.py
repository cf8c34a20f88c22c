"""How a step grows with batch and context, and what share of the machine's own limits it reaches, through the real engine."""

from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Measured
from benchmarks.gpu import growth, limits
from benchmarks.gpu.growth import Point, Prompts
from benchmarks.gpu.show import Results, share, table

BATCHES = (1, 2, 4, 8, 16, 32, 64)
BATCH_CONTEXT = 256
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
CONTEXT_BATCHES = (1, 8)
LIMIT_BATCHES = (1, 8, 32)
_MAX_PREFILL_S = 120.0
_SCALE_QUICK = 0.125


def points(is_quick: bool) -> list[Point]:
    scale = _SCALE_QUICK if is_quick else 1.0
    by_batch = [Point(batch, round(BATCH_CONTEXT * scale)) for batch in BATCHES]
    by_context = [Point(batch, round(context * scale)) for batch in CONTEXT_BATCHES for context in CONTEXTS]
    return list(dict.fromkeys(by_batch + by_context))


def run(model: str, names: Sequence[str], is_quick: bool, results: Results) -> int:
    """Returns how many points failed."""
    num_failed = 0
    for name in names:
        subject = Measured(model, name)
        print(f"\n{name}: {subject.headline()}\n{subject.machine()}", flush=True)
        kept = _Named(results, f"growth of {name}")
        num_failed += growth.run(subject, points(is_quick), _MAX_PREFILL_S, kept)
        subject.llm.close()
    return num_failed


class _Named(Results):
    """Stores the growth benchmark's results under the server's name, since there are several servers here."""

    def __init__(self, results: Results, name: str) -> None:
        self._results, self._name = results, name

    def put(self, part: str, value: Any) -> None:
        self._results.put(self._name, value)


def run_limits(model: str, names: Sequence[str], is_quick: bool, results: Results) -> int:
    figures: dict[str, list[dict[str, Any]]] = {}
    context = round(BATCH_CONTEXT * (_SCALE_QUICK if is_quick else 1.0))
    for name in names:
        subject = Measured(model, name)
        prompts, figures[name] = Prompts(subject), []
        print(f"\n{name}: {subject.headline()}\n{subject.machine()}", flush=True)
        subject.llm.reset_prefix_cache()
        for batch in LIMIT_BATCHES:
            point = Point(batch, context)
            load = prompts.load(point)
            figures[name].append(shares(subject, growth.measure(subject, point, load)))
            prompts.note(load)
            results.put("limits", figures)
        print(table(_TITLES, [_row(figure) for figure in figures[name]]))
        subject.llm.close()
    return 0


def shares(subject: Measured, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes a step must read and the operations it must do, over its time and as shares of the ceilings."""
    seconds, batch = measured["step_ms"] / 1e3, measured["batch"]
    model, found = subject.model, subject.ceilings
    parameters = model.layer_parameters + model.head_parameters
    total_context = measured["context"] * batch
    weights = model.layer_parameters * model.layer_bytes + model.head_parameters * model.head_bytes
    num_bytes = weights + total_context * model.kv_bytes
    products = 2 * parameters * batch
    least = limits.step_seconds(limits.decode_work(batch, round(total_context), model.window), model, subject.chip)
    return {
        "batch": batch,
        "context": measured["context"],
        "step_ms": measured["step_ms"],
        "bytes": round(num_bytes),
        "operations": products,
        "bandwidth_share": num_bytes / seconds / found.bandwidth,
        "rate_share": products / seconds / subject.chip.flops,
        "limit_share": least / seconds,
        "ceilings": found._asdict(),
    }


_TITLES = ("batch", "context", "step ms", "MB read", "GB/s", "of bandwidth", "GOP/s", "of the rate", "of the limit")


def _row(figure: dict[str, Any]) -> list[str]:
    seconds = figure["step_ms"] / 1e3
    return [
        str(figure["batch"]),
        f"{figure['context']:.0f}",
        f"{figure['step_ms']:.2f}",
        f"{figure['bytes'] / 1e6:.0f}",
        f"{figure['bytes'] / seconds / 1e9:.1f}",
        share(figure["bandwidth_share"]),
        f"{figure['operations'] / seconds / 1e9:,.0f}",
        share(figure["rate_share"]),
        share(figure["limit_share"]),
    ]
