"""answer(): how many replicas keep the service levels, what they cost, how much room is left, and what breaks first."""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from octavo.errors import ConfigError
from octavo.plan.figures import Figures, Levels
from octavo.plan.fleet import Simulation, simulate
from octavo.plan.settings import Failure, FleetSettings
from octavo.plan.trace import Trace

MAX_REPLICAS = 4096
MOST_LOAD = 8.0  # times the load: beyond it, headroom is not looked for
CHART_LOADS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.2, 1.5, 2.0)
_ALONE = 200  # requests of a trace that are tried alone


class Load(msgspec.Struct, frozen=True):
    """What happens at so many times the load."""

    factor: float
    figures: Figures
    missed: list[str]  # levels, the worst first
    cause: str


class Change(msgspec.Struct, frozen=True):
    """What another value of one flag would be worth."""

    flag: str
    value: str
    good_share: float
    ttft_p99: float
    itl_p99: float
    output_rate: float
    note: str
    replicas: int = 0
    is_taken: bool = False
    is_same: bool = False  # no figure of the run changes


class Failed(msgspec.Struct, frozen=True):
    """What the end of a replica does."""

    seconds: float
    moved: int
    longest_queue: int
    recovered_seconds: float | None  # until no more requests wait than before; None: not before the trace ends
    figures: Figures
    missed: list[str]


class Answer(msgspec.Struct, frozen=True):
    replicas: int
    keeps_levels: bool
    figures: Figures
    best: Figures  # with steps that take less time, …
    worst: Figures  # … and more, by the model's error
    error: float
    headroom: float | None  # times the load that it still keeps the levels at; None: it keeps them at no load
    loads: list[Load]
    cost_per_million: float | None
    flags: list[str] = []  # for `octavo serve`
    max_num_seqs: int = 0
    changes: list[Change] = []
    failed: Failed | None = None
    scale_up_seconds: float | None = None


