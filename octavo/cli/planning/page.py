"""The page that `octavo plan` prints."""

from octavo.plan.answer import MOST_LOAD, Answer, Change, Load, knee_of
from octavo.plan.figures import Figures, Levels, Spread
from octavo.plan.model_shape import ModelShape, in_gigabytes
from octavo.plan.step_model import StepModel
from octavo.plan.trace import Trace


def page(
    found: Answer,
    source: str,
    trace: Trace,
    levels: Levels,
    shape: ModelShape,
    weights_bytes: int,
    kv_bytes: int,
    machine: str,
    drafts: str,
) -> str:
    figures = found.figures
    wanted = ", ".join(f"{name} {time(limit)}" for name, limit in levels.limits.items())
    verdict = "keeps" if found.keeps_levels else "misses"
    lines = [
        _line("answer", f"{found.replicas} × {machine} for {shape.name}: {verdict} {wanted}"),
        _line("flags", " ".join(found.flags)),
        _line(
            "load",
            f"{len(trace.requests):,} requests of {trace.name}, {figures.rate:.3g} a second; prompts of {trace.prompt_tokens / len(trace.requests):,.0f} tokens, outputs of {trace.output_tokens / len(trace.requests):,.0f}, on average",
        ),
        _line("step times", source),
        _line("drafts", drafts),
        "",
        _line(
            "throughput",
            f"{figures.output_rate:,.0f} output tokens/s, {figures.total_rate:,.0f} with prompts; {figures.good_share:.1%} of the requests keep the levels by themselves ({figures.goodput:.3g}/s)",
        ),
        *_table(found),
        _line("prefix cache", f"{figures.hit_rate:.1%} of the prompt tokens found"),
        _line(
            "memory",
            f"weights {in_gigabytes(weights_bytes)}, KV store {in_gigabytes(kv_bytes)}, of which {figures.most_pages:.0%} were used at most; {figures.preemptions} preemptions",
        ),
        _line(
            "rows",
            f"{figures.mean_rows:.1f} of {found.max_num_seqs} on average; replicas computed {figures.busy_share:.0%} of the time",
        ),
        _line("waits", _waits(figures)),
    ]
    if any(figures.num_refused.values()):
        reasons = {"too_long": "longer than the context", "queue_full": "the queue was full"}
        refused = ", ".join(f"{count} ({reasons.get(name, name)})" for name, count in figures.num_refused.items())
        lines.append(_line("refused", refused))
    if found.cost_per_million is not None:
        lines.append(_line("cost", f"{found.cost_per_million:,.4g} for a million output tokens"))
    room = (
        "none: the levels are missed at any load"
        if found.headroom is None
        else f"keeps the levels {'at' if found.headroom == MOST_LOAD else 'up to'} {found.headroom:.2f} times this load"
        + (", and more was not tried" if found.headroom == MOST_LOAD else "")
    )
    knee = knee_of(found.loads)
    lines += ["", _line("headroom", room + (f"; the knee is at {knee:g} times" if knee is not None else ""))]
    lines += [_line("" if at else "more load", _more(load)) for at, load in enumerate(_chosen(found.loads))]
    lines += _questions(found)
    return "\n".join(lines)


def drafts_in_words(model: StepModel) -> str:
    if not model.draft_tokens:
        return "none assumed (--draft-tokens); a server on a CPU drafts by default, and may be faster with few rows"
    return (
        f"{model.draft_tokens} tokens for each row where that pays, each accepted with {model.acceptance:.0%} if those before it were (assumed): "
        f"{model.tokens_per_step:.2f} tokens a step"
    )


def _chosen(loads: list[Load]) -> list[Load]:
    return [load for load in loads if load.factor in (1.2, 1.5, 2.0)]


def _more(load: Load) -> str:
    if not load.missed:
        return f"+{load.factor - 1:.0%}: all levels are kept"
    figures = load.figures
    values = ", ".join(
        f"{name} becomes {time(figures.level(name))}"
        if name != "refused"
        else f"{figures.refused_share:.1%} are refused"
        for name in load.missed
    )
    return f"+{load.factor - 1:.0%}: {values}; {load.cause}"


def _questions(found: Answer) -> list[str]:
    lines = []
    if found.changes:
        lines += ["", *_changes(found.changes)]
    if (failed := found.failed) is not None:
        recovered = (
            "not before the load ends"
            if failed.recovered_seconds is None
            else f"after {failed.recovered_seconds:.1f} s"
        )
        place = "at others" if failed.figures.num_replicas > 1 else "when it is back"
        missed = f"misses {', '.join(failed.missed)}" if failed.missed else "all levels are kept"
        lines += [
            "",
            _line(
                "a failure",
                f"a replica ends after {failed.seconds:.0f} s: {failed.moved} requests go on {place}, up to {failed.longest_queue} wait, as few as before {recovered}; {missed}",
            ),
        ]
    if found.scale_up_seconds is not None:
        lines.append(
            _line("scaling", f"the levels are kept if a new replica takes requests within {found.scale_up_seconds:g} s")
        )
    return lines


def _changes(changes: list[Change]) -> list[str]:
    """What each flag is worth. Those that change nothing are one line."""
    lines = [
        f"{each.flag} {each.value}{' (taken)' if each.is_taken else ''}: ttft p99 {time(each.ttft_p99)}, itl p99 {time(each.itl_p99)}, "
        f"{each.output_rate:,.0f} tokens/s, {each.replicas} replicas; {each.note}"
        for each in changes
        if not each.is_same
    ]
    same: dict[str, list[str]] = {}
    for each in changes:
        if each.is_same:
            same.setdefault(each.flag, []).append(each.value)
    if same:
        lines.append("no difference: " + "; ".join(f"{flag} {', '.join(values)}" for flag, values in same.items()))
    return [_line("" if at else "other flags", text) for at, text in enumerate(lines)]


def _table(found: Answer) -> list[str]:
    lines = [f"{'':14}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}   p99 if steps take {found.error:.0%} less … more"]
    names = {"ttft": "first token", "itl": "inter-token", "tpot": "per token", "e2e": "end to end"}
    for measure, name in names.items():
        spread: Spread | None = getattr(found.figures, measure)
        if spread is None:
            continue
        cells = "".join(f"{time(value):>10}" for value in (spread.mean, spread.p50, spread.p90, spread.p99))
        low, high = (getattr(figures, measure) for figures in (found.best, found.worst))
        span = f"   {time(low.p99)} … {time(high.p99)}" if low is not None and high is not None else ""
        lines.append(f"{name:14}{cells}{span}")
    return lines


def _waits(figures: Figures) -> str:
    words = {"rows": "rows", "pages": "pages", "budget": "room in a step", "streams": "running streams"}
    parts = [f"{words[name]} {seconds:.1f} s" for name, seconds in figures.waits.items() if seconds >= 0.05]
    queue = figures.queue_seconds
    waited = (
        f"a row is there after {time(queue.mean)} on average, p99 {time(queue.p99)}"
        if queue is not None
        else "no request was admitted"
    )
    return waited + (f"; heads of queues waited for {', '.join(parts)}" if parts else "")


def time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _line(name: str, text: str) -> str:
    return f"{name:14}{text}"
