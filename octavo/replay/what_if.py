"""What-if: what a recording says about each request, and a clock fitted to its steps, to run the requests again with other settings
(simulate.py).

Plans are exact for the settings; times are an estimate, and requests arrive at their recorded times on that estimated clock. A
request produces the tokens that it produced; one that was open when the recording ended stops there."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from octavo.cache import eviction
from octavo.config import AUTO
from octavo.errors import ConfigError
from octavo.messages import Candidates, FinishReason, GenerateRequest
from octavo.recording.format import Aborted, Arrived, Recording
from octavo.replay.replay import Replay, ReplayedCommit, ReplayedPlan
from octavo.replay.stats import RunStats
from octavo.schedule import POLICIES
from octavo.schedule.step_costs import Sample, StepCosts, fit, shape_of


class ScheduleSettings(msgspec.Struct, frozen=True):
    """The settings that a plan depends on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    num_host_pages: int
    enable_prefix_caching: bool
    scheduling_policy: str
    max_inter_token_ms: float | str  # 0: no limit
    fairness: bool = False  # between the tenants of the recorded requests
    prefix_eviction: str = "lru"

    @classmethod
    def of(cls, recording: Recording) -> "ScheduleSettings":
        report = recording.header.report
        return cls(
            report.max_num_seqs,
            report.max_num_batched_tokens,
            report.num_pages,
            report.num_host_pages,
            bool(recording.header.options["cache"]["enable_prefix_caching"]),
            report.scheduling_policy,
            report.max_inter_token_ms,
            report.is_fair,
            report.prefix_eviction,
        )

    def changed(self, texts: list[str]) -> "ScheduleSettings":
        """With changes as NAME=VALUE, where NAME is a flag's. Raises ConfigError."""
        values = {}
        for text in texts:
            name, equals, value = text.partition("=")
            name = name.strip().lstrip("-").replace("-", "_")
            if name not in self.__struct_fields__ or not equals:
                names = ", ".join(self.__struct_fields__)
                raise ConfigError(f"--what-if {text}: give NAME=VALUE, where NAME is one of {names}")
            values[name] = _value_of(name, value.strip(), text)
        changed = msgspec.structs.replace(self, **values)
        if changed.fairness and changed.scheduling_policy != "fcfs":
            raise ConfigError(
                "--what-if fairness=on serves the requests of one key in order of arrival: leave priority out"
            )
        return changed


_WORDS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def _value_of(name: str, value: str, text: str) -> float | str | bool:
    if name in ("enable_prefix_caching", "fairness"):
        if value.lower() not in _WORDS:
            raise ConfigError(f"--what-if {text}: {name} is on or off")
        return _WORDS[value.lower()]
    if name == "scheduling_policy":
        if value not in POLICIES:
            raise ConfigError(f"--what-if {text}: {name} is one of {', '.join(POLICIES)}")
        return value
    if name == "prefix_eviction":
        if value not in eviction.POLICIES:
            raise ConfigError(f"--what-if {text}: {name} is one of {', '.join(eviction.POLICIES)}")
        return value
    if name == "max_inter_token_ms":
        return _milliseconds(value, text)
    least = 0 if name == "num_host_pages" else 1
    if not value.isdecimal() or not least <= int(value) < 2**31:
        raise ConfigError(f"--what-if {text}: {name} is a whole number of at least {least}")
    return int(value)


def _milliseconds(value: str, text: str) -> float | str:
    if value == AUTO:
        return value
    try:
        number = 0.0 if value == "off" else float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"--what-if {text}: max_inter_token_ms is a number of milliseconds, auto or off")
    return number


# ── what the recording holds of each request ────────────────────────────────────────────────────────


@dataclasses.dataclass
class RecordedRequest:
    """A recorded request: when it came, what it produced, how it ended."""

    source: GenerateRequest
    seconds: float
    outputs: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # by choice, all of them
    ends: dict[int, FinishReason] = dataclasses.field(default_factory=dict)
    beams: dict[tuple[int, int], Candidates] = dataclasses.field(default_factory=dict)  # by (place, length)
    left: float | None = None  # when its client left, or its max_queue_ms was over
    was_waiting: bool = False  # … the latter: it leaves only if it has no row by then