def cause_of(figures: Figures, missed: Sequence[str] = ()) -> str:
    """Why a fleet is at its limit, in words. `missed`: levels, the worst first."""
    refused = {name: count for name, count in figures.num_refused.items() if count}
    if refused:
        worst = max(refused, key=lambda name: refused[name])
        return {
            "queue_full": "the queue is full: requests are refused",
            "too_long": "requests are longer than the context",
        }.get(worst, worst)
    if figures.preemptions > max(2, figures.num_requests // 50):
        return f"KV pages run out: {figures.preemptions} preemptions"
    if figures.waits:
        reason = max(figures.waits, key=lambda name: figures.waits[name])
        if figures.waits[reason] > 0.02 * figures.seconds * figures.num_replicas:
            return {
                "rows": "all rows are taken (--max-num-seqs)",
                "pages": "KV pages run out: requests wait for memory",
                "budget": "steps are full (--max-num-batched-tokens)",
                "streams": "prompts wait beside running streams (--max-inter-token-ms)",
            }[reason]
    if missed and missed[0].startswith("itl"):
        return "steps with prompts hold up the streams beside them (--max-num-batched-tokens, --max-inter-token-ms)"
    return (
        f"steps take longer: {figures.mean_rows:.0f} rows on average"
        if figures.busy_share > 0.9
        else "single requests take that long"
    )


def load_of(factor: float, figures: Figures, levels: Levels) -> Load:
    missed = levels.missed(figures)
    missed.sort(key=lambda name: -figures.level(name) / levels.limits[name])
    if figures.refused_share > 0:
        missed.append("refused")
    return Load(factor, figures, missed, cause_of(figures, missed))


def is_kept(figures: Figures, levels: Levels) -> bool:
    return not levels.missed(figures) and not figures.num_refused.get("queue_full")


def check_possible(trace: Trace, settings: FleetSettings, levels: Levels) -> None:
    """Raise ConfigError where no number of replicas keeps the levels: a request alone does not."""
    alone = [each for each in trace.requests if not each.after_previous][:: max(1, len(trace.requests) // _ALONE)]
    gap = 10.0
    apart = [msgspec.structs.replace(each, seconds=gap * at, session=-1) for at, each in enumerate(alone)]
    while True:
        figures = simulate(
            msgspec.structs.replace(trace, requests=apart),
            msgspec.structs.replace(settings, num_replicas=1, max_replicas=0),
        )
        if figures.e2e is None or figures.e2e.p99 < gap / 2 or gap > 1e5:
            break
        gap *= 10
        apart = [msgspec.structs.replace(each, seconds=gap * at) for at, each in enumerate(apart)]
    if figures.num_done == 0:
        longest = max(each.prompt_len + each.output_len for each in alone)
        raise ConfigError(
            f"no request of the trace fits: the longest has {longest} tokens with its output, the context has {settings.replica.max_model_len}"
        )
    for name in levels.missed(figures):
        value, limit = figures.level(name), levels.limits[name]
        bound = "computing the prompts" if name.startswith(("ttft", "e2e")) else "reading the weights for each token"
        raise ConfigError(
            f"--slo {name}={_time(limit)}: no number of replicas keeps it. A request alone on one has {_time(value)}, bounded by {bound}; "
            f"ask for {name}={_time(value * 1.2)} or more, or take a faster chip, --tensor-parallel-size or --quantization"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 1 else f"{seconds * 1000:.3g}ms"


def fewest_replicas(trace: Trace, settings: FleetSettings, levels: Levels) -> tuple[int, Figures]:
    """The fewest replicas that keep the levels. Raises ConfigError if none does."""
    tried: dict[int, Figures] = {}

    def run(count: int) -> Figures:
        if count not in tried:
            tried[count] = simulate(trace, msgspec.structs.replace(settings, num_replicas=count), levels=levels)
        return tried[count]

    high = 1
    while not is_kept(run(high), levels):
        if high == 1:
            check_possible(trace, settings, levels)
        # A fleet of `high` is busy for so many replicas: more than that are needed.
        high = max(high + 1, min(2 * high, MAX_REPLICAS))
        if high > MAX_REPLICAS:
            raise ConfigError(
                f"--slo: {MAX_REPLICAS} replicas do not keep {', '.join(levels.missed(run(MAX_REPLICAS)))}"
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_kept(run(middle), levels):
            high = middle
        else:
            low = middle
    return high, run(high)


def headroom(trace: Trace, settings: FleetSettings, levels: Levels, rounds: int = 5) -> float | None:
    """How many times the load the fleet takes before it misses a level. Up to MOST_LOAD."""
    low, high = 0.0, 1.0
    while is_kept(simulate(trace.scaled(high), settings, levels=levels), levels):
        if high == MOST_LOAD:
            return high
        low, high = high, min(2 * high, MOST_LOAD)
    for _ in range(rounds):
        middle = (low + high) / 2
        if is_kept(simulate(trace.scaled(middle), settings, levels=levels), levels):
            low = middle
        else:
            high = middle
    return low or None


def knee_of(loads: Sequence[Load]) -> float | None:
    """The load from which on the first token takes three times as long as with little load: beyond it queues grow."""
    known = [(load.factor, load.figures.ttft.p99) for load in loads if load.figures.ttft is not None]
    if not known:
        return None
    least = known[0][1]
    return next((factor for factor, value in known if value > 3 * least), None)


def changes_of(
    trace: Trace, settings: FleetSettings, levels: Levels, note: Callable[[str], None]
) -> tuple[list[Change], FleetSettings]:
    """Try other values of flags, one after the other, and keep those that serve more requests within the levels. Returns what each is worth, and
    the best settings."""
    best = settings
    best_figures = simulate(trace, best, levels=levels)
    changes: list[Change] = []
    for flag, values in _candidates(settings).items():
        for value in values:
            changed = changed_by(best, flag, value)
            if changed is None or changed == best:
                continue
            note(f"{flag} {value}")
            figures = simulate(trace, changed, levels=levels)
            is_better = _rank(figures, levels) > _rank(best_figures, levels)
            changes.append(_change(flag, value, figures, best_figures, levels, is_better))
            if is_better:
                best, best_figures = changed, figures
    return changes, best


def ranks_changes(
    trace: Trace,
    settings: FleetSettings,
    levels: Levels,
    ranks: int,
    others: Mapping[int, FleetSettings],
    note: Callable[[str], None],
) -> list[Change]:
    """What replicas of other numbers of chips come to. `ranks`: chips of a replica now. `others`: settings by number."""
    changes = []
    now = simulate(trace, settings, levels=levels)
    for count, changed in others.items():
        note(f"--tensor-parallel-size {count}")
        try:
            replicas, figures = fewest_replicas(trace, changed, levels)
        except ConfigError:
            continue
        change = _change("--tensor-parallel-size", count, figures, now, levels, False)
        chips, before = replicas * count, settings.num_replicas * ranks
        said = f"{chips} chips instead of {before}" if chips != before else f"{chips} chips, as now"
        if chips < before:
            said += ": ask again with this flag"
        changes.append(msgspec.structs.replace(change, note=said, is_same=False))
    return changes


def _rank(figures: Figures, levels: Levels) -> tuple[float, float]:
    """Better is larger: requests within the levels; then the smallest room to a level."""
    room = min((1 - figures.level(name) / limit for name, limit in levels.limits.items()), default=0.0)
    return (round(figures.good_share, 3), round(room, 2))


def _change(flag: str, value: object, figures: Figures, before: Figures, levels: Levels, is_better: bool) -> Change:
    good = figures.good_share - before.good_share
    note = (
        f"{good:+.1%} of the requests within the levels"
        if abs(good) >= 0.001
        else "the same requests within the levels"
    )
    if missed := levels.missed(figures):
        note += f"; misses {', '.join(missed)}"
    if is_better:
        note += f"; without it: {cause_of(before, levels.missed(before))}"
    ttft, itl = figures.ttft, figures.itl
    return Change(
        flag,
        str(value),
        figures.good_share,
        ttft.p99 if ttft else math.nan,
        itl.p99 if itl else math.nan,
        figures.output_rate,
        note,
        figures.num_replicas,
        is_better,
        (figures.ttft, figures.itl, figures.e2e, figures.num_refused)
        == (before.ttft, before.itl, before.e2e, before.num_refused),
    )


def _candidates(settings: FleetSettings) -> dict[str, list[int | float | str]]:
    replica = settings.replica
    rows, tokens = replica.max_num_seqs, replica.max_num_batched_tokens
    found: dict[str, list[int | float | str]] = {
        "--max-num-seqs": [max(1, rows // 4), max(1, rows // 2), rows * 2],
        "--max-num-batched-tokens": [max(rows, tokens // 4), max(rows, tokens // 2), tokens * 2],
        "--max-inter-token-ms": ["auto", "off"],
        "--block-size": [8, 32, 64],
    }
    if settings.num_replicas > 1:
        found["--routing-policy"] = ["prefix", "least_work", "round_robin"]
    return found


def changed_by(settings: FleetSettings, flag: str, value: int | float | str) -> FleetSettings | None:
    """With another value of a flag. None: it has no room for the longest request."""
    replica = settings.replica
    match flag:
        case "--max-num-seqs":
            rows = int(value)
            tokens = max(replica.max_num_batched_tokens, rows)
            replica = msgspec.structs.replace(replica, max_num_seqs=rows, max_num_batched_tokens=tokens)
        case "--max-num-batched-tokens":
            replica = msgspec.structs.replace(replica, max_num_batched_tokens=max(int(value), replica.max_num_seqs))
        case "--max-inter-token-ms":
            replica = msgspec.structs.replace(replica, max_inter_token_ms=0.0 if value == "off" else value)
        case "--block-size":
            num_pages = replica.num_pages * replica.page_size // int(value)
            if num_pages * int(value) < replica.max_model_len:
                return None
            replica = msgspec.structs.replace(replica, page_size=int(value), num_pages=num_pages)
        case _:
            return msgspec.structs.replace(settings, routing_policy=str(value))
    return msgspec.structs.replace(settings, replica=replica)


def flags_of(settings: FleetSettings) -> list[str]:
    """The flags of `octavo serve` for these settings."""
    replica = settings.replica
    limit = replica.max_inter_token_ms
    flags = [
        f"--max-num-seqs {replica.max_num_seqs}",
        f"--max-num-batched-tokens {replica.max_num_batched_tokens}",
        f"--block-size {replica.page_size}",
        f"--max-inter-token-ms {limit if limit else 'off'}",
    ]
    if settings.num_replicas > 1:
        flags.append(f"--routing-policy {settings.routing_policy}")
    return flags


def when_one_fails(trace: Trace, settings: FleetSettings, levels: Levels, seconds: float) -> Failed:
    """A replica ends so many seconds after the start; −1: when most requests are open."""
    every = max(0.05, trace.seconds / 400)
    if seconds < 0:
        calm = Simulation(trace, settings, levels=levels, moments_every=every).run()
        seconds = max(
            calm.moments, key=lambda moment: (moment.num_running + moment.num_waiting, -moment.seconds)
        ).seconds
    result = Simulation(trace, settings, levels=levels, failures=[Failure(seconds)], moments_every=every).run()
    before = max((moment.num_waiting for moment in result.moments if moment.seconds <= seconds), default=0)
    after = [moment for moment in result.moments if moment.seconds > seconds]
    longest = max((moment.num_waiting for moment in after), default=0)
    peak = next((moment.seconds for moment in after if moment.num_waiting == longest), seconds)
    calm_again = next((m.seconds for m in after if m.seconds >= peak and m.num_waiting <= before), None)
    recovered = None if calm_again is None else calm_again - seconds
    return Failed(seconds, result.figures.moved, longest, recovered, result.figures, levels.missed(result.figures))


def slowest_start(trace: Trace, settings: FleetSettings, levels: Levels) -> float | None:
    """The longest time from the decision to add a replica to its first request at which a fleet that follows the load keeps the levels; None: not
    even a second is short enough."""
    found = None
    for seconds in (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0):
        figures = simulate(trace, msgspec.structs.replace(settings, start_seconds=seconds), levels=levels)
        if not is_kept(figures, levels):
            break
        found = seconds
    return found


def answer(
    trace: Trace,
    settings: FleetSettings,
    levels: Levels,
    *,
    replicas: int = 0,
    error: float = 0.1,
    price: float | None = None,
    searches: bool = False,
    fails_at: float | None = None,
    ranks: int = 1,
    other_ranks: Mapping[int, FleetSettings] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Answer:
    """`replicas`: so many; 0: the fewest that keep the levels. `error`: of step times, as a share. `price`: of a
    replica for an hour. `searches`: also try other flags; `ranks`, `other_ranks`: chips of a replica, and settings with
    other numbers of them. `fails_at`: when a replica ends; −1: at the peak; None: none does."""
    note("finding the number of replicas")
    is_fixed = bool(replicas)
    if replicas:
        settings = msgspec.structs.replace(settings, num_replicas=replicas)
        figures = simulate(trace, settings, levels=levels)
    else:
        replicas, figures = fewest_replicas(trace, settings, levels)
        settings = msgspec.structs.replace(settings, num_replicas=replicas)
    changes: list[Change] = []
    if searches:
        changes, better = changes_of(trace, settings, levels, note)
        if better != settings:
            settings, figures = better, simulate(trace, better, levels=levels)
            if not is_fixed and replicas > 1 and is_kept(figures, levels):
                note("finding the number of replicas again")
                replicas, figures = fewest_replicas(trace, settings, levels)
                settings = msgspec.structs.replace(settings, num_replicas=replicas)
        changes += ranks_changes(trace, settings, levels, ranks, other_ranks or {}, note)
    note("finding the headroom")
    room = headroom(trace, settings, levels)
    loads = []
    for factor in CHART_LOADS:
        note(f"load × {factor:g}")
        its = figures if factor == 1.0 else simulate(trace.scaled(factor), settings, levels=levels)
        loads.append(load_of(factor, its, levels))
    spans = [
        simulate(trace, msgspec.structs.replace(settings, model=settings.model.scaled(factor)), levels=levels)
        for factor in (1 / (1 + error), 1 + error)
    ]
    failed = None if fails_at is None else when_one_fails(trace, settings, levels, fails_at)
    delay = slowest_start(trace, settings, levels) if settings.max_replicas else None
    cost = None
    if price is not None and figures.output_rate:
        cost = price * replicas / (figures.output_rate * 3600) * 1e6
    return Answer(
        replicas, is_kept(figures, levels), figures, spans[0], spans[1], error, room, loads, cost, flags_of(settings),
        settings.replica.max_num_seqs, changes, failed, delay,
    )  # fmt: skip
