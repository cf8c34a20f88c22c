"""Measures prefixes that come back from pinned memory to a GPU: `python -m benchmarks.gpu.tiers --model llama-3.1-8b`.

Three figures, each beside its bound:
  first token   of a prompt of --tokens: computed, and with its pages in pinned memory                                  at most 1/6
  transfer      bytes a second of such a load, beside one copy of as many bytes from pinned memory, in turn             at least 75 %
  neighbours    p99 between the tokens of --rows streams: while other prefixes load, and while none does, in turn       at most +5 %

Before each load the prefix cache of the GPU is emptied; the tier is not. Weights are random if the folder has none."""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.subject import MODELS, NO_DRAFTS, gpu_facts, known_models
from octavo import LLM, SamplingParams
from octavo.cli.bench.report import percentile
from octavo.messages import GenerateRequest
from octavo.messages.tiers import Loaded

STREAM_TOKENS = 2000  # that each neighbour is to get
QUIET_STEPS = 10  # before each load


class Subject:
    """An engine with a tier in pinned memory."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tokens, self.rows = arguments.tokens, arguments.rows
        folder = MODELS / arguments.model if arguments.model in known_models() else arguments.model
        context = max(arguments.tokens, STREAM_TOKENS) + 1024
        # Room for the prompt, a part of a second one, and the streams.
        tokens_held = int(1.3 * arguments.tokens) + arguments.rows * (STREAM_TOKENS + 128)
        started = time.perf_counter()
        self.llm = LLM(
            str(folder),
            device=arguments.device,
            load_format=arguments.load_format,
            speculative_config=NO_DRAFTS,
            max_model_len=context,
            max_num_seqs=max(arguments.rows + 2, 8),
            kv_cache_memory_bytes=tokens_held * arguments.token_bytes,
            kv_tier=arguments.tier,
        )
        self.start_seconds = time.perf_counter() - started
        tier = self.llm._loop.tier
        assert tier is not None
        self.loop, self.tier = self.llm._loop, tier
        self._number = 0
        self._vocabulary = min(30_000, self.llm.report.vocab_size - 1)

    def prompt(self, seed: int, count: int) -> list[int]:
        dice = random.Random(seed)
        return [dice.randrange(5, self._vocabulary) for _ in range(count)]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        self._number += 1
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, seed=1)
        name = f"r{self._number}"
        self.loop.add(GenerateRequest(name, prompt, params, []))
        return name

    def first_token(self, prompt: list[int]) -> tuple[float, int, int]:
        """(seconds, the token, prompt tokens that were found)."""
        started = time.perf_counter()
        name = self.add(prompt, 1)
        while True:
            for delta in self.loop.step():
                if delta.request_id == name and delta.finish is not None:
                    return time.perf_counter() - started, delta.token_ids[0], delta.finish.num_cached_tokens

    def forget(self) -> None:
        """Empty the GPU's prefix cache, when what it holds is stored. The tier keeps its pages."""
        self.settle()
        self.loop.scheduler.cache.reset_prefixes()

    def settle(self, most: float = 20.0) -> None:
        """Until everything that is to be stored is stored."""
        end = time.perf_counter() + most
        while time.perf_counter() < end:
            self.tier.offer(0)
            if not self.tier._copying:
                return
            self.tier.take(0.02)


def measure_first_tokens(subject: Subject, rounds: int) -> dict[str, Any]:
    cold: list[float] = []
    warm: list[float] = []
    shares: list[float] = []
    is_same = True
    prompts = [subject.prompt(seed, subject.tokens) for seed in range(2)]
    expected = []
    for prompt in prompts:  # kernels are compiled, and both are stored
        expected.append(subject.first_token(prompt)[1])
        subject.forget()
    loaded_before = subject.tier.stats.ram_loaded_pages
    for number in range(rounds):
        fresh = subject.prompt(1000 + number, subject.tokens)
        seconds, _, found = subject.first_token(fresh)
        assert not found
        cold.append(seconds)
        subject.forget()
        for at, prompt in enumerate(prompts):
            seconds, token, found = subject.first_token(prompt)
            is_same &= token == expected[at]
            warm.append(seconds)
            shares.append(found / subject.tokens)
            subject.forget()
    loaded = subject.tier.stats.ram_loaded_pages - loaded_before
    all_loaded = loaded >= 0.95 * len(warm) * subject.tokens / subject.llm.report.page_size
    ratio = statistics.median(warm) / statistics.median(cold)
    return {
        "computed, ms": round(statistics.median(cold) * 1e3, 1),
        "from pinned memory, ms": round(statistics.median(warm) * 1e3, 1),
        "ratio": round(ratio, 4),
        "least share of the prompt that was loaded": round(min(shares), 4),
        "same token": is_same,
        "target": "≤ 0.1667",
        "pages loaded": loaded,
        "met": ratio <= 1 / 6 and min(shares) > 0.95 and all_loaded and is_same,
    }


