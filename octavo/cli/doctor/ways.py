"""The ways in which `octavo doctor --determinism` runs the same requests: their arrivals and the engines' settings."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.cache.span import pages_of
from octavo.messages import EngineReport, SamplingParams

_SEED = 20
# Around pages of 16 and tiles of 64; one above 256, where a GPU's attention is split.
_PROMPT_LENS = (1, 2, 15, 16, 300, 33, 64, 65, 17, 90)
_LITTLE_STEP = 64  # tokens per step in the settings with few pages
_STEM_LEN = 48  # length of the prefix that some prompts share
_NUM_TOKENS = 24  # output tokens of every request
_BATCHES = (2, 17, 64)
_STRANGER = SamplingParams(temperature=1.0, max_tokens=6, seed=7, ignore_eos=True)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `number`: its number among the compared requests; −1: a stranger, which only fills the batch."""

    number: int
    kind: str
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives before the engine's step number `step` of its group."""

    step: int
    ask: Ask


Group = list[Arrival]
"""Requests that run together: the engine is idle before and after."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    groups: list[Group]
    keeps_prefixes: bool = False  # keep what earlier groups left in the prefix cache
    must: str = ""  # counter that must grow, or the way proves nothing: "preemptions", "hit_tokens"


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine's settings, and the ways to try with it."""

    name: str
    ways: list[Way]
    options: dict[str, Any] = field(default_factory=dict)


def make_asks(report: EngineReport) -> list[Ask]:
    """The compared requests: prompts of many lengths, some with a common prefix, with every kind of sampling."""
    rng = random.Random(_SEED)
    most = report.max_model_len - _NUM_TOKENS
    stem = [rng.randrange(report.vocab_size) for _ in range(_STEM_LEN)]
    asks = []
    for number, length in enumerate(_PROMPT_LENS):
        own = [rng.randrange(report.vocab_size) for _ in range(length)]
        prompt = (stem + own if number % 3 == 0 else own)[-max(1, most) :]
        kind = list(KINDS)[number % len(KINDS)]
        params = {"seed": 100 + number, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "logprobs": 3}
        asks.append(Ask(number, kind, prompt, _changed(KINDS[kind], **params)))
    return asks


def _changed(params: SamplingParams, **values: Any) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(params, **values)


def alone(asks: Sequence[Ask]) -> list[Group]:
    return [[Arrival(0, ask)] for ask in asks]


def together(asks: Sequence[Ask]) -> list[Group]:
    return [[Arrival(0, ask) for ask in asks]]


def in_batches(asks: Sequence[Ask], report: EngineReport) -> list[Group]:
    """Mix the requests with strangers, so that steps have two, some and many rows. The mixture is random."""
    rng = random.Random(_SEED + 1)
    rest, groups = list(asks), list[Group]()
    rng.shuffle(rest)
    for size in itertools.cycle(_BATCHES):
        if not rest:
            return groups
        mine = [rest.pop() for _ in range(min(len(rest), max(1, size // 4)))]
        strangers = [_stranger(rng, report) for _ in range(min(size, report.max_num_seqs) - len(mine))]
        everybody = [*mine, *strangers]
        rng.shuffle(everybody)
        groups.append([Arrival(0, ask) for ask in everybody])
    raise AssertionError("batches never end")


def one_by_one(asks: Sequence[Ask]) -> list[Group]:
    """In reverse order, each a few steps after the one before: prefills and decodes share steps."""
    return [[Arrival(3 * place, ask) for place, ask in enumerate(reversed(asks))]]


def _stranger(rng: random.Random, report: EngineReport) -> Ask:
    length = rng.randint(1, max(1, min(40, report.max_model_len - (_STRANGER.max_tokens or 0))))
    return Ask(-1, "sampled", [rng.randrange(report.vocab_size) for _ in range(length)], _STRANGER)


def settings(asks: Sequence[Ask], report: EngineReport) -> list[Setting]:
    """The settings of all engines but the first, which has the user's configuration."""
    every = together(asks)
    longest = max(len(ask.prompt) for ask in asks) + _NUM_TOKENS
    max_model_len = min(report.max_model_len, longest + report.page_size)
    # Pages for little more than the longest request: as outputs grow, others are preempted again and again. Steps are small,
    # because pages out of a window are freed after a step, and must not be enough for all other requests.
    step_tokens = min(report.max_num_batched_tokens, max(_LITTLE_STEP, report.max_num_seqs))
    num_pages = pages_of(max_model_len, report.page_size, report.windows, step_tokens)
    little = {
        "kv_cache_memory_bytes": num_pages * report.page_bytes,
        "max_num_batched_tokens": step_tokens,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,
    }
    found = [
        Setting("a restart", [Way("after a restart, one at a time", alone(asks))]),
        Setting(
            "small chunks",
            [Way("prompts in chunks of 13 tokens", every)],
            {"max_num_batched_tokens": 13, "max_num_seqs": 4},
        ),
        Setting("few pages", [Way("preempted, computed again", every, must="preemptions")], little),
        Setting(
            "few pages, swapped",
            [Way("preempted, swapped out and in", every, must="preemptions")],
            little | {"swap_space": 0.05},
        ),
        Setting("no prefixes", [Way("without prefix caching", every)], {"enable_prefix_caching": False}),
        Setting("pages", [Way("with pages of twice the size", every)], {"page_size": 2 * report.page_size}),
        Setting("step by step", [Way("operation by operation", every)], {"enforce_eager": True}),
    ]
    if report.memory is not None:  # on a GPU
        return found
    for count in (1, 3):
        threads = f"with {count} compute thread{'s' if count > 1 else ''}"
        found.append(Setting(threads, [Way(threads, every)], {"cpu_threads": count}))
    return [*found, Setting("pinned", [Way("with threads bound to cores", every)], {"cpu_pinning": True})]
