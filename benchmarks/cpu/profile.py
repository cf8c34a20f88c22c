"""Where the time of a decode step goes, by operation: each timed on its own, many times over, in the middle of a real run."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.cpu.engine import Measured
from benchmarks.cpu.growth import BATCH_CONTEXT
from benchmarks.gpu import growth
from benchmarks.gpu.growth import Point, Prompts
from benchmarks.gpu.show import Results, share, table
from octavo.batch import Batch

_RUNS = 100
_REST = "plan, assemble, sample, hand over"


def run(model: str, names: Sequence[str], is_quick: bool, results: Results) -> int:
    """Returns how many engines had no steps to look into."""
    figures: dict[str, Any] = {}
    num_failed = 0
    for name in names:
        subject = Measured(model, name)
        steps = subject.llm._loop.executor._runner.steps  # type: ignore[attr-defined]
        print(f"\n{name}: {subject.headline()}\n{subject.machine()}", flush=True)
        if steps is None:
            print(f"{name}: its steps are not recorded, so there is nothing to time: {'; '.join(subject.report.notes)}")
            num_failed += 1
        else:
            figures[name] = measure(subject, steps, 2 if is_quick else _RUNS)
            results.put("profile", figures)
            print(show(figures[name], subject))
        subject.llm.close()
    return num_failed


def measure(subject: Measured, steps: Any, num_runs: int) -> dict[str, Any]:
    """Profile one row at BATCH_CONTEXT: the time of each operation, and of the whole step without profiling."""
    point = Point(1, BATCH_CONTEXT)
    load = Prompts(subject).load(point)
    whole = growth.measure(subject, point, load)
    taken: list[list[list[tuple[str, float]]]] = []
    run_step = steps.run

    def looked_at(batch: Batch) -> Any:
        logits = run_step(batch)
        if batch.num_tokens == 1 and batch.max_seq_len >= BATCH_CONTEXT and not taken:
            kept = logits.clone()  # profiling repeats the step and overwrites the logits: restore them afterwards
            taken.append([steps.profile(batch, 1) for _ in range(num_runs)])
            logits.copy_(kept)
        return logits

    steps.run = looked_at
    subject.generate(load)
    del steps.run
    if not taken:
        raise RuntimeError(f"no step reached {BATCH_CONTEXT} tokens")
    # The median of each: other processes use the machine too.
    timed = [(same[0][0], statistics.median(took for _, took in same)) for same in zip(*taken[0], strict=True)]
    operations = _by_kind(timed, steps._tape._ops)
    computed = sum(operation["ms"] for operation in operations)
    return {"context": whole["context"], "step_ms": whole["step_ms"], "computed_ms": computed, "operations": operations}


def _by_kind(timed: Sequence[tuple[str, float]], ops: Sequence[Any]) -> list[dict[str, Any]]:
    """Group operations of one kind and shape, in order of first appearance."""
    found: dict[str, dict[str, Any]] = {}
    for (name, seconds), op in zip(timed, ops, strict=True):
        num_bytes = 0
        if name == "linear":
            products = [op.linear.products[i] for i in range(op.linear.num_products)]
            name = f"linear {op.linear.depth} → {sum(product.num_columns for product in products)}"
            num_bytes = sum(map(_weight_bytes, products))
        entry = found.setdefault(name, {"name": name, "count": 0, "ms": 0.0, "bytes": 0})
        entry["count"] += 1
        entry["ms"] += seconds * 1e3
        entry["bytes"] += num_bytes
    return list(found.values())


def _weight_bytes(product: Any) -> int:
    from octavo.kernels.cpu.library import library

    num_bytes: int = library().octavo_packed_bytes(product.kind, product.num_columns, product.depth)
    return num_bytes


def show(figure: dict[str, Any], subject: Measured) -> str:
    rest = {"name": _REST, "count": 1, "ms": max(0.0, figure["step_ms"] - figure["computed_ms"]), "bytes": 0}
    whole = figure["computed_ms"] + rest["ms"]
    rows = []
    for entry in [*figure["operations"], rest]:
        rate = entry["bytes"] / entry["ms"] * 1e3 if entry["bytes"] else 0.0
        rows.append(
            [
                entry["name"],
                str(entry["count"]),
                f"{entry['ms']:.3f}",
                share(entry["ms"] / whole),
                f"{rate / 1e9:.1f}" if rate else "",
                share(rate / subject.ceilings.bandwidth) if rate else "",
            ]
        )
    titles = ("operation", "times", "ms in all", "of the step", "GB/s of weights", "of bandwidth")
    return (
        f"one row, context {figure['context']:.0f}: a step takes {figure['step_ms']:.2f} ms, its operations, each timed on its "
        f"own, {figure['computed_ms']:.2f} ms\n" + table(titles, rows)
    )