class Learned(NamedTuple):
    requests: list[RecordedRequest]  # in the order of their arrival
    keys: dict[tuple[int, int], bytes]
    tally: RunStats  # of the recorded run
    samples: list[Sample]  # one of each step
    depth: int  # plans in flight while the next is made …
    overlap_rows: int  # … where the last one has at least so many rows: a CPU's smaller steps are waited for
    start: float
    replay: Replay


def learn(recording: Recording, watch: Callable[[object], None] = lambda happening: None) -> Learned:
    """Replay the recording and collect what a simulation needs. Stops at the first plan that differs."""
    replay, tally = Replay(recording), RunStats()
    start = recording.header.clock
    requests = {name: _open_at_start(replay, name, start) for name in replay.scheduler.request_ids()}
    for name, one in requests.items():
        tally.arrived(name, start)
        if any(one.source.begun):
            tally.left(name)  # it has its first token already
    preemptions = replay.scheduler.num_preemptions
    queried, hit = replay.cache.queried_tokens, replay.cache.hit_tokens
    samples: list[Sample] = []
    for happening in replay.follow():
        match happening:
            case Arrived():
                requests[happening.id] = RecordedRequest(replay.sources.pop(happening.id), happening.micros / 1e6)
                tally.arrived(happening.id, happening.micros / 1e6)
            case Aborted():
                _note_abort(requests[happening.id], happening)
                if happening.index < 0:
                    tally.left(happening.id)
            case ReplayedPlan():
                tally.planned(replay.scheduler, happening.plan)
            case ReplayedCommit():
                _note_outcome(requests, happening)
                seconds = happening.outcome.micros / 1e6
                tally.gave(happening.deltas, happening.micros / 1e6)
                tally.seconds += seconds
                samples.append(Sample(shape_of(happening.plan, happening.outcome.num_tokens), seconds))
        watch(happening)
    tally.end(replay.scheduler, preemptions)
    tally.queried_tokens = replay.cache.queried_tokens - queried
    tally.hit_tokens = replay.cache.hit_tokens - hit
    return Learned(
        list(requests.values()),
        replay.cache.known,
        tally,
        samples,
        min(replay.most_in_flight, 1),
        replay.overlap_rows,
        start,
        replay,
    )


def _open_at_start(replay: Replay, name: str, start: float) -> RecordedRequest:
    """A request that was open when the recording began."""
    choices = replay.scheduler.choices(name)
    one = choices[0]
    begun: list[list[int] | None] = [None] * one.params.n
    for choice in choices:
        begun[choice.index] = choice.tokens[choice.prompt_len :]
    if one.params.use_beam_search or not any(begun):
        begun = []
    source = GenerateRequest(
        name, one.tokens[: one.prompt_len], one.params, one.stop_ids, pooling=one.pooling, needs_one_step=one.needs_one_step,
        begun=begun, priority=0 if one.tenant is not None else one.rank,
        response_id=one.response_id,
        tenant=0 if one.tenant is None else one.tenant.number,
        weight=1.0 if one.tenant is None else one.tenant.weight,
    )  # fmt: skip
    recorded = RecordedRequest(source, start)
    recorded.outputs = {choice.index: choice.tokens[choice.prompt_len :] for choice in choices}
    return recorded


def _note_abort(recorded: RecordedRequest, record: Aborted) -> None:
    """A client that left leaves at its recorded time. A choice that a stop string ended, or that was aborted alone, ends with as many
    tokens as it had."""
    if record.index < 0 and record.reason != "stop":
        recorded.left, recorded.was_waiting = record.micros / 1e6, record.reason == "error"


def _note_outcome(requests: dict[str, RecordedRequest], happening: ReplayedCommit) -> None:
    for delta in happening.deltas:
        one = requests[delta.request_id]
        if not one.source.params.use_beam_search:
            one.outputs.setdefault(delta.index, []).extend(delta.token_ids)
        if delta.finish is not None:
            one.ends[delta.index] = delta.finish.reason
    for (name, place, length), candidates in happening.candidates.items():
        requests[name].beams[place, length] = candidates


# ── the clock ───────────────────────────────────────────────────────────────────────────────────────


def pace_of(samples: list[Sample]) -> StepCosts:
    """The costs that fit the recorded steps best: a second counts as much in a short step as in a long one."""
    return fit([(sample, 1.0) for sample in samples])
