"""Rounds over all servers, one at a time on the whole machine, their order turned each round; medians, and ratios."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu.loads import Load
from benchmarks.cpu.rounds import QUIET, Patience, serve
from benchmarks.cpu.servers import DidNotStart, Server
from benchmarks.cpu.targets import MORE_IS_BETTER, TARGETS, Target
from benchmarks.gpu.show import Results, table

Rounds = Mapping[str, Sequence[dict[str, Any]]]
"""Server → figures of each of its rounds."""

_BUSY_CLIENT = 0.1  # of one core: above it, the client distorts the measurement


def run(
    servers: Sequence[Server],
    wanted: Sequence[Load],
    num_rounds: int,
    results: Results,
    *,
    patience: Patience | None = None,
    is_rehearsal: bool = False,
) -> int:
    """Returns how many servers or requests failed."""
    rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
    failures: list[str] = []
    said = {"loads": [dataclasses.asdict(load) for load in wanted], "remarks": {s.name: s.remark for s in servers}}
    for number in range(num_rounds):
        turned = [servers[(i + number) % len(servers)] for i in range(len(servers))]
        for server in turned:
            try:
                rounds[server.name].append(serve(server, wanted, number, patience or Patience()))
            except DidNotStart as error:
                failures.append(f"{server.name}, round {number + 1}: did not start: {error}")
                print(failures[-1], flush=True)
            results.put("compare", said | {"rounds": rounds, "failures": failures})
    failures += _failed_requests(rounds)
    verdicts = judge(servers, rounds)
    results.put("compare", said | {"rounds": rounds, "failures": failures, "verdicts": verdicts})
    print("\n" + show(servers, wanted, rounds))
    print("\n" + show_verdicts(verdicts, is_rehearsal))
    for line in [*_remarks(servers, rounds), *failures]:
        print(line)
    return len(failures)


# ── figures ─────────────────────────────────────────────────────────────────────────────────────────


def value(figures: dict[str, Any], load: str, measure: str) -> float | None:
    """Return one measure of one round; None where it failed."""
    match measure:
        case "start":
            return float(figures["start_s"])
        case "memory":
            return figures["memory_bytes"] / 1e9
        case "beyond":
            taken = figures.get("taken_bytes")  # which peers do not report
            return (figures["memory_bytes"] - 1.3 * taken["weights"] - taken["pages"]) / 1e6 if taken else None
    found = figures["loads"].get(load)
    if found is None or found["num_errors"] or not found["output_tokens"]:
        return None
    if measure == "rate":
        return float(found["output_tokens_per_second"])
    spread = found[f"{measure}_ms"]
    return float(spread["p50"]) if spread else None


def median(rounds: Sequence[dict[str, Any]], load: str, measure: str) -> float | None:
    values = [one for figures in rounds if (one := value(figures, load, measure)) is not None]
    return statistics.median(values) if values else None


def judge(servers: Sequence[Server], rounds: Rounds) -> list[dict[str, Any]]:
    """Return each target with the reached value; without a peer to compare with, a ratio is None."""
    known = {server.name for server in servers}
    return [_verdict(target, servers, rounds) for target in TARGETS if target.server in known]


def _verdict(target: Target, servers: Sequence[Server], rounds: Rounds) -> dict[str, Any]:
    more = MORE_IS_BETTER[target.measure]
    ours = median(rounds[target.server], target.load, target.measure)
    needs_float32 = next(server.is_float32 for server in servers if server.name == target.server)
    peers = {
        server.name: reached
        for server in servers
        if server.is_peer
        and (server.is_float32 or not needs_float32)
        and (reached := median(rounds[server.name], target.load, target.measure)) is not None
    }
    best = (max if more else min)(peers, key=lambda name: peers[name]) if peers else None
    ratio = None
    if best is not None and ours:
        ratio = ours / peers[best] if more else peers[best] / ours
    return target._asdict() | {
        "ours": ours,
        "best_peer": best,
        "theirs": peers[best] if best is not None else None,
        "ratio": ratio,
        "reaches_must": _reaches(target, target.must, ours, ratio),
        "reaches_aim": _reaches(target, target.aim, ours, ratio),
    }


def _reaches(target: Target, level: float, ours: float | None, ratio: float | None) -> bool | None:
    """None: there is no measurement to judge by."""
    if target.is_ratio:
        return None if ratio is None else ratio >= level
    return None if ours is None else ours <= level


# ── showing ─────────────────────────────────────────────────────────────────────────────────────────


def show(servers: Sequence[Server], wanted: Sequence[Load], rounds: Rounds) -> str:
    rows = []
    for server in servers:
        ours = rounds[server.name]
        cells = [_triple(*(median(ours, load.name, name) for name in ("rate", "ttft", "tpot"))) for load in wanted]
        start, memory = median(ours, "", "start"), median(ours, "", "memory")
        rows.append([server.name, *cells, _number(start, 2), _number(memory, 2)])
    titles = ("medians", *(load.name for load in wanted), "start, s", "memory, GB")
    return table(titles, rows) + "\noutput tokens/s (time to first token p50, time per output token p50, ms)"


def show_verdicts(verdicts: Sequence[dict[str, Any]], is_rehearsal: bool) -> str:
    rows = []
    for verdict in verdicts:
        limit = "{:g} ×" if verdict["is_ratio"] else "≤ {:g}"
        marks = ["" if is_rehearsal else _mark(verdict[f"reaches_{level}"]) for level in ("must", "aim")]
        rows.append(
            [
                verdict["title"],
                _number(verdict["ours"], 2),
                f"{verdict['best_peer']} {_number(verdict['theirs'], 2)}" if verdict["best_peer"] else "–",
                "–" if verdict["ratio"] is None else f"{verdict['ratio']:.2f} ×",
                f"{limit.format(verdict['must'])}{marks[0]}",
                f"{limit.format(verdict['aim'])}{marks[1]}",
            ]
        )
    text = table(("", "Octavo", "best peer", "times better", "must", "aim"), rows)
    return text + ("\na rehearsal: nothing here is a measurement" if is_rehearsal else "")


def _mark(is_met: bool | None) -> str:
    return " –" if is_met is None else " ✓" if is_met else " ✗"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _triple(rate: float | None, ttft: float | None, tpot: float | None) -> str:
    return "–" if rate is None else f"{rate:,.1f} ({_number(ttft, 0)}, {_number(tpot, 1)})"


def _failed_requests(rounds: Rounds) -> list[str]:
    return [
        f"{name}, round {at + 1}, {load}: {found['num_errors']} requests failed: {found['errors']}"
        for name, every in rounds.items()
        for at, figures in enumerate(every)
        for load, found in figures["loads"].items()
        if found["num_errors"]
    ]


def _remarks(servers: Sequence[Server], rounds: Rounds) -> list[str]:
    """Return what a reader must know before trusting the tables."""
    every = [(name, found) for name, many in rounds.items() for one in many for found in one["loads"].values()]
    lines = [f"{server.name}: {server.remark}" for server in servers if server.remark]
    for name in rounds:
        short = [
            found for whose, found in every if whose == name and found["output_tokens"] != found["expected_tokens"]
        ]
        if short:
            got, asked = (sum(found[key] for found in short) for key in ("output_tokens", "expected_tokens"))
            lines.append(f"{name}: {got} of {asked} tokens in {len(short)} runs; rates count the tokens received")
        if any(whose == name and found["token_counts_from"] == "chunks" for whose, found in every):
            lines.append(f"{name}: reports no usage; each chunk of text counts as a token")
    if every:
        client = max(found["client_share"] for _, found in every)
        others = sorted(found["others_share"] for _, found in every)
        busy = "" if client <= _BUSY_CLIENT else ": it distorts the measurement"
        lines.append(f"the client computed for at most {client:.0%} of one core's time{busy}")
        middle = statistics.median(others)
        noisy = "" if middle <= QUIET else ": the machine was not quiet, which affects servers unequally; measure again"
        lines.append(f"other processes took {middle:.0%} of the cores at the median, {others[-1]:.0%} at worst{noisy}")
    return lines