def measure_transfer(subject: Subject, rounds: int) -> dict[str, Any]:
    import torch

    transfer = subject.tier._mover._memory  # type: ignore[attr-defined]
    ram = subject.tier._mover._ram  # type: ignore[attr-defined]
    keys = list(ram._slots)[: subject.tokens // subject.llm.report.page_size]
    num_bytes = len(keys) * transfer.page_bytes
    pages = subject.loop.scheduler.cache.begin_load(10**6, [], len(keys))
    assert pages is not None, "the store is idle"
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=subject.llm.report.memory is not None)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=transfer._device.torch_device)
    loads: list[float] = []
    copies: list[float] = []
    mover = subject.tier._mover
    for _ in range(rounds + 1):
        started = time.perf_counter()
        mover.load(10**6, keys, pages)
        event = mover.events.get(timeout=60)
        assert isinstance(event, Loaded) and event.count == len(keys), event
        loads.append(time.perf_counter() - started)
        transfer._device.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        transfer._device.synchronize()
        copies.append(time.perf_counter() - started)
    subject.loop.scheduler.cache.end_load(10**6, len(keys), [])
    load, copy = statistics.median(loads[1:]), statistics.median(copies[1:])
    return {
        "bytes": num_bytes,
        "load, GB/s": round(num_bytes / load / 1e9, 2),
        "one pinned copy, GB/s": round(num_bytes / copy / 1e9, 2),
        "share": round(copy / load, 4),
        "target": "≥ 0.75",
        "met": copy / load >= 0.75,
    }


def measure_neighbours(subject: Subject, rounds: int) -> dict[str, Any]:
    """Streams run all the time. Now and then a request comes whose prefix is in pinned memory: steps that end while it loads, and as many before."""
    loop, tier = subject.loop, subject.tier
    prompts = [subject.prompt(seed, subject.tokens) for seed in range(2)]
    streams = {subject.add(subject.prompt(5000 + number, 64), STREAM_TOKENS) for number in range(subject.rows)}
    gaps: dict[str, list[float]] = {"quiet": [], "loading": []}
    num_loads, loaded_before, is_over = 0, tier.stats.ram_loaded_pages, False
    slower: list[
        list[float]
    ] = []  # prompts that are not loaded: seconds that computing and loading were foreseen to take

    def step() -> float:
        """Seconds of a step that gives every stream a token."""
        nonlocal is_over
        started = time.perf_counter()
        deltas = loop.step()
        is_over = is_over or any(delta.finish is not None and delta.request_id in streams for delta in deltas)
        return time.perf_counter() - started

    for _ in range(60):
        step()
    while num_loads < rounds and not is_over:
        gaps["quiet"] += [step() for _ in range(QUIET_STEPS)]
        num_slower = tier.stats.slower
        name = subject.add(prompts[num_loads % 2], 1)
        if tier.stats.slower > num_slower:
            pages = subject.tokens // subject.llm.report.page_size
            foreseen = (tier._compute_seconds(0, pages), pages * tier._page_seconds["ram"])
            slower.append([round(seconds, 4) for seconds in foreseen])
        while tier.num_held:
            seconds = step()
            if tier.num_held:  # else the step has taken in the request, and computes the end of its prompt
                gaps["loading"].append(seconds)
        num_loads += 1
        while loop.has(name) and not is_over:
            step()
        loop.scheduler.cache.reset_prefixes()
        for _ in range(3):
            step()
    loaded = tier.stats.ram_loaded_pages - loaded_before
    if not gaps["loading"]:
        return {
            "loads": num_loads,
            "pages loaded": loaded,
            "met": False,
            "why": "no step ended while a prefix was loaded",
        }
    p50, p99 = ([percentile(sorted(values), percent) * 1e3 for values in gaps.values()] for percent in (50, 99))
    return {
        "streams": subject.rows,
        "loads": num_loads,
        "pages loaded": loaded,
        "foreseen to be slower (computing, loading), s": slower,
        "p50 of a step, ms: quiet, loading": [round(value, 3) for value in p50],
        "p99 of a step, ms: quiet, loading": [round(value, 3) for value in p99],
        "steps: quiet, loading": [len(values) for values in gaps.values()],
        "ratio of p99": round(p99[1] / p99[0], 4),
        "target": "≤ 1.05",
        "met": p99[1] / p99[0] <= 1.05 and loaded >= 0.9 * num_loads * subject.tokens // subject.llm.report.page_size,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help=f"{', '.join(known_models())}, or a folder")
    add("--load-format", default="dummy", help="auto: the folder's weights")
    add("--device", default="cuda")
    add("--tokens", type=int, default=16384, help="of the prefix")
    add("--token-bytes", type=int, default=131_072, help="of a token's keys and values")
    add("--rows", type=int, default=16, help="streams beside the loads")
    add("--rounds", type=int, default=5)
    add("--loads", type=int, default=60, help="beside the streams")
    add("--tier", default="ram:16GiB", help="--kv-tier")
    arguments = parser.parse_args(argv)
    subject = Subject(arguments)
    print(f"started in {subject.start_seconds:.1f} s", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"machine": gpu_facts(), "model": arguments.model, "tokens": arguments.tokens}
    for name, measured in (
        ("first token", lambda: measure_first_tokens(subject, arguments.rounds)),
        ("transfer", lambda: measure_transfer(subject, arguments.rounds)),
        ("neighbours", lambda: measure_neighbours(subject, arguments.loads)),
    ):
        found[name] = measured()
        print(name, json.dumps(found[name], ensure_ascii=False), file=sys.stderr, flush=True)
    found["tier"] = {
        name: getattr(subject.tier.stats, name)
        for name in ("loads", "ram_loaded_pages", "ram_stored_pages", "late", "slower")
    }
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
