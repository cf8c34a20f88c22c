"""Answers of several replicas to one question, merged into one that reads like a single engine's. Pages and rows are counted over all
replicas, in the order of their numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.messages import EngineReport, FleetState, PrefixReply
from octavo.observe.live_state import (
    LiveHistory,
    LiveLane,
    LiveLook,
    LivePast,
    LiveReplica,
    LiveRow,
    LiveState,
    LiveTotals,
)

OPEN_STATES = ("", "waiting", "running")  # of a journey; an engine's own part of one has none


class ReplicaAnswer(NamedTuple):
    replica: int
    report: EngineReport | None
    body: str


def merged_metrics(answers: Sequence[ReplicaAnswer]) -> str:
    """One text with every family once. Samples differ by their label `engine`."""
    families: dict[str, tuple[list[str], list[str]]] = {}  # name → its head, its samples
    for answer in answers:
        head: list[str] = []
        samples: list[str] = []
        for line in answer.body.splitlines():
            if line.startswith("# HELP "):
                head, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if not head:
                    head.append(line)
            elif line.startswith("# TYPE "):
                if len(head) == 1:
                    head.append(line)
            else:
                samples.append(line)
    return "".join(f"{line}\n" for head, samples in families.values() for line in (*head, *samples))


def merged_progress(answers: Sequence[ReplicaAnswer]) -> str:
    """A Progress (octavo/engine/progress.py) over all replicas; each is listed in `replicas`."""
    found = [(answer.replica, msgspec.json.decode(answer.body, type=dict[str, Any])) for answer in answers]
    merged = dict(found[0][1])
    for name in ("steps", "running", "waiting"):
        merged[name] = sum(progress[name] for _, progress in found)
    oldest = [progress["oldest_waiting"] for _, progress in found if progress["oldest_waiting"] is not None]
    merged["oldest_waiting"] = max(oldest, key=lambda quiet: quiet["seconds"], default=None)
    quiet = [each for _, progress in found for each in progress["without_progress"]]
    merged["without_progress"] = sorted(quiet, key=lambda each: -each["seconds"])[: len(quiet)]
    merged["page_problems"] = [
        f"replica {replica}: {problem}" for replica, progress in found for problem in progress["page_problems"]
    ]
    return msgspec.json.encode(merged).decode()


def merged_prefixes(answers: Sequence[ReplicaAnswer]) -> str:
    """All replicas hold the same prefixes. Of their tokens in the prefix cache, those of the replica that has most; an error of any."""
    replies = [msgspec.json.decode(answer.body, type=PrefixReply) for answer in answers]
    found = [each for reply in replies for each in zip(reply.owners, reply.pinned, strict=True)]
    found.sort(key=lambda each: each[1].cached_tokens)
    best = {(pin.name, owner): pin for owner, pin in found}
    names = sorted(best)
    error = next((reply.error for reply in replies if reply.error), "")
    merged = PrefixReply([best[name] for name in names], error, [owner for _, owner in names])
    return msgspec.json.encode(merged).decode()


class _Ended(msgspec.Struct):
    """When a journey was over. One that is not has no place among those."""

    state: str = ""
    received_at: float = 0.0
    seconds: float = 0.0

    @property
    def order(self) -> float:
        return 0.0 if self.state in OPEN_STATES else -(self.received_at + self.seconds)


def merged_journeys(answers: Sequence[ReplicaAnswer], limit: int) -> str:
    """Open ones first, then the latest. Several replicas have the journey of an ended request if another one keeps them
    since: it is the same in all."""
    found = dict.fromkeys(
        bytes(each) for answer in answers for each in msgspec.json.decode(answer.body, type=list[msgspec.Raw])
    )
    orders = {each: msgspec.json.decode(each, type=_Ended).order for each in found}
    ordered = sorted(found, key=lambda each: (orders[each] != 0.0, orders[each]))
    return msgspec.json.encode([msgspec.Raw(each) for each in ordered[:limit]]).decode()


def merged_live(answers: Sequence[ReplicaAnswer], seconds: Mapping[int, float], fleet: FleetState) -> str:
    """`seconds`: of work that wait at each replica."""
    looks = [(answer.replica, msgspec.json.decode(answer.body, type=LiveLook)) for answer in answers]
    states = [look.state for _, look in looks]
    rows: list[LiveRow] = []
    replicas: list[LiveReplica] = []
    first_row = first_page = 0
    known = {state.replica: state for state in fleet.replicas}
    for number, look in looks:
        state = look.state
        rows += [msgspec.structs.replace(row, row=row.row + first_row) for row in state.rows]
        seen = known.get(number)
        replicas.append(
            LiveReplica(
                replica=number,
                status="ready" if seen is None else seen.status,
                epoch=0 if seen is None else seen.epoch,
                restarts=0 if seen is None else seen.restarts,
                place="" if seen is None else seen.place,
                first_row=first_row,
                max_rows=state.max_rows,
                num_rows=len(state.rows),
                num_waiting=state.num_waiting,
                first_page=first_page,
                num_pages=state.num_pages,
                num_cached_pages=state.num_cached_pages,
                num_free_pages=state.num_free_pages,
                waiting_seconds=round(seconds.get(number, 0.0), 4),
                totals=state.totals,
            )
        )
        first_row += state.max_rows
        first_page += state.num_pages
    answered = {each.replica for each in replicas}
    replicas += [
        LiveReplica(each.replica, each.status, each.epoch, each.restarts, each.place)
        for each in fleet.replicas
        if each.replica not in answered
    ]
    first = states[0]
    advice = [f"replica {number}: {look.state.advice}" for number, look in looks if look.state.advice]
    merged = LiveState(
        time=max(state.time for state in states),
        step=sum(state.step for state in states),
        totals=_sum_totals([state.totals for state in states]),
        num_waiting=sum(state.num_waiting for state in states),
        rows=rows,
        waiting=[wait for state in states for wait in state.waiting],
        lanes=_merged_lanes(states),
        blocked_by=next((state.blocked_by for state in states if state.blocked_by is not None), None),
        advice="; ".join(advice),
        num_pages=first_page,
        page_size=first.page_size,
        max_rows=first_row,
        max_step_tokens=sum(state.max_step_tokens for state in states),
        num_host_pages=sum(state.num_host_pages for state in states),
        num_host_pages_used=sum(state.num_host_pages_used for state in states),
        num_shared_pages=sum(state.num_shared_pages for state in states),
        num_cached_pages=sum(state.num_cached_pages for state in states),
        num_free_pages=sum(state.num_free_pages for state in states),
        ended=[end for state in states for end in state.ended],
        recent=_merged_points([state.recent for state in states]),
        pages=b"".join(state.pages for state in states),
        replicas=sorted(replicas, key=lambda each: each.replica),
        num_held_pages=sum(state.num_held_pages for state in states),
        num_loading_pages=sum(state.num_loading_pages for state in states),
        num_tier_pages=sum(state.num_tier_pages for state in states),
        tier_bytes=sum(state.tier_bytes for state in states),
        num_ram_pages=sum(state.num_ram_pages for state in states),
        ram_tier_bytes=sum(state.ram_tier_bytes for state in states),
    )
    owners = LiveLook(
        merged,
        [owner for _, look in looks for owner in look.rows],
        [owner for _, look in looks for owner in look.waiting],
        [owner for _, look in looks for owner in look.ended],
    )
    return msgspec.json.encode(owners).decode()


def merged_history(answers: Sequence[ReplicaAnswer]) -> str:
    found = [msgspec.json.decode(answer.body, type=LiveHistory) for answer in answers]
    merged = LiveHistory(
        max(each.time for each in found),
        found[0].interval,
        min(each.since for each in found),
        _merged_points([each.points for each in found]),
    )
    return msgspec.json.encode(merged).decode()


def _sum_totals(totals: Sequence[LiveTotals]) -> LiveTotals:
    return LiveTotals(*(sum(values) for values in zip(*map(msgspec.structs.astuple, totals), strict=True)))


def _merged_lanes(states: Sequence[LiveState]) -> list[LiveLane]:
    lanes: dict[str, LiveLane] = {}
    for state in states:
        for lane in state.lanes:
            before = lanes.get(lane.name, LiveLane(lane.name, 0, 0.0))
            oldest = max(before.oldest_seconds, lane.oldest_seconds)
            lanes[lane.name] = LiveLane(lane.name, before.count + lane.count, oldest)
    return [*lanes.values()]


def _merged_points(histories: Sequence[Sequence[LivePast]]) -> list[LivePast]:
    """Sums of each interval; the share of used pages is the mean over the replicas that were active in it."""
    points: dict[float, list[LivePast]] = {}
    for history in histories:
        for point in history:
            points.setdefault(point.time, []).append(point)
    merged = []
    for when in sorted(points):
        same = points[when]
        _, *sums = (sum(values) for values in zip(*map(msgspec.structs.astuple, same), strict=True))
        point = LivePast(when, *sums)
        merged.append(msgspec.structs.replace(point, used_share=round(point.used_share / len(same), 4)))
    return merged
